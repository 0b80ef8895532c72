"""MODEL_DIR/END, once training is at its end."""

import time

from etils import epath

from t5x_lab.config.json_files import read_dictionary, write_json

END = "END"


def write_end(model_dir: epath.PathLike, step: int) -> None:
    """Marks that training ended with this step, where that is not said already."""
    if read_end(model_dir) != step:
        write_json(epath.Path(model_dir) / END, {"step": step, "at": time.time()})


def read_end(model_dir: epath.PathLike) -> int | None:
    """The last step of a run that has ended; None of one that goes on, or was interrupted."""
    step = read_dictionary(epath.Path(model_dir) / END).get("step")
    return step if isinstance(step, int) else None


def ended_at(model_dir: epath.PathLike) -> float | None:
    """When a run came to its end, in seconds of the Unix epoch; None of one that has not, or of an older version."""
    at = read_dictionary(epath.Path(model_dir) / END).get("at")
    return at if isinstance(at, float) else None


def remove_end(model_dir: epath.PathLike) -> None:
    """As a run that goes on does."""
    (epath.Path(model_dir) / END).unlink(missing_ok=True)
