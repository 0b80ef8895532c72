"""Seconds of a training step of each run of a study, measured on this machine or bounded by compiling for a TPU slice."""

import dataclasses
import pathlib
import statistics
import subprocess
import tempfile
from collections.abc import Callable

from t5x_lab.config.errors import UserError
from t5x_lab.observe.metrics import read_metrics
from t5x_lab.runs.config.gin_config import GinConfig
from t5x_lab.study.plan import Plan, PlannedRun
from t5x_lab.study.processes import start_process

STEPS = 5  # the first one compiles, and the median of the others counts
# A stage of a measured run starts from fresh parameters: the run that it continues does not exist yet.
_FRESH = ("INITIAL_CHECKPOINT_PATH = None", "RestoreCheckpointConfig.carry = ()", f"TRAIN_STEPS = {STEPS}", "EVALS = ()")


@dataclasses.dataclass(frozen=True)
class StepTime:
    """Time of a training step.

    Attributes:
      seconds: seconds of a step.
      note: how it is known, and whether the step fits the memory of the slice.
    """

    seconds: float
    note: str


def measure_steps(plan: Plan, log: Callable[[str], None], jobs: int = 1) -> dict[str, StepTime]:
    """Trains a few steps of each training of the plan, sequentially. Runs that differ in the seed share a measurement.

    Args:
      plan: the plan.
      log: writes a line.
      jobs: number of processes at a time that the study will have: the measured one has its share of the cores.

    Raises:
      UserError: for a training that fails.
    """

    def measure(run: PlannedRun) -> StepTime:
        log(f"{run.name}: measuring a step")
        with tempfile.TemporaryDirectory() as folder:
            file = pathlib.Path(folder, "run.gin")
            file.write_text("\n".join([run.text, *_FRESH, f'MODEL_DIR = "{folder}/run"']))
            process = start_process(
                ["train", f"--gin_file={file}"], jobs=jobs, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
            )
            errors = process.communicate()[1]
            lines = [line for line in read_metrics(f"{folder}/run") if line["split"] == "train"]
        if process.returncode or len(lines) < STEPS:
            last = (errors.strip().splitlines() or ["no message"])[-1]
            raise UserError(f"A step of {run.name} cannot be measured: {last}")
        return StepTime(statistics.median(line["seconds_per_step"] for line in lines[1:]), "measured")

    return _of_each(plan, measure)


def compile_steps(plan: Plan, topology: str, log: Callable[[str], None]) -> dict[str, StepTime]:
    """Compiles a step of each training for a TPU slice. The seconds are the larger one of two lower bounds, see `compile`.

    Raises:
      UserError: for an unknown topology.
    """
    from t5x_lab.partitioning.topologies import topology_devices
    from t5x_lab.runs.compile import compile_step

    devices = topology_devices(topology, 1)

    def compile_run(run: PlannedRun) -> StepTime:
        log(f"{run.name}: compiling a step")
        config = GinConfig((), ("\n".join([run.text, "INITIAL_CHECKPOINT_PATH = None", "EVALS = ()"]),))
        report = compile_step(config.run(), devices=devices, topology=topology)
        seconds = max((bound for bound in report.floor_seconds.values() if bound), default=float("nan"))
        peak = (report.bytes_per_device["peak"] or 0) / 2**30
        return StepTime(seconds, f"lower bound, {peak:.1f} GiB per device" + ("" if report.fits else ", does not fit"))

    return _of_each(plan, compile_run)


def _of_each(plan: Plan, compute: Callable[[PlannedRun], StepTime]) -> dict[str, StepTime]:
    """Calls a function once for the training runs that differ in their seeds only."""
    times: dict[tuple, StepTime] = {}
    by_name = {}
    for name, run in plan.runs.items():
        if run.stage.command == "train":
            key = (run.stage.name, *run.values.items())
            if key not in times:
                times[key] = compute(run)
            by_name[name] = times[key]
    return by_name
