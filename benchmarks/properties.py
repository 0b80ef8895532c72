"""The property tests with many other cases than the tests draw: `python benchmarks/properties.py [--scale=50]`.

The tests draw the same few cases every time; here cases are drawn anew, so many times as many.
"""

import argparse
import os
import pathlib
import subprocess
import sys

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scale", type=int, default=50, help="how many times as many cases as in the tests")
    args = parser.parse_args()
    root = pathlib.Path(__file__).resolve().parent.parent
    command = [sys.executable, "-m", "pytest", "-m", "hypothesis", "-n", "2", str(root / "tests")]
    sys.exit(subprocess.run(command, cwd=root, env={**os.environ, "PROPERTY_SCALE": str(args.scale)}).returncode)
