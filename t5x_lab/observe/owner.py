"""The file MODEL_DIR/OWNER: the process that trains in a run directory, and its heartbeat."""

import dataclasses
import os
import pathlib
import socket
import time
import uuid

from etils import epath

from t5x_lab.config.errors import UserError
from t5x_lab.config.json_files import parse_json
from t5x_lab.config.object_storage import modified_at
from t5x_lab.config.regular_files import is_regular_file

OWNER = "OWNER"
PATIENCE_SECONDS = 35.0  # an owner without a heartbeat for this time counts as dead


@dataclasses.dataclass(frozen=True)
class Owner:
    """A process that trains.

    Attributes:
      id: unique id of the ownership.
      host, process: host name and process id, for messages.
      place: kernel and process namespace in which `process` and `started` are valid.
      started: start time of the process in the kernel's clock.
    """

    id: str
    host: str
    process: int
    place: str
    started: str

    @classmethod
    def this(cls) -> "Owner":
        return cls(uuid.uuid4().hex, socket.gethostname(), os.getpid(), place(), _start_of(os.getpid()))

    def is_dead(self) -> bool:
        """Returns whether the process is known to be dead. False can also mean unknown."""
        return bool(self.place) and self.place == place() and _start_of(self.process) != self.started

    def is_this_process(self) -> bool:
        return (self.place, self.process, self.started) == (place(), os.getpid(), _start_of(os.getpid()))


def read_owner(path: epath.Path) -> tuple[Owner, int] | None:
    """Returns the owner and its last heartbeat; None if there is no file. An invalid file has an unknown owner."""
    if path.exists() and not is_regular_file(path):
        raise UserError(f"{path} is not a file. A run writes a file of this name. Remove it, or choose another MODEL_DIR.")
    try:
        return _parse(path.read_text())
    except FileNotFoundError:
        return None


def seconds_since_heartbeat(model_dir: epath.PathLike) -> float | None:
    """Returns the time since the owner's last heartbeat; None without an owner, or if it is known to be dead."""
    path = epath.Path(model_dir) / OWNER
    try:
        owner = read_owner(path)
        return None if owner is None or owner[0].is_dead() else max(0.0, time.time() - modified_at(path))
    except (OSError, ValueError, UserError):  # being removed, or a directory
        return None


def _parse(text: str) -> tuple[Owner, int]:
    try:
        values = parse_json(text)
        return Owner(**{field.name: values[field.name] for field in dataclasses.fields(Owner)}), int(values["beat"])
    except (ValueError, TypeError, KeyError):  # being written, or incomplete because of a full disk
        return Owner("", "an unknown host", 0, "", ""), len(text)


def place() -> str:
    """Returns an id of the kernel and process namespace; "" if unknown, as on systems other than Linux."""
    try:
        return f"{pathlib.Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _start_of(process: int) -> str:
    """Returns the start time of a local process; "" if it does not exist or is a zombie."""
    try:
        state, *rest = pathlib.Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        return "" if state in "ZX" else rest[18]
    except (OSError, IndexError):
        return ""
