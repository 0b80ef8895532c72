"""`t5x_lab cache`: writes SeqIO caches of tasks with Apache Beam."""

import dataclasses
import functools
import os
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

import seqio

from t5x_lab.config.beam import Progress, import_beam, run_pipeline
from t5x_lab.config.errors import UserError
from t5x_lab.config.log import log
from t5x_lab.data.cache.reading import is_complete, task_cache_dir
from t5x_lab.data.cache.writing import CacheShard, begin, complete, write
from t5x_lab.data.pipeline.seeds import derive_seed
from t5x_lab.data.tasks.names import find_members
from t5x_lab.runs.config.gin_config import GinConfig
from t5x_lab.runs.data_layer import load_data_layer


@dataclasses.dataclass(frozen=True)
class Job:
    """A cache shard, with everything that a worker in another process or on another machine needs to write it.

    Attributes:
      shard: the cache shard.
      config: the run's configuration as gin text.
      name: name of the task or mixture that the shard belongs to.
      cache: cache directory.
      folder: folder of the user's modules.
    """

    shard: CacheShard
    config: str
    name: str
    cache: str
    folder: str


def write_shard(job: Job) -> str:
    """Writes a cache shard. Called by Beam's workers."""
    if job.folder not in sys.path:
        sys.path.insert(0, job.folder)
    task, shard = _resolve_tasks(job.config, job.name)[job.shard.task], job.shard
    write(shard, task, job.cache, derive_seed(0, shard.task, shard.split, shard.index))
    return shard.file


@functools.lru_cache(maxsize=64)
def _resolve_tasks(config: str, name: str) -> dict[str, seqio.Task]:
    """Returns the tasks of a name, with the run's vocabulary, by their own names."""
    load_data_layer()  # a worker's process has no tasks yet
    data = dataclasses.replace(GinConfig((), (config,)).data(), mixture_or_task_name=name)
    return {member.task.name: member.task for member in find_members(data)}


def cache_tasks(config: GinConfig, names: Sequence[str], cache: str, options: Sequence[str]) -> dict[str, dict[str, int]]:
    """Writes caches of tasks. Complete ones are left unchanged.

    Args:
      config: configuration with VOCABULARY, which imports the user's modules.
      names: tasks and mixtures. If empty, MIXTURE_OR_TASK_NAME.
      cache: cache directory.
      options: Beam's own flags, such as --runner=DataflowRunner. Default: its local runner, with one process per core.

    Returns:
      Number of examples by task and split, for the caches that were written.

    Raises:
      UserError: for tasks that cannot be cached, or if apache-beam is not installed.
    """
    beam = import_beam("cache", "beam")
    vocabulary = config.vocabulary()
    names = names or [name for name in [config.data().mixture_or_task_name] if name]
    if not names:
        raise UserError("There is no task to cache. Set --task=NAME or --gin.MIXTURE_OR_TASK_NAME=NAME.")
    resolved: dict[str, tuple[str, seqio.Task]] = {}
    for name in names:
        resolved |= {task_name: (name, task) for task_name, task in _resolve_tasks(config.text, name).items()}
    tasks = {task_name: task for task_name, (_, task) in resolved.items() if _supports_caching(task)}
    if not tasks:
        raise UserError("There is nothing to cache: none of these tasks has a seqio.CacheDatasetPlaceholder.")
    complete_tasks = [name for name, task in tasks.items() if is_complete(cache, task, vocabulary)]
    for name in complete_tasks:
        log(f"{name} is cached already, in {task_cache_dir(cache, name)}.")
    missing = {name: task for name, task in tasks.items() if name not in complete_tasks}
    folder = str(pathlib.Path.cwd())
    jobs = [
        Job(shard, config.text, resolved[name][0], cache, folder)
        for name, task in missing.items()
        for shards in begin(task, cache, vocabulary).values()
        for shard in shards
    ]
    if jobs:
        log(f"Caching {', '.join(missing)}: {len(jobs)} files.")
        paths = [task_cache_dir(job.cache, job.shard.task) / job.shard.file for job in jobs]

        def build(pipeline: Any) -> None:
            _ = pipeline | beam.Create(jobs) | beam.Reshuffle() | beam.Map(write_shard)

        with Progress(lambda: f"{sum(path.exists() for path in paths)} of {len(paths)} files are written."):
            try:
                run_pipeline(beam, options, os.cpu_count() or 1, build)
            except UserError as error:
                raise UserError(f"Caching failed: {error.sentence}") from error
    return {name: complete(task, cache, vocabulary) for name, task in missing.items()}


def _supports_caching(task: seqio.Task) -> bool:
    if not task.supports_caching:
        log(f'The task "{task.name}" has no seqio.CacheDatasetPlaceholder. It is not cached.')
    return task.supports_caching
