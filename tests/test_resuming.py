"""Runs that are killed, stopped, starved of disk, handed on: they lose nothing."""

import contextlib
import dataclasses
import json
import os
import pathlib
import random
import re
import resource
import threading
import time
import types

import jax
import pytest
from commands import Command
from runs_of_text import FULL_LM, PREFIX_LM, flags, losses
from synthetic_records import write_lines

import t5x_lab
from t5x_lab.checkpoints.layout import find_checkpoint, finished_steps, read_info
from t5x_lab.cli.main import main
from t5x_lab.config.errors import UserError
from t5x_lab.data.vocabularies.sentencepiece import train_sentencepiece
from t5x_lab.observe.metrics import read_metrics
from t5x_lab.report.run_directory import parse_settings
from t5x_lab.runs.config.gin_config import GinConfig
from t5x_lab.runs.train import train
from t5x_lab.runs.train.starting_point import describe_changes

pytestmark = pytest.mark.slow


def test_a_run_killed_at_a_random_moment_has_the_losses_of_one_that_never_was():
    """It is begun from the saved configuration of the other one, which alone repeats a run."""
    more = ["--gin.CHECKPOINT_PERIOD=7", "--gin.EVAL_PERIOD=1000", "--gin.DROPOUT_RATE=0.1"]
    assert Command(*flags("causal_decoder", FULL_LM, "whole", 80, *more)).wait() == 0
    again = ["train", "--gin_file=whole/config.gin", "--gin.MODEL_DIR=killed"]
    process = Command(*again)
    process.wait_until(lambda: finished_steps("killed"))
    time.sleep(random.Random(0).random() * 0.5)
    process.kill()
    process.wait()
    assert Command(*again).wait() == 0
    assert losses("killed") == losses("whole") and len(losses("whole")) == 80
    assert "Continuing after step" in pathlib.Path("log").read_text()


def test_sigterm_saves_and_exits_with_3_and_the_run_goes_on():
    argv = flags("causal_decoder", FULL_LM, "run", 100_000, "--gin.CHECKPOINT_PERIOD=100000")
    process = Command(*argv)
    process.wait_until(lambda: len(losses("run")) >= 5)
    process.terminate()
    assert process.wait() == 3, process.output()
    saved = int(os.listdir("run/checkpoints")[0])
    assert saved == max(losses("run")) and "stopped by SIGTERM" in process.output()
    assert main(flags("causal_decoder", FULL_LM, "run", saved + 2)) == 0
    assert max(losses("run")) == saved + 2


def other_value(setting, field):
    """Returns another value of a field's type, mostly a valid one. None for nested settings and functions."""
    value = getattr(setting, field.name)
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + 1 if isinstance(value, int) else value / 2 + 0.25
    if isinstance(value, str):
        return OTHER_TEXTS.get(field.name, "other")
    return ("gelu",) if field.name == "mlp_activations" else None


OTHER_TEXTS = {  # of settings with a fixed set of values
    "architecture": "prefix_decoder", "scaling": "standard", "positions": "rotary", "relative_bias": "per_layer", "norm": "layer",
    "norm_position": "post", "dtype": "float32", "remat_policy": "products", "rates_of": "tokens", "mesh": "data=1",
    "loss_normalizing_factor": "AVERAGE_PER_SEQUENCE",
}  # fmt: skip


def changed(setting):
    """Yields (gin name, another valid value) of all fields with values, of nested settings too."""
    for field in dataclasses.fields(setting):
        value = getattr(setting, field.name)
        if dataclasses.is_dataclass(value):
            yield from changed(value)
        elif (other := other_value(setting, field)) is not None:
            with contextlib.suppress(UserError):  # no valid value: other fields would have to change too
                dataclasses.replace(setting, **{field.name: other})
                yield f"{type(setting).__name__}.{field.name}", other


