"""Tokens per CPU-second of each objective, compared with SeqIO's own pipeline and the t5 library's preprocessors.

    python benchmarks/objectives.py [--seconds=4] [--rounds=3] [--rows=128] [--objectives=ul2,full_lm] [--vocabulary=FILE]

Both read the same text (annual messages of the presidents), tokenise it, make examples of 512 tokens of input, pack and batch
them, on one core, in turns; ours once in one shard and once in four, which is how a run reads by default. Tokens are those that
a model processes, padding excluded. The stages show where time goes: each adds one step to those before it.
"""

import argparse
import functools
import os
import statistics
import time

os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})  # before TensorFlow counts the cores

from t5x_lab.data.environment import check_environment

check_environment()

import seqio
import tensorflow as tf
from t5.data import preprocessors as t5

from t5x_lab.config.errors import UserError
from t5x_lab.data.config import DataConfig
from t5x_lab.data.objectives.denoising import Denoising
from t5x_lab.data.objectives.named import OBJECTIVES
from t5x_lab.data.pipeline.batches import SeqioBatches, resolve_tasks
from t5x_lab.data.vocabularies.config import ByteVocabulary, SentencePieceVocabulary
from t5x_lab.tasks import sotu

OBJECTIVE_NAMES = [name for name in OBJECTIVES if not name.startswith(("prefix_lm_", "replace_spans_", "span_corruption_"))]


def build_batches(name: str, architecture: str, vocabulary, rows: int, shards: int):
    lengths = {"targets": 626} if name in ("full_lm", "prefix_lm") else {"inputs": 512}
    config = DataConfig("sotu", lengths, rows, vocabulary, objective=name, shards=shards)
    tasks = resolve_tasks(config, architecture, 10**6)
    return iter(SeqioBatches(tasks, config, seed=0)), tasks


def plain(name: str, architecture: str, task: seqio.Task, lengths, rows: int):
    """The chain that a T5X user has: SeqIO's task, mixture defaults, feature converter and batch. None where `t5` has none."""
    objective, vocabulary = OBJECTIVES[name], task.output_features["targets"].vocabulary
    features = {feature: seqio.Feature(vocabulary) for feature in objective.features}
    if name == "full_lm":
        steps = [t5.full_lm]
    elif name == "prefix_lm":
        pack = t5.pack_prefix_lm_encoder_decoder if architecture == "encoder_decoder" else t5.pack_prefix_lm_decoder_only
        steps = [t5.targets_for_prefix_lm_objective, pack]
        features = {"targets": seqio.Feature(vocabulary, required=False)}
    elif isinstance(objective, Denoising):
        steps = [*_denoising(objective, lengths), seqio.preprocessors.append_eos_after_trim]
    else:
        return None
    before = [functools.partial(t5.rekey, key_map={"inputs": None, "targets": "text"}), seqio.preprocessors.tokenize]
    seqio_task = seqio.Task(
        "plain", task.source, output_features=features, preprocessors=[*before, seqio.CacheDatasetPlaceholder(), *steps]
    )
    converter = {"encoder_decoder": seqio.EncDecFeatureConverter, "prefix_decoder": seqio.DecoderFeatureConverter}[architecture]
    dataset = seqio_task.get_dataset(lengths, "train", shuffle=True, seed=0, num_epochs=None, try_in_mem_cache=False)
    if name != "prefix_lm":  # which packs by itself
        dataset = converter(pack=True)(dataset, lengths)
    return iter(dataset.batch(rows, drop_remainder=True).prefetch(2).as_numpy_iterator())


def _denoising(objective: Denoising, lengths):
    from t5x_lab.data.objectives.preprocessors import _INPUTS, _TARGETS

    if objective.mean_noise_span_length:
        spans = objective.mean_noise_span_length
        return [functools.partial(t5.span_corruption, mean_noise_span_length=spans, noise_density=objective.noise_density)]
    merge = [t5.reduce_concat_tokens] if objective.merge_documents else []
    inputs = (
        t5.noise_token_to_random_token_or_sentinel if objective.inputs == "random_or_sentinel" else _INPUTS[objective.inputs]
    )
    denoise = functools.partial(
        t5.denoise, noise_density=objective.noise_density, noise_mask_fn=t5.iid_noise_mask, inputs_fn=inputs,
        targets_fn=_TARGETS[objective.targets],
    )  # fmt: skip
    return [functools.partial(t5.select_random_chunk, max_length=65536), *merge, t5.split_tokens_to_inputs_length, denoise]


