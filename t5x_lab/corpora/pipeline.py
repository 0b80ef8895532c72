"""Makes a corpus: plans it, runs its stages with Apache Beam, and completes it."""

import dataclasses
import functools
import json
import os
import pathlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from t5x_lab.config.beam import Progress, import_beam, run_pipeline
from t5x_lab.config.errors import UserError
from t5x_lab.config.locks import hold_lock
from t5x_lab.config.log import log
from t5x_lab.corpora.completion import complete, find_shards
from t5x_lab.corpora.config import Corpus
from t5x_lab.corpora.files import open_output
from t5x_lab.corpora.page import Page
from t5x_lab.corpora.planning import make_plan
from t5x_lab.corpora.stages import clean, collect_questions, find_duplicates, finish, near_duplicates, read, write
from t5x_lab.corpora.stages.context import PLAN, Context, load_context
from t5x_lab.corpora.writing import check_output

_LOCAL_BYTES = 1 << 26  # of input below which starting more processes takes longer than the work


@dataclasses.dataclass(frozen=True)
class Stage:
    """A stage of the pipeline.

    Attributes:
      name: its name.
      list_jobs: f(context) -> indices of its jobs, when the stages before are finished.
      run: f(context, index) -> summary. It writes the files of a job.
      find_files: f(context) -> f(summary) -> whether the files of a finished job are still there. None = they stay.
    """

    name: str
    list_jobs: Callable[[Context], range]
    run: Callable[[Context, int], dict[str, Any]]
    find_files: Callable[[Context], Callable[[dict[str, Any]], bool]] | None = None

    def list_missing(self, context: Context) -> Iterator[int]:
        """Yields the indices of the jobs that are not finished, or whose files are gone."""
        are_there = self.find_files(context) if self.find_files else None
        for index in self.list_jobs(context):
            is_done = context.is_done(self.name, index)
            if not is_done or (are_there and not are_there(context.summary(self.name, index))):
                yield index


STAGES = (
    Stage(read.NAME, read.list_jobs, read.run),
    Stage(clean.NAME, clean.list_jobs, clean.run),
    Stage(find_duplicates.NAME, find_duplicates.list_jobs, find_duplicates.run),
    Stage(collect_questions.NAME, collect_questions.list_jobs, collect_questions.run),
    Stage(finish.NAME, finish.list_jobs, finish.run),
    Stage(near_duplicates.BANDS, near_duplicates.list_buckets, near_duplicates.write_bands),
    Stage(near_duplicates.PAIRS, near_duplicates.list_buckets, near_duplicates.write_pairs),
    Stage(near_duplicates.CLUSTERS, near_duplicates.list_single, near_duplicates.write_clusters),
    Stage(near_duplicates.NAME, near_duplicates.list_buckets, near_duplicates.write_unique),
    Stage(write.NAME, write.list_jobs, write.run, find_shards),
)


def make_corpus(
    corpus: Corpus,
    config: str,
    inputs: Sequence[str],
    output: str,
    work_dir: str,
    options: Sequence[str],
    workers: int | None = None,
) -> dict[str, Any]:
    """Makes a corpus, or continues one that was interrupted. Finished jobs of stages whose settings are the same are kept.

    Args:
      corpus: the recipe.
      config: its configuration as gin text, from which workers build it.
      inputs: patterns of files, or folders; several in a text are separated by commas.
      output: folder of the corpus.
      work_dir: folder of the stages.
      options: Beam's own flags.
      workers: number of local processes, if `options` have no runner. One works without Beam. None = one per core; one for
        small inputs.

    Returns:
      The summary: sizes of splits, counts of all rules, examples, statistics.

    Raises:
      UserError: if there is no input, or a worker fails.
    """
    file = next((path for path in (output, work_dir) if os.path.isfile(path)), None)
    if file:
        raise UserError(f"{file} is a file. Choose another folder for the corpus.")
    if "://" in work_dir:
        return _make(corpus, config, inputs, output, work_dir, options, workers)
    try:
        os.makedirs(work_dir, exist_ok=True)
    except OSError as error:
        raise UserError(f"The folder {work_dir} cannot be made ({error.strerror}). Choose another one.") from error
    with hold_lock(pathlib.Path(work_dir), f"Another process makes a corpus in {work_dir}. Wait for it, or stop it."):
        return _make(corpus, config, inputs, output, work_dir, options, workers)