def test_every_setting_of_a_run_is_refused_or_logged(monkeypatch):
    """Walks over all settings of a run: another value is in its identity, or in the line of changes with both values."""
    bindings = [
        'MIXTURE_OR_TASK_NAME = "sotu_full_lm"',
        'MODEL_DIR = "run"',
        "TRAIN_STEPS = 9",
        "VOCABULARY = @ByteVocabulary()",
    ]
    files, bindings = ["models/causal_decoder/tiny.gin"], [*bindings, 'TASK_FEATURE_LENGTHS = {"targets": 32}']
    config = GinConfig(files, bindings)
    run = config.run()
    identity, walked = run.identity(), []
    monkeypatch.setattr("t5x_lab.runs.train.starting_point.read_info", lambda path: {"config": config.text})
    assert describe_changes("checkpoint", config.text) == ""
    settings = parse_settings(config.text)
    for parameter, value in changed(run):
        bound = settings.get(parameter, "")
        name = bound.removeprefix("%") if bound.startswith("%") else parameter
        other = GinConfig(files, [*bindings, f"{name} = {value!r}"])
        walked.append(parameter)
        is_refused = other.run().identity() != identity
        accepted = describe_changes("checkpoint", other.text)
        assert is_refused or name in ("TRAIN_STEPS", "MODEL_DIR") or f"{name} was " in accepted, name
    names = {name.partition(".")[0] for name in walked}
    assert len(walked) > 70 and {"RunConfig", "DataConfig", "TransformerConfig", "Adafactor", "LearningRate"} <= names, names


def test_settings_that_change_on_resume_are_refused_or_logged(capfd):
    """A network that computes another function is refused with both values; other changes are accepted and named."""
    command = flags("causal_decoder", FULL_LM, "run", 1)
    assert main(command) == 0 and "Settings that changed" not in capfd.readouterr().err
    for name, before, after in (
        ("scaling", "t5", "standard"),
        ("architecture", "causal_decoder", "prefix_decoder"),
        ("norm_epsilon", "1e-06", "0.001"),
        ("scale_embeddings", "False", "True"),
    ):
        assert main([*command, f"--gin.TransformerConfig.{name}={after}"]) == 2
        says = f"was trained with TransformerConfig.{name} = {before}, but the configuration has {after}"
        assert says in capfd.readouterr().err
    more = ["--gin.Z_LOSS=0.0", "--gin.LABEL_SMOOTHING=0.1", "--gin.DROPOUT_RATE=0.2", "--gin.AVERAGE_DECAY=0.9"]
    assert main([*flags("causal_decoder", FULL_LM, "run", 2), *more]) == 0
    changes = next(line for line in capfd.readouterr().err.splitlines() if "Settings that changed" in line)
    for name, before, after in (("Z_LOSS", "0.0001", "0.0"), ("LABEL_SMOOTHING", "0.0", "0.1"), ("DROPOUT_RATE", "0.0", "0.2")):
        assert f"{name} was {before}, is {after}" in changes, changes
    assert "AVERAGE_DECAY was None, is 0.9" in changes and "TRAIN_STEPS" not in changes
    assert main(flags("causal_decoder", FULL_LM, "run", 3)) == 0
    assert "AVERAGE_DECAY was 0.9, is None" in capfd.readouterr().err


def test_batch_sizes_change_by_a_schedule_as_at_restarts(capfd):
    """The same examples and losses. FLOPs are counted by rows."""
    train = lambda directory, steps, *more: main(flags("causal_decoder", FULL_LM, directory, steps, *more))
    assert train("scheduled", 8, "--gin.BATCH_SCHEDULE={4: 24, 6: 16}") == 0
    assert "8 rows of 0 + 64 tokens = 512 per batch; 24 rows from step 4, 16 rows from step 6" in capfd.readouterr().err
    for steps, size in ((3, 8), (5, 24), (8, 16)):
        assert train("restarted", steps, f"--gin.BATCH_SIZE={size}") == 0
    assert "BATCH_SIZE was 24, is 16" in capfd.readouterr().err
    assert losses("restarted") == losses("scheduled") and len(losses("scheduled")) == 8
    rows = [8, 8, 8, 24, 24, 16, 16, 16]
    for directory in ("scheduled", "restarted"):
        lines = [line for line in read_metrics(directory) if line["split"] == "train"]
        assert [line["flops"] * sum(rows) for line in lines] == [lines[-1]["flops"] * sum(rows[:n]) for n in range(1, 9)]
    for schedule, says in (
        ("{5: 3}", "BATCH_SCHEDULE[5] is 3, which is not a multiple of MICROBATCHES=2"),
        ("{0: 4}", "It must map steps to numbers of rows"),
        ("{5: 4.5}", "BATCH_SCHEDULE"),
    ):
        assert train("wrong", 8, f"--gin.BATCH_SCHEDULE={schedule}", "--gin.MICROBATCHES=2") == 2
        assert says in capfd.readouterr().err


