"""Pre-training on one's own text from gin alone: `files_<objective>` reads what `TextFiles` names."""

import seqio

from t5x_lab.data import tasks
from t5x_lab.data.objectives import OBJECTIVES, objective_task, placeholder_task
from t5x_lab.data.sources import text_files


def _make(name: str, vocabulary: seqio.Vocabulary, config) -> seqio.Task:
    return objective_task(name, text_files(config.files), name.removeprefix("files_"), vocabulary)


for _objective in OBJECTIVES:
    tasks.register(f"files_{_objective}", _make, placeholder_task(f"files_{_objective}", _objective))
