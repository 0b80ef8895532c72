"""The checkpoints of one run: written asynchronously by Orbax, kept by rules, checked when they are read.

Orbax writes a checkpoint under a temporary name and renames it at the end, so that it exists whole or not at all, and deletes
older ones only then.
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
    make_info,
    named_leaves,
    shapes_of,
    write_info,
)
from t5x_lab.checkpoints.sharded_arrays import read_together
from t5x_lab.checkpoints.verification import DATA_DIGESTS, check_arrays, check_data_files, explaining_damage
from t5x_lab.config.errors import UserError
from t5x_lab.partitioning.distributed import broadcast
from t5x_lab.training.batches import Batches
from t5x_lab.training.state import TrainState

# Orbax's opinion on the size of chunks, once for each array.
logging.getLogger("absl").addFilter(lambda record: "target_byte_size too small" not in record.getMessage())


MetricOf = Callable[[int, str], float]


class _DataHandler(ocp.CheckpointHandler):
    """Lets a data source write its own position into the checkpoint, each process its own shards, and checks the files."""

    def save(self, directory: epath.Path, args: "_DataSave"):
        digests = {file.name: checksums.file_digest(file) for file in args.item.save(directory)}
        (directory / DATA_DIGESTS.format(jax.process_index())).write_text(json.dumps(digests))

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
class _Retention:
    """Orbax's preservation policy, by the rules of a `SaveCheckpointConfig`."""

    directory: epath.Path
    rules: SaveCheckpointConfig
    measured: MetricOf

    def should_preserve(self, checkpoints, *, context) -> list[bool]:
        del context
        best = {self._best([checkpoint.step for checkpoint in checkpoints], *rule) for rule in self.rules.best.items()}
        return [
            self.rules.keep is None
            or i >= len(checkpoints) - self.rules.keep
            or checkpoint.step in best
            or bool(self.rules.keep_period and checkpoint.step % self.rules.keep_period == 0)
            or (self.directory / str(checkpoint.step) / PINNED).exists()
            or not (self.directory / str(checkpoint.step) / "rest").exists()  # which no training wrote
            for i, checkpoint in enumerate(checkpoints)
        ]

    def _best(self, steps: list[int], metric: str, best_is: str) -> int | None:
        """The first of the steps with the best value, if any has one."""
        values = {step: value for step in steps if not math.isnan(value := self.measured(step, metric))}
        choose = min if best_is == "lowest" else max
        return choose(values, key=lambda step: values[step]) if values else None


class Checkpoints:
    """Saves and restores a run's states.

    Args:
      model_dir: the run's directory.
      rules: which checkpoints stay.
      notes: what every checkpoint's info says beside its own: `settings` (what a run is continued with unchanged, see
        `layout.check_settings`), `config` (gin's text).
      measured: f(step, metric) -> what `best_metric` names, not a number where that was not measured; asked when checkpoints
        are removed.
    """

    def __init__(
        self,
        model_dir: str,
        rules: SaveCheckpointConfig = SaveCheckpointConfig(),
        notes: Mapping[str, Any] | None = None,
        measured: MetricOf = lambda step, metric: math.nan,
    ):
        self._notes = dict(notes or {})
        self.directory = absolute_path(model_dir) / "checkpoints"
        self._retention = _Retention(self.directory, rules, measured)
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
        """Starts saving; returns when the arrays are copied, while files are still being written.

        `notes` are kept in the checkpoint's info, as JSON.

        Raises:
          Exception: what went wrong with this save, or with the one before; see `forget_failure`.
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
                **{name: ocp.args.StandardSave(part, _in_chunks(part)) for name, part in parts.items()},
                data=_DataSave(batches),
                info=ocp.args.JsonSave(make_info(shapes_of(state.params), step, **notes)),
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
        """The state of `step`, as `abstract_state`'s shardings say; moves `batches` to its position.

        Raises:
          UserError: when the checkpoint is of another model, or damaged, naming what is, and the newest whole one before it.
        """
        path = self.directory / str(step)
        wanted = _parts(abstract_state)
        if not (path / "average").exists():
            wanted.pop("average", None)  # it begins here
        moved: dict[str, ocp.args.CheckpointArgs] = {}
        with explaining_damage(path):
            check_same_parameters(path, abstract_state.params)
            check_format(path)
            if batches is not None:
                check_data_files(path)
                moved["data"] = _DataRestore(batches)

            def read(wanted: dict[str, Any]) -> dict[str, Any]:
                parts = {name: ocp.args.StandardRestore(part) for name, part in wanted.items()}
                found = self._manager.restore(step, args=ocp.args.Composite(**parts, **moved))
                found = {name: found[name] for name in wanted}
                check_arrays(path, found)
                return found

            restored = read_together(wanted, read)
        healthy = jax.device_put(True, abstract_state.healthy.sharding)
        params, average = restored["params"], restored["average"] if "average" in wanted else None
        if abstract_state.average is not None and average is None:
            average = jax.tree.map(jnp.copy, params)
        return TrainState(params=params, average=average, **restored["rest"], healthy=healthy)

    def close(self, kind: type | None = None, error: BaseException | None = None, trace: Any = None) -> None:
        """Ends what goes on in the background; a context manager's exit, which says nothing beside another error."""
        try:
            self._manager.close()
        except OSError:
            if error is None:
                raise


def _parts(state: TrainState) -> dict[str, dict[str, Any]]:
    """Parameters, their average where there is one, and the rest without `healthy`: what is saved is the last good state."""
    names = [field.name for field in dataclasses.fields(state) if field.name not in ("params", "average", "healthy")]
    average = {} if state.average is None else {"average": state.average}
    return {"params": state.params, **average, "rest": {name: getattr(state, name) for name in names}}


def _in_chunks(tree: Any) -> Any:
    """How each array is saved: in chunks from which a host on another mesh can read its part alone."""

    def args(array: jax.Array | np.ndarray) -> ocp.SaveArgs:
        here = array.sharding.shard_shape(array.shape) if isinstance(array, jax.Array) else array.shape
        axes = single_axes(here, array.dtype.itemsize)
        return ocp.SaveArgs(chunk_byte_size=chunk_bytes(array.shape, array.dtype.itemsize), shard_axes=axes)

    return jax.tree.map(args, tree)


def save_params(path: epath.Path, params: dict, step: int = 0, **notes: Any) -> None:
    """Writes a checkpoint of parameters alone at `path`, whole or not at all. Several processes call this together."""
    unfinished = path.with_name(f"{path.name}.unfinished")
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(unfinished / "params", params, save_args=_in_chunks(params), force=True)
    notes["checksums"] = checksums.checksums(named_leaves({"params": params}))
    if jax.process_index() == 0:
        write_info(unfinished, make_info(shapes_of(params), step, **notes))
        unfinished.rename(path)
    broadcast(0)  # nobody reads before


def save_run(model_dir: str, config: str, params: dict, step: int) -> None:
    """Writes a run directory of parameters alone, with the text of its configuration.

    Raises:
      UserError: where it has a checkpoint of the step.
    """
    root = absolute_path(model_dir)
    if (root / "checkpoints" / str(step)).exists():
        raise UserError(f"{model_dir} holds a checkpoint of step {step} already, and nothing is ever overwritten.")
    root.mkdir(parents=True, exist_ok=True)
    (root / "config.gin").write_text(config)
    save_params(root / "checkpoints" / str(step), params, step, config=config)
