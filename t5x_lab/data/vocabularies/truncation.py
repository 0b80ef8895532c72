"""Truncation of token ids at either end."""

Ids = list[int]


def cut_left(ids: Ids, length: int | None, prefix: int = 0) -> Ids:
    """Truncates ids to `length` from the left, after the first `prefix` ids, which stay. None = unlimited."""
    return ids if length is None or len(ids) <= length else [*ids[:prefix], *ids[len(ids) - (length - prefix) :]]


def cut_right(ids: Ids, length: int | None, stop_ids: tuple[int, ...]) -> Ids:
    """Truncates ids to `length` from the right, before a final stop id. None = unlimited."""
    if length is None or len(ids) <= length:
        return ids
    return [*ids[: length - 1], ids[-1]] if ids[-1] in stop_ids else ids[:length]
