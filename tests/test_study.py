"""Studies: plans, shared runs, equality, and execution that survives kills."""

import contextlib
import dataclasses
import fcntl
import json
import os
import pathlib
import random
import re
import subprocess
import sys

import commands
import jax.numpy as jnp
import pytest
import yaml
from helpers import documented, exhaustive
from runs_of_text import TINY, losses

from t5x_lab.cli.main import main
from t5x_lab.config.errors import UserError
from t5x_lab.config.gin_files import build
from t5x_lab.config.threads import num_xla_threads
from t5x_lab.runs.config.gin_config import GinConfig
from t5x_lab.study.config import Factor, Stage, Study
from t5x_lab.study.equality import check_equality
from t5x_lab.study.execution import Execution
from t5x_lab.study.launch import write_launch_files
from t5x_lab.study.plan import make_plan
from t5x_lab.study.plan_table import plan_table
from t5x_lab.study.quantities import compute_quantities
from t5x_lab.study.timing import measure_steps

AS_DOCUMENTED = {"XLA_FLAGS": ""}  # libtpu does not know those of CPUs
BINDINGS = tuple(flag.removeprefix("--gin.").replace("=", " = ", 1) for flag in TINY)
DECODER = "models/decoder/tiny.gin"
FULL_LM = ("OBJECTIVE = 'full_lm'", 'TASK_FEATURE_LENGTHS = {"targets": 65}')
MLM = ("OBJECTIVE = 'span_corruption'", 'TASK_FEATURE_LENGTHS = {"inputs": 52}')  # and 13 targets
FACTORS = (
    Factor(
        name="architecture",
        values={
            "causal decoder": (DECODER,),
            "prefix decoder": (DECODER, 'TransformerConfig.architecture = "prefix_decoder"'),
        },
    ),
    Factor(name="objective", values={"full LM": FULL_LM, "MLM": MLM}),
    Factor(name="adaptation", values={"none": (), "LM-A": FULL_LM}),
)
COMMON = ("MIXTURE_OR_TASK_NAME = 'sotu'", "EVALS = ()", *BINDINGS)
STAGES = (
    Stage(name="pretrain", factors=("architecture", "objective"), overrides=COMMON, steps={"tiny": 4, "paper": 400}),
    Stage(
        name="adapt", factors=("architecture", "adaptation"), after=("pretrain",), when={"adaptation": ("LM-A",)},
        overrides=(*COMMON, "RestoreCheckpointConfig.carry = ('optimizer', 'step')"), steps=2,
    ),
    Stage(name="evaluate", command="eval", after=("adapt", "pretrain"), settings=("EVALS = (@LossEvaluation(),)",)),
)  # fmt: skip
EXCLUDE = ({"architecture": "prefix decoder", "objective": "full LM"}, {"objective": "full LM", "adaptation": "LM-A"})
STUDY = Study(factors=FACTORS, stages=STAGES, exclude=EXCLUDE, seeds=(0, 1))


def test_cells_share_the_runs_of_stages_that_do_not_differ():
    plan = make_plan(STUDY, "s")
    assert [cell.title for cell in plan.cells if cell.seed == 0] == [
        "causal decoder, full LM, none", "causal decoder, MLM, none", "causal decoder, MLM, LM-A",
        "prefix decoder, MLM, none", "prefix decoder, MLM, LM-A",
    ]  # fmt: skip
    by_stage = {stage.name: [run for run in plan.runs.values() if run.stage is stage] for stage in STAGES}
    assert {name: len(runs) for name, runs in by_stage.items()} == {"pretrain": 6, "adapt": 4, "evaluate": 10}
    adapted = plan.runs["adapt-prefix_decoder-mlm-lm_a-seed1"]
    assert adapted.after == "pretrain-prefix_decoder-mlm-seed1" and len(plan.cells_of(adapted.after)) == 2
    assert f'INITIAL_CHECKPOINT_PATH = "s/runs/{adapted.after}"' in adapted.text and "SEED = 1" in adapted.text
    evaluated = plan.runs["evaluate-prefix_decoder-mlm-lm_a-seed1"]
    assert evaluated.model_dir == adapted.model_dir and evaluated.after == adapted.name
    names = list(plan.runs)
    assert all(run.after is None or names.index(run.after) < names.index(run.name) for run in plan.runs.values())
    once = dataclasses.replace(STUDY, stages=(dataclasses.replace(STAGES[0], seeds=1), *STAGES[1:]))
    runs = make_plan(once, "s").runs
    assert runs["adapt-causal_decoder-mlm-lm_a-seed1"].after == "pretrain-causal_decoder-mlm-seed0"


