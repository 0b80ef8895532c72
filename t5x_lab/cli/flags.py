"""Flags that several commands share."""

import argparse
import contextlib
import os
from collections.abc import Iterator

from t5x_lab.config.errors import UserError


def add_gin_flags(parser: argparse.ArgumentParser) -> None:
    """T5X's configuration flags."""
    group = parser.add_argument_group("configuration")
    group.add_argument("--gin_file", action="append", default=[], metavar="FILE", help="a gin file; repeat it, later files win")
    group.add_argument("--gin.NAME=VALUE", dest="unused", default=argparse.SUPPRESS, help="a binding; strings need no quotes")
    group.add_argument(
        "--gin_bindings", action="append", default=[], metavar="BINDING", help='a binding in gin\'s own syntax: "NAME = 3"'
    )
    group.add_argument(
        "--gin_search_paths", action="append", default=[], metavar="PATHS", help="where to look for gin files, comma-separated"
    )
    group.add_argument(
        "--dry_run", action="store_true", help="print the configuration, to train or evaluate the memory table too, and stop"
    )


def gin_config(args: argparse.Namespace, *first_files: str, fixed: tuple[str, ...] = ()):
    """The configuration that the flags describe, on top of `first_files`; the bindings `fixed` override it."""
    from t5x_lab.config.gin_files import binding
    from t5x_lab.runs.config.gin_config import GinConfig

    bindings = [*args.gin_bindings, *(binding(flag) for flag in args.gin), *fixed]
    paths = [path for paths in args.gin_search_paths for path in paths.split(",")]
    return GinConfig((*first_files, *args.gin_file), tuple(bindings), tuple(paths))


def add_model_flags(parser: argparse.ArgumentParser, several_steps: bool = False) -> None:
    """`--model_dir`, `--step` and `--weights`."""
    ensemble = "or several joined by commas: an ensemble, whose logits are the mean of its members'"
    parser.add_argument("--model_dir", required=True, help=f"a run directory, {ensemble}")
    parser.add_argument(
        "--step",
        default="latest",
        help="a checkpoint's step, or latest" + (", all, or several joined by commas" if several_steps else ""),
    )
    default = None if several_steps else "last"
    parser.add_argument("--weights", default=default, help="last, or average: those of AVERAGE_DECAY")


def model_dirs(text: str) -> list[str]:
    """The directories of `--model_dir`, which may be several."""
    return text.split(",") if "," in text and not os.path.exists(text) else [text]


def chosen_step(step: str) -> int | None:
    """The number behind `--step`; None for the latest."""
    if step == "latest":
        return None
    if not (step.isascii() and step.isdigit()):
        raise UserError(f'--step is "{step}"; give a number or latest.')
    return int(step)


SAMPLING = ("max_tokens", "temperature", "top_k", "top_p", "seed", "beam_size", "beam_alpha")


def add_sampling_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--max_tokens", type=int, default=64, help="most tokens to write")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy")
    parser.add_argument("--top_k", type=int, default=0, help="only the k most probable tokens; 0 is all")
    parser.add_argument("--top_p", type=float, default=1.0, help="only the most probable tokens up to this mass")
    parser.add_argument("--seed", type=int, default=0, help="of sampling")
    parser.add_argument("--beam_size", type=int, default=1, help="hypotheses of a beam search; 1 is none")
    parser.add_argument("--beam_alpha", type=float, help="how a beam search forgives length; 0.6, T5's, unless given")


def add_process_flags(parser: argparse.ArgumentParser) -> None:
    """Where this process stands among those that work as one."""
    group = parser.add_argument_group("several processes")
    group.add_argument(
        "--distributed",
        action="store_true",
        help="join the other processes; a TPU pod, Slurm, Open MPI and Kubernetes need nothing more",
    )
    group.add_argument("--coordinator_address", help="host:port of process 0, elsewhere; or JAX_COORDINATOR_ADDRESS")
    group.add_argument("--num_processes", type=int, help="or JAX_NUM_PROCESSES")
    group.add_argument("--process_id", type=int, help="from 0; or JAX_PROCESS_ID")


def print_once(text: str) -> None:
    """Prints in the first of the processes that work as one."""
    import jax

    if jax.process_index() == 0:
        print(text)


@contextlib.contextmanager
def joined_processes(args: argparse.Namespace, *agreed: type[BaseException]) -> Iterator[None]:
    """Waits for the other processes where the flags speak of any, before JAX is first used, and ends together with them.

    `agreed` are exceptions that all processes raise after the same step.
    """
    from t5x_lab.partitioning.distributed import fail_together

    place = (args.coordinator_address, args.num_processes, args.process_id)
    if args.distributed or any(part is not None for part in place):
        from t5x_lab.partitioning.distributed import initialize

        initialize(*place)
    with fail_together(*agreed):
        yield
