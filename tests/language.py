"""Counts docstrings and names that break the project's language rules. Usage: python tests/language.py [REPOSITORY]

A docstring is a plain statement that stands alone. It does not begin with a relative clause or a preposition ("What becomes of a
record", "Of a file"). A name is the field's word for a thing, and not a pronoun, participle or particle (`found`, `of`, `theirs`).
"""

import ast
import pathlib
import re
import sys
from collections.abc import Iterator
from typing import NamedTuple

FRAGMENT = re.compile(r"(What|Of|How|Those|Who|Where|Which|As|From|With|Behind|In|By)\b")
VAGUE_NAMES = frozenset(
    re.findall(
        r"\w+",
        "found of what how said made theirs ours mine one kept given known told asked left behind words whose which there here "
        "seen taken meant",
    )
)
LIBRARY = ("t5x_lab", "tasks")
TESTS = ("tests", "benchmarks", "docs/site")
EXCEPTIONS = frozenset({"t5x_lab/papers/gpt1/probes.py:words"})  # gin parameter `Sentiment.words`, which holds words


class Finding(NamedTuple):
    """A docstring or name that breaks a rule."""

    kind: str
    path: str
    line: int
    text: str


def check_language(root: pathlib.Path, folders: tuple[str, ...] = LIBRARY) -> tuple[int, list[Finding]]:
    """Returns the number of docstrings in Python files, and all findings."""
    num_docstrings, findings = 0, []
    for folder in folders:
        for path in sorted((root / folder).rglob("*.py")):
            relative = path.relative_to(root)
            if relative.parts[:2] in (("t5x_lab", "tasks"), ("t5x_lab", "gin")):
                continue  # symbolic links
            for node in ast.walk(ast.parse(path.read_text())):
                docstring = _docstring(node)
                num_docstrings += docstring is not None
                if docstring and FRAGMENT.match(docstring.lstrip()):
                    line = getattr(node, "lineno", 1)
                    findings.append(Finding("docstring", str(relative), line, docstring.strip().splitlines()[0]))
                for name in _bound_names(node):
                    if name.lstrip("_") in VAGUE_NAMES and f"{relative}:{name}" not in EXCEPTIONS:
                        findings.append(Finding("name", str(relative), getattr(node, "lineno", 1), name))
    return num_docstrings, findings


def _docstring(node: ast.AST) -> str | None:
    has_docstring = isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
    return ast.get_docstring(node) if has_docstring else None


def _bound_names(node: ast.AST) -> Iterator[str]:
    """Yields the names that a node defines: variables, attributes, arguments, functions and classes."""
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        yield node.id
    elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
        yield node.attr
    elif isinstance(node, ast.arg):
        yield node.arg
    elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield node.name


def main() -> None:
    root = pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else pathlib.Path(__file__).resolve().parent.parent
    for folders in (LIBRARY, TESTS):
        num_docstrings, findings = check_language(root, folders)
        fragments = sum(finding.kind == "docstring" for finding in findings)
        names = len(findings) - fragments
        print(f"{', '.join(folders)}: {fragments} of {num_docstrings} docstrings are fragments, {names} names are vague")
        for finding in findings:
            print(f"  {finding.path}:{finding.line}: {finding.kind}: {finding.text}")


if __name__ == "__main__":
    main()
