"""Execution of a study on this machine: every run in a process of its own, each after the run that it continues.

The state of a study is in its directory alone. A run whose command has ended with status 0 has a file in `finished/`. It is not
started again while its settings stay the same. All other runs are started again, and continue from their checkpoints.
"""

import contextlib
import dataclasses
import hashlib
import os
import pathlib
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping

from t5x_lab.config.json_files import read_dictionary, write_atomically, write_json
from t5x_lab.config.locks import hold_lock
from t5x_lab.config.parent_process import PARENT
from t5x_lab.observe.console import duration
from t5x_lab.observe.metrics import read_metrics
from t5x_lab.observe.owner import OWNER, read_owner
from t5x_lab.study.plan import Plan, PlannedRun
from t5x_lab.study.processes import start_process

GIN, LOGS, PENDING, FINISHED, FAILED = "gin", "logs", "pending", "finished", "failed"  # folders of a study directory
_PAUSE = 0.1  # seconds between looks at the processes


@dataclasses.dataclass
class Process:
    """A running command of a study.

    Attributes:
      run: the run.
      process: its process.
      began: start time on the monotonic clock.
      slot: number of the devices that it uses.
    """

    run: PlannedRun
    process: subprocess.Popen
    began: float
    slot: int


class Execution:
    """Runs the commands of a plan.

    Args:
      plan: the plan.
      jobs: number of processes at a time.
      devices: for each of them the devices that it sees, as the value of CUDA_VISIBLE_DEVICES. () = all devices. Each
        process has an equal share of the cores to itself.
      flops: FLOPs by run, for the time left.
      log: writes a line.
    """

    def __init__(
        self,
        plan: Plan,
        jobs: int = 1,
        devices: tuple[str, ...] = (),
        flops: Mapping[str, float] = {},
        log: Callable[[str], None] = print,
    ):
        self._plan, self._jobs, self._devices, self._flops, self._log = plan, jobs, devices, flops, log
        self._directory = pathlib.Path(plan.study_dir)
        self._digests = _digests(plan)
        self._finished = {run.name for run in plan.runs.values() if self._has_finished(run)}
        self._failures: dict[str, str] = {}  # messages by run
        self._running: list[Process] = []
        self._stopping = False

    def run(self) -> bool:
        """Runs everything that is not finished. Returns whether all runs have finished.

        SIGTERM and Ctrl-C stop all processes after they have saved a checkpoint.
        """
        with self._locked(), self._stopped_by_signals():
            self._prepare()
            while True:
                self._start_ready()
                if not self._running and (self._stopping or not any(map(self._is_open, self._plan.runs.values()))):
                    break
                time.sleep(_PAUSE)
                self._collect()
        return all(map(self.is_finished, self._plan.runs.values()))

    def prepare(self) -> None:
        """Writes the gin files of all runs, and removes what is stored about earlier failures and other settings.

        Raises:
          UserError: if another process runs the study.
        """
        with self._locked():
            self._prepare()

    def _prepare(self) -> None:
        for folder in (GIN, LOGS, PENDING, FINISHED, FAILED):
            (self._directory / folder).mkdir(parents=True, exist_ok=True)
        for run in self._plan.runs.values():
            write_atomically(self._directory / GIN / f"{run.name}.gin", run.text)
            (self._directory / FAILED / f"{run.name}.json").unlink(missing_ok=True)
            if self._has_finished(run):
                self._finished.add(run.name)
            else:
                self._finished.discard(run.name)
                (self._directory / FINISHED / f"{run.name}.json").unlink(missing_ok=True)
                write_json(self._directory / PENDING / f"{run.name}.json", {"settings": self._digests[run.name]})

    def is_finished(self, run: PlannedRun) -> bool:
        return run.name in self._finished

    def failure(self, run: PlannedRun) -> str | None:
        """Returns the last line of a run's log if its command has failed."""
        return self._failures.get(run.name)

    def _has_finished(self, run: PlannedRun) -> bool:
        return read_dictionary(self._directory / FINISHED / f"{run.name}.json").get("settings") == self._digests[run.name]

    def _start_ready(self) -> None:
        running = {process.run.name for process in self._running}
        for run in self._plan.runs.values():
            if self._stopping or len(self._running) >= self._jobs:
                return
            if run.name not in running and self._is_open(run) and not _is_owned(run):
                self._start(run)

    def _is_open(self, run: PlannedRun) -> bool:
        """Returns whether a run has neither finished nor failed, and the run before has finished."""
        before = run.after is None or self.is_finished(self._plan.runs[run.after])
        return before and not self.is_finished(run) and self.failure(run) is None

    def _start(self, run: PlannedRun) -> None:
        slot = min(set(range(self._jobs)) - {process.slot for process in self._running})
        variables = {PARENT: str(os.getpid())}
        if self._devices:
            visible = self._devices[slot % len(self._devices)]
            variables |= {"CUDA_VISIBLE_DEVICES": visible, "TPU_VISIBLE_CHIPS": visible}
        with open(self._directory / LOGS / f"{run.name}.log", "a") as log:
            process = start_process(
                command(self._plan, run), slot, self._jobs, variables, stdout=log, stderr=log,
                process_group=0,  # Ctrl-C reaches the study alone, which stops all runs
            )  # fmt: skip
        self._running.append(Process(run, process, time.monotonic(), slot))
        self._log(f"{run.name}: started")

    def _collect(self) -> None:
        for running in list(self._running):
            status = running.process.poll()
            if status is None:
                continue
            self._running.remove(running)
            run, seconds = running.run, time.monotonic() - running.began
            if status == 0:
                content = {"settings": self._digests[run.name], "seconds": seconds}
                write_json(self._directory / FINISHED / f"{run.name}.json", content)
                self._finished.add(run.name)
                self._log(f"{run.name}: finished in {duration(seconds)}{self._summary(run)}. {self._progress()}")
            elif not self._stopping:
                message = _last_line(self._directory / LOGS / f"{run.name}.log") or f"it ended with status {status}"
                write_json(self._directory / FAILED / f"{run.name}.json", {"status": status, "message": message})
                self._failures[run.name] = message
                self._log(f"{run.name}: failed with status {status}: {message}")

    def _summary(self, run: PlannedRun) -> str:
        losses = [line["loss"] for line in read_metrics(run.model_dir) if line.get("split") == "train" and "loss" in line]
        return f", loss {losses[-1]:.4f}" if losses and run.stage.command == "train" else ""

    def _progress(self) -> str:
        """Returns the number of finished runs and the time that the others take."""
        done = [name for name, run in self._plan.runs.items() if self.is_finished(run)]
        counts = f"{len(done)} of {len(self._plan.runs)} runs"
        stored = {name: read_dictionary(self._directory / FINISHED / f"{name}.json") for name in done}
        seconds = {name: float(content["seconds"]) for name, content in stored.items() if content.get("seconds")}
        estimates = [self._estimate(name, seconds) for name in self._plan.runs if name not in done]
        estimated = [estimate for estimate in estimates if estimate is not None]
        if not estimated:
            return counts
        precision = "about" if len(estimated) == len(estimates) else "at least"
        return f"{counts}, {precision} {duration(sum(estimated) / self._jobs)} left"

    def _estimate(self, name: str, seconds: Mapping[str, float]) -> float | None:
        """Returns the seconds of a run by those of its stage, or of all trainings, that are finished. None if there are none.

        Trainings take as long as their FLOPs, evaluations as long as others.
        """
        runs = self._plan.runs
        of_stage = [other for other in seconds if runs[other].stage.name == runs[name].stage.name]
        trainings = [other for other in seconds if other in self._flops] if name in self._flops else []
        measured = of_stage or trainings
        size = lambda other: self._flops.get(other) or 1.0
        total = sum(map(size, measured))
        return size(name) * sum(seconds[other] for other in measured) / total if measured else None

    def _locked(self) -> contextlib.AbstractContextManager[None]:
        refusal = f"Another process runs the study in {self._directory}. Wait for it, or stop it."
        return hold_lock(self._directory, refusal)

    @contextlib.contextmanager
    def _stopped_by_signals(self) -> Iterator[None]:
        def stop(number, frame):
            self._stopping = True
            for running in self._running:
                running.process.send_signal(signal.SIGTERM)

        before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
            for running in self._running:  # after an error
                running.process.terminate()

    @property
    def was_stopped(self) -> bool:
        return self._stopping


def command(plan: Plan, run: PlannedRun) -> list[str]:
    """Returns the words of a run's command after `t5x_lab`."""
    file = f"--gin_file={plan.study_dir}/{GIN}/{run.name}.gin"
    return ["train", file] if run.stage.command == "train" else ["eval", f"--model_dir={run.model_dir}", file]


def _digests(plan: Plan) -> dict[str, str]:
    """Returns hashes of the settings of each run and of those that it continues."""
    digests: dict[str, str] = {}
    for name, run in plan.runs.items():  # each after the run that it continues
        before = digests[run.after] if run.after else ""
        digests[name] = hashlib.sha256(f"{before}{run.text}".encode()).hexdigest()
    return digests


def _is_owned(run: PlannedRun) -> bool:
    """Returns whether a process of an earlier execution still trains in the run directory. It stops after a checkpoint."""
    owner = read_owner(pathlib.Path(run.model_dir) / OWNER) if run.stage.command == "train" else None
    return owner is not None and not owner[0].is_dead()


def _last_line(path: pathlib.Path) -> str:
    lines = [line for line in path.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1] if lines else ""
