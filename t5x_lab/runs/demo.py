"""The demo: a vocabulary, a unigram model to compare with, pre-training, and its report."""

import os
import shutil
import sys
import time

import numpy as np
from etils import epath

from t5x_lab.checkpoints.layout import finished_steps
from t5x_lab.config.json_files import read_dictionary, write_json
from t5x_lab.data.environment import check_environment
from t5x_lab.observe.console import say
from t5x_lab.observe.curves import REFERENCES
from t5x_lab.observe.metrics import read_metrics
from t5x_lab.report.page import FILE
from t5x_lab.runs.config import GinConfig
from t5x_lab.runs.train import train

RECIPE = "recipes/demo.gin"
TASK = "sotu_full_lm"
PIECES = 4000


def demo(model_dir: str, steps: int | None = None) -> None:
    """Runs everything into `model_dir` and says where it is; continues an interrupted demo."""
    began = time.monotonic()
    model_dir = os.path.abspath(model_dir)
    vocabulary = os.path.join(model_dir, "vocabulary.model")
    bindings = [f'MODEL_DIR = "{model_dir}"', f'SentencePieceVocabulary.path = "{vocabulary}"']
    if steps is not None:
        bindings += [f"TRAIN_STEPS = {steps}", f"LearningRate.decay_factor = {_decay_factor(steps)}"]

    say("1. A vocabulary of 4,000 pieces from the annual messages of the presidents of the United States, 1790 to 2026.")
    check_environment()
    if not os.path.exists(vocabulary):
        _train_vocabulary(vocabulary)
    config = GinConfig([RECIPE], bindings)
    say("2. A unigram model of the same text, to compare with. Speeches of years that end in 7 are held out.")
    unigram = _reference(config, epath.Path(model_dir) / REFERENCES)
    say("3. Pre-training a causal decoder, which shows now and then what it writes.")
    train(config)
    first, last = _losses(model_dir)
    step = finished_steps(model_dir)[-1]
    command = "t5x_lab" if shutil.which("t5x_lab") else os.path.join(os.path.dirname(sys.executable), "t5x_lab")
    say(
        f"\nThe loss on held-out speeches is {last:.2f} nats per token; it began at {first:.2f}, and a unigram model has "
        f"{unigram:.2f}.\nLook at {os.path.join(model_dir, FILE)}: curves, evaluations, what it writes.\n"
        f"The whole demo took {(time.monotonic() - began) / 60:.1f} minutes. Continue with:\n"
        f'  {command} generate --model_dir={model_dir} --prompt="The people" --temperature=0.7\n'
        f"  {command} eval --model_dir={model_dir} --step=all\n"
        f"  {command} train --gin_file={model_dir}/config.gin --gin.TRAIN_STEPS={2 * step} "
        f"--gin.LearningRate.decay_factor={_decay_factor(2 * step)}"
    )


def _decay_factor(steps: int) -> float:
    """What takes the recipe's learning rate from its highest value, after 100 steps, to zero at the last."""
    return round(1 / max(steps - 100, 1), 7)


def _train_vocabulary(path: str) -> None:
    from t5x_lab.data.config import ByteVocabulary, DataConfig
    from t5x_lab.data.sentencepiece_files import train_sentencepiece
    from t5x_lab.data.tasks import documents

    train_sentencepiece(documents(DataConfig(TASK, {"targets": 1}, 1, ByteVocabulary(), shards=1)), path, PIECES)


def _reference(config: GinConfig, path: epath.Path) -> float:
    """The unigram model's loss, computed once, which plots and the report show beside the run's."""
    name = "unigram model"
    found = read_dictionary(path).get("loss", {}).get(name)
    if found is None:
        found = unigram_loss(config)
        write_json(path, {"loss": {name: found}})
    return found


def unigram_loss(config: GinConfig) -> float:
    """Cross-entropy of the held-out tokens under the training text's token frequencies (plus one), in nats per token."""
    from t5x_lab.data.mixture import resolve
    from t5x_lab.data.pipeline import eval_batches
    from t5x_lab.data.tasks import documents

    data = config.data()
    tasks = resolve(data, "causal_decoder")
    vocabulary = tasks.vocabulary
    counts = np.ones(vocabulary.vocab_size)
    for text in documents(data):
        ids = [*vocabulary.encode(text), vocabulary.eos_id]
        counts += np.bincount(ids, minlength=len(counts))
    nats = -np.log(counts / counts.sum())
    total = tokens = 0.0
    for batch in eval_batches(tasks, tasks.parts[0], data):
        weights = batch["decoder_loss_weights"]
        total += float((nats[batch["decoder_target_tokens"]] * weights).sum())
        tokens += float(weights.sum())
    return total / tokens


def _losses(model_dir: str) -> tuple[float, float]:
    """Training loss of the first step and the latest held-out loss."""
    lines = read_metrics(model_dir)
    held_out = [line["loss"] for line in lines if line["split"] == f"eval/{TASK}"]
    return next(line["loss"] for line in lines if line["split"] == "train"), held_out[-1]
