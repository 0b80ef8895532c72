"""A run's list of evaluations: measured while training and afterwards, kept in files that rules read, and told when wrong."""

import json
import math
import pathlib
import shutil
import types

import commands
import jax
import numpy as np
import pytest
import t5.evaluation.metrics
from known_task import TRAIN, write_task
from runs_of_text import FULL_LM, flags

from t5x_lab.checkpoints.layout import finished_steps
from t5x_lab.cli.main import main
from t5x_lab.config.errors import UserError
from t5x_lab.evaluation.config import EarlyStopping
from t5x_lab.evaluation.evaluation import EvaluationResult
from t5x_lab.evaluation.questions import Question, make_answer
from t5x_lab.evaluation.ranking import accuracy
from t5x_lab.evaluation.results import ResultFiles
from t5x_lab.observe.metrics import read_metrics
from t5x_lab.runs.evaluate import checkpoints as evaluate_checkpoints
from t5x_lab.runs.evaluate import evaluations as evaluate

MORE = '''
import os
import signal

import gin
import seqio
from seqio.metrics import Histogram, Text

import known_tasks


@gin.configurable
class Killer:
    """Kills the process after a step, once."""

    def __init__(self, step: int = 0):
        self.step = step

    def on_step(self, step, metrics):
        mark = f"killed_{self.step}"
        if step == self.step and not os.path.exists(mark):
            open(mark, "w").close()
            os.kill(os.getpid(), signal.SIGKILL)


@gin.configurable
class Shouting:
    """An evaluation of one's own: how much of what is written is in capitals."""

    name, period, weights = "shouting", 2, "last"

    def prepare(self, model):
        return self.measure

    def measure(self, model):
        texts = model.generate(["what is red?", "what is an oak?"], max_tokens=4)
        return {"all": {"capitals": sum(text.isupper() for (text,) in texts) / len(texts), "step": model.step}}


@gin.configurable
class Followed:
    """An evaluation that only a process which follows measures, and is killed at once."""

    name, period, weights = "followed", None, "last"

    def prepare(self, model):
        return self.measure

    def measure(self, model):
        with open("followed", "a") as log:
            log.write(f"{model.step}\\n")
        if model.step == 4 and not os.path.exists("killed_follower"):
            open("killed_follower", "w").close()
            os.kill(os.getpid(), signal.SIGKILL)
        return {"all": {"step": model.step}}


def breaks(targets, predictions):
    raise ZeroDivisionError("no predictions like these")


def shows(targets, predictions):
    return {"first": Text(f"wrote: {predictions[0]!r}"), "lengths": Histogram([len(text) for text in predictions]), "n": len(targets)}


def again(name, source, metrics):
    task = seqio.TaskRegistry.get("known")
    seqio.TaskRegistry.add(
        name, source or task.source, preprocessors=task.preprocessors, output_features=task.output_features, metric_fns=metrics
    )


again("breaking", None, [breaks])
again("showing", None, [shows])
again("trained_alone", seqio.TextLineDataSource({"train": "known.tsv"}), [])
again("unmeasured", None, [])
again("moved", seqio.TextLineDataSource({"train": "known.tsv", "validation": "moved.tsv"}), [])
again("empty", seqio.TextLineDataSource({"train": "known.tsv", "validation": "empty.tsv"}), [known_tasks.exact])
'''

LIST = """
import more_tasks
EVALS = (
    @LossEvaluation(), @speeches/LossEvaluation(), @beams/MetricsEvaluation(), @ranked/RankingEvaluation(), @both/LossEvaluation(),
    @Shouting(), @Followed(),
)
speeches/LossEvaluation.name = "speeches"
speeches/LossEvaluation.task = "sotu_prefix_lm"
speeches/LossEvaluation.lengths = {"inputs": 32, "targets": 32}
speeches/LossEvaluation.num_batches = 2
speeches/LossEvaluation.period = 2
beams/MetricsEvaluation.name = "beams"
beams/MetricsEvaluation.decoding = @BeamConfig()
beams/MetricsEvaluation.outputs = True
BeamConfig.size = 2
ranked/RankingEvaluation.name = "ranked"
ranked/RankingEvaluation.task = "ranked"
ranked/RankingEvaluation.steps = (1, 4)
both/LossEvaluation.name = "both"
both/LossEvaluation.task = "both_known"
both/LossEvaluation.at_start = True
"""

