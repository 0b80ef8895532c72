"""Ways to transfer, at a laptop's size: nine tasks of T5's suite, as Raffel et al. (2020) compare them in section 3.5.

    python benchmarks/t5_transfer.py --work=FOLDER [--data=../shared/data] [--pretrain_steps=3000] [--steps=400] [--seeds=3]
        [--only=WAY] [--data_set=NAME] [--texts=NUMBER]

An encoder-decoder of 1.9 million parameters is pre-trained by span corruption of the embedded corpus, and fine-tuned on
CoLA, SST-2, MRPC, STS-B, RTE, BoolQ, CB, COPA and WiC:

    scratch      all parameters, not pre-trained
    all          all parameters
    adapters     adapter layers of size 32 and norms alone
    unfreezing   gradual unfreezing, the last blocks first
    mixture      on text and all nine together, each measured at its own best step, and not fine-tuned
    mixture+     the same, fine-tuned on each

Of each run the best step on the validation split counts, as in the paper. Of BoolQ, whose training records are not at hand, the
first 2,400 of validation are trained on and the others are validation. Prints a table of means and deviations over seeds, and
writes it to FOLDER/table.md and a plot to FOLDER/transfer.png; what is there already is not done again.
"""

import itertools
import json
import os
import pathlib
import statistics

from small_runs import arguments, labelled, paragraphs, t5x_lab, write_records, write_texts

SIZES = """
include "models/t5_1_1/tiny.gin"
VOCABULARY = @SentencePieceVocabulary()
SentencePieceVocabulary.path = "{work}/tasks.model"
TransformerConfig.vocab_size = 4224
TransformerConfig.emb_dim = 128
TransformerConfig.num_heads = 4
TransformerConfig.head_dim = 32
TransformerConfig.num_encoder_layers = 2
TransformerConfig.num_decoder_layers = 2
TransformerConfig.mlp_dim = 256
TransformerConfig.dtype = "float32"
DROPOUT_RATE = 0.0
BATCH_SIZE = 16
DATA_SHARDS = 1
HOOKS = (@JsonLines(),)
DATA_SETS = {{{places}}}
"""
PRETRAINING = """
include "objectives/span_corruption.gin"
MIXTURE_OR_TASK_NAME = "sotu_span_corruption"
TASK_FEATURE_LENGTHS = {{"inputs": 128}}
EVALS = ()
LearningRate.factors = "linear_decay"
LearningRate.base_learning_rate = 0.02
LearningRate.warmup_steps = 200
LearningRate.decay_factor = {decay}
"""
MIXTURE = """
COLLECTIONS = {{"nine": @nine/Collection()}}
nine/Collection.members = {members}
MIXTURE_OR_TASK_NAME = "nine"
MIXING = @Mixing()
Mixing.maximum = 8192
"""
FINE_TUNING = """
include "runs/finetune.gin"
EVALS = (@infer/MetricsEvaluation(),)
EVAL_PERIOD = {period}
CHECKPOINT_PERIOD = 1000000
MetricsEvaluation.num_examples = 400
MetricsEvaluation.batch_size = 100
MetricsEvaluation.truncate_inputs = "right"
LearningRate.base_learning_rate = {rate}
"""
WAYS = {
    "scratch": [],
    "all": [],
    "adapters": ["--gin_file=peft/adapters.gin", "--gin.Adapter.size=32", "--gin.LearningRate.base_learning_rate=0.002"],
    "unfreezing": ["--gin_file=optimizers/gradual_unfreezing.gin"],
    "mixture+": [],
}
FILES = {  # train and validation
    "glue/cola": ("cola/train.tsv", "cola/dev.tsv"),
    "glue/sst2": ("sst2_agnews/SST-2/train.tsv", "sst2_agnews/SST-2/test.tsv"),
    "glue/mrpc": ("becel/mrpc/train.tsv.gz", "becel/mrpc/validation.tsv.gz"),
    "glue/stsb": ("stsb/sts-train.csv", "stsb/sts-dev.csv"),
    **{
        f"super_glue/{folder.lower()}": (f"superglue/{folder}/train.jsonl", f"superglue/{folder}/val.jsonl")
        for folder in ("RTE", "BoolQ", "CB", "COPA", "WiC")
    },
}

