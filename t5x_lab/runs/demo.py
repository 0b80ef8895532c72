"""The demo: vocabulary, pre-training, a unigram model to compare with, generated text, a report."""

import html
import math
import os
import shutil
import sys
import time

import numpy as np

from t5x_lab.data.environment import check_environment
from t5x_lab.observe.console import say
from t5x_lab.observe.metrics import read_metrics
from t5x_lab.observe.plots import write_plots
from t5x_lab.runs.config import GinConfig
from t5x_lab.runs.load import load
from t5x_lab.runs.run import Run
from t5x_lab.runs.train import train

RECIPE = "recipes/demo.gin"
TASK = "sotu_full_lm"
PIECES = 4000
PROMPTS = ("The Congress of the United States", "My fellow Americans, tonight", "The expenditures of the Government", "We must")


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
    say("2. Pre-training a causal decoder on them. Speeches of years that end in 7 are held out.")
    train(config)
    say("3. A unigram model of the same text, to compare with.")
    unigram = unigram_loss(config)
    say("4. What the trained model writes.")
    model = load(model_dir)
    samples = write_samples(model)
    report = write_report(model_dir, model, unigram, samples)
    first, last = _losses(model_dir)
    command = "t5x_lab" if shutil.which("t5x_lab") else os.path.join(os.path.dirname(sys.executable), "t5x_lab")
    say(
        f"\nThe loss on held-out speeches is {last:.2f} nats per token; it began at {first:.2f}, and a unigram model has "
        f"{unigram:.2f}.\nThe report is {report}, with plots in {os.path.join(model_dir, 'plots')}.\n"
        f"The whole demo took {(time.monotonic() - began) / 60:.1f} minutes. Continue with:\n"
        f'  {command} generate --model_dir={model_dir} --prompt="The people" --temperature=0.7\n'
        f"  {command} eval --model_dir={model_dir} --step=all\n"
        f"  {command} train --gin_file={model_dir}/config.gin --gin.TRAIN_STEPS={2 * model.step} "
        f"--gin.LearningRate.decay_factor={_decay_factor(2 * model.step)}"
    )


def _decay_factor(steps: int) -> float:
    """What takes the recipe's learning rate from its highest value, after 100 steps, to zero at the last."""
    return round(1 / max(steps - 100, 1), 7)


def _train_vocabulary(path: str) -> None:
    from t5x_lab.data.config import ByteVocabulary, DataConfig
    from t5x_lab.data.sentencepiece_files import train_sentencepiece
    from t5x_lab.data.tasks import documents

    train_sentencepiece(documents(DataConfig(TASK, {"targets": 1}, 1, ByteVocabulary(), shards=1)), path, PIECES)


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


def write_samples(model: Run) -> list[tuple[str, str, str]]:
    """(prompt, kind, continuation) of every prompt, greedy and sampled; shown as they come."""
    samples = []
    for kind, temperature, top_p in (("greedy", 0.0, 1.0), ("temperature 0.8, top-p 0.9", 0.8, 0.9)):
        completions = model.generate(PROMPTS, max_tokens=40, temperature=temperature, top_p=top_p, seed=1)
        for prompt, texts in zip(PROMPTS, completions, strict=True):
            samples.append((prompt, kind, texts[0]))
            say(f"   [{kind}] {prompt} … {texts[0]}")
    return samples


def write_report(model_dir: str, model: Run, unigram: float, samples: list[tuple[str, str, str]]) -> str:
    """Writes report.html; returns its path."""
    plots = write_plots(model_dir, {"unigram model": unigram})
    first, last = _losses(model_dir)
    tokens = next(line["tokens_processed"] for line in reversed(read_metrics(model_dir)) if line["split"] == "train")
    rows = [
        ("parameters", f"{model.num_parameters:,}"),
        ("steps, tokens", f"{model.step:,}, {tokens:,}"),
        ("loss at the first step", f"{first:.3f} nats per token"),
        ("unigram model, held-out speeches", f"{unigram:.3f} nats per token"),
        ("this model, held-out speeches", f"{last:.3f} nats per token (perplexity {math.exp(last):.1f})"),
    ]
    table = "".join(f"<tr><td>{name}</td><td>{value}</td></tr>" for name, value in rows)
    images = "".join(f'<img src="plots/{os.path.basename(path)}" width="640">' for path in plots)
    texts = "".join(
        f"<p><small>{kind}</small><br><b>{html.escape(prompt)}</b> {html.escape(text)}</p>" for prompt, kind, text in samples
    )
    path = os.path.join(model_dir, "report.html")
    with open(path, "w", encoding="utf-8") as file:
        file.write(
            '<!doctype html><meta charset="utf-8"><title>t5x_lab demo</title>'
            '<body style="font: 16px sans-serif; margin: 2em; max-width: 48em">'
            f'<h1>t5x_lab demo</h1><table cellpadding="4">{table}</table>{images}<h2>What it writes</h2>{texts}'
        )
    return path


def _losses(model_dir: str) -> tuple[float, float]:
    """Training loss of the first step and the latest held-out loss."""
    lines = read_metrics(model_dir)
    held_out = [line["loss"] for line in lines if line["split"] == f"eval/{TASK}"]
    return next(line["loss"] for line in lines if line["split"] == "train"), held_out[-1]
