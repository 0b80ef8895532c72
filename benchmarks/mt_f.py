"""Multi-task fine-tuning of three architectures at a laptop's size, on real labelled data, and what T0-Eval says of them.

    python benchmarks/mt_f.py --work=FOLDER [--data=../shared/data] [--pretrain_steps=500] [--steps=3000] [--only=NAME]
        [--examples=100] [--held_out=8] [--labelled=5] [--rendered=1000] [--texts=47000]

Models of about a million parameters are pre-trained on the embedded corpus, the decoder with full LM and the encoder-decoder
with span corruption; the prefix decoder is the causal one's checkpoint with one line changed. Their vocabulary is one of that
corpus and of what the tasks are trained on: speeches alone would leave words of reviews in pieces that mean nothing.
All are then fine-tuned on the examples of T0's data sets that promptsource rendered, and on labelled data sets with our own
templates. Before and after: accuracy on the validation splits of the labelled sets, and T0-Eval on the sets at hand with all of
promptsource's prompts. Prints a table, and writes it to FOLDER/table.md; what is there already is not done again.
"""

import argparse
import csv
import gzip
import itertools
import json
import os
import pathlib
import re
import sys

from small_runs import arguments, paragraphs, t5x_lab, write_texts
from study_data import HELD_OUT, LABELLED, MISSING, MODULE, RATES, TEMPLATE, write_template

ARCHITECTURES = {
    "causal_decoder": ("models/causal_decoder/base.gin", "objectives/full_lm.gin", {"targets": 256}),
    "prefix_decoder": ("models/prefix_decoder/base.gin", None, None),
    "encoder_decoder": ("models/t5_1_1/base.gin", "objectives/span_corruption.gin", {"inputs": 224}),
}
SIZE = """
VOCABULARY = @SentencePieceVocabulary()
SentencePieceVocabulary.path = "{work}/tasks.model"
TransformerConfig.vocab_size = 4224
TransformerConfig.emb_dim = 128
TransformerConfig.num_heads = 4
TransformerConfig.head_dim = 32
TransformerConfig.num_encoder_layers = {encoder_layers}
TransformerConfig.num_decoder_layers = {decoder_layers}
TransformerConfig.mlp_dim = 256
TransformerConfig.dtype = "float32"
TransformerConfig.scan_layers = False
BATCH_SIZE = 16
"""
PRETRAINING = """
MIXTURE_OR_TASK_NAME = "sotu"
EVALS = ()
LearningRate.factors = "linear_decay"
LearningRate.base_learning_rate = 0.03
LearningRate.warmup_steps = 150
LearningRate.decay_factor = {decay}
"""


def records_in_gin(data: pathlib.Path, rendered: dict[str, str], num_labelled: int) -> str:
    """DATA_SETS, TEMPLATES and COLLECTIONS, with the renderings of T0's data sets as data sets of one template."""
    places, lines = {}, []
    for name, (files, more) in {**LABELLED, **HELD_OUT}.items():
        files = {split: path.format(d=data / "eval", s=data / "eval" / "superglue") for split, path in files.items()}
        places[name] = {"files": files, **more}
    for name, pattern in rendered.items():
        places[name] = {"files": {"train": pattern}, "num_examples": 0}
    for number, (name, fields) in enumerate(places.items()):
        for field, value in fields.items():
            if value:
                lines.append(f"r{number}/Records.{field} = {value if str(value).startswith('@') else repr(value)}")
        places[name] = f"@r{number}/Records()"
    names = [f"flan_{re.sub('[^a-z0-9.]', '_', name)}" for name in list(LABELLED)[:num_labelled]]
    rates = {name: rate for name, rate in RATES.items() if name in names}
    lines += [
        "DATA_SETS = {" + ", ".join(f'"{name}": {place}' for name, place in places.items()) + "}",
        'COLLECTIONS = {"mt_f": @mt_f/Collection(), "seen": @seen/Collection()}',
        f"mt_f/Collection.members = {(*rendered, *names)!r}",
        f"mt_f/Collection.rates = {rates!r}",
        f"seen/Collection.members = {tuple(f'{name}_score_eval' for name in names)!r}",
        'seen/Collection.form = "ranked"',
    ]
    return "\n".join(lines) + "\n"


