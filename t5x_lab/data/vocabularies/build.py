"""SeqIO vocabularies from their settings."""

import filecmp
import functools
import json
import os
import zlib
from collections.abc import Mapping

import seqio
import tensorflow as tf
import tensorflow_text as tf_text
from etils import epath

from t5x_lab.config.errors import UserError
from t5x_lab.config.gin_files import gin_flag
from t5x_lab.config.object_storage import is_object_storage
from t5x_lab.config.temporary import local_copy
from t5x_lab.data.vocabularies.config import (
    T5_SENTINELS,
    ByteVocabulary,
    HuggingFaceVocabulary,
    SentencePieceVocabulary,
    Vocabulary,
)
from t5x_lab.data.vocabularies.huggingface import HuggingFaceTokenizer, read_tokenizer
from t5x_lab.data.vocabularies.sentencepiece import read_sentencepiece
from t5x_lab.data.vocabularies.sentinel_names import T5_NAMES, sentinel_pieces


def build_vocabulary(config: Vocabulary) -> seqio.Vocabulary:
    """Returns the SeqIO vocabulary after its file is checked.

    Raises:
      UserError: if the SentencePiece file cannot be read, or has sentinels of its own in addition to `extra_ids`.
    """
    if isinstance(config, SentencePieceVocabulary):
        pieces = read_sentencepiece(config.path)
        if config.extra_ids and sentinel_pieces(pieces, T5_NAMES):
            raise UserError(
                f"The vocabulary {config.path} has the sentinels <extra_id_0> and so on among its pieces, as that of mT5, but "
                f"{config.extra_ids} are to be added. Set SentencePieceVocabulary.extra_ids = 0."
            )
    return lazy_vocabulary(config)


def lazy_vocabulary(config: Vocabulary) -> seqio.Vocabulary:
    """Returns the SeqIO vocabulary. Its SentencePiece file is opened on first use, since it may not be reachable from here."""
    if isinstance(config, ByteVocabulary):
        return seqio.ByteVocabulary(extra_ids=config.extra_ids)
    if isinstance(config, HuggingFaceVocabulary):
        return HuggingFaceTokenizer(config.path)
    return _SentencePieces(str(config.path), extra_ids=config.extra_ids)


class _SentencePieces(seqio.SentencePieceVocabulary):
    """SeqIO's vocabulary with one TensorFlow tokenizer for all tasks. Otherwise each task's graph would read the model.

    SeqIO reads the file with TensorFlow, which does not know s3://, so that a file on object storage is copied.
    """

    def _model_context(self):
        named = self._sentencepiece_model_file
        if self._model or not is_object_storage(named):
            return super()._model_context()
        try:
            self._sentencepiece_model_file = local_copy(named)
            return super()._model_context()
        finally:
            self._sentencepiece_model_file = named

    @property
    def eos_id(self) -> int | None:
        return eos if (eos := super().eos_id) >= 0 else None  # SentencePiece has -1 for none

    @property
    def tf_tokenizer(self) -> tf_text.SentencepieceTokenizer:
        with tf.init_scope():
            if tf.executing_eagerly():
                return _tokenizer(self.sp_model)
        return super().tf_tokenizer  # in a TensorFlow 1 graph, which Beam workers may have


@functools.lru_cache(maxsize=8)
def _tokenizer(model: bytes) -> tf_text.SentencepieceTokenizer:
    return tf_text.SentencepieceTokenizer(model=model)


def is_same_vocabulary(vocabulary: seqio.Vocabulary, config: Vocabulary) -> bool:
    """Returns whether a vocabulary equals the configured one, as far as their files can be compared from here."""
    if isinstance(config, SentencePieceVocabulary) and isinstance(vocabulary, seqio.SentencePieceVocabulary):
        files = str(config.path), str(vocabulary.sentencepiece_model_file)
        same_file = files[0] == files[1] or _are_equal_files(*files)
        return same_file and config.extra_ids == vocabulary.extra_ids
    if isinstance(config, HuggingFaceVocabulary) and isinstance(vocabulary, seqio.SentencePieceVocabulary):
        return _are_equal_files(os.path.join(config.path, "spiece.model"), str(vocabulary.sentencepiece_model_file))
    if isinstance(config, SentencePieceVocabulary) or isinstance(vocabulary, seqio.SentencePieceVocabulary):
        return False
    return lazy_vocabulary(config) == vocabulary


