"""Shared parts of comparisons of small models on labelled data: folders, steps, and the text of a vocabulary."""

import argparse
import csv
import gzip
import itertools
import json
import pathlib
from collections.abc import Iterable, Iterator, Mapping


def arguments(
    doc: str, pretrain_steps: int, steps: int, only: Iterable[str], data_sets: Iterable[str] = (), **more: int
) -> argparse.Namespace:
    """Parses --work, which is created, --data, steps, --only, --data_set, and flags of further numbers."""
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    parser.add_argument("--work", required=True)
    parser.add_argument("--data", default="../shared/data")
    for name, number in {"pretrain_steps": pretrain_steps, "steps": steps, **more}.items():
        parser.add_argument(f"--{name}", type=int, default=number)
    parser.add_argument("--only", action="append", choices=list(only))
    if data_sets:
        parser.add_argument("--data_set", action="append", choices=list(data_sets), help="one of them alone (default: all)")
    args = parser.parse_args()
    args.work, args.data = pathlib.Path(args.work).resolve(), pathlib.Path(args.data).resolve()
    if data_sets:
        args.data_set = args.data_set or list(data_sets)
    args.work.mkdir(parents=True, exist_ok=True)
    return args


def paragraphs(of_each: int | None = None) -> Iterable[str]:
    """The embedded corpus, or the first lines of each of its speeches."""
    from t5x_lab.tasks.sotu import speeches

    for file in speeches()["train"]:
        lines = pathlib.Path(file).read_text().splitlines()
        yield from (line for line in itertools.islice(lines, of_each) if line)


def write_texts(path: pathlib.Path, texts: Iterable[str]) -> None:
    """Writes texts in the form that `t5x_lab vocab --input` reads."""
    with open(path, "w") as output:
        output.writelines(json.dumps({"text": text}) + "\n" for text in texts)


COLUMNS = {  # of files whose first line does not name them
    "glue/cola": ("source", "label", "mark", "sentence"),
    "glue/stsb": ("genre", "file", "year", "number", "label", "sentence1", "sentence2"),
}


def labelled(path: pathlib.Path, data_set: str) -> Iterator[dict]:
    """Records of a file of the shared data: lines of JSON, or a table with tabs between its columns."""
    with gzip.open(path, "rt") if path.suffix == ".gz" else open(path, newline="") as file:
        if path.suffix == ".jsonl":
            yield from map(json.loads, file)
        else:
            for row in csv.DictReader(file, COLUMNS.get(data_set), delimiter="\t", quoting=csv.QUOTE_NONE):
                number = float(row["label"])
                yield {**{k: v for k, v in row.items() if k}, "label": int(number) if number.is_integer() else number}


def write_records(work: pathlib.Path, datasets: Mapping[str, Mapping[str, list[dict]]]) -> dict[str, str]:
    """Writes records, by data set and split, as lines of JSON; returns names for them in gin."""
    for data_set, splits in datasets.items():
        (work / data_set).mkdir(parents=True, exist_ok=True)
        for split, records in splits.items():
            (work / data_set / f"{split}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return {data_set: data_set.replace("/", "_") for data_set in datasets}


def t5x_lab(*argv: str) -> None:
    """Runs a command in this process."""
    from t5x_lab.cli.main import main

    print("$ t5x_lab", *argv, flush=True)
    if main(list(argv)) != 0:
        raise SystemExit(f"t5x_lab {' '.join(argv)} failed")
