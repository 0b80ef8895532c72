"""Number of sentinels of a vocabulary. Free of TensorFlow."""

from t5x_lab.data.vocabularies.config import T5_SENTINELS, HuggingFaceVocabulary, SentencePieceVocabulary, Vocabulary
from t5x_lab.data.vocabularies.sentinel_names import sentinel_pieces


def num_sentinels(vocabulary: Vocabulary) -> int:
    """Returns the number of sentinels of a vocabulary. See `vocabularies.build.sentinel_ids`."""
    if isinstance(vocabulary, HuggingFaceVocabulary):
        from t5x_lab.data.vocabularies.huggingface import HuggingFaceTokenizer  # needs TensorFlow

        return len(HuggingFaceTokenizer(vocabulary.path).sentinels)
    if isinstance(vocabulary, SentencePieceVocabulary) and not vocabulary.extra_ids:
        from t5x_lab.data.vocabularies.sentencepiece import read_sentencepiece

        pieces = read_sentencepiece(vocabulary.path)
        return len(sentinel_pieces(pieces))
    return vocabulary.extra_ids or T5_SENTINELS
