"""A real browser for tests, where there is one."""

import html
import json
import re
import subprocess

import pytest
from pictures import CHROMIUM


def found_in_browser(url: str, width: int = 1280) -> dict:
    """Returns the JSON that the page's own script leaves in an element `<pre id="found">`; skips where no browser is installed."""
    if not CHROMIUM:
        pytest.skip("Debian's chromium is not installed: pages are not looked at in a browser")
    options = ["--headless", "--no-sandbox", "--disable-gpu", f"--window-size={width},900", "--virtual-time-budget=30000"]
    done = subprocess.run([CHROMIUM, *options, "--dump-dom", url], capture_output=True, text=True, timeout=300)
    return json.loads(html.unescape(re.search(r'<pre id="found">(.*?)</pre>', done.stdout, re.DOTALL).group(1)))
