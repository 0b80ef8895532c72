"""Pictures of a run's report and of pages of the site, as a browser shows them: wide and on a telephone, light and dark.

make docs && python docs/site/pictures.py runs/demo/report.html      # docs/pictures/<page>.png, home.png of the report
"""

import pathlib
import shutil
import subprocess
import sys
import tempfile

from PIL import Image

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
DOCS = pathlib.Path(__file__).resolve().parents[1]
PAGES = {
    "start": "index.html",
    "network": "custom/network/index.html",
    "notebook": "notebooks/train_and_look/index.html",
    "gin": "reference/gin/index.html",
    "python": "reference/python/runs/index.html",
}
WIDE, TELEPHONE, HEIGHT = 1280, 390, 800
HOME = (0, 860, 1000, 1555)  # the first charts of the demo's report, whole
GAP = 12


def main() -> None:
    if CHROMIUM is None or len(sys.argv) != 2:
        sys.exit("Usage: pictures.py REPORT.html, where chromium is installed (Debian: apt-get install chromium).")
    site = DOCS.parent / "site"
    pages = {"report": pathlib.Path(sys.argv[1]).resolve(), **{name: site / page for name, page in PAGES.items()}}
    (DOCS / "pictures").mkdir(exist_ok=True)
    for name, page in pages.items():
        if not page.exists():
            sys.exit(f"{page} is not there: run `make docs` first.")
        sheet(page.as_uri()).save(DOCS / "pictures" / f"{name}.png", optimize=True)
    home = screenshot(pages["report"].as_uri(), *HOME[2:], dark=False).crop(HOME)
    home.quantize(256, kmeans=2).save(DOCS / "pictures" / "home.png", optimize=True)


def sheet(url: str) -> Image.Image:
    """Four views of a page side by side: wide at half its size, then of a telephone; each light and dark."""
    wide = [screenshot(url, WIDE, 2 * HEIGHT, dark).resize((WIDE // 2, HEIGHT)) for dark in (False, True)]
    views = [*wide, *(screenshot(url, TELEPHONE, HEIGHT, dark) for dark in (False, True))]
    whole = Image.new("RGB", (sum(view.width + GAP for view in views) - GAP, HEIGHT), "gray")
    x = 0
    for view in views:
        whole.paste(view, (x, 0))
        x += view.width + GAP
    return whole.quantize(256, kmeans=2)


def screenshot(url: str, width: int, height: int, dark: bool) -> Image.Image:
    """The page in a frame of that size, for a browser's window cannot be as narrow as a telephone."""
    frame = f'<body style="margin:0"><iframe src="{url}" style="border:0;width:{width}px;height:{height}px"></iframe>'
    with tempfile.TemporaryDirectory() as folder:
        around, picture = pathlib.Path(folder, "around.html"), pathlib.Path(folder, "picture.png")
        around.write_text(frame)
        look = [f"--window-size={max(width, 600)},{height}", "--hide-scrollbars", "--virtual-time-budget=8000"]
        look += ["--force-dark-mode", "--blink-settings=preferredColorScheme=0"] if dark else []
        command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", *look, f"--screenshot={picture}", around.as_uri()]
        subprocess.run(command, check=True, capture_output=True)
        return Image.open(picture).convert("RGB").crop((0, 0, width, height))


if __name__ == "__main__":
    main()
