"""What the site is made of beside docs/*.md: its start page, which is the README, notebooks that are run, and the reference.

With SITE_WITHOUT_OUTPUTS=1 notebooks are not run.
"""

import contextlib
import os
import pathlib
import re
from collections.abc import Iterator

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # before the code that the reference is made of is imported

import pygments.lexers
from mkdocs.structure.files import File, Files
from placeholders import Placeholders
from pygments.lexers.python import PythonLexer

import notebooks
import reference

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


@contextlib.contextmanager
def _without_stderr() -> Iterator[None]:
    """Whatever is written there, by libraries in C++ too, is lost."""
    kept = os.dup(2)
    with open(os.devnull, "w") as nothing:
        os.dup2(nothing.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


def on_files(files: Files, config) -> Files:
    """Adds the pages that are made of the code, and of the repository's own."""
    with _without_stderr():
        import tensorflow  # noqa: F401  (which tells of the machine, not of the site)
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