def _make(
    corpus: Corpus, config: str, inputs: Sequence[str], output: str, work_dir: str, options: Sequence[str], workers: int | None
) -> dict[str, Any]:
    check_output(corpus, output)
    plan = make_plan(corpus, config, inputs, output, work_dir)
    _check_rules(corpus)
    with open_output(f"{work_dir}/{PLAN}") as file:
        file.write(json.dumps(dataclasses.asdict(plan)).encode())
    load_context.cache_clear()
    context = load_context(work_dir)
    size = sum(size for job in plan.inputs for _, size in job)
    log(f"Input files: {sum(map(len, plan.inputs)):,} with {size:,} bytes. Buckets: {plan.num_buckets:,}.")
    if workers is None:
        workers = (os.cpu_count() or 1) if size > _LOCAL_BYTES else 1
    progress = _Progress(context)
    with Progress(progress.describe):
        if workers == 1 and not options:
            _run_here(work_dir)
        else:
            beam = import_beam("corpus", "corpus")
            run_pipeline(beam, options, workers, functools.partial(_build, beam, work_dir))
    summaries = {stage.name: [context.summary(stage.name, index) for index in stage.list_jobs(context)] for stage in STAGES}
    return complete(context, summaries)


def _check_rules(corpus: Corpus) -> None:
    """Runs each rule once, so that missing lists, packages and settings are found before hours of work.

    Raises:
      UserError: as a rule raises it.
    """
    page = Page("http://example.com/", "An example of a page.", language="en")
    lines = corpus.lines.rules if corpus.lines is not None else ()
    calls: list[Callable[[], Any]] = [
        lambda: corpus.html_text(b"<p>An example.</p>", ""),
        *(functools.partial(rule, page.text) for rule in lines),
        *(functools.partial(rule, page) for rule in (*corpus.read_rules, *corpus.page_rules, *corpus.text_rules)),
    ]
    for call in calls:
        try:
            call()
        except UserError:
            raise
        except Exception:  # pages of any form are what rules fail for; many failures end the run
            continue


def _run_here(work_dir: str) -> None:
    """Runs all jobs in this process."""
    for number in range(len(STAGES)):
        for job in list(list_missing(work_dir, number)):
            _run_job(*job)


def _build(beam: Any, work_dir: str, pipeline: Any) -> None:
    """Adds the stages to a Beam pipeline. Each lists its jobs when all jobs of the stage before are finished."""
    ready = pipeline | "start" >> beam.Create([0])
    for number, stage in enumerate(STAGES):
        jobs = ready | f"{stage.name}: list" >> beam.FlatMap(functools.partial(list_missing, work_dir, number))
        finished = jobs | f"{stage.name}: spread" >> beam.Reshuffle() | stage.name >> beam.Map(run_job)
        ready = finished | f"{stage.name}: wait" >> beam.combiners.Count.Globally()


def list_missing(work_dir: str, number: int, _: int = 0) -> Iterator[tuple[str, int, int]]:
    """Yields (work directory, number of the stage, index) of the jobs of a stage that are not finished."""
    for index in STAGES[number].list_missing(load_context(work_dir)):
        yield work_dir, number, index


def run_job(job: tuple[str, int, int]) -> int:
    """Runs a job, and adds its counts to Beam's. Called by Beam's workers."""
    from apache_beam.metrics import Metrics

    for name, count in _run_job(*job)["counts"].items():
        Metrics.counter(STAGES[job[1]].name, name).inc(count)
    return job[2]


def _run_job(work_dir: str, number: int, index: int) -> dict[str, Any]:
    context, stage = load_context(work_dir), STAGES[number]
    summary = stage.run(context, index)
    context.write_summary(stage.name, index, summary)
    return summary


class _Progress:
    """Describes the number of finished jobs of the present stage."""

    def __init__(self, context: Context):
        self._context, self._number = context, 0

    def describe(self) -> str:
        while True:
            stage = STAGES[self._number]
            number, done = len(stage.list_jobs(self._context)), self._context.num_done(stage.name)
            if done < number or self._number == len(STAGES) - 1:
                return f"Stage {stage.name}: {done:,} of {number:,} jobs are finished."
            self._number += 1
