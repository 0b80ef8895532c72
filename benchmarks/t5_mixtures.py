"""Whether T5's suite is drawn at the paper's rates: chi-squared over 50,000 examples of four mixtures of all tasks and a text.

    python benchmarks/t5_mixtures.py [--draws=50000] [--only="K = 2^16"]

Records are made up, and files short; rates are of the true sizes, by the paper's formula. What is drawn is counted by task,
from the first words of its inputs. `p` is the probability of as large a difference by chance.
"""

import argparse
import collections
import json
import os
import pathlib
import re
import sys
import tempfile

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "tests"))

import numpy as np
import scipy.stats
import seqio
from test_t5_suite import OTHERS, made_up, sizes_of_t5

import t5x_lab.tasks  # noqa: F401  (registers tasks and data sets)
from t5x_lab.data.config import DataConfig, Mixing, TextFiles
from t5x_lab.data.pipeline.batches import SeqioBatches, resolve_tasks
from t5x_lab.data.vocabularies.config import ByteVocabulary
from t5x_lab.papers.t5.suite import SUITE
from t5x_lab.prompts.config import Collection, Records
from t5x_lab.prompts.prompts import Prompts

MIXINGS = {
    "K = 2^16": Mixing(maximum=2**16),
    "K = 2^19": Mixing(maximum=2**19),
    "T = 2": Mixing(maximum=2**21, temperature=2.0),
    "T = 8": Mixing(maximum=2**21, temperature=8.0),
}
TEXT = "files_span_corruption"
LENGTHS = {"inputs": 64, "targets": 32}
RECORDS = 40  # of each data set
BATCH = 100


def data_sets(folder: pathlib.Path) -> dict[str, Records]:
    """Made-up records of all data sets that are trained on; those of pronouns say which they are."""
    results = {}
    for name, entry in SUITE.items():
        if "train" not in entry.splits or name not in sizes_of_t5():
            continue
        records = made_up(name, RECORDS)
        for record in records:
            if name == "t5_dpr_simple":
                record["sentence"] = f"D {record['sentence']}"
        path = folder / f"{name}.jsonl"
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
        results[entry.data_set] = Records(files={"train": str(path)})
    return results


def told_by(text: str) -> str:
    """The task of inputs."""
    kinds = {
        r"(cola|sst2|mrpc|stsb|qqp|mnli|qnli) ": r"t5_glue_\1",
        r"(rte) sentence1": r"t5_glue_\1",
        r"(rte) hypothesis": r"t5_super_glue_\1",
        r"(boolq|cb|copa|multirc|record|wic) ": r"t5_super_glue_\1",
        r"wsc: D ": "t5_dpr_simple",
        r"wsc: ": "t5_super_glue_wsc_simple_train",
        r"question: ": "t5_squad",
        r"summarize: ": "t5_cnn_dailymail",
        r"translate \w+ to German": "t5_wmt_t2t_ende",
        r"translate \w+ to French": "t5_wmt15_enfr",
        r"translate \w+ to Romanian": "t5_wmt16_enro",
    }
    for pattern, name in kinds.items():
        if match := re.match(pattern, text):
            return match.expand(name)
    return TEXT


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--draws", type=int, default=50_000)
    parser.add_argument("--only", choices=MIXINGS, help="one of the mixtures alone")
    args = parser.parse_args()
    draws = args.draws
    sizes = {TEXT if name == "c4_span_corruption" else name: size for name, size in sizes_of_t5().items()}
    unsaid = {"t5_wmt15_enfr": OTHERS["t5_wmt15_enfr"], TEXT: OTHERS["c4_span_corruption"]}
    vocabulary = seqio.ByteVocabulary(100)
    with tempfile.TemporaryDirectory() as name:
        os.chdir(name)
        pathlib.Path("text.txt").write_text(
            "\n".join(f"{n} lines of a text of some length, and no more." for n in range(2_000))
        )
        prompts = Prompts(data_sets=data_sets(pathlib.Path(name)), collections={"all": Collection(("t5_supervised", TEXT))})
        for title, mixing in MIXINGS.items():
            if args.only not in (None, title):
                continue
            mixing = Mixing(mixing.maximum, mixing.temperature, num_examples=unsaid)
            config = DataConfig(
                "all", LENGTHS, BATCH, ByteVocabulary(), mixing=mixing, prompts=prompts, files=TextFiles("text.txt"), pack=False
            )
            batches = SeqioBatches(resolve_tasks(config, "encoder_decoder", 384), config, seed=0)
            counts = collections.Counter()
            while sum(counts.values()) < draws:
                rows = next(batches)["encoder_input_tokens"]
                counts.update(told_by(vocabulary.decode(row[row > 0].tolist())) for row in rows)
            rates = np.array([mixing.rate(size) for size in sizes.values()], float)
            expected = rates / rates.sum() * sum(counts.values())
            shares = np.array([counts[task] for task in sizes])
            assert shares.sum() == sum(counts.values()), counts.keys() - sizes.keys()
            statistic, p = scipy.stats.chisquare(shares, expected)
            worst = np.abs((shares - expected) / np.sqrt(expected)).max()
            print(
                f"{title:<10} {shares.sum():,} examples of {len(sizes)} tasks: chi-squared {statistic:.1f}, p {p:.3f}, largest "
                f"difference {worst:.1f} standard deviations",
                flush=True,
            )


if __name__ == "__main__":
    main()
