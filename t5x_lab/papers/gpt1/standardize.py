"""GPT-1's text cleaning before BPE (Radford et al. 2018, section 4.1, and their code)."""

import re

_EQUIVALENTS = str.maketrans({"—": "-", "–": "-", "―": "-", "…": "...", "´": "'"})
_RUN = re.compile(r"""(([-~!";?+,)(\\/*[\]}{|_])\2*)""")  # a run of one mark
_LINES, _SPACES = re.compile(r"\s*\n\s*"), re.compile(r"[^\S\n]+")


def standardize(text: str) -> str:
    """Unifies dashes, ellipses and apostrophes, and puts single spaces around runs of punctuation and line breaks.

    Bind it in gin by reference, `TextFiles.clean = @standardize` or `Prompts.clean = @standardize`. Case is not changed.

    Args:
      text: a document.
    """
    text = _RUN.sub(r" \1 ", text.translate(_EQUIVALENTS))
    return _SPACES.sub(" ", _LINES.sub(" \n ", text)).strip()
