"""The checkpoints of one run: written asynchronously by Orbax, kept by rules, checked when they are read.

Orbax writes a checkpoint under a temporary name and renames it at the end, so that it exists whole or not at all, and deletes
older ones only then.
"""

import contextlib
import dataclasses
import json
import math
import pathlib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import orbax.checkpoint as ocp
from etils import epath

from t5x_lab.checkpoints import checksums, orbax_files
from t5x_lab.checkpoints.config import SaveCheckpointConfig
from t5x_lab.checkpoints.layout import (
    INFO,
    PINNED,
    Damaged,
    check_same_tree,
    finished_steps,
    flat,
    info_of,
    read_info,
    rooted,
    sealed,
)
from t5x_lab.checkpoints.tensors import Unreadable
from t5x_lab.config.errors import UserError
from t5x_lab.training.batches import Batches
from t5x_lab.training.state import TrainState

_DIGESTS = "digests_{}.json"
_OUTAGE = re.compile("UNAVAILABLE|DEADLINE_EXCEEDED|PERMISSION_DENIED|UNAUTHENTICATED|RESOURCE_EXHAUSTED|ABORTED|CANCELLED")


class _DataHandler(ocp.CheckpointHandler):
    """Lets a data source write its own position into the checkpoint, each process its own shards, and checks the files."""

    def save(self, directory: epath.Path, args: "_DataSave"):
        digests = {file.name: checksums.file_digest(file) for file in args.item.save(directory)}
        (directory / _DIGESTS.format(jax.process_index())).write_text(json.dumps(digests))

    def restore(self, directory: epath.Path, args: "_DataRestore"):
        args.item.restore(directory)


@ocp.args.register_with_handler(_DataHandler, for_save=True)
@dataclasses.dataclass
class _DataSave(ocp.args.CheckpointArgs):
    item: Batches


@ocp.args.register_with_handler(_DataHandler, for_restore=True)
@dataclasses.dataclass
class _DataRestore(ocp.args.CheckpointArgs):
    item: Batches


@dataclasses.dataclass
class _Kept:
    """Orbax's question about every checkpoint of a run, answered by a `SaveCheckpointConfig`."""

    directory: epath.Path
    rules: SaveCheckpointConfig
    merits: dict[int, float] = dataclasses.field(default_factory=dict)  # by step

    def should_preserve(self, checkpoints, *, context) -> list[bool]:
        del context
        merits = [self._merit(checkpoint.step) for checkpoint in checkpoints]
        best = max(merits, default=-math.inf)
        return [
            i >= len(checkpoints) - self.rules.keep
            or (merits[i] == best > -math.inf and best not in merits[:i])
            or bool(self.rules.keep_period and checkpoint.step % self.rules.keep_period == 0)
            or (self.directory / str(checkpoint.step) / PINNED).exists()
            for i, checkpoint in enumerate(checkpoints)
        ]

    def _merit(self, step: int) -> float:
        if step not in self.merits:
            try:
                metrics = read_info(self.directory / str(step)).get("metrics", {})
            except UserError:  # a damaged one is not the best
                metrics = {}
            self.merits[step] = self.rules.merit(metrics)
        return self.merits[step]


class Checkpoints:
    """Saves and restores a run's states.

    Args:
      model_dir: the run's directory.
      rules: which checkpoints stay.
      notes: what every checkpoint's info says beside its own: `settings` (what a run is continued with unchanged, see
        `layout.check_settings`), `config` (gin's text).
    """

    def __init__(
        self, model_dir: str, rules: SaveCheckpointConfig = SaveCheckpointConfig(), notes: Mapping[str, Any] | None = None
    ):
        self._notes = dict(notes or {})
        self.directory = rooted(model_dir) / "checkpoints"
        self._kept = _Kept(self.directory, rules)
        self._options = ocp.CheckpointManagerOptions(
            create=True,
            cleanup_tmp_directories=True,
            preservation_policy=self._kept,
        )
        self._manager = ocp.CheckpointManager(self.directory, options=self._options)

    def save(
        self,
        step: int,
        state: TrainState,
        batches: Batches,
        notes: Mapping[str, Any] | None = None,
        metrics: Mapping[str, float] | None = None,
    ) -> None:
        """Starts saving; returns when the arrays are copied, while files are still being written.

        `notes` are kept in the checkpoint's info, as JSON; `metrics` are what `best_metric` may name.

        Raises:
          Exception: what went wrong with this save, or with the one before; see `forget_failure`.
        """
        if step in self._manager.all_steps():
            self.wait()
            return
        params, rest = _parts(state)
        info = info_of(params, step, **self._notes, **dict(notes or {}), processes=jax.process_count())
        info["metrics"] = dict(metrics or {})
        self._kept.merits[step] = self._kept.rules.merit(info["metrics"])
        info["checksums"] = checksums.checksums(flat({"params": params, "rest": rest}))
        self._manager.save(
            step,
            args=ocp.args.Composite(
                params=ocp.args.StandardSave(params),
                rest=ocp.args.StandardSave(rest),
                data=_DataSave(batches),
                info=ocp.args.JsonSave(sealed(info)),
            ),
            force=True,
        )

    def is_busy(self) -> bool:
        """Whether files are still being written."""
        return self._manager.is_saving_in_progress()

    def wait(self) -> None:
        """Returns when everything is on disk; raises what went wrong."""
        self._manager.wait_until_finished()

    def forget_failure(self) -> None:
        """Makes ready for another save after one that failed, and removes what that left."""
        self._manager = ocp.CheckpointManager(self.directory, options=self._options)

    def restore(self, step: int, abstract_state: TrainState, batches: Batches | None) -> TrainState:
        """The state of `step`, placed as `abstract_state`'s shardings say; moves `batches` to where it was.

        Raises:
          UserError: when the checkpoint is of another model, or damaged, naming what is, and the newest whole one before it.
        """
        path = self.directory / str(step)
        params, rest = _parts(abstract_state)
        parts: dict[str, ocp.args.CheckpointArgs] = {
            "params": ocp.args.StandardRestore(params),
            "rest": ocp.args.StandardRestore(rest),
        }
        with naming_damage(path):
            check_same_tree(path, params)
            if batches is not None:
                _check_data_files(path)
                parts["data"] = _DataRestore(batches)
            restored = self._manager.restore(step, args=ocp.args.Composite(**parts))
            _check_arrays(path, {"params": restored["params"], "rest": restored["rest"]})
        healthy = jax.device_put(True, abstract_state.healthy.sharding)
        return TrainState(params=restored["params"], **restored["rest"], healthy=healthy)

    def close(self) -> None:
        self._manager.close()


