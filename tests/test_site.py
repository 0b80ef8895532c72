"""The site: its reference holds what the code has, no link of it is dead, nothing of it comes from elsewhere."""

import argparse
import ast
import functools
import html.parser
import http.server
import importlib
import json
import os
import pathlib
import re
import subprocess
import sys
import threading
import urllib.parse

import pytest
from browser import found_in_browser
from conftest import ROOT

import notebooks
import reference
from t5x_lab.cli.main import COMMANDS
from t5x_lab.report.run_directory import parse_settings
from t5x_lab.runs.config.configurables import CONFIGURABLES

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> pathlib.Path:
    """The site as `make docs` builds it, but that notebooks are not run."""
    folder = tmp_path_factory.mktemp("site")
    environment = {**os.environ, "SITE_WITHOUT_OUTPUTS": "1", "NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and "WARNING -" not in done.stdout + done.stderr, done.stdout + done.stderr
    return folder


class Page(html.parser.HTMLParser):
    """Ids, links and tags of an HTML page.

    Attributes:
      ids: that a link may lead to.
      links: of <a>.
      loaded: what a browser fetches by itself.
      tags: their names.
    """

    def __init__(self, path: pathlib.Path):
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.tags: set[str] = set()
        self.feed(path.read_text())

    def handle_starttag(self, tag, attrs):
        attributes = dict(attrs)
        self.tags.add(tag)
        self.ids |= {attributes[key] for key in ("id", "name") if attributes.get(key)}
        if tag == "a" and attributes.get("href"):
            self.links.append(attributes["href"])
        if tag in ("script", "img", "iframe", "source") and attributes.get("src"):
            self.loaded.append(attributes["src"])
        if tag == "link" and {"stylesheet", "icon", "preload", "preconnect"} & set((attributes.get("rel") or "").split()):
            self.loaded.append(attributes["href"])


@pytest.fixture(scope="module")
def pages(site) -> dict[str, Page]:
    return {str(path.relative_to(site)): Page(path) for path in sorted(site.rglob("*.html"))}


@pytest.mark.exhaustive
def test_no_link_is_dead(site, pages):
    dead = []
    for name, page in pages.items():
        for link in page.links + page.loaded:
            url = urllib.parse.urlsplit(link)
            if url.scheme or link.startswith("//") or name == "404.html":
                continue
            target = site / name if not url.path else (site / name).parent / urllib.parse.unquote(url.path)
            target = target / "index.html" if target.is_dir() else target
            ids = (
                pages[str(target.resolve().relative_to(site.resolve()))].ids
                if target.suffix == ".html" and target.exists()
                else {}
            )
            if not target.exists() or (
                url.fragment and target.suffix == ".html" and urllib.parse.unquote(url.fragment) not in ids
            ):
                dead.append((name, link))
    assert not dead and len(pages) > 45, dead[:20]


@pytest.mark.exhaustive
def test_what_is_written_as_name_is_no_tag(site, pages):
    """Docstrings and pages contain evals/<name>/<step>.json."""
    placeholders = {
        "name",
        "step",
        "task",
        "task>-<step",
        "data",
        "template",
        "pad",
        "unk",
        "extra_id_0",
        "metric",
        "cluster",
        "folder",
    }
    results = {(name, tag) for name, page in pages.items() for tag in page.tags & placeholders}
    assert not results
    page_text = re.sub(r"<[^>]+>", "", (site / "reference" / "gin" / "index.html").read_text())
    assert html.escape("inference/<name>/<task>-<step>.jsonl") in page_text


@pytest.mark.exhaustive
def test_nothing_comes_from_elsewhere(site, pages):
    for name, page in pages.items():
        assert not [link for link in page.loaded if re.match(r"(\w+:)?//", link) and not link.startswith("data:")], name
    for style in site.rglob("*.css"):
        results = re.findall(r"(?:url\(|@import\s+)[\"']?((?:https?:)?//[^\"')]+)", style.read_text())
        assert not results, (style, results)


@pytest.mark.exhaustive
def test_the_start_page_is_the_readme(site):
    page = (site / "index.html").read_text()
    assert not re.search(r'<a href="[^"]*"></a>', page), "a link lost its words"
    start = re.sub(r"<[^>]+>", "", page)
    for heading in re.findall(r"^## (.*)$", (ROOT / "README.md").read_text(), re.MULTILINE):
        assert html.escape(heading, quote=False) in start, heading
    index = json.loads((site / "search" / "search_index.json").read_text())
    locations = {entry["location"] for entry in index["docs"] if "SamplesEvaluation.temperature" in entry["text"]}
    assert "reference/gin/#samplesevaluation" in locations


def test_a_notebook_is_run_and_leaves_no_process(tmp_path, monkeypatch):
    (tmp_path / "tiny.py").write_text("# %%\nimport os\nprint(os.getpid())\n")
    monkeypatch.setattr(notebooks, "FOLDER", tmp_path)
    (cell,) = notebooks.executed("tiny").cells
    with pytest.raises(ProcessLookupError):
        os.kill(int(cell.outputs[0].text), 0)


def test_defaults_are_those_of_the_file_that_is_read_first():
    reference_text = reference.configurables()
    for name, value in parse_settings((ROOT / "gin" / "runs" / "defaults.gin").read_text()).items():
        scope, _, name_of_row = name.rpartition("/")
        value = re.sub('^"(.*)"$', r"'\1'", value)
        row = next(line for line in reference_text.splitlines() if line.startswith(f"| `{name_of_row}` | "))
        assert f"`{value.removeprefix('%')}`" in row and f"`{scope}" in row, name
        if value.startswith("%"):
            assert re.search(rf"^\| `{value[1:]}` \|.*\[`{name}`\]\(#", reference_text, re.MULTILINE), name
    assert re.search(r"`Lora.modules` \| `'\.\*attention/\(query\|value\)'` \|", reference_text)  # to be copied as it is


@pytest.mark.exhaustive
def test_every_command_and_flag_is_in_the_reference(site):
    page_text = html.unescape(re.sub(r"<[^>]+>", "", (site / "reference" / "commands" / "index.html").read_text()))
    for name in COMMANDS:
        assert f"t5x_lab {name}" in page_text
        parser = argparse.ArgumentParser(add_help=False)
        importlib.import_module(f"t5x_lab.cli.{name}").add_flags(parser)
        for action in parser._actions:
            for option in action.option_strings or [action.metavar or action.dest]:
                assert option in page_text, (name, option)
            assert action.help, f"{name} has no help for {action.dest}"


def test_every_configurable_is_in_the_reference_with_a_sentence_for_each_parameter():
    page = reference.configurables()
    missing = []
    for name, thing in reference.registered().items():
        section = page.partition(f"### {name} {{#")[2].partition("\n### ")[0]
        assert section.partition("}")[2].strip(), f"{name} has no sentence"
        for parameter, default, _ in reference.parameters(thing):
            row = re.search(rf"^\| `{name}\.{parameter}` \| (.*?) \| (.*) \|$", section, re.MULTILINE)
            assert row, f"{name}.{parameter}"
            if not row.group(2).strip():
                missing.append(f"{name}.{parameter}")
            assert row.group(1).strip("`") or default == ""
    assert not missing, missing
    names = {thing.__name__ for thing in CONFIGURABLES}
    for path in (ROOT / "t5x_lab").rglob("*.py"):
        names |= set(re.findall(r"^@gin\.configurable.*\n(?:def|class) (\w+)", path.read_text(), re.MULTILINE))
    assert names <= set(reference.registered()), names - set(reference.registered())
    assert set(reference.macros()) >= {"MODEL", "EVALS", "BATCH_SIZE", "HOOKS"} and len(reference.registered()) > 60


def public_names(path: pathlib.Path) -> list[str]:
    """Classes and functions of a module, and of its classes the methods, that do not begin with an underscore."""
    module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
    names = []
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and not node.name.startswith("_"):
            names.append(f"{module}.{node.name}")
            inner = node.body if isinstance(node, ast.ClassDef) else []
            names += [
                f"{module}.{node.name}.{method.name}"
                for method in inner
                if isinstance(method, ast.FunctionDef) and method.name[0] != "_"
            ]
    return names


@pytest.mark.exhaustive
def test_every_public_python_name_is_in_the_reference(site, pages):
    ids = set().union(*(page.ids for name, page in pages.items() if name.startswith("reference/")))
    files = [path for path in (ROOT / "t5x_lab").rglob("*.py") if not path.name.startswith("_")]
    names = [name for path in files for name in public_names(path)]
    assert len(names) > 900 and not [name for name in names if name not in ids], [n for n in names if n not in ids][:20]


# Pages in frames as wide as a telephone and a screen; how much wider their content is than they are.
PROBE = """<!doctype html><body><script>
addEventListener("load", () => setTimeout(() => {
  const found = [...document.querySelectorAll("iframe")].map((frame) => {
    const page = frame.contentDocument.documentElement;
    return [frame.getAttribute("src"), page.clientWidth, page.scrollWidth - page.clientWidth, page.innerText.length];
  });
  document.body.innerHTML = "<pre id=found></pre>";
  document.querySelector("pre").textContent = JSON.stringify(found);
}, 5000));
</script>%s</body>"""


def test_the_stylesheet_keeps_commands_and_names_whole_and_hides_empty_header_rows():
    """Read, not rendered: the browser's test below needs one. A flag is broken where a rule lets lines break anywhere."""
    text = re.sub(r"/\*.*?\*/", "", (ROOT / "docs/site/style.css").read_text(), flags=re.DOTALL)
    rules = [(selector.strip(), body.replace(" ", "")) for selector, body in re.findall(r"([^{}]+)\{([^{}]*)\}", text)]
    commands = [body for selector, body in rules if re.search(r"\bpre\b.*\bcode\b", selector)]
    tables = [body for selector, body in rules if re.search(r"\btable\b.*\b(code|td|th)\b", selector)]
    breaking = re.compile(r"(overflow-wrap|word-wrap|word-break):(anywhere|break-word|break-all)|white-space:pre-wrap")
    assert commands and tables and not [body for body in commands + tables if breaking.search(body)]
    # Over the theme's own break-word, which breaks names between any two letters.
    assert [body for selector, body in rules if selector.endswith("table:not([class]) code") and "word-break:keep-all" in body]
    assert [body for selector, body in rules if "thead" in selector and ":empty" in selector and "display:none" in body]


@pytest.mark.exhaustive
def test_a_browser_cuts_nothing_off(site):
    looked_at = ("index.html", "custom/network/", "notebooks/train_and_look/", "reference/gin/", "reference/python/runs/")
    frames = [f'<iframe src="{page}" width="{width}" height="900"></iframe>' for page in looked_at for width in (390, 1280)]
    (site / "probe.html").write_text(PROBE % "".join(frames))
    quiet = type("Quiet", (http.server.SimpleHTTPRequestHandler,), {"log_message": lambda *args: None})
    server = http.server.ThreadingHTTPServer(("localhost", 0), functools.partial(quiet, directory=str(site)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        result = found_in_browser(f"http://localhost:{server.server_port}/probe.html")
    finally:
        server.shutdown()
        server.server_close()
        (site / "probe.html").unlink()
    assert len(result) == 10
    assert all(wide > 350 and over <= 0 and text > 500 for _, wide, over, text in result), result
