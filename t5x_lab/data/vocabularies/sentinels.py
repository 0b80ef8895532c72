"""Sentinels of a vocabulary. Free of TensorFlow."""

from collections.abc import Callable

from t5x_lab.data.vocabularies.config import T5_SENTINELS, HuggingFaceVocabulary, SentencePieceVocabulary, Vocabulary


def sentinel_pieces(id_of: Callable[[str], int], piece_of: Callable[[int], str]) -> range:
    """Returns the ids of the pieces `<extra_id_0>`, `<extra_id_1>`, … of a SentencePiece model, empty if it has none.

    Args:
      id_of: f(piece) -> id, the unknown id for other pieces.
      piece_of: f(id) -> piece.
    """
    for mark in ("", "▁"):  # mT5's have a leading space
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


def num_sentinels(vocabulary: Vocabulary) -> int:
    """Returns the number of sentinels of a vocabulary. See `vocabularies.build.sentinel_ids`."""
    if isinstance(vocabulary, HuggingFaceVocabulary):
        from t5x_lab.data.vocabularies.huggingface import HuggingFaceTokenizer  # needs TensorFlow

        return len(HuggingFaceTokenizer(vocabulary.path).sentinels)
    if isinstance(vocabulary, SentencePieceVocabulary) and not vocabulary.extra_ids:
        from t5x_lab.data.vocabularies.sentencepiece import read_sentencepiece

        pieces = read_sentencepiece(vocabulary.path)
        return len(sentinel_pieces(pieces.PieceToId, pieces.IdToPiece))
    return vocabulary.extra_ids or T5_SENTINELS
