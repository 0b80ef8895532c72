"""Whether a run goes on: MODEL_DIR/OWNER, where who trains gives signs of life; MODEL_DIR/END, once training is at its end."""

import time

from etils import epath

from t5x_lab.config.json_files import read_json, write_json

END, OWNER = "END", "OWNER"
PATIENCE_SECONDS = 35.0  # after so long without a sign of life an owner is dead


def write_end(model_dir: epath.PathLike, step: int) -> None:
    """Marks that training ended with this step, where that is not said already."""
    if read_end(model_dir) != step:
        write_json(epath.Path(model_dir) / END, {"step": step})


def read_end(model_dir: epath.PathLike) -> int | None:
    """The last step of a run that has ended; None of one that goes on, or was interrupted."""
    found = read_json(epath.Path(model_dir) / END)
    return found.get("step") if isinstance(found, dict) else None


def ended_at(model_dir: epath.PathLike) -> float | None:
    """When a run came to its end, in seconds of the Unix epoch; None of one that has not."""
    try:
        return (epath.Path(model_dir) / END).stat().mtime
    except OSError:
        return None


def remove_end(model_dir: epath.PathLike) -> None:
    """As a run that goes on does."""
    (epath.Path(model_dir) / END).unlink(missing_ok=True)


def seconds_without_sign(model_dir: epath.PathLike) -> float | None:
    """Since the last sign of life of who trains into it; None where nobody does."""
    try:
        return max(0.0, time.time() - (epath.Path(model_dir) / OWNER).stat().mtime)
    except OSError:
        return None
