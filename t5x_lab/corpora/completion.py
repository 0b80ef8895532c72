"""Completion of a corpus: its output files move to their folder, with a summary of what the rules did."""

import collections
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from t5x_lab.config.errors import UserError
from t5x_lab.config.json_files import parse_json
from t5x_lab.config.log import log
from t5x_lab.corpora.config import Corpus
from t5x_lab.corpora.files import exists, move, open_input, open_output, remove
from t5x_lab.corpora.rules.rule import rule_name
from t5x_lab.corpora.stages import read, write
from t5x_lab.corpora.stages.context import Context, merge_examples
from t5x_lab.corpora.stages.statistics import merge_statistics
from t5x_lab.corpora.writing import corpus_dir, write_tfds_info

SUMMARY = "corpus.json"
_MAX_DAMAGED_FILES = 1000
_RECIPE = "RECIPE"  # tells which recipe has written the files of a folder, finished or not


def complete(context: Context, summaries: Mapping[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Publishes the output files, and writes the summary of the corpus and what makes it a data set. Returns the summary.

    Args:
      context: the context.
      summaries: summaries of all jobs, by stage.
    """
    corpus, output = context.corpus, context.plan.output
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
    damaged = {path: kinds for part in summaries[read.NAME] for path, kinds in part.get("damaged files", {}).items()}
    if damaged:
        more = f" and {len(damaged) - 3:,} more" if len(damaged) > 3 else ""
        log(f"Damaged files, read as far as possible: {', '.join(list(damaged)[:3])}{more}. {SUMMARY} tells what is damaged.")
    reading = counts[read.NAME]
    if reading.get("pages without URL") == reading["pages in"]:
        log(
            f'No page has a URL in the field "{corpus.url_key}": the path of its file and its number take its place. '
            "--gin.Corpus.url_key=NAME sets the field."
        )
    summary: dict[str, Any] = {
        "name": corpus.name,
        "config": context.plan.config,
        "files": names,
        "splits": {
            split: {
                "pages": sum(shard["pages"] for shard in listed),
                "text_bytes": sum(part["splits"].get(split, (0, 0))[1] for part in last),
                "file_bytes": sum(shard["bytes"] for shard in listed),
                "files": len(listed),
            }
            for split, listed in shards.items()
        },
        "rules": _rule_order(corpus),
        "counts": {stage: listed for stage, listed in counts.items() if listed},
        "damaged_files": dict(list(damaged.items())[:_MAX_DAMAGED_FILES]),
        "examples": merge_examples(part.get("examples", {}) for parts in summaries.values() for part in parts),
        **merge_statistics(last),
    }
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


def find_shards(context: Context) -> Callable[[Mapping[str, Any]], bool]:
    """Returns f(summary of a job of the last stage) -> whether its output file is there.

    It is in the work folder until all are written, and then in the folder of the corpus.
    """
    folder = corpus_dir(context.plan.output, context.corpus)
    is_own = _read_recipe(folder).get("recipe") == context.plan.folders[write.NAME]
    return lambda summary: (
        exists(context.path(write.NAME, summary["path"])) or (is_own and exists(f"{folder}/{summary['path']}"))
    )


def _read_recipe(folder: str) -> dict[str, Any]:
    """Returns the "recipe" that has written the output files of a folder, and their names, "files". {} if there are none."""
    if not exists(f"{folder}/{_RECIPE}"):
        return {}
    with open_input(f"{folder}/{_RECIPE}") as file:
        content = file.read()
    try:
        return dict(parse_json(content))
    except (ValueError, TypeError) as error:
        raise UserError(f"{folder}/{_RECIPE} is damaged ({error}). Choose another folder for the corpus.") from error


def _publish(context: Context, names: Sequence[str]) -> None:
    """Moves the output files to the folder of the corpus, in place of those of another recipe."""
    folder, stage = corpus_dir(context.plan.output, context.corpus), context.plan.folders[write.NAME]
    owner = _read_recipe(folder)
    if owner.get("recipe", stage) != stage:
        for name in (*owner["files"], SUMMARY, "report.html"):
            remove(f"{folder}/{name}")
    with open_output(f"{folder}/{_RECIPE}") as file:
        file.write(json.dumps({"recipe": stage, "files": list(names)}).encode())
    for name in names:
        if exists(context.path(write.NAME, name)):
            move(context.path(write.NAME, name), f"{folder}/{name}")
