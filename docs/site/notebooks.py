"""The notebooks of docs/notebooks, run from top to bottom, as pages: what is typed, and what came of it."""

import os
import pathlib
import re
import subprocess
import sys

import jupytext
import nbformat
from nbclient import NotebookClient
from traitlets.config import Config

FOLDER = pathlib.Path(__file__).resolve().parent.parent / "notebooks"
MOST_LINES = 40  # of an output
NOISE = ("WARNING: All log messages", "WARNING: Logging before", "Failed to find host bounds", "=== Source", "learning/")
_COLORS = re.compile(r"\x1b\[[0-9;]*m")


def names() -> list[str]:
    return sorted(path.stem for path in FOLDER.glob("*.py"))


def executed(name: str) -> nbformat.NotebookNode:
    """The notebook with its outputs.

    Raises:
      nbclient.exceptions.CellExecutionError: where a cell fails.
    """
    notebook = read(name)
    os.environ["PATH"] = os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]])  # where t5x_lab is
    by_ipc = Config(ConnectionFileMixin={"transport": "ipc"})  # over TCP it warns of what others may read
    NotebookClient(notebook, kernel_name="python3", timeout=900, config=by_ipc).execute(stderr=subprocess.DEVNULL)
    return notebook


def read(name: str) -> nbformat.NotebookNode:
    return jupytext.read(FOLDER / f"{name}.py")


def as_markdown(notebook: nbformat.NotebookNode, name: str) -> str:
    """A page of a notebook."""
    parts = []
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            parts.append(cell.source)
        elif cell.cell_type == "code":
            parts.append(_fenced(cell.source))
            is_file = cell.source.startswith("%%writefile")  # which prints that it was written
            parts += [shown for output in _joined(cell.outputs) if not is_file and (shown := _output(output))]
    source = f"This page is a notebook, `docs/notebooks/{name}.py`: `jupytext --to ipynb` makes it one for Jupyter."
    return "\n\n".join([*parts, f"*{source}*"]) + "\n"


def _joined(outputs: list[nbformat.NotebookNode]) -> list[nbformat.NotebookNode]:
    """Outputs, where what is printed piece by piece is one."""
    cells: list[nbformat.NotebookNode] = []
    for output in outputs:
        if output.output_type == "stream" and cells and cells[-1].output_type == "stream":
            cells[-1].text += output.text
        else:
            cells.append(output)
    return cells


def _fenced(source: str) -> str:
    first, _, rest = source.partition("\n")
    if first.startswith("%%bash"):
        return f"```bash\n{rest.removeprefix('set -e').strip()}\n```"
    if first.startswith("%%writefile "):
        file = first.split()[1]
        return f'```{"gin" if file.endswith(".gin") else "python"} title="{file}"\n{rest.strip()}\n```'
    return f"```python\n{source}\n```"


def _output(output: nbformat.NotebookNode) -> str:
    data = output.get("data", {})
    if "image/png" in data:
        return f'<img alt="what the cell above draws" src="data:image/png;base64,{data["image/png"].strip()}">'
    text = _COLORS.sub("", output.get("text") or data.get("text/plain") or "").strip("\n")
    lines = [line.rstrip() for line in text.split("\n") if line.strip() and not _is_noise(line)]
    if len(lines) > MOST_LINES:
        lines = [*lines[: MOST_LINES // 2], "…", *lines[-MOST_LINES // 2 :]]
    return "```{ .text .output }\n" + "\n".join(lines) + "\n```" if lines else ""


def _is_noise(line: str) -> bool:
    """Returns whether a line is a message of a library about missing accelerators."""
    return line.startswith(NOISE) or bool(re.match(r"[IWE]\d{4} |\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d+: ", line))
