"""Who trains into a run directory, as MODEL_DIR/OWNER says, where that process gives signs of life."""

import dataclasses
import json
import os
import pathlib
import socket
import time
import uuid

from etils import epath

OWNER = "OWNER"
PATIENCE_SECONDS = 35.0  # after so long without a sign of life an owner is dead


@dataclasses.dataclass(frozen=True)
class Owner:
    """A process that trains.

    Attributes:
      id: of this ownership, different each time.
      host, process: for the reader.
      place: the running kernel and its namespace of processes, in which `process` and `started` can be looked up.
      started: when the process did, in the kernel's clock.
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
        """Whether it is known to be; False may also mean that this cannot be known from here."""
        return bool(self.place) and self.place == place() and _start_of(self.process) != self.started

    def is_this_process(self) -> bool:
        return (self.place, self.process, self.started) == (place(), os.getpid(), _start_of(os.getpid()))


def read_owner(path: epath.Path) -> tuple[Owner, int] | None:
    """The owner and its last sign of life; None where there is no file. One that cannot be understood is of nobody."""
    try:
        return _parsed(path.read_text())
    except FileNotFoundError:
        return None


def seconds_without_sign(model_dir: epath.PathLike) -> float | None:
    """Since the last sign of life of who trains into it; None where nobody does, or who did is known to be dead."""
    path = epath.Path(model_dir) / OWNER
    try:
        found = read_owner(path)
        return None if found is None or found[0].is_dead() else max(0.0, time.time() - path.stat().mtime)
    except (OSError, ValueError):  # being taken away just now
        return None


def _parsed(text: str) -> tuple[Owner, int]:
    try:
        values = json.loads(text)
        return Owner(**{field.name: values[field.name] for field in dataclasses.fields(Owner)}), int(values["beat"])
    except (ValueError, TypeError, KeyError):  # being written just now, or by a disk that was full
        return Owner("", "an unknown host", 0, "", ""), len(text)


def place() -> str:
    """Where process numbers mean the same; "" where this cannot be told, as on other systems than Linux."""
    try:
        return f"{pathlib.Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _start_of(process: int) -> str:
    """When a process of this place started; "" where there is none, or only its parent's memory of it."""
    try:
        state, *rest = pathlib.Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        return "" if state in "ZX" else rest[18]
    except (OSError, IndexError):
        return ""