@pytest.mark.exhaustive
def test_parameters_go_from_a_causal_to_a_prefix_decoder_and_back(capfd):
    assert main(flags("causal_decoder", FULL_LM, "causal", 6)) == 0
    assert main(flags("prefix_decoder", PREFIX_LM, "prefix", 1, "--gin.INITIAL_CHECKPOINT_PATH=causal")) == 0
    assert "Starting at step 0 with the parameters of" in capfd.readouterr().err
    momentum = "--gin.Adafactor.momentum=0.9"
    fresh = flags("prefix_decoder", PREFIX_LM, "fresh", 1, momentum)
    assert main(fresh) == 0
    assert losses("prefix")[1][0] < losses("fresh")[1][0] - 0.05
    assert main([*fresh, "--gin.RESUME=False"]) == 2
    assert "holds a run at step 1, but RESUME is False" in capfd.readouterr().err
    before = pathlib.Path("fresh/config.gin").read_text()
    for change, says in (
        (
            "--gin.TransformerConfig.mlp_dim=96",
            "was trained with TransformerConfig.mlp_dim = 64, but the configuration has 96",
        ),
        ("--gin.OPTIMIZER=@AdamW()", "was trained with OPTIMIZER = @Adafactor(), but the configuration has @AdamW()"),
        (
            "--gin.Adafactor.momentum=None",
            "was trained with another optimizer: Adafactor.momentum was 0.9 and is now None. Continue",
        ),
        ("--gin.Adafactor.momentum_dtype=bfloat16", "Adafactor.momentum_dtype was float32 and is now bfloat16. Continue"),
        ("--gin.Adafactor.min_dim_size_to_factor=8", "Adafactor.min_dim_size_to_factor was 128 and is now 8. Continue"),
        ("--gin.DATA_SHARDS=4", "was trained with DATA_SHARDS = 1"),
        ("--gin.MIXTURE_OR_TASK_NAME=sotu_full_lm", "was trained with MIXTURE_OR_TASK_NAME = sotu_prefix_lm"),
        ('--gin.TASK_FEATURE_LENGTHS={"targets": 32}', "was trained with TASK_FEATURE_LENGTHS"),
    ):
        assert main([*flags("prefix_decoder", PREFIX_LM, "fresh", 9, momentum), change, "--dry_run"]) == 2
        assert says in capfd.readouterr().err
        assert main([*flags("prefix_decoder", PREFIX_LM, "fresh", 9, momentum), change]) == 2
        assert says in capfd.readouterr().err
        assert pathlib.Path("fresh/config.gin").read_text() == before, "a refused run must not change the directory"


@pytest.mark.exhaustive
def test_a_directory_with_parameters_alone_starts_a_run_at_its_step(capfd):
    more = ["--gin.CHECKPOINT_PERIOD=2", "--gin.SaveCheckpointConfig.keep=1"]
    assert main(flags("causal_decoder", FULL_LM, "first", 4, *more)) == 0
    t5x_lab.load("first").save("saved")
    assert main([*flags("causal_decoder", FULL_LM, "saved", 8, *more), "--dry_run"]) == 0
    assert "Starting at step 4 with the parameters of" in capfd.readouterr().out
    assert main(flags("causal_decoder", FULL_LM, "saved", 8, *more)) == 0
    assert "Starting at step 4 with the parameters of" in capfd.readouterr().err
    train = [line for line in read_metrics("saved") if line["split"] == "train"]
    assert [line["step"] for line in train] == [5, 6, 7, 8]
    factors = ["--gin.LearningRate.factors=linear_warmup", *more]
    assert main(flags("causal_decoder", FULL_LM, "whole", 8, *factors)) == 0
    t5x_lab.load("first").save("warm")
    assert main(flags("causal_decoder", FULL_LM, "warm", 8, *factors)) == 0
    rates = [[line["learning_rate"] for line in read_metrics(run) if line["split"] == "train"] for run in ("whole", "warm")]
    assert rates[0][4:] == rates[1], "the schedule goes on at the step"
    assert finished_steps("saved") == [4, 8], "what training did not write stays"
    assert main(flags("causal_decoder", FULL_LM, "saved", 10, *more)) == 0
    assert "Continuing after step 8" in capfd.readouterr().err


