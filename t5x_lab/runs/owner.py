"""Who trains into a run directory: one run at a time, so that two do not write over each other's checkpoints."""

import contextlib
import dataclasses
import fcntl
import json
import os
import pathlib
import sys
import threading
import time
from collections.abc import Iterator

import jax
from etils import epath

from t5x_lab.config.errors import UserError, unwritable
from t5x_lab.observe.console import say
from t5x_lab.observe.owner import OWNER, PATIENCE_SECONDS, Owner, place, read_owner
from t5x_lab.partitioning.distributed import broadcast

BEAT_SECONDS = 10.0  # between two signs of life


@contextlib.contextmanager
def owned(model_dir: str) -> Iterator[None]:
    """Owns a run directory while the block runs. Several processes of one run call this together; the first one owns.

    An owner writes a sign of life into MODEL_DIR/OWNER every few seconds. The place of one that is dead is taken: at once where
    it ran on this machine, else after a while without a sign.

    Raises:
      UserError: when another run owns it.
    """
    refusal = ""
    mine = _Ownership(epath.Path(model_dir) / OWNER)
    if jax.process_index() == 0:
        try:
            mine.take()
        except UserError as error:
            refusal = error.sentence
    if broadcast(bool(refusal)):
        raise UserError(refusal or f"Another run trains into MODEL_DIR {model_dir}; the first process says which.")
    try:
        yield
    finally:
        if jax.process_index() == 0:
            mine.release()


class _Ownership:
    def __init__(self, path: epath.Path):
        self._path, self._owner = path, Owner.this()
        self._is_remote = "://" in str(path)
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def take(self) -> None:
        """Raises a `UserError` where somebody who lives is the owner."""
        silent: tuple[Owner, int] | None = None
        while True:
            with self._locked():
                found = self._read()
                if found is None or found == silent or found[0].is_dead() or found[0].is_this_process():
                    self._write(0)
                    break
            self._wait_for_death(*found)
            silent = found
        if self._is_remote:
            time.sleep(2.0)  # an object store locks nothing: of two who write at once the later one stays
            if (found := self._read()) and found[0] != self._owner:
                raise self._refusal(found[0])
        self._thread = threading.Thread(target=self._live, name="owner", daemon=True)
        self._thread.start()

    def _refusal(self, owner: Owner) -> UserError:
        return UserError(
            f"MODEL_DIR {self._path.parent} belongs to process {owner.process} on {owner.host}, which trains into it now. "
            "Choose another MODEL_DIR, or stop that run first."
        )

    def _wait_for_death(self, owner: Owner, beat: int) -> None:
        """Returns when the owner gives no sign of life."""
        if owner.place and owner.place == place():
            raise self._refusal(owner)  # it is not dead
        say(f"{self._path} is of process {owner.process} on {owner.host}: waiting {PATIENCE_SECONDS:.0f} s for a sign of life.")
        until = time.monotonic() + PATIENCE_SECONDS
        while time.monotonic() < until:
            time.sleep(PATIENCE_SECONDS / 20)
            found = self._read()
            if found is None:
                return
            if found != (owner, beat):
                raise self._refusal(found[0])

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Nobody else is between these lines; on storage that has locks."""
        if self._is_remote:
            yield
            return
        directory = os.open(self._path.parent, os.O_RDONLY)
        try:
            with contextlib.suppress(OSError):
                fcntl.flock(directory, fcntl.LOCK_EX)
            yield
        finally:
            os.close(directory)

    def _live(self) -> None:
        beat = 0
        while not self._stop.wait(BEAT_SECONDS):
            beat += 1
            with contextlib.suppress(Exception), self._locked():  # of a full disk, or a remote one, which has its own
                found = self._read()
                if found is not None and found[0] != self._owner:
                    print(
                        f"t5x_lab train: process {found[0].process} on {found[0].host} has taken MODEL_DIR {self._path.parent} "
                        "over while this one gave no sign of life. It ends here.",
                        file=sys.stderr,
                        flush=True,
                    )
                    os._exit(1)
                self._write(beat)

    def _write(self, beat: int) -> None:
        text = json.dumps({**dataclasses.asdict(self._owner), "beat": beat})
        if self._is_remote:
            self._path.write_text(text)
            return
        new = pathlib.Path(f"{self._path}.{self._owner.id}")
        try:
            new.write_text(text)
            new.replace(self._path)
        except OSError as error:
            with contextlib.suppress(OSError):
                new.unlink()
            raise unwritable(self._path, error) from error

    def release(self) -> None:
        self._stop.set()
        if self._thread:
            self._thread.join()
        with contextlib.suppress(Exception), self._locked():
            found = self._read()
            if found is not None and found[0] == self._owner:
                self._path.unlink(missing_ok=True)

    def _read(self) -> tuple[Owner, int] | None:
        """The owner and its last sign of life; None where there is no file. One that cannot be understood is of nobody."""
        return read_owner(self._path)
