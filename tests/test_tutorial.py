"""docs/custom/tutorial.md as it is written: trained on eight devices, killed, resumed, evaluated, compiled for a TPU slice."""

import json
import pathlib

import commands
import numpy as np
import pytest
from conftest import COMPILE_FAST
from helpers import documented

from t5x_lab.checkpoints.layout import find_checkpoint, finished_steps, read_info
from t5x_lab.observe.metrics import read_metrics

pytestmark = pytest.mark.exhaustive
EIGHT = {"XLA_FLAGS": f"--xla_force_host_platform_device_count=8 {COMPILE_FAST}", "WANDB_SILENT": "true"}
AS_DOCUMENTED = {"XLA_FLAGS": "--xla_force_host_platform_device_count=8"}  # libtpu does not know those of CPUs


@pytest.fixture(autouse=True)
def _files():
    pytest.importorskip("wandb", reason="needs the extra wandb")
    pathlib.Path("mine.py").write_text(documented("custom/tutorial.md", "class Convolutions"))
    pathlib.Path("mine.gin").write_text(documented("custom/tutorial.md", "NETWORK = @Convolutions"))
    lines = (f"Line {n} of a text about nothing but the number {n * n}, and it goes on.\n" for n in range(600))
    pathlib.Path("my_text.txt").write_text("".join(lines))


def start(*more: str, command="train", **options) -> commands.Command:
    return commands.Command(command, "--gin_file=mine.gin", *more, environment=EIGHT, **options)


def numbers(model_dir: str) -> dict:
    """Returns the metrics that do not depend on the clock."""
    keep = ("loss", "confidence", "grad_norm", "learning_rate", "embedding_spread", "tokens_processed")
    return {(line["step"], line["split"]): [line.get(name) for name in keep] for line in read_metrics(model_dir)}


def test_everything_of_ones_own_trains_survives_evaluates_and_compiles():
    whole = start("--gin.MODEL_DIR=runs/whole", log="whole.log")
    assert whole.wait() == 0, whole.output()
    killed = start()
    # The checkpoint of step 10 is written beside the training: on a busy machine later than step 14.
    killed.wait_until(lambda: finished_steps("runs/mine") and any(line["step"] > 14 for line in read_metrics("runs/mine")))
    killed.kill()
    killed.wait()
    assert 10 <= max(line["step"] for line in read_metrics("runs/mine")) < 40, killed.output()
    again = start()
    assert again.wait() == 0 and "Continuing after step" in again.output(), again.output()
    assert numbers("runs/mine") == numbers("runs/whole") and len(numbers("runs/mine")) == 42
    sums = [read_info(find_checkpoint(run))["checksums"] for run in ("runs/mine", "runs/whole")]
    assert sums[0] == sums[1] and any("opt_state" in name for name in sums[0])

    train = [line for line in read_metrics("runs/mine") if line["split"] == "train"]
    steps = np.arange(40)
    rates = 1e-3 * np.clip(np.minimum(steps / 5, (40 - steps) / 15), 0, 1)
    np.testing.assert_allclose([line["learning_rate"] for line in train], rates, rtol=1e-5, atol=1e-9)
    assert [line["step"] for line in train if "embedding_spread" in line] == list(range(5, 41, 5))
    assert train[-1]["loss"] < train[0]["loss"] - 0.3 and train[-1]["confidence"] < 0
    assert list(pathlib.Path("runs/mine").glob("wandb/offline-run-*/*.wandb"))
    table = pathlib.Path("runs/mine/model-info.txt").read_text()
    assert "('tensor', 'fsdp')" in next(line for line in table.splitlines() if line.startswith("wide/kernel"))

    done = commands.run("eval", "--model_dir=runs/mine", "--json", environment=EIGHT)
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout)["40"]["eval/files_full_lm"]
    last = next(line for line in read_metrics("runs/mine") if line["split"].startswith("eval") and line["step"] == 40)
    np.testing.assert_allclose([results["loss"], results["confidence"]], [last["loss"], last["confidence"]], rtol=1e-6)
    generated = commands.run("generate", "--model_dir=runs/mine", "--prompt=Line", environment=EIGHT)
    assert generated.returncode == 2 and "Convolutions has no prefill and decode" in generated.stderr

    compiled = commands.run(
        "compile",
        "--gin_file=mine.gin",
        "--topology=v4:2x2x1",
        "--gin.MESH=data=1,fsdp=2,tensor=2",
        "--json",
        environment=AS_DOCUMENTED,
    )
    assert compiled.returncode == 0, compiled.stderr
    report = json.loads(compiled.stdout)
    assert report["devices"] == 4 and report["fits"] and report["collectives"], report

    pathlib.Path("mine.py").unlink()
    missing = commands.run("eval", "--model_dir=runs/mine", environment=EIGHT)
    assert missing.returncode == 2 and "No module named 'mine' (runs/mine/config.gin, line" in missing.stderr


def test_the_linen_network_trains_in_the_same_file():
    more = ["--gin.NETWORK=@LinenGru", "--gin.MODEL_DIR=runs/linen", "--gin.TRAIN_STEPS=12"]
    first = start(*more)
    assert first.wait() == 0, first.output()
    train = [line for line in read_metrics("runs/linen") if line["split"] == "train"]
    assert train[-1]["loss"] < train[0]["loss"] and np.isfinite(train[-1]["confidence"])
    table = pathlib.Path("runs/linen/model-info.txt").read_text()
    assert "vocab, embed" in next(line for line in table.splitlines() if line.startswith("linen/Embed_0/embedding"))
    more = [*more, "--topology=v4:2x2x1", "--gin.MESH=data=1,fsdp=2,tensor=2", "--json"]
    compiled = commands.run("compile", "--gin_file=mine.gin", *more, environment=AS_DOCUMENTED)
    assert compiled.returncode == 0 and json.loads(compiled.stdout)["devices"] == 4, compiled.stderr
