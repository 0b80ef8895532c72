"""Names of T5X with one equivalent, or none, by the table of names."""

from collections.abc import Iterator

from t5x_lab.config.t5x_names import PROJECT_MACROS, TABLE, UNCHANGED_PARAMETERS, Row, expand_names
from t5x_lab.migration.steps import Rule, gone, to


def _rule(row: Row) -> Rule | None:
    """Returns what bindings of a row's names become; None for a row that is for people."""
    if not row.equivalents:
        return gone(_sentence(row.note))
    is_name = "." in row.equivalents or row.equivalents.isupper()
    return to(row.equivalents, *row.defaults) if is_name and "," not in row.equivalents else None


def _sentence(note: str) -> str:
    """Returns a note that begins with a capital letter, if it begins with a word."""
    return note[0].upper() + note[1:] if note.split()[0].isalpha() else note


def _rules() -> Iterator[tuple[tuple[str, str], Rule]]:
    yield from ((("", name), to(name)) for name in UNCHANGED_PARAMETERS)
    for topic, rows in TABLE.items():
        for row in rows if topic != PROJECT_MACROS else ():
            if rule := _rule(row):
                yield from ((("", name), rule) for name in expand_names(row.t5x_names))


RULES = dict(_rules())
