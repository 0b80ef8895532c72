"""What the documentation tells a reader to type can be typed."""

import pathlib
import re
import subprocess

import commands
import pytest
from conftest import ROOT

from t5x_lab.runs.config import GinConfig

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
        r"--gin_file=((?:models|objectives|runs|meshes|optimizers|recipes|added|mixtures|compute)/[\w./]+\.gin)", text
    ):
        assert (ROOT / "gin" / name).exists(), name
    for link in re.findall(r"\]\(([\w./]+)\)", text):
        assert (page.parent / link).exists(), link


OWN = sorted(page for page in (ROOT / "docs" / "own").glob("*.md") if page.name != "tutorial.md")


def bind_all(page: str) -> list[str]:
    """The settings of a page's gin files, with the page's modules beside them."""
    blocks = re.findall(r"```(python|gin)\n(.*?)```", pathlib.Path(page).read_text(), re.DOTALL)
    code = [text for kind, text in blocks if kind == "python" and "@gin.configurable" in text]
    pathlib.Path("of_the_page.py").write_text("\n\n".join(code))
    found = []
    for settings in (re.sub(r"import my_\w+", "import of_the_page", text) for kind, text in blocks if kind == "gin"):
        config = GinConfig(["models/causal_decoder/tiny.gin", "objectives/full_lm.gin"], [*RUN, settings])
        config.run()
        GinConfig([], [config.text]).run()  # as a run directory keeps it
        found.append(settings)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("page", OWN, ids=lambda page: page.name)
def test_every_page_on_objects_of_ones_own_binds_what_it_shows(page):
    """In a process of its own, for gin knows each name once."""
    assert commands.call(bind_all, str(page))
