"""`t5x_lab COMMAND [flags]`: finds the command, turns errors into sentences and exit statuses."""

import argparse
import contextlib
import ctypes
import errno
import importlib
import os
import sys

from t5x_lab.config.errors import UserError, did_you_mean

COMMANDS = {
    "demo": "train on the embedded corpus for a few minutes and write a report",
    "train": "pre-train, adapt or fine-tune; continues when run again with the same MODEL_DIR",
    "eval": "a run's evaluations of one, the latest, all or every new checkpoint",
    "infer": "predictions, scores or ranked choices of a task or a file, to JSONL; resumable",
    "generate": "complete prompts",
    "harness": "lm-eval tasks on a checkpoint",
    "compile": "compile a step for any TPU slice, without a TPU, and report the bytes it takes of each device",
    "inspect": "parameters, shapes, axes and bytes of a configuration or of a checkpoint of any format",
    "report": "one page of a run, or of several laid over each other: curves, evaluations, samples, what differs",
    "convert": "a checkpoint of T5X or Hugging Face into a run directory, or a run into Hugging Face's format",
    "table": "every architecture with every objective: shapes, share of tokens with loss, FLOPs per token",
    "cache": "prepare tasks ahead, as SeqIO's caches, on Apache Beam",
    "vocab": "train a SentencePiece vocabulary",
}
STORAGE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO)
SUCCESS, FAILURE, USER_MISTAKE, STOPPED = 0, 1, 2, 3
# XLA runs all virtual devices of a CPU on one pool of threads, as many as cores or devices. Each collective keeps a thread
# until all devices have come to it, and a device may have come to several: with too few threads they wait for ever.
THREADS = 64
M_ARENA_MAX = -8  # of glibc's malloc.h


class _Parser(argparse.ArgumentParser):
    def error(self, message: str):
        print(f"{self.prog}: {message}. See {self.prog} --help.", file=sys.stderr)
        raise SystemExit(USER_MISTAKE)


def main(argv: list[str] | None = None) -> int:
    """Runs a command; returns the exit status."""
    argv = sys.argv[1:] if argv is None else argv
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    os.environ.setdefault("NPROC", str(max(THREADS, os.cpu_count() or 1)))  # where XLA looks for the size of its pool
    _one_arena_a_core()
    if not argv or argv[0] in ("-h", "--help"):
        print(_help())
        return SUCCESS if argv else USER_MISTAKE
    if argv[0] == "--version":
        from t5x_lab import __version__

        print(f"t5x_lab {__version__}")
        return SUCCESS
    name, *rest = argv
    try:
        if name not in COMMANDS:
            raise UserError(f'There is no command "{name}".{did_you_mean(name, COMMANDS)} See t5x_lab --help.')
        command = importlib.import_module(f"t5x_lab.cli.{name}")
        parser = _Parser(
            prog=f"t5x_lab {name}",
            description=command.__doc__,
            formatter_class=argparse.ArgumentDefaultsHelpFormatter,
            allow_abbrev=False,
        )
        command.add_flags(parser)
        return command.run(_parse(parser, rest)) or SUCCESS
    except SystemExit as error:
        return int(error.code or 0)
    except UserError as error:
        print(f"t5x_lab {name}: {error.sentence}", file=sys.stderr)
        return error.status
    except OSError as error:
        if error.errno not in STORAGE:
            raise
        what = f"{error.filename or 'a file'} cannot be used: {os.strerror(error.errno)}"
        print(f"t5x_lab {name}: {what}. Repair that, and run the same command again.", file=sys.stderr)
        return FAILURE
    except KeyboardInterrupt:
        print(f"t5x_lab {name}: interrupted", file=sys.stderr)
        return FAILURE  # 3 would say that everything is saved


def _one_arena_a_core() -> None:
    """glibc gives so many threads eight arenas a core, and keeps in each what was freed there: hundreds of MiB."""
    if "MALLOC_ARENA_MAX" in os.environ or "arena_max" in os.environ.get("GLIBC_TUNABLES", ""):
        return  # the user's own
    with contextlib.suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL("libc.so.6").mallopt(M_ARENA_MAX, len(os.sched_getaffinity(0)))


def _parse(parser: argparse.ArgumentParser, argv: list[str]) -> argparse.Namespace:
    """Parses flags, taking `--gin.NAME=VALUE` out first."""
    gin_flags = [flag.removeprefix("--gin.") for flag in argv if flag.startswith("--gin.")]
    args = parser.parse_args([flag for flag in argv if not flag.startswith("--gin.")])
    if gin_flags and not hasattr(args, "gin_file"):
        raise UserError(f"This command takes no configuration, but was given --gin.{gin_flags[0]}.")
    args.gin = gin_flags
    return args


def _help() -> str:
    lines = [f"  {name:<10} {text}" for name, text in COMMANDS.items()]
    return "\n".join(["usage: t5x_lab COMMAND [flags]", "", *lines, "", "t5x_lab COMMAND --help lists the flags of a command."])
