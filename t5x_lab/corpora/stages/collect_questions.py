"""A stage of one job before `finish`: the n-grams of the evaluation sets, for decontamination."""

from typing import Any

from t5x_lab.corpora.files import open_output
from t5x_lab.corpora.stages.context import Context

NAME = "questions"
FILE = "ngrams.npz"


def list_jobs(context: Context) -> range:
    return range(1 if context.corpus.decontamination else 0)


def run(context: Context, _: int) -> dict[str, Any]:
    """Writes the n-grams. Returns the summary."""
    assert context.corpus.decontamination is not None
    with open_output(context.path(NAME, FILE)) as file:
        file.write(context.corpus.decontamination.collect())
    return {"counts": {}}
