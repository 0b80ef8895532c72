"""The computation of the package langdetect in a fraction of its time, with the same results to the last bit.

Characters are normalized together, the n-grams of a word are looked up once, and the probabilities of all languages are
updated as an array. The random numbers and the order of all products and sums are the package's.
"""

import functools
import random
import re

import numpy as np

from t5x_lab.config.errors import UserError

try:
    from langdetect.detector import Detector
    from langdetect.detector_factory import PROFILES_DIRECTORY, DetectorFactory
    from langdetect.utils.ngram import NGram
except ImportError as _error:
    raise UserError(f"langdetect is not installed ({_error}). Run: pip install 't5x_lab[corpus]'") from _error

SEED = 0
_MAX_CACHED = 32  # characters of a word whose n-grams are kept
_STEPS = 5  # updates between two normalizations
_LATIN, _BEYOND_LATIN, _SPACES = re.compile("[A-z]"), re.compile("[\u0300-\U0010ffff]"), re.compile("  +")


def detect(text: str) -> list[tuple[str, float]]:
    """Returns the likely languages of a text with their probabilities, the best first; [] if the text has no letters.

    It is what `langdetect.detect_langs` returns with `DetectorFactory.seed = 0`, except that the latter raises an exception
    for texts without letters.
    """
    detector, table = _load()
    grams = np.array(table.lookup(_clean(text, detector.max_text_length)), np.int32)
    if not len(grams):
        return []
    return [(best.lang, best.prob) for best in detector._sort_probability(_probabilities(grams, table.rows, detector))]


def _probabilities(grams: np.ndarray, rows: np.ndarray, detector: Detector) -> list[float]:
    """Returns the probability of each language. See `Detector._detect_block`."""
    generator, num_grams, bits = random.Random(SEED), len(grams), len(grams).bit_length()
    languages = rows.shape[1]
    total, factors, sampled = [0.0] * languages, np.empty((_STEPS + 1, languages)), np.empty(_STEPS, np.int32)
    draw = generator.getrandbits
    for _ in range(detector.n_trial):
        probabilities = np.full(languages, 1.0 / languages)
        weight = (detector.alpha + generator.gauss(0.0, 1.0) * detector.ALPHA_WIDTH) / detector.BASE_FREQ
        step, count = 0, 1  # the first normalization follows the first update
        while True:
            for number in range(count):
                index = draw(bits)
                while index >= num_grams:  # as `random.choice`
                    index = draw(bits)
                sampled[number] = grams[index]
            used = factors[: count + 1]
            used[0] = probabilities
            np.take(rows, sampled[:count], axis=0, out=used[1:], mode="clip")
            used[1:] += weight
            np.multiply.reduce(used, axis=0, out=probabilities)
            probabilities /= sum(probabilities.tolist())
            if probabilities.max() > detector.CONV_THRESHOLD or step >= detector.ITERATION_LIMIT:
                break
            step, count = step + _STEPS, _STEPS
        total = [mean + p / detector.n_trial for mean, p in zip(total, probabilities.tolist(), strict=True)]
    return total


def _clean(text: str, max_length: int) -> str:
    """Returns the text that is looked at. See `Detector.append` and `Detector.cleaning_text`."""
    text = NGram.normalize_vi(Detector.MAIL_RE.sub(" ", Detector.URL_RE.sub(" ", text)))
    text = _SPACES.sub(" ", text[:max_length])
    # The package means to except the block "Latin Extended Additional", but compares its number with its name.
    if text.isascii() or 2 * len(_LATIN.findall(text)) >= len(_BEYOND_LATIN.findall(text)):
        return text
    return _LATIN.sub("", text)


class _GramTable:
    """The n-grams of all language profiles.

    Attributes:
      rows: float [number of n-grams, number of languages], their probabilities.
    """

    def __init__(self, probabilities: dict[str, list[float]]):
        self._index = {gram: number for number, gram in enumerate(probabilities)}
        self.rows = np.array(list(probabilities.values()))
        self._normalized = _NormalizedCharacters()
        self._of_short_word = functools.lru_cache(1 << 17)(self._word_grams)

    def lookup(self, text: str) -> list[int]:
        """Returns the indices of a text's n-grams, in order. See `Detector._extract_ngrams`."""
        *tokens, last = text.translate(self._normalized).split(" ")
        grams: list[int] = []
        for word in tokens:
            if word:
                grams += self._of_word(word, False)
        if last:
            grams += self._of_word(last, True)
        return grams

    def _of_word(self, word: str, is_last: bool) -> tuple[int, ...]:
        return (self._of_short_word if len(word) <= _MAX_CACHED else self._word_grams)(word, is_last)

    def _word_grams(self, word: str, is_last: bool) -> tuple[int, ...]:
        """Returns the n-grams of a word. A space precedes it, and follows it unless the text ends with it."""
        padded, grams, has_capitals = f" {word}" + ("" if is_last else " "), [], False
        for end in range(1, len(padded)):
            character = padded[end]
            has_capitals = character.isupper() and (has_capitals or padded[end - 1].isupper())
            if not has_capitals:
                for size in range(1, min(3, end + 1) + 1):
                    gram = padded[end + 1 - size : end + 1]
                    if gram != " " and gram in self._index:
                        grams.append(self._index[gram])
        return tuple(grams)


class _NormalizedCharacters(dict):
    """The normalized form of characters, for `str.translate`."""

    def __missing__(self, code: int) -> str:
        self[code] = NGram.normalize(chr(code))
        return self[code]


@functools.cache
def _load() -> tuple[Detector, _GramTable]:
    factory = DetectorFactory()
    factory.load_profile(PROFILES_DIRECTORY)
    return factory.create(), _GramTable(factory.word_lang_prob_map)
