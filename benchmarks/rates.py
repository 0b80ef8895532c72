"""Whether documents and tasks are drawn at their rates: chi-squared over at least 50,000 draws of each setting.

What is drawn is counted by file, by task or by document, whatever is unequal in the setting, and compared with what the rates
say. `p` is the probability of as large a difference by chance: drawn at other rates it would be near 0. Documents of one task
come in epochs, so that their counts differ less than chance would have it, and `p` is near 1. Several processes are readers
of one run's rows, each with its own shards; what they read together must be what one process reads.

    python benchmarks/rates.py [--draws=50000] [--only="25 files"] [--shards=4]
"""

import argparse
import pathlib
import tempfile

import numpy as np
import scipy.stats
import seqio
import tensorflow as tf

import t5x_lab.tasks  # noqa: F401  (registers tasks and data sets)
from t5x_lab.data.config import DataConfig
from t5x_lab.data.pipeline.batches import SeqioBatches, resolve_tasks
from t5x_lab.data.vocabularies.config import ByteVocabulary
from t5x_lab.training.batches import Rows

FEATURES = {name: seqio.Feature(seqio.PassThroughVocabulary(100_000), add_eos=False) for name in ("inputs", "targets")}
OF_TASK = 20_000  # numbers that a task may have
OF_SEVERAL = ("unequal files", "1 : 10 : 100 : 1,000")  # settings that are also read by several processes


def task_of_numbers(name: str, folder: pathlib.Path, files: tuple[int, ...], first: int) -> None:
    """A task of the numbers from `first` on, one in each line of files of these lengths."""
    number = first
    for file, size in enumerate(files):
        (folder / f"{name}_{file}.txt").write_text("\n".join(str(number + n) for n in range(size)))
        number += size

    def token(dataset: tf.data.Dataset) -> tf.data.Dataset:
        number = lambda line: tf.strings.to_number([line], tf.int32)
        return dataset.map(lambda line: {"inputs": number(line), "targets": number(line)})

    source = seqio.TextLineDataSource({"train": f"{folder}/{name}_*.txt"})
    seqio.TaskRegistry.remove(name)
    seqio.TaskRegistry.add_provider(name, seqio.Task(name, source, output_features=FEATURES, preprocessors=[token]))


def settings() -> dict[str, tuple[dict[str, tuple[int, ...]], dict[str, float]]]:
    """(numbers of documents in the files of each task, rates) by what is tried."""
    return {
        "unequal files": ({"one": (10, 10, 10, 5_000)}, {"one": 1.0}),
        "25 files": ({"one": (200,) * 25}, {"one": 1.0}),
        "a tiny task, 1:1": ({"tiny": (3,), "large": (4_000, 6_000)}, {"tiny": 1.0, "large": 1.0}),
        "ten equal tasks": ({f"t{n}": (500,) for n in range(10)}, {f"t{n}": 1.0 for n in range(10)}),
        "1 : 10 : 100 : 1,000": ({f"t{n}": (400,) for n in range(4)}, {f"t{n}": 10.0**n for n in range(4)}),
        "twenty tasks, 1 to 20": ({f"t{n}": (300,) for n in range(20)}, {f"t{n}": n + 1.0 for n in range(20)}),
    }


def drawn(rates: dict[str, float], shards: int, processes: int, draws: int) -> np.ndarray:
    """Numbers in the order in which a run reads them, [batches, rows]."""
    name = next(iter(rates))
    if len(rates) > 1:
        name = "mixed"
        seqio.MixtureRegistry.remove(name)
        seqio.MixtureRegistry.add(name, list(rates.items()))
    rows = 16 * shards
    config = DataConfig(name, {"inputs": 1, "targets": 1}, rows, ByteVocabulary(), shards=shards, pack=False)
    tasks = resolve_tasks(config, "encoder_decoder", 200_000)
    held = np.split(np.arange(rows), processes)
    readers = [SeqioBatches(tasks, config, 0, lambda size, own=own: Rows(own, own)) for own in held]
    batches = -(-draws // rows)
    return np.stack(
        [np.concatenate([next(reader)["decoder_target_tokens"][:, 0] for reader in readers]) for _ in range(batches)]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--draws", type=int, default=50_000)
    parser.add_argument("--only", choices=settings(), help="one setting alone")
    parser.add_argument("--shards", type=int, choices=(4, 64), help="this number of shards alone")
    args = parser.parse_args()
    print(f"{'setting':24} shards processes    draws  kinds  chi-squared        p  as one process reads")
    for title, (tasks, rates) in settings().items():
        if args.only not in (None, title):
            continue
        with tempfile.TemporaryDirectory() as folder:
            firsts = {name: OF_TASK * n + 1 for n, name in enumerate(tasks)}
            for name, files in tasks.items():
                task_of_numbers(name, pathlib.Path(folder), files, firsts[name])
            alone: dict[int, np.ndarray] = {}
            for shards, processes in [(4, 1), (64, 1), *([(4, 2), (64, 2), (64, 8)] if title in OF_SEVERAL else [])]:
                if args.shards not in (None, shards):
                    continue
                numbers = drawn(rates, shards, processes, args.draws)
                if len(tasks) > 1:  # by task
                    counts = np.array([((numbers - first) // OF_TASK == 0).sum() for first in firsts.values()])
                    expected = np.array([rates[name] for name in tasks])
                else:  # by file
                    bounds = np.cumsum([1, *next(iter(tasks.values()))])
                    counts = np.histogram(numbers, bounds)[0]
                    expected = np.diff(bounds).astype(float)
                statistic, p = scipy.stats.chisquare(counts, expected / expected.sum() * counts.sum())
                same = np.array_equal(alone.setdefault(shards, numbers), numbers)
                line = f"{shards:6} {processes:9} {numbers.size:8,} {len(counts):6} {statistic:12.2f} {p:8.3f}  {same}"
                print(f"{title:24} {line}", flush=True)


if __name__ == "__main__":
    main()
