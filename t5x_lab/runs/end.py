"""The mark of a run that has come to its end, for those who follow it: MODEL_DIR/END. A run that goes on takes it away."""

import json

from etils import epath

FILE = "END"


def write_end(model_dir: str, step: int) -> None:
    """Marks that training ended with this step."""
    (epath.Path(model_dir) / FILE).write_text(json.dumps({"step": step}))


def read_end(model_dir: str) -> int | None:
    """The last step of a run that has ended; None of one that goes on, or was interrupted."""
    try:
        return json.loads((epath.Path(model_dir) / FILE).read_text())["step"]
    except (OSError, ValueError):
        return None


def remove_end(model_dir: str) -> None:
    (epath.Path(model_dir) / FILE).unlink(missing_ok=True)
