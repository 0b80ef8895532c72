"""Token ids of a classification example: segments between start, delimiter and extract token, truncated to a length."""

import dataclasses
from collections.abc import Callable, Sequence

from t5x_lab.config.errors import UserError
from t5x_lab.prompts.classification.config import Texts

Ids = list[int]


@dataclasses.dataclass(frozen=True)
class Sequences:
    """Encodes examples as sequences of token ids.

    Attributes:
      encode: f(text) -> ids.
      tokens: ids of the start, delimiter and extract token.
      length: maximum tokens of a sequence.
      symmetric: whether two segments are encoded in both orders.
      clean: f(text) -> text, applied before encoding. None = unchanged.
    """

    encode: Callable[[str], Sequence[int]]
    tokens: tuple[int, ...]
    length: int
    symmetric: bool = False
    clean: Callable[[str], str] | None = None

    def __call__(self, texts: Texts) -> list[Ids]:
        """Returns one sequence, two for symmetric segments, or one per choice.

        Raises:
          UserError: for a text without tokens, or a length with no room for one token of each text.
        """
        segments = [[self._encode(text, " " * (i > 0)) for i, text in enumerate(segment)] for segment in texts.segments]
        if texts.choices:
            return [self._join([*segments, [self._encode(choice)]]) for choice in texts.choices]
        orders = [segments, segments[::-1]] if self.symmetric else [segments]
        return [self._join(order) for order in orders]

    def _encode(self, text: str, prefix: str = "") -> Ids:
        """Returns the ids of a text after `prefix`, a space if another text precedes it in the segment."""
        cleaned = self.clean(text) if self.clean else text
        ids = list(self.encode(f"{prefix}{cleaned}")) if cleaned.strip() else []
        if not ids:
            reason = " after cleaning (Prompts.clean)" if self.clean and text.strip() else ""
            raise UserError(f"the text {text!r} is empty{reason}; remove the record")
        return ids

    def _join(self, segments: Sequence[Sequence[Ids]]) -> Ids:
        start, delimiter, extract = self.tokens
        parts = [part for segment in segments for part in segment]
        room = self.length - len(segments) - 1
        if room < len(parts):
            raise UserError(
                f'TASK_FEATURE_LENGTHS["inputs"] is {self.length}, which has no room for one token of each of {len(parts)} '
                f"texts and {len(segments) + 1} special tokens. Increase it"
            )
        lengths = iter(truncated_lengths([len(part) for part in parts], room))
        ids = [start]
        for number, segment in enumerate(segments):
            ids += [delimiter] if number else []
            for part in segment:
                ids += part[: next(lengths)]
        return [*ids, extract]


def truncated_lengths(sizes: Sequence[int], room: int) -> list[int]:
    """Returns lengths that sum to at most `room`: the longest texts are truncated to the same length."""
    lengths = list(sizes)
    for rank, i in enumerate(sorted(range(len(sizes)), key=sizes.__getitem__)):
        lengths[i] = min(sizes[i], room // (len(sizes) - rank))
        room -= lengths[i]
    return lengths
