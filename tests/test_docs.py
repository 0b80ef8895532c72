"""What the documentation tells a reader to type can be typed."""

import re
import subprocess

import pytest
from conftest import ROOT

PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])


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
    for name in re.findall(r"--gin_file=((?:models|objectives|runs|meshes|optimizers|recipes)/[\w./]+\.gin)", text):
        assert (ROOT / "gin" / name).exists(), name
    for link in re.findall(r"\]\(([\w./]+)\)", text):
        assert (page.parent / link).exists(), link
