"""GPT-1 at a laptop's size: pre-training with probes, and the ablations of Radford et al. (2018), Table 5 and Figure 2.

    python benchmarks/gpt1.py --work=FOLDER [--data=../shared/data] [--pretrain_steps=5000] [--steps=150] [--seeds=3]
        [--only=WAY] [--data_set=NAME] [--pairs=NUMBER] [--texts=NUMBER]

A decoder of 1.3 million parameters and an LSTM of as many are pre-trained once on the embedded corpus, and asked BLiMP, SST-2
and CoLA on the way. Behind a classification head they are fine-tuned on CoLA, SST-2, MRPC, STS-B, RTE, SNLI and COPA:

    full         pre-trained, with the language model's loss beside the class's
    no_pretrain  not pre-trained
    no_aux       without the language model's loss
    lstm         the LSTM, as full
    layers_n     as full, with the embeddings and the first n layers alone transferred; SST-2 and SNLI

Of each run the best of three steps on the validation split counts. SNLI's training records are not at hand: the first 8,000 of
its development part are trained on, and its test part is validation. Prints medians and ranges over seeds, and writes them to
FOLDER/table.md, and plots to FOLDER/probes.png and FOLDER/layers.png; what is there already is not done again.
"""

import itertools
import json
import math
import os
import pathlib
import statistics

from small_runs import arguments, labelled, paragraphs, t5x_lab, write_records, write_texts

LAYERS = 4
MODEL = """
include "models/gpt1/base.gin"
include "{base}"
VOCABULARY = @SentencePieceVocabulary()
SentencePieceVocabulary.path = "{work}/bpe.model"
SentencePieceVocabulary.extra_ids = 0
TransformerConfig.vocab_size = 4000
TransformerConfig.emb_dim = 128
TransformerConfig.num_heads = 4
TransformerConfig.head_dim = 32
TransformerConfig.num_decoder_layers = {layers}
TransformerConfig.mlp_dim = 512
TransformerConfig.max_positions = 128
TransformerConfig.dtype = "float32"
LstmConfig.vocab_size = 4000
LstmConfig.emb_dim = 128
LstmConfig.hidden_dim = 384
LstmConfig.dtype = "float32"
DATA_SHARDS = 1
HOOKS = (@JsonLines(),)
DATA_SETS = {{{places}}}
RECORDS = @rule/Records()
rule/Records.files = "{data}/eval/{{dataset}}.jsonl.gz"
{records}
"""
PRETRAINING = """
include "recipes/gpt1_pretraining.gin"
TASK_FEATURE_LENGTHS = {{"targets": 128}}
BATCH_SIZE = 16
books/TextFiles.train = "{work}/books/*.txt"
books/TextFiles.validation = "{work}/dev/*.txt"
EVALS = (@LossEvaluation(), @blimp/ProbeEvaluation(), @whole/ProbeEvaluation(), @words/ProbeEvaluation())
EVAL_PERIOD = {period}
CHECKPOINT_PERIOD = 1000000
blimp/ProbeEvaluation.name = "blimp"
blimp/ProbeEvaluation.probes = (@Blimp(),)
blimp/ProbeEvaluation.num_examples = {few_pairs}
blimp/ProbeEvaluation.at_start = True
whole/ProbeEvaluation.name = "blimp_whole"
whole/ProbeEvaluation.probes = (@Blimp(),)
whole/ProbeEvaluation.steps = ({steps},)
whole/ProbeEvaluation.num_examples = {pairs}
words/ProbeEvaluation.name = "words"
words/ProbeEvaluation.probes = (@Sentiment(), @Acceptability())
words/ProbeEvaluation.num_examples = {sentences}
words/ProbeEvaluation.at_start = True
ProbeEvaluation.batch_size = 128
Sentiment.best = 0.91
Acceptability.best = 0.45
CosineDecay.peak = 0.001
CosineDecay.warmup_steps = {warmup}
AdamW.clip_global_norm = 1.0
DROPOUT_RATE = 0.0
"""
FINE_TUNING = """
include "recipes/gpt1_finetuning.gin"
TASK_FEATURE_LENGTHS = {{"inputs": 64}}
TransformerConfig.vocab_size = 4003
LstmConfig.vocab_size = 4003
WarmupLinear.peak = 0.001
EVAL_PERIOD = {period}
CHECKPOINT_PERIOD = 1000000
SaveCheckpointConfig.best_metric = None
ClassificationEvaluation.num_examples = 500
ClassificationEvaluation.batch_size = 100
"""
FILES = {  # train and validation
    "glue/cola": ("cola/train.tsv", "cola/dev.tsv"),
    "glue/sst2": ("sst2_agnews/SST-2/train.tsv", "sst2_agnews/SST-2/test.tsv"),
    "glue/mrpc": ("becel/mrpc/train.tsv.gz", "becel/mrpc/validation.tsv.gz"),
    "glue/stsb": ("stsb/sts-train.csv", "stsb/sts-dev.csv"),
    "glue/rte": ("superglue/RTE/train.jsonl", "superglue/RTE/val.jsonl"),
    "snli": ("becel/snli/validation.tsv.gz", "becel/snli/test.tsv.gz"),
    "super_glue/copa": ("superglue/COPA/train.jsonl", "superglue/COPA/val.jsonl"),
}
METRICS = {"glue/cola": "matthews", "glue/mrpc": "f1", "glue/stsb": "pearson"}
SWEPT = ("glue/sst2", "snli")
LSTM = ["--gin.MODEL=@ModelConfig()", "--gin.ModelConfig.network=@LstmConfig()"]
WAYS: dict[str, list[str]] = {
    "full": [],
    "no_pretrain": [],
    "no_aux": ["--gin.task_head.lm_weight=0.0"],
    "lstm": LSTM,
    **{f"layers_{n}": [f'--gin.RestoreCheckpointConfig.layers={{"decoder": {n}}}'] for n in range(LAYERS)},
}


