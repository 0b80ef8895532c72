"""A Markdown text as an HTML page of its own, with its figures inside: the reports of studies and corpora."""

import base64
import html
from collections.abc import Mapping

import markdown

PAGE = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title>
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


def to_html(title: str, text: str, figures: Mapping[str, bytes]) -> str:
    """Returns a Markdown text as HTML.

    Args:
      title: title of the page.
      text: the text.
      figures: SVG images by the names that the text has for them, such as "curves.png".
    """
    converter = markdown.Markdown(extensions=["tables", "fenced_code"])
    converter.preprocessors.deregister("html_block")  # names of cells are texts, not HTML
    converter.inlinePatterns.deregister("html")
    body = converter.convert(text)
    for name, svg in figures.items():
        body = body.replace(f'src="{name}"', f'src="data:image/svg+xml;base64,{base64.b64encode(svg).decode()}"')
    return PAGE.format(title=html.escape(title), body=body)
