"""The checkpoints of a run: written asynchronously by Orbax, retained by rules, verified when read.

Orbax writes a checkpoint under a temporary name, renames it at the end, and deletes older ones after that, so that incomplete
checkpoints are never visible.
"""

import dataclasses
import json
import logging
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from etils import epath

from t5x_lab.checkpoints import checksums
from t5x_lab.checkpoints.config import SaveCheckpointConfig
from t5x_lab.checkpoints.formats.orbax_arrays import chunk_bytes, single_axes
from t5x_lab.checkpoints.layout import (
    PINNED,
    absolute_path,
    check_format,
    check_same_parameters,
    finish,
    finished_steps,
    make_info,
    named_leaves,
    parameter_shapes,
)
from t5x_lab.checkpoints.sharded_arrays import read_together
from t5x_lab.checkpoints.verification import DATA_DIGESTS, DATA_DIGESTS_NAME, check_arrays, check_data_files, explain_damage
from t5x_lab.config.errors import UserError
from t5x_lab.config.object_storage import is_object_storage
from t5x_lab.config.temporary import read_locally, written_locally
from t5x_lab.partitioning.distributed import broadcast
from t5x_lab.training.batches import Batches
from t5x_lab.training.state import TrainState

# Orbax logs this warning about chunk sizes for each array.
logging.getLogger("absl").addFilter(lambda record: "target_byte_size too small" not in record.getMessage())


ReadMetric = Callable[[int, str], float]


class _DataHandler(ocp.CheckpointHandler):
    """Saves and restores the data position, each process its own shards, with digests of the files.

    TensorFlow, which writes the positions, knows disks and gs:// only, so that they are copied.
    """

    def save(self, directory: epath.Path, args: "_DataSave"):
        with written_locally(directory) as folder:
            digests = {file.name: checksums.file_digest(file) for file in args.item.save(folder)}
            (folder / DATA_DIGESTS.format(jax.process_index())).write_text(json.dumps(digests))

    def restore(self, directory: epath.Path, args: "_DataRestore"):
        needs = args.item.needs
        with read_locally(directory, lambda name: needs(name) or bool(DATA_DIGESTS_NAME.fullmatch(name))) as folder:
            check_data_files(directory.parent, folder, needs)
            args.item.restore(folder, directory.parent)


@ocp.args.register_with_handler(_DataHandler, for_save=True)
@dataclasses.dataclass
class _DataSave(ocp.args.CheckpointArgs):
    item: Batches


@ocp.args.register_with_handler(_DataHandler, for_restore=True)
@dataclasses.dataclass
class _DataRestore(ocp.args.CheckpointArgs):
    item: Batches


@dataclasses.dataclass
class _Retention:
    """Orbax preservation policy for the rules of a `SaveCheckpointConfig`."""

    directory: epath.Path
    rules: SaveCheckpointConfig
    read_metric: ReadMetric

    def should_preserve(self, checkpoints, *, context) -> list[bool]:
        del context
        best = {self._best([checkpoint.step for checkpoint in checkpoints], *rule) for rule in self.rules.best.items()}
        return [
            self.rules.keep is None
            or i >= len(checkpoints) - self.rules.keep
            or checkpoint.step in best
            or bool(self.rules.keep_period and checkpoint.step % self.rules.keep_period == 0)
            or (self.directory / str(checkpoint.step) / PINNED).exists()
            or not (self.directory / str(checkpoint.step) / "rest").exists()  # not written by training
            for i, checkpoint in enumerate(checkpoints)
        ]

    def _best(self, steps: list[int], metric: str, best_is: str) -> int | None:
        """Returns the first step with the best value, or None."""
        values = {step: value for step in steps if not math.isnan(value := self.read_metric(step, metric))}
        choose = min if best_is == "lowest" else max
        return choose(values, key=lambda step: values[step]) if values else None


