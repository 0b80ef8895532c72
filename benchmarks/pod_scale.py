"""Bytes per chip of the training step of T5 1.1 XL and XXL and of the study's models, compiled without a chip; writes docs/.

    pip install libtpu && python benchmarks/pod_scale.py [--only=study|xl|xxl] [--policies=products,boundaries]

Each program is the run's own step, as `t5x_lab compile` compiles it. T5X's figures are those of its `scalable_t5`, measured the
same way (same libtpu, temporaries per chip as XLA's memory analysis gives them). A program takes one to five minutes on two
cores; results are kept in benchmarks/pod_scale.json, to which a second run adds what is missing (remove the file to compile all
again), and the page and its plot are made of all.
"""

import argparse
import dataclasses
import json
from pathlib import Path

from t5x_lab.partitioning.topologies import disable_accelerators, topology_devices

disable_accelerators()

from t5x_lab.networks.config import REMAT_POLICIES
from t5x_lab.observe.hardware import GiB
from t5x_lab.runs.compile import Report, compile_step
from t5x_lab.runs.config.gin_config import GinConfig

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "pod_scale.json"
PAGE = ROOT / "docs" / "pod_scale.md"
PLOT = ROOT / "docs" / "pod_scale.png"

COMMON = ["TRAIN_STEPS = 1", 'MODEL_DIR = "unused"', 'MIXTURE_OR_TASK_NAME = "c4"']
T5 = {"xl": "fsdp=16,tensor=4", "xxl": "fsdp=8,tensor=8"}
# Temporaries in GiB of T5X's scalable_t5 under its two policies, on the same data x model meshes.
T5X = {"xl": {"products": 4.81, "boundaries": 1.51}, "xxl": {"products": 14.38, "boundaries": 5.52}}
STUDY = {
    "causal decoder": ("models/decoder/xxl.gin", "objectives/full_lm.gin", ['TransformerConfig.relative_bias = "per_layer"']),
    "prefix decoder": (
        "models/decoder/xxl.gin",
        "objectives/prefix_lm_decoder.gin",
        ['TransformerConfig.relative_bias = "per_layer"', 'TransformerConfig.architecture = "prefix_decoder"'],
    ),
    "encoder-decoder": (
        "models/t5_1_1/xxl.gin",
        "objectives/span_corruption.gin",
        ["TransformerConfig.logits_via_embedding = True"],
    ),
}
SLICES = ("v4:4x4x4", "v5p:4x4x4")


def t5(size: str, policy: str, mesh: str) -> Report:
    bindings = ["BATCH_SIZE = 256", f'MESH = "{mesh}"', f'TransformerConfig.remat_policy = "{policy}"']
    files = [f"models/t5_1_1/{size}.gin", "objectives/span_corruption.gin"]
    run = GinConfig(files, [*COMMON, *bindings]).run()
    return compile_step(run, devices=topology_devices("v4:4x4x4"), topology="v4:4x4x4")


def study(name: str, slice_name: str) -> Report:
    model, objective, extra = STUDY[name]
    bindings = ["BATCH_SIZE = 2048", 'MESH = "fsdp=-1"', 'TransformerConfig.remat_policy = "boundaries"', *extra]
    run = GinConfig([model, objective], [*COMMON, *bindings]).run()
    return compile_step(run, devices=topology_devices(slice_name), topology=slice_name)


def programs(only: str | None, policies: list[str]):
    """(key, function that compiles it)"""
    for size, mesh in T5.items():
        for policy in policies:
            if only in (None, size):
                yield f"{size} {mesh} {policy}", lambda size=size, policy=policy, mesh=mesh: t5(size, policy, mesh)
    for name in STUDY:
        for slice_name in SLICES:
            if only in (None, "study"):
                yield f"{name} {slice_name}", lambda name=name, slice_name=slice_name: study(name, slice_name)


STUDY_TEXT = """\
# TPU pod memory and step-time estimates

Memory and lower bounds of the step time for large models on TPU pods. The page is written by `python benchmarks/pod_scale.py`.
All numbers are for the training step of `t5x_lab train`, compiled with libtpu for TPU slices without the hardware. Memory is
in GiB per chip, as reported by XLA's memory analysis. To compile your own model, see [scale.md](scale.md).

## Models of Wang et al.

2,048 sequences of 626 tokens (512 + 114 for the encoder-decoder), bfloat16 activations, Adafactor, parameters and optimizer
state sharded over all 64 chips (`MESH = "fsdp=-1"`), `remat_policy = "boundaries"`.

| model | parameters | slice | arguments | temporaries | peak | memory of a chip | fits | minimum step time (compute) |
|---|---|---|---|---|---|---|---|---|"""

