"""Metrics files, the parameter table, plots, the progress lines."""

import fcntl
import http.server
import json
import math
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
import threading
import time
from types import SimpleNamespace
from typing import NamedTuple

import commands
import jax
import numpy as np
import pytest
from conftest import ROOT
from etils import epath
from helpers import documented, tiny_model
from tensorboardX.proto.event_pb2 import Event

from t5x_lab.config.json_files import write_json
from t5x_lab.observe import folder as folder_module
from t5x_lab.observe import metrics as metrics_module
from t5x_lab.observe import tensorboard
from t5x_lab.observe.console import Console, describe
from t5x_lab.observe.hardware import peak_flops
from t5x_lab.observe.metrics import JsonLines, read_metrics
from t5x_lab.observe.model_info import model_info, parameter_rows
from t5x_lab.observe.plots import write_plots
from t5x_lab.observe.profile import Profiled
from t5x_lab.observe.tensorboard import TensorBoard
from t5x_lab.partitioning.mesh import MeshShape, make_mesh
from t5x_lab.partitioning.partitioner import Partitioner
from t5x_lab.runs.train.recording import Recorder
from t5x_lab.training.clock import Clock
from t5x_lab.training.hooks import Hooks, RunStart
from t5x_lab.training.state import COUNTERS, TrainState


def write_steps(steps, first_step=0, model_dir="run"):
    hooks = Hooks([JsonLines(), TensorBoard()])
    with hooks.around(RunStart(model_dir, first_step, 100)):
        for step in steps:
            hooks.step(step, {"loss": 1.0 / step, "mfu": None})


@pytest.fixture(autouse=True)
def _run_directory(tmp_path):
    (tmp_path / "run").mkdir()


def test_events_of_a_run_that_was_killed_before_its_first_checkpoint_are_purged():
    for _ in range(2):  # both times from step 0
        write_steps([1, 2])
        time.sleep(0.01)  # a file's name has the time
    events = [event for file in sorted(epath.Path("run").glob("events.out*")) for event in read_events(file)]
    purged = [event.step for event in events if event.HasField("session_log")]
    assert purged == [1] and [event.step for event in events if event.HasField("summary")][:1] == [1]


def test_events_after_the_resumed_step_are_purged_where_the_lines_are_gone_too():
    write_steps([4], first_step=3)
    (file,) = epath.Path("run").glob("events.out*")
    assert [event.step for event in read_events(file) if event.HasField("session_log")] == [4]


def read_events(file):
    """TFRecords: a length in 8 bytes, its checksum, the event, its checksum."""
    data = file.read_bytes()
    while data:
        (size,) = struct.unpack("<Q", data[:8])
        yield Event.FromString(data[12 : 12 + size])
        data = data[16 + size :]


class Kept:
    """A hook that keeps what it is told."""

    def __init__(self):
        self.evaluations = []

    def on_evaluation(self, step, split, metrics):
        self.evaluations.append((step, split, metrics))


class ARun(NamedTuple):
    """Run configuration with the fields that a `Recorder` reads."""

    model_dir: str
    eval_period: int = 1000
    train_steps: int | None = None


def test_evaluations_are_handed_on_without_what_is_no_number():
    counters = {name: np.zeros(2, np.uint32) for name in COUNTERS} | {"task_tokens": np.zeros((1, 2), np.uint32)}
    state = TrainState(np.int32(0), {}, {}, counters, True)
    run = ARun("run")
    writer = Kept()
    hooks = Hooks([writer])
    recorder = Recorder(run, state, Clock(), ["t"], lambda step: 1e6, 0.0, hooks)
    with hooks.around(RunStart("run", 0, 10)):
        recorder.evaluation(5, {"infer/t": {"exact": 1.0}})
        recorder.evaluation(5, {"eval/t": {"loss": 2.0, "z_loss": math.nan}})
    assert writer.evaluations == [(5, "infer/t", {"exact": 1.0}), (5, "eval/t", {"loss": 2.0, "z_loss": None})]
    recorder.close()


