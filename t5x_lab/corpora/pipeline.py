"""Makes a corpus: plans it, runs its stages with Apache Beam, and completes it."""

import collections
import contextlib
import dataclasses
import datetime
import functools
import importlib.metadata
import json
import os
import pathlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from t5x_lab import __version__
from t5x_lab.config.beam import Progress, import_beam, run_pipeline
from t5x_lab.config.errors import UserError
from t5x_lab.config.json_files import parse_json
from t5x_lab.config.locks import hold_lock
from t5x_lab.config.log import log
from t5x_lab.corpora.config import Corpus
from t5x_lab.corpora.files import exists, match_files, move, open_input, open_output, remove
from t5x_lab.corpora.page import Page
from t5x_lab.corpora.reading.inputs import file_kind
from t5x_lab.corpora.rules.rule import rule_name
from t5x_lab.corpora.stages import clean, collect_questions, find_duplicates, finish, near_duplicates, read, write
from t5x_lab.corpora.stages.context import (
    PLAN,
    Context,
    Plan,
    describe,
    digest,
    load_context,
    merge_examples,
)
from t5x_lab.corpora.stages.statistics import merge_statistics
from t5x_lab.corpora.writing import corpus_dir, is_shard, write_tfds_info

SUMMARY = "corpus.json"
_RECIPE = "RECIPE"  # tells which recipe has written the files of a folder, finished or not
_MAX_JOBS, _MAX_JOB_FILES, _MAX_BUCKETS = 10_000, 10_000, 10_000  # every file of `read` is opened for every bucket
_COMPRESSED = (".gz", ".zst")
_EXPANSION = 4  # of compressed text
_JOB_BYTES = 1 << 26  # of small input files that are read by one job
_LOCAL_BYTES = 1 << 26  # of input below which starting more processes takes longer than the work


@dataclasses.dataclass(frozen=True)
class Stage:
    """A stage of the pipeline.

    Attributes:
      name: its name.
      list_jobs: f(context) -> indices of its jobs, when the stages before are finished.
      run: f(context, index) -> summary. It writes the files of a job.
    """

    name: str
    list_jobs: Callable[[Context], range]
    run: Callable[[Context, int], dict[str, Any]]

    def is_done(self, context: Context, index: int) -> bool:
        """Returns whether a job is finished, and the output file that it has written is still there."""
        if not context.is_done(self.name, index):
            return False
        return self.name != write.NAME or any(map(exists, _shard_places(context, context.summary(self.name, index)["path"])))


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
    Stage(write.NAME, write.list_jobs, write.run),
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
    with hold_lock(pathlib.Path(work_dir), f"Another process makes a corpus in {work_dir}. Wait for it, or stop it."):
        return _make(corpus, config, inputs, output, work_dir, options, workers)


def _make(
    corpus: Corpus, config: str, inputs: Sequence[str], output: str, work_dir: str, options: Sequence[str], workers: int | None
) -> dict[str, Any]:
    plan = _make_plan(corpus, config, inputs, output, work_dir)
    _check_rules(corpus)
    with open_output(f"{work_dir}/{PLAN}") as file:
        file.write(json.dumps(dataclasses.asdict(plan)).encode())
    load_context.cache_clear()
    context = load_context(work_dir)
    size = sum(size for job in plan.inputs for _, size in job)
    log(f"{sum(map(len, plan.inputs)):,} files with {size:,} bytes, in {plan.num_buckets:,} buckets.")
    if workers is None:
        workers = (os.cpu_count() or 1) if size > _LOCAL_BYTES else 1
    progress = _Progress(context)
    with Progress(progress.describe):
        if workers == 1 and not options:
            _run_here(work_dir)
        else:
            beam = import_beam("corpus", "corpus")
            run_pipeline(beam, options, workers, functools.partial(_build, beam, work_dir))
    return _complete(context)


