"""Kills `t5x_lab infer` over one data set again and again: the output is that of a run which never was, to the byte.

    python benchmarks/kill_infer.py [--kills=20] [--lines=6000]

A random byte-level encoder-decoder predicts, sampling, after lines of random lengths. Each process is killed with SIGKILL at a
random moment of its work, some of them while a chunk is written.
"""

import argparse
import json
import os
import pathlib
import random
import signal
import subprocess
import sys
import tempfile
import time

COMMAND = [sys.executable, "-m", "t5x_lab", "infer", "--model_dir=run", "--input=in.txt", "--batch_size=4", "--max_tokens=12"]
SAMPLING = ["--temperature=1.0", "--seed=7"]


def infer(output: str) -> subprocess.Popen:
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    return subprocess.Popen([*COMMAND, *SAMPLING, f"--output={output}"], env=environment, stderr=subprocess.DEVNULL)


def killed(process: subprocess.Popen, output: pathlib.Path, rng: random.Random) -> bool:
    """Kills it some time after its first chunk; False where it was done before."""
    before = output.stat().st_size if output.exists() else 0
    while process.poll() is None and (not output.exists() or output.stat().st_size == before):
        time.sleep(0.002)
    until = time.monotonic() + rng.uniform(0.0, 0.6)
    while process.poll() is None and time.monotonic() < until:
        time.sleep(0.002)
    if process.poll() is not None:
        return False
    process.send_signal(signal.SIGKILL)
    process.wait()
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--lines", type=int, default=6000)
    args = parser.parse_args()
    import t5x_lab

    rng = random.Random(0)
    os.chdir(tempfile.mkdtemp())
    sizes = ["TransformerConfig.emb_dim = 64", "TransformerConfig.num_heads = 4", "TransformerConfig.head_dim = 16"]
    t5x_lab.from_gin(["models/byt5/tiny.gin"], sizes, seed=0).save("run")
    texts = [f"{rng.randrange(10**6)} " * rng.randint(1, 8) for _ in range(args.lines)]
    pathlib.Path("in.txt").write_text("\n".join(texts) + "\n")
    output, kills, lines, torn = pathlib.Path("out.jsonl"), 0, 0, 0
    while kills < args.kills:
        if not killed(infer(str(output)), output, rng):
            print(f"All {args.lines} lines were done after {kills} kills; give more --lines.")
            break
        kills += 1
        whole = output.read_bytes()
        torn += not whole.endswith(b"\n")
        print(f"kill {kills}: {len(whole.splitlines())} lines, {len(whole.splitlines()) - lines} more", flush=True)
        lines = len(whole.splitlines())
    assert infer(str(output)).wait() == 0 and infer("whole.jsonl").wait() == 0
    assert output.read_bytes() == pathlib.Path("whole.jsonl").read_bytes(), "the outputs differ"
    inputs = [json.loads(line)["inputs"] for line in output.open()]
    assert inputs == texts, "an example is missing or there twice"
    print(f"{kills} kills, {torn} in the middle of a line: {len(inputs)} examples, each once, equal to the byte.")


if __name__ == "__main__":
    main()