T5_TEXT = """
## T5 1.1 XL and XXL compared with T5X

256 sequences of 512 + 114 tokens, bfloat16 activations, Adafactor, 64 chips of TPU v4. T5X's `minimal` policy stores the
outputs of matrix products, like `products` here. Its `full` policy stores only the boundaries between layers. The column
"recomputed" has the recomputed FLOPs as a fraction of the model's FLOPs. In the plot, T5X's two points are placed at the
recomputed FLOPs of the corresponding policies here. T5X computes attention scores once less, which is 0.6 % (XL) and 0.3 %
(XXL) of the FLOPs.

| model | mesh | policy | recomputed | temporaries, GiB | T5X, GiB | ratio |
|---|---|---|---|---|---|---|"""


def page(reports: dict[str, dict]) -> str:
    lines = [STUDY_TEXT]
    for key, report in reports.items():
        name, _, slice_name = key.rpartition(" ")
        if name in STUDY:
            size = report["bytes_per_device"]
            columns = [name, f"{report['num_parameters']:,}", slice_name]
            columns += [f"{(size[part] or 0) / GiB:.2f}" for part in ("arguments", "temporaries", "peak", "limit")]
            columns += ["yes" if report["fits"] else "no", f"{report['floor_seconds']['compute']:.2f} s"]
            lines.append(f"| {' | '.join(columns)} |")
    lines.append(T5_TEXT)
    for size, mesh in T5.items():
        for policy in REMAT_POLICIES:
            report = reports.get(f"{size} {mesh} {policy}")
            if report:
                memory = (report["bytes_per_device"]["temporaries"] or 0) / GiB
                t5x_memory = T5X[size].get(policy)
                beside = f"{t5x_memory} | {memory / t5x_memory:.2f}" if t5x_memory else " | "
                again = report["recomputed_flops_per_step"] / report["model_flops_per_step"]
                lines.append(f"| {size} | {mesh} | `{policy}` | {100 * again:.1f} % | {memory:.2f} | {beside} |")
    return "\n".join([*lines, "", "![Memory against recomputed FLOPs](pod_scale.png)", ""])


def plot(reports: dict[str, dict]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for panel, (size, mesh) in zip(panels, T5.items(), strict=True):
        points = {}
        for policy in REMAT_POLICIES:
            report = reports.get(f"{size} {mesh} {policy}")
            if report and report["fits"] and policy != "everything":
                again = 100 * report["recomputed_flops_per_step"] / report["model_flops_per_step"]
                points[policy] = again, report["bytes_per_device"]["temporaries"] / GiB
        if not points:
            continue
        ordered = sorted(points.values())
        panel.plot(*zip(*ordered, strict=True), "o-", label="t5x_lab")
        for policy, (x, y) in points.items():
            panel.annotate(policy, (x, y), textcoords="offset points", xytext=(4, 6), fontsize=8)
        shared = [policy for policy in T5X[size] if policy in points]
        panel.plot([points[policy][0] for policy in shared], [T5X[size][policy] for policy in shared], "s--", label="T5X")
        panel.set(title=f"T5 1.1 {size.upper()}, {mesh}", xlabel="recomputed FLOPs, % of the model's", ylim=(0, None))
        panel.set_ylabel("temporaries, GiB per chip")
        panel.legend()
    figure.savefig(PLOT, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=["study", *T5])
    parser.add_argument("--policies", default=",".join(policy for policy in REMAT_POLICIES if policy != "everything"))
    args = parser.parse_args()
    reports = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for key, compiled in programs(args.only, args.policies.split(",")):
        if key in reports:
            continue
        report = reports[key] = dataclasses.asdict(compiled())
        size = report["bytes_per_device"]
        print(f"{key}: temporaries {(size['temporaries'] or 0) / GiB:.3f} GiB, fits {report['fits']}", flush=True)
        RESULTS.write_text(json.dumps(reports, indent=1) + "\n")
    PAGE.write_text(page(reports))
    plot(reports)


if __name__ == "__main__":
    main()