def test_cells_that_differ_in_a_condition_share_a_run_and_different_runs_have_different_names():
    methods = Factor(name="method", values={"all": (), "some": ("TRAINABLE = '.*norm.*'",), "scratch": ()})
    pretrain = dataclasses.replace(STAGES[0], when={"method": ("all", "some")})
    tune = Stage(name="tune", factors=("method",), after=("pretrain",), when=pretrain.when, overrides=COMMON)
    study = Study(factors=(*FACTORS[:2], methods), stages=(pretrain, tune), exclude=({"method": "scratch"},))
    by_stage = [run.stage.name for run in make_plan(study, "s").runs.values()]
    assert (by_stage.count("pretrain"), by_stage.count("tune")) == (4, 8)
    adapt = Stage(name="adapt", after=("pretrain",), when={"method": ("some", "scratch")}, overrides=COMMON)
    tune = dataclasses.replace(tune, factors=(), after=("adapt", "pretrain"), when={})
    with pytest.raises(UserError, match="both have the name tune-causal_decoder-full_lm-seed0. Add the factor"):
        make_plan(dataclasses.replace(study, stages=(STAGES[0], adapt, tune), exclude=()), "s")


def test_a_stage_with_tasks_has_a_run_for_each_and_continues_the_same_task():
    tasks = {name: (f"MIXTURE_OR_TASK_NAME = '{name}'",) for name in ("cola", "rte")}
    without = Stage(name="without", tasks={name: (f"LEFT_OUT = '{name}'",) for name in tasks}, overrides=COMMON)
    tune = Stage(name="tune", after=("without", "pretrain", None), tasks=tasks, overrides=COMMON)
    condition = lambda stage, *values: dataclasses.replace(stage, when={"adaptation": values})
    adaptation = Factor(name="adaptation", values={"none": (), "LM-A": (), "scratch": ()})
    settings = {"tune": ("EVALS = (@LossEvaluation(),)",)}
    stages = (condition(STAGES[0], "none"), condition(without, "LM-A"), tune)
    study = Study(factors=(*FACTORS[:2], adaptation), stages=stages, settings=settings)
    assert dataclasses.replace(study, seeds=(1,)).stages == study.stages
    runs = make_plan(study, "s").runs
    trained_on = {run.text.split("MIXTURE_OR_TASK_NAME = ")[-1].split("\n")[0]: run for run in runs.values()}
    assert set(trained_on) == {"'sotu'", "'cola'", "'rte'"}
    after = {(run.stage.name, run.after and run.after.split("-")[0]) for run in runs.values()}
    assert {name for name in after if name[0].startswith("tune")} == {
        (f"tune_{task}", before) for task in tasks for before in (None, "pretrain", f"without_{task}")
    }  # fmt: skip
    assert all(settings["tune"][0] in run.text for run in runs.values() if run.stage.name.startswith("tune"))
    scratch = [run for run in runs.values() if run.stage.name == "tune_rte" and run.after is None]
    assert scratch and all("INITIAL_CHECKPOINT_PATH" not in run.text for run in scratch)
    with pytest.raises(UserError, match="evaluates, but may come after no stage"):
        Stage(name="evaluate", command="eval", after=("pretrain", None))
    with pytest.raises(UserError, match="The cell causal decoder, full LM, none has no stage. Add it to Study.exclude"):
        make_plan(Study(factors=FACTORS, stages=(condition(STAGES[0], "LM-A"),)), "s")
    with pytest.raises(UserError, match="None must be the last"):
        Stage(name="tune", after=(None, "pretrain"))


def test_quantities_are_those_of_the_runs():
    numbers = compute_quantities(make_plan(STUDY, "s"))
    pretrained, adapted = numbers["pretrain-causal_decoder-mlm-seed0"], numbers["adapt-causal_decoder-mlm-lm_a-seed0"]
    assert (pretrained.tokens, pretrained.batch_tokens, pretrained.steps) == (4 * 8 * 65, 8 * 65, 4)
    assert (adapted.steps, adapted.last_step, adapted.tokens) == (2, 6, 2 * 8 * 65)  # the step is carried over
    assert (
        "TRAIN_STEPS = 402"
        in make_plan(dataclasses.replace(STUDY, scale="paper"), "s").runs["adapt-causal_decoder-mlm-lm_a-seed0"].text
    )
    with pytest.raises(UserError, match='no steps for the scale "papers". Did you mean "paper"'):
        make_plan(dataclasses.replace(STUDY, scale="papers"), "s")
    network = GinConfig([DECODER], [*BINDINGS]).model().network
    assert pretrained.flops == 4 * 8 * network.flops(0, 65) and pretrained.seed == 0