FINE_TUNING = """
import superglue_answers
include "runs/finetune.gin"
include "records.gin"
TEMPLATES = ("templates", "{data}/prompts/promptsource_templates")
MIXTURE_OR_TASK_NAME = "mt_f"
TASK_FEATURE_LENGTHS = {{"inputs": 224, "targets": 32}}
EVALS = (@seen/RankingEvaluation(), @t0_eval/RankingEvaluation())
RankingEvaluation.split = "validation"
RankingEvaluation.period = None
RankingEvaluation.truncate_inputs = "left"
seen/RankingEvaluation.name = "seen"
seen/RankingEvaluation.task = "seen"
seen/RankingEvaluation.lengths = {{"inputs": 224, "targets": 32}}
seen/RankingEvaluation.num_examples = {seen}
t0_eval/RankingEvaluation.name = "t0_eval"
t0_eval/RankingEvaluation.task = "t0_eval_without_{missing}"
t0_eval/RankingEvaluation.lengths = {{"inputs": 224, "targets": 32}}
t0_eval/RankingEvaluation.num_examples = {held_out}
# Of a model of this size: a rate above the recipes', no dropout, and answers of a word count as much as those of a paragraph.
LearningRate.base_learning_rate = 0.01
DROPOUT_RATE = 0.0
LOSS_NORMALIZING_FACTOR = "AVERAGE_PER_SEQUENCE"
"""


def write_files(work: pathlib.Path, data: pathlib.Path, args: argparse.Namespace) -> int:
    """Gin files, the module, and the templates of the renderings; returns how many data sets these are of."""
    missing = "_and_".join([*MISSING, *(name.replace("/", "_") for name in list(HELD_OUT)[args.held_out :])])
    folder = data / "prompts" / "t0_train_50k"
    names = sorted(path.name.removesuffix(".jsonl.gz") for path in folder.glob("*.jsonl.gz"))
    sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
    from t5x_lab.papers.data_sets import T0_TRAIN

    slugs = sorted({entry.slug.replace(".", "_") for entry in T0_TRAIN} | {"commonsense_qa"}, key=len, reverse=True)
    rendered = {}
    for name in names:
        if len(rendered) == args.rendered:
            break
        slug = next(slug for slug in slugs if name.startswith(slug))
        rendered[f"p3/{slug}"] = str(folder / f"{slug}_*.jsonl.gz")
    for name in rendered:
        write_template(work, name, TEMPLATE.format(name=name))
    (work / "superglue_answers.py").write_text(MODULE)
    (work / "records.gin").write_text(records_in_gin(data, rendered, args.labelled))
    (work / "mt_f.gin").write_text(
        FINE_TUNING.format(data=data, missing=missing, seen=2 * args.examples, held_out=args.examples)
    )
    return len(rendered)


