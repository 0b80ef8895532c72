"""Text as GPT-1 has it before its byte pairs (Radford et al. 2018, section 4.1, and their code)."""

import re

_ALIKE = str.maketrans({"—": "-", "–": "-", "―": "-", "…": "...", "´": "'"})
_RUN = re.compile(r"""(([-~!";?+,)(\\/*[\]}{|_])\2*)""")  # of one mark
_LINES, _SPACES = re.compile(r"\s*\n\s*"), re.compile(r"[^\S\n]+")


def standardize(text: str) -> str:
    """One kind of dash, of ellipsis and of apostrophe; spaces around runs of a punctuation mark and ends of lines, and no
    two of them. For `TextFiles.clean` and `Prompts.clean`; letters keep their case, which is the vocabulary's affair.

    Args:
      text: of a document; in gin the function is named without it: @standardize.
    """
    text = _RUN.sub(r" \1 ", text.translate(_ALIKE))
    return _SPACES.sub(" ", _LINES.sub(" \n ", text)).strip()
