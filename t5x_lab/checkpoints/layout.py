"""Directory layout of checkpoints, their info, and checks that a checkpoint fits a run.

`MODEL_DIR/checkpoints/<step>/` has these parts: `params`; `average`, averaged parameters if the run keeps them; `rest`
(optimizer, step, counters); `data` (position of each logical shard); and `info`, a JSON object with format version, step,
parameter shapes, checksums, resolved configuration, and the settings that a run must be resumed with. A checkpoint with a file
`PINNED` is never deleted.
"""

import hashlib
import json
import pathlib
import re
from collections.abc import Collection, Mapping
from typing import Any

import jax
import orbax.checkpoint as ocp
from etils import epath

from t5x_lab.checkpoints import stores  # noqa: F401 (Orbax recognizes whole checkpoints on s3:// by it)
from t5x_lab.checkpoints.lazy_tensors import Unreadable
from t5x_lab.config.errors import UserError
from t5x_lab.config.gin_files import gin_flag
from t5x_lab.config.json_files import parse_json
from t5x_lab.config.regular_files import is_regular_file
from t5x_lab.config.renamed import RENAMED
from t5x_lab.config.steps import is_step, parse_step

FORMAT = 3  # format 2 has other names for norms and cross-attention; format 1 also has no checksums
PINNED = "PINNED"
ARRAYS = ("params", "average", "rest")
WEIGHTS = {"last": "params", "average": "average"}
INFO = "info/metadata"
COMMIT = "commit_success.txt"  # the last file of a checkpoint, as Orbax names it


class Corrupt(Unreadable):
    """A checkpoint whose files differ from what was saved."""

    def __init__(self, path: epath.Path, reason: str):
        super().__init__(f"The checkpoint {path} is damaged: {reason}.")


def absolute_path(path: str | epath.Path) -> epath.Path:
    """Returns the absolute path. Remote paths (gs://...) are absolute."""
    path = epath.Path(path)
    return path if "://" in str(path) else path.absolute()


# ---- info


def make_info(shapes: Mapping[str, list[int]], step: int, **notes: Any) -> dict:
    """Returns the info of a checkpoint, with its digest.

    Args:
      shapes: parameter shapes by name. See `parameter_shapes`.
      step: step of the run.
      notes: further JSON values.
    """
    info = {"format": FORMAT, "step": step, "parameters": dict(shapes), **notes}
    return {**info, "sha256": _digest(info)}


def finish(path: epath.Path, info: Mapping[str, Any]) -> None:
    """Writes the info of a new checkpoint that has parameters only, and the files that mark it as whole on object storage."""
    (path / INFO).parent.mkdir(exist_ok=True)
    (path / INFO).write_text(json.dumps(info))
    for folder in (path / "params", (path / INFO).parent, path):
        (folder / COMMIT).write_text("")


def _digest(info: Mapping[str, Any]) -> str:
    without_digest = {name: value for name, value in info.items() if name != "sha256"}
    return hashlib.sha256(json.dumps(without_digest, sort_keys=True).encode()).hexdigest()


def read_info(path: epath.Path) -> dict:
    """Returns the info of a checkpoint.

    Args:
      path: a `checkpoints/<step>` directory.

    Raises:
      UserError: if it is damaged, or of a later format.
    """
    file = path / INFO
    if not is_regular_file(file):
        raise Corrupt(path, f"it has no {INFO}")
    try:
        info = parse_json(file.read_bytes())
        info["format"], info["step"], info["parameters"].items()
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise Corrupt(path, f"its {INFO} cannot be read") from error
    if info["format"] not in range(1, FORMAT + 1):
        raise UserError(
            f"The checkpoint {path} has format {info['format']}, but this version of t5x_lab reads formats up to {FORMAT}. "
            "Install a newer t5x_lab."
        )
    step = info["step"]
    if not is_step(step) or parse_step(path.name) not in (None, step):
        raise Corrupt(path, f"its {INFO} has the step {step!r}")
    if info["format"] >= 2 and info.get("sha256") != _digest(info):
        raise Corrupt(path, f"its {INFO} differs from what was saved")
    for key in {"parameters", "checksums"} & info.keys():
        info[key] = {current_name(name, info["format"]): value for name, value in info[key].items()}
    return info


def current_name(name: str, saved_format: int) -> str:
    """Returns the current name of a parameter, or of an array that belongs to one, for a name in an older format."""
    if saved_format >= 3:
        return name
    name = re.sub(r"\b(pre|post)_(self_attention|cross_attention|mlp)_layer_norm\b", r"\2_norm", name)
    return re.sub(r"\bencoder_decoder_attention\b", "cross_attention", name)


# ---- directories


def is_checkpoint(path: epath.Path) -> bool:
    """Returns whether `path` is a t5x_lab checkpoint, as opposed to a run directory."""
    return (path / "params").exists() and (path / "info").exists()


def is_file_name(name: str) -> bool:
    """Returns whether a name is a plain file name, which cannot lead to another directory."""
    return pathlib.PurePath(name).name == name and name not in (".", "..")


