"""A run's life on gs:// and s3://, against servers of both on this machine.

1. What a checkpoint, a restart and an evaluation ask of storage: requests and bytes, beside the bytes that they must move.
2. A run that is killed with SIGKILL at random moments, while requests fail: 503s, slow replies, connections that are closed
   before a reply and within it, credentials that expire for some seconds, listings that lag. In the end its metrics and its
   last checkpoint must be those of a run on a disk that was never killed.

    python benchmarks/object_storage.py --kills=50
"""

import argparse
import os
import pathlib
import random
import re
import sys
import tempfile
import threading
import time
from collections.abc import Sequence

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "tests"))

import commands
from etils import epath
from storage_servers import Request, Storage, storage

from t5x_lab.checkpoints.layout import finished_steps, read_info
from t5x_lab.observe.metrics import read_metrics

RUN = [
    "train", "--gin_file=models/decoder/tiny.gin", "--gin.MIXTURE_OR_TASK_NAME=sotu_full_lm", "--gin.DATA_SHARDS=2",
    '--gin.TASK_FEATURE_LENGTHS={"targets": 64}', "--gin.VOCABULARY=@ByteVocabulary()", "--gin.BATCH_SIZE=8",
    "--gin.TransformerConfig.vocab_size=384", "--gin.DataConfig.shuffle_buffer_size=20", "--gin.DataConfig.eval_steps=2",
]  # fmt: skip
SMALL = ["--gin.TransformerConfig.emb_dim=32", "--gin.TransformerConfig.mlp_dim=64", "--gin.TransformerConfig.head_dim=8"]
RATES = {"503": 0.02, "closed before the reply": 0.01, "closed within the reply": 0.01, "slow by a second": 0.01}
ANSWERS = {"503": 503, "closed before the reply": -1, "closed within the reply": -2}
EXPIRY_RATE, EXPIRED_SECONDS = 0.0005, 3.0  # of requests, after which all are refused for some seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument(
        "--longest", type=float, default=8.0, help="seconds between the first new checkpoint and the kill, at most"
    )
    parser.add_argument("--schemes", nargs="+", choices=("s3", "gs"), default=["s3", "gs"])
    parser.add_argument("--only", choices=("requests", "kills"))
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    failed = False
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        for scheme in args.schemes:
            with storage(scheme) as bucket:
                if args.only != "kills":
                    print_requests(bucket)
                if args.only != "requests":
                    failed |= not survives_kills(bucket, args.kills, args.longest, random.Random(args.seed))
    commands.end_server()
    sys.exit(failed)


# ---- requests


def print_requests(bucket: Storage) -> None:
    """Prints requests and bytes of each part of a run of 2.1 million parameters."""
    directory = f"{bucket.url}/requests"
    period = ["--gin.CHECKPOINT_PERIOD=2", "--gin.EVAL_PERIOD=1000", f"--gin.MODEL_DIR={directory}"]
    size = ["--gin.TransformerConfig.emb_dim=256", "--gin.TransformerConfig.mlp_dim=512"]
    start = [*RUN, *size, *period, "--gin.TRAIN_STEPS=2"]
    parts = {"start, checkpoint, end": requests_of(bucket, start)}
    saved = {name: len(data) for name, data in bucket.objects("requests/checkpoints/2").items()}
    stored = lambda part: sum(size for name, size in saved.items() if f"/2/{part}" in name)
    parts["restart, checkpoint, end"] = requests_of(bucket, [*start[:-1], "--gin.TRAIN_STEPS=4"])
    parts["evaluation"] = requests_of(bucket, ["eval", f"--model_dir={directory}", "--step=latest"])
    print(
        f"\n{bucket.url}: a checkpoint of {len(saved)} objects, {stored(''):,} bytes, {stored('params'):,} of them parameters"
    )
    print(f"{'':26} {'requests':>9} {'reads':>7} {'writes':>7} {'bytes read':>12} {'bytes written':>14}  at least")
    least = {
        "start, checkpoint, end": (0, stored("")),
        "restart, checkpoint, end": (stored(""), stored("")),
        "evaluation": (stored("params"), 0),
    }
    for name, requests in parts.items():
        checkpoint = [request for request in requests if "checkpoints" in request.path]
        reads, writes = ([r for r in checkpoint if r.is_write == write] for write in (False, True))
        read, written = sum(r.received for r in reads), sum(r.sent for r in writes)
        print(
            f"{name:26} {len(requests):9} {len(reads):7} {len(writes):7} {read:12,} {written:14,}  "
            f"{least[name][0]:,} and {least[name][1]:,}"
        )
    print("Reads and writes are those of checkpoints; bytes are those of their bodies.", flush=True)