class Checkpoints:
    """Saves and restores a run's states.

    Args:
      model_dir: run directory.
      rules: retention rules.
      notes: additional info of every checkpoint: `settings` that a run must be resumed with (see `layout.check_settings`) and
        `config` (gin text).
      read_metric: function (step, metric) -> value of `best_metric`, NaN if there is none. Called when checkpoints are deleted.
    """

    def __init__(
        self,
        model_dir: str,
        rules: SaveCheckpointConfig = SaveCheckpointConfig(),
        notes: Mapping[str, Any] | None = None,
        read_metric: ReadMetric = lambda step, metric: math.nan,
    ):
        self._notes = dict(notes or {})
        self.directory = absolute_path(model_dir) / "checkpoints"
        self._retention = _Retention(self.directory, rules, read_metric)
        self._options = ocp.CheckpointManagerOptions(
            create=True,
            cleanup_tmp_directories=True,
            preservation_policy=self._retention,
        )
        self._manager = ocp.CheckpointManager(self.directory, options=self._options)

    def save(
        self,
        step: int,
        state: TrainState,
        batches: Batches,
        notes: Mapping[str, Any] | None = None,
    ) -> None:
        """Starts saving. Returns when the arrays are copied, while files are still being written.

        Args:
          step: step of the state.
          state: state to save.
          batches: batches whose position is saved.
          notes: additional JSON values of the checkpoint's info.

        Raises:
          Exception: the error of this save or of the previous one. See `recover`.
        """
        if step in self._manager.all_steps():
            self.wait()
            return
        parts = _parts(state)
        notes = {
            **self._notes,
            **dict(notes or {}),
            "processes": jax.process_count(),
            "checksums": checksums.checksums(named_leaves(parts)),
        }
        self._manager.save(
            step,
            args=ocp.args.Composite(
                **{name: ocp.args.StandardSave(part, _chunked_save_args(part)) for name, part in parts.items()},
                data=_DataSave(batches),
                info=ocp.args.JsonSave(make_info(parameter_shapes(state.params), step, **notes)),
            ),
            force=True,
        )

    def is_busy(self) -> bool:
        """Returns whether files are still being written."""
        return self._manager.is_saving_in_progress()

    def wait(self) -> None:
        """Waits until everything is on disk. Raises the error of a failed save."""
        self._manager.wait_until_finished()

    def recover(self) -> None:
        """Removes the files of a failed save, so that another save can start."""
        self._manager = ocp.CheckpointManager(self.directory, options=self._options)

    def restore(self, step: int, abstract_state: TrainState, batches: Batches | None) -> TrainState:
        """Returns the state of a step with the shardings of `abstract_state`, and moves `batches` to its position.

        Raises:
          UserError: if the checkpoint belongs to another model, or is damaged, with the latest intact one before it.
        """
        path = self.directory / str(step)
        abstract = _parts(abstract_state)
        if not (path / "average").exists():
            abstract.pop("average", None)  # the average starts here
        data: dict[str, ocp.args.CheckpointArgs] = {}
        with explain_damage(path):
            check_same_parameters(path, abstract_state.params)
            check_format(path)
            if batches is not None:
                data["data"] = _DataRestore(batches)

            def read(abstract: dict[str, Any]) -> dict[str, Any]:
                parts = {name: ocp.args.StandardRestore(part) for name, part in abstract.items()}
                composite = self._manager.restore(step, args=ocp.args.Composite(**parts, **data))
                arrays = {name: composite[name] for name in abstract}
                check_arrays(path, arrays)
                return arrays

            restored = read_together(abstract, read)
        healthy = jax.device_put(True, abstract_state.healthy.sharding)
        params, average = restored["params"], restored["average"] if "average" in abstract else None
        if abstract_state.average is not None and average is None:
            average = jax.tree.map(jnp.copy, params)
        return TrainState(params=params, average=average, **restored["rest"], healthy=healthy)

    def close(self, kind: type | None = None, error: BaseException | None = None, trace: Any = None) -> None:
        """Stops background work. Usable as the exit of a context manager; its own errors do not hide another error."""
        try:
            self._manager.close()
        except OSError:
            if error is None:
                raise


def _parts(state: TrainState) -> dict[str, dict[str, Any]]:
    """Returns the saved parts: parameters, their average if any, and the rest without `healthy`, which is always true."""
    names = [field.name for field in dataclasses.fields(state) if field.name not in ("params", "average", "healthy")]
    average = {} if state.average is None else {"average": state.average}
    return {"params": state.params, **average, "rest": {name: getattr(state, name) for name in names}}


def _chunked_save_args(tree: Any) -> Any:
    """Returns Orbax save arguments: chunks of which a host on another mesh can read its part only."""

    def args(array: jax.Array | np.ndarray) -> ocp.SaveArgs:
        shard_shape = array.sharding.shard_shape(array.shape) if isinstance(array, jax.Array) else array.shape
        axes = single_axes(shard_shape, array.dtype.itemsize)
        return ocp.SaveArgs(chunk_byte_size=chunk_bytes(array.shape, array.dtype.itemsize), shard_axes=axes)

    return jax.tree.map(args, tree)


def save_params(path: epath.Path, params: dict, step: int = 0, **notes: Any) -> None:
    """Writes a checkpoint with parameters only. All processes must call this.

    It appears when it is complete, on object storage by its last file.
    """
    unfinished = path if is_object_storage(path) else path.with_name(f"{path.name}.unfinished")
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(unfinished / "params", params, save_args=_chunked_save_args(params), force=True)
    notes["checksums"] = checksums.checksums(named_leaves({"params": params}))
    if jax.process_index() == 0:
        finish(unfinished, make_info(parameter_shapes(params), step, **notes))
        if unfinished != path:
            unfinished.rename(path)
    broadcast(0)  # all processes wait for the rename


def save_run(model_dir: str, config: str, params: dict, step: int) -> None:
    """Writes a run directory with parameters only and the gin text of its configuration.

    Raises:
      UserError: if it has a checkpoint of the step.
    """
    root = absolute_path(model_dir)
    if step in finished_steps(root):
        raise UserError(f"{model_dir} already has a checkpoint of step {step}. Choose another directory.")
    root.mkdir(parents=True, exist_ok=True)
    (root / "config.gin").write_text(config)
    params = jax.tree.map(lambda x: x.astype(np.float32), params)
    save_params(root / "checkpoints" / str(step), params, step, config=config)
