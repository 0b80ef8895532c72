"""What comparisons of small models on real labelled data have in common: folders, steps, and the text of a vocabulary."""

import argparse
import itertools
import json
import pathlib
from collections.abc import Iterable


def arguments(doc: str, pretrain_steps: int, steps: int, only: Iterable[str], **more: int) -> argparse.Namespace:
    """--work and --data as absolute paths, the first made; steps; --only, and flags of further numbers."""
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    parser.add_argument("--work", required=True)
    parser.add_argument("--data", default="../shared/data")
    for name, number in {"pretrain_steps": pretrain_steps, "steps": steps, **more}.items():
        parser.add_argument(f"--{name}", type=int, default=number)
    parser.add_argument("--only", action="append", choices=list(only))
    args = parser.parse_args()
    args.work, args.data = pathlib.Path(args.work).resolve(), pathlib.Path(args.data).resolve()
    args.work.mkdir(parents=True, exist_ok=True)
    return args


def paragraphs(of_each: int | None = None) -> Iterable[str]:
    """The embedded corpus, or the first lines of each of its speeches."""
    from t5x_lab.tasks.sotu import speeches

    for file in speeches()["train"]:
        lines = pathlib.Path(file).read_text().splitlines()
        yield from (line for line in itertools.islice(lines, of_each) if line)


def write_texts(path: pathlib.Path, texts: Iterable[str]) -> None:
    """As `t5x_lab vocab --input` reads them."""
    with open(path, "w") as output:
        output.writelines(json.dumps({"text": text}) + "\n" for text in texts)
