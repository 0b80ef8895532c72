"""Text files as SeqIO sources: .txt, .jsonl and TFRecord. Every element is {"text": a document}.

No Python generators: the state of a tf.data iterator over one cannot be saved, and resuming would not be exact.
"""

import functools
import json
from collections.abc import Iterable, Mapping

import numpy as np
import seqio
import tensorflow as tf

from t5x_lab.config.errors import NotHere, UserError
from t5x_lab.config.gin_files import flag
from t5x_lab.data.config import TextFiles


def text_files(config: TextFiles) -> seqio.FileDataSource:
    """The source of the text `files`.

    Raises:
      UserError: when no pattern is given, nothing matches, or the kind is unknown.
    """
    if not config.train:
        raise UserError(
            f'The text "files" is your own: say where with {flag("TextFiles.train", "FOLDER/*.txt")} (or .jsonl, .tfrecord).'
        )
    patterns = {"train": config.train} | ({"validation": config.validation} if config.validation else {})
    files = {split: _matching(pattern, split) for split, pattern in patterns.items()}
    kinds = {_kind(file) for names in files.values() for file in names}
    if len(kinds) != 1:
        raise UserError(f"TextFiles names files of several kinds ({', '.join(sorted(kinds))}); give files of one kind.")
    return document_files(files, kinds.pop(), config.text_key, config.lines_per_document)


def document_files(
    files: Mapping[str, Iterable[str]], kind: str = "txt", text_key: str = "text", lines_per_document: int = 32
) -> seqio.FileDataSource:
    """A source over files of one kind, by split; it counts its documents when it is asked how many there are."""
    readers = {
        "txt": lambda file: _text_lines(file, lines_per_document),
        "jsonl": lambda file: _json_lines(file, text_key),
        "tfrecord": lambda file: _examples(file, text_key),
    }
    return _CountedFiles(readers[kind], {split: list(names) for split, names in files.items()})


class _CountedFiles(seqio.FileDataSource):
    @functools.cache  # noqa: B019  (sources live as long as the process)
    def num_input_examples(self, split: str) -> int:
        return int(self.get_dataset(split, shuffle=False).reduce(np.int64(0), lambda count, _: count + 1))


def _text_lines(file, lines_per_document: int) -> tf.data.Dataset:
    lines = tf.data.TextLineDataset(file).filter(lambda line: tf.strings.length(tf.strings.strip(line)) > 0)
    return lines.batch(lines_per_document).map(lambda lines: {"text": tf.strings.reduce_join(lines, separator="\n")})


def _json_lines(file, text_key: str) -> tf.data.Dataset:
    def text(line: bytes) -> bytes:
        try:
            return json.loads(line)[text_key].encode()
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f'A line of your .jsonl files is not an object with a text under "{text_key}": {line[:80]!r} ({error!r}). '
                "Correct the line, or name the field with --gin.TextFiles.text_key=NAME."
            ) from error

    def parse(line):
        document = tf.numpy_function(text, [line], tf.string, stateful=False)
        return {"text": tf.ensure_shape(document, ())}

    return tf.data.TextLineDataset(file).filter(lambda line: tf.strings.length(line) > 0).map(parse)


def _examples(file, text_key: str) -> tf.data.Dataset:
    features = {text_key: tf.io.FixedLenFeature([], tf.string)}
    return tf.data.TFRecordDataset(file).map(lambda record: {"text": tf.io.parse_single_example(record, features)[text_key]})


def _matching(pattern: str, split: str) -> list[str]:
    files = sorted(file for part in pattern.split(",") for file in tf.io.gfile.glob(part.strip()))
    if not files:
        raise NotHere(f'No file matches TextFiles.{split} = "{pattern}". Give a pattern such as "corpus/*.txt".')
    return files


def _kind(file: str) -> str:
    if ".tfrecord" in file:
        return "tfrecord"
    for kind in ("txt", "jsonl"):
        if file.endswith(f".{kind}"):
            return kind
    raise UserError(f"{file} is of no kind that can be read; give .txt, .jsonl or .tfrecord files.")
