"""Flags of T5X's commands, and bindings of its eval and infer that are flags here: checkpoint, output, modes and shards."""

import argparse
import ast
import re

from etils import epath

from t5x_lab.config.errors import UserError, check_choice


def add_t5x_flags(parser: argparse.ArgumentParser) -> None:
    """Adds flags of T5X's commands. `flags.gin_settings` applies them."""
    of_t5x = parser.add_argument_group("flags of T5X")
    of_t5x.add_argument("--tfds_data_dir", metavar="DIR", help="folder of TensorFlow Datasets, as in TFDS_DATA_DIR")
    of_t5x.add_argument(
        "--seqio_additional_cache_dirs", metavar="DIRS", help="folders of SeqIO caches separated by commas, as in CACHE_DIRS"
    )
    without_effect = "without effect: messages go to stderr"
    of_t5x.add_argument("--alsologtostderr", "--logtostderr", nargs="?", const=True, help=without_effect)


def take_t5x_bindings(args: argparse.Namespace, output: str) -> None:
    """Moves T5X's bindings to flags: checkpoint and output directory; of infer also its mode and its shard of the input.

    Paths that are set by flags stay as they are.

    Args:
      args: parsed flags of eval or infer.
      output: T5X's macro of the output directory.
    """
    bound = {}
    for flags in (args.gin_bindings, args.gin):
        for flag in list(flags):
            name, _, value = (part.strip() for part in flag.partition("="))
            name = ".".join(name.split(".")[-2:])  # without its module
            is_flag = name in ("CHECKPOINT_PATH", output, "RestoreCheckpointConfig.mode", *_OF_INFER)
            if is_flag and not value.startswith(("%", "[", "(")):
                bound[name] = _text(value)
                flags.remove(flag)
    bound = _bound_in_files(args, output) | bound
    if path := bound.get("CHECKPOINT_PATH"):
        directory, step = _checkpoint(path)
        args.model_dir = args.model_dir or directory
        if step is not None and args.step == "latest":
            args.step = step
    if bound.get("RestoreCheckpointConfig.mode") == "all" and args.step == "latest":
        args.step = "all"
    args.output = args.output or bound.get(output)
    for name in _OF_INFER & bound.keys():
        flag = name.removeprefix("infer.")
        setattr(args, flag, _value(name, bound[name]))


def _bound_in_files(args: argparse.Namespace, output: str) -> dict[str, str]:
    """Returns the checkpoint and the output directory that T5X's gin files name."""
    from t5x_lab.migration.direct import values_in_t5x_files

    names = {"CHECKPOINT_PATH": "CHECKPOINT_PATH", "RestoreCheckpointConfig.path": "CHECKPOINT_PATH", output: output}
    search_paths = [path for paths in args.gin_search_paths for path in paths.split(",")]
    values = values_in_t5x_files(args.gin_file, search_paths, names) if args.gin_file else {}
    return {names[name]: value for name, value in values.items() if isinstance(value, str)}


_OF_INFER = {"infer.mode", "infer.shard_id", "infer.num_shards"}


def _value(name: str, text: str) -> str | int | None:
    """Returns the value of a flag of infer.

    Raises:
      UserError: for a mode that infer does not have, or a shard that is not a number.
    """
    if name == "infer.mode":
        check_choice(name, text, ("predict", "score"))
        return text
    default = 1 if name == "infer.num_shards" else 0
    if text in ("None", ""):
        return default
    if not text.isdigit():
        raise UserError(f"{name} is {text}. It must be a whole number.")
    return int(text)


def _text(value: str) -> str:
    """Returns the text of a flag's value, which T5X needs in quotes."""
    try:
        return str(ast.literal_eval(value))
    except (ValueError, SyntaxError):
        return value


def _checkpoint(path: str) -> tuple[str, str | None]:
    """Returns (RUN, "1000") for T5X's `RUN/checkpoint_1000`, if t5x_lab trained this run; else (path, None)."""
    match = re.fullmatch(r"(.*)/checkpoint_(\d+)/?", path)
    if match and not epath.Path(path).exists() and (epath.Path(match[1]) / "checkpoints" / match[2]).exists():
        return match[1], match[2]
    return path, None