RUN = [*TRAIN, "--gin.EVAL_PERIOD=3", "--gin.CHECKPOINT_PERIOD=2", "--gin.SaveCheckpointConfig.keep=None"]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    write_task(tmp_path)
    (tmp_path / "more_tasks.py").write_text(MORE)
    (tmp_path / "evals.gin").write_text(LIST)
    (tmp_path / "empty.tsv").write_text("")
    return tmp_path


def files(run):
    """Everything that evaluations wrote, by path."""
    return {str(path.relative_to(run)): path.read_text() for path in sorted(pathlib.Path(run, "evals").rglob("*.json"))}


@pytest.mark.exhaustive
def test_a_list_of_evaluations_survives_kills_and_equals_eval(folder):
    """Two kills, with a process that follows: each file is that of an uninterrupted run, to the byte; so are `eval`'s."""
    run = lambda *argv, **more: commands.run(*argv, environment=commands.ON_ONE_DEVICE, **more)
    train = [*RUN, "--gin_file=evals.gin", "--gin.TRAIN_STEPS=6"]
    done = run(*train, "--gin.MODEL_DIR=whole")
    assert done.returncode == 0, done.stderr
    whole = files("whole")
    steps = {"eval": [3, 6], "speeches": [2, 4, 6], "beams": [3, 6], "ranked": [1, 4], "both": [0, 3, 6], "shouting": [2, 4, 6]}
    assert not pathlib.Path("followed").exists()
    assert set(whole) == {f"evals/{n}/{s}.json" for n, evaluated_steps in steps.items() for s in evaluated_steps} | {
        f"evals/{n}/settings.json" for n in steps
    }
    logged = {(line["split"], line["step"]): line for line in read_metrics("whole")}
    assert json.loads(whole["evals/both/3.json"])["results"]["known_too"]["loss"] == logged["both/known_too", 3]["loss"]
    assert len(pathlib.Path("whole/inference/beams/known-6.jsonl").read_text().splitlines()) == 12

    follow = lambda: commands.Command("eval", "--model_dir=part", "--follow", "--json", log="follow")
    following = follow()
    for kill in (3, 5):
        killed = run(*train, "--gin.MODEL_DIR=part", "--gin.HOOKS=(@Killer(),)", f"--gin.Killer.step={kill}")
        assert killed.returncode == -9, killed.stderr
    assert following.wait() == -9
    following = follow()
    assert run(*train, "--gin.MODEL_DIR=part").returncode == 0
    assert following.wait() == 0
    assert pathlib.Path("followed").read_text().split() == ["2", "4", "4", "6"]  # the first 4 was cut short
    part = files("part")
    assert {name: part[name] for name in whole} == whole
    followed = set(json.loads(pathlib.Path("follow").read_text().splitlines()[-1]))
    assert followed <= {"2", "4", "6"} and {f"evals/ranked/{step}.json" for step in (2, 4, 6)} <= set(part)

    pathlib.Path("whole/evals").rename("whole/before")
    assert run("eval", "--model_dir=whole", "--step=all").returncode == 0
    again = files("whole")
    assert again.keys() >= {name for name in whole if not name.endswith(("/1.json", "/3.json", "/0.json"))}
    assert {name: again[name] for name in whole if name in again} == {name: whole[name] for name in whole if name in again}