def vocabulary_flags(by_feature: Mapping[str, seqio.Vocabulary]) -> str:
    """Returns the flags that set the vocabularies of a task's features, "" if flags cannot set one of them."""
    targets = by_feature.get("targets") or next(iter(by_feature.values()))
    inputs = by_feature.get("inputs", targets)
    flags = [_flags("VOCABULARY", "", targets), *([] if inputs == targets else [_flags("INPUT_VOCABULARY", "inputs/", inputs)])]
    return " ".join(flags) if all(flags) else ""


def _flags(macro: str, scope: str, vocabulary: seqio.Vocabulary) -> str:
    if isinstance(vocabulary, seqio.SentencePieceVocabulary):
        name, fields = f"{scope}SentencePieceVocabulary", {"path": vocabulary.sentencepiece_model_file}
    elif isinstance(vocabulary, seqio.ByteVocabulary):
        name, fields = f"{scope}ByteVocabulary", {}
    else:
        return ""
    fields["extra_ids"] = vocabulary.extra_ids
    return " ".join([gin_flag(macro, f"@{name}()"), *(gin_flag(f"{name}.{field}", value) for field, value in fields.items())])


@functools.lru_cache(maxsize=16)
def fingerprint(config: Vocabulary) -> str:
    """Returns a hash of the vocabulary that does not depend on the path of its file."""
    if isinstance(config, SentencePieceVocabulary):
        read_sentencepiece(config.path)
        return f"SentencePiece {zlib.crc32(epath.Path(config.path).read_bytes()):08x}, {config.extra_ids} extra ids"
    if isinstance(config, HuggingFaceVocabulary):
        ids = sorted(read_tokenizer(config.path).get_vocab().items())
        return f"Hugging Face {zlib.crc32(json.dumps(ids).encode()):08x}"
    return str(config)


def _are_equal_files(first: str, second: str) -> bool:
    try:
        return filecmp.cmp(first, second, shallow=False)
    except OSError:  # remote or missing
        return False


def sentinel_ids(vocabulary: seqio.Vocabulary) -> range:
    """Returns the ids of the sentinels, the first one first. T5's count down from the last id.

    With `extra_ids` = 0 they are the pieces `<extra_id_0>` and so on (mT5), `<unused0>` and so on (Gemma), or the last 100
    bytes (ByT5).
    """
    if isinstance(vocabulary, HuggingFaceTokenizer):
        return vocabulary.sentinels
    if isinstance(vocabulary, seqio.SentencePieceVocabulary) and not vocabulary.extra_ids:
        return sentinel_pieces(vocabulary.tokenizer)
    last, is_bytes = vocabulary.vocab_size - 1, isinstance(vocabulary, seqio.ByteVocabulary)
    return range(last, last - (vocabulary.extra_ids or (T5_SENTINELS if is_bytes else 0)), -1)


def uses_id_0(vocabulary: seqio.Vocabulary) -> bool:
    """Returns whether id 0 is a token of text. In SentencePiece's default, for example, it is that of unknown characters."""
    if isinstance(vocabulary, seqio.SentencePieceVocabulary):
        return not vocabulary.tokenizer.IsControl(0)
    return isinstance(vocabulary, HuggingFaceTokenizer) and vocabulary.uses_id_0


def has_padding(vocabulary: seqio.Vocabulary) -> bool:
    """Returns whether id 0 is that of padding, or of another token that no text has."""
    return vocabulary.has_padding if isinstance(vocabulary, HuggingFaceTokenizer) else not uses_id_0(vocabulary)


def text_ids(vocabulary: seqio.Vocabulary) -> list[int]:
    """Returns the ids of tokens in texts, in order: without special tokens, sentinels and T5's first three ids."""
    is_foreign = isinstance(vocabulary, HuggingFaceTokenizer)
    special = vocabulary.special_ids if is_foreign else special_ids(vocabulary)
    return sorted(set(range(3, vocabulary.vocab_size)) - special - set(sentinel_ids(vocabulary)))


def special_ids(vocabulary: seqio.Vocabulary) -> frozenset[int]:
    """Returns the ids that stand for no text: control tokens, the unknown token and sentinels.

    Empty for a tokenizer of `transformers`, which leaves them out itself.
    """
    if isinstance(vocabulary, seqio.SentencePieceVocabulary):
        pieces = vocabulary.tokenizer
        control = (i for i in range(pieces.GetPieceSize()) if pieces.IsControl(i) or pieces.IsUnknown(i))
        return frozenset((*control, *sentinel_ids(vocabulary)))
    is_bytes = isinstance(vocabulary, seqio.ByteVocabulary) and vocabulary.extra_ids
    return frozenset(sentinel_ids(vocabulary)) if is_bytes else frozenset()