def records_of(data: pathlib.Path, data_sets: list[str]) -> dict[str, dict[str, list[dict]]]:
    """Returns records by data set and split, with GLUE's field names, of these data sets and of those of the probes."""
    splits = {
        name: {split: list(labelled(data / "eval" / file, name)) for split, file in zip(("train", "validation"), files)}
        for name, files in FILES.items()
        if name in {*data_sets, "glue/sst2", "glue/cola"}
    }
    names = {"premise": "sentence1", "hypothesis": "sentence2"}
    for split, records in splits.get("glue/rte", {}).items():
        splits["glue/rte"][split] = [{names.get(key, key): value for key, value in record.items()} for record in records]
    if "snli" in splits:
        splits["snli"]["train"] = splits["snli"]["train"][:8_000]
    return splits


def write_files(
    work: pathlib.Path,
    data: pathlib.Path,
    pretrain_steps: int,
    steps: int,
    pairs: int | None,
    texts: int | None,
    data_sets: list[str],
) -> None:
    from t5x_lab.tasks.sotu import speeches

    records_by_split = records_of(data, data_sets)
    places = write_records(work, records_by_split)
    for folder, split in (("books", "train"), ("dev", "validation")):
        (work / folder).mkdir(exist_ok=True)
        for file in map(pathlib.Path, speeches()[split]):
            (work / folder / file.name).write_text(file.read_text())
    lines = "\n".join(f'{name}/Records.files = "{work}/{data_set}/{{split}}.jsonl"' for data_set, name in places.items())
    in_gin = ", ".join(f'"{data_set}": @{name}/Records()' for data_set, name in places.items())
    for name, base in (("decoder", "models/gpt1/base.gin"), ("lstm", "models/lstm/base.gin")):
        text = MODEL.format(work=work, data=data, base=base, layers=LAYERS, places=in_gin, records=lines)
        (work / f"{name}.gin").write_text(text)
    (work / "pretraining.gin").write_text(
        PRETRAINING.format(
            work=work,
            period=max(1, pretrain_steps // 5),
            steps=pretrain_steps,
            warmup=min(400, pretrain_steps // 2),
            pairs=pairs,
            few_pairs=min(pairs or 100, 100),
            sentences=min(20 * (pairs or 100), 2_000),
        )
    )
    (work / "fine_tuning.gin").write_text(FINE_TUNING.format(period=max(1, steps // 3)))
    if not (work / "bpe.model").exists():
        of_tasks = (
            value
            for splits in records_by_split.values()
            for record in splits["train"]
            for value in record.values()
            if isinstance(value, str)
        )
        write_texts(work / "text.jsonl", itertools.islice(itertools.chain(paragraphs(), of_tasks), texts))
        size = 4000 if texts is None else min(4000, texts // 4)
        t5x_lab("vocab", "--input=text.jsonl", "--standardize", "--model_type=bpe", f"--size={size}", "--output=bpe.model")


def train(name: str, steps: int, seed: int, *flags: str) -> None:
    if not pathlib.Path(name, "END").exists():
        more = [f"--gin.MODEL_DIR={name}", f"--gin.TRAIN_STEPS={steps}", f"--gin.SEED={seed}"]
        t5x_lab("train", *flags, *more)


def pretrain(model: str, steps: int) -> str:
    train(model, steps, 0, f"--gin_file={model}.gin", "--gin_file=pretraining.gin", *(LSTM if model == "lstm" else []))
    print(blimp(model), flush=True)
    return model


def fine_tune(way: str, seed: int, pretrain_steps: int, steps: int, data_sets: list[str]) -> None:
    model = "lstm" if way == "lstm" else "decoder"
    start = [] if way == "no_pretrain" else [f"--gin.INITIAL_CHECKPOINT_PATH={pretrain(model, pretrain_steps)}"]
    for data_set in [name for name in data_sets if name in SWEPT or not way.startswith("layers_")]:
        name = data_set.replace("/", "_")
        flags = [f"--gin_file={model}.gin", "--gin_file=fine_tuning.gin", f"--gin.MIXTURE_OR_TASK_NAME=classify_{name}"]
        train(f"{way}_{seed}_{name}", steps, seed, *flags, *start, *WAYS[way])


def score(way: str, seed: int, data_set: str) -> float | None:
    """The best of its steps, times 100."""
    files = pathlib.Path(f"{way}_{seed}_{data_set.replace('/', '_')}", "evals", "classify").glob("[0-9]*.json")
    results = [next(iter(json.loads(file.read_text())["results"].values())) for file in files]
    return 100 * max((result[METRICS.get(data_set, "accuracy")] for result in results), default=0.0) if results else None


def shown(values: list[float]) -> str:
    """Median, and range."""
    return f"{statistics.median(values):.1f} ({min(values):.1f} … {max(values):.1f})" if values else ""


def table(seeds: int) -> str:
    ablations = [way for way in WAYS if not way.startswith("layers_")]
    lines = ["| | " + " | ".join(ablations) + " |", "|---" * (len(ablations) + 1) + "|"]
    columns: dict[str, list[list[float]]] = {way: [] for way in ablations}
    for data_set in FILES:
        cells = []
        for way in ablations:
            values = [value for seed in range(seeds) if (value := score(way, seed, data_set)) is not None]
            columns[way].append(values)
            cells.append(shown(values))
        lines.append(f"| {data_set} | " + " | ".join(cells) + " |")
    whole = {way: [statistics.mean(scores) for scores in zip(*values)] for way, values in columns.items()}
    lines.append("| average | " + " | ".join(shown(whole[way]) for way in ablations) + " |")
    swept = [*(f"layers_{n}" for n in range(LAYERS)), "full"]
    lines += ["", "| | none | " + " | ".join(map(str, range(LAYERS + 1))) + " |", "|---" * (LAYERS + 3) + "|"]
    for data_set in SWEPT:
        cells = [
            shown([value for seed in range(seeds) if (value := score(way, seed, data_set)) is not None])
            for way in ("no_pretrain", *swept)
        ]
        lines.append(f"| {data_set} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def probes(model: str) -> list[dict]:
    file = pathlib.Path(model, "metrics.jsonl")
    lines = map(json.loads, file.read_text().splitlines()) if file.exists() else []
    return [line for line in lines if line["split"].partition("/")[0] in ("blimp", "words")]


def blimp(model: str) -> str:
    """The share of all pairs that it has right at the end, and how far above chance."""
    (result,) = [json.loads(file.read_text()) for file in pathlib.Path(model, "evals", "blimp_whole").glob("[0-9]*.json")]
    scores = result["results"]["blimp"]
    errors = (scores["score"] - 0.5) / math.sqrt(0.25 / scores["examples"])
    return f"{model}: BLiMP {scores['score']:.4f} of {scores['examples']:,.0f} pairs, {errors:.1f} standard errors above chance"


def plot(seeds: int) -> None:
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 3, figsize=(11, 3.5), layout="constrained")
    for panel, (probe, key) in zip(axes, (("blimp", "score"), ("sst2", "score"), ("cola", "auc")), strict=True):
        for number, model in enumerate(("decoder", "lstm")):
            points = [(line["step"], line[key]) for line in probes(model) if line["split"].endswith(f"/{probe}")]
            if points:
                panel.plot(*zip(*points), marker="o", markersize=3, color=f"C{number}", label=model)
        panel.axhline(0.5, linestyle="--", color="gray")
        panel.set(title=f"{probe}, {'accuracy' if key == 'score' else 'area under the curve'}", xlabel="step of pre-training")
    axes[0].legend()
    figure.savefig("probes.png", dpi=120)
    figure, axes = plt.subplots(figsize=(6, 3.5), layout="constrained")
    for data_set in SWEPT:
        ways = ["no_pretrain", *(f"layers_{n}" for n in range(LAYERS)), "full"]
        values = [[v for seed in range(seeds) if (v := score(way, seed, data_set)) is not None] for way in ways]
        if all(values):
            middle = [statistics.median(scores) for scores in values]
            spread = [
                [m - min(scores) for m, scores in zip(middle, values)],
                [max(scores) - m for m, scores in zip(middle, values)],
            ]
            axes.errorbar(range(-1, LAYERS + 1), middle, spread, marker="o", capsize=2, label=data_set)
    axes.set(xlabel="layers transferred (-1: nothing, 0: embeddings)", ylabel="accuracy")
    axes.legend()
    figure.savefig("layers.png", dpi=120)


def main() -> None:
    args = arguments(__doc__, pretrain_steps=5000, steps=150, only=WAYS, data_sets=FILES, seeds=3, pairs=0, texts=0)
    os.chdir(args.work)
    write_files(args.work, args.data, args.pretrain_steps, args.steps, args.pairs or None, args.texts or None, args.data_set)
    for seed in range(args.seeds):
        for way in args.only or list(WAYS):
            fine_tune(way, seed, args.pretrain_steps, args.steps, args.data_set)
        pathlib.Path("table.md").write_text(table(args.seeds) + "\n")
        plot(args.seeds)
        print(table(args.seeds), flush=True)


if __name__ == "__main__":
    main()
