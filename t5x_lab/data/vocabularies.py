"""SeqIO vocabularies from their descriptions, and training a SentencePiece model."""

import filecmp
import os
from collections.abc import Iterable

import sentencepiece
import seqio
from etils import epath

from t5x_lab.config.errors import NotHere, UserError
from t5x_lab.config.gin_files import flag
from t5x_lab.data.config import T5_SENTINELS, ByteVocabulary, HuggingFaceVocabulary, SentencePieceVocabulary, Vocabulary
from t5x_lab.data.huggingface_tokenizer import HuggingFaceTokenizer


def build_vocabulary(config: Vocabulary) -> seqio.Vocabulary:
    """The SeqIO vocabulary, its file checked.

    Raises:
      UserError: when the SentencePiece file cannot be read.
    """
    if isinstance(config, ByteVocabulary):
        return seqio.ByteVocabulary(extra_ids=config.extra_ids)
    if isinstance(config, HuggingFaceVocabulary):
        return HuggingFaceTokenizer(config.path)
    advice = (
        "Name a SentencePiece model with --gin.SentencePieceVocabulary.path=FILE (t5x_lab vocab trains one), or use "
        f"{flag('VOCABULARY', '@ByteVocabulary()')}."
    )
    try:
        model = epath.Path(config.path).read_bytes()
    except Exception as error:  # any failure of a remote file system means the same to the user
        raise NotHere(f"The vocabulary {config.path} cannot be read. {advice}") from error
    try:
        sentencepiece.SentencePieceProcessor(model_proto=model)
    except RuntimeError as error:
        raise UserError(f"The vocabulary {config.path} is no SentencePiece model. {advice}") from error
    return seqio.SentencePieceVocabulary(str(config.path), extra_ids=config.extra_ids)


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
    return build_vocabulary(config) == vocabulary


def _are_same(one: str, other: str) -> bool:
    try:
        return filecmp.cmp(one, other, shallow=False)
    except OSError:  # remote, or not there
        return False


def sentinels_of(vocabulary: seqio.Vocabulary) -> range:
    """Ids of the sentinels, the first one first; T5's count down from the last id.

    Without ids of their own (`extra_ids` = 0) they are T5's number of the vocabulary's last: pieces of mT5's, bytes of ByT5's.
    """
    if isinstance(vocabulary, HuggingFaceTokenizer):
        return vocabulary.sentinels
    last, known = vocabulary.vocab_size - 1, isinstance(vocabulary, seqio.SentencePieceVocabulary | seqio.ByteVocabulary)
    return range(last, last - (vocabulary.extra_ids or (T5_SENTINELS if known else 0)), -1)


def train_sentencepiece(texts: Iterable[str], path: str, size: int, character_coverage: float = 1.0) -> None:
    """Trains a unigram SentencePiece model with T5's ids (pad 0, eos 1, unk 2, no bos) and writes it to `path`.

    Args:
      texts: sentences or paragraphs.
      path: the model file; a `.vocab` file is not kept.
      size: number of pieces, without sentinels.
      character_coverage: share of the text's characters that get a piece of their own; the others become unknown.

    Raises:
      UserError: when the text is too small for the size.
    """
    try:
        os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
        model = open(f"{path}.tmp", "wb")
    except OSError as error:
        raise UserError(f"The vocabulary {path} cannot be written: {error.strerror}. Name another file.") from error
    with model:
        try:
            sentencepiece.SentencePieceTrainer.train(
                sentence_iterator=(line for text in texts for line in text.splitlines() if line.strip()),
                model_writer=model,
                vocab_size=size,
                model_type="unigram",
                character_coverage=character_coverage,
                pad_id=0,
                eos_id=1,
                unk_id=2,
                bos_id=-1,
                max_sentence_length=100_000,
                num_threads=os.cpu_count(),
                minloglevel=2,
            )
        except BaseException as error:
            os.unlink(model.name)
            if not isinstance(error, RuntimeError | OSError):
                raise
            raise UserError(
                f"SentencePiece cannot train {size} pieces on this text: {str(error).splitlines()[-1]} Use a smaller --size "
                "or more text."
            ) from error
    os.replace(model.name, path)