def find_checkpoint(path: str, step: int | None = None) -> epath.Path:
    """Returns the checkpoint at a path.

    Args:
      path: a run directory or a checkpoint.
      step: step of a run directory. Default: the latest.

    Raises:
      UserError: if there is no such checkpoint.
    """
    root = absolute_path(path)
    if is_checkpoint(root):
        if step is not None:
            check_step(path, read_info(root)["step"], step)
        return root
    steps = finished_steps(root)
    if not steps:
        problem = "does not exist" if not root.exists() else "has no finished checkpoint"
        raise UserError(f"{path} {problem}. Use a run directory, which contains checkpoints/<step>, or a checkpoint.")
    return root / "checkpoints" / str(choose_step(path, steps, step))


def check_step(path: str | epath.Path, saved_step: int, step: int) -> None:
    """Raises a `UserError` if a checkpoint is not of this step."""
    if saved_step != step:
        raise UserError(f"{path} is the checkpoint of step {saved_step}, not of step {step}. Remove --step.")


def choose_step(path: str | epath.Path, steps: Collection[int], step: int | None) -> int:
    """Returns `step`, the latest of `steps` for None.

    Raises:
      UserError: if a directory has no checkpoint of this step.
    """
    if step is not None and step not in steps:
        raise UserError(f"{path} has no checkpoint of step {step}. It has {', '.join(map(str, sorted(steps)))}.")
    return max(steps) if step is None else step


def finished_steps(model_dir: str | epath.Path) -> list[int]:
    """Returns the steps of finished checkpoints in a run directory, in order."""
    directory = epath.Path(model_dir) / "checkpoints"
    if not directory.exists():
        return []
    steps = {step: entry for entry in directory.iterdir() if (step := parse_step(entry.name)) is not None}
    return sorted(step for step, entry in steps.items() if ocp.utils.is_checkpoint_finalized(entry))


# ---- checks that a checkpoint fits a run


def check_settings(model_dir: str, step: int, settings: Mapping[str, str]) -> None:
    """Raises a `UserError` with the first setting that differs between a run's checkpoint and the configuration."""
    saved = read_info(epath.Path(model_dir) / "checkpoints" / str(step)).get("settings", {})
    saved = {RENAMED.get(name, name): value for name, value in saved.items()}
    for name, value in settings.items():
        if name in saved and saved[name] != value:
            before, now = (x if len(x) < 200 else f"{x[:80]}...{x[-80:]}" for x in (saved[name], value))
            raise UserError(
                f"The run in {model_dir} was trained with {name} = {before}, but the configuration has {now}. Use the same "
                f"value, or start a new MODEL_DIR with {initial_checkpoint_flags(model_dir)}"
            )


def check_format(path: epath.Path) -> None:
    """Raises a `UserError` if a run cannot be continued because its checkpoint has an older format."""
    if read_info(path)["format"] < FORMAT:
        raise UserError(
            f"The checkpoint {path} was written by an older t5x_lab, whose arrays have other names. Start a new MODEL_DIR with "
            f"{initial_checkpoint_flags(path)}"
        )


def initial_checkpoint_flags(path: str | epath.Path) -> str:
    """Returns the flags that continue in a new MODEL_DIR, for messages."""
    carry = gin_flag("RestoreCheckpointConfig.carry", '["optimizer", "step"]')
    initial = gin_flag("INITIAL_CHECKPOINT_PATH", path)
    return f"{initial}, and {carry} to keep optimizer and step. Reading starts at the first batch."


def check_part(path: epath.Path, part: str) -> None:
    """Raises a `UserError` for a checkpoint without averaged weights."""
    if not (path / part).exists():
        raise UserError(
            f"The checkpoint {path} has no averaged weights: its run was trained without AVERAGE_DECAY. Use the last weights, "
            f"or continue in a new MODEL_DIR with {initial_checkpoint_flags(path)}"
        )


def check_same_parameters(path: epath.Path, abstract_params: dict, fresh_names: Collection[str] = ()) -> None:
    """Raises a `UserError` with the first parameter that differs between the checkpoint and the model.

    Parameters in `fresh_names` may be missing in the checkpoint.
    """
    saved, expected = read_info(path)["parameters"], parameter_shapes(abstract_params)
    for name in sorted(saved.keys() | expected.keys()):
        if saved.get(name) != expected.get(name) and not (name in fresh_names and name not in saved):
            if name in fresh_names:
                raise UserError(
                    f"The checkpoint {path} has {name} with shape {tuple(saved[name])}, but the model needs "
                    f"{tuple(expected[name])}. To "
                    "initialize it freshly: " + gin_flag("RestoreCheckpointConfig.assignment_map", f'[("{name}", None)]')
                )
            describe = lambda shape: "is missing" if shape is None else f"has shape {tuple(shape)}"
            raise UserError(
                f"The checkpoint {path} does not fit the model: {name} {describe(saved.get(name))} in the checkpoint and "
                f"{describe(expected.get(name))} in the model. Use the configuration it was trained with, another MODEL_DIR "
                "for a new run, or rules in RestoreCheckpointConfig to load a part of it."
            )


# ---- names


def parameter_shapes(params: dict) -> dict[str, list[int]]:
    """Returns the shapes of parameters by name."""
    return {name: list(leaf.shape) for name, leaf in named_leaves(params).items()}


def named_leaves(tree: Any) -> dict[str, Any]:
    """Returns leaves by path, joined with "/"."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}
