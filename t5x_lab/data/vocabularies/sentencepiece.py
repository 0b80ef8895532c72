"""Reading and training of SentencePiece models. Free of TensorFlow."""

import os
from collections.abc import Iterable

import sentencepiece
from etils import epath

from t5x_lab.config.errors import NotHere, UserError
from t5x_lab.config.gin_files import gin_flag
from t5x_lab.config.object_storage import check_network


def read_sentencepiece(path: str) -> sentencepiece.SentencePieceProcessor:
    """Reads a model file.

    Raises:
      NotHere: if it cannot be read.
      UserError: if it is not a SentencePiece model.
    """
    advice = (
        "Set --gin.SentencePieceVocabulary.path=FILE to a SentencePiece model (t5x_lab vocab trains one), or use "
        f"{gin_flag('VOCABULARY', '@ByteVocabulary()')}."
    )
    try:
        model = read_model(path)
    except Exception as error:  # remote file systems fail in different ways
        raise NotHere(f"The vocabulary {path} cannot be read. {advice}") from error
    try:
        processor = sentencepiece.SentencePieceProcessor(model_proto=model) if model else None
    except RuntimeError:
        processor = None
    if processor is None:
        raise UserError(f"The vocabulary {path} is not a SentencePiece model. {advice}")
    return processor


def read_model(path: str) -> bytes:
    """Returns the content of a model file. Without a network, one on gs:// is an `OSError` at once."""
    check_network(path)
    return epath.Path(path).read_bytes()


def train_sentencepiece(
    texts: Iterable[str], path: str, size: int, model_type: str = "unigram", character_coverage: float = 1.0
) -> None:
    """Trains a SentencePiece model with T5's ids (pad 0, eos 1, unk 2, no bos) and writes it to `path`.

    Args:
      texts: sentences or paragraphs.
      path: path of the model file. No `.vocab` file is written.
      size: number of pieces, without sentinels.
      model_type: "unigram" or "bpe".
      character_coverage: share of the text's characters that get a piece. The others become unknown.

    Raises:
      UserError: if the text is too small for the size.
    """
    try:
        os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
        model = open(f"{path}.tmp", "wb")
    except OSError as error:
        raise UserError(f"The vocabulary {path} cannot be written: {error.strerror}. Set another file.") from error
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
