"""The results of a study in one small archive: its evaluations, and every 50th step of its curves.

    python benchmarks/study_results.py STUDY_DIR ARCHIVE.tar.xz [SEED ...]

Unpacked into a study directory, they are what `t5x_lab study --report` reads. A study whose runs do not continue each other
goes on with the others, if its settings and paths are the same. Only finished runs are archived. Without seeds, those of all.
"""

import io
import json
import pathlib
import sys
import tarfile

KEPT_STEPS = 50


def thinned(metrics: str) -> str:
    """Returns the lines of evaluations, of every 50th step of training, and of the last one."""
    lines = metrics.splitlines()
    of_training = [json.loads(line) for line in lines if json.loads(line).get("split") == "train"]
    last = of_training[-1]["step"] if of_training else None
    is_kept = lambda line: line.get("split") != "train" or line["step"] % KEPT_STEPS == 0 or line["step"] == last
    return "".join(f"{line}\n" for line in lines if is_kept(json.loads(line)))


def main(study_dir: str, archive: str, *seeds: str) -> None:
    folder = pathlib.Path(study_dir)
    markers = sorted((folder / "finished").glob("*.json"))
    of_seeds = [each for each in markers if not seeds or each.stem.endswith(tuple(f"-seed{seed}" for seed in seeds))]
    with tarfile.open(archive, "w:xz") as tar:
        for marker in of_seeds:
            run = folder / "runs" / marker.stem
            metrics = [run / "metrics.jsonl"] if run.exists() else []  # an evaluation has no directory
            for file in [marker, *metrics, *sorted(run.glob("evals/*/*.json"))]:
                text = file.read_text()
                content = (thinned(text) if file.name == "metrics.jsonl" else text).encode()
                member = tarfile.TarInfo(str(file.relative_to(study_dir)))
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
    print(f"{archive}: {len(of_seeds)} runs, {pathlib.Path(archive).stat().st_size:,} bytes")


if __name__ == "__main__":
    main(*sys.argv[1:])