@pytest.mark.exhaustive
def test_two_processes_measure_what_one_does(folder):
    """Losses, metrics of texts that beams write, rankings and one's own; files are written once, by the first."""
    train = [*RUN, "--gin_file=evals.gin", "--gin.TRAIN_STEPS=4", "--gin.EVAL_PERIOD=4", "--gin.DATA_SHARDS=2"]
    assert commands.run(*train, "--gin.MODEL_DIR=alone", "--gin.MESH=fsdp=1").returncode == 0
    two = commands.start_two(*train, "--gin.MODEL_DIR=two", "--gin.MESH=fsdp=2")
    assert [process.wait() for process in two] == [0, 0], "".join(process.output() for process in two)
    alone, result = files("alone"), files("two")
    assert result.keys() == alone.keys() and {name.split("/")[1] for name in result} == {
        "eval", "speeches", "beams", "ranked", "both", "shouting",
    }  # fmt: skip
    for name, text in alone.items():
        actual, expected = json.loads(result[name]), json.loads(text)
        assert actual.keys() == expected.keys()
        if "results" in expected:
            jax.tree.map(
                lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-7), actual["results"], expected["results"]
            )
    written = [pathlib.Path(run, "inference/beams/known-4.jsonl").read_text().splitlines() for run in ("alone", "two")]
    texts = [[{**json.loads(line), "score": None} for line in lines] for lines in written]
    assert texts[0] == texts[1]


@pytest.mark.exhaustive
def test_best_checkpoints_by_two_evaluations_and_metrics_that_fail_or_are_texts(folder, capsys):
    output = [
        *TRAIN, "--gin_file=more.gin", "--gin.MODEL_DIR=run", "--gin.TRAIN_STEPS=5", "--gin.EVAL_PERIOD=1",
        "--gin.CHECKPOINT_PERIOD=1", "--gin.SaveCheckpointConfig.keep=1",
        '--gin.SaveCheckpointConfig.best_metric={"eval/known/loss": "highest", "odd/known/loss": "lowest"}',
    ]  # fmt: skip
    (folder / "more.gin").write_text(
        "import more_tasks\n"
        "EVALS = (@LossEvaluation(), @odd/LossEvaluation(), @bad/MetricsEvaluation(), @texts/MetricsEvaluation(), @none/MetricsEvaluation())\n"
        'odd/LossEvaluation.name = "odd"\nodd/LossEvaluation.steps = (1, 3)\n'
        'bad/MetricsEvaluation.name = "bad"\nbad/MetricsEvaluation.task = "breaking"\n'
        'texts/MetricsEvaluation.name = "texts"\ntexts/MetricsEvaluation.task = "showing"\n'
        'none/MetricsEvaluation.name = "none"\nnone/MetricsEvaluation.task = "empty"\n'
        "none/MetricsEvaluation.steps = (5,)\n"
    )
    assert main(output) == 0
    err = capsys.readouterr().err
    # The loss falls: of all steps the first is the highest, of 1 and 3 the third the lowest.
    assert finished_steps("run") == [1, 3, 5]
    assert err.count("ZeroDivisionError: no predictions like these") == 1 and "Training goes on." in err
    assert "more_tasks.py, line" in err and "wrote: '" in err and 'split of task "empty" is empty' in err
    report = json.loads(pathlib.Path("run/evals/texts/5.json").read_text())
    assert report["results"] == {"showing": {"n": 12.0}} and report["texts"]["showing"]["first"].startswith("wrote: ")
    assert "ZeroDivisionError" in json.loads(pathlib.Path("run/evals/bad/5.json").read_text())["failures"]["breaking"]
    assert any(b"texts/showing/lengths" in path.read_bytes() for path in pathlib.Path("run").glob("events.out*"))
    assert main(["eval", "--model_dir=run", "--json"]) == 1
    output = capsys.readouterr()
    assert "Some metrics failed, see the messages above: bad of step 5." in output.err
    assert json.loads(output.out)["5"]["eval/known"]["loss"] == json.loads(pathlib.Path("run/evals/eval/5.json").read_text())["results"]["known"]["loss"]  # fmt: skip


