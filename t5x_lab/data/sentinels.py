"""Sentinels of a vocabulary: the ids that stand for spans of text. Nothing here imports TensorFlow."""

from collections.abc import Callable

from t5x_lab.data.config import T5_SENTINELS, HuggingFaceVocabulary, SentencePieceVocabulary, Vocabulary


def sentinel_pieces(id_of: Callable[[str], int], piece_of: Callable[[int], str]) -> range:
    """Ids of the pieces `<extra_id_0>`, `<extra_id_1>`, … of a SentencePiece model, the first one first; it may have none.

    Args:
      id_of: of a piece; that of the unknown piece where there is none.
      piece_of: an id.
    """
    for mark in ("", "▁"):  # mT5's begin with a space
        name = lambda number, mark=mark: f"{mark}<extra_id_{number}>"
        has = lambda number: piece_of(id_of(name(number))) == name(number)
        if has(0):
            first = id_of(name(0))
            step = id_of(name(1)) - first if has(1) else -1
            count = 1
            while has(count) and id_of(name(count)) == first + step * count:
                count += 1
            return range(first, first + step * count, step)
    return range(0)


def number_of_sentinels(vocabulary: Vocabulary) -> int:
    """How many a described vocabulary has; see `vocabularies.sentinels_of`."""
    if isinstance(vocabulary, HuggingFaceVocabulary):
        from t5x_lab.data.huggingface_tokenizer import HuggingFaceTokenizer

        return len(HuggingFaceTokenizer(vocabulary.path).sentinels)
    if isinstance(vocabulary, SentencePieceVocabulary) and not vocabulary.extra_ids:
        from t5x_lab.data.sentencepiece_files import read_sentencepiece

        pieces = read_sentencepiece(vocabulary.path)
        return len(sentinel_pieces(pieces.PieceToId, pieces.IdToPiece))
    return vocabulary.extra_ids or T5_SENTINELS
