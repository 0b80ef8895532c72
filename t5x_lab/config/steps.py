"""Steps in the names of files and directories."""

MAX_STEP = 2**63 - 1


def parse_step(name: str) -> int | None:
    """Returns the step that a name such as "1000" stands for; None for other names, also other digits than 0 to 9."""
    if not (name.isascii() and name.isdigit() and len(name) < 20):
        return None
    return step if (step := int(name)) <= MAX_STEP else None


def is_step(value: object) -> bool:
    """Returns whether a value from a file is a step."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_STEP
