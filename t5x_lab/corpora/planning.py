"""Planning of a corpus: which job reads which files, into how many buckets, and where each stage writes."""

import contextlib
import datetime
import importlib.metadata
import json
import os
from collections.abc import Sequence

from t5x_lab import __version__
from t5x_lab.config.errors import UserError
from t5x_lab.config.json_files import parse_json
from t5x_lab.config.log import log
from t5x_lab.corpora.config import Corpus
from t5x_lab.corpora.files import exists, match_files_with_times, open_input
from t5x_lab.corpora.reading.inputs import COMPRESSED, file_kind
from t5x_lab.corpora.stages import clean, collect_questions, find_duplicates, finish, near_duplicates, read, write
from t5x_lab.corpora.stages.context import PLAN, Plan, describe, digest

_MAX_JOBS, _MAX_JOB_FILES, _MAX_BUCKETS = 2_000, 100_000, 10_000  # every file of `read` is opened for every bucket
_EXPANSION = 4  # of compressed text
_JOB_BYTES = 1 << 26  # of small input files that are read by one job
_ONLY_OUTPUT = "All its files are in the output folder, which is left out: choose another --output_dir."


def make_plan(corpus: Corpus, config: str, inputs: Sequence[str], output: str, work_dir: str) -> Plan:
    """Returns the plan of a corpus: its input files by job, its buckets, and the folders of its stages. See `make_corpus`."""
    files = _list_inputs(inputs, (output, work_dir))
    jobs: list[list[tuple[str, int]]] = []
    job_bytes = max(_JOB_BYTES, sum(size for _, size, _ in files) // _MAX_JOBS)
    held = 0
    for path, size, _ in files:
        if not jobs or held + size > job_bytes or len(jobs[-1]) == _MAX_JOB_FILES:
            jobs.append([])
            held = 0
        jobs[-1].append((path, size))
        held += size
    text_bytes = sum(size * (_EXPANSION if path.endswith(COMPRESSED) else 1) for path, size, _ in files)
    num_buckets = max(1, min(-(-text_bytes // corpus.bucket_bytes), _MAX_BUCKETS))
    latest = _latest(work_dir, jobs)
    times = [time for _, _, time in files]
    folders = _stage_folders(corpus, jobs, times, num_buckets, latest, output)
    return Plan(config, os.getcwd(), output, jobs, num_buckets, latest, folders)


def _list_inputs(inputs: Sequence[str], own: Sequence[str]) -> list[tuple[str, int, float]]:
    """Returns (path, size, time of the last change) of the input files, sorted. Those in our `own` folders are none.

    Raises:
      UserError: if a pattern has no file that can be read.
    """
    files: dict[str, tuple[int, float]] = {}
    for pattern in _split_patterns(inputs):
        matches = match_files_with_times(pattern)
        others = {path: (size, time) for path, size, time in matches if not _is_inside(path, own)}
        pages = {path: facts for path, facts in others.items() if file_kind(path) is not None}
        if not pages:
            reason = "" if others else _ONLY_OUTPUT if matches else "No file matches it."
            raise UserError(
                f'--input="{pattern}" has no pages. {reason} Files are read by their names: .warc, .wet, .arc, .html, .jsonl, '
                ".txt, also with .gz or .zst."
            )
        files |= pages
        if len(pages) < len(others):
            ignored = next(path for path in others if path not in pages)
            log(f"{len(others) - len(pages):,} files in {pattern} are ignored for their names, such as {ignored}.")
    return sorted((path, size, time) for path, (size, time) in files.items())


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


def _stage_folders(
    corpus: Corpus, jobs: list, times: Sequence[float], num_buckets: int, latest: str, output: str
) -> dict[str, str]:
    """Returns the folder of each stage. Its name changes with the settings of the stage and of the stages before it."""
    lines = corpus.lines
    settings: dict[str, tuple] = {  # in the order of the stages
        read.NAME: (
            _versions(), jobs, times, num_buckets, corpus.max_record_bytes,
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
    for name, values in settings.items():
        before = digest(before, values)
        folders[name] = f"{name}-{before}"
    return folders


def _versions() -> list[tuple[str, str]]:
    """Returns the versions of the packages whose results are kept."""
    versions = [("t5x_lab", __version__)]
    for package in ("langdetect", "nltk", "resiliparse", "trafilatura", "tldextract", "warcio"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions.append((package, importlib.metadata.version(package)))
    return versions
