"""SeqIO vocabularies from their descriptions, and what their ids are."""

import filecmp
import functools
import json
import os
import zlib

import seqio
import tensorflow as tf
import tensorflow_text as tf_text
from etils import epath

from t5x_lab.data.config import T5_SENTINELS, ByteVocabulary, HuggingFaceVocabulary, SentencePieceVocabulary, Vocabulary
from t5x_lab.data.huggingface_tokenizer import HuggingFaceTokenizer, read_tokenizer
from t5x_lab.data.sentencepiece_files import read_sentencepiece
from t5x_lab.data.sentinels import sentinel_pieces


def build_vocabulary(config: Vocabulary) -> seqio.Vocabulary:
    """The SeqIO vocabulary, its file checked.

    Raises:
      UserError: when the SentencePiece file cannot be read.
    """
    if isinstance(config, SentencePieceVocabulary):
        read_sentencepiece(config.path)
    return unread_vocabulary(config)


def unread_vocabulary(config: Vocabulary) -> seqio.Vocabulary:
    """The SeqIO vocabulary, whose SentencePiece file is opened when it is used: it may lie where this machine cannot reach."""
    if isinstance(config, ByteVocabulary):
        return seqio.ByteVocabulary(extra_ids=config.extra_ids)
    if isinstance(config, HuggingFaceVocabulary):
        return HuggingFaceTokenizer(config.path)
    return _SentencePieces(str(config.path), extra_ids=config.extra_ids)


class _SentencePieces(seqio.SentencePieceVocabulary):
    """SeqIO's, with one tokenizer of TensorFlow's for all tasks, each of whose graphs would read the model anew."""

    @property
    def tf_tokenizer(self) -> tf_text.SentencepieceTokenizer:
        with tf.init_scope():
            if tf.executing_eagerly():
                return _tokenizer(self.sp_model)
        return super().tf_tokenizer  # in a graph of TensorFlow 1's, which Beam's workers may have


@functools.lru_cache(maxsize=8)
def _tokenizer(model: bytes) -> tf_text.SentencepieceTokenizer:
    return tf_text.SentencepieceTokenizer(model=model)


def is_made_of(vocabulary: seqio.Vocabulary, config: Vocabulary) -> bool:
    """Whether a vocabulary is the described one, as far as its files can be compared here."""
    if isinstance(config, SentencePieceVocabulary) and isinstance(vocabulary, seqio.SentencePieceVocabulary):
        files = str(config.path), str(vocabulary.sentencepiece_model_file)
        same_file = files[0] == files[1] or _are_same(*files)
        return same_file and config.extra_ids == vocabulary.extra_ids
    if isinstance(config, HuggingFaceVocabulary) and isinstance(vocabulary, seqio.SentencePieceVocabulary):
        return _are_same(os.path.join(config.path, "spiece.model"), str(vocabulary.sentencepiece_model_file))
    if isinstance(config, SentencePieceVocabulary) or isinstance(vocabulary, seqio.SentencePieceVocabulary):
        return False
    return unread_vocabulary(config) == vocabulary


@functools.lru_cache(maxsize=16)
def fingerprint(config: Vocabulary) -> str:
    """What tells ids from those of other vocabularies, wherever the same file lies."""
    if isinstance(config, SentencePieceVocabulary):
        read_sentencepiece(config.path)
        return f"SentencePiece {zlib.crc32(epath.Path(config.path).read_bytes()):08x}, {config.extra_ids} extra ids"
    if isinstance(config, HuggingFaceVocabulary):
        ids = sorted(read_tokenizer(config.path).get_vocab().items())
        return f"Hugging Face {zlib.crc32(json.dumps(ids).encode()):08x}"
    return str(config)


def _are_same(one: str, other: str) -> bool:
    try:
        return filecmp.cmp(one, other, shallow=False)
    except OSError:  # remote, or not there
        return False


def sentinels_of(vocabulary: seqio.Vocabulary) -> range:
    """Ids of the sentinels, the first one first; T5's count down from the last id.

    Without ids of their own (`extra_ids` = 0) they are the pieces of these names, as mT5's are, or ByT5's last 100 bytes.
    """
    if isinstance(vocabulary, HuggingFaceTokenizer):
        return vocabulary.sentinels
    if isinstance(vocabulary, seqio.SentencePieceVocabulary) and not vocabulary.extra_ids:
        return sentinel_pieces(vocabulary.tokenizer.PieceToId, vocabulary.tokenizer.IdToPiece)
    last, in_bytes = vocabulary.vocab_size - 1, isinstance(vocabulary, seqio.ByteVocabulary)
    return range(last, last - (vocabulary.extra_ids or (T5_SENTINELS if in_bytes else 0)), -1)
