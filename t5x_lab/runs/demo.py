"""`t5x_lab demo`: trains a vocabulary and a small causal decoder, compares it with a unigram model and writes a report."""

import os
import shutil
import sys
import time

import numpy as np
from etils import epath

from t5x_lab.checkpoints.layout import finished_steps
from t5x_lab.config.json_files import read_dictionary, write_json
from t5x_lab.config.log import log
from t5x_lab.config.object_storage import check_local
from t5x_lab.observe.curves import REFERENCES
from t5x_lab.observe.metrics import read_metrics
from t5x_lab.report.page import FILE
from t5x_lab.runs.config.gin_config import GinConfig
from t5x_lab.runs.data_layer import load_data_layer
from t5x_lab.runs.train.train import train

RECIPE = "recipes/demo.gin"
TASK = "sotu_full_lm"
PIECES = 4000


def demo(model_dir: str, steps: int | None = None) -> None:
    """Runs the demo in `model_dir`, or continues an interrupted one."""
    start = time.monotonic()
    check_local("The directory of the demo", model_dir)
    model_dir = os.path.abspath(model_dir)
    vocabulary = os.path.join(model_dir, "vocabulary.model")
    bindings = [f'MODEL_DIR = "{model_dir}"', f'SentencePieceVocabulary.path = "{vocabulary}"']
    if steps is not None:
        bindings += [f"TRAIN_STEPS = {steps}", f"LearningRate.decay_factor = {_decay_factor(steps)}"]

    log("1. Train a vocabulary of 4,000 pieces on the annual messages of US presidents, 1790 to 2026.")
    load_data_layer()
    if not os.path.exists(vocabulary):
        _train_vocabulary(vocabulary)
    config = GinConfig([RECIPE], bindings)
    log("2. Compute the loss of a unigram model as a reference. Speeches of years that end in 7 are held out.")
    unigram = _read_unigram_loss(config, epath.Path(model_dir) / REFERENCES)
    log("3. Pre-train a causal decoder. It prints samples during training.")
    train(config)
    first, last = _losses(model_dir)
    step = finished_steps(model_dir)[-1]
    command = "t5x_lab" if shutil.which("t5x_lab") else os.path.join(os.path.dirname(sys.executable), "t5x_lab")
    log(
        f"\nThe loss on held-out speeches is {last:.2f} nats per token. At the start it was {first:.2f}; a unigram model has "
        f"{unigram:.2f}.\nOpen {os.path.join(model_dir, FILE)} for curves, evaluations and samples.\n"
        f"The demo took {(time.monotonic() - start) / 60:.1f} minutes. Continue with:\n"
        f'  {command} generate --model_dir={model_dir} --prompt="The people" --temperature=0.7\n'
        f"  {command} eval --model_dir={model_dir} --step=all\n"
        f"  {command} train --gin_file={model_dir}/config.gin --gin.TRAIN_STEPS={2 * step} "
        f"--gin.LearningRate.decay_factor={_decay_factor(2 * step)}"
    )


def _decay_factor(steps: int) -> float:
    """Returns the decay factor with which the learning rate falls from its maximum at step 100 to zero at the last step."""
    return round(1 / max(steps - 100, 1), 7)


def _train_vocabulary(path: str) -> None:
    from t5x_lab.data.config import DataConfig
    from t5x_lab.data.tasks.names import documents
    from t5x_lab.data.vocabularies.config import ByteVocabulary
    from t5x_lab.data.vocabularies.sentencepiece import train_sentencepiece

    train_sentencepiece(documents(DataConfig(TASK, {"targets": 1}, 1, ByteVocabulary(), shards=1)), path, PIECES)


def _read_unigram_loss(config: GinConfig, path: epath.Path) -> float:
    """Returns the loss of the unigram model, computed once and stored for the plots and the report."""
    name = "unigram model"
    loss = read_dictionary(path).get("loss", {}).get(name)
    if loss is None:
        loss = unigram_loss(config)
        write_json(path, {"loss": {name: loss}})
    return loss


def unigram_loss(config: GinConfig) -> float:
    """Returns the cross-entropy of held-out tokens under add-one unigram frequencies of the training text, in nats."""
    load_data_layer()
    from t5x_lab.data.pipeline.evaluation_batches import eval_batches
    from t5x_lab.data.tasks.mixture import resolve_mixture
    from t5x_lab.data.tasks.names import documents

    data = config.data()
    tasks = resolve_mixture(data, "causal_decoder")
    vocabulary = tasks.vocabulary
    counts = np.ones(vocabulary.vocab_size)
    for text in documents(data):
        ids = [*vocabulary.encode(text), vocabulary.eos_id]
        counts += np.bincount(ids, minlength=len(counts))
    nats = -np.log(counts / counts.sum())
    total = tokens = 0.0
    for batch in eval_batches(tasks, tasks.components[0], data):
        weights = batch["decoder_loss_weights"]
        total += float((nats[batch["decoder_target_tokens"]] * weights).sum())
        tokens += float(weights.sum())
    return total / tokens


def _losses(model_dir: str) -> tuple[float, float]:
    """Returns the training loss of the first step and the latest held-out loss."""
    lines = read_metrics(model_dir)
    held_out = [line["loss"] for line in lines if line["split"] == f"eval/{TASK}"]
    return next(line["loss"] for line in lines if line["split"] == "train"), held_out[-1]
