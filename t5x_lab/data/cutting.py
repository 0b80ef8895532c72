"""Token ids cut to a length, at either end."""

Ids = list[int]


def cut_left(ids: Ids, length: int | None, kept: int = 0) -> Ids:
    """The last ids, after the first `kept` ones: `length` in all, or all."""
    return ids if length is None or len(ids) <= length else [*ids[:kept], *ids[len(ids) - (length - kept) :]]


def cut_right(ids: Ids, length: int | None, ends: tuple[int, ...]) -> Ids:
    """The first ids, and the end token behind them where there is one: `length` in all, or all."""
    if length is None or len(ids) <= length:
        return ids
    return [*ids[: length - 1], ids[-1]] if ids[-1] in ends else ids[:length]
