"""Pages of the site beside docs/*.md: the README as start page, executed notebooks, and the reference.

With SITE_WITHOUT_OUTPUTS=1 notebooks are not run.
"""

import os
import pathlib
import re

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # before the code that the reference is made of is imported

import pygments.lexers
from mkdocs.structure.files import File, Files
from placeholders import Placeholders
from pygments.lexers.python import PythonLexer

import notebooks
import reference
from t5x_lab.data.environment import check_environment

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
START, CONTRIBUTING = "index.md", "contributing.md"


class GinLexer(PythonLexer):
    """Gin's syntax is Python's, with references."""

    name = "Gin"
    aliases = ("gin",)
    filenames = ("*.gin",)


def on_startup(command: str, dirty: bool) -> None:
    del command, dirty
    pygments.lexers.LEXERS["GinLexer"] = (__name__, "Gin", ("gin",), ("*.gin",), ())
    pygments.lexers._lexer_cache["Gin"] = GinLexer


def on_config(config) -> None:
    config["markdown_extensions"].append(Placeholders())


def on_files(files: Files, config) -> Files:
    """Adds the pages that are made of the code, and of the repository's own."""
    check_environment()  # which imports TensorFlow without its words on the machine
    own = {
        START: f"---\nhide: [navigation]\n---\n\n{_of_repository('README.md')}",
        CONTRIBUTING: _of_repository("CONTRIBUTING.md"),
    }
    for path, text in {**own, **_notebooks(), **reference.pages()}.items():
        files.append(File.generated(config, path, content=text))
    return files


def _notebooks() -> dict[str, str]:
    get = notebooks.read if os.environ.get("SITE_WITHOUT_OUTPUTS") == "1" else notebooks.executed
    return {f"notebooks/{name}.md": notebooks.as_markdown(get(name), name) for name in notebooks.names()}


def _of_repository(name: str) -> str:
    """A page of the repository's root, with links as they are in the site."""
    text = (ROOT / name).read_text().replace("](CONTRIBUTING.md)", f"]({CONTRIBUTING})").replace("](README.md)", f"]({START})")
    return re.sub(r"\]\(docs/", "](", text).replace("[docs/", "[")
