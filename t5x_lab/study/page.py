"""The report of a study as an HTML page of its own, with its figures inside."""

import base64
import pathlib
from collections.abc import Sequence

import markdown

PAGE = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>Study</title>
<style>
body {{ font: 15px/1.5 system-ui, sans-serif; max-width: 75em; margin: 2em auto; padding: 0 1em; color: #222; }}
table {{ border-collapse: collapse; margin: 1em 0; display: block; overflow-x: auto; }}
th, td {{ padding: .25em .75em; border-bottom: 1px solid #ddd; }}
img {{ max-width: 100%; }}
pre {{ overflow-x: auto; background: #f5f5f5; padding: 1em; }}
</style></head><body>
{body}
</body></html>
"""


def to_html(text: str, folder: pathlib.Path, figures: Sequence[str]) -> str:
    """Returns a Markdown text as HTML.

    Args:
      text: the text.
      folder: folder of the figures.
      figures: names of the PNG files in the text. The SVG files beside them are put into the page.
    """
    converter = markdown.Markdown(extensions=["tables", "fenced_code"])
    converter.preprocessors.deregister("html_block")  # names of cells are texts, not HTML
    converter.inlinePatterns.deregister("html")
    body = converter.convert(text)
    for figure in figures:
        image = base64.b64encode((folder / figure).with_suffix(".svg").read_bytes()).decode()
        body = body.replace(f'src="{figure}"', f'src="data:image/svg+xml;base64,{image}"')
    return PAGE.format(body=body)
