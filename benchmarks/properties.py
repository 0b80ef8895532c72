"""Property tests with many other cases than the tests draw.

    python benchmarks/properties.py [--scale=50] [tests/test_ops.py]

The tests draw the same few cases every time. This draws new ones, `scale` times as many.
"""

import argparse
import os
import pathlib
import subprocess
import sys

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--scale", type=int, default=50, help="how many times as many cases as in the tests")
    parser.add_argument("files", nargs="*", default=["tests"], help="files of tests (default: all)")
    args = parser.parse_args()
    root = pathlib.Path(__file__).resolve().parent.parent
    command = [sys.executable, "-m", "pytest", "-m", "hypothesis", "-n", "2", *args.files]
    sys.exit(subprocess.run(command, cwd=root, env={**os.environ, "PROPERTY_SCALE": str(args.scale)}).returncode)