def test_what_is_left_out_is_no_time_of_the_run():
    clock = Clock(began=time.time() - 100)
    clock.leave_out(clock.began + 40, clock.began + 90)
    assert 49.9 < clock.seconds < 60
    began = clock.began
    clock.leave_out(began + 10, began + 5)  # clocks of two machines
    assert clock.began == began


def test_a_tasks_own_metric_may_be_called_loss():
    assert describe({"loss": 2.0}) == "loss 2" and describe({"accuracy": 0.5}) == "accuracy 0.5"
    assert describe({"loss": 2.0, "accuracy": 0.5}) == "loss 2.0000  accuracy 0.500"


def test_lines_after_the_resumed_step_are_replaced_and_a_cut_line_is_dropped():
    write_steps(range(1, 6))
    with open("run/metrics.jsonl", "a") as file:
        file.write('{"step": 6, "spl')
    assert [line["step"] for line in read_metrics("run")] == [1, 2, 3, 4, 5]
    write_steps([4, 5], first_step=3)
    lines = read_metrics("run")
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5]
    assert lines[0] == {"step": 1, "split": "train", "loss": 1.0, "mfu": None}


def test_remote_run_directories_get_copies(monkeypatch):
    """An object store, for which a local folder stands in."""
    real = epath.Path
    monkeypatch.setattr(metrics_module.epath, "Path", lambda path: real(str(path).replace("gs://bucket", "run")))
    monkeypatch.setattr(tensorboard.epath, "Path", metrics_module.epath.Path)
    write_steps([], model_dir="gs://bucket")
    hooks = Hooks([JsonLines(), TensorBoard()])
    with hooks.around(RunStart("gs://bucket", 0, 100)):
        hooks.step(1, {"loss": 2.0})
        assert not read_metrics("run")
        local = [hook._folder.local for hook in hooks._hooks]
    assert read_metrics("run")[0]["loss"] == 2.0
    assert not any(folder.exists() for folder in local)
    assert [file for file in real("run").iterdir() if file.name.startswith("events.out")]


def test_of_a_long_remote_run_only_what_is_new_is_copied(monkeypatch):
    """And not by the thread that trains."""
    real, copied, threads = epath.Path, [], set()
    monkeypatch.setattr(metrics_module.epath, "Path", lambda path: real(str(path).replace("gs://bucket", "run")))
    monkeypatch.setattr(tensorboard.epath, "Path", metrics_module.epath.Path)
    monkeypatch.setattr(folder_module, "FILE_BYTES", 2000)
    copy = type(real(".")).copy

    def counted(self, to, overwrite=False):
        copied.append(self.stat().length)
        threads.add(threading.current_thread())
        return copy(self, to, overwrite=overwrite)

    monkeypatch.setattr(type(real(".")), "copy", counted)

    def run(steps, first_step):
        hooks = Hooks([JsonLines(), TensorBoard()])
        with hooks.around(RunStart("gs://bucket", first_step, 1000)):
            for step in steps:
                hooks.step(step, {"loss": 1.0 / step, "grad_norm": 0.5})
                for hook in hooks._hooks:  # as if a minute had passed
                    if isinstance(hook, TensorBoard):
                        hook._flush()
                    hook._folder.copy(seconds=1e-9)

    run(range(1, 301), 0)
    size = sum(file.stat().length for file in real("run").iterdir())
    assert [line["step"] for line in read_metrics("run")] == list(range(1, 301))
    assert len(copied) > 50 and sum(copied) < size + len(copied) * 2 * 2000 and max(copied) < 4000
    assert threading.current_thread() not in threads
    assert len([file for file in real("run").iterdir() if file.name.startswith("events")]) > 1

    run(range(201, 250), 200)  # a run that was killed after step 300, and continues after its checkpoint of step 200
    assert [line["step"] for line in read_metrics("run")] == list(range(1, 250))


