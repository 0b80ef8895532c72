"""Names of sentinels, by which they are found among the tokens of a vocabulary. Free of TensorFlow."""

from collections.abc import Callable, Sequence
from typing import Any

# Tokens by their number, counted from 0: T5's, mT5's with a leading space, and Gemma's without a use, which take their place.
T5_NAMES = ("<extra_id_{}>", "▁<extra_id_{}>")
NAMES = (*T5_NAMES, "<unused{}>")


def find_sentinels(find: Callable[[str], int | None], names: Sequence[str] = NAMES) -> range:
    """Returns the consecutive ids of the sentinels of a vocabulary, the first one first; empty if it has none.

    Args:
      find: f(token) -> id, None if the vocabulary does not have this token.
      names: names with "{}" for the number, of which the first one that exists counts.
    """
    for name in names:
        first = find(name.format(0))
        if first is not None:
            second = find(name.format(1))
            step = 1 if second == first + 1 else -1
            count = 1
            while find(name.format(count)) == first + step * count:
                count += 1
            return range(first, first + step * count, step)
    return range(0)


def sentinel_pieces(pieces: Any, names: Sequence[str] = NAMES) -> range:
    """Returns the ids of the sentinels among the pieces of a SentencePiece processor. See `find_sentinels`."""

    def find(piece: str) -> int | None:
        id = pieces.PieceToId(piece)  # the unknown id for others
        return id if pieces.IdToPiece(id) == piece else None

    return find_sentinels(find, names)