def requests_of(bucket: Storage, argv: Sequence[str]) -> list[Request]:
    before = len(bucket.requests)
    done = commands.run(*argv, environment=bucket.environment)
    if done.returncode:
        sys.exit(done.stderr[-2000:])
    return bucket.requests[before:]


# ---- kills


class Faults:
    """The faults of a server: some of all requests, and credentials that expire now and then.

    Attributes:
      counts: how often each occurred.
    """

    def __init__(self, rng: random.Random):
        self._rng, self._lock, self._expired_until = rng, threading.Lock(), 0.0
        self.counts = dict.fromkeys([*RATES, "expired"], 0)

    def __call__(self, method: str, path: str) -> int | None:
        with self._lock:
            now = time.monotonic()
            if now < self._expired_until:
                self.counts["expired"] += 1
                return 401
            if self._rng.random() < EXPIRY_RATE:
                self._expired_until = now + EXPIRED_SECONDS
            draw, kind = self._rng.random(), None
            for name, rate in RATES.items():
                draw -= rate
                if draw < 0:
                    kind = name
                    self.counts[name] += 1
                    break
        if kind == "slow by a second":
            time.sleep(1)
        return ANSWERS.get(kind or "")


def survives_kills(bucket: Storage, kills: int, longest: float, rng: random.Random) -> bool:
    """Returns whether a run that is killed again and again is that of a disk, and prints what happened."""
    run = [*RUN, *SMALL, "--gin.CHECKPOINT_PERIOD=5", "--gin.EVAL_PERIOD=20"]
    faults = bucket.fault = Faults(rng)
    bucket.listing_lag = 1.0
    ended = 0
    for kill in range(kills):
        command = commands.Command(
            *run, f"--gin.MODEL_DIR={bucket.url}/run", "--gin.TRAIN_STEPS=100000", log=f"{bucket.url[:2]}{kill}",
            environment=bucket.environment,
        )  # fmt: skip
        before = latest_step(bucket)
        command.wait_until(lambda: latest_step(bucket) > before, pause=0.1)
        time.sleep(rng.random() * longest)
        if not command.is_running():
            ended += 1
            print(command.output().strip().splitlines()[-1], flush=True)
        command.kill()
        command.wait()
        if (kill + 1) % 10 == 0:
            print(f"{kill + 1} kills, checkpoint of step {latest_step(bucket)}", flush=True)
    steps = latest_step(bucket) + 10
    for directory, environment in ((f"{bucket.url}/run", bucket.environment), (f"whole_{bucket.url[:2]}", None)):
        done = commands.run(*run, f"--gin.MODEL_DIR={directory}", f"--gin.TRAIN_STEPS={steps}", environment=environment)
        if done.returncode:
            sys.exit(done.stderr[-2000:])
    copy, whole = f"copy_{bucket.url[:2]}", f"whole_{bucket.url[:2]}"
    bucket.download("run", copy)
    a, b = lines(copy), lines(whole)
    different = [step for step in b if a.get(step) != b[step]]
    sums = [read_info(epath.Path(directory, f"checkpoints/{steps}").absolute())["checksums"] for directory in (copy, whole)]
    print(
        f"{bucket.url}: {kills} kills, {len(bucket.requests):,} requests answered, faults {faults.counts}\n"
        f"{ended} starts failed with a sentence; {len(b)} steps and evaluations, {len(a)} in the killed run, {len(different)} "
        f"of them different\ncheckpoints {finished_steps(copy)}, on the disk {finished_steps(whole)}; parameters and "
        f"optimizer of step {steps} {'equal' if sums[0] == sums[1] else 'DIFFERENT'}",
        flush=True,
    )
    return not different and len(a) == len(b) and sums[0] == sums[1]


def latest_step(bucket: Storage) -> int:
    """Returns the step of the latest whole checkpoint."""
    committed = [re.fullmatch(r"run/checkpoints/(\d+)/commit_success.txt", name) for name in bucket.names("run/checkpoints")]
    return max((int(match[1]) for match in committed if match), default=0)


def lines(model_dir: str) -> dict[tuple[int, str], tuple]:
    names = ("loss", "grad_norm", "tokens_processed", "raw_tokens")
    return {(line["step"], line["split"]): tuple(line.get(name) for name in names) for line in read_metrics(model_dir)}


if __name__ == "__main__":
    main()