def write_text(path: pathlib.Path, data: pathlib.Path, texts: int) -> None:
    """Some text of the embedded corpus and of T0's renderings, and more of the two labelled sets with most."""

    def column(file: pathlib.Path):
        with open(file, newline="") as lines:
            yield from (row[0] for row in csv.reader(lines, delimiter="\t", quoting=csv.QUOTE_NONE))

    def prompts():
        for file in sorted((data / "prompts" / "t0_train_50k").glob("*.jsonl.gz")):
            with gzip.open(file, "rt") as lines:
                yield from (json.loads(line)["prompt"] for line in itertools.islice(lines, 90))

    labelled = (data / "eval" / "sst2_agnews" / name for name in ("SST-2/train.tsv", "agnews/dev.tsv"))
    limits = ((paragraphs(), 4_000), (prompts(), 3_000), *((column(file), 20_000) for file in labelled))
    shares = ((source, most * texts // 47_000) for source, most in limits)
    write_texts(path, itertools.chain.from_iterable(itertools.islice(source, most) for source, most in shares))


def run_one(work: pathlib.Path, name: str, pretrain_steps: int, steps: int) -> None:
    """Pre-trains, evaluates, fine-tunes and evaluates one architecture."""
    model, objective, lengths = ARCHITECTURES[name]
    (work / f"{name}.gin").write_text(
        f'include "{model}"\n' + SIZE.format(work=work, encoder_layers=2 * (name == "encoder_decoder"), decoder_layers=2)
    )
    pretrained = f"{name if objective else 'causal_decoder'}_pretrained"
    if objective and not (work / pretrained / "END").exists():
        (work / "pretraining.gin").write_text(PRETRAINING.format(decay=1 / (0.9 * pretrain_steps)))
        t5x_lab(
            "train", f"--gin_file={name}.gin", f"--gin_file={objective}", "--gin_file=pretraining.gin",
            f"--gin.MODEL_DIR={pretrained}", f"--gin.TRAIN_STEPS={pretrain_steps}", f"--gin.TASK_FEATURE_LENGTHS={lengths}",
            f"--gin.CHECKPOINT_PERIOD={pretrain_steps}",
        )  # fmt: skip
    tuned = [f"--gin_file={name}.gin", "--gin_file=mt_f.gin", f"--gin.INITIAL_CHECKPOINT_PATH={pretrained}"]
    # The untuned one takes one step at a rate of nearly nothing.
    for folder, end, more in (
        (f"{name}_untuned", 1, ["--gin.LearningRate.base_learning_rate=1e-12"]),
        (f"{name}_tuned", steps, []),
    ):
        if not (work / folder / "END").exists():
            options = [f"--gin.MODEL_DIR={folder}", f"--gin.TRAIN_STEPS={end}", f"--gin.CHECKPOINT_PERIOD={end}"]
            t5x_lab("train", *tuned, *more, *options)
        if not (work / folder / "evals" / "t0_eval").exists():
            t5x_lab("eval", f"--model_dir={folder}")


def table(work: pathlib.Path) -> str:
    """Medians over prompts in percent, by data set: of each model before and after, beside chance."""
    columns: dict[str, dict[str, float]] = {}
    for name in ARCHITECTURES:
        for state in ("untuned", "tuned"):
            column = columns.setdefault(f"{name.replace('_', ' ')}, {state}", {})
            for evaluation in ("seen", "t0_eval"):
                for file in (work / f"{name}_{state}" / "evals" / evaluation).glob("[0-9]*.json"):
                    report = json.loads(file.read_text())["report"]
                    for dataset, entry in report["datasets"].items():
                        row = f"{evaluation}: {dataset.removesuffix('_score_eval')} ({entry['over_prompts']['sum']['prompts']})"
                        column[row] = entry["over_prompts"]["sum"]["median"]
                        columns.setdefault("chance", {})[row] = entry["over_prompts"]["chance"]["median"]
                    means = next(value for key, value in report.items() if key.startswith("average("))
                    column[f"{evaluation}: average"] = means["sum"]
                    columns["chance"][f"{evaluation}: average"] = means["chance"]
    chance = columns.pop("chance", {})
    columns = {"chance": chance, **{name: column for name, column in columns.items() if column}}
    lines = ["| data set (prompts) | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
    for row in chance:
        cells = [f"{100 * column[row]:.1f}" if row in column else "" for column in columns.values()]
        lines.append(f"| {row} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    numbers = dict(examples=100, held_out=len(HELD_OUT), labelled=len(LABELLED), rendered=1_000, texts=47_000)
    args = arguments(__doc__, pretrain_steps=500, steps=3000, only=ARCHITECTURES, **numbers)
    work, data = args.work, args.data
    os.chdir(work)
    print(f"{write_files(work, data, args)} data sets of T0 as promptsource rendered them")
    if not (work / "tasks.model").exists():
        write_text(work / "text.jsonl", data, args.texts)
        t5x_lab("vocab", "--input=text.jsonl", f"--size={min(4000, args.texts // 4)}", "--output=tasks.model")
    for name in args.only or ARCHITECTURES:
        run_one(work, name, args.pretrain_steps, args.steps)
    (work / "table.md").write_text(table(work) + "\n")
    print(table(work))


if __name__ == "__main__":
    main()
