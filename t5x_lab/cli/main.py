"""Entry point `t5x_lab COMMAND [flags]`: runs a command and converts errors into messages and exit statuses."""

import argparse
import errno
import importlib
import os
import signal
import sys
from types import ModuleType

from t5x_lab.cli.interrupts import interrupts
from t5x_lab.cli.process import configure_process
from t5x_lab.config.errors import UserError, did_you_mean
from t5x_lab.config.log import log_once
from t5x_lab.config.object_storage import describe_problem
from t5x_lab.config.parent_process import end_with_parent

COMMANDS = {
    "demo": "train a small model on the included corpus in a few minutes and write a report",
    "train": "pre-train or fine-tune a model; the same command continues an interrupted run",
    "eval": "evaluate the checkpoints of a run",
    "infer": "write predictions, scores, rankings or classes of a task or file to JSONL",
    "generate": "complete prompts",
    "harness": "evaluate a checkpoint with lm-eval tasks",
    "compile": "compile a step for a TPU slice without a TPU, and report memory, communication and FLOPs",
    "inspect": "list parameters, shapes, axes and sizes of a configuration or a checkpoint",
    "report": "write an HTML report of a run, or a comparison of several runs",
    "convert": "convert checkpoints of T5X, Mesh TensorFlow and Hugging Face, and to Hugging Face",
    "table": "list batch shapes, loss fractions and FLOPs of every architecture with every objective",
    "launch": "write the file that runs a command on a cluster: Slurm, GKE, or any hosts",
    "study": "run a grid of trainings and evaluations; the same command continues an interrupted study",
    "corpus": "make a clean corpus from web crawl files with Apache Beam",
    "cache": "preprocess tasks offline into SeqIO caches with Apache Beam",
    "migrate": "translate gin files and launch scripts of a T5X project",
    "vocab": "train a SentencePiece vocabulary",
}
STORAGE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO)
SUCCESS, FAILURE, USER_ERROR, STOPPED = 0, 1, 2, 3
CLOSED_PIPE = 128 + signal.SIGPIPE


class _Parser(argparse.ArgumentParser):
    def error(self, message: str):
        print(f"{self.prog}: {message}. See {self.prog} --help.", file=sys.stderr)
        raise SystemExit(USER_ERROR)


def run_program() -> None:
    """Runs the command of this process and exits with its status."""
    end_with_parent()
    interrupts.install(" ".join(["t5x_lab", *sys.argv[1:2]]))
    try:
        status = main()
        sys.stdout.flush()
    except BrokenPipeError:  # the reader of a pipe has ended, as in `t5x_lab inspect DIR | head -1`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = CLOSED_PIPE
    except KeyboardInterrupt:
        status = interrupts.report()
    except Exception:
        if not interrupts.received:
            raise
        status = interrupts.report()  # a library has made another exception of it
    sys.exit(status)


def main(argv: list[str] | None = None) -> int:
    """Runs a command. Returns the exit status.

    Raises:
      KeyboardInterrupt: for Ctrl-C. A run that is training is saved instead.
    """
    argv = sys.argv[1:] if argv is None else argv
    configure_process(argv)
    log_once.cache_clear()
    if not argv or argv[0] in ("-h", "--help"):
        print(_help())
        return SUCCESS if argv else USER_ERROR
    if argv[0] == "--version":
        from t5x_lab import __version__

        print(f"t5x_lab {__version__}")
        return SUCCESS
    name = argv[0]
    try:
        command, args = parse(*argv)
        return command.run(args) or SUCCESS
    except SystemExit as error:
        return int(error.code or 0)
    except UserError as error:
        print(f"t5x_lab {name}: {error.sentence}", file=sys.stderr)
        return error.status
    except Exception as error:
        problem = describe_problem(error) or _disk_problem(error)
        if problem is None:
            raise
        print(f"t5x_lab {name}: {problem}", file=sys.stderr)
        return FAILURE


def _disk_problem(error: Exception) -> str | None:
    if not isinstance(error, OSError) or error.errno not in STORAGE:
        return None
    problem = f"{error.filename or 'A file'} cannot be read or written: {os.strerror(error.errno)}"
    return f"{problem}. Fix the problem and run the same command again."


def parse(name: str, *argv: str) -> tuple[ModuleType, argparse.Namespace]:
    """Returns the module of a command and its parsed flags.

    Raises:
      UserError: if there is no such command.
      SystemExit: for flags that it does not have.
    """
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
    return command, _parse(parser, list(argv))


def _parse(parser: argparse.ArgumentParser, argv: list[str]) -> argparse.Namespace:
    """Parses flags, with `--gin.NAME=VALUE` and the words after `--`, which are another command, separated first."""
    end = argv.index("--") if "--" in argv and parser.get_default("command") is not None else len(argv)
    argv, other_command = argv[:end], argv[end + 1 :]
    gin_flags = [flag.removeprefix("--gin.") for flag in argv if flag.startswith("--gin.")]
    args = parser.parse_args([flag for flag in argv if not flag.startswith("--gin.")])
    if gin_flags and not hasattr(args, "gin_file"):
        raise UserError(f"This command has no gin configuration. Remove --gin.{gin_flags[0]}.")
    args.gin = gin_flags
    if other_command:
        args.command = other_command
    return args


def _help() -> str:
    lines = [f"  {name:<10} {text}" for name, text in COMMANDS.items()]
    return "\n".join(["usage: t5x_lab COMMAND [flags]", "", *lines, "", "t5x_lab COMMAND --help lists the flags of a command."])
