"""Text, vocabulary and labelled data of the studies at the scale tiny, from a folder of real data.

    python benchmarks/study_data.py --work=FOLDER [--data=../shared/data] [--texts=60000]

    export PYTHONPATH=FOLDER
    t5x_lab study --gin_file=studies/architecture_objective.gin --gin_file=FOLDER/architecture_objective.gin --study_dir=DIR

Writes FOLDER/corpus.gin (74 novels and text near the tasks: prompts of T0's data sets without their answers, and sentences of
labelled data sets without labels), FOLDER/vocabulary.model and FOLDER/tasks.gin (T0's data sets as promptsource rendered them,
five labelled sets with t5x_lab's templates, T0-Eval and BLiMP), and for each study a file that sets them by stage.
"""

import csv
import gzip
import itertools
import json
import pathlib
import random
import re
import sys
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from small_runs import arguments, t5x_lab, write_texts

HELD_OUT_NOVELS = ("Chesterton_Thursday_1908", "Gaskell_Ruth_1855", "Stevenson_Catriona_1893", "Woolf_Lighthouse_1927")
HELD_OUT_SHARE = 50  # every 50th text near the tasks is held out
TEXTS = """
TEXTS = {{"novels": @novels/TextFiles(), "near": @near/TextFiles()}}
novels/TextFiles.train = "{work}/novels/train/*.txt.gz"
novels/TextFiles.validation = "{work}/novels/validation/*.txt.gz"
novels/TextFiles.lines_per_document = 32  # a whole novel would fill the shuffle buffers
novels/TextFiles.rate = 0.7
near/TextFiles.train = "{work}/near_train.jsonl"
near/TextFiles.validation = "{work}/near_validation.jsonl"
near/TextFiles.rate = 0.3
"""
CORPUS = """
include "{work}/texts.gin"
include "{work}/vocabulary.gin"
MIXTURE_OR_TASK_NAME = "texts"
"""
VOCABULARY = """
VOCABULARY = @SentencePieceVocabulary()
SentencePieceVocabulary.path = "{work}/vocabulary.model"
"""
MODULE = '''
import gin


@gin.configurable
def answers(record):
    """MultiRC's passages as SuperGLUE distributes them, a record for each answer."""
    passage = record["passage"]
    return [
        {"paragraph": passage["text"], "question": question["question"], "answer": answer["text"], "label": answer["label"]}
        for question in passage["questions"] for answer in question["answers"]
    ]
'''
# Names of the records' files, columns and fields, by data set; "{s}" is the folder of SuperGLUE.
LABELLED = {
    "glue/sst2": ({"train": "{d}/sst2_agnews/SST-2/train.tsv", "validation": "{d}/sst2_agnews/SST-2/test.tsv"}, {}),
    "ag_news": (
        {"train": "{d}/sst2_agnews/agnews/dev.tsv", "validation": "{d}/sst2_agnews/agnews/test.tsv"},
        {"columns": ("text", "label")},
    ),
    "glue/cola": (
        {"train": "{d}/cola/train.tsv", "validation": "{d}/cola/dev.tsv"},
        {"columns": ("source", "label", "mark", "sentence")},
    ),
    "glue/mrpc": ({"train": "{d}/becel/mrpc/train.tsv.gz", "validation": "{d}/becel/mrpc/validation.tsv.gz"}, {}),
    "super_glue/multirc": ({"train": "{s}/MultiRC/train.jsonl", "validation": "{s}/MultiRC/val.jsonl"}, {"each": "@answers"}),
}
HELD_OUT = {
    **{
        f"super_glue/{name}": ({"train": f"{{s}}/{folder}/train.jsonl", "validation": f"{{s}}/{folder}/val.jsonl"}, more)
        for name, folder, more in (
            ("copa", "COPA", {}),
            ("cb", "CB", {}),
            ("rte", "RTE", {}),
            ("wic", "WiC", {}),
            (
                "wsc.fixed",
                "WSC",
                {"names": {name: f"target.{name}" for name in ("span1_text", "span2_text", "span1_index", "span2_index")}},
            ),
        )
    },
    **{
        f"anli/r{number}": (
            {"validation": f"{{d}}/anli/ANLI_analysis_r{number}_dev.csv.gz"},
            {
                "names": {"premise": "context", "hypothesis": "statement", "label": "gold_label"},
                "labels": {"label": ("e", "n", "c")},
            },
        )
        for number in (1, 2, 3)
    },
}
# Rates of MT-F's data sets with labels, all templates of one together. The two that a small model can learn have most.
RATES = {"glue/sst2": 50_000, "ag_news": 15_000, "glue/cola": 2_000, "glue/mrpc": 2_000, "super_glue/multirc": 2_000}
# Renderings of T0 that such a model can read: short prompts with short answers. A template whose answers are all alike, because
# the first examples of a sorted data set were rendered, would teach that answer.
PROMPT_WORDS, ANSWER_WORDS = 120, 4
LEARNABLE = ("glue/sst2", "ag_news")  # evaluated with the templates of MT-F and with T0's, which MT-F does not have
MISSING = ("hellaswag", "story_cloze_2016", "winogrande_winogrande_xl")  # of T0-Eval, whose records are not at hand
TASKS = """
import superglue_answers
TEMPLATES = ("{work}/templates", "{data}/prompts/promptsource_templates")
RECORDS = @blimp/Records()
blimp/Records.files = "{data}/eval/{{dataset}}.jsonl.gz"
{data_sets}
{collections}
{classifications}
"""
# Tasks that a small model can learn: files of records for training and for evaluation, fields, and names of labels.
DOWNSTREAM = {
    "small/sst2": ("sst2_agnews/SST-2/train.tsv", "sst2_agnews/SST-2/test.tsv", ("sentence",), ("negative", "positive")),
    "small/ag_news": (
        "sst2_agnews/agnews/dev.tsv", "sst2_agnews/agnews/test.tsv", ("text",), ("world", "sports", "business", "technology"),
    ),
    "small/snli": (
        "becel/snli/validation.tsv.gz", "becel/snli/test.tsv.gz", ("premise", "hypothesis"),
        ("yes", "maybe", "no"),
    ),
}  # fmt: skip
# One more task of pairs of sentences, for studies/adaptation.gin.
PAIRS = {
    "small/mrpc": (
        "becel/mrpc/train.tsv.gz", "becel/mrpc/test.tsv.gz", ("sentence1", "sentence2"), ("different", "same"),
    ),
}  # fmt: skip
LABELS, EVALUATED = 4_000, 1_000  # records for training, and for evaluation, half of them for each of two splits
CHOICES_TEMPLATE = """dataset: {name}
templates:
  as_it_is: !Template
    name: as_it_is
    jinja: "{fields} ||| {{{{ answer_choices[label] }}}}"
    answer_choices: "{choices}"
    metadata: !TemplateMetadata
      original_task: true
"""
TEMPLATE = """dataset: {name}
templates:
  as_it_is: !Template
    name: as_it_is
    jinja: "{{{{prompt}}}} ||| {{{{completion | replace('<|endoftext|>', '')}}}}"
"""
# By name of a study: its stages with text, its stages with tasks, and its stages with both.
STUDIES = {
    "architecture_objective": (("pretrain", "adapt"), ("finetune", "evaluate")),
    "learning_rate": (("pretrain",), ()),
    "finetuning_rate": (("pretrain",), ("finetune",)),
    "scaling": (("pretrain",), ()),
    "t5_objectives": (("pretrain",), ("finetune",)),
    "t5_repeats": (("pretrain",), ("finetune",)),
    "t5_methods": (("pretrain",), ("finetune",)),
    "t5_architectures": (("pretrain",), ("finetune",)),
    "t5_mixing": (("pretrain",), ("finetune",), ("multitask",)),
    "t5_multitask": (("pretrain",), ("finetune",), ("mixture", "alone", "without")),
    "t5_compute": (("pretrain",), ("finetune",)),
    **{f"flan_{name}": (("pretrain",), ("finetune",)) for name in ("clusters", "templates", "instructions", "few_shot")},
    "flan_scale": (("pretrain",), ("finetune", "evaluate")),
    "gpt1_layers": (("pretrain",), ("finetune",)),
    "adaptation": (("pretrain", "adapt"), ("finetune", "evaluate")),
}
MORE = {
    "architecture_objective": """
SEEDS = (0, 1, 2)
Study.measures = (@t0_eval/Measure(), @blimp/Measure(), @seen/Measure(), @new_templates/Measure(), @held_out/Measure())
seen/Measure.name = "seen tasks"
seen/Measure.evaluation = "seen"
seen/Measure.metric = "sum"
seen/Measure.units = "tasks"
new_templates/Measure.name = "new templates"
new_templates/Measure.evaluation = "new_templates"
new_templates/Measure.metric = "sum"
new_templates/Measure.units = "tasks"
held_out/Measure.name = "held-out loss of prefix LM"
held_out/Measure.evaluation = "held_out"
held_out/Measure.metric = "loss"
held_out/Measure.best_is = "lowest"
held_out/Measure.percent = False
held_out/Measure.over = ("seeds",)
""",
    "gpt1_layers": """
Study.measures = (@sst2/Measure(), @ag_news/Measure(), @snli/Measure(), @blimp/Measure(), @words/Measure())
blimp/Measure.name = "BLiMP, zero-shot"
blimp/Measure.evaluation = "blimp"
blimp/Measure.chosen_by = None
blimp/Measure.metric = "score"
blimp/Measure.stages = ("pretrain",)
words/Measure.name = "SST-2, zero-shot"
words/Measure.evaluation = "words"
words/Measure.chosen_by = None
words/Measure.metric = "score"
words/Measure.stages = ("pretrain",)
""",
}
PROBES = """
EVALS = (@LossEvaluation(), @blimp/ProbeEvaluation(), @words/ProbeEvaluation())
ProbeEvaluation.batch_size = 128
blimp/ProbeEvaluation.name = "blimp"
blimp/ProbeEvaluation.probes = (@Blimp(),)
blimp/ProbeEvaluation.num_examples = 50
words/ProbeEvaluation.name = "words"
words/ProbeEvaluation.probes = (@Sentiment(),)
words/ProbeEvaluation.num_examples = 500
"""
EVALUATE = """
include "{work}/texts.gin"
EVALS = (
    @t0_eval/RankingEvaluation(), @ProbeEvaluation(), @seen/RankingEvaluation(), @new_templates/RankingEvaluation(),
    @held_out/LossEvaluation(),
)
t0_eval/RankingEvaluation.task = "t0_eval_without_{missing}"
RankingEvaluation.split = "validation"
seen/RankingEvaluation.name = "seen"
seen/RankingEvaluation.task = "seen"
seen/RankingEvaluation.lengths = {{"inputs": 224, "targets": 32}}
seen/RankingEvaluation.num_examples = 80
new_templates/RankingEvaluation.name = "new_templates"
new_templates/RankingEvaluation.task = "new_templates"
new_templates/RankingEvaluation.lengths = {{"inputs": 224, "targets": 32}}
new_templates/RankingEvaluation.num_examples = 80
held_out/LossEvaluation.name = "held_out"
held_out/LossEvaluation.task = "texts_prefix_lm"
held_out/LossEvaluation.lengths = {{"targets": 128}}
held_out/LossEvaluation.batch_size = 16
held_out/LossEvaluation.num_batches = 200
"""