def test_settings_of_a_study_are_for_all_trainings_or_by_stage():
    binding = 'MIXTURE_OR_TASK_NAME = "other"'
    ends = lambda settings: {
        run.stage.name: run.text.count(binding)
        for run in make_plan(dataclasses.replace(STUDY, settings=settings), "s").runs.values()
    }
    assert ends((binding,)) == {"pretrain": 1, "adapt": 1, "evaluate": 0}
    assert ends({"pretrain": (binding,), "evaluate": (binding,)}) == {"pretrain": 1, "adapt": 0, "evaluate": 1}
    with pytest.raises(UserError, match='Study.settings has "pretrian", which is not a stage. Did you mean "pretrain"'):
        dataclasses.replace(STUDY, settings={"pretrian": (binding,)})


def test_a_value_has_settings_for_one_stage_and_for_all_others(capsys):
    values = {"few": {"first": ("TRAIN_STEPS = 3",), "*": ("TRAIN_STEPS = 5",), "secnd": ()}}
    factor = Factor(name="steps", values=values)
    stages = tuple(Stage(name=name, factors=("steps",)) for name in ("first", "second", "third"))
    plan = make_plan(Study(factors=(factor,), stages=stages), "s")
    assert [re.search("TRAIN_STEPS = (.)", run.text)[1] for run in plan.runs.values()] == ["3", "5", "5"]
    assert 'has settings for "secnd", which is not a stage. Did you mean "second"?' in capsys.readouterr().err


def test_steps_that_a_cell_sets_itself_are_not_overridden_in_silence():
    objectives = Factor(name="objective", values={"full LM": FULL_LM, "MLM": (*MLM, "TRAIN_STEPS = 5")})
    plan = make_plan(dataclasses.replace(STUDY, factors=(FACTORS[0], objectives, FACTORS[2])), "s")
    with pytest.raises(UserError, match="pretrain-causal_decoder-mlm-seed0 .* TRAIN_STEPS = 5, and pretrain/Stage.steps .* 4"):
        compute_quantities(plan)


def test_steps_spend_the_flops_of_a_budget():
    budget = Factor(name="budget", values={"2e9": (), "4e9": ()})
    stage = Stage(name="pretrain", factors=("architecture", "objective", "budget"), overrides=COMMON, flops="budget")
    study = Study(factors=(*FACTORS[:2], budget), stages=(stage,))
    plan = make_plan(study, "s")
    per_step = 8 * GinConfig([DECODER], [*BINDINGS]).model().network.flops(0, 65)
    for name, quantities in compute_quantities(plan).items():
        flops = float(plan.runs[name].values["budget"])
        assert quantities.steps == flops // per_step > 1 and flops - per_step < quantities.flops <= flops
    for values, says in (({"large": ()}, 'value "large" is not a number of FLOPs'), ({"9": ()}, "has 9 FLOPs. A step takes")):
        factors = (*FACTORS[:2], Factor(name="budget", values=values))
        with pytest.raises(UserError, match=says):
            make_plan(dataclasses.replace(study, factors=factors), "s")
    with pytest.raises(UserError, match="steps and pretrain/Stage.flops are both set"):
        dataclasses.replace(stage, steps=4)


@pytest.mark.parametrize(
    "quantity, binding",
    [
        ("tokens", "BATCH_SIZE = 16"),
        ("seed", "SEED = 7"),
        exhaustive("vocabulary", "ByteVocabulary.extra_ids = 50"),
        ("dropout", "DROPOUT_RATE = 0.1"),
        exhaustive("precision", 'TransformerConfig.dtype = "bfloat16"'),
        ("text", "DataConfig.unique_tokens = 1000"),
        exhaustive("optimizer", "LearningRate.base_learning_rate = 0.5"),
        exhaustive("parameters", "TransformerConfig.mlp_dim = 80"),
        ("flops", "TransformerConfig.mlp_dim = 80"),
    ],
)
def test_a_cell_that_is_not_equal_is_refused_by_name(quantity, binding):
    objectives = Factor(name="objective", values={"full LM": FULL_LM, "MLM": (*MLM, binding)})
    stage = dataclasses.replace(STAGES[0], settings=(DECODER, *STAGES[0].overrides), overrides=())
    factor = Factor(name="architecture", values={"causal decoder": ()})
    study = Study(factors=(factor, objectives), stages=(stage,), equal=(quantity,))
    plan = make_plan(study, "s")
    with pytest.raises(UserError, match=f'stage "pretrain" are not equal in {quantity}: .*pretrain-.*-mlm-seed0 has'):
        check_equality(plan, compute_quantities(plan))
    same = make_plan(dataclasses.replace(study, factors=(factor, FACTORS[1])), "s")
    assert check_equality(same, compute_quantities(same)) == [f"pretrain: 2 runs with equal {quantity}"]


