"""Flags shared by several commands."""

import argparse
import contextlib
import os
import shutil
from collections.abc import Iterator

from t5x_lab.config.errors import UserError
from t5x_lab.config.steps import parse_step


def add_gin_flags(parser: argparse.ArgumentParser, has_dry_run: bool = True) -> None:
    """Adds T5X's configuration flags."""
    group = parser.add_argument_group("configuration")
    group.add_argument(
        "--gin_file",
        action="append",
        default=[],
        metavar="FILE",
        help="gin file; repeatable, later files override earlier ones",
    )
    gin_help = "gin binding; strings need no quotes"
    group.add_argument("--gin.NAME=VALUE", action="store_true", default=argparse.SUPPRESS, help=gin_help)
    group.add_argument(
        "--gin_bindings", action="append", default=[], metavar="BINDING", help='binding in gin syntax: "NAME = 3"'
    )
    group.add_argument(
        "--gin_search_paths", action="append", default=[], metavar="PATHS", help="folders with gin files, separated by commas"
    )
    if has_dry_run:
        group.add_argument(
            "--dry_run", action="store_true", help="print the configuration, and the memory table for train and eval, and exit"
        )


def gin_settings(args: argparse.Namespace) -> tuple[list[str], list[str]]:
    """Returns (bindings, search paths) of the configuration flags."""
    from t5x_lab.config.gin_files import binding

    if data_dir := getattr(args, "tfds_data_dir", None):
        os.environ["TFDS_DATA_DIR"] = data_dir
    cache_dirs = tuple(filter(None, (getattr(args, "seqio_additional_cache_dirs", None) or "").split(",")))
    of_t5x = [f"CACHE_DIRS = {cache_dirs!r}"] if cache_dirs else []
    bindings = [*of_t5x, *args.gin_bindings, *(binding(flag) for flag in args.gin)]
    return bindings, [path for paths in args.gin_search_paths for path in paths.split(",")]


def gin_config(args: argparse.Namespace, *first_files: str, fixed: tuple[str, ...] = ()):
    """Returns the configuration of the flags, after `first_files`. The bindings `fixed` override it.

    Files of T5X's are translated, and what they became is printed.
    """
    from t5x_lab.config.log import log_once
    from t5x_lab.migration.direct import translate_t5x
    from t5x_lab.runs.config.gin_config import GinConfig, known_macros

    bindings, paths = gin_settings(args)
    files = args.gin_file
    if translation := translate_t5x(files, bindings, paths, known_macros()):
        log_once(translation.notes)  # a command may parse its flags twice
        files, bindings = [translation.file], []
    config = GinConfig((*first_files, *files), (*bindings, *fixed), tuple(paths))
    if translation:
        shutil.rmtree(translation.folder)  # an error names a file in it
    return config


def add_model_flags(parser: argparse.ArgumentParser, several_steps: bool = False, is_required: bool = True) -> None:
    """Adds the flags of `load_model`."""
    ensemble = "or several, separated by commas, as an ensemble with averaged logits"
    parser.add_argument("--model_dir", required=is_required, help=f"run directory or checkpoint of any format, {ensemble}")
    parser.add_argument(
        "--step",
        default="latest",
        help="step of the checkpoint, or latest" + (", all, or several separated by commas" if several_steps else ""),
    )
    add_trust_flag(parser)
    default = None if several_steps else "last"
    parser.add_argument("--weights", default=default, help="last or average (AVERAGE_DECAY)")
    parser.add_argument(
        "--parameter_dtype",
        choices=("float32", "bfloat16"),
        default="float32",
        help="dtype of the parameters on the devices; bfloat16 takes half the memory and rounds them",
    )


def model_config(args: argparse.Namespace, gin_is_for_model: bool = True):
    """Returns the configuration of checkpoints that do not describe their model, such as those of T5X, by the gin flags.

    Args:
      args: parsed flags.
      gin_is_for_model: whether gin flags have no other use, and are refused with checkpoints that describe their model.

    Returns:
      The configuration, None without gin flags and for checkpoints that describe their model.
    """
    from t5x_lab.checkpoints.formats.location import find

    if not (args.gin_file or args.gin_bindings or args.gin):
        return None
    locations = [find(directory, chosen_step(args.step)) for directory in model_dirs(args.model_dir)]
    if not all(location.describes_model for location in locations):
        return gin_config(args)
    if gin_is_for_model:
        raise UserError(f"{locations[0].path} has the configuration of its model. Leave the gin flags out.")
    return None


