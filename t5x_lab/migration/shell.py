"""Words of shell commands, with quotes, substitutions and continued lines, found without running anything."""

import re

_SPACE = re.compile(r"(?:[ \t]|\\\r?\n)+")
_END = re.compile(r"[ \t]*(?:\r?\n|$|[;|&<>)]|\d[<>]|#)")
_QUOTED = re.compile(r"""'([^']*)'|"((?:\\.|[^"\\])*)"|\\(.)""", re.DOTALL)
_CLOSING = {"(": ")", "{": "}"}


def read_words(text: str, position: int) -> list[tuple[int, int]]:
    """Returns start and end of each word from a position to the end of the command.

    The words end at the first character that is not understood, see `command_end`.
    """
    spans = []
    while space := _SPACE.match(text, position):
        start = space.end()
        if re.match(r"\d?[<>]|#", text[start:]):  # output is redirected, or a comment
            break
        end = _word_end(text, start)
        if end is None or end == start:
            break
        spans.append((start, end))
        position = end
    return spans


def command_end(text: str, position: int) -> bool:
    """Returns whether a command, or its part before a redirection, ends at a position."""
    return _END.match(text, position) is not None


def _word_end(text: str, position: int) -> int | None:
    """Returns where the word at a position ends; None if a quote or a parenthesis is not closed."""
    while position < len(text):
        character = text[position]
        if character == "\\":
            if re.match(r"\\\r?\n", text[position:]):
                return position
            position += 2
        elif character in "'\"`" or text.startswith(("$(", "${"), position):
            end = _closed(text, position)
            if end is None:
                return None
            position = end
        elif character in " \t\r\n;|&<>()":
            return position
        else:
            position += 1
    return position


def _closed(text: str, position: int) -> int | None:
    """Returns the position after a quoted text or a substitution that starts here; None if it is not closed."""
    if text[position] in "'`":
        return text.find(text[position], position + 1) + 1 or None
    closing = '"' if text[position] == '"' else _CLOSING[text[position + 1]]
    opening = text[position + 1] if closing != '"' else None
    depth, position = 1, position + (1 if opening is None else 2)
    while position < len(text):
        character = text[position]
        if character == "\\":
            position += 2
            continue
        if character == closing:
            depth -= 1
            if not depth:
                return position + 1
        elif character == opening:
            depth += 1
        elif text.startswith(("$(", "${"), position) or (opening and character in "'\"`"):
            inner = _closed(text, position)
            if inner is None:
                return None
            position = inner
            continue
        position += 1
    return None


def is_quoted(line: str) -> bool:
    """Returns whether a quote is open at the end of a text that starts outside of quotes."""
    return re.search("['\"]", _QUOTED.sub("", line)) is not None


def unquote(word: str) -> str:
    """Returns a word without the shell's quotes. Variables and substitutions stay."""

    def plain(match: re.Match) -> str:
        if match[2] is not None:
            return re.sub(r'\\(["\\`$])', r"\1", match[2])
        return match[1] if match[1] is not None else "" if match[3] == "\n" else match[3]

    return _QUOTED.sub(plain, word)