def test_evaluations_that_failed_are_no_results(tmp_path):
    """Neither early stopping nor `eval --follow` counts them; a value that is not finite does count."""
    files = ResultFiles(str(tmp_path), "eval", {})
    for step, loss in enumerate([3.0, None, None, None, 2.9, float("nan"), float("nan")], 1):
        failures = {"": "ValueError: no"} if loss is None else {}
        files.write(step, EvaluationResult(metrics={} if loss is None else {"a": {"loss": loss}}, failures=failures))
    assert [files.has(step) for step in range(1, 9)] == [True, False, False, False, True, True, True, False]
    evaluations = types.SimpleNamespace(find=lambda name: types.SimpleNamespace(files=files), _values={})
    rule = EarlyStopping("eval/a/loss", patience=2, best_is="lowest")
    assert [evaluate.Evaluations.should_stop(evaluations, rule, step) for step in range(1, 8)] == [False] * 6 + [True]


@pytest.mark.exhaustive
def test_a_run_ends_early_and_stays_ended(folder, capsys, monkeypatch):
    stopping = ["--gin.EARLY_STOPPING=@EarlyStopping()", "--gin.EarlyStopping.metric=eval/known/accuracy"]
    more = [
        "--gin.EarlyStopping.best_is=highest",
        "--gin.EarlyStopping.patience=2",
        "--gin.LearningRate.base_learning_rate=1e-9",
    ]
    more += ["--gin.EVALS=(@LossEvaluation(), @rare/LossEvaluation())", "--gin.rare/LossEvaluation.name=rare"]
    more += ["--gin.rare/LossEvaluation.period=40", "--gin.CHECKPOINT_PERIOD=4"]
    command = [*TRAIN, *stopping, *more, "--gin.MODEL_DIR=run", "--gin.TRAIN_STEPS=50", "--gin.EVAL_PERIOD=2"]
    assert main(command) == 0
    assert "eval/known/accuracy has not improved for 2 evaluations. Training ends at step 6." in capsys.readouterr().err
    end = pathlib.Path("run/END")
    assert finished_steps("run") == [4, 6] and json.loads(end.read_text())["step"] == 6
    assert [path.name for path in pathlib.Path("run/evals/rare").glob("[0-9]*")] == ["6.json"]  # as after any last step
    end.unlink()
    pathlib.Path("run/report.html").unlink()  # as if killed before it was written
    assert main(command) == 0 and "Nothing to do" in capsys.readouterr().err and finished_steps("run") == [4, 6]
    assert pathlib.Path("run/report.html").exists()
    assert json.loads(end.read_text())["step"] == 6
    shutil.rmtree("run/evals/rare")  # as if killed between the decision and what is due at the end
    assert main(command) == 0 and pathlib.Path("run/evals/rare/6.json").exists() and finished_steps("run") == [4, 6]

    shutil.rmtree("run/evals")
    read, went = evaluate_checkpoints.load_params, []

    def goes_away(result, *args):
        went.append(result)
        if len(went) == 1:
            shutil.rmtree("run/checkpoints/4")
            raise FileNotFoundError("the checkpoint was removed to make room for newer ones")
        return read(result, *args)

    assert main(["eval", "--model_dir=run", "--follow", "--step=4"]) == 2 and "Remove --step=4" in capsys.readouterr().err
    assert main(["eval", "--model_dir=run", "--follow", "--gin.TransformerConfig.emb_dim=32"]) == 2
    assert "was deleted while it was read" not in capsys.readouterr().err
    with monkeypatch.context() as patch:
        patch.setattr(evaluate_checkpoints, "load_params", goes_away)
        assert main(["eval", "--model_dir=run", "--follow"]) == 0
    assert "The checkpoint of step 4 was deleted while it was read" in capsys.readouterr().err
    assert [path.name for path in pathlib.Path("run/evals/eval").glob("[0-9]*")] == ["6.json"]
    assert main([*command, "--gin.EarlyStopping.metric=eval/known/accurcy", "--gin.TRAIN_STEPS=8"]) == 0
    assert 'EarlyStopping.metric = "eval/known/accurcy" has no value at step 8. Did you mean "eval/known/accuracy"?' in capsys.readouterr().err  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    "bindings, says",
    [
        (["mine/LossEvaluation.task = 'trained_alone'"], 'Evaluation "mine": "trained_alone" has no split "validation"; the splits are train'),
        (["mine/LossEvaluation.split = 'dev'"], 'has no split "dev"; the splits are train, validation'),
        (["mine/LossEvaluation.task = 'knwon'"], 'Evaluation "mine": There is no task or mixture "knwon". Did you mean "known"?'),
        (["mine/LossEvaluation.period = 0"], "LossEvaluation.period is 0. It must be greater than zero."),
        (["mine/LossEvaluation.name = 'eval'"], 'two evaluations with the name "eval"'),
        (["mine/LossEvaluation.name = 'a/b'"], "The name is also a folder name"),
        (["mine/LossEvaluation.weights = 'average'"], "uses averaged weights, but the run keeps none"),
        (["mine/LossEvaluation.lengths = {'inputs': 20}"], 'Evaluation "mine": The task "known" needs a length for "targets"'),
        (["mine/LossEvaluation.batch_size = 7"], "a batch of 7 rows cannot be split over 8 devices"),
        (["EVALS = (@LossEvaluation,)"], "EVALS contains"),
        (["EVALS = (@mine/RankingEvaluation(),)", "mine/RankingEvaluation.task = 'known'"], 'The task "known" has no "idx", so its choices cannot be ranked'),
        (["EVALS = (@mine/MetricsEvaluation(),)", "mine/MetricsEvaluation.task = 'trained_alone'"], "has no split"),
        (["EVALS = (@mine/MetricsEvaluation(),)", "mine/MetricsEvaluation.task = 'sotu_prefix_lm'", "mine/MetricsEvaluation.lengths = {'inputs': 20, 'targets': 20}"], "has no metrics (metric_fns or metric_objs)"),
        (["SaveCheckpointConfig.best_metric = 'evl/known/loss'"], 'SaveCheckpointConfig.best_metric is "evl/known/loss", but EVALS has no evaluation "evl". Did you mean "eval"?'),
        (["SaveCheckpointConfig.best_metric = 'loss'"], "It must be <name>/<task>/<metric>"),
        (["EVALS = (@mine/MetricsEvaluation(),)", "mine/MetricsEvaluation.seed = -1"], "MetricsEvaluation.seed is -1"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_an_evaluation_is_said_before_training(folder, capsys, bindings, says):
    lines = ["import more_tasks", "EVALS = (@LossEvaluation(), @mine/LossEvaluation())"]
    lines += [f"mine/{kind}Evaluation.name = 'mine'" for kind in ("Loss", "Metrics", "Ranking")]
    (folder / "wrong.gin").write_text("\n".join([*lines, *bindings]))
    assert main([*TRAIN, "--gin.MODEL_DIR=run", "--gin.TRAIN_STEPS=1", "--gin_file=wrong.gin", "--dry_run"]) == 2
    assert says in capsys.readouterr().err and not pathlib.Path("run").exists()


@pytest.mark.slow
def test_data_of_an_evaluation_that_are_not_here_are_said_before_training(folder, capsys):
    more = ["--gin_bindings=import more_tasks", "--gin.EVALS=(@LossEvaluation(),)", "--gin.LossEvaluation.task=moved"]
    command = [*TRAIN, "--gin.MODEL_DIR=run", "--gin.TRAIN_STEPS=1", *more]
    says = 'Evaluation "eval": the split "validation" of task "moved" cannot be read: there is no moved.tsv.'
    assert main([*command, "--dry_run"]) == 0 and f"The data were not checked: {says}" in capsys.readouterr().out
    assert main(command) == 2 and says in capsys.readouterr().err and not pathlib.Path("run").exists()


def test_results_of_other_settings_lie_in_another_folder(tmp_path):
    first = ResultFiles(str(tmp_path), "eval", {"task": "a", "split": "validation"})
    first.write(3, EvaluationResult({"a": {"loss": 1.5, "none": math.nan}}))
    other, third = (ResultFiles(str(tmp_path), "eval", {"task": task, "split": "validation"}) for task in "bc")
    assert third.folder.name == "eval_2"  # as long as nobody else has begun it
    assert other.folder.name == "eval_2" and other.changed_settings == "task was a, is b" and not other.has(3)
    other.write(3, EvaluationResult({"b": {"loss": 2.5}}))
    third.write(3, EvaluationResult({"c": {"loss": 3.5}}))
    assert third.folder.name == "eval_3" and other.folder.name == "eval_2"
    again = ResultFiles(str(tmp_path), "eval", {"task": "a", "split": "validation"})
    assert again.folder.name == "eval" and again.steps() == [3] and again.metric(3, "a/loss") == 1.5
    assert math.isnan(again.metric(3, "a/none")) and math.isnan(again.metric(4, "a/loss")) and again.changed_settings == ""
    assert ResultFiles(str(tmp_path), "eval", {"task": "b", "split": "validation"}).metric(3, "b/loss") == 2.5


@pytest.mark.parametrize(
    "values, options, should_stop",
    [
        ([3.0, 2.0, 1.0], {}, False), ([1.0, 2.0, 1.0], {}, True), ([1.0, 2.0], {}, False), ([1.0, 2.0, 0.5], {}, False),
        ([1.0, 2.0, 0.5], {"min_delta": 0.6}, True), ([1.0, 2.0, 3.0], {"best_is": "highest"}, False),
        ([3.0, math.nan, math.nan], {}, True), ([math.nan, 3.0, 2.0], {}, False), ([math.nan] * 5, {}, False), ([], {}, False),
    ],
)  # fmt: skip
def test_early_stopping_counts_from_the_best(values, options, should_stop):
    assert EarlyStopping("eval/a/loss", patience=2, **options).should_stop(values) == should_stop


def test_early_stopping_says_what_it_needs():
    for options, says in (
        ({"patience": 0}, "greater than zero"),
        ({"best_is": "low"}, "Choose one of"),
        ({"min_delta": -1.0}, "negative"),
    ):
        with pytest.raises(UserError, match=says):
            EarlyStopping("eval/a/loss", **options)


def test_settings_are_the_same_in_another_process():
    """Functions are told by their names, not by where they lie in memory."""
    from types import SimpleNamespace

    from t5x_lab.data.config import DataConfig
    from t5x_lab.data.vocabularies.config import ByteVocabulary
    from t5x_lab.decoding.sampling import SamplingConfig
    from t5x_lab.evaluation.config import MetricsEvaluation
    from t5x_lab.evaluation.tasks import EvaluationTasks

    def settings(batch_size):
        data = DataConfig("known", {"inputs": 8, "targets": 8}, 8, ByteVocabulary())
        tasks = EvaluationTasks("x", SimpleNamespace(), [], data, False)
        decoding = SamplingConfig(logits_fn=lambda logits: logits * 2)
        return tasks.settings(MetricsEvaluation(name="x", decoding=decoding, batch_size=batch_size))

    assert settings(8) == settings(16) and "0x" not in str(settings(8)) and "lambda" in settings(8)["decoding"]


def test_the_most_likely_of_several_samples_is_the_prediction():
    """T5X's `num_decodes` of decoders compares log-probabilities after temperature and top_k, over the whole text."""
    from types import SimpleNamespace

    from t5x_lab.decoding.beam_search import BeamConfig
    from t5x_lab.decoding.sampling import SamplingConfig
    from t5x_lab.evaluation.config import MetricsEvaluation
    from t5x_lab.evaluation.metrics.task_metrics import Decoding, _ModelOutputs

    random = np.random.default_rng(0)
    samples = random.integers(2, 9, (6, 4)), np.log(random.random((6, 4)))

    def generate_tokens(prompts, *, sampling, seed, max_tokens):
        assert (prompts, seed, max_tokens) == ([[5], [5], [5], [6], [6], [6]], 7, 4)
        assert sampling == SamplingConfig(1.0, 40, rescale_log_probs=True)
        return samples

    outputs = object.__new__(_ModelOutputs)
    outputs._decoding = Decoding(SamplingConfig(1.0, 40), 7, 3, 4, "")
    outputs._inputs, outputs._model = [[5], [6]], SimpleNamespace(generate_tokens=generate_tokens)
    tokens, log_probs = outputs._sample(outputs._decoding.method, {"max_tokens": 4})
    best = [max(range(i, i + 3), key=lambda j: samples[1][j].sum()) for i in (0, 3)]
    np.testing.assert_array_equal(tokens, samples[0][best])
    np.testing.assert_array_equal(log_probs, samples[1][best])
    with pytest.raises(UserError, match="num_samples is 3, but beam search draws no samples"):
        MetricsEvaluation(num_samples=3, decoding=BeamConfig())


@pytest.mark.parametrize("truncate_inputs, inputs, tokens", [("right", 4, 2), (None, 6, 5)])
def test_without_truncation_predictions_are_as_long_as_the_longest_target(truncate_inputs, inputs, tokens):
    from t5x_lab.decoding.sampling import SamplingConfig
    from t5x_lab.evaluation.config import MetricsEvaluation
    from t5x_lab.evaluation.metrics.task_metrics import Decoding, _ModelOutputs

    model = types.SimpleNamespace(has_encoder=True, max_positions=None, stop_ids=(1,))
    component = types.SimpleNamespace(sequence_length={"inputs": 4, "targets": 2}, input_prefix=[])
    examples = [{"inputs": np.arange(6), "targets": np.arange(n)} for n in (5, 3)]
    evaluation = MetricsEvaluation(truncate_inputs=truncate_inputs)
    outputs = _ModelOutputs(model, component, examples, evaluation, Decoding(SamplingConfig(), 0, 1, None, ""))
    assert (len(outputs._inputs[0]), outputs._max_tokens) == (inputs, tokens)


class Model:
    """A run without a model."""

    def with_params(self, params, step):
        self.step = step
        return self


class Own:
    """An evaluation that gives what a function makes of the step."""

    def __init__(self, measure, name="own"):
        self.name, self._measure = name, measure

    def prepare(self, model):
        return lambda model: self._measure(model.step)


def measured(evals, folder, *steps):
    evaluations = evaluate.Evaluations(evals, Model(), str(folder), has_average=False)
    return [[result for _, result in evaluations.evaluate(evaluations.entries, step, {}, None)] for step in steps]


def test_results_that_cannot_be_written_are_said_once_and_known(tmp_path, capsys):
    (tmp_path / "evals").write_text("in the way")
    result = measured([Own(lambda step: {"all": {"twice": 2 * step}})], tmp_path, 1, 2)
    assert [each.metrics for (each,) in result] == [{"all": {"twice": 2.0}}, {"all": {"twice": 4.0}}]
    assert capsys.readouterr().err.count("could not be written") == 1


@pytest.mark.parametrize(
    "gives, says",
    [
        ({"all": {"grade": "good"}}, "returned grade = 'good', which is not a number."),
        ({"grade": 0.5}, "It must return metrics by task and name"),
        ([0.5], "It must return metrics by task and name"),
    ],
)
def test_what_an_evaluation_of_ones_own_gives_is_checked(gives, says, tmp_path, capsys):
    ((result,),) = measured([Own(lambda step: gives)], tmp_path, 1)
    assert not result.metrics and says in result.failures[""] and says in capsys.readouterr().err
    assert says in json.loads((tmp_path / "evals/own/1.json").read_text())["failures"][""]


def test_what_waits_for_a_metric_that_never_comes_is_told(tmp_path, capsys):
    idle, beside, own = Own(None, "idle"), Own(dict, "beside"), Own(dict)
    idle.prepare, beside.period = (lambda model: None), None
    make = lambda metric: evaluate.Evaluations([idle, beside, own], Model(), str(tmp_path), False, watched={metric: "THE RULE"})
    with pytest.raises(
        UserError, match='THE RULE is "idle/all/x", but the evaluation "idle" has no results: none of its tasks has metrics'
    ):
        make("idle/all/x")
    make("own/all/x")
    assert capsys.readouterr().err == ""
    make("beside/all/x")
    assert '"beside" has no period. Only `t5x_lab eval --follow` computes it' in capsys.readouterr().err


FAILING = """
import gin
import jax


@gin.configurable
class Failing:
    name, period = "failing", 1

    def prepare(self, model):
        return self.compute_metrics

    def compute_metrics(self, model):
        if jax.process_index() == jax.process_count() - 1:
            raise OSError("only here")
        return {"all": {"x": 1.0}}
"""


@pytest.mark.slow
@pytest.mark.exhaustive
def test_an_error_in_one_of_several_processes_ends_them():
    """The others would wait for it forever. A single process reports the failure and goes on."""
    pathlib.Path("failing.py").write_text(FAILING)
    evals = ["--gin_bindings=import failing", "--gin.EVALS=(@Failing(),)"]
    alone = commands.run(*flags("causal_decoder", FULL_LM, "alone", 2, *evals))
    assert alone.returncode == 0 and "only here" in alone.stderr and finished_steps("alone")[-1] == 2
    two = commands.start_two(*flags("causal_decoder", FULL_LM, "two", 2, *evals))
    assert 0 not in [process.wait(timeout=120) for process in two]
    assert "OSError: only here" in two[1].output()


# Ranking, as the `t5` library has it.


@pytest.mark.parametrize("classes", [2, 3])
@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("by_tokens", [False, True])
def test_ranking_equals_t5s_with_weights_and_several_right_answers(classes, several, by_tokens):
    rng = np.random.default_rng(classes)
    questions, result, targets, scores = [], [], [], []
    for number in range(200):
        labels = tuple(sorted(rng.choice(classes, 1 + (several and number % 3 == 0), replace=False).tolist()))
        weight, tokens = float(rng.choice([0.5, 1.0, 2.0])), rng.integers(1, 6, classes).tolist()
        log_probs = (rng.normal(size=classes) * 3).tolist()
        question = Question("x", ("a",) * classes, labels if len(labels) > 1 else labels[0], weight=weight)
        questions.append(question)
        result.append(make_answer(log_probs, tokens, [1] * classes))
        for choice in range(classes):
            targets.append(((number, choice), choice in labels, weight, tokens[choice]))
            scores.append(log_probs[choice])
    expected = t5.evaluation.metrics.rank_classification(
        targets, scores, num_classes=classes, normalize_by_target_length=by_tokens
    )
    actual, end = accuracy.accuracies(questions, result), "token_mean" if by_tokens else "sum"
    assert actual[end] == pytest.approx(expected["accuracy"] / 100)
    guess = sum(q.weight * len(q.labels) / classes for q in questions) / sum(q.weight for q in questions)
    assert actual["chance"] == pytest.approx(guess)
    names = {"f1": "f1", "mean_3class_f1": "f1", "auc-roc": "auc_roc", "auc-pr": "auc_pr"}
    shared = {names[name]: value for name, value in expected.items() if name in names}
    assert bool(shared) != several and {name for name in actual if name.endswith(f"_{end}")} == {
        f"{name}_{end}" for name in shared
    }
    for name, value in shared.items():
        assert actual[f"{name}_{end}"] == pytest.approx(value / 100), name
    variable = t5.evaluation.metrics.rank_classification(
        targets, scores, num_classes=None, normalize_by_target_length=by_tokens
    )
    assert actual[end] == pytest.approx(variable["accuracy"] / 100)
