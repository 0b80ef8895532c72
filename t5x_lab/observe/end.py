"""The file MODEL_DIR/END, which marks that training has ended."""

import time

from etils import epath

from t5x_lab.config.json_files import read_dictionary, write_json
from t5x_lab.config.steps import is_step

END = "END"


def write_end(model_dir: epath.PathLike, step: int) -> None:
    """Marks that training ended with this step."""
    if read_end(model_dir) != step:
        write_json(epath.Path(model_dir) / END, {"step": step, "at": time.time()})


def read_end(model_dir: epath.PathLike) -> int | None:
    """Returns the last step of a run that has ended; None if it is training or was interrupted."""
    step = read_dictionary(epath.Path(model_dir) / END).get("step")
    return step if is_step(step) else None


def ended_at(model_dir: epath.PathLike) -> float | None:
    """Returns the end time of a run in seconds since the Unix epoch; None if it has not ended, or for older versions."""
    at = read_dictionary(epath.Path(model_dir) / END).get("at")
    return at if isinstance(at, float) else None


def remove_end(model_dir: epath.PathLike) -> None:
    """Removes the mark when a run continues."""
    (epath.Path(model_dir) / END).unlink(missing_ok=True)