def test_what_is_not_whole_yet_is_not_copied(monkeypatch):
    """A piece of metrics has another name until then, and its file may vanish while the copying thread looks."""
    real = epath.Path
    monkeypatch.setattr(metrics_module.epath, "Path", lambda path: real(str(path).replace("gs://bucket", "run")))
    real("run").mkdir(exist_ok=True)
    folder = folder_module.Folder("gs://bucket")
    (folder.local / "metrics.jsonl").write_text("{}\n")
    with monkeypatch.context() as patch:
        patch.setattr(type(real(".")), "iterdir", lambda self: iter([self / "metrics.1.jsonl.new", self / "metrics.jsonl"]))
        folder.copy(seconds=0.0)
    assert [file.name for file in real("run").iterdir()] == ["metrics.jsonl"]


def test_metrics_outlast_an_outage_that_is_over_when_the_run_ends(monkeypatch):
    real, copy, down = epath.Path, type(epath.Path(".")).copy, []
    monkeypatch.setattr(metrics_module.epath, "Path", lambda path: real(str(path).replace("gs://bucket", "run")))

    def fails_while_down(self, to, overwrite=False):
        if down:
            raise RuntimeError("503")
        return copy(self, to, overwrite=overwrite)

    monkeypatch.setattr(type(real(".")), "copy", fails_while_down)
    hooks = Hooks([JsonLines()])
    with hooks.around(RunStart("gs://bucket", 0, 3)):
        for step in (1, 2, 3):
            down[:] = ["yes"] * (step == 2)
            hooks.step(step, {"loss": 1.0})
            folder = hooks._hooks[0]._folder
            if step < 3:  # as if a minute had passed
                folder.copy(seconds=1e-9)
                folder._thread.join()
    assert [line["step"] for line in read_metrics("run")] == [1, 2, 3]


def test_the_parameter_table_names_counts_and_splits():
    model = tiny_model("encoder_decoder")
    rows = parameter_rows(model, Partitioner(make_mesh(MeshShape(2, 2, 2))))
    assert sum(row["bytes"] for row in rows) == 4 * model.num_parameters
    wi = next(row for row in rows if row["name"] == "decoder/layers/mlp/wi_0/kernel")
    assert (wi["axes"], wi["sharding"]) == (["layers", "embed", "mlp"], [None, "fsdp", "tensor"])
    assert wi["bytes_per_device"] * 4 == wi["bytes"]
    text = model_info(model, Partitioner(make_mesh(MeshShape(2, 2, 2))))
    assert f"{model.num_parameters:,} parameters" in text and "decoder/layers/mlp/wi_0/kernel" in text
    json.dumps(rows)


def test_plots_are_drawn_from_what_there_is():
    write_steps(range(1, 10))
    write_json(epath.Path("run/references.json"), {"loss": {"unigram model": 0.5, "nothing": None}, "others": 3})
    assert [path.split("/")[-1] for path in write_plots("run")] == ["loss.png"]


def test_progress_shows_the_first_steps_and_the_last(capsys):
    console = Console()
    console.on_start(RunStart("run", 0, 100))
    for step in range(1, 101):
        console.on_step(step, {"loss": 1.0, "accuracy": 0.5})
    console.on_end(None)
    shown = [line.split()[1] for line in capsys.readouterr().err.splitlines() if line.startswith("step")]
    assert shown == ["1/100", "2/100", "3/100", "100/100"]


def test_an_estimate_that_is_passed_leaves_no_time(capsys):
    console = Console(seconds_between_lines=0.0)
    console.on_start(RunStart("run", 0, 4))
    for step in range(1, 8):
        console.on_step(step, {"loss": 1.0, "accuracy": 0.5})
    console.on_end(None)
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("step")]
    assert [line.endswith(" left") for line in lines] == [False, True, True, True, False, False, False], lines


SHOWS = """
import time
from t5x_lab.observe.console import Console
from t5x_lab.training.hooks import RunStart
console = Console()
console.on_start(RunStart("run", 0, 400))
time.sleep(0.2)  # a bar is not drawn more often
metrics = {"loss": 2.7579, "accuracy": 0.284, "learning_rate": 0.01, "grad_norm": 0.969}
console.on_step(392, metrics | {"seconds_per_step": 0.1, "tokens_per_second": 9021.0, "data_wait_fraction": 0.5})
time.sleep(0.3)
console.on_step(401, metrics | {"seconds_per_step": 0.1, "tokens_per_second": 9021.0})  # of an estimate of 400
console.on_end(None)
"""


