"""`t5x_lab infer` over a corpus of short lines: memory while it grows, throughput, and three kills.

    python benchmarks/infer_corpus.py [--lines=1000000] [--kills=3]

A small random byte-level encoder-decoder writes a token after each line of a gzipped file. Each process is killed with SIGKILL
when the next part of the lines is done; the last one ends by itself. All lines are there once, in order.
"""

import argparse
import gzip
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time

COMMAND = [
    sys.executable, "-m", "t5x_lab", "infer", "--model_dir=run", "--input=in.txt.gz", "--output=out.jsonl", "--batch_size=512",
    "--max_tokens=1",
]  # fmt: skip


def memory(process: int) -> float:
    """MiB of anonymous memory that a process holds."""
    fields = dict(line.split(":", 1) for line in pathlib.Path(f"/proc/{process}/status").read_text().splitlines())
    return int(fields["RssAnon"].split()[0]) / 1024


def size_of(file: pathlib.Path) -> int:
    return file.stat().st_size if file.exists() else 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lines", type=int, default=1_000_000)
    parser.add_argument("--kills", type=int, default=3)
    args = parser.parse_args()
    import t5x_lab

    os.chdir(tempfile.mkdtemp())
    sizes = {"emb_dim": 16, "num_heads": 1, "head_dim": 16, "mlp_dim": 16, "num_encoder_layers": 1, "num_decoder_layers": 1}
    t5x_lab.from_gin(["models/byt5/tiny.gin"], [f"TransformerConfig.{name} = {n}" for name, n in sizes.items()]).save("run")
    with gzip.open("in.txt.gz", "wt", compresslevel=1) as file:
        file.writelines(f"{number:x}\n" for number in range(args.lines))
    output, part = pathlib.Path("out.jsonl"), args.lines / (args.kills + 1)
    bytes_of_line = len(json.dumps({"inputs": "fffff", "prediction": "x", "cut": 0})) + 1
    print("   lines done  seconds  lines a second  MiB of anonymous memory", flush=True)
    for kill in range(args.kills + 1):
        start, began, shown = size_of(output), 0.0, time.monotonic()
        process = subprocess.Popen(COMMAND, env={**os.environ, "JAX_PLATFORMS": "cpu"}, stderr=subprocess.DEVNULL)
        while process.poll() is None:
            size, now = size_of(output), time.monotonic()
            began = began or (now if size > start else 0.0)
            if began and now - max(began, shown) >= 3:
                shown, speed = now, (size - start) / bytes_of_line / (now - began)
                row = size / bytes_of_line, now - began, speed, memory(process.pid)
                print("{:13,.0f} {:8.0f} {:15,.0f} {:24.0f}".format(*row), flush=True)
            if kill < args.kills and size / bytes_of_line >= part * (kill + 1):
                process.kill()
                process.wait()
                print(f"killed after about {size / bytes_of_line:,.0f} lines", flush=True)
                break
            time.sleep(0.2)
    assert process.returncode == 0, process.returncode
    with output.open() as file:
        for number, line in enumerate(file):
            assert json.loads(line)["inputs"] == f"{number:x}", f"line {number} is another"
    assert number == args.lines - 1, f"{number + 1} lines of {args.lines}"
    print(f"{args.lines:,} lines, each once, in order, after {args.kills} kills.")


if __name__ == "__main__":
    main()