STUB = """
import os, pathlib, sys, time
name = pathlib.Path(next(word for word in sys.argv if word.startswith("--gin_file="))).stem
events = open("events", "a", buffering=1)
events.write(f"start {name} {os.environ.get('CUDA_VISIBLE_DEVICES')}\\n")
if name in pathlib.Path("failing").read_text().split():
    sys.exit("it does not work")
if name in pathlib.Path("waiting").read_text().split():
    time.sleep(100)
time.sleep(0.1)
cores = ",".join(map(str, sorted(os.sched_getaffinity(0))))
events.write(f"end {name} {cores} {os.environ['NPROC']}\\n")
"""


@pytest.fixture
def stub(tmp_path):
    """Replaces the commands of a study by a stub in the working directory, which `python -m t5x_lab` finds first."""
    (tmp_path / "t5x_lab").mkdir()
    (tmp_path / "t5x_lab" / "__main__.py").write_text(STUB)
    for name in ("failing", "waiting", "events"):
        (tmp_path / name).write_text("")
    return lambda: (tmp_path / "events").read_text().splitlines()


def test_runs_start_after_those_that_they_continue_and_never_twice(stub):
    plan = make_plan(STUDY, os.path.abspath("s"))
    assert Execution(plan, jobs=3, devices=("0,1", "2,3", "4"), log=lambda line: None).run()
    events = [line.split() for line in stub()]
    began = [event[1] for event in events if event[0] == "start"]
    assert sorted(began) == sorted(plan.runs)
    position = {(event[0], event[1]): number for number, event in enumerate(events)}
    for run in plan.runs.values():
        assert run.after is None or position["end", run.after] < position["start", run.name]
    assert {event[2] for event in events if event[0] == "start"} == {"0,1", "2,3", "4"}
    assert Execution(plan, log=lambda line: None).run() and len(stub()) == len(events)  # nothing is left to do

    longer = (dataclasses.replace(STAGES[0], steps=5), *STAGES[1:])
    assert Execution(make_plan(dataclasses.replace(STUDY, stages=longer), plan.study_dir), log=lambda line: None).run()
    assert len(stub()) == 2 * len(events)  # the settings changed, also of what the other stages continue


def test_the_time_left_counts_stages_of_which_a_run_is_finished(stub):
    lines: list[str] = []
    plan = make_plan(dataclasses.replace(STUDY, seeds=(0,)), os.path.abspath("s"))
    flops = {name: 1e9 for name, run in plan.runs.items() if run.stage.command == "train"}
    assert Execution(plan, flops=flops, log=lines.append).run()
    finished = [line for line in lines if ": finished" in line]
    precision = {
        line.split("-")[0]: re.findall("at least|about", line) for line in reversed(finished[:-1])
    }  # the first of each
    assert precision == {"pretrain": ["at least"], "adapt": ["at least"], "evaluate": ["about"]}
    assert finished[-1].endswith("10 of 10 runs")


def test_runs_at_a_time_share_the_cores(stub, monkeypatch):
    cores = sorted(os.sched_getaffinity(0))
    monkeypatch.setenv("XLA_FLAGS", "")
    assert Execution(make_plan(STUDY, os.path.abspath("s")), jobs=2, log=lambda line: None).run()
    shares = {tuple(map(int, event.split()[2].split(","))) for event in stub() if event.startswith("end")}
    assert sorted(core for share in shares for core in share) == cores if len(cores) > 1 else shares == {tuple(cores)}
    assert {event.split()[3] for event in stub() if event.startswith("end")} == {str(max(2, len(share))) for share in shares}


@pytest.mark.parametrize(
    "argv, environment, expected",
    [
        (["train"], {}, 12),
        (["train"], {"XLA_FLAGS": "--xla_force_host_platform_device_count=8"}, 64),
        (["train"], {"JAX_NUM_CPU_DEVICES": "8"}, 64),
        (["train", "--distributed"], {}, 64),
        (["train", "--coordinator_address=localhost:1", "--num_processes=2"], {}, 64),
        (["train"], {"JAX_COORDINATOR_ADDRESS": "localhost:1"}, 64),
    ],
)
def test_only_collectives_need_more_threads_than_cores(argv, environment, expected):
    assert num_xla_threads(12, argv, environment) == expected
    assert num_xla_threads(1, ["train"], {}) == 2 and num_xla_threads(96, argv, environment) == 96


