"""Where things are in a run's checkpoints, and what their info says.

`MODEL_DIR/checkpoints/<step>/` has these parts: `params`; `average`, of the parameters, where the run keeps one; `rest`
(optimizer, step, counters); `data` (position per logical shard); and `info`, one JSON object: format version, step, parameter
shapes, checksums, the resolved configuration, and the settings that the run is continued with unchanged. A file `PINNED` in it
keeps a checkpoint for good.
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

from t5x_lab.checkpoints.lazy_tensors import Unreadable
from t5x_lab.config.errors import UserError
from t5x_lab.config.gin_files import gin_flag

FORMAT = 3  # 2 had other names for norms and cross-attention; 1 had no checksums either
PINNED = "PINNED"
ARRAYS = ("params", "average", "rest")
WEIGHTS = {"last": "params", "average": "average"}
INFO = "info/metadata"


class Corrupt(Unreadable):
    """A checkpoint whose files are not as they were saved."""

    def __init__(self, path: epath.Path, what: str):
        super().__init__(f"The checkpoint {path} is damaged: {what}.")


def absolute_path(path: str | epath.Path) -> epath.Path:
    """The absolute path; a remote one (gs://…) is absolute already."""
    path = epath.Path(path)
    return path if "://" in str(path) else path.absolute()


# ---- info


def make_info(shapes: Mapping[str, list[int]], step: int, **notes: Any) -> dict:
    """A checkpoint's info, with a digest of itself.

    Args:
      shapes: of the parameters, by name; see `shapes_of`.
      step: of the run.
      notes: what else is written down, as JSON.
    """
    info = {"format": FORMAT, "step": step, "parameters": dict(shapes), **notes}
    return {**info, "sha256": _digest(info)}


def write_info(path: epath.Path, info: Mapping[str, Any]) -> None:
    """Writes the info of a new checkpoint of parameters alone."""
    (path / INFO).parent.mkdir(exist_ok=True)
    (path / INFO).write_text(json.dumps(info))


def _digest(info: Mapping[str, Any]) -> str:
    without_digest = {name: value for name, value in info.items() if name != "sha256"}
    return hashlib.sha256(json.dumps(without_digest, sort_keys=True).encode()).hexdigest()


def read_info(path: epath.Path) -> dict:
    """The info of the checkpoint at `path` (a `checkpoints/<step>` directory).

    Raises:
      UserError: when it is damaged, or of a later format.
    """
    file = path / INFO
    if not file.exists():
        raise Corrupt(path, f"it has no {INFO}")
    try:
        info = json.loads(file.read_bytes())
        info["format"], info["step"], info["parameters"].items()
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise Corrupt(path, f"its {INFO} cannot be read") from error
    if info["format"] not in range(1, FORMAT + 1):
        raise UserError(
            f"The checkpoint {path} has format {info['format']}; this version of t5x_lab reads formats up to {FORMAT}. "
            "Install a newer t5x_lab."
        )
    step = info["step"]
    if not isinstance(step, int) or isinstance(step, bool) or step < 0 or (path.name.isdigit() and int(path.name) != step):
        raise Corrupt(path, f"its {INFO} says that it is of step {step!r}")
    if info["format"] >= 2 and info.get("sha256") != _digest(info):
        raise Corrupt(path, f"its {INFO} is not as it was saved")
    for key in {"parameters", "checksums"} & info.keys():
        info[key] = {current_name(name, info["format"]): value for name, value in info[key].items()}
    return info


def current_name(name: str, saved_format: int) -> str:
    """Today's name of a parameter, or of an array that belongs to one, in a checkpoint of an older format."""
    if saved_format >= 3:
        return name
    name = re.sub(r"\b(pre|post)_(self_attention|cross_attention|mlp)_layer_norm\b", r"\2_norm", name)
    return re.sub(r"\bencoder_decoder_attention\b", "cross_attention", name)


# ---- directories


def is_checkpoint(path: epath.Path) -> bool:
    """Whether `path` is a checkpoint of t5x_lab, and not a directory of them."""
    return (path / "params").exists() and (path / "info").exists()


def is_file_name(name: str) -> bool:
    """Whether a name that stands in a file is of a file beside it, and leads nowhere else."""
    return pathlib.PurePath(name).name == name and name not in (".", "..")


def find_checkpoint(path: str, step: int | None = None) -> epath.Path:
    """Finds the checkpoint that a user names: a run directory (its latest step, or `step`) or a checkpoint itself.

    Raises:
      UserError: saying what is at `path` instead.
    """
    root = absolute_path(path)
    if is_checkpoint(root):
        if step is not None and read_info(root)["step"] != step:
            raise UserError(
                f"{path} is the checkpoint of step {read_info(root)['step']}, not of step {step}. Leave --step out."
            )
        return root
    steps = finished_steps(root)
    if not steps:
        what = "does not exist" if not root.exists() else "holds no finished checkpoint"
        raise UserError(f"{path} {what}. Name a run directory (with checkpoints/<step> in it) or a checkpoint directory.")
    if step is not None and step not in steps:
        raise UserError(f"{path} has no checkpoint of step {step}; it has {', '.join(map(str, steps))}.")
    return root / "checkpoints" / str(steps[-1] if step is None else step)


def finished_steps(model_dir: str | epath.Path) -> list[int]:
    """Steps of the finished checkpoints in a run directory, in order."""
    directory = epath.Path(model_dir) / "checkpoints"
    if not directory.exists():
        return []
    numbered = [entry for entry in directory.iterdir() if entry.name.isascii() and entry.name.isdigit()]
    return sorted(int(entry.name) for entry in numbered if ocp.utils.is_checkpoint_finalized(entry))


# ---- whether a checkpoint fits


def check_settings(model_dir: str, step: int, settings: Mapping[str, str]) -> None:
    """Raises a `UserError` that names the first setting in which a run's checkpoint and the configuration differ."""
    saved = read_info(epath.Path(model_dir) / "checkpoints" / str(step)).get("settings", {})
    for name, value in settings.items():
        if name in saved and saved[name] != value:
            before, now = (x if len(x) < 200 else f"{x[:80]}…{x[-80:]}" for x in (saved[name], value))
            raise UserError(
                f"The run in {model_dir} was trained with {name} = {before}, and this configuration has {now}: it "
                "cannot be continued with another. Use the same, or start a new MODEL_DIR with "
                f"{from_another(model_dir)}"
            )


def check_format(path: epath.Path) -> None:
    """Raises a `UserError` when a run cannot be continued from a checkpoint because its format is an older one."""
    if read_info(path)["format"] < FORMAT:
        raise UserError(
            f"The checkpoint {path} was made by an older t5x_lab, whose arrays had other names. Go on from it in a new "
            f"MODEL_DIR, with {from_another(path)}"
        )


def from_another(path: str | epath.Path) -> str:
    """The flags that go on in a new MODEL_DIR, for messages."""
    carry = gin_flag("RestoreCheckpointConfig.carry", '["optimizer", "step"]')
    return (
        f"{gin_flag('INITIAL_CHECKPOINT_PATH', path)}, and {carry} to keep more than the parameters; the data begin anew there."
    )


def check_part(path: epath.Path, part: str) -> None:
    """Raises a `UserError` for a checkpoint without averaged weights where they are asked for."""
    if not (path / part).exists():
        raise UserError(
            f"The checkpoint {path} has no averaged weights: its run was trained without AVERAGE_DECAY. Take the last ones, "
            f"or go on from them in a new MODEL_DIR, with {from_another(path)}"
        )


def check_same_parameters(path: epath.Path, abstract_params: dict, fresh_names: Collection[str] = ()) -> None:
    """Raises a `UserError` that names the first parameter in which the checkpoint and the model differ.

    Those that are `fresh_names` to the model may be missing in the checkpoint.
    """
    found, wanted = read_info(path)["parameters"], shapes_of(abstract_params)
    for name in sorted(found.keys() | wanted.keys()):
        if found.get(name) != wanted.get(name) and not (name in fresh_names and name not in found):
            if name in fresh_names:
                raise UserError(
                    f"The checkpoint {path} has {name}, which is fresh_names here too, of the shape {tuple(found[name])} and not "
                    f"{tuple(wanted[name])}. To begin it afresh: "
                    + gin_flag("RestoreCheckpointConfig.assignment_map", f'[("{name}", None)]')
                )
            describe = lambda shape: "is missing" if shape is None else f"has shape {tuple(shape)}"
            raise UserError(
                f"The checkpoint {path} does not fit the model: {name} {describe(found.get(name))} there and "
                f"{describe(wanted.get(name))} in the configuration. Use the configuration it was trained with, "
                "another MODEL_DIR for a new run, or the rules of RestoreCheckpointConfig to begin with a part of it."
            )


# ---- names


def shapes_of(params: dict) -> dict[str, list[int]]:
    """Parameter names and their shapes."""
    return {name: list(leaf.shape) for name, leaf in named_leaves(params).items()}


def named_leaves(tree: Any) -> dict[str, Any]:
    """Leaves by their paths, joined by "/"."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}
