"""Fills the disk under a run at every stage of it, from its first file to its last checkpoint, and runs it again with room.

The run's directory is a file system of a given size, so that this needs root (`mount -t tmpfs`). For each of many sizes the run
must end with a sentence and status 1 or 2, never with a traceback, and lose nothing that was saved; once there is room the same
command must end with the metrics and the checkpoint of a run that always had it.

    python benchmarks/full_disk.py --sizes=20 --processes=1
"""

import argparse
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "tests"))

import commands
from kill_processes import RUN, lines

STEPS = 6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, default=20)
    parser.add_argument("--processes", type=int, choices=(1, 2), default=1)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        os.environ["JAX_COMPILATION_CACHE_DIR"] = os.path.join(folder, "cache")
        pathlib.Path("whole").mkdir()
        status, output = run("whole", args.processes)
        assert status == 0, output
        most = sum(file.stat().st_blocks * 512 for file in pathlib.Path("whole").rglob("*"))
        bad, endings = 0, {}
        # Half of them in equal steps, half in equal ratios: much is written at first, most is written last.
        shares = [number / (args.sizes // 2) for number in range(1, args.sizes // 2 + 1)]
        sizes = sorted({int(4096 * (most / 4096) ** share) for share in shares} | {int(most * share) for share in shares})
        for size in sizes:
            os.makedirs("disk", exist_ok=True)
            subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size},nr_inodes=100000", "tmpfs", "disk"], check=True)
            try:
                status, output = run("disk/run", args.processes)
                saved = steps_saved("disk/run")
                messages = re.findall(
                    r"^(?:t5x_lab train: |WARNING).*$|^.*could not be (?:saved|written).*$", output, re.MULTILINE
                )
                wrong = []
                if status not in ((0, 1, 2) if size > 0.8 * most else (1, 2)):
                    wrong.append(f"status {status}")
                if re.search("Traceback|Event loop|Fatal|core dumped", output) or (status and not messages):
                    wrong.append("no sentence")
                subprocess.run(["mount", "-o", f"remount,size={3 * most}", "disk"], check=True)
                again, said_again = run("disk/run", args.processes)
                if again:
                    wrong.append(f"with room: status {again}")
                elif lines("disk/run") != lines("whole") or checksums("disk/run") != checksums("whole"):
                    wrong.append("with room: other metrics or another checkpoint")
                elif not set(saved) <= {*steps_saved("disk/run"), *range(STEPS - 3)}:
                    wrong.append("a checkpoint was lost")
                key = re.sub(r"[\d.]+", "N", messages[-1]) if messages else f"status {status}"
                endings.setdefault(key, []).append(size)
                print(f"{size:>10,} bytes: status {status}, saved {saved}; {(messages or ['-'])[-1][:200]}", flush=True)
                if wrong:
                    bad += 1
                    print(
                        "  WRONG: " + "; ".join(wrong) + "\n" + output[-3000:] + "\n---- again:\n" + said_again[-1500:],
                        flush=True,
                    )
            finally:
                subprocess.run(["umount", "-l", "disk"], check=True)
        print(
            f"{len(sizes)} sizes up to {most:,} bytes, {args.processes} process(es): {bad} wrong, {len(endings)} other endings"
        )
        sys.exit(bool(bad))


def run(model_dir: str, processes: int) -> tuple[int, str]:
    """The first process's status and what all of them said."""
    argv = [
        *RUN, f"--gin.MODEL_DIR={model_dir}", f"--gin.TRAIN_STEPS={STEPS}", "--gin.CHECKPOINT_PERIOD=2",
        "--gin.SaveCheckpointConfig.retry_minutes=0.02", f"--gin.MESH=data={processes}",
    ]  # fmt: skip
    for log in pathlib.Path().glob("*log"):
        log.unlink()
    one_device = {"XLA_FLAGS": commands.ON_ONE_DEVICE["XLA_FLAGS"], "NPROC": None}
    started = commands.start_two(*argv) if processes == 2 else [commands.Command(*argv, environment=one_device)]
    statuses = [process.wait(300) for process in started]
    output = "".join(process.output() for process in started)
    commands.end_all()
    return max(statuses), output


def steps_saved(model_dir: str) -> list[int]:
    folder = pathlib.Path(model_dir, "checkpoints")
    return sorted(int(entry.name) for entry in folder.glob("*") if entry.name.isdigit())


def checksums(model_dir: str) -> dict:
    info = json.loads(pathlib.Path(model_dir, "checkpoints", str(STEPS), "info", "metadata").read_text())
    return info["checksums"]


if __name__ == "__main__":
    main()
