"""The mark of a run that has come to its end, for those who follow it: MODEL_DIR/END. A run that goes on takes it away."""

from etils import epath

from t5x_lab.config.json_files import read_json, write_json

FILE = "END"


def write_end(model_dir: str, step: int) -> None:
    """Marks that training ended with this step."""
    write_json(epath.Path(model_dir) / FILE, {"step": step})


def read_end(model_dir: str) -> int | None:
    """The last step of a run that has ended; None of one that goes on, or was interrupted."""
    return (read_json(epath.Path(model_dir) / FILE) or {}).get("step")


def remove_end(model_dir: str) -> None:
    (epath.Path(model_dir) / FILE).unlink(missing_ok=True)