LENGTHS = {"glue/cola": 32, "super_glue/copa": 48, "glue/sst2": 64, "glue/stsb": 64, "super_glue/wic": 64, "glue/mrpc": 96}


def lengths_of(data_set: str) -> str:
    """Returns the input length in tokens that nearly all examples of a data set fit."""
    return f'--gin.TASK_FEATURE_LENGTHS={{"inputs": {LENGTHS.get(data_set, 128)}, "targets": 8}}'


def task_of(data_set: str) -> str:
    return f"t5_{data_set.replace('/', '_')}"


def records_of(data: pathlib.Path) -> dict[str, dict[str, list[dict]]]:
    """Returns records by data set and split."""
    records = {}
    for data_set, files in FILES.items():
        records[data_set] = {
            split: list(labelled(data / "eval" / file, data_set)) if (data / "eval" / file).exists() else []
            for split, file in zip(("train", "validation"), files, strict=True)
        }
        if not records[data_set]["train"]:
            whole = records[data_set]["validation"]
            records[data_set] = {"train": whole[:2_400], "validation": whole[2_400:]}
    return records


def write_files(work: pathlib.Path, data: pathlib.Path, pretrain_steps: int, steps: int, texts: int | None) -> None:
    places = write_records(work, records_of(data))
    lines = [f'{name}/Records.files = "{work}/{data_set}/{{split}}.jsonl"' for data_set, name in places.items()]
    text = SIZES.format(work=work, places=", ".join(f'"{data_set}": @{name}/Records()' for data_set, name in places.items()))
    (work / "model.gin").write_text(text + "\n".join(lines) + "\n")
    (work / "pretraining.gin").write_text(PRETRAINING.format(decay=1 / (0.9 * pretrain_steps)))
    (work / "fine_tuning.gin").write_text(FINE_TUNING.format(period=steps // 4, rate=0.01))
    members = (*map(task_of, places), "sotu_span_corruption")
    (work / "mixture.gin").write_text(MIXTURE.format(members=members))
    if not (work / "tasks.model").exists():
        of_tasks = (
            value
            for data_set in places
            for line in open(work / data_set / "train.jsonl").readlines()[:8_000]
            for value in json.loads(line).values()
            if isinstance(value, str)
        )
        texts_of_both = itertools.chain(paragraphs(of_each=20), filter(None, of_tasks))
        write_texts(work / "text.jsonl", itertools.islice(texts_of_both, texts))
        size = 4000 if texts is None else min(4000, texts // 4)
        t5x_lab("vocab", "--input=text.jsonl", f"--size={size}", "--output=tasks.model")


def train(work: pathlib.Path, name: str, steps: int, seed: int, *flags: str) -> str:
    if not (work / name / "END").exists():
        t5x_lab(
            "train",
            "--gin_file=model.gin",
            *flags,
            f"--gin.MODEL_DIR={name}",
            f"--gin.TRAIN_STEPS={steps}",
            f"--gin.SEED={seed}",
        )
    return name


def run_seed(work: pathlib.Path, seed: int, pretrain_steps: int, steps: int, ways: list[str], data_sets: list[str]) -> None:
    of_steps = f"--gin.CHECKPOINT_PERIOD={pretrain_steps}"
    base = train(work, f"pretrained_{seed}", pretrain_steps, seed, "--gin_file=pretraining.gin", of_steps)
    tuning = ["--gin_file=fine_tuning.gin"]
    mixture = f"mixture_{seed}"
    if "mixture+" in ways:
        train(
            work, mixture, 4 * steps, seed, *tuning, "--gin_file=mixture.gin", f"--gin.INITIAL_CHECKPOINT_PATH={base}",
            f"--gin.EVAL_PERIOD={steps}", '--gin.TASK_FEATURE_LENGTHS={"inputs": 128, "targets": 36}',
        )  # fmt: skip
    for way, data_set in itertools.product(ways, data_sets):
        task = task_of(data_set)
        start = {"scratch": [], "mixture+": [f"--gin.INITIAL_CHECKPOINT_PATH={mixture}"]}.get(
            way, [f"--gin.INITIAL_CHECKPOINT_PATH={base}"]
        )
        more = [f"--gin.GradualUnfreezing.steps={steps // 3}"] if way == "unfreezing" else []
        flags = [f"--gin.MIXTURE_OR_TASK_NAME={task}", lengths_of(data_set)]
        train(work, f"{way}_{seed}_{task}", steps, seed, *tuning, *flags, *start, *WAYS[way], *more)


def best_scores(folder: pathlib.Path) -> dict[str, float]:
    """Scores by part of a benchmark, each at its best step."""
    file = folder / "evals" / "infer" / "best.json"
    report = json.loads(file.read_text()) if file.exists() else {}
    return {
        f"{name} {part}": part_scores["score"] for name, each in report.items() for part, part_scores in each["parts"].items()
    }


def scores(work: pathlib.Path, seeds: int, data_sets: list[str]) -> dict[str, list[dict[str, float]]]:
    """Returns the scores of all evaluated parts by fine-tuning method and seed."""
    scores_by_way: dict[str, list[dict[str, float]]] = {}
    for way in (*WAYS, "mixture"):
        for seed in range(seeds):
            folders = (
                [work / f"mixture_{seed}"]
                if way == "mixture"
                else [work / f"{way}_{seed}_{task_of(data_set)}" for data_set in data_sets]
            )
            of_seed = {key: score for folder in folders for key, score in best_scores(folder).items()}
            if len(of_seed) == len(data_sets):
                scores_by_way.setdefault(way, []).append({**of_seed, "average": statistics.mean(of_seed.values())})
    return scores_by_way


def shown(values: list[float]) -> str:
    deviation = f" ± {statistics.stdev(values):.1f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.1f}{deviation}"


def table(results: dict[str, list[dict[str, float]]]) -> str:
    lines = [
        "| | " + " | ".join(f"{way} ({len(seeds)})" for way, seeds in results.items()) + " |",
        "|---" * (len(results) + 1) + "|",
    ]
    for row in next(iter(results.values()))[0]:
        lines.append(
            f"| {row} | " + " | ".join(shown([of_seed[row] for of_seed in seeds]) for seeds in results.values()) + " |"
        )
    return "\n".join(lines)


def plot(results: dict[str, list[dict[str, float]]], path: pathlib.Path) -> None:
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(9, 4), layout="constrained")
    names = list(next(iter(results.values()))[0])
    for number, (way, seeds) in enumerate(results.items()):
        at = [position + 0.13 * (number - len(results) / 2) for position in range(len(names))]
        means = [statistics.mean(each[name] for each in seeds) for name in names]
        deviations = [statistics.stdev(each[name] for each in seeds) if len(seeds) > 1 else 0.0 for name in names]
        axes.errorbar(at, means, deviations, fmt="o", capsize=2, label=way)
    axes.set_xticks(range(len(names)), [name.split(" ", 1)[-1] for name in names])
    axes.set_ylabel("score")
    axes.legend(ncols=3)
    figure.savefig(path, dpi=120)


def main() -> None:
    args = arguments(__doc__, pretrain_steps=3000, steps=400, only=WAYS, data_sets=FILES, seeds=3, texts=0)
    work, data = args.work, args.data
    os.chdir(work)
    write_files(work, data, args.pretrain_steps, args.steps, args.texts or None)
    for seed in range(args.seeds):
        run_seed(work, seed, args.pretrain_steps, args.steps, args.only or list(WAYS), args.data_set)
        results = scores(work, args.seeds, args.data_set)
        if results:
            (work / "table.md").write_text(table(results) + "\n")
            plot(results, work / "transfer.png")
            print(table(results), flush=True)


if __name__ == "__main__":
    main()