def _make_plan(corpus: Corpus, config: str, inputs: Sequence[str], output: str, work_dir: str) -> Plan:
    files = _list_inputs(inputs, (output, work_dir))
    jobs: list[list[tuple[str, int]]] = []
    job_bytes = max(_JOB_BYTES, sum(size for _, size in files) // _MAX_JOBS)
    held = 0
    for path, size in files:
        if not jobs or held + size > job_bytes or len(jobs[-1]) == _MAX_JOB_FILES:
            jobs.append([])
            held = 0
        jobs[-1].append((path, size))
        held += size
    text_bytes = sum(size * (_EXPANSION if path.endswith(_COMPRESSED) else 1) for path, size in files)
    num_buckets = max(1, min(-(-text_bytes // corpus.bucket_bytes), _MAX_BUCKETS))
    latest = _latest(work_dir, jobs)
    return Plan(
        config, os.getcwd(), output, jobs, num_buckets, latest, _stage_folders(corpus, jobs, num_buckets, latest, output)
    )


def _list_inputs(inputs: Sequence[str], own: Sequence[str]) -> list[tuple[str, int]]:
    """Returns (path, size) of the input files, sorted. Those in our `own` folders are none.

    Raises:
      UserError: if a pattern has no file that can be read.
    """
    files: dict[str, int] = {}
    for pattern in _split_patterns(inputs):
        matches = match_files(pattern)
        others = [(path, size) for path, size in matches if not _is_inside(path, own)]
        pages = {path: size for path, size in others if file_kind(path) is not None}
        if not pages:
            reason = "" if others else "It holds only the output." if matches else "No file matches it."
            raise UserError(
                f'--input="{pattern}" has no pages. {reason} Files are read by their names: .warc, .wet, .arc, .html, .jsonl, '
                ".txt, also with .gz or .zst."
            )
        files |= pages
        if len(pages) < len(others):
            log(f"{len(others) - len(pages):,} of the files in {pattern} are ignored: their names are not those of pages.")
    return sorted(files.items())


def _split_patterns(inputs: Sequence[str]) -> list[str]:
    """Returns the patterns in texts that separate them by commas. An existing path may have commas in its name."""
    patterns: list[str] = []
    for text in inputs:
        patterns += [text] if os.path.exists(text) else filter(None, map(str.strip, text.split(",")))
    if not patterns:
        raise UserError("--input is empty. Set files or folders.")
    return patterns


def _is_inside(path: str, folders: Sequence[str]) -> bool:
    path = path if "://" in path else os.path.abspath(path)
    return any(path.startswith(f"{folder.rstrip('/')}/") for folder in folders)


def _latest(work_dir: str, jobs: list) -> str:
    """Returns the time of the first run with these input files."""
    if exists(f"{work_dir}/{PLAN}"):
        with open_input(f"{work_dir}/{PLAN}") as file:
            before = parse_json(file.read())
        if before.get("inputs") == json.loads(json.dumps(jobs)):
            return before["latest"]
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


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


def _stage_folders(corpus: Corpus, jobs: list, num_buckets: int, latest: str, output: str) -> dict[str, str]:
    """Returns the folder of each stage. Its name changes with the settings of the stage and of the stages before it."""
    lines = corpus.lines
    settings: dict[str, tuple] = {
        read.NAME: (
            _versions(), jobs, [_modified(path) for job in jobs for path, _ in job], num_buckets, corpus.max_record_bytes,
            corpus.text_key, corpus.url_key, corpus.timestamp_key,
            describe([corpus.html_text, *corpus.read_rules]),
        ),
        clean.NAME: (
            latest, corpus.newest_per_url, describe(corpus.page_rules), corpus.duplicates, corpus.min_sentences,
            describe([*lines.rules, lines.sentences]) if lines else None,
        ),
        find_duplicates.NAME: (),
        collect_questions.NAME: (describe(corpus.decontamination),),
        finish.NAME: (describe(corpus.text_rules), corpus.by_language),
        near_duplicates.BANDS: (corpus.near_duplicates,),
        near_duplicates.PAIRS: (),
        near_duplicates.CLUSTERS: (),
        near_duplicates.NAME: (),
        write.NAME: (corpus.name, corpus.format, corpus.shard_bytes, output),
    }  # fmt: skip
    folders, before = {}, ""
    for stage in STAGES:
        before = digest(before, settings[stage.name])
        folders[stage.name] = f"{stage.name}-{before}"
    return folders


def _run_here(work_dir: str) -> None:
    """Runs all jobs in this process."""
    for number in range(len(STAGES)):
        for job in list(list_missing(work_dir, number)):
            _run_job(*job)


def _versions() -> list[tuple[str, str]]:
    """Returns the versions of the packages whose results are kept."""
    versions = [("t5x_lab", __version__)]
    for package in ("langdetect", "nltk", "resiliparse", "trafilatura", "tldextract", "warcio"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions.append((package, importlib.metadata.version(package)))
    return versions


def _modified(path: str) -> int:
    """Returns the time of a local file's last change; 0 for others."""
    return 0 if "://" in path else os.stat(path).st_mtime_ns


def _shard_places(context: Context, name: str) -> list[str]:
    """Returns where an output file may be: in the work folder until all are written, and then in the folder of the corpus."""
    folder = corpus_dir(context.plan.output, context.corpus)
    is_own = _read_recipe(folder) == context.plan.folders[write.NAME]
    return [context.path(write.NAME, name), *([f"{folder}/{name}"] if is_own else [])]


def _read_recipe(folder: str) -> str:
    """Returns which recipe has written the output files of a folder."""
    if not exists(f"{folder}/{_RECIPE}"):
        return ""
    with open_input(f"{folder}/{_RECIPE}") as file:
        return file.read().decode()


def _publish(context: Context, names: Sequence[str]) -> None:
    """Moves the output files to the folder of the corpus, in place of those of another recipe."""
    folder, stage = corpus_dir(context.plan.output, context.corpus), context.plan.folders[write.NAME]
    owner = _read_recipe(folder)
    if owner and owner != stage:
        for path, _ in match_files(f"{folder}/*-of-*"):
            if is_shard(path):
                remove(path)
        for name in (SUMMARY, "report.html"):
            remove(f"{folder}/{name}")
    with open_output(f"{folder}/{_RECIPE}") as file:
        file.write(stage.encode())
    for name in names:
        if exists(context.path(write.NAME, name)):
            move(context.path(write.NAME, name), f"{folder}/{name}")


def _build(beam: Any, work_dir: str, pipeline: Any) -> None:
    """Adds the stages to a Beam pipeline. Each lists its jobs when all jobs of the stage before are finished."""
    ready = pipeline | "start" >> beam.Create([0])
    for number, stage in enumerate(STAGES):
        jobs = ready | f"{stage.name}: list" >> beam.FlatMap(functools.partial(list_missing, work_dir, number))
        finished = jobs | f"{stage.name}: spread" >> beam.Reshuffle() | stage.name >> beam.Map(run_job)
        ready = finished | f"{stage.name}: wait" >> beam.combiners.Count.Globally()


def list_missing(work_dir: str, number: int, _: int = 0) -> Iterator[tuple[str, int, int]]:
    """Yields (work directory, number of the stage, index) of the jobs of a stage that are not finished."""
    context, stage = load_context(work_dir), STAGES[number]
    for index in stage.list_jobs(context):
        if not stage.is_done(context, index):
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
        self._context, self._number, self._finished = context, 0, 0

    def describe(self) -> str:
        while True:
            stage = STAGES[self._number]
            jobs = stage.list_jobs(self._context)
            while self._finished < len(jobs) and self._context.is_done(stage.name, self._finished):
                self._finished += 1
            if self._finished < len(jobs) or self._number == len(STAGES) - 1:
                done = sum(self._context.is_done(stage.name, index) for index in jobs)
                return f"Stage {stage.name}: {done:,} of {len(jobs):,} jobs are finished."
            self._number, self._finished = self._number + 1, 0


def _complete(context: Context) -> dict[str, Any]:
    """Writes the summary of the corpus, and what makes it a data set. Returns the summary."""
    corpus, output = context.corpus, context.plan.output
    summaries = {stage.name: [context.summary(stage.name, index) for index in stage.list_jobs(context)] for stage in STAGES}
    counts = {
        stage: dict(sorted(sum((collections.Counter(part["counts"]) for part in parts), collections.Counter()).items()))
        for stage, parts in summaries.items()
    }
    if not counts.get(read.NAME, {}).get("pages in"):
        problems = ", ".join(f"{number:,} {name}" for name, number in counts.get(read.NAME, {}).items())
        raise UserError(f"The input has no page ({problems}). In JSON, --gin.Corpus.text_key=NAME sets where the text is.")
    shards: dict[str, list[dict[str, Any]]] = collections.defaultdict(list)
    for shard in summaries[write.NAME]:
        shards[shard["split"]].append(shard)
    names = [shard["path"] for listed in shards.values() for shard in listed]
    _publish(context, names)
    if corpus.format == "tfds":
        sizes = {
            split: ([shard["pages"] for shard in listed], sum(shard["bytes"] for shard in listed))
            for split, listed in shards.items()
            if any(shard["pages"] for shard in listed)  # TensorFlow Datasets cannot read a split without examples
        }
        write_tfds_info(output, corpus, sizes)
    last = summaries[write.source_stage(context)]
    summary: dict[str, Any] = {
        "name": corpus.name,
        "config": context.plan.config,
        "files": names,
        "splits": {
            split: {
                "pages": sum(shard["pages"] for shard in listed),
                "characters": sum(part["splits"].get(split, (0, 0))[1] for part in last),
                "bytes": sum(shard["bytes"] for shard in listed),
                "files": len(listed),
            }
            for split, listed in shards.items()
        },
        "rules": _rule_order(corpus),
        "counts": {stage: listed for stage, listed in counts.items() if listed},
        "examples": merge_examples(part.get("examples", {}) for parts in summaries.values() for part in parts),
        **merge_statistics(last),
    }
    if not any(size["pages"] for size in summary["splits"].values()):
        log("The corpus has no page: the rules have dropped all. See the table.")
    folder = corpus_dir(output, corpus)
    with open_output(f"{folder}/{SUMMARY}") as file:
        file.write(json.dumps(summary, ensure_ascii=False, indent=1).encode("utf-8", "replace"))
    return summary


def _rule_order(corpus: Corpus) -> list[str]:
    """Returns the names of all rules in the order in which they are applied."""
    lines = [*map(rule_name, corpus.lines.rules), "few_sentences"] if corpus.lines is not None else []
    return [
        *map(rule_name, corpus.read_rules),
        "newest_per_url",
        *map(rule_name, corpus.page_rules),
        *lines,
        "duplicates",
        "few_sentences after duplicates",
        *map(rule_name, corpus.text_rules),
        "decontamination",
        "near_duplicates",
    ]
