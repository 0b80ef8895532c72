"""Commands of ours, of the README and of each page of docs/ run, one after another, where what the page speaks of is there.

They are taken as they stand, but for `STAND_INS`: each model is the tiny one of its family, in bytes, trains for a few steps, and
data that lie on a hub lie in files. What runs elsewhere is in `ELSEWHERE`, with the place.
"""

import itertools
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys

import commands
import pytest
import seqio
import synthetic_flan  # noqa: F401
from conftest import SHARED, shared_data
from helpers import documented, harness_task
from synthetic_records import write_all, write_lines
from test_docs import PAGES, commands_of

import t5x_lab
from t5x_lab.corpora.page import Page, split_name
from t5x_lab.papers.data_sets import T0_EVAL
from t5x_lab.papers.gpt1.probes import BLIMP

pytestmark = pytest.mark.exhaustive


BYTES = "--gin.VOCABULARY=@ByteVocabulary() --gin.TransformerConfig.vocab_size=384"
SMALL = "--gin.BATCH_SIZE=8 --gin.DataConfig.eval_steps=1 --gin.DataConfig.shuffle_buffer_size=20 --gin.DATA_SHARDS=1"
FILES = "--gin.RECORDS=@Records() --gin.Records.files=data/{dataset}/{split}.jsonl"
OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
LEFT_OUT = "_and_".join(
    name.replace("/", "_") for name in sorted({entry.name for entry in T0_EVAL} - {"super_glue/rte", "super_glue/cb"})
)
STAND_INS = [  # text of a command, and what stands there instead
    (r"models/(t5_1_1|gpt1)/\w+\.gin", r"models/\1/tiny.gin"),
    (r"t5x_lab train(.*) …", r"t5x_lab train --gin_file=own_train.gin\1"),  # what the reader adds
    (r"TRAIN_STEPS=\d+", "TRAIN_STEPS=2"),
    (r"--size=8000", "--size=1000 --max_documents=300"),
    (r"--gin.Records.(hub='{hub}'|tfds='{tfds}')", "--gin.Records.files='data/{dataset}/{split}.jsonl'"),
    (r"promptsource/templates", str(SHARED / "prompts" / "promptsource_templates")),
    (r"gs://t5-data/\S+", "runs/base"),
    (r"\./flan-t5-small", "small_hf"),
    (r"--average=\d+", "--average=1"),
    (r"--tasks=piqa,", "--tasks="),
    (r"(?<=[=\"])/data/", "data/"),
    (r"--(task|gin.MIXTURE_OR_TASK_NAME)=my_task", r"--\1=t5_super_glue_rte"),
    (r"TASK_NAME=glue ", "TASK_NAME=t5_glue_cola "),
    (r"(cache .*)my_run.gin", r"\1own_train.gin"),
    (r"my_run.gin (--gin.USE_CACHED)", r"own_train.gin \1"),
    (r"MODEL_DIR=runs/small\b", "MODEL_DIR=runs/begun"),
    (r"recipes/mt_f.gin", "recipes/mt_f.gin --gin.EVALS=()"),  # which are those of t0_eval.gin
    (r"recipes/t0_eval.gin", f"recipes/t0_eval.gin --gin.t0_eval/RankingEvaluation.task=t0_eval_without_{LEFT_OUT}"),
    (r"runs/pretrain.gin", "runs/pretrain.gin --gin.MIXTURE_OR_TASK_NAME=sotu"),
    (r"--step=1000,2000", "--step=2"),
    (r"cache +--task", "cache --gin_bindings='import my_tasks' --task"),
    (r"--wait_minutes=120", "--wait_minutes=0.01"),
    (r"--size=4000", "--size=500"),
    (r"records/\{dataset\}", "data/{dataset}"),
]
ELSEWHERE = {  # words of a command, and where it runs
    "--distributed": "on a cluster; tests/test_processes.py",
    "--from=t5x": "with T5X's checkpoint of that size; tests/test_foreign_formats.py",
    "t5x_lab compile": "for minutes; tests/test_compile.py and benchmarks/",
    "eai_rte,eai_cb": "tests/test_eai_eval.py",
    "=mine.gin": "tests/test_tutorial.py",
    "eval --model_dir=runs/mine": "tests/test_tutorial.py",
    "models/decoder/base.gin --gin_file=recipes/mt_f.gin": "docs/prompts.md",
    "t5_super_glue_rte": "docs/fine_tuning.md",
    "tasks=eai_eval": "tests/test_eai_eval.py",
    "harness  --model_dir=runs/demo": "docs/evaluation.md",
    "tickets": "tests/test_prompts_tutorial.py",
    "gemma-2-2b": "with published weights; tests/test_restore_rules.py",
    "gs://my_bucket": "on other runners; tests/test_corpora.py",
    "my_study.gin": "tests/test_study.py",
    "=finetune.gin": "tests/test_moving.py",
    "migrate finetune.gin": "tests/test_moving.py and tests/test_migration.py",
    "my_project/finetune.gin": "tests/test_migration.py",
    "runs/reviews": "tests/test_moving.py",
    "study --gin_file=studies/": "for hours; tests/test_study.py plans them",
    "t5x_lab train: ": "nowhere: it is a message",
    "t5x_lab RUN": "nowhere: RUN stands for the words of a command",
}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with the runs, data and modules that the pages speak of."""
    folder = tmp_path_factory.mktemp("place")
    write_data(folder)
    write_own(folder)
    done = commands.run(
        *["train", "--gin_file=models/t5_1_1/tiny.gin", "--gin_file=objectives/span_corruption.gin"],
        *f"--gin.MIXTURE_OR_TASK_NAME=sotu {SMALL} --gin.TRAIN_STEPS=2 --gin.MODEL_DIR={folder}/runs/base {BYTES} {FILES}".split(),
        '--gin.TASK_FEATURE_LENGTHS={"inputs": 64, "targets": 24}',
        environment=OFFLINE,
    )
    assert done.returncode == 0, done.stderr
    bindings = ["VOCABULARY = @ByteVocabulary()", "TransformerConfig.vocab_size = 384"]
    for name, model in (("lm", "decoder"), ("gpt1", "gpt1")):
        t5x_lab.from_gin([f"models/{model}/tiny.gin"], bindings).save(str(folder / "runs" / name))
    for name in ("demo", "other", "x", "wide", "prefix", "pretrained", "small", "t5_1_1_small"):
        shutil.copytree(folder / "runs" / "base", folder / "runs" / name)
    return folder


def write_data(folder: pathlib.Path) -> None:
    write_all(folder / "data", 2)
    for split in ("train", "validation", "test"):
        write_lines(
            folder / "data" / "glue/cola" / f"{split}.jsonl", [{"sentence": "It is.", "label": n, "idx": n} for n in (0, 1)]
        )
    for name in BLIMP:
        pair = {"sentence_good": "A cat is.", "sentence_bad": "A cat are."}
        write_lines(folder / "data" / "blimp" / f"{name}.jsonl.gz", [pair])
    write_lines(folder / "choices.jsonl", [{"inputs": "Is it?", "choices": ["yes", "no"], "label": 0}] * 2)
    write_lines(folder / "tasks" / "asked.jsonl", [{"question": "Is it?", "label": 0}] * 2)
    harness_task(folder / "tasks", "my_task", folder / "tasks" / "asked.jsonl", "{{question}}", ["yes", "no"], "label")
    speeches = list(itertools.islice(seqio.get_mixture_or_task("sotu").source.get_dataset("train").as_numpy_iterator(), 40))
    pages = [{"url": f"http://example.org/{n}", "text": speech["text"].decode()} for n, speech in enumerate(speeches)]
    write_lines(folder / "crawl" / "pages.jsonl", [*pages, {**pages.pop(), "url": validation_url()}])
    write_lines(
        folder / "my_questions.jsonl", [{"text": "Who was the first to speak to both houses of the Congress in person?"}]
    )
    for name in ("prompts.txt", "texts.txt", "my_text.txt", "corpus/a.txt"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("A text of a line.\nAnd of another one.\n" * 40)


def validation_url() -> str:
    """Returns the URL of a page for the validation split, one in a thousand."""
    urls = (f"http://example.org/validation/{n}" for n in itertools.count())
    return next(url for url in urls if split_name(Page(url, "").key) == "validation")


def write_own(folder: pathlib.Path) -> None:
    """Writes the files of a reader: a module of tasks and gin files."""
    mixture = 'seqio.MixtureRegistry.add("my_mixture", [("my_text", 1.0)])'
    steps = "seqio.CacheDatasetPlaceholder(), seqio.preprocessors.tokenize"
    tasks = documented("custom_data.md", "shift_noise").replace("seqio.preprocessors.tokenize", steps)
    (folder / "my_tasks.py").write_text(f"{tasks}\n{mixture}\n")
    (folder / "my_run.gin").write_text(documented("custom_data.md", "import my_tasks"))
    (folder / "my_questions.py").write_text(documented("custom_data.md", "exact_match"))
    (folder / "questions.tsv").write_text("Is it?\tyes\nIs it not?\tno\n" * 8)
    (folder / "own_train.gin").write_text(
        'import my_tasks\ninclude "models/t5_1_1/tiny.gin"\ninclude "objectives/span_corruption.gin"\nMIXTURE_OR_TASK_NAME = "sotu"\nTRAIN_STEPS = 2\n'
    )


def localize(command: str) -> list[str]:
    """The words of a command of ours, as it runs here."""
    command = re.split(r" +#| [|>] | 2>", command)[0].strip()
    for text, instead in STAND_INS:
        command = re.sub(text, instead, command)
    argv = shlex.split(command)[1:]
    command_line = " ".join(argv)
    if argv[0] in ("train", "cache"):
        argv += [] if "vocab_size" in command_line else BYTES.split()
        argv += [] if "RECORDS" in command_line or "t5_" not in command_line else FILES.split()
    if argv[0] == "train":
        argv += SMALL.split()
        is_long = "span_corruption.gin" in command_line and "FEATURE_LENGTHS" not in command_line
        argv += ['--gin.TASK_FEATURE_LENGTHS={"inputs": 64}'] if is_long else []
        argv += [] if "TRAIN_STEPS" in command_line or "my_run.gin" in command_line else ["--gin.TRAIN_STEPS=2"]
        argv += [] if "MODEL_DIR" in command_line else [f"--gin.MODEL_DIR=runs/new{abs(hash(command_line))}"]
    return argv


def is_ours(line: str) -> bool:
    return line.startswith(("t5x_lab ", "python -m t5x_lab.")) and not any(
        words_elsewhere in line for words_elsewhere in ELSEWHERE
    )


PAGES_THAT_RUN = [page for page in PAGES if [line for line in commands_of(page.read_text()) if is_ours(line)]]


@pytest.mark.parametrize("page", PAGES_THAT_RUN, ids=lambda page: page.name)
def test_commands_of_the_documentation_run(page, place):
    lines = list(filter(is_ours, commands_of(page.read_text())))
    if any("promptsource/templates" in line for line in lines):
        shared_data("prompts", "promptsource_templates")
    shutil.copytree(place, ".", dirs_exist_ok=True)
    for line in lines:
        argv = localize(line)
        if line.startswith("python "):
            done = subprocess.run([sys.executable, *argv], env=os.environ | OFFLINE, capture_output=True, text=True)
        else:
            done = commands.run(*argv, environment=OFFLINE)
        assert done.returncode == 0 and "could not be written" not in done.stderr, (
            f"{line}\n{shlex.join(argv)}\n{done.stderr[-3000:]}"
        )
