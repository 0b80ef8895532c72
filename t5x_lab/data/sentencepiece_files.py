"""SentencePiece model files: reading and training them. Nothing here imports TensorFlow."""

import os
from collections.abc import Iterable

import sentencepiece
from etils import epath

from t5x_lab.config.errors import NotHere, UserError
from t5x_lab.config.gin_files import flag


def read_sentencepiece(path: str) -> sentencepiece.SentencePieceProcessor:
    """A model file, opened.

    Raises:
      NotHere: when it cannot be read.
      UserError: when it is no SentencePiece model.
    """
    advice = (
        "Name a SentencePiece model with --gin.SentencePieceVocabulary.path=FILE (t5x_lab vocab trains one), or use "
        f"{flag('VOCABULARY', '@ByteVocabulary()')}."
    )
    try:
        model = epath.Path(path).read_bytes()
    except Exception as error:  # any failure of a remote file system means the same to the user
        raise NotHere(f"The vocabulary {path} cannot be read. {advice}") from error
    try:
        return sentencepiece.SentencePieceProcessor(model_proto=model)
    except RuntimeError as error:
        raise UserError(f"The vocabulary {path} is no SentencePiece model. {advice}") from error


def train_sentencepiece(
    texts: Iterable[str], path: str, size: int, model_type: str = "unigram", character_coverage: float = 1.0
) -> None:
    """Trains a SentencePiece model with T5's ids (pad 0, eos 1, unk 2, no bos) and writes it to `path`.

    Args:
      texts: sentences or paragraphs.
      path: the model file; a `.vocab` file is not kept.
      size: number of pieces, without sentinels.
      model_type: "unigram", or "bpe".
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
                model_type=model_type,
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