@pytest.mark.parametrize("columns, shows, not_shown", [
    (0, ["step 392/400  loss 2.7579", "0.10 s/step  9,021 tok/s"], []),
    (80, ["392/400", "loss 2.7579", "9,021 tok/s"], ["lr ", "grad", "accuracy"]),
    (120, ["401/401", "], loss 2.7579"], []),
    (200, ["392/400", "accuracy 0.284", "lr 1.00e-02  grad 0.969", "waits for data 50%"], []),
])  # fmt: skip
def test_a_terminals_line_has_whole_numbers(columns, shows, not_shown):
    terminal, other = pty.openpty()
    fcntl.ioctl(other, termios.TIOCSWINSZ, struct.pack("HHHH", 24 if columns else 0, columns, 0, 0))
    subprocess.run([sys.executable, "-c", SHOWS], stderr=other, check=True, cwd=ROOT)
    shown = os.read(terminal, 100_000).decode()
    os.close(terminal), os.close(other)
    assert all(text in shown for text in shows) and not any(text in shown for text in not_shown), shown
    assert columns == 0 or max(map(len, re.split(r"[\r\n]+", shown))) <= columns, shown


def test_peaks_of_devices():
    assert peak_flops("NVIDIA H100 80GB HBM3") == 989e12
    assert peak_flops("TPU v5 lite") == 197e12 and peak_flops("TPU v5p") == 459e12
    assert peak_flops(jax.devices()[0].device_kind) is None


def trace_steps(directory, steps, requested_after):
    """Fifteen steps, some of them traced. JAX's profiler would crash in a process that compiled for a TPU slice."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    before = signal.getsignal(signal.SIGUSR1)
    with Profiled(lambda state, batch: (state + batch, {}), directory, steps) as profiled:
        state = 0
        for call in range(1, 16):
            state, _ = profiled(state, 1)
            if call == 6 and steps:
                time.sleep(1.1)  # traces are named by the second
            if call in requested_after:
                os.kill(os.getpid(), signal.SIGUSR1)
    return state, signal.getsignal(signal.SIGUSR1) == before


@pytest.mark.parametrize("steps, requested_after, traced", [(0, (5,), 5), (2, (7, 8), 4), (0, (1,), 5)])
def test_a_process_traces_its_next_steps_on_request(steps, requested_after, traced, tmp_path):
    """The first steps, which compile, are left out, and a request during a trace adds nothing to it."""
    assert commands.call(trace_steps, str(tmp_path), steps, requested_after) == (15, True)
    planes = [p for f in tmp_path.rglob("*.xplane.pb") for p in jax.profiler.ProfileData.from_file(str(f)).planes]
    assert sum(event.name == "train" for plane in planes for line in plane.lines for event in line.events) == traced


def test_the_documented_alert_posts_what_happens(monkeypatch):
    class Receiver(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            posted.append(json.loads(self.rfile.read(int(self.headers["Content-Length"])))["text"])
            self.send_response(200)
            self.end_headers()

        def log_message(self, *unused):
            pass

    posted: list[str] = []
    module = {"gin": SimpleNamespace(configurable=lambda cls: cls)}
    exec(documented("custom/hook.md", "class Alert").replace("import gin\n", ""), module)
    with http.server.HTTPServer(("localhost", 0), Receiver) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        hooks = Hooks([module["Alert"](f"http://localhost:{server.server_address[1]}")])
        with pytest.raises(KeyboardInterrupt), hooks.around(RunStart("runs/a", 4, 9)):
            hooks.step(5, {"loss": 1.5})
            hooks.step(6, {"loss": None})
            raise KeyboardInterrupt("stopped by SIGTERM after step 6")
        server.shutdown()
    texts = [re.sub(" on [^ ]+ ", " on HOST ", text) for text in posted]
    events = ["starts after step 4", "step 6 is not finite", "stopped after step 6: stopped by SIGTERM after step 6"]
    assert texts == [f"runs/a on HOST {event}" for event in events]
