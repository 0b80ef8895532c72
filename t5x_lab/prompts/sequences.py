"""Token ids of an example that is classified: segments between start, delimiter and extract token, cut to a length."""

import dataclasses
from collections.abc import Callable, Sequence

from t5x_lab.config.errors import UserError
from t5x_lab.prompts.classification import Texts

Ids = list[int]


@dataclasses.dataclass(frozen=True)
class Sequences:
    """Makes the sequences of examples.

    Attributes:
      encode: f(text) -> its ids.
      tokens: start, delimiter, extract.
      length: of the longest sequence.
      symmetric: whether two segments are read in both orders.
      clean: f(text) -> what is read of it; None = all, as it is.
    """

    encode: Callable[[str], Sequence[int]]
    tokens: tuple[int, ...]
    length: int
    symmetric: bool = False
    clean: Callable[[str], str] | None = None

    def __call__(self, texts: Texts) -> list[Ids]:
        """One sequence; of symmetric segments two, and of choices one of each.

        Raises:
          UserError: for a text without a token, and a length that leaves no room for one of each text.
        """
        segments = [[self._ids(text, " " * (i > 0)) for i, text in enumerate(segment)] for segment in texts.segments]
        if texts.choices:
            return [self._joined([*segments, [self._ids(choice)]]) for choice in texts.choices]
        orders = [segments, segments[::-1]] if self.symmetric else [segments]
        return [self._joined(order) for order in orders]

    def _ids(self, text: str, before: str = "") -> Ids:
        """Of a text, behind a space where another one stands before it."""
        read = self.clean(text) if self.clean else text
        ids = list(self.encode(f"{before}{read}")) if read.strip() else []
        if not ids:
            after = " once it is cleaned (Prompts.clean)" if self.clean and text.strip() else ""
            raise UserError(f"the text {text!r} is empty{after}; leave the record out")
        return ids

    def _joined(self, segments: Sequence[Sequence[Ids]]) -> Ids:
        start, delimiter, extract = self.tokens
        parts = [part for segment in segments for part in segment]
        room = self.length - len(segments) - 1
        if room < len(parts):
            raise UserError(
                f'TASK_FEATURE_LENGTHS["inputs"] is {self.length}, which leaves no token of each of {len(parts)} texts between '
                f"{len(segments) + 1} others. Give it more"
            )
        kept = iter(shares([len(part) for part in parts], room))
        found = [start]
        for number, segment in enumerate(segments):
            found += [delimiter] if number else []
            for part in segment:
                found += part[: next(kept)]
        return [*found, extract]


def shares(sizes: Sequence[int], room: int) -> list[int]:
    """How many tokens of each stay, so that they are at most `room` together: the longest are cut, to the same length."""
    kept = list(sizes)
    for rank, i in enumerate(sorted(range(len(sizes)), key=sizes.__getitem__)):
        kept[i] = min(sizes[i], room // (len(sizes) - rank))
        room -= kept[i]
    return kept