def test_a_run_that_fails_stops_only_those_that_continue_it(stub, tmp_path):
    failing = "pretrain-causal_decoder-mlm-seed0"
    (tmp_path / "failing").write_text(failing)
    plan, lines = make_plan(STUDY, os.path.abspath("s")), []
    execution = Execution(plan, log=lines.append)
    assert not execution.run() and execution.failure(plan.runs[failing]) == "it does not work"
    assert f"{failing}: failed with status 1: it does not work" in lines
    unfinished = {name for name, run in plan.runs.items() if not execution.is_finished(run)}
    assert unfinished == {
        failing, "adapt-causal_decoder-mlm-lm_a-seed0", "evaluate-causal_decoder-mlm-seed0",
        "evaluate-causal_decoder-mlm-lm_a-seed0",
    }  # fmt: skip
    (tmp_path / "failing").write_text("")
    before = len(stub())
    assert Execution(plan, log=lambda line: None).run()
    assert {line.split()[1] for line in stub()[before:]} == unfinished


def test_launch_files_run_what_is_not_finished_and_mark_it(stub, tmp_path, monkeypatch):
    """Uses stubs of t5x_lab, srun and sbatch. The stub of sbatch runs the array at once."""
    plan = make_plan(STUDY, os.path.abspath("a study"))
    programs = {
        "t5x_lab": f'exec {sys.executable} -m t5x_lab "$@"',
        "srun": 'exec "$@"',
        "sbatch": 'file=${!#}; range=$(grep -oP "array=0-\\K[0-9]+" "$file"); for i in $(seq 0 $range); do '
        'SLURM_ARRAY_TASK_ID=$i bash "$file" 1>&2; done; echo "$@" >> submitted; echo 17',
    }
    (tmp_path / "bin").mkdir()
    for name, code in programs.items():
        (tmp_path / "bin" / name).write_text(f"#!/bin/bash\n{code}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    failing = "pretrain-prefix_decoder-mlm-seed1"
    (tmp_path / "failing").write_text(failing)
    subprocess.run([write_launch_files(plan, "slurm")], check=False)
    began = [line.split()[1] for line in stub() if line.startswith("start")]
    assert len(began) == 6 + 3 + 8 and len(set(began)) == len(began)  # one adaptation and two evaluations have nothing before
    submitted = (tmp_path / "submitted").read_text().splitlines()
    assert "dependency" not in submitted[0] and "--dependency=afterany:17" in submitted[1]
    assert "--dependency=afterany:17:17" in submitted[2]
    (tmp_path / "failing").write_text("")
    subprocess.run([write_launch_files(plan, "commands")], check=True)
    again = [line.split()[1] for line in stub() if line.startswith("start")][len(began) :]
    assert sorted([*again, *began]) == sorted([*plan.runs, failing]) and again[0] == failing
    assert Execution(plan, log=lambda line: None).run() and len(stub()) == 2 * len(plan.runs) + 1


KUBECTL = """
import subprocess, sys, yaml
if sys.argv[1] == "apply":
    for jobset in yaml.safe_load_all(open(sys.argv[3])):
        (job,) = jobset["spec"]["replicatedJobs"]
        (container,) = job["template"]["spec"]["template"]["spec"]["containers"]
        subprocess.run(container["command"])
else:
    print(*sys.argv[1:], file=open("waited", "a"))
"""


def test_jobsets_run_a_stage_after_the_one_before(stub, tmp_path, monkeypatch):
    """The stub of kubectl runs the commands of the containers."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "kubectl.py").write_text(KUBECTL)
    for name, program in (("t5x_lab", f"{sys.executable} -m t5x_lab"), ("kubectl", f"{sys.executable} {tmp_path}/kubectl.py")):
        (tmp_path / "bin" / name).write_text(f'#!/bin/bash\nexec {program} "$@"\n')
        (tmp_path / "bin" / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    plan = make_plan(STUDY, os.path.abspath("a study"))
    (tmp_path / "failing").write_text("pretrain-prefix_decoder-mlm-seed1")
    subprocess.run([write_launch_files(plan, "jobset", "v4:4x4x4")], check=True)
    began = [line.split()[1] for line in stub() if line.startswith("start")]
    assert len(began) == 6 + 3 + 8 and len(set(began)) == len(began)  # one adaptation and two evaluations have nothing before
    waited = (tmp_path / "waited").read_text().splitlines()
    assert len(waited) == 3 and all("terminalState" in line and "stage=" in line for line in waited)
    jobsets = [x for path in (tmp_path / "a study/launch").glob("*.yaml") for x in yaml.safe_load_all(path.read_text())]
    names = [jobset["metadata"]["name"] for jobset in jobsets]
    assert len(set(names)) == len(plan.runs) and all(re.fullmatch(r"[a-z]([-a-z0-9]{0,50}[a-z0-9])?", name) for name in names)
    for jobset in jobsets:
        assert all(
            re.fullmatch(r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?", x) for x in jobset["metadata"]["labels"].values()
        )
        (job,) = jobset["spec"]["replicatedJobs"]
        spec = job["template"]["spec"]
        assert spec["parallelism"] == spec["completions"] == 16  # hosts of four of the 64 chips
        selector = spec["template"]["spec"]["nodeSelector"]
        assert (
            selector["cloud.google.com/gke-tpu-topology"] == "4x4x4"
            and "v4" in selector["cloud.google.com/gke-tpu-accelerator"]
        )
    for topology in (None, "v3:2x2", "v4"):
        with pytest.raises(UserError, match="--topology=v5e:4x4"):
            write_launch_files(plan, "jobset", topology)


def test_a_study_runs_once_at_a_time(stub, tmp_path):
    plan = make_plan(STUDY, os.path.abspath("s"))
    (tmp_path / "s").mkdir()
    with open(tmp_path / "s" / "LOCK", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(UserError, match="Another process runs the study"):
            Execution(plan, log=lambda line: None).run()


def write_documented_study() -> list[str]:
    """Writes the study of docs/studies.md. Returns a command that runs it with one seed and few steps."""
    pathlib.Path("my_study.gin").write_text(documented("studies.md", "Study.factors"))
    small = ("CHECKPOINT_PERIOD = 20", "DATA_SHARDS = 1", "DataConfig.shuffle_buffer_size = 20", *BINDINGS)
    few = ["--gin.SEEDS=(0,)", "--gin.pretrain/Stage.steps=60", f"--gin.Study.settings={small!r}"]
    return ["study", "--gin_file=my_study.gin", *few]


@pytest.mark.exhaustive
def test_a_study_that_is_killed_has_the_report_of_one_that_was_not():
    """Kills the study alone, 20 times. Its runs stop by themselves, and the same command continues them.

    Results that are copied without checkpoints have the same report.
    """
    argv = [*write_documented_study(), "--jobs=2"]
    whole = commands.run(*argv, "--study_dir=whole")
    assert whole.returncode == 0 and "pretrain: 4 runs with equal tokens" in whole.stdout, whole.stderr
    draw = random.Random(0)
    for _ in range(20):
        killed = commands.Command(*argv, "--study_dir=parts", log="log")
        with contextlib.suppress(TimeoutError):
            killed.wait(timeout=draw.uniform(1, 25))
        killed.kill()
        killed.wait()
    done = commands.run(*argv, "--study_dir=parts")
    assert done.returncode == 0, done.stderr
    assert pathlib.Path("parts/report.json").read_text() == pathlib.Path("whole/report.json").read_text()
    report = json.loads(pathlib.Path("whole/report.json").read_text())["measures"]["held-out loss"]
    assert len(report["cells"]) == 4 and len(report["orderings"]) == 6 and report["units"] == ["sotu_span_corruption"]
    for run in sorted(os.listdir("whole/runs")):
        expected, actual = (losses(f"{folder}/runs/{run}") for folder in ("whole", "parts"))
        assert expected == actual and len(expected) == 60, run
    lines = f"{pathlib.Path('log').read_text()}\n{done.stderr}".splitlines()
    finished = [line.partition(":")[0] for line in lines if ": finished in" in line]
    assert len(finished) == len(set(finished)) == 8  # no run twice
    for file in pathlib.Path("parts/runs").rglob("*.json*"):
        if "checkpoints" not in file.parts:
            copied = pathlib.Path("copied", *file.parts[1:])
            copied.parent.mkdir(parents=True, exist_ok=True)
            copied.write_bytes(file.read_bytes())
    assert main([*argv, "--study_dir=copied", "--report"]) == 0
    assert pathlib.Path("copied/report.json").read_text() == pathlib.Path("whole/report.json").read_text()
    assert not pathlib.Path("copied/pending").exists()


def test_a_dry_run_prints_the_plan_and_starts_nothing(capsys):
    assert main([*write_documented_study(), "--study_dir=s", "--gin.SEEDS=(0, 1, 2)", "--dry_run"]) == 0
    output = capsys.readouterr().out
    assert "pretrain-prefix_decoder-0_03-seed2" in output and "24 runs" in output and not os.path.exists("s")
    assert f"{12 * 60 * 8 * 128:,}" in output and "pretrain: 12 runs with equal tokens, parameters" in output
    assert main(["study", "--study_dir=s"]) == 2


@pytest.mark.parametrize(
    "change, says",
    [
        (dict(stages=(dataclasses.replace(STAGES[1], after=("pre",)),)), 'has "pre", which is not an earlier stage'),
        (dict(stages=(dataclasses.replace(STAGES[0], factors=("architectures",)),)), 'Did you mean "architecture"'),
        (dict(exclude=({"objective": "PLM"},)), 'has the value "PLM", which the factor "objective" does not have'),
        (dict(seeds=()), "SEEDS is ()"),
        (dict(settings=("models/decoder/tiny.gin", 3)), "must be a tuple of gin files and bindings"),
        (dict(equal=("flop",)), "flops"),
        (dict(stages=(STAGES[0], STAGES[0])), "entries with different names"),
    ],
)
def test_mistakes_are_sentences(change, says):
    with pytest.raises(UserError, match=re.escape(says)):
        dataclasses.replace(STUDY, **change)


def test_a_value_needs_settings_and_a_name_of_its_own():
    with pytest.raises(UserError, match="must be a tuple of gin files and bindings"):
        Factor(name="size", values={"small": "models/decoder/small.gin"})
    with pytest.raises(UserError, match='have the same file name, "full_lm"'):
        Factor(name="objective", values={"full LM": (), "full-LM": ()})
    with pytest.raises(UserError, match="evaluates, but may come after no stage"):
        Stage(name="evaluate", command="eval")


MEASURED = """
import json, pathlib, re, sys
text = pathlib.Path(next(word for word in sys.argv if word.startswith("--gin_file="))[11:]).read_text()
folder = pathlib.Path(re.findall('MODEL_DIR = "(.*)"', text)[-1])
assert re.findall("INITIAL_CHECKPOINT_PATH = (.*)", text)[-1] == "None"
folder.mkdir()
seconds = [90.0, 2.0, 3.0, 2.0, 2.0] if "full_lm" in text else [90.0, 4.0, 4.0, 4.0, 9.0]
lines = [{"step": n + 1, "split": "train", "seconds_per_step": s} for n, s in enumerate(seconds)]
(folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\\n" for line in lines))
open("events", "a").write("measured\\n")
"""


def test_hours_are_those_of_the_median_step_and_seeds_share_a_measurement(stub, tmp_path):
    (tmp_path / "t5x_lab" / "__main__.py").write_text(MEASURED)
    plan = make_plan(STUDY, "s")
    times = measure_steps(plan, log=lambda line: None)
    assert len(stub()) == 3 + 2 and len(times) == 6 + 4  # trainings that differ, and all
    assert times["pretrain-causal_decoder-full_lm-seed1"].seconds == 2.0
    assert times["pretrain-prefix_decoder-mlm-seed0"].seconds == 4.0
    table = plan_table(
        plan, compute_quantities(plan), {name: dataclasses.replace(t, seconds=3600.0) for name, t in times.items()}
    )
    assert "2 at a time" in plan_table(plan, compute_quantities(plan), times, jobs=2).splitlines()[-1]
    assert "4.00  measured" in table and f"{6 * 4 + 4 * 2:.2f}" in table.splitlines()[-1]


@pytest.mark.exhaustive
def test_steps_are_compiled_for_a_slice_without_one():
    done = commands.run(
        *write_documented_study(), "--study_dir=s", "--topology=v5e:2x2", "--dry_run", environment=AS_DOCUMENTED
    )
    assert done.returncode == 0, done.stderr
    rows = [line for line in done.stdout.splitlines() if line.startswith("pretrain-")]
    assert len(rows) == 4 and all("lower bound" in row and "GiB per device" in row for row in rows), done.stdout


PUBLISHED = {"causal decoder": 4_762_310_656, "prefix decoder": 4_762_310_656, "encoder-decoder": 11_003_736_064}


def test_the_study_of_architecture_and_objective_has_the_papers_sizes_and_tokens():
    """Wang et al. 2022, Tables 1 and 2: 4.8 and 11.0 billion parameters, 168.04 billion tokens in 131,072 steps."""
    records = ('TEMPLATES = ("none",)', "RECORDS = @Records()", "Records.files = 'none/{dataset}/{split}.jsonl'")
    bindings = [
        "Study.stages = (@pretrain/Stage(), @adapt/Stage())", 'finetuning/Factor.values = {"none": ()}', 'SCALE = "paper"',
        f"Study.settings = {records!r}",
    ]  # fmt: skip
    GinConfig(["studies/defaults.gin", "studies/architecture_objective.gin"], bindings)
    plan = make_plan(build("Study"), "s")
    numbers = compute_quantities(plan)
    assert len(check_equality(plan, numbers)) == 2
    pretrained = {name: q for name, q in numbers.items() if name.startswith("pretrain")}
    assert len(pretrained) == 6 and {(q.tokens, q.steps) for q in pretrained.values()} == {(168_040_595_456, 131_072)}
    for name, q in pretrained.items():
        assert q.parameters == PUBLISHED[plan.runs[name].values["architecture"]]
    adapted = {name: q for name, q in numbers.items() if name.startswith("adapt")}
    assert {q.last_step for q in adapted.values()} == {171_008} and len(adapted) == 2


def test_a_study_starts_runs_from_a_process_that_uses_jax(stub):
    """JAX has threads, with which a fork in Python is an error in tests: a study starts programs without one."""
    jnp.zeros(3).block_until_ready()
    plan = make_plan(STUDY, os.path.abspath("s"))
    assert Execution(plan, jobs=2, log=lambda line: None).run()


TEXT_TASK = ('MIXTURE_OR_TASK_NAME = "sotu_span_corruption"', 'TASK_FEATURE_LENGTHS = {"inputs": 96}')


RECORDS = ("RECORDS = @Records()", "Records.files = 'none/{dataset}/{split}.jsonl'", "Records.num_examples = 4000")
FLAN = {"finetune": (*RECORDS, "TRAIN_STEPS = 1000")}


@pytest.mark.parametrize(
    "files, settings",
    [
        (["t5_repeats.gin"], {"finetune": TEXT_TASK}),
        exhaustive(["learning_rate.gin"], {}),
        exhaustive(["finetuning_rate.gin"], {"finetune": TEXT_TASK}),
        exhaustive(["scaling.gin"], {}),
        exhaustive(["t5_objectives.gin"], {"finetune": TEXT_TASK}),
        exhaustive(["t5_methods.gin"], {"finetune": TEXT_TASK}),
        exhaustive(["t5_methods.gin", "t5/paper.gin", "t5/paper_methods.gin"], {}),
        exhaustive(["t5_objectives.gin", "t5/paper.gin"], {}),
        exhaustive(["t5_architectures.gin"], {"finetune": TEXT_TASK}),
        exhaustive(["t5_architectures.gin", "t5/paper.gin"], {}),
        exhaustive(["t5_mixing.gin"], {"finetune": TEXT_TASK, "multitask": (*TEXT_TASK, "MIXING = None")}),
        exhaustive(["t5_mixing.gin", "t5/paper.gin", "t5/paper_mixing_values.gin"], {}),
        exhaustive(
            ["t5_multitask.gin"],
            {"finetune": TEXT_TASK, **dict.fromkeys(("mixture", "alone", "without"), (*TEXT_TASK, "MIXING = None"))},
        ),
        exhaustive(["t5_multitask.gin", "t5/paper.gin", "t5/paper_multitask_tasks.gin"], {}),
        exhaustive(["t5_compute.gin"], {"finetune": TEXT_TASK}),
        exhaustive(["t5_compute.gin", "t5/paper.gin", "t5/paper_compute.gin"], {}),
        exhaustive(["t5_repeats.gin", "t5/paper.gin", "t5/paper_repeats.gin"], {}),
        exhaustive(["gpt1_layers.gin"], {"finetune": ('MIXTURE_OR_TASK_NAME = "classify_glue_sst2"', *RECORDS)}),
        exhaustive(["gpt1_layers.gin", "gpt1/paper.gin"], {"finetune": RECORDS}),
        exhaustive(["scaling.gin", "scaling/paper.gin"], {}),
        exhaustive(
            ["adaptation.gin"],
            {"finetune": ('MIXTURE_OR_TASK_NAME = "glue_sst2"', 'RankingEvaluation.task = "glue_sst2_score_eval"', *RECORDS)},
        ),
        exhaustive(["flan_clusters.gin"], FLAN),
        exhaustive(["flan_clusters.gin", "flan/paper_clusters.gin"], {"finetune": RECORDS}),
        exhaustive(["flan_templates.gin"], FLAN),
        exhaustive(["flan_instructions.gin"], FLAN),
        exhaustive(["flan_few_shot.gin"], FLAN),
        exhaustive(["flan_scale.gin"], FLAN),
    ],
    ids=lambda x: "+".join(x) if isinstance(x, list) else "",
)
def test_studies_that_ship_can_be_planned(files, settings):
    GinConfig([f"studies/{file}" for file in ("defaults.gin", *files)], [f"Study.settings = {settings!r}"])
    study = build("Study")
    plan = make_plan(study, "s")
    quantities = compute_quantities(plan)
    assert check_equality(plan, quantities) and all(q.steps > 0 for q in quantities.values())
    titles = {cell.title for cell in plan.cells}
    for measure in study.measures:
        assert measure.published.keys() <= titles, measure.name
        assert all(any(stage in cell.runs for stage in measure.stages or cell.runs) for cell in plan.cells), measure.name
