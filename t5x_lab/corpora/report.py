"""The report of a corpus: what each rule removed, with examples, sizes, lengths, languages and domains."""

import contextlib
import glob
import io
import re
from typing import Any

from etils import epath

from t5x_lab.config.errors import UserError
from t5x_lab.config.json_files import parse_json
from t5x_lab.config.object_storage import is_object_storage
from t5x_lab.corpora.completion import SUMMARY
from t5x_lab.corpora.files import exists, match_files, open_input, open_output
from t5x_lab.report.markdown_page import to_html

FILE = "report.html"
_MAX_ROWS = 25


def find_corpus(folder: str) -> str | None:
    """Returns the folder of a corpus: the folder itself, or that of the only data set in it. None if it has none.

    Raises:
      UserError: if it has several.
    """
    if "://" in folder:
        folder = folder.rstrip("/")
        if is_object_storage(folder) and not epath.Path(folder, SUMMARY).exists():
            return None  # a run, whose report needs no Beam
        with contextlib.suppress(UserError):  # a run may be on a storage that Beam does not know
            return folder if is_object_storage(folder) or exists(f"{folder}/{SUMMARY}") else None
        return None
    if exists(f"{folder}/{SUMMARY}"):
        return folder.rstrip("/") or folder
    corpora = [path.rpartition("/")[0] for path, _ in match_files(f"{glob.escape(folder)}/c4/*/*/{SUMMARY}")]
    if len(corpora) > 1:
        raise UserError(f"{folder} has several corpora. Choose one: {', '.join(corpora)}.")
    return corpora[0] if corpora else None


def read_summary(output: str) -> dict[str, Any]:
    """Returns the summary of a corpus.

    Raises:
      UserError: if the folder has none.
    """
    path = f"{output}/{SUMMARY}"
    if not exists(path):
        raise UserError(f"{output} is no finished corpus: it has no {SUMMARY}. Run t5x_lab corpus with --output_dir={output}.")
    with open_input(path) as file:
        try:
            return parse_json(file.read())
        except ValueError as error:
            raise UserError(f"{path} is damaged: {error}. Run t5x_lab corpus again.") from error


def summary_table(summary: dict[str, Any]) -> str:
    """Returns the counts of rules and the sizes of splits as a table for the console."""
    read, rows = summary["counts"].get("read", {}), _rule_rows(summary)
    width = max([len(row[0]) for row in rows] + [20])
    lines = [f"{'rule':<{width}} {'pages':>12} {'lines':>12} {'bytes':>16}"]
    lines.append(f"{'input':<{width}} {read.get('pages in', 0):>12,} {'':>12} {read.get('bytes in', 0):>16,}")
    lines += [f"{name:<{width}} {-pages:>12,} {-units:>12,} {-size:>16,}" for name, pages, units, size in rows]
    for split, size in summary["splits"].items():
        lines.append(f"{split:<{width}} {size['pages']:>12,} {'':>12} {size['text_bytes']:>16,}")
    problems = _problem_rows(summary)
    if problems:
        lines.append("Also: " + ", ".join(f"{number:,} {name}" for name, number in problems) + ".")
    return "\n".join(lines)


def _rule_rows(summary: dict[str, Any], details: bool = False) -> list[tuple[str, int, int, int]]:
    """Returns (rule, pages, lines or sentences, bytes of text) that rules have dropped, in the order of the rules.

    Args:
      summary: summary of a corpus.
      details: whether reasons of a rule, such as the languages that are dropped, have rows of their own.
    """
    rows: dict[str, list[int]] = {}
    for counts in summary["counts"].values():
        for name, number in counts.items():
            unit, _, rule = name.partition(" dropped: ")
            if not rule or name.startswith("failed: ") or (": " in rule and not details):
                continue
            column = {"pages": 0, "lines": 1, "sentences": 1, "bytes": 2}[unit]
            rows.setdefault(rule, [0, 0, 0])[column] += number
    place = {name: number for number, name in enumerate(summary["rules"])}
    order = sorted(rows, key=lambda rule: (place.get(rule.partition(": ")[0], len(place)), rule))
    return [(rule, rows[rule][0], rows[rule][1], rows[rule][2]) for rule in order]


def _problem_rows(summary: dict[str, Any]) -> list[tuple[str, int]]:
    """Returns (problem, number) of records that have no page, or a damaged one."""
    counts = summary["counts"].get("read", {})
    prefixes = ("damaged_", "dropped_", "skipped_")
    rows = [(name.replace("_", " "), number) for name, number in counts.items() if name.startswith(prefixes)]
    rows += [
        (name, counts[name])
        for name in ("pages without URL", "timestamps in the future", "timestamps that cannot be read")
        if name in counts
    ]
    rows += [
        (name, number)
        for listed in summary["counts"].values()
        for name, number in listed.items()
        if name.startswith("pages changed")
    ]
    failures = [
        (name, number)
        for counts in summary["counts"].values()
        for name, number in counts.items()
        if name.startswith("failed: ")
    ]
    return sorted(rows) + failures


