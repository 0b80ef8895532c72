"""Commands, gin bindings and Python of the documentation are accepted."""

import argparse
import importlib
import pathlib
import re
import shlex
import subprocess

import commands
import pytest
from conftest import ROOT

import t5x_lab
from t5x_lab.cli.flags import gin_config
from t5x_lab.cli.main import COMMANDS, _parse
from t5x_lab.config.errors import UserError
from t5x_lab.config.gin_files import binding
from t5x_lab.corpora.stages.context import parse_corpus
from t5x_lab.runs.config.gin_config import GinConfig

RUN = ['MODEL_DIR = "run"', "TRAIN_STEPS = 100000", "VOCABULARY = @ByteVocabulary()", "TransformerConfig.vocab_size = 384"]

PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])


def commands_of(text: str) -> list[str]:
    """Lines of a page or a gin file that start a command of ours, with those that they go on in."""
    lines = re.sub(r"\\\n", "", text).splitlines()
    bare = [re.sub(r"^(    |#\s+)", "", line) for line in lines]
    return [line for line in bare if re.match(r"(t5x_lab|pip|make|python) ", line)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_shell_takes_every_command_of_the_documentation(page):
    script = "\n".join(commands_of(page.read_text()))
    done = subprocess.run(["bash", "-n"], input=script, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_gin_files_and_links_that_the_documentation_names_are_there(page):
    text = page.read_text()
    for name in re.findall(
        r"--gin_file=((?:models|objectives|runs|meshes|optimizers|recipes|peft|mixtures|compute|studies|corpora)/[\w./]+\.gin)",
        text,
    ):
        assert (ROOT / "gin" / name).exists(), name
    for link in re.findall(r"\]\(([\w./]+)\)", text):
        assert (page.parent / link).exists(), link


CUSTOM = sorted(page for page in (ROOT / "docs" / "custom").glob("*.md") if page.name != "tutorial.md")


def bind_all(page: str) -> list[str]:
    """The settings of a page's gin files, with the page's modules beside them."""
    blocks = re.findall(r"```(python|gin)\n(.*?)```", pathlib.Path(page).read_text(), re.DOTALL)
    code = [text for kind, text in blocks if kind == "python" and "@gin.configurable" in text]
    pathlib.Path("of_the_page.py").write_text("\n\n".join(code))
    bindings = []
    for settings in (re.sub(r"import my_\w+", "import of_the_page", text) for kind, text in blocks if kind == "gin"):
        config = GinConfig(["models/causal_decoder/tiny.gin", "objectives/full_lm.gin"], [*RUN, settings])
        config.run()
        GinConfig([], [config.text]).run()  # as a run directory keeps it
        bindings.append(settings)
    return bindings


@pytest.mark.slow
@pytest.mark.parametrize("page", CUSTOM, ids=lambda page: page.name)
def test_every_page_on_objects_of_ones_own_binds_what_it_shows(page):
    """Runs in a separate process because gin registers each name once."""
    assert commands.call(bind_all, str(page))


def typed(page: pathlib.Path) -> list[list[str]]:
    """The words of each command t5x_lab that a page or a notebook has, "…" for what the reader adds among them."""
    lines = commands_of(page.read_text())
    argvs = [shlex.split(re.split(r" [|>] | 2>", line)[0], comments=True) for line in lines if line.startswith("t5x_lab ")]
    return [argv for argv in argvs if argv[1] in COMMANDS]


NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.py"))


@pytest.mark.parametrize("page", [*PAGES, *NOTEBOOKS], ids=lambda page: page.name)
def test_commands_take_what_the_documentation_types(page):
    """Flags are those of the command's parser, gin's names are known, and a training that leaves nothing out can be built."""
    for _, name, *argv in typed(page):
        module = importlib.import_module(f"t5x_lab.cli.{name}")
        parser = argparse.ArgumentParser(prog=name, allow_abbrev=False, exit_on_error=False)
        module.add_flags(parser)
        arguments = [word for word in argv if word != "…" and not re.fullmatch(r"[A-Z_]{3,}", word)]
        required = [action for action in parser._actions if action.required and action.option_strings]
        flags = {word.partition("=")[0] for word in arguments}
        if "…" in argv:
            arguments += [f"{action.option_strings[0]}=x" for action in required if action.option_strings[0] not in flags]
        args = _parse(parser, arguments)
        if not hasattr(args, "gin_file") or any("my_" in file or "/" not in file or "FOLDER" in file for file in args.gin_file):
            continue  # files that the page shows, or a script writes, which other tests write and run
        if any(re.match(r"import (my_|mine|tickets)", binding) for binding in args.gin_bindings):
            continue
        if name == "corpus":
            bindings = [*args.gin_bindings, *map(binding, args.gin)]
            assert parse_corpus(["corpora/c4.gin", *args.gin_file], bindings)[0].name
            continue
        config = gin_config(args)
        assert config.text or not args.gin_file
        if name == "train" and "…" not in argv:
            try:
                config.run()
            except UserError as error:
                assert "is not available" in error.sentence  # a data set that the reader has prepared


GIN = [
    (page, number, text)
    for page in sorted((ROOT / "docs").glob("*.md"))
    for number, text in enumerate(re.findall(r"```gin\n(.*?)```", page.read_text(), re.DOTALL))
    if "import my_" not in text
    and "Study." not in text
    and "Corpus." not in text  # other tests write their modules and build them
]


@pytest.mark.parametrize("page, number, text", GIN, ids=[f"{page.name}-{number}" for page, number, _ in GIN])
def test_settings_of_the_documentation_can_be_built(page, number, text):
    config = GinConfig(["models/t5_1_1/tiny.gin", "objectives/span_corruption.gin"], [*RUN, text])
    assert config.run() and GinConfig([], [config.text]).run()


STAND_INS = {  # for the runs that examples load
    "runs/demo": [], "runs/x": [], "runs/base": [], "flan-t5-base": [],
    "runs/cola": ["HEAD = @ClassificationHead()", 'ClassificationHead.classes = ("no", "yes")',
                  'MIXTURE_OR_TASK_NAME = "classify_glue_cola"', 'TASK_FEATURE_LENGTHS = {"inputs": 32}'],
    "runs/tuned": ['PEFT = {"lora": @Lora()}', 'TRAINABLE = ".*/lora/.*"'],
}  # fmt: skip
EXAMPLES = [
    (page, number, text)
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    for number, text in enumerate(re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL))
    if "t5x_lab.load" in text
]


@pytest.mark.exhaustive
@pytest.mark.parametrize("page, number, text", EXAMPLES, ids=[f"{page.name}-{number}" for page, number, _ in EXAMPLES])
def test_examples_in_python_run(page, number, text):
    """On models of bytes with fresh weights, in the places that the examples name."""
    for place in filter(text.__contains__, STAND_INS):
        is_decoder = "decoder_input_tokens" in text or "classify" in text
        files = ["models/causal_decoder/tiny.gin"] if is_decoder else ["models/t5_1_1/tiny.gin"]
        bindings = ["VOCABULARY = @ByteVocabulary()", "TransformerConfig.vocab_size = 384", *STAND_INS[place]]
        model = t5x_lab.from_gin(files, bindings)
        model.save(place)
    if "with_peft" in text:
        for name in "ab":
            lora = t5x_lab.from_gin(files, [*bindings[:2], 'PEFT = {"lora": @Lora()}'])
            lora.save_peft(name)
    exec(text if "import t5x_lab" in text else f"import t5x_lab\n{text}", {"prompts": ["a"], "inputs": ["b"], "targets": ["c"]})