def _parts(state: TrainState) -> tuple[dict, dict[str, Any]]:
    """Parameters, and the rest without `healthy`: what is saved is the last good state, from which a run may go on."""
    names = [field.name for field in dataclasses.fields(state) if field.name not in ("params", "healthy")]
    return state.params, {name: getattr(state, name) for name in names}


def restore_params(path: epath.Path, abstract_params: dict) -> dict:
    """The parameters of the checkpoint at `path` (a `checkpoints/<step>` directory), and nothing else of it."""
    with naming_damage(path), ocp.StandardCheckpointer() as checkpointer:
        check_same_tree(path, abstract_params)
        params = checkpointer.restore(path / "params", abstract_params)
        _check_arrays(path, {"params": params})
    return params


def save_params(path: epath.Path, params: dict, step: int = 0, **notes: Any) -> None:
    """Writes a checkpoint of parameters alone, at `path`."""
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path / "params", params)
    info = info_of(params, step, **notes, checksums=checksums.checksums(flat({"params": params})))
    (path / INFO).parent.mkdir(exist_ok=True)
    (path / INFO).write_text(json.dumps(sealed(info)))


@contextlib.contextmanager
def naming_damage(path: epath.Path) -> Iterator[None]:
    """Adds to what is said of a damaged checkpoint what to do next; the newest whole one before it is looked for.

    Raises:
      UserError: for whatever a damaged file leads to.
    """
    try:
        yield
    except (Damaged, Unreadable) as error:
        raise UserError(f"{error.sentence} {_way_out(path)}".rstrip()) from error
    except (UserError, MemoryError, jax.errors.JaxRuntimeError):
        raise  # a device without memory, or another process that is gone, says nothing of the files
    except Exception as error:
        what = f"{type(error).__name__}: {str(error).partition(chr(10))[0][:300]}"
        if _OUTAGE.search(what) or (isinstance(error, OSError) and not isinstance(error, FileNotFoundError)):
            raise UserError(f"The checkpoint {path} could not be read ({what}). Try again when the storage can be.") from error
        raise UserError(f"{Damaged(path, what).sentence} {_way_out(path)}".rstrip()) from error


def _way_out(path: epath.Path) -> str:
    if not path.name.isdigit() or path.parent.name != "checkpoints":
        return ""
    run = path.parent.parent
    for step in reversed([step for step in finished_steps(run) if step < int(path.name)]):
        try:
            verify(path.parent / str(step))
        except UserError:
            continue
        return (
            f"The newest whole one before it is of step {step}: to go on from there, move the damaged one away "
            f"(mv {path} {run / f'damaged_{path.name}'}) and run the same command again."
        )
    return "There is no whole one before it."


def verify(path: epath.Path, parts: Sequence[str] = ("params", "rest", "data"), process: int = 0, processes: int = 1) -> bool:
    """Reads a checkpoint's parts, one array at a time, and compares with the checksums.

    Several processes may share the arrays among them.

    Returns:
      whether there were checksums; the first format had none.

    Raises:
      UserError: when it is damaged.
    """
    info = read_info(path)
    saved = info.get("checksums", {})
    for part in ("params", "rest"):
        names = sorted(name for name in saved if name.startswith(f"{part}/") and part in parts)[process::processes]
        arrays = orbax_files.open_arrays(path / part) if names else {}
        for name in names:
            tensor = arrays.get(name.removeprefix(f"{part}/"))
            if tensor is None or checksums.checksum_of_parts(tensor.parts()) != saved[name]:
                raise Damaged(path, f"{name} is not as it was saved")
    if "data" in parts:
        _check_data_files(path)
    return bool(saved)


def _check_arrays(path: epath.Path, restored: dict) -> None:
    saved = read_info(path).get("checksums")
    if saved is None:  # the first format had none
        return
    found = checksums.checksums(flat(restored))
    different = [name for name in sorted(found) if found[name] != saved.get(name)]
    if different:
        more = f" and {len(different) - 1} more" if len(different) > 1 else ""
        raise Damaged(path, f"{different[0]}{more} came back with another checksum than it was saved with")


def _check_data_files(path: epath.Path) -> None:
    for process in range(read_info(path).get("processes", 0)):
        listed = path / "data" / _DIGESTS.format(process)
        try:
            digests = json.loads(listed.read_bytes())
            for name, digest in digests.items():
                if pathlib.PurePath(name).name != name or name in (".", ".."):
                    raise Damaged(path, f"data/{listed.name} names a file outside of it")
                if checksums.file_digest(path / "data" / name) != digest:
                    raise Damaged(path, f"data/{name} is not as it was saved")
        except (OSError, ValueError, AttributeError) as error:
            raise Damaged(path, f"data/{listed.name} or a file that it lists cannot be read ({error})") from error