@pytest.mark.exhaustive
def test_it_is_said_from_where_the_steps_are_counted(capfd):
    assert main(flags("causal_decoder", FULL_LM, "first", 4)) == 0
    start = [*flags("causal_decoder", FULL_LM, "next", 6, "--gin.INITIAL_CHECKPOINT_PATH=first"), "--dry_run"]
    capfd.readouterr()
    assert main(start) == 0
    stdout = capfd.readouterr().out
    assert (
        "TRAIN_STEPS = 6 counts from step 0: 6 steps. To count from the step of the checkpoint, as in T5X, 2 steps, set"
        in stdout
    )
    (other,) = re.findall(r"'(--gin.RestoreCheckpointConfig.carry=.*?)'\.", stdout)
    assert main([*start, other]) == 0
    stdout = capfd.readouterr().out
    assert "TRAIN_STEPS = 6 counts from that step, as in T5X: 2 steps. To count from step 0, 6 steps, set" in stdout
    assert main([*start[:-1], other]) == 0
    train = [line for line in read_metrics("next") if line["split"] == "train"]
    assert [line["step"] for line in train] == [5, 6]
    adapted = ["--gin.INITIAL_CHECKPOINT_PATH=first", "--gin_file=runs/adapt.gin", "--gin.LearningRate.warmup_steps=1"]
    assert main(flags("prefix_decoder", PREFIX_LM, "adapted", 6, *adapted)) == 0
    train = [line for line in read_metrics("adapted") if line["split"] == "train"]
    assert [line["step"] for line in train] == [5, 6]
    assert [line["learning_rate"] for line in train] == pytest.approx([4**-0.5, 5**-0.5])  # T5's, from there on
    assert main([*flags("causal_decoder", FULL_LM, "third", 4, "--gin.INITIAL_CHECKPOINT_PATH=first"), "--dry_run"]) == 0
    assert "counts from" not in capfd.readouterr().out


@pytest.mark.parametrize("size, file", [(100, "OWNER"), (1000, "config.gin")])
def test_a_disk_that_is_full_at_the_start_is_a_sentence(size, file):
    os.mkfifo("pipe")
    log: list[str] = []
    reader = threading.Thread(target=lambda: log.append(pathlib.Path("pipe").read_text()))
    reader.start()
    process = Command(*flags("causal_decoder", FULL_LM, "run", 4), log="pipe")
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
    assert process.wait() == 2
    reader.join()
    assert f"run/{file} cannot be written: File too large. Free" in log[0] and "Traceback" not in log[0]
    assert not finished_steps("run") and not pathlib.Path("run/OWNER").exists()


def run_on_a_small_disk(*more):
    """Starts a run whose log is whole, since a pipe has no size, and returns it with a function that limits file sizes."""
    os.mkfifo("pipe")
    log: list[str] = []
    reader = threading.Thread(target=lambda: log.append(pathlib.Path("pipe").read_text()))
    reader.start()
    process = Command(*flags("causal_decoder", FULL_LM, "run", 100_000, "--gin.CHECKPOINT_PERIOD=20", *more), log="pipe")
    limit = lambda size: resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
    process.wait_until(lambda: len(losses("run")) >= 45 and os.path.exists("run/checkpoints/40"))  # which is written beside
    return process, limit, lambda: (reader.join(), log[0])[1]


@pytest.mark.exhaustive
def test_a_full_disk_stops_nothing_until_the_end_and_loses_nothing():
    """Files that may not grow beyond 4,000 bytes stand in for the disk; they may again once the run is asked to stop."""
    process, limit, read_log = run_on_a_small_disk()
    limit(4000)
    before = len(losses("run"))
    time.sleep(3)
    process.terminate()
    time.sleep(1)
    assert process.is_running() and {"20", "40"} <= set(os.listdir("run/checkpoints"))
    limit(resource.RLIM_INFINITY)
    status, log = process.wait(), read_log()
    assert status == 3, log
    last = finished_steps("run")[-1]
    assert "could not be saved" in log and f"Saving works again: step {last} is saved" in log, log
    assert "Traceback" not in log, log
    assert list(losses("run")) == list(range(1, last + 1)) and last > before


@pytest.mark.exhaustive
def test_a_run_that_cannot_be_saved_ends_soon_after_sigterm():
    process, limit, read_log = run_on_a_small_disk("--gin.SaveCheckpointConfig.grace_seconds=5")
    limit(4000)
    time.sleep(3)
    process.terminate()
    started = time.monotonic()
    status, log = process.wait(), read_log()
    assert status == 1 and time.monotonic() - started < 60, log
    assert "could not be saved" in log and "Saving was retried for" in log and "Traceback" not in log, log
    assert finished_steps("run")[:2] == [20, 40]


def test_what_an_extension_left_out_outlasts_a_kill_before_its_first_checkpoint(monkeypatch, tmp_path):
    run, now = types.SimpleNamespace(model_dir=str(tmp_path)), time.time()
    monkeypatch.setattr(train, "read_info", lambda checkpoint: {"clock": {"began": now - 100, "productive": 5.0}})
    began = lambda started: train.restore_clock(run, tmp_path / "8", started).began - now
    assert began(now - 10) == pytest.approx(-100)
    (tmp_path / "run.json").write_text(json.dumps({"began": now - 60}))  # an extension wrote it, and was killed
    assert began(now - 10) == pytest.approx(-60)
    (tmp_path / "END").write_text(json.dumps({"step": 8, "at": now - 30}))
    assert began(now - 10) == pytest.approx(-40)
    (tmp_path / "run.json").write_text('{"began": null}')
    assert began(now - 10) == pytest.approx(-80)