def write_report(output: str, path: str | None = None) -> str:
    """Writes the report of a corpus. Returns its path.

    Args:
      output: folder with corpus.json.
      path: path of the page. None = report.html in that folder.
    """
    summary = read_summary(output)
    text, figures = _to_markdown(summary)
    path = path or f"{output}/{FILE}"
    with open_output(path) as file:
        file.write(to_html(f"Corpus {summary['name']}", text, figures).encode("utf-8", "replace"))
    return path


def _to_markdown(summary: dict[str, Any]) -> tuple[str, dict[str, bytes]]:
    read = summary["counts"].get("read", {})
    total = max(read.get("bytes in", 0), 1)
    splits = [
        [split, *(f"{size[name]:,}" for name in ("pages", "text_bytes", "file_bytes", "files"))]
        for split, size in summary["splits"].items()
    ]
    rules = [
        [
            f"`{name}`",
            f"{pages:,}",
            *(["", "", ""] if ": " in name else [f"{units:,}", f"{size:,}", f"{size / total:.1%}"]),
        ]
        for name, pages, units, size in _rule_rows(summary, details=True)
    ]
    figures = {"lengths.png": _length_figure(summary["lengths"])} if summary["lengths"] else {}
    parts = [
        f"# Corpus {summary['name']}",
        f"{read.get('files', 0):,} files with {read.get('file bytes', 0):,} bytes, {read.get('pages in', 0):,} pages with "
        f"{read.get('bytes in', 0):,} bytes of text.",
        _table(["split", "pages", "bytes of text", "bytes of files", "files"], splits),
        "## What each rule removed",
        "In their order. A rule sees what the rules before it have left. Bytes are those of text, all of a dropped page.",
        _table(["rule", "pages", "lines", "bytes", "of the input"], rules),
        "## Other counts: damaged records, records without a page, changed pages",
        _table(["problem", "number"], [[name, f"{number:,}"] for name, number in _problem_rows(summary)]),
        "## Damaged files",
        _table(["file", "damage"], _damage_rows(summary["damaged_files"])),
        "## Pages by length",
        *[f"![Pages by number of characters]({name})" for name in figures],
        "## Pages by language",
        _table(["language", "pages"], _top(summary["languages"])),
        "## The most frequent domains",
        _table(["domain", "pages"], _top(summary["domains"])),
        "## Examples of dropped pages",
    ]
    for rule, examples in summary["examples"].items():
        parts.append(f"### `{rule}`")
        parts += [f"{_code(url)}\n\n{_fence(text)}" for _, url, text in examples]
    parts += ["## Recipe", _fence(summary["config"])]
    return "\n\n".join(parts) + "\n", figures


def _damage_rows(files: dict[str, dict[str, int]]) -> list[list[str]]:
    rows = [
        [
            _code(path),
            ", ".join(f"{number:,} {kind.removeprefix('damaged_').replace('_', ' ')}" for kind, number in kinds.items()),
        ]
        for path, kinds in list(files.items())[:_MAX_ROWS]
    ]
    return [*rows, ["…", f"{len(files) - _MAX_ROWS:,} more, in {SUMMARY}"]] if len(files) > _MAX_ROWS else rows


def _top(counts: dict[str, int]) -> list[list[str]]:
    return [[name, f"{number:,}"] for name, number in list(counts.items())[:_MAX_ROWS]]


def _table(names: list[str], rows: list[list[str]]) -> str:
    if not rows:
        return "None."
    is_number = lambda column: all(re.fullmatch(r"[\d,.]*%?", row[column]) for row in rows)
    lines = [names, ["---:" if is_number(column) else "---" for column in range(len(names))], *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in row) + " |" for row in lines)


def _code(text: str) -> str:
    return "`" + " ".join(text.replace("`", "'").split()) + "`"


def _fence(text: str) -> str:
    return "~~~\n" + text.replace("~~~", "~ ~ ~") + "\n~~~"


def _length_figure(lengths: dict[str, int]) -> bytes:
    """Returns an SVG of the number of pages by length. Lengths are numbers of binary digits."""
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    digits = range(min(map(int, lengths)), max(map(int, lengths)) + 1)
    figure = Figure(figsize=(7.0, 2.8), layout="constrained")
    axes = figure.add_subplot()
    axes.bar([f"{1 << (digit - 1):,}" if digit else "0" for digit in digits], [lengths.get(str(digit), 0) for digit in digits])
    axes.set_xlabel("characters, from")
    axes.set_ylabel("pages")
    axes.tick_params(axis="x", rotation=45)
    image = io.BytesIO()
    with matplotlib.rc_context({"svg.hashsalt": "corpus"}):  # the same page for the same corpus
        FigureCanvasSVG(figure).print_svg(image, metadata={"Date": None})
    return image.getvalue()
