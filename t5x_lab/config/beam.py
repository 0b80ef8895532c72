"""Apache Beam for jobs that write files: import, options of the local runner, progress and messages."""

import contextlib
import logging
import os
import re
import shlex
import sys
import threading
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

from t5x_lab.config import beam_worker
from t5x_lab.config.errors import UserError
from t5x_lab.config.log import log
from t5x_lab.config.user_code import describe_error


def import_beam(command: str, extra: str) -> ModuleType:
    """Returns Apache Beam.

    Raises:
      UserError: if it is not installed, with the command's name and the extra that installs it.
    """
    logging.getLogger().addFilter(_is_no_missing_client)
    try:
        import apache_beam
    except ImportError as error:
        raise UserError(f"t5x_lab {command} needs Apache Beam ({error}). Run: pip install 't5x_lab[{extra}]'") from error
    return apache_beam


def _is_no_missing_client(record: logging.LogRecord) -> bool:
    """Returns False for the warning that clients of Google's services, which few need, are not installed."""
    return "apitools not found" not in record.getMessage()


def split_options(text: str) -> list[str]:
    """Returns Beam's flags in a text that separates them by commas."""
    return [flag.strip() for flag in text.split(",") if flag.strip()]


def run_pipeline(beam: ModuleType, options: Sequence[str], workers: int, build: Callable[[Any], None]) -> None:
    """Builds and runs a pipeline.

    Args:
      beam: Apache Beam.
      options: Beam's own flags. Without --runner, its local runner has `workers` processes.
      workers: number of local processes.
      build: f(pipeline) that adds the steps.

    Raises:
      UserError: if a step fails, with the line that names the error. Runners wrap errors of the steps in their own.
    """
    from apache_beam.options.pipeline_options import PipelineOptions

    is_chosen = any(option.startswith("--runner") for option in options)
    runner = None if is_chosen else _local_runner()
    flags = list(options) if is_chosen else [f"--direct_num_workers={workers}", *options]
    try:
        with beam.Pipeline(runner, PipelineOptions(flags, save_main_session=False)) as pipeline:
            build(pipeline)
    except Exception as error:
        lines = [line.strip() for line in str(error).splitlines() if re.match(r"\s*[\w.]*(Error|Exception)\b", line)]
        problem = error.sentence if isinstance(error, UserError) else lines[-1] if lines else describe_error(error)
        problem = re.sub(r" ?\[while running [^]]*\]", "", problem)
        raise UserError(f"{problem} Run the same command again to resume.") from error


def _local_runner() -> Any:
    from apache_beam.runners.portability.fn_api_runner import FnApiRunner, fn_runner
    from apache_beam.transforms.environments import SubprocessSDKEnvironment

    logging.getLogger(fn_runner.__name__).setLevel(logging.ERROR)  # it warns of workers that it did not choose itself
    variables = {
        beam_worker.COMMAND: str(os.getpid()),
        "PYTHONPATH": os.environ.get("PYTHONPATH") or os.pathsep.join(filter(None, sys.path)),
    }
    assignments = " ".join(f"{name}={shlex.quote(value)}" for name, value in variables.items())
    # A worker that is starting must not be interrupted: it sets its own answer to Ctrl-C.
    command = f"trap '' INT; {assignments} exec {shlex.quote(sys.executable)} -m {beam_worker.__name__}"
    return FnApiRunner(default_environment=SubprocessSDKEnvironment.from_command_string(command))


class Progress:
    """Logs a line every few seconds while jobs run, wherever they run.

    Args:
      describe: f() -> line. It is logged when it has changed.
    """

    SECONDS = 10.0

    def __init__(self, describe: Callable[[], str]):
        self._describe = describe
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="progress", daemon=True)

    def _watch(self) -> None:
        last = ""
        while not self._stop.wait(self.SECONDS):
            with contextlib.suppress(OSError, UserError):  # of a storage, for a moment
                line = self._describe()
                if line != last:
                    log(line)
                last = line

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *unused: object) -> None:
        self._stop.set()
        self._thread.join(self.SECONDS)