def load_model(args: argparse.Namespace, config=None):
    """Returns the model of the flags of `add_model_flags`, with the configuration of `model_config`. See `t5x_lab.load`."""
    from t5x_lab.runs.model.load import load

    options = dict(weights=args.weights, trust=args.trust, parameter_dtype=args.parameter_dtype)
    return load(model_dirs(args.model_dir), step=chosen_step(args.step), config=config, **options)


def add_beam_flag(parser: argparse.ArgumentParser) -> None:
    """Adds `--pipeline_options`. See `t5x_lab.config.beam.split_options`."""
    parser.add_argument(
        "--pipeline_options",
        default="",
        help="Beam flags separated by commas, such as --runner=DataflowRunner,--project=my_project; default: local runner",
    )


def add_trust_flag(parser: argparse.ArgumentParser) -> None:
    """Adds `--trust`. See `t5x_lab.load`."""
    help = "let the stored configuration of another person's run import Python modules; read them first"
    parser.add_argument("--trust", action="store_true", help=help)


def model_dirs(text: str) -> list[str]:
    """Returns the directories in `--model_dir`."""
    return text.split(",") if "," in text and not os.path.exists(text) else [text]


def chosen_step(step: str) -> int | None:
    """Returns the number in `--step`; None for the latest."""
    if step == "latest":
        return None
    number = parse_step(step)
    if number is None:
        raise UserError(f'--step is "{step}". It must be a number or "latest".')
    return number


SAMPLING = ("max_tokens", "temperature", "top_k", "top_p", "seed", "beam_size", "beam_alpha", "skip_special_tokens")


MAX_TOKENS = 64  # generated by default
SAMPLING_DEFAULTS = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "seed": 0, "beam_size": 1, "beam_alpha": None}


def add_sampling_flags(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(**SAMPLING_DEFAULTS)
    parser.add_argument("--max_tokens", type=int, default=MAX_TOKENS, help="maximum number of generated tokens")
    parser.add_argument("--temperature", type=float, help="sampling temperature; 0 = greedy")
    parser.add_argument("--top_k", type=int, help="sample from the k most likely tokens; 0 = all")
    parser.add_argument("--top_p", type=float, help="sample from the most likely tokens up to this probability")
    parser.add_argument("--seed", type=int, help="random seed of sampling")
    parser.add_argument("--beam_size", type=int, help="number of hypotheses of beam search; 1 = no beam search")
    parser.add_argument(
        "--beam_alpha", type=float, help="exponent of the length penalty of beam search; default: 0.6, as in T5"
    )
    parser.add_argument(
        "--keep_special_tokens",
        dest="skip_special_tokens",
        action="store_false",
        help="keep sentinels and the unknown token in texts; by default they are left out, as in transformers",
    )


def add_process_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of multi-process runs, also with T5X's names."""
    group = parser.add_argument_group("multi-process runs")
    group.add_argument(
        "--distributed",
        "--multiprocess_gpu",
        action="store_true",
        help="connect to the other processes; detected on TPU pods, Slurm, Open MPI and Kubernetes",
    )
    group.add_argument("--coordinator_address", help="host:port of process 0; default: JAX_COORDINATOR_ADDRESS")
    group.add_argument("--num_processes", "--process_count", type=int, help="number of processes; default: JAX_NUM_PROCESSES")
    group.add_argument(
        "--process_id", "--process_index", type=int, help="index of this process from 0; default: JAX_PROCESS_ID"
    )


def print_once(text: str) -> None:
    """Prints in the first process only."""
    import jax

    if jax.process_index() == 0:
        print(text)


@contextlib.contextmanager
def connect_processes(args: argparse.Namespace, *agreed: type[BaseException]) -> Iterator[None]:
    """Connects to the other processes if the flags ask for it, before JAX is first used, and exits together with them.

    Args:
      args: parsed flags.
      agreed: exceptions that all processes raise after the same step.
    """
    from t5x_lab.partitioning.distributed import fail_together

    address = (args.coordinator_address, args.num_processes, args.process_id)
    if args.distributed or any(part is not None for part in address):
        from t5x_lab.partitioning.distributed import initialize

        initialize(*address)
    with fail_together(*agreed):
        yield
