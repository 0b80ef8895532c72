"""`t5x_lab cache`: tasks prepared ahead on Apache Beam, by any of its runners."""

import dataclasses
import functools
import os
import pathlib
import re
import sys
import threading
from collections.abc import Sequence

import seqio

from t5x_lab.config.errors import UserError
from t5x_lab.config.user_code import told
from t5x_lab.data.caches import folder_of, is_complete
from t5x_lab.data.caching import Piece, begin, complete, write
from t5x_lab.data.reading import seed_of
from t5x_lab.data.tasks import members
from t5x_lab.observe.console import say
from t5x_lab.runs.config import GinConfig


@dataclasses.dataclass(frozen=True)
class Work:
    """A piece, and all that a worker in another process or on another machine needs to write it.

    Attributes:
      piece: what.
      config: the run's configuration, as gin's text.
      name: the task or mixture that it was asked for as.
      cache: where it goes.
      folder: where the user's modules are.
    """

    piece: Piece
    config: str
    name: str
    cache: str
    folder: str


def do(work: Work) -> str:
    """Writes a piece; called by Beam's workers."""
    if work.folder not in sys.path:
        sys.path.insert(0, work.folder)
    task = _tasks(work.config, work.name)[work.piece.task]
    piece = work.piece
    write(piece, task, work.cache, seed_of(0, piece.task, piece.split, piece.index))
    return piece.file


@functools.lru_cache(maxsize=64)
def _tasks(config: str, name: str) -> dict[str, seqio.Task]:
    """The tasks that a name stands for, in the run's vocabulary, by their own names."""
    data = dataclasses.replace(GinConfig((), (config,)).data(), mixture_or_task_name=name)
    return {member.task.name: member.task for member in members(data)}


def cache_tasks(config: GinConfig, names: Sequence[str], cache: str, options: Sequence[str]) -> dict[str, dict[str, int]]:
    """Writes tasks into a folder of SeqIO's caches; what is there already is left.

    Args:
      config: has VOCABULARY, and imports the user's modules.
      names: tasks and mixtures; none for MIXTURE_OR_TASK_NAME.
      cache: the folder.
      options: Beam's own flags, such as --runner=…; by default its local runner, with a process for each core.

    Returns:
      the number of examples by task and split, of those that were written

    Raises:
      UserError: for tasks that cannot be cached; when apache-beam is missing.
    """
    try:
        import apache_beam as beam
        from apache_beam.options.pipeline_options import PipelineOptions
    except ImportError as error:
        raise UserError(f"t5x_lab cache needs Apache Beam ({error}). Run: pip install 't5x_lab[beam]'") from error
    vocabulary = config.vocabulary()
    found: dict[str, tuple[str, seqio.Task]] = {}
    names = names or [name for name in [config.data().mixture_or_task_name] if name]
    if not names:
        raise UserError("Say which task or mixture to cache: --task=NAME, or --gin.MIXTURE_OR_TASK_NAME=NAME.")
    for name in names:
        found |= {task: (name, made) for task, made in _tasks(config.text, name).items()}
    tasks = {name: made for name, (_, made) in found.items() if _can_be_cached(made)}
    if not tasks:
        raise UserError("There is nothing to cache: none of these tasks has a seqio.CacheDatasetPlaceholder among its steps.")
    there = [name for name, task in tasks.items() if is_complete(cache, task, vocabulary)]
    for name in there:
        say(f"{name} is cached already, in {folder_of(cache, name)}.")
    missing = {name: task for name, task in tasks.items() if name not in there}
    here = str(pathlib.Path.cwd())
    works = [
        Work(piece, config.text, found[name][0], cache, here)
        for name, task in missing.items()
        for pieces in begin(task, cache, vocabulary).values()
        for piece in pieces
    ]
    if works:
        say(f"Caching {', '.join(missing)}: {len(works)} files.")
        flags = list(options) if any(flag.startswith("--runner") for flag in options) else [*_local(), *options]
        try:
            with _Progress(works), beam.Pipeline(options=PipelineOptions(flags, save_main_session=False)) as pipeline:
                _ = pipeline | beam.Create(works) | beam.Reshuffle() | beam.Map(do)
        except Exception as error:  # a runner has errors of its own around those of the steps
            lines = [line.strip() for line in str(error).splitlines() if re.match(r"\s*[\w.]*(Error|Exception)\b", line)]
            raise UserError(
                f"Caching failed: {lines[-1] if lines else told(error)} Run the same command again to go on."
            ) from error
    return {name: complete(task, cache, vocabulary) for name, task in missing.items()}


def _local() -> list[str]:
    cores = os.cpu_count() or 1
    os.environ.setdefault("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
    return ["--runner=DirectRunner", "--direct_running_mode=multi_processing", f"--direct_num_workers={cores}"]


def _can_be_cached(task: seqio.Task) -> bool:
    if not task.supports_caching:
        say(f'The task "{task.name}" has no seqio.CacheDatasetPlaceholder among its steps, and is left out.')
    return task.supports_caching


class _Progress:
    """Says every few seconds how many files are there, whoever writes them."""

    SECONDS = 10.0

    def __init__(self, works: Sequence[Work]):
        self._paths = [folder_of(work.cache, work.piece.task) / work.piece.file for work in works]
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="progress", daemon=True)

    def _watch(self) -> None:
        before = -1
        while not self._stop.wait(self.SECONDS):
            done = sum(path.exists() for path in self._paths)
            if done != before:
                say(f"{done} of {len(self._paths)} files are written.")
            before = done

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *unused: object) -> None:
        self._stop.set()
        self._thread.join()
