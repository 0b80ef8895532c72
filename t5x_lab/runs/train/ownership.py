"""Ownership of a run directory: one run at a time, so that two runs do not overwrite each other's checkpoints."""

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

from t5x_lab.config.errors import UserError, write_error
from t5x_lab.config.log import log
from t5x_lab.observe.owner import OWNER, PATIENCE_SECONDS, Owner, place, read_owner
from t5x_lab.partitioning.distributed import broadcast

HEARTBEAT_SECONDS = 10.0


@contextlib.contextmanager
def owned(model_dir: str) -> Iterator[None]:
    """Owns a run directory inside the block. All processes of a run call this together; the first process is the owner.

    The owner writes a heartbeat to MODEL_DIR/OWNER every few seconds. A dead owner is replaced: at once if it ran on this
    machine, otherwise after some time without a heartbeat.

    Raises:
      UserError: if another run owns the directory.
    """
    refusal = ""
    ownership = _Ownership(epath.Path(model_dir) / OWNER)
    if jax.process_index() == 0:
        try:
            ownership.take()
        except UserError as error:
            refusal = error.sentence
    if broadcast(bool(refusal)):
        raise UserError(refusal or f"Another run trains in MODEL_DIR {model_dir}. See the log of the first process.")
    try:
        yield
    finally:
        if jax.process_index() == 0:
            ownership.release()


class _Ownership:
    def __init__(self, path: epath.Path):
        self._path, self._owner = path, Owner.this()
        self._is_remote = "://" in str(path)
        self._stop = threading.Event()
        self._heartbeat: threading.Thread | None = None

    def take(self) -> None:
        """Takes ownership.

        Raises:
          UserError: if another owner is alive.
        """
        silent: tuple[Owner, int] | None = None  # an owner that sent no heartbeat while this process waited
        while True:
            with self._locked():
                current = self._read()
                if current is None or current == silent or current[0].is_dead() or current[0].is_this_process():
                    self._write(0)
                    break
            self._wait_for_silence(*current)
            silent = current
        if self._is_remote:
            time.sleep(2.0)  # object stores have no locks: of two concurrent writers the last one wins
            if (current := self._read()) and current[0] != self._owner:
                raise self._refusal(current[0])
        self._heartbeat = threading.Thread(target=self._send_heartbeats, name="owner", daemon=True)
        self._heartbeat.start()

    def _refusal(self, owner: Owner) -> UserError:
        return UserError(
            f"Process {owner.process} on {owner.host} is training in MODEL_DIR {self._path.parent}. Choose another "
            "MODEL_DIR, or stop that run first."
        )

    def _wait_for_silence(self, owner: Owner, beat: int) -> None:
        """Returns if the owner sends no heartbeat.

        Raises:
          UserError: if it sends one.
        """
        if owner.place and owner.place == place():
            raise self._refusal(owner)  # it runs on this machine and is alive
        log(
            f"{self._path} belongs to process {owner.process} on {owner.host}. Waiting {PATIENCE_SECONDS:.0f} s for its "
            "heartbeat."
        )
        until = time.monotonic() + PATIENCE_SECONDS
        while time.monotonic() < until:
            time.sleep(PATIENCE_SECONDS / 20)
            current = self._read()
            if current is None:
                return
            if current != (owner, beat):
                raise self._refusal(current[0])

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Holds a lock on the run directory, on storage that supports locks."""
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

    def _send_heartbeats(self) -> None:
        beat = 0
        while not self._stop.wait(HEARTBEAT_SECONDS):
            beat += 1
            with contextlib.suppress(Exception), self._locked():  # any storage error, such as a full disk
                current = self._read()
                if current is not None and current[0] != self._owner:
                    print(
                        f"t5x_lab train: process {current[0].process} on {current[0].host} took over MODEL_DIR "
                        f"{self._path.parent} while this process sent no heartbeat. This process exits.",
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
            raise write_error(self._path, error) from error

    def release(self) -> None:
        self._stop.set()
        if self._heartbeat:
            self._heartbeat.join()
        with contextlib.suppress(Exception), self._locked():
            current = self._read()
            if current is not None and current[0] == self._owner:
                self._path.unlink(missing_ok=True)

    def _read(self) -> tuple[Owner, int] | None:
        """Returns the owner and its last heartbeat; None if there is no file, or an invalid one."""
        return read_owner(self._path)
