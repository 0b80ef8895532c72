"""A tokenizer of `transformers` as a SeqIO vocabulary."""

import functools
import itertools
import os
import pathlib
from typing import Any

import numpy as np
import seqio
import tensorflow as tf
from etils import epath

from t5x_lab.config.errors import NotHere, UserError
from t5x_lab.config.json_files import parse_json
from t5x_lab.config.object_storage import is_object_storage
from t5x_lab.config.temporary import local_copy
from t5x_lab.data.vocabularies.sentinel_names import find_sentinels

GPT1_FILES = ("encoder_bpe_40000.json", "vocab_40000.bpe")  # ids and merges that OpenAI published


def read_tokenizer(directory: str) -> Any:
    """Reads the tokenizer of a directory with `transformers`. Code in the directory is not run.

    Args:
      directory: a directory that `transformers` saved, a tokenizer.json file, or a directory with OpenAI's two files of GPT-1.

    Raises:
      UserError: if it cannot be read.
    """
    if is_object_storage(directory) and not epath.Path(directory).exists():
        raise NotHere(f"The tokenizer directory {directory} does not exist. Set HuggingFaceVocabulary.path.")
    directory = local_copy(directory)
    folder = pathlib.Path(directory)
    paths = [folder] if folder.is_file() else folder.glob("*")
    files = sorted(path for path in paths if path.suffix in (".json", ".model", ".txt", ".bpe"))
    return _read(directory, tuple((path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files))


@functools.lru_cache(maxsize=8)
def _read(directory: str, file_stats: tuple) -> Any:
    del file_stats  # part of the cache key
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # else it warns about processes that are forked later
    import transformers

    folder = pathlib.Path(directory)
    if not folder.exists():
        raise NotHere(f"The tokenizer directory {directory} does not exist. Set HuggingFaceVocabulary.path.")
    try:
        if folder.is_file():
            return transformers.PreTrainedTokenizerFast(tokenizer_file=directory)
        if all((folder / name).exists() for name in GPT1_FILES):
            ids, merges = (folder / name for name in GPT1_FILES)
            pairs: Any = [tuple(line.split()) for line in merges.read_text().splitlines()[1:] if line.strip()]
            return transformers.OpenAIGPTTokenizer(vocab=parse_json(ids.read_text()), merges=pairs)
        tokenizer = transformers.AutoTokenizer.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
        if len(tokenizer.get_vocab()) <= len(set(tokenizer.all_special_ids)):  # without files it returns an empty one
            raise ValueError("the vocabulary files are missing")
        return tokenizer
    except Exception as error:  # damaged files fail in different ways
        reason = str(error).strip().partition("\n")[0][:200]
        raise UserError(f"transformers cannot read a tokenizer from {directory} ({type(error).__name__}: {reason}).") from error


def special_ids_around(tokenizer: Any) -> tuple[list[int], list[int]]:
    """Returns the ids that the tokenizer adds before and after a text.

    Raises:
      UserError: if no text shows them.
    """
    samples = ("a", "A", "1", *itertools.islice((tokenizer.decode([i]) for i in range(len(tokenizer))), 1000))
    for word in samples:
        text_ids, all_ids = tokenizer.encode(word, add_special_tokens=False), tokenizer.encode(word)
        if text_ids and not set(text_ids) & set(tokenizer.all_special_ids):
            for start in range(len(all_ids) - len(text_ids) + 1):
                if all_ids[start : start + len(text_ids)] == text_ids:
                    return all_ids[:start], all_ids[start + len(text_ids) :]
    raise UserError(f"The tokenizer of {tokenizer.name_or_path} changes the ids of a text when it adds special tokens.")


class HuggingFaceTokenizer(seqio.Vocabulary):
    """SeqIO vocabulary of a `transformers` tokenizer. Special tokens in a text are encoded, and none are added around it.

    Args:
      directory: see `read_tokenizer`.
    """

    def __init__(self, directory: str):
        self.directory, self._tokenizer = directory, read_tokenizer(directory)
        self._ids = self._tokenizer.get_vocab()
        self._known_ids = frozenset(self._ids.values())
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
        """Ids of `<extra_id_0>`, `<extra_id_1>`, …, or of Gemma's `<unused0>` and so on. T5's count down, others up."""
        return find_sentinels(self._ids.get)

    @property
    def special_ids(self) -> set[int]:
        """Ids of special tokens, such as Gemma's `<mask>`."""
        added = self._tokenizer.added_tokens_decoder
        return {*self._tokenizer.all_special_ids, *(token_id for token_id, token in added.items() if token.special)}

    @property
    def has_padding(self) -> bool:
        return self._tokenizer.pad_token_id is not None

    @property
    def uses_id_0(self) -> bool:
        """Whether id 0, usually padding, is a token of text, such as Qwen's `!`."""
        return 0 not in self._tokenizer.all_special_ids

    def decode(self, ids) -> str:
        """Decodes ids up to EOS. Unlike SeqIO's method it keeps ids beyond the vocabulary size, such as Qwen's EOS."""
        eos = self.eos_id
        return self._decode(list(itertools.takewhile(lambda i: i != eos, ids)))

    def decode_with_special_tokens(self, ids) -> str:
        """Decodes ids. Unlike `decode`, it keeps special tokens such as sentinels."""
        return self._tokenizer.decode(self._ids_of_tokens(ids))

    def _encode(self, s) -> list[int]:
        text = s.decode(errors="replace") if isinstance(s, bytes) else s
        return self._tokenizer.encode(text, add_special_tokens=False)

    def _decode(self, ids) -> str:
        return self._tokenizer.decode(self._ids_of_tokens(ids), skip_special_tokens=True)

    def _ids_of_tokens(self, ids) -> list[int]:
        """Returns the ids that stand for a token. A network may have more, of which ByT5's tokenizer has no text."""
        return [int(i) for i in ids if int(i) in self._known_ids]

    def _encode_tf(self, s: tf.Tensor) -> tf.Tensor:
        # Not stateful: the position of a pipeline with a stateful function cannot be saved.
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
