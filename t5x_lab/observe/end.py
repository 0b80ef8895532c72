"""Whether a run goes on: MODEL_DIR/OWNER, where who trains gives signs of life; MODEL_DIR/END, once training is at its end."""

import time

from etils import epath

from t5x_lab.config.json_files import read_json, write_json

END, OWNER = "END", "OWNER"
PATIENCE_SECONDS = 35.0  # after so long without a sign of life an owner is dead


def write_end(model_dir: epath.PathLike, step: int) -> None:
    """Marks that training ended with this step."""
    write_json(epath.Path(model_dir) / END, {"step": step})


def read_end(model_dir: epath.PathLike) -> int | None:
    """The last step of a run that has ended; None of one that goes on, or was interrupted."""
    return (read_json(epath.Path(model_dir) / END) or {}).get("step")


def remove_end(model_dir: epath.PathLike) -> None:
    """As a run that goes on does."""
    (epath.Path(model_dir) / END).unlink(missing_ok=True)


def is_alive(model_dir: epath.PathLike) -> bool:
    """Whether somebody trains into it now, by the time of the last sign of life."""
    try:
        return time.time() - (epath.Path(model_dir) / OWNER).stat().mtime < PATIENCE_SECONDS
    except OSError:
        return False