@pytest.mark.exhaustive
def test_a_profile_is_written_and_goodput_survives_a_restart():
    """Goodput against its definition: productive seconds over all since the first start, but for the pause after an end."""
    began, ended = [], []
    for steps in (8, 12):
        argv = flags("causal_decoder", FULL_LM, "run", steps, "--gin.PROFILE_STEPS=2", "--gin.CHECKPOINT_PERIOD=4")
        started = time.time()
        assert Command(*argv).wait() == 0
        began.append(read_info(find_checkpoint("run"))["clock"]["began"])
        ended.append(json.loads(pathlib.Path("run/END").read_text())["at"])
        time.sleep(3)
    assert started - ended[0] <= began[1] - began[0] < ended[1] - ended[0]
    trace = next(pathlib.Path("run/profile").rglob("*.xplane.pb"))
    planes = jax.profiler.ProfileData.from_file(str(trace)).planes
    assert "train" in {event.name for plane in planes for line in plane.lines for event in line.events}

    lines = [line for line in read_metrics("run") if line["split"] == "train"]
    counted = [line for line in lines if line["step"] not in (1, 9)]  # the first of each process compiles
    productive = sum(line["seconds_per_step"] for line in counted)
    clock = read_info(find_checkpoint("run"))["clock"]
    assert clock["productive"] == pytest.approx(productive, rel=1e-6)
    elapsed = sum(line["seconds_per_step"] for line in lines)
    assert 0 < lines[-1]["goodput"] < productive / elapsed
    assert time.time() - clock["began"] > elapsed + 3  # the one after the last end


def test_templates_and_vocabularies_that_changed_are_refused_and_modules_named(tmp_path, monkeypatch, capfd):
    """Files that a configuration names and does not hold: their content is compared on resuming."""
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "mine_of_resuming.py").write_text("VALUE = 1\n")
    write_lines(tmp_path / "train.jsonl", [{"text": f"thing {n}", "label": n % 2} for n in range(99)])
    (tmp_path / "t" / "set").mkdir(parents=True)
    template = """dataset: set
templates:
  a: !Template
    name: a
    answer_choices: "no ||| yes"
    jinja: "{{text}}? ||| {{ answer_choices[label] }}"
"""
    (tmp_path / "t" / "set" / "templates.yaml").write_text(template)
    pieces = lambda text: train_sentencepiece([text] * 50, str(tmp_path / "v.model"), 40, "bpe")
    pieces("some things have a name that is long enough for this test of pieces, yes or no? 0123456789")
    task = [
        "--gin.MIXTURE_OR_TASK_NAME=set_a", '--gin.TASK_FEATURE_LENGTHS={"inputs": 32, "targets": 8}', '--gin.TEMPLATES=("t",)',
        '--gin.DATA_SETS={"set": @Records()}', "--gin.Records.files={'train': 'train.jsonl'}", "--gin.EVALS=()",
    ]  # fmt: skip
    more = [
        "--gin.VOCABULARY=@SentencePieceVocabulary()", f"--gin.SentencePieceVocabulary.path={tmp_path}/v.model",
        "--gin_bindings=import mine_of_resuming",
    ]  # fmt: skip
    monkeypatch.chdir(tmp_path)
    train_to = lambda steps: main(flags("causal_decoder", task, "run", steps, *more))
    assert train_to(1) == 0
    (tmp_path / "mine_of_resuming.py").write_text("VALUE = 2\n")
    assert train_to(2) == 0
    assert "Your modules that changed since that checkpoint: mine_of_resuming." in capfd.readouterr().err
    (tmp_path / "t" / "set" / "templates.yaml").write_text(template.replace("}}?", "}}!"))
    process = Command(*flags("causal_decoder", task, "run", 3, *more))  # a process registers a task once
    assert process.wait() == 2 and "The templates set_a changed since the checkpoint" in process.output()
    (tmp_path / "t" / "set" / "templates.yaml").write_text(template)
    pieces("other pieces are in this one, yes or no? it has the same size and path, 0123456789 with some things")
    process = Command(*flags("causal_decoder", task, "run", 3, *more))
    assert process.wait() == 2 and "The vocabulary SentencePieceVocabulary(" in process.output()
