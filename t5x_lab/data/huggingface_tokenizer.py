"""A tokenizer that `transformers` saved, as a SeqIO vocabulary; and what it puts around a text."""

import functools
import itertools
import json
import os
import pathlib
import re
from typing import Any

import numpy as np
import seqio
import tensorflow as tf

from t5x_lab.config.errors import NotHere, UserError

GPT1 = ("encoder_bpe_40000.json", "vocab_40000.bpe")  # the ids and the merges that OpenAI published


def read_tokenizer(directory: str) -> Any:
    """The tokenizer of a directory, as `transformers` itself reads it; code that lies there is not run.

    It may be one tokenizer.json alone, or a directory with the two files of OpenAI's GPT-1.

    Raises:
      UserError: when there is none that it can read.
    """
    folder = pathlib.Path(directory)
    places = [folder] if folder.is_file() else folder.glob("*")
    files = sorted(path for path in places if path.suffix in (".json", ".model", ".txt", ".bpe"))
    return _read(directory, tuple((path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files))


@functools.lru_cache(maxsize=8)
def _read(directory: str, state_of_files: tuple) -> Any:
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # it warns of processes that are forked later
    import transformers

    folder = pathlib.Path(directory)
    if not folder.exists():
        raise NotHere(f"{directory}, which the vocabulary is in, is not here. Name a folder with HuggingFaceVocabulary.path.")
    try:
        if folder.is_file():
            return transformers.PreTrainedTokenizerFast(tokenizer_file=directory)
        if all((folder / name).exists() for name in GPT1):
            ids, merges = (folder / name for name in GPT1)
            pairs: Any = [tuple(line.split()) for line in merges.read_text().splitlines()[1:] if line.strip()]
            return transformers.OpenAIGPTTokenizer(vocab=json.loads(ids.read_text()), merges=pairs)
        found = transformers.AutoTokenizer.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
        if len(found.get_vocab()) <= len(set(found.all_special_ids)):  # it makes an empty one where there are no files
            raise ValueError("there are no files of its words")
        return found
    except Exception as error:  # whatever it stumbles on in a damaged file
        reason = str(error).strip().partition("\n")[0][:200]
        raise UserError(
            f"{directory} holds no tokenizer that transformers can read ({type(error).__name__}: {reason})."
        ) from error


def around_texts(tokenizer: Any) -> tuple[list[int], list[int]]:
    """Ids that the tokenizer puts before and after a text.

    Raises:
      UserError: when no text shows them.
    """
    words = ("a", "A", "1", *itertools.islice((tokenizer.decode([i]) for i in range(len(tokenizer))), 1000))
    for word in words:
        inside, whole = tokenizer.encode(word, add_special_tokens=False), tokenizer.encode(word)
        if inside and not set(inside) & set(tokenizer.all_special_ids):
            for at in range(len(whole) - len(inside) + 1):
                if whole[at : at + len(inside)] == inside:
                    return whole[:at], whole[at + len(inside) :]
    raise UserError(
        f"The tokenizer of {tokenizer.name_or_path} changes a text's ids where it puts its special tokens around it."
    )


class HuggingFaceTokenizer(seqio.Vocabulary):
    """The ids of a text are those of `transformers`, special tokens in it included, with none put around it.

    Args:
      directory: which the tokenizer was saved in.
    """

    def __init__(self, directory: str):
        self.directory, self._tokenizer = directory, read_tokenizer(directory)
        self._ids = self._tokenizer.get_vocab()
        super().__init__(extra_ids=0)

    def save(self, directory: str) -> None:
        """Writes the tokenizer's files."""
        self._tokenizer.save_pretrained(directory)

    @property
    def bos_id(self) -> int | None:
        return self._tokenizer.bos_token_id

    @property
    def eos_id(self) -> int | None:
        return self._tokenizer.eos_token_id

    @property
    def pad_id(self) -> int:
        return self._tokenizer.pad_token_id or 0

    @property
    def unk_id(self) -> int | None:
        return self._tokenizer.unk_token_id

    @property
    def _base_vocab_size(self) -> int:
        return max(self._ids.values()) + 1

    @functools.cached_property
    def sentinels(self) -> range:
        """Ids of `<extra_id_0>`, `<extra_id_1>`, …, one after the other: T5's count down, ByT5's up; else none."""
        count = sum(bool(re.fullmatch(r"<extra_id_\d+>", token)) for token in self._ids)
        first = self._ids.get("<extra_id_0>", 0)
        ids = [self._ids.get(f"<extra_id_{i}>") for i in range(count)]
        return next((run for step in (-1, 1) if ids == list(run := range(first, first + step * count, step))), range(0))

    @property
    def has_text_at_0(self) -> bool:
        """Whether the id 0, padding elsewhere, is one of text (as Qwen's `!`)."""
        return 0 not in self._tokenizer.all_special_ids

    def decode(self, ids) -> str:
        """The text up to the end token. SeqIO's own makes unknown tokens of ids beyond the tokenizer's; Qwen's end texts."""
        end = self.eos_id
        return self._decode(list(itertools.takewhile(lambda i: i != end, ids)))

    def _encode(self, s) -> list[int]:
        text = s.decode(errors="replace") if isinstance(s, bytes) else s
        return self._tokenizer.encode(text, add_special_tokens=False)

    def _decode(self, ids) -> str:
        return self._tokenizer.decode([int(i) for i in ids], skip_special_tokens=True)

    def _encode_tf(self, s: tf.Tensor) -> tf.Tensor:
        # Not stateful: the position of a pipeline with a stateful function in it cannot be saved.
        ids = tf.numpy_function(lambda text: np.array(self._encode(text), np.int32), [s], tf.int32, stateful=False)
        ids.set_shape([None])
        return ids

    def _decode_tf(self, ids: tf.Tensor) -> tf.Tensor:
        if ids.shape.rank == 1:
            return tf.numpy_function(lambda row: self._decode(row).encode(), [ids], tf.string, stateful=False)
        return tf.map_fn(self._decode_tf, ids, fn_output_signature=tf.string)

    def __eq__(self, other) -> bool:
        return isinstance(other, HuggingFaceTokenizer) and self._ids == other._ids

    __hash__ = None  # type: ignore[assignment]

    def __str__(self) -> str:
        return f"HuggingFaceTokenizer({self.directory})"
