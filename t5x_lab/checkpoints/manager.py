"""The checkpoints of one run: `MODEL_DIR/checkpoints/<step>/`, written asynchronously, a bounded number of them kept.

A checkpoint has four parts: `params`; `rest` (optimizer, step, counters); `data` (position per logical shard); and `info`
(format version, parameter names and shapes). Orbax writes them under a temporary name and renames it at the end, so that
a checkpoint exists whole or not at all.
"""

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

import jax
import orbax.checkpoint as ocp
from etils import epath

from t5x_lab.config.errors import UserError
from t5x_lab.training.batches import Batches
from t5x_lab.training.state import TrainState

FORMAT = 1


class _DataHandler(ocp.CheckpointHandler):
    """Lets a data source write its own position into the checkpoint, each process its own shards."""

    def save(self, directory: epath.Path, args: "_DataSave"):
        args.item.save(directory)

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


class Checkpoints:
    """Saves and restores a run's states.

    Args:
      model_dir: the run's directory.
      keep: how many checkpoints stay; the oldest go first.
      settings: what a run is continued with unchanged, kept in every checkpoint; see `check_settings`.
    """

    def __init__(self, model_dir: str, keep: int = 3, settings: Mapping[str, str] | None = None):
        self._settings = dict(settings or {})
        self.directory = epath.Path(model_dir).absolute() / "checkpoints"
        self._manager = ocp.CheckpointManager(
            self.directory,
            options=ocp.CheckpointManagerOptions(max_to_keep=keep, create=True, cleanup_tmp_directories=True),
        )

    def save(self, step: int, state: TrainState, batches: Batches, notes: Mapping[str, Any] | None = None) -> None:
        """Starts saving; returns when the arrays are copied, while files are still being written.

        `notes` are kept in the checkpoint's info, as JSON.
        """
        if step in self._manager.all_steps():
            return
        params, rest = _parts(state)
        self._manager.save(
            step,
            args=ocp.args.Composite(
                params=ocp.args.StandardSave(params),
                rest=ocp.args.StandardSave(rest),
                data=_DataSave(batches),
                info=ocp.args.JsonSave(_info(params, step) | {"settings": self._settings} | dict(notes or {})),
            ),
            force=True,
        )

    def restore(self, step: int, abstract_state: TrainState, batches: Batches) -> TrainState:
        """The state of `step`, placed as `abstract_state`'s shardings say; moves `batches` to where it was."""
        path = self.directory / str(step)
        params, rest = _parts(abstract_state)
        check_same_tree(path, params)
        restored = self._manager.restore(
            step,
            args=ocp.args.Composite(
                params=ocp.args.StandardRestore(params), rest=ocp.args.StandardRestore(rest), data=_DataRestore(batches)
            ),
        )
        healthy = jax.device_put(True, abstract_state.healthy.sharding)
        return TrainState(params=restored["params"], **restored["rest"], healthy=healthy)

    def wait(self) -> None:
        """Returns when everything is on disk."""
        self._manager.wait_until_finished()

    def close(self) -> None:
        self._manager.close()


def _parts(state: TrainState) -> tuple[dict, dict[str, Any]]:
    """Parameters, and the rest without `healthy`: what is saved is the last good state, from which a run may go on."""
    names = [field.name for field in dataclasses.fields(state) if field.name not in ("params", "healthy")]
    return state.params, {name: getattr(state, name) for name in names}


def restore_params(path: epath.Path, abstract_params: dict) -> dict:
    """The parameters of the checkpoint at `path` (a `checkpoints/<step>` directory), and nothing else of it."""
    check_same_tree(path, abstract_params)
    with ocp.StandardCheckpointer() as checkpointer:
        return checkpointer.restore(path / "params", abstract_params)


def save_params(path: epath.Path, params: dict, step: int = 0) -> None:
    """Writes a checkpoint of parameters alone, at `path`."""
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path / "params", params, force=True)
    (path / "info").mkdir(exist_ok=True)
    (path / "info" / "metadata").write_text(json.dumps(_info(params, step)))


def _info(params: dict, step: int) -> dict:
    return {"format": FORMAT, "step": step, "parameters": shapes(params)}


def find_checkpoint(path: str, step: int | None = None) -> epath.Path:
    """Finds the checkpoint that a user names: a run directory (its latest step, or `step`) or a checkpoint itself.

    Raises:
      UserError: saying what is at `path` instead.
    """
    root = epath.Path(path).absolute()
    if (root / "params").exists():
        return root
    steps = finished_steps(root)
    if not steps:
        what = "does not exist" if not root.exists() else "holds no finished checkpoint"
        raise UserError(f"{path} {what}. Name a run directory (with checkpoints/<step> in it) or a checkpoint directory.")
    if step is not None and step not in steps:
        raise UserError(f"{path} has no checkpoint of step {step}; it has {', '.join(map(str, steps))}.")
    return root / "checkpoints" / str(steps[-1] if step is None else step)


def finished_steps(model_dir: str | epath.Path) -> list[int]:
    """Steps of the whole checkpoints in a run directory, in order."""
    directory = epath.Path(model_dir) / "checkpoints"
    if not directory.exists():
        return []
    numbered = [entry for entry in directory.iterdir() if entry.name.isascii() and entry.name.isdigit()]
    return sorted(int(entry.name) for entry in numbered if ocp.utils.is_checkpoint_finalized(entry))


def read_info(path: epath.Path) -> dict:
    """Format, step and parameter shapes of the checkpoint at `path`."""
    file = path / "info" / "metadata"
    if not file.exists():
        raise UserError(f"{path} is not a whole t5x_lab checkpoint: it has no info/metadata. Use another step.")
    return json.loads(file.read_text())


def check_settings(model_dir: str, step: int, settings: Mapping[str, str]) -> None:
    """Raises a `UserError` that names the first setting in which a run's checkpoint and the configuration differ."""
    saved = read_info(epath.Path(model_dir) / "checkpoints" / str(step)).get("settings", {})
    for name, value in settings.items():
        if name in saved and saved[name] != value:
            raise UserError(
                f"The run in {model_dir} was trained with {name} = {saved[name]}, and this configuration has {value}: it "
                "cannot be continued with another. Use the same, or start a new MODEL_DIR with "
                f"--gin.INITIAL_CHECKPOINT_PATH={model_dir}."
            )


def shapes(params: dict) -> dict[str, list[int]]:
    """Parameter names, joined by "/", and their shapes."""
    return {
        "/".join(str(entry.key) for entry in path): list(leaf.shape)
        for path, leaf in jax.tree_util.tree_leaves_with_path(params)
    }


def check_same_tree(path: epath.Path, abstract_params: dict) -> None:
    """Raises a `UserError` that names the first parameter which the checkpoint and the model do not share."""
    found, wanted = read_info(path)["parameters"], shapes(abstract_params)
    for name in sorted(found.keys() | wanted.keys()):
        if found.get(name) != wanted.get(name):
            describe = lambda shape: "is missing" if shape is None else f"has shape {tuple(shape)}"
            raise UserError(
                f"The checkpoint {path} does not fit the model: {name} {describe(found.get(name))} there and "
                f"{describe(wanted.get(name))} in the configuration. Use the configuration it was trained with, or "
                "another MODEL_DIR for a new run."
            )