def speed(batches, seconds: float) -> float:
    """Tokens a CPU-second, of at least so many: other programs on the machine change it little."""
    began, tokens = time.process_time(), 0
    while (passed := time.process_time() - began) < seconds:
        batch = next(batches)
        streams = [batch[name] for name in ("encoder_input_tokens", "decoder_target_tokens") if name in batch]
        tokens += sum(int((stream > 0).sum()) for stream in streams)
    return tokens / passed


def stages(vocabulary) -> list[tuple[str, float]]:
    """Tokens of text a second after each stage of span corruption for an encoder-decoder."""
    config = DataConfig("sotu", {"inputs": 512}, 128, vocabulary, objective="span_corruption", shards=1)
    tasks = resolve_tasks(config, "encoder_decoder", 10**6)
    part = tasks.components[0]
    steps = list(part.task.preprocessors)
    where = next(i for i, step in enumerate(steps) if isinstance(step, seqio.CacheDatasetPlaceholder))

    def run(upto: int) -> float:
        names = {0: (), where + 2: ("targets",)}.get(upto, ("inputs", "targets"))
        features = {name: part.task.output_features[name] for name in names}
        task = seqio.Task("stage", part.task.source, output_features=features, preprocessors=steps[:upto])
        # Not shuffled: a shuffle's buffer is as large as this corpus, and filling it would count as reading.
        dataset = task.get_dataset(part.lengths, "train", shuffle=False, seed=0, num_epochs=None, try_in_mem_cache=False)
        size = (lambda x: tf.strings.length(x["text"])) if upto == 0 else (lambda x: x["raw_tokens"])
        size = size if upto == 0 else (lambda x: x["raw_tokens"])
        iterator = iter(dataset.map(size).batch(64).prefetch(2).as_numpy_iterator())
        next(iterator)
        began, total = time.process_time(), 0
        while (passed := time.process_time() - began) < 3:
            total += int(next(iterator).sum())
        return total / passed / (4.2 if upto == 0 and not isinstance(vocabulary, ByteVocabulary) else 1)

    results = [("read text", run(0)), ("tokenise, cut into chunks", run(where + 2)), ("noise", run(where + 3))]
    batches = iter(SeqioBatches(tasks, config, seed=0))
    for _ in range(30):
        next(batches)
    began, total = time.process_time(), 0
    while (passed := time.process_time() - began) < 3:
        total += int(next(batches)["raw_tokens"].sum())
    return [*results, ("pack, features, batch", total / passed)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rows", type=int, default=128, help="of a batch; T5's has 128")
    parser.add_argument("--objectives", default=",".join(OBJECTIVE_NAMES))
    parser.add_argument("--vocabulary", help="a SentencePiece model; UTF-8 bytes without one")
    args = parser.parse_args()
    vocabulary = SentencePieceVocabulary(args.vocabulary) if args.vocabulary else ByteVocabulary()
    assert sotu.speeches()

    print("objective            architecture     ours, tok/CPU-s SeqIO + t5    ratio   in 4 shards")
    for name in args.objectives.split(","):
        for architecture in ("encoder_decoder", "prefix_decoder", "encoder"):
            try:
                batches, tasks = build_batches(name, architecture, vocabulary, args.rows, shards=1)
            except UserError:
                continue  # not defined
            sharded, _ = build_batches(name, architecture, vocabulary, args.rows, shards=4)
            seqio_pipeline = plain(name, architecture, tasks.components[0].task, dict(tasks.components[0].lengths), args.rows)
            runs = {"ours": batches, "sharded": sharded} | ({"theirs": seqio_pipeline} if seqio_pipeline else {})
            for iterator in runs.values():
                for _ in range(8):  # until the shuffle's buffer is full
                    next(iterator)
            results = {key: [] for key in runs}
            for _ in range(args.rounds):
                for key, iterator in runs.items():
                    results[key].append(speed(iterator, args.seconds))
            median = {key: statistics.median(values) for key, values in results.items()}
            beside = ""
            if seqio_pipeline:
                ratios = [median[key] / median["theirs"] for key in ("ours", "sharded")]
                beside = f"{median['theirs']:12,.0f}  {ratios[0]:6.2f}x  {ratios[1]:9.2f}x"
            print(f"{name:20} {architecture:16} {median['ours']:12,.0f} {beside}", flush=True)
    print("\nWhere time goes, span corruption for an encoder-decoder; tokens of text a second up to each stage:")
    for stage, rate in stages(vocabulary):
        print(f"  {stage:24}{rate:14,.0f}   {1e6 / rate:6.2f} us a token in all", flush=True)


if __name__ == "__main__":
    main()