def rows(file: pathlib.Path, names: Sequence[str] | None = None) -> list[dict[str, str]]:
    """Returns the rows of a table with tabs between its columns. Without `names` its first line names them."""
    with gzip.open(file, "rt") if file.suffix == ".gz" else open(file, newline="") as lines:
        return list(csv.DictReader(lines, names, delimiter="\t", quoting=csv.QUOTE_NONE))


def prompts(data: pathlib.Path) -> Iterator[str]:
    """Yields T0's prompts without their answers."""
    for file in sorted((data / "prompts" / "t0_train_50k").glob("*.jsonl.gz")):
        with gzip.open(file, "rt") as lines:
            yield from (json.loads(line)["prompt"] for line in lines)


def reviews(data: pathlib.Path) -> Iterator[str]:
    with zipfile.ZipFile(data / "eval" / "nltk" / "movie_reviews.zip") as archive:
        names = sorted(name for name in archive.namelist() if name.endswith(".txt"))
        yield from (archive.read(name).decode() for name in names)


def write_corpus(work: pathlib.Path, data: pathlib.Path, texts: int) -> None:
    """Writes the novels, the texts near the tasks, of which at most `texts` are taken from each source, and the vocabulary."""
    for file in sorted((data / "novels").glob("*.txt.gz")):
        split = "validation" if file.name.removesuffix(".txt.gz") in HELD_OUT_NOVELS else "train"
        place = work / "novels" / split / file.name
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(file.read_bytes())
    folder = data / "eval"
    sources: list[Iterable[str]] = [
        prompts(data), reviews(data),
        (row["sentence"] for row in rows(folder / "sst2_agnews" / "SST-2" / "train.tsv")),
        (row["text"] for row in rows(folder / "sst2_agnews" / "agnews" / "dev.tsv", ("text", "label"))),
        *((row[name] for row in rows(folder / "becel" / "snli" / "validation.tsv.gz")) for name in ("premise", "hypothesis")),
    ]  # fmt: skip
    near = [text for source in sources for text in dict.fromkeys(itertools.islice(source, texts)) if text.strip()]
    random.Random(0).shuffle(near)  # a buffer of examples would not mix the sources
    write_texts(work / "near_validation.jsonl", near[::HELD_OUT_SHARE])
    write_texts(work / "near_train.jsonl", (text for i, text in enumerate(near) if i % HELD_OUT_SHARE))
    paragraphs = (
        line
        for file in sorted((work / "novels" / "train").glob("*.gz"))
        for line in itertools.islice(gzip.open(file, "rt", errors="replace"), 0, None, 10)
        if line.strip()
    )
    write_texts(work / "vocabulary.jsonl", itertools.chain(paragraphs, near[:: max(1, len(near) // 20_000)]))
    if not (work / "vocabulary.model").exists():
        size = min(4000, texts // 4)
        t5x_lab("vocab", f"--input={work}/vocabulary.jsonl", f"--size={size}", f"--output={work}/vocabulary.model")
    (work / "vocabulary.gin").write_text(VOCABULARY.format(work=work))
    (work / "texts.gin").write_text(TEXTS.format(work=work))
    (work / "corpus.gin").write_text(CORPUS.format(work=work))
    print(f"{work}/corpus.gin: {len(near):,} texts near the tasks, and novels")


def write_downstream(work: pathlib.Path, data: pathlib.Path) -> dict[str, dict]:
    """Writes the records and templates of `DOWNSTREAM` and `PAIRS`. Returns the settings of their `Records` by data set.

    Half of the evaluated records are "validation", on which a step is chosen, and half are "test".
    """
    places = {}
    for name, (train, evaluated, fields, choices) in {**DOWNSTREAM, **PAIRS}.items():
        records = []
        for file in (train, evaluated):
            table = rows(data / "eval" / file, (*fields, "label") if "/agnews/" in file else None)
            random.Random(0).shuffle(table)
            numbers = {"World": 0, "Sports": 1, "Business": 2, "Sci/Tech": 3}
            label = lambda row: numbers[row["label"]] if row["label"] in numbers else int(row["label"])
            records.append([{**{field: row[field] for field in fields}, "label": label(row)} for row in table])
        splits = {
            "train": records[0][:LABELS], "validation": records[1][:EVALUATED:2], "test": records[1][1:EVALUATED:2],
        }  # fmt: skip
        folder = work / "records" / name
        folder.mkdir(parents=True, exist_ok=True)
        for split, of_split in splits.items():
            (folder / f"{split}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in of_split))
        shown = " ".join(f"{{{{{field}}}}}" for field in fields)
        write_template(work, name, CHOICES_TEMPLATE.format(name=name, fields=shown, choices=" ||| ".join(choices)))
        places[name] = {"files": {split: str(folder / f"{split}.jsonl") for split in splits}}
    return places


def slug(name: str) -> str:
    return name.replace("/", "_")


def write_template(work: pathlib.Path, name: str, text: str) -> None:
    file = work / "templates" / name / "templates.yaml"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


def short_renderings(file: pathlib.Path) -> list[str]:
    """Returns the lines of a file of T0's renderings with a short prompt and answer, if its answers differ."""
    with gzip.open(file, "rt") as lines:
        renderings = [(line, json.loads(line)) for line in lines]
    num_words = lambda text: len(text.replace("<|endoftext|>", "").split())
    short = [
        (line, rendering["completion"])
        for line, rendering in renderings
        if num_words(rendering["prompt"]) <= PROMPT_WORDS and 0 < num_words(rendering["completion"]) <= ANSWER_WORDS
    ]
    answers = {answer for _, answer in short}
    return [line for line, _ in short] if len(answers) > 1 else []


def write_tasks(work: pathlib.Path, data: pathlib.Path) -> None:
    """Writes templates, places of records, and collections."""
    from t5x_lab.papers.data_sets import T0_TRAIN

    folder = data / "prompts" / "t0_train_50k"
    names_of_rendered = sorted({entry.slug.replace(".", "_") for entry in T0_TRAIN} | {"commonsense_qa"}, key=len, reverse=True)
    rendered: dict[str, str] = {}
    for path in sorted(folder.glob("*.jsonl.gz")):
        name = next(name for name in names_of_rendered if path.name.startswith(name))
        if name not in LEARNABLE and (lines := short_renderings(path)):
            place = work / "renderings" / path.name.removesuffix(".gz")
            place.parent.mkdir(exist_ok=True)
            place.write_text("".join(lines))
            rendered[f"p3/{name}"] = str(place.with_name(f"{name}_*.jsonl"))
    for name in rendered:
        write_template(work, name, TEMPLATE.format(name=name))
    (work / "superglue_answers.py").write_text(MODULE)
    places: dict[str, dict] = {}
    for name, (files, more) in {**LABELLED, **HELD_OUT}.items():
        places[name] = {
            "files": {k: path.format(d=data / "eval", s=data / "eval/superglue") for k, path in files.items()},
            **more,
        }
    places |= {name: {"files": {"train": pattern}, "num_examples": 0} for name, pattern in rendered.items()}
    places |= write_downstream(work, data)
    (work / "tasks.gin").write_text(
        TASKS.format(
            work=work, data=data,
            data_sets=dictionary("DATA_SETS", "Records", places),
            collections=dictionary("COLLECTIONS", "Collection", collections(tuple(rendered))),
            classifications=dictionary(
                "CLASSIFICATIONS", "Classification",
                {
                    slug(name): {"data_set": name, "segments": fields, "classes": choices}
                    for name, (_, _, fields, choices) in DOWNSTREAM.items()
                },
            ),
        )
    )  # fmt: skip
    print(f"{work}/tasks.gin: {len(places)} data sets")


def label_tasks(data_set: str) -> list[str]:
    """Returns the tasks of a data set with each of FLAN's templates that ask for its label.

    A template that asks for an input has as many tokens in one example as ten labels, and would have most of the loss.
    """
    from t5x_lab.papers.flan.collections import TEMPLATES
    from t5x_lab.prompts.templates.files import read_templates, task_name

    templates = [
        t
        for t in read_templates((TEMPLATES.folder,), data_set)
        if t.original_task and t.answer_choices and not t.no_instruction
    ]
    return [f"flan_{task_name(data_set, template.name)}" for template in templates]


def collections(rendered: tuple[str, ...]) -> dict[str, dict]:
    """Returns the fields of each `Collection`: MT-F, evaluations, and mixtures of tasks and of texts with span corruption."""
    labelled = tuple(f"flan_{re.sub('[^a-z0-9.]', '_', name)}" for name in LABELLED)
    rates = {task: RATES[name] / len(tasks) for name in LABELLED for tasks in [label_tasks(name)] for task in tasks}
    texts = ("novels_span_corruption", "near_span_corruption")
    ranked = lambda names: {"members": tuple(f"{name}_score_eval" for name in names), "form": "ranked"}
    of_flan = lambda *names: {"members": tuple(f"flan_{name}" for name in names), "form": "sampled", "maximum": 3_000}
    return {
        "mt_f": {"members": (*rendered, *rates), "rates": rates},
        "labelled": {"members": labelled},
        "seen": ranked(f"flan_{slug(name)}" for name in LEARNABLE),
        "new_templates": ranked(map(slug, LEARNABLE)),
        "downstream": {"members": tuple(DOWNSTREAM)},
        "downstream_ranked": ranked(map(slug, DOWNSTREAM)),
        "flan_1_clusters": of_flan("ag_news"),
        "flan_3_clusters": of_flan("ag_news", "super_glue_multirc"),
        "flan_4_clusters": of_flan("ag_news", "super_glue_multirc", "glue_sst2"),
        "flan_without_entailment": of_flan("ag_news", "super_glue_multirc", "glue_sst2", "glue_cola"),
        "flan_eval_entailment": {
            "members": tuple(f"flan_{name}" for name in ("super_glue_rte", "super_glue_cb", "anli_r1", "anli_r2", "anli_r3")),
            "form": "ranked",
        },
        "multitask": {"members": (*DOWNSTREAM, *texts)},
        **{
            f"multitask_without_{slug(omitted)}": {"members": (*(name for name in DOWNSTREAM if name != omitted), *texts)}
            for omitted in DOWNSTREAM
        },
    }


def dictionary(setting: str, kind: str, entries: Mapping[str, Mapping[str, Any]]) -> str:
    """Returns gin statements of a dictionary setting and of its entries' fields. Texts that begin with "@" are references."""
    scopes = {name: f"{kind.lower()}_{number}" for number, name in enumerate(entries)}
    shown = ", ".join(f'"{name}": @{scope}/{kind}()' for name, scope in scopes.items())
    fields = [
        f"{scopes[name]}/{kind}.{field} = {value if str(value).startswith('@') else repr(value)}"
        for name, own in entries.items()
        for field, value in own.items()
        if value
    ]
    return "\n".join([f"{setting} = {{{shown}}}", *fields])


def write_studies(work: pathlib.Path) -> None:
    """Writes a gin file for each study, with its settings by stage."""
    (work / "mt_f.gin").write_text('MIXTURE_OR_TASK_NAME = "mt_f"\n')
    (work / "evaluate.gin").write_text(EVALUATE.format(work=work, missing="_and_".join(MISSING)))
    (work / "probes.gin").write_text(PROBES)
    (work / "prefix_lm_loss.gin").write_text('held_out/LossEvaluation.task = "texts_prefix_lm"\n')
    of_mt_f = {"finetune": ("vocabulary.gin", "tasks.gin", "mt_f.gin"), "evaluate": ("tasks.gin", "evaluate.gin")}
    own = {
        "architecture_objective": of_mt_f,
        "finetuning_rate": {"finetune": of_mt_f["finetune"]},
        "gpt1_layers": {"pretrain": ("corpus.gin", "tasks.gin", "probes.gin")},
        "adaptation": {stage: ("corpus.gin", "prefix_lm_loss.gin") for stage in ("pretrain", "adapt")},
    }
    for name, (text_stages, task_stages, *more) in STUDIES.items():
        files = {
            **{stage: ("corpus.gin",) for stage in text_stages},
            **{stage: ("vocabulary.gin", "tasks.gin") for stage in task_stages},
            **{stage: ("vocabulary.gin", "texts.gin", "tasks.gin") for stages in more for stage in stages},
            **own.get(name, {}),
        }
        settings = {stage: tuple(str(work / file) for file in files_of) for stage, files_of in files.items()}
        (work / f"{name}.gin").write_text(f"Study.settings = {settings!r}\n{MORE.get(name, '')}")


def main() -> None:
    args = arguments(__doc__, pretrain_steps=0, steps=0, only=(), texts=60_000)
    sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
    write_corpus(args.work, args.data, args.texts)
    write_tasks(args.work, args.data)
    write_studies(args.work)


if __name__ == "__main__":
    main()
