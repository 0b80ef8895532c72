"""Pages of runs: what they say equals what the files of runs hold, and a browser shows it."""

import dataclasses
import html.parser
import json
import os
import pathlib
import re
import shlex
import tempfile
import time

import commands
import gin
import numpy as np
import pytest
from browser import found_in_browser
from etils import epath
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from runs_of_text import FULL_LM, flags

import t5x_lab
from t5x_lab.cli.main import main
from t5x_lab.config.errors import UserError
from t5x_lab.config.gin_files import binding
from t5x_lab.config.json_files import write_json
from t5x_lab.evaluation.config import SamplesEvaluation
from t5x_lab.observe import curves
from t5x_lab.observe.curves import Columns, curve, read_columns
from t5x_lab.observe.end import write_end
from t5x_lab.observe.metrics import read_metrics
from t5x_lab.observe.owner import OWNER, Owner
from t5x_lab.report.charts import (
    COLORS,
    MAX_CHARTS,
    MAX_LINES,
    Axes,
    evaluation_charts,
    pick_color,
    statistics_charts,
    training_charts,
)
from t5x_lab.report.commands import next_commands
from t5x_lab.report.differences import find_differences, referenced_settings
from t5x_lab.report.facts import duration, summarize_runs
from t5x_lab.report.figures import make_figures
from t5x_lab.report.page import short_names, write_report
from t5x_lab.report.results import select_evenly
from t5x_lab.report.run_directory import parse_settings, read_run
from t5x_lab.report.time_spent import is_start, time_spent
from t5x_lab.runs.config.gin_config import GinConfig

# ---- files


def step_line(step: int, **more) -> dict:
    line = {"step": step, "split": "train", "loss": 6 / step + 1, "accuracy": 0.1, "learning_rate": 0.01, "grad_norm": 0.5}
    line |= {"seconds_per_step": 0.1, "tokens_per_second": 640.0, "mfu": None, "data_wait_fraction": 0.0}
    return {**line, "tokens_processed": 64 * step, "tokens_with_loss": 60 * step, "seconds": 0.1 * step, "goodput": 0.9, **more}


def make_run(path: str, lines: list[dict], config: str = "TRAIN_STEPS = 40\n", facts: dict | None = None) -> str:
    directory = pathlib.Path(path)
    directory.mkdir(parents=True)
    (directory / "config.gin").write_text(config)
    (directory / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if facts is not None:
        write_json(epath.Path(directory / "run.json"), facts)
    return path


FACTS = {
    "version": "0.1.0", "architecture": "causal_decoder", "num_parameters": 4776, "rows": 4, "encoder_length": 0,
    "decoder_length": 64, "train_steps": 40, "flops_per_step": 1000, "devices": 1, "device_kind": "cpu", "processes": 1,
    "mesh": "data=1",
}  # fmt: skip
EVALUATED = [
    {"step": step, "split": f"eval/{task}", "loss": 5.0 - 0.01 * step, "accuracy": 0.2, "tokens_processed": 100}
    for step in (20, 40)
    for task in ("a", "b")
]


def test_columns_hold_what_the_lines_hold(monkeypatch):
    monkeypatch.setattr(curves, "LINES_PER_BATCH", 3)
    lines = [step_line(step) for step in range(1, 9)]
    lines[2]["loss"] = None
    lines[4]["mine"] = 7
    lines[5]["odd"] = "a text"
    make_run("run", [*lines, *EVALUATED, step_line(8, loss=3.5)])  # a step of two lines: the last one counts
    with open("run/metrics.jsonl", "a") as file:
        file.write('{"step": 9, "split": "train", "lo')
    columns = read_columns("run")
    assert set(columns) == {"train", "eval/a", "eval/b"}
    last = {(line["split"], line["step"]): line for line in read_metrics("run")}
    for split, split_columns in columns.items():
        assert list(split_columns.steps) == sorted(step for line_split, step in last if line_split == split)
        for metric, values in split_columns.values.items():
            expected = [last[split, step].get(metric) for step in split_columns.steps]
            expected = [np.nan if value is None or isinstance(value, str) else value for value in expected]
            np.testing.assert_array_equal(values, expected, err_msg=metric)
    assert {"mine", "loss"} <= columns["train"].values.keys() and np.isnan(columns["train"]["never"]).all()


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
@given(st.lists(st.one_of(st.floats(-1e6, 1e6), st.just(np.nan)), max_size=60), st.integers(1, 12))
def test_a_thinned_curve_has_every_value_within_its_bands(values, points):
    steps = 3 * np.arange(1, len(values) + 1)
    thinned = curve(Columns(steps, {"loss": np.array(values, float)}), "loss", points)
    measured = [(step, value) for step, value in zip(steps, values) if np.isfinite(value)]
    if not measured:
        assert thinned is None
        return
    assert len(thinned.steps) == min(points, len(measured)) and thinned.steps[-1] == measured[-1][0]
    begin = 0
    for end, mean, low, high in zip(thinned.steps, thinned.mean, thinned.low, thinned.high):
        values_within = [value for step, value in measured if begin < step <= end]
        np.testing.assert_allclose(
            [mean, low, high], [np.mean(values_within), min(values_within), max(values_within)], rtol=1e-9, atol=1e-6
        )
        begin = end
    sizes = np.diff(np.searchsorted([step for step, _ in measured], thinned.steps, side="right"), prepend=0)
    assert sizes.max() - sizes.min() <= 1


def test_settings_are_those_that_gin_reads():
    bindings = ['MODEL_DIR = "run"', "VOCABULARY = @ByteVocabulary()", 'TASK_FEATURE_LENGTHS = {"inputs": 512, "targets": 114}']
    files = ["models/t5_1_1/tiny.gin", "objectives/span_corruption.gin", "runs/pretrain.gin"]
    text = GinConfig(files, [*bindings, "TRAIN_STEPS = 5", f"EVALS = ({'@LossEvaluation(), ' * 9})"]).text
    entries = parse_settings(text)
    parsed = {}
    parser = gin.config_parser.ConfigParser(text, _Delegate())
    for statement in parser:
        if isinstance(statement, gin.config_parser.BindingStatement):
            name = f"{statement.scope}/" if statement.scope else ""
            parsed[name + ".".join(filter(None, (statement.selector, statement.arg_name)))] = statement.value
    assert entries.keys() == parsed.keys() and len(entries) > 80
    for name, value in entries.items():
        assert gin.config_parser.ConfigParser(value, _Delegate()).parse_value() == parsed[name], name


class _Delegate(gin.config_parser.ParserDelegate):
    def configurable_reference(self, scoped_name, evaluate):
        return f"@{scoped_name}{evaluate}"

    def macro(self, scoped_name):
        return f"%{scoped_name}"


def test_time_is_told_apart():
    """Two processes: 10 s until the first step, 2 s for an evaluation, 100 s until the second one goes on from step 4."""
    clock, productive, lines = 0.0, 0.0, []
    for step, before, seconds in [(1, 10, 5), (2, 0, 1), (3, 0, 1), (4, 2, 1), (5, 100, 6), (6, 0, 1), (7, 0, 1)]:
        clock += before + seconds
        productive += seconds if step not in (1, 5) else 0
        lines.append(
            step_line(step, seconds=clock, seconds_per_step=seconds, goodput=productive / clock, data_wait_fraction=0.5)
        )
    make_run("run", lines)
    spent = time_spent(read_columns("run")["train"])
    assert dataclasses.astuple(spent) == pytest.approx((128, 5, 2.5, 2, 15 + 6, 100, 1))
    assert is_start(read_columns("run")["train"]).tolist() == [True, False, False, False, True, False, False]
    again = [*lines, step_line(8, seconds=200.0, seconds_per_step=6.0, goodput=lines[-1]["goodput"] * 128 / 200)]
    assert "2 restarts" in report(make_run("started", again))  # of its last process there is nothing but compilation
    # Where the first lines are of a version without `seconds`: 50 s of steps and 10 s of else before.
    make_run(
        "resumed",
        [{"step": 1, "split": "train", "loss": 1.0}, step_line(2, seconds=61.0, seconds_per_step=1.0, goodput=50 / 61)],
    )
    spent = time_spent(read_columns("resumed")["train"])
    assert (spent.total, spent.steps, spent.starting, spent.between) == pytest.approx((61, 50, 11, 0))
    assert "128 processed" in report("resumed")  # though the first line does not say how many were before
    assert time_spent(Columns(np.array([1]), {"loss": np.array([1.0])})) is None
    run = read_run("run")  # whose first steps say nothing of speed
    (speed,) = (chart for chart in training_charts([run], ["run"], Axes([run])).drawn if chart.title == "tokens per second")
    speed_curve = speed.lines[0].curve
    assert speed_curve.steps[np.isfinite(speed_curve.mean)].tolist() == [2, 3, 4, 6, 7]
    assert np.flatnonzero(np.isnan(speed_curve.mean)).tolist() == [
        3,
        4,
    ]  # broken between the processes, where the band is nothing
    assert speed_curve.low[3:5].tolist() == speed_curve.high[3:5].tolist() == speed_curve.mean[[2, 5]].tolist()
    assert all(x[3] == x[2] and x[4] == x[5] for x in speed.lines[0].x.values())
    assert "gaps are restarts" in text_of(report("run"))
    assert summarize_runs([run])["time split"] == [
        "3.9% in steps (2.0% waiting for data), 1.6% between them (evaluations, checkpoints), "
        "16.4% starting and compiling, 78.1% between processes (a restart)"
    ]
    assert [duration(seconds) for seconds in (0, 59.6, 3700, 90061)] == ["0 s", "1 min 0 s", "1 h 1 min", "1 d 1 h"]


# ---- pages


def tags(page: str) -> list[tuple[str, dict]]:
    elements: list[tuple[str, dict]] = []
    parser = html.parser.HTMLParser()
    parser.handle_starttag = lambda tag, attrs: elements.append((tag, dict(attrs)))
    parser.feed(page)
    return elements


def text_of(page: str) -> str:
    """Returns the visible text of a page."""
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", re.sub(r"<(script|style)>.*?</\1>", "", page, flags=re.DOTALL)))


def report(*runs: str, **options) -> str:
    return pathlib.Path(write_report(runs, **options)).read_text()


def test_a_page_needs_nothing_from_elsewhere():
    page = report(make_run("run", [step_line(step) for step in range(1, 41)] + EVALUATED, facts=FACTS))
    for tag, attributes in tags(page):
        assert tag not in ("link", "img", "iframe", "object", "embed", "base"), (tag, attributes)
        assert not {"src", "srcset", "data", "background"} & attributes.keys(), (tag, attributes)
    style = re.search(r"<style>(.*?)</style>", page, re.DOTALL).group(1)
    assert "url(" not in style and "@import" not in style and "http" not in style
    assert len(page) < 2e6


def test_labels_with_tex_load_nothing():
    """Bokeh loads MathJax from a network for texts with the delimiters $$, \\[ and \\(."""
    name = r"$$x$$ \(y\) \[z\]"
    lines = [{**step_line(step), name: 1.0 * step} for step in (1, 2)]
    lines += [{"step": 2, "split": split, name: 1.0, "loss": 2.0} for split in (f"eval/{name}", "eval/other")]
    make_run("run", lines, facts=FACTS)
    write_json(epath.Path("run/references.json"), {"eval/other": {"loss": 1.5}, f"eval/{name}": {name: 1.5}})
    scripts = "".join(re.findall(r"<script>(.*?)</script>", report("run"), re.DOTALL)[1:])
    labels = [
        json.loads(f'"{text}"') for text in re.findall(r'"(?:legend_label|value|text|axis_label)":"((?:[^"\\]|\\.)*)"', scripts)
    ]
    assert any("x$" in label for label in labels)
    assert not [label for label in labels if re.search(r"\$\$|\\\[|\\\(", label)]


def test_what_a_page_says_is_what_the_files_say():
    lines = [step_line(step) for step in range(1, 41)]
    make_run("run", lines + EVALUATED, "MIXTURE_OR_TASK_NAME = 'sotu'\nOPTIMIZER = @Adafactor()\nTRAIN_STEPS = 40\n", FACTS)
    write_end("run", 40)
    results = {"step": 30, "results": {"probe": {"score": 0.625}}, "texts": {"prompts": {"We must <b>": "</script> & more"}}}
    os.makedirs("run/evals/mine")
    write_json(epath.Path("run/evals/mine/30.json"), results)
    pathlib.Path("run/evals/mine/30.txt").write_text("a table of its own")
    write_json(epath.Path("run/references.json"), {"loss": {"unigram": 6.3}})
    page = report("run")
    page_text = text_of(page)
    for phrase in (
        "finished at step 40.", "causal_decoder, 4,776 parameters", "4 rows of 64 tokens", "sotu", "Adafactor",
        "2,560 processed, padding excluded", "4e+04, forward and backward", "7.000 at first, 1.150 at last",
        "at step 40: a 4.600 (perplexity 99.5), b 4.600", "99.8% in steps", "step 20", "0.625", "a table of its own",
        "We must &lt;b&gt;", "&lt;/script&gt; &amp; more", "t5x_lab train --gin_file=run/config.gin --gin.MODEL_DIR=run --gin.TRAIN_STEPS=80",
    ):  # fmt: skip
        assert phrase in page_text, phrase
    assert "unigram 6.3" in page and "generate" not in page_text  # it has no checkpoint


@pytest.mark.parametrize("state", ["training", "stopped", "diverged", "new", "of another version"])
def test_runs_in_every_state_have_a_page(state):
    lines = [step_line(step) for step in range(1, 11)]
    if state == "diverged":
        lines[-1] |= {"loss": None, "grad_norm": None}
    if state == "of another version":
        lines = [{"step": line["step"], "split": "train", "loss": line["loss"]} for line in lines]
    make_run("run", [] if state == "new" else lines, facts={} if state == "of another version" else FACTS)
    pathlib.Path("run", OWNER).write_text("{}")  # a run that was killed leaves one
    if state != "training":
        os.utime(f"run/{OWNER}", (0, time.time() - 60))
    page_text = text_of(report("run"))
    expected = {
        "training": "training step 10 of 40. The last heartbeat was ",
        "diverged": "diverged the loss of step 10 was not finite. It can continue from step 0, because it has no checkpoint",
        "new": "new no training yet.",
    }
    assert (
        expected.get(state, "stopped after step 10 of 40. It can continue from step 0, because it has no checkpoint.")
        in page_text
    )
    assert "There are no evaluations yet, or EVALS is empty" in page_text
    assert ("The metrics have no training steps" in page_text) == (state == "new")
    assert ("x axis steps tokens FLOPs time" in page_text) == (state not in ("new", "of another version"))
    if state == "training":  # by the training itself, when it ends
        assert "stopped after step 10" in text_of(report("run", is_over=True))


def test_a_run_is_diverged_where_training_ends_for_it():
    """The loss or gradient is not finite for more consecutive steps than BAD_STEPS allows."""
    bad = {"loss": None, "grad_norm": None}
    for name, lines, config, state in (
        ("gradient", [step_line(1), step_line(2, grad_norm=None)], "BAD_STEPS = 0\n", "diverged"),
        ("allowed", [step_line(1), step_line(2, **bad), step_line(3, **bad)], "BAD_STEPS = 2\n", "stopped"),
        ("too many", [step_line(1, **bad), step_line(2, **bad), step_line(3, **bad)], "BAD_STEPS = 2\n", "diverged"),
        ("over", [step_line(1, **bad), step_line(2)], "", "stopped"),
    ):
        assert read_run(make_run(name, lines, config)).state == state, name


def test_evaluations_without_numbers_of_other_settings_and_that_fail():
    make_run("run", [step_line(1), step_line(2), {"step": 2, "split": "eval/a", "loss": 9.0}], facts=FACTS)
    for folder, content in {
        "eval": {"results": {"a": {"loss": 1.0}}}, "eval_2": {"results": {"a": {"loss": 9.0}}},
        "samples": {"results": {}, "texts": {"prompts": {"We": " must"}}},
        "mine": {"results": {}, "failures": {"copa": "No records", "": "It fails"}},
    }.items():  # fmt: skip
        os.makedirs(f"run/evals/{folder}")
        write_json(epath.Path(f"run/evals/{folder}/{2 if folder == 'eval_2' else 1}.json"), {"step": 1, **content})
    run = read_run("run")
    assert run.evaluations == {"eval/a": {1: {"loss": 1.0}}, "eval_2/a": {2: {"loss": 9.0}}}
    page_text = text_of(report("run"))
    assert "copa: No records" in page_text and "It fails" in page_text and "Generated texts of samples are below." in page_text
    assert page_text.count("It has no metrics.") == 1  # of mine, which has failures
    assert "run, step 1: copa: No records" in text_of(report("run", make_run("other", [step_line(1)]), output="both.html"))


def test_a_converted_checkpoint_has_a_page_too():
    make_run("run", [], "TRAIN_STEPS = None\n")
    run = t5x_lab.from_gin(
        ["models/causal_decoder/tiny.gin"], ["VOCABULARY = @ByteVocabulary()", "TransformerConfig.vocab_size = 384"]
    )
    run.save("saved")
    page_text = text_of(report("saved"))
    assert "no training metrics, but a checkpoint of step 0." in page_text and "t5x_lab generate --model_dir=saved" in page_text
    assert "t5x_lab train" not in page_text


def test_what_is_no_run_is_said_in_a_sentence(capsys):
    pathlib.Path("empty").mkdir()
    assert main(["report", "empty"]) == 2
    assert "empty is not a run directory: it has neither config.gin nor metrics.jsonl" in capsys.readouterr().err
    with pytest.raises(UserError, match="nowhere does not exist. Use the MODEL_DIR of a run"):
        write_report(["nowhere"])
    pathlib.Path("runs/a").mkdir(parents=True)
    pathlib.Path("runs/a/config.gin").write_text("A.b = 1\n")
    with pytest.raises(UserError, match=r"runs is not a run directory: .*\. Use the MODEL_DIR of a run, such as runs/a\."):
        write_report(["runs"])
    assert main(["report", "runs/a", "--output=runs/a/config.gin/page.html"]) == 2
    error = capsys.readouterr().err
    assert "The page cannot be written to runs/a/config.gin/page.html: runs/a/config.gin is a file." in error
    assert "Choose another --output." in error and error.count("\n") == 1
    make_run("runs/b", [])
    assert write_report(["runs/a", "runs/b", "./runs/a"]) == "runs/a/compared.html"
    write_report(["runs/a", "runs/a/", "./runs/a", os.path.abspath("runs/a")], "one.html")
    assert write_report(["runs/a"], "pages/v1.2") == "pages/v1.2/report.html"
    assert main(["report", "runs/a", "--output=runs/a/config.gin"]) == 2 and "config.gin is a file" in capsys.readouterr().err
    for inside in ("config.gin", "checkpoints/20"):
        with pytest.raises(
            UserError, match=r"is not a run directory: .*\. Use the MODEL_DIR of a run, such as runs/a\.|does not exist"
        ):
            write_report([f"runs/a/{inside}"])
    assert "differs between" not in text_of(pathlib.Path("one.html").read_text())


def test_several_runs_are_laid_over_each_other(capsys):
    configs = [
        "A.b = 1\nTRAIN_STEPS = 40\nMODEL_DIR = 'x'\n",
        "A.b = 2\nTRAIN_STEPS = 40\nMODEL_DIR = 'y'\nC.d = \\\n    (1,\n     2)\n",
    ]
    lines = [step_line(step) for step in range(1, 41)]
    make_run("one/run", lines + EVALUATED, configs[0], FACTS)
    make_run("two/run", lines[:10], configs[1], {**FACTS, "num_parameters": 5000})
    make_run("old", lines[:5], "")
    runs = [read_run(path) for path in ("one/run", "two/run", "old")]
    assert find_differences(runs) == {"A.b": ["1", "2", None], "C.d": [None, "(1, 2)", None]}
    assert short_names(runs) == ["one/run", "two/run", pathlib.Path("old").absolute().parent.name + "/old"]
    assert short_names(runs[:2]) == ["one/run", "two/run"] and short_names(runs[2:]) == ["old"]
    assert summarize_runs(runs)["model"] == ["causal_decoder, 4,776 parameters", "causal_decoder, 5,000 parameters", ""]
    for argv in (["one/run", "two/run", "old", "--output=pages/all.html"], ["old", "--output=pages"], ["old", "one/run"]):
        assert main(["report", *argv]) == 0
    assert capsys.readouterr().out == "pages/all.html\npages/report.html\nold/compared.html\n"
    page_text = text_of(pathlib.Path("pages/all.html").read_text())
    assert "A.b 1 2 –" in page_text and "a loss 4.6 – –" in page_text and "one/run, step 40 two/run" in page_text
    assert (
        f"Not compared, because config.gin is missing: {short_names(runs)[2]}." in page_text
        and "No differences except the directory" not in page_text
    )
    assert "x axis steps tokens time one/run two/run" in page_text  # FLOPs are not known of all


def test_axes_count_from_where_a_run_began():
    """A run that continues from step 1,000 of another counts its own tokens and FLOPs. An evaluation before it is at 0."""
    lines = [{**step_line(step), "step": 1000 + step, "spread": step / 10} for step in range(1, 41)]
    make_run(
        "run",
        [{"step": 1000, "split": "eval/a", "loss": 6.0}, *lines, {"step": 1020, "split": "eval/a", "loss": 5.0}],
        facts=FACTS,
    )
    run = read_run("run")
    axes = Axes([run])
    x = axes.x(run, np.array([1000, 1001, 1020, 1040]))
    assert x["flops"].tolist() == [0, 1000, 20_000, 40_000] and x["tokens"].tolist() == [0, 64, 1280, 2560]
    assert x["time"] == pytest.approx([0, 0.1, 2.0, 4.0]) and axes.names["time"] == "seconds since the run began"
    (spread_of,) = statistics_charts([run], ["run"], axes).drawn
    assert spread_of.title == "spread" and spread_of.lines[0].curve.mean[-1] == 4.0
    assert summarize_runs([run])["FLOPs"] == ["4e+04, forward and backward"]
    carried = [{**line, "tokens_processed": 9_000 + line["tokens_processed"]} for line in lines]  # with the step
    carried = read_run(make_run("carried", carried, facts=FACTS))
    assert Axes([carried]).x(carried, np.array([1000, 1020]))["tokens"].tolist() == [0, 1280]
    assert summarize_runs([carried])["tokens"] == ["2,560 processed, padding excluded"]
    assert summarize_runs([carried])["steps"] == ["40, after 1,000 of the run that it continues"]
    assert "statistics of hooks and additional losses" in html.unescape(report("run"))


def test_hundreds_of_tasks_have_tables_and_few_charts():
    tasks = [{"step": step, "split": f"many/{number}", "score": number / step} for step in (1, 2) for number in range(70)]
    runs = [read_run(make_run(name, [step_line(1), step_line(2), *tasks], facts=FACTS)) for name in ("one", "two")]
    charts = evaluation_charts(runs, ["one", "two"], Axes(runs))
    assert (len(charts["many"].drawn), charts["many"].left_out) == (MAX_CHARTS, 70 - MAX_CHARTS)
    page = report("one", "two")
    assert page.count("<tr><td>") >= 70 and f"{70 - MAX_CHARTS} more charts omitted." in page
    (chart,) = evaluation_charts(runs[:1], ["one"], axes := Axes(runs[:1]))["many"].drawn
    beside = [make_run("beside", [step_line(1), step_line(40), *EVALUATED], facts=FACTS)]
    (alone,) = map(read_run, beside)
    of_train = training_charts([alone], ["one"], axes).drawn[0].lines
    of_eval = evaluation_charts([alone], ["one"], axes)["eval"].drawn[0].lines
    assert [line.color for line in of_train[1:]] == [line.color for line in of_eval] == [pick_color(1), pick_color(2)]
    assert (len(chart.lines), chart.left_out) == (MAX_LINES, 70 - MAX_LINES)
    assert len({line.color for line in chart.lines}) == MAX_LINES and pick_color(3) == COLORS[3]


def test_many_steps_make_a_page_no_larger_than_some():
    sizes = []
    for number in (1_000, 20_000):
        sizes.append(len(report(make_run(f"run{number}", [step_line(step) for step in range(1, number + 1)], facts=FACTS))))
    assert sizes[1] < 1.05 * sizes[0]
    assert select_evenly(range(1000), 8) == [0, 143, 285, 428, 571, 714, 856, 999] and select_evenly([3, 4], 8) == [3, 4]


def test_what_a_comparison_says_is_of_the_steps_that_it_names():
    """Macros are their values; dashed lines are of every metric; results of another step than the last say so."""
    config = "DROPOUT_RATE = {}\nA.rate = %DROPOUT_RATE\nB.rate = {}\nOBJECTIVE = None\n"
    more = [{"step": 20, "split": "eval/c", "loss": 2.0}]
    run_one = make_run("one", [step_line(1), step_line(40), *EVALUATED, *more], config.format(0.1, "%DROPOUT_RATE"), FACTS)
    two = make_run("two", [step_line(1), step_line(40), *EVALUATED[:2]], config.format(0.0, "0.0"), FACTS)
    write_json(epath.Path("one/references.json"), {"accuracy": {"of BERT": 0.5, "true": True}, "loss": {"unigram": 6.0}})
    runs = [read_run(run_one), read_run(two)]
    assert find_differences(runs) == {"B.rate": ["0.1", "0.0"], "DROPOUT_RATE": ["0.1", "0.0"]}
    assert summarize_runs(runs)["objective"] == ["that of the task"] * 2
    assert summarize_runs(runs)["evaluation loss"][0].startswith("at step 40: a 4.600 (perplexity 99.5), b")
    assert summarize_runs(runs)["evaluation loss"][0].endswith("; at step 20: c 2.000 (perplexity 7.4)")
    charts = training_charts(runs, ["one", "two"], Axes(runs)).drawn
    assert {chart.title: chart.references for chart in charts if chart.references} == {
        "loss of training, nats per token": {"unigram": 6.0}, "accuracy of the next token": {"of BERT": 0.5},
    }  # fmt: skip
    page_text = text_of(report(run_one, two, output="both.html"))
    assert "task metric one, step 40 two, step 20 a loss 4.6 4.8" in page_text and "c loss 2 (step 20) –" in page_text


def test_steps_that_were_not_finite_are_marked():
    lines = [step_line(step) for step in range(1, 11)]
    for step in (4, 9, 10):
        lines[step - 1] |= {"loss": None, "grad_norm": None}
    lines[5]["grad_norm"] = None
    run = read_run(make_run("run", lines, "BAD_STEPS = 1\n", FACTS))
    (line,) = training_charts([run], ["run"], Axes([run])).drawn[0].lines
    assert line.bad["step"].tolist() == [4, 6, 9, 10] and line.bad["tokens"].tolist() == [256, 384, 576, 640]
    np.testing.assert_allclose(line.bad["mean"], [np.mean([3, 11 / 5]), 2, 1.75, 1.75])
    assert summarize_runs([run])["training loss"] == ["7.000 at first, 1.750 at step 8, not finite at last"]
    page_text = text_of(report("run"))
    assert (
        "Crosses mark steps with a non-finite loss or" in page_text
        and "diverged the loss of step 10 was not finite." in page_text
    )
    for name, last, state in (("gradient", {"grad_norm": None}, "diverged the gradient of step 2"), ("none", {}, "stopped")):
        step_lines = [
            {key: line[key] for key in line if key != "loss" or name != "none"} for line in (step_line(1), step_line(2))
        ]
        assert state in text_of(report(make_run(name, [step_lines[0], step_lines[1] | last])))


def test_damaged_files_are_named():
    run = make_run("run", [step_line(1), step_line(2)], facts={**FACTS, "train_steps": "20", "flops_per_step": "many"})
    pathlib.Path("run/config.gin").write_bytes(b"A.b = '\xff'\n")
    with open("run/metrics.jsonl", "a") as file:
        file.write('{"step": "3", "split": "train"}\n[]\n{"step": 4, "spl')
    for name, content in {
        "a": {"results": None, "texts": None, "failures": []},
        "b": {"results": {"x": [], "y": {"z": "w"}}},
    }.items():
        os.makedirs(f"run/evals/{name}")
        write_json(epath.Path(f"run/evals/{name}/2.json"), content)
    pathlib.Path("run/evals/b/1.json").write_text("{")
    page_text = text_of(report(run))
    assert (
        "Omitted because damaged or lost: line 3 of metrics.jsonl, line 4 of metrics.jsonl, line 5 of metrics.jsonl and 1 more."
        in page_text
    )
    assert "stopped after step 2." in page_text and "A.b = &#39;\ufffd&#39;" in page_text
    pathlib.Path("run/run.json").write_text("[1]")
    assert "run.json" in read_run(run).damaged
    zero = make_run("zero", [step_line(1, seconds=0.0), step_line(2, seconds=0.0)])
    assert "time split" not in summarize_runs([read_run(zero)])


def test_files_that_nobody_should_have_written_have_a_page(capsys):
    lines = [step_line(step, mine=[1, 2], huge=10**400) for step in (1, 2)]
    lines[0] |= {"loss": "3.5"}
    run = make_run("run_\udcff", lines, facts=FACTS)
    os.makedirs(f"{run}/evals/a")
    pathlib.Path(f"{run}/evals/a/2.json").write_text(r'{"results": {}, "texts": {"t": {"x": "a\ud800b"}}}')
    pathlib.Path(f"{run}/evals/a/2.txt").write_bytes(b"\xff\xfe a table")
    pathlib.Path(f"{run}/references.json").write_text('{"loss":')
    page_text = text_of(report(run, output="page.html"))
    assert "a table" in page_text and "a?b" in page_text and "Omitted because damaged or lost: references.json." in page_text
    assert "4.000 at first, 4.000 at last" in page_text and "mine" not in page_text and "huge" not in page_text
    assert main(["report", "memory://run"]) == 2  # which is there where tests are; others have errors of their own
    error = capsys.readouterr().err
    assert "memory://run" in error and error.count("\n") == 1, error
    assert main(["report", make_run("run", lines), "--output=memory://page.html"]) == 2
    assert "The page cannot be written to memory://page.html" in capsys.readouterr().err


_VALUE = st.one_of(st.none(), st.floats(-1e3, 1e3), st.integers(-3, 10**9), st.booleans(), st.text(max_size=3), st.just([1]))
_LINE = st.dictionaries(st.sampled_from([*step_line(1), "mine"]), _VALUE, max_size=6)  # what is not as it should be
_RUN = st.tuples(
    st.lists(st.tuples(st.integers(1, 60), st.sampled_from(["train", "train", "eval/a", "eval/b"]), _LINE), max_size=12),
    st.dictionaries(st.sampled_from([*FACTS, "train_tokens"]), _VALUE, max_size=4),
    st.dictionaries(
        st.sampled_from(["TRAIN_STEPS", "BAD_STEPS", "OBJECTIVE", "A.b"]), st.sampled_from(["1", "%A.b", "'x'", "@A()"])
    ),
    st.dictionaries(
        st.sampled_from(["results", "texts", "failures"]), st.one_of(_VALUE, st.dictionaries(st.text(max_size=2), _LINE))
    ),
    st.sampled_from([{}, {"step": 3}, {"step": "x"}, {"step": 2.5}, {"step": 10**400}]),
)


@settings(deadline=None, max_examples=12, suppress_health_check=list(HealthCheck))
@example([([], {"train_tokens": 1.0}, {"TRAIN_STEPS": "1"}, {}, {"step": 3})])  # finished, without metrics
@given(st.lists(_RUN, min_size=1, max_size=3))
def test_whatever_runs_hold_they_have_a_page(runs):
    with tempfile.TemporaryDirectory() as folder:
        paths = []
        for number, (lines, facts, bound, evaluations, end) in enumerate(runs):
            lines = [{**step_line(step), "split": split, **line, "step": step} for step, split, line in lines]
            config = "".join(f"{name} = {value}\n" for name, value in bound.items())
            paths.append(make_run(f"{folder}/{number}", lines, config, {**FACTS, **facts}))
            os.makedirs(f"{folder}/{number}/evals/e")
            write_json(epath.Path(f"{folder}/{number}/evals/e/7.json"), evaluations)
            write_json(epath.Path(f"{folder}/{number}/END"), end)
            with open(f"{folder}/{number}/metrics.jsonl", "a") as file:
                file.writelines(json.dumps({"step": step, "split": "train"}) + "\n" for step in (True, 10**400))
        assert "Next steps" in report(*paths)


def test_evaluations_of_every_task_and_step_are_found():
    """The report takes results from metrics.jsonl if files lack them. A seldom evaluated task shows its last results and their step."""
    lines = [step_line(step) for step in range(1, 41)]
    many = [{"step": step, "split": "eval/a", "loss": 1.0 * step} for step in range(1, 41)]
    make_run("run", [*lines, *many, {"step": 3, "split": "eval/seldom", "loss": 7.5}], facts=FACTS)
    os.makedirs("run/evals/eval")
    write_json(epath.Path("run/evals/eval/40.json"), {"results": {"a": {"loss": 0.5}}})
    pathlib.Path("run/evals/eval/39.json").write_text("{")
    run = read_run("run")
    assert run.evaluations["eval/a"] == {step: {"loss": 0.5 if step == 40 else step} for step in range(1, 41)}
    assert run.damaged == ["evals/eval/39.json"]
    assert "seldom loss – – – – – – – 7.5 (step 3)" in text_of(report("run"))
    named = [{"step": 1, "split": split, "loss": 1.0} for split in ("probe/a", "probe_2/a")]
    make_run("named", [step_line(1), *named], facts=FACTS)  # probe_2 is a name, where there are no files of probe
    os.makedirs("named/evals/probe_2")
    write_json(epath.Path("named/evals/probe_2/1.json"), {"results": {"a": {"loss": 1.0}}})
    assert read_run("named").evaluations.keys() == {"probe/a", "probe_2/a"}
    twice = [*lines, *EVALUATED[2:3], {**EVALUATED[2], "split": "average/a", "loss": 2.0}]
    assert summarize_runs([read_run(make_run("twice", twice, facts=FACTS))])["evaluation loss"] == [
        "at step 40: average/a 2.000 (perplexity 7.4), eval/a 4.600 (perplexity 99.5)"
    ]


def test_results_of_steps_that_were_lost_are_left_out():
    make_run("run", [step_line(step) for step in range(1, 36)], facts=FACTS)
    os.makedirs("run/evals/e")
    for step in (20, 40):
        content = {"results": {"a": {"loss": float(step)}}, "texts": {"prompts": {"We": f"at {step}"}}}
        content["failures"] = {"b": f"It broke at {step}"}
        write_json(epath.Path(f"run/evals/e/{step}.json"), content)
    page_text = text_of(report("run"))
    assert (
        "Omitted because damaged or lost: evaluations after step 35." in page_text
        and "at 20" in page_text
        and "at 40" not in page_text
    )
    assert "step 20: b: It broke at 20" in page_text and "broke at 40" not in page_text
    pathlib.Path("run/evals/e/30.json").write_text("{")  # which says nothing of what broke before
    assert "step 20: b: It broke at 20" in text_of(report("run"))
    pathlib.Path("run", OWNER).write_text("{}")  # while it is trained, metrics may come later than results
    assert read_run("run").evaluations["e/a"].keys() == {20, 40}
    alone = make_run("alone", [{"step": 40, "split": "e/a", "loss": 1.0}], facts=FACTS)
    assert "no training metrics, but evaluations" in text_of(report(alone))
    axes = Axes([read_run("run"), read_run(alone)])
    assert list(axes.names) == ["step"]  # tokens and FLOPs are not known of both
    assert "FLOPs" not in summarize_runs([read_run(alone)])


def test_a_run_that_was_killed_on_this_machine_is_not_in_training():
    make_run("run", [step_line(1)], facts=FACTS)
    owner = dataclasses.asdict(Owner.this()) | {"beat": 0}
    pathlib.Path("run", OWNER).write_text(json.dumps(owner))
    assert read_run("run").state == "training"
    pathlib.Path("run", OWNER).write_text(json.dumps(owner | {"process": 2**30}))
    assert read_run("run").state == "stopped"


def test_a_run_that_ended_is_at_its_end():
    run = make_run("run", [step_line(step) for step in range(1, 39)], facts=FACTS)
    write_end(run, 40)
    assert "finished at step 40." in text_of(report(run))
    old = [step_line(step) for step in (1, 2, 3)]
    del old[0]["grad_norm"], old[1]["grad_norm"]  # a version that did not measure it
    assert not read_run(make_run("old", old)).is_bad.any()


def test_differences_are_of_what_is_referred_to():
    bound = {
        "RunConfig.optimizer": "%OPTIMIZER", "OPTIMIZER": "@Adafactor()", "Adafactor.learning_rate": "@a/LearningRate()",
        "a/LearningRate.factors": "'x'", "optim.LearningRate.steps": "1", "b/LearningRate.factors": "'y'", "Sgd.rate": "%RATE",
        "RATE": "2",
    }  # fmt: skip
    assert bound.keys() - referenced_settings(bound) == {"b/LearningRate.factors", "Sgd.rate", "RATE"}
    config = "RunConfig.a = @A()\nA.b = %X\nX = {}\nY = 3\nSgd.rate = {}\nC.d = {!r}\n"
    run_one = make_run("one", [step_line(1)], config.format("%Y", 1, "a  b"))
    two = make_run("two", [step_line(1)], config.format("3", 2, "a b"))
    assert find_differences([read_run(run_one), read_run(two)]) == {"C.d": ["'a  b'", "'a b'"], "Sgd.rate": ["1", "2"]}
    page_text = text_of(report(run_one, two, output="both.html"))
    assert (
        "No differences except the directory." in page_text
        and "bindings that the configurations do not use one two C.d" in page_text
    )


def test_colors_are_told_from_the_panels_of_both_themes():
    """WCAG 2.2, 1.4.11: graphics have a contrast of 3 or more."""

    def brightness(color: str) -> float:
        parts = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return float(np.dot([0.2126, 0.7152, 0.0722], linear))

    style = (pathlib.Path(t5x_lab.__file__).parent / "report" / "page.css").read_text()
    panels = re.findall(r"--panel: (#\w{6})", style)
    assert len(panels) == 2 and len({pick_color(number) for number in range(60)}) == 60
    for color in map(pick_color, range(60)):
        for panel in panels:
            dark, bright = sorted((brightness(color), brightness(panel)))
            assert (bright + 0.05) / (dark + 0.05) >= 3.0, (color, panel)


def test_equal_curves_are_both_seen_and_constants_are_where_they_are():
    run_one = make_run("one", [step_line(step, learning_rate=1e-5) for step in range(1, 41)], facts=FACTS)
    two = make_run("two", [step_line(step, learning_rate=1e-5) for step in range(1, 41)], facts=FACTS)
    then = make_run("then", [step_line(step, loss=1.15, learning_rate=1e-5) for step in range(40, 141)], facts=FACTS)
    runs = [read_run(path) for path in (run_one, two, then)]
    charts = training_charts(runs, ["one", "two", "then"], axes := Axes(runs)).drawn
    plots = dict(zip((chart.title for chart in charts), make_figures(charts, axes, has_legends=False)))
    lines = lambda plot: [drawn.glyph for drawn in plot.renderers if type(drawn.glyph).__name__ == "Line"]
    dashed = {title: [bool(line.line_dash) for line in lines(plot)] for title, plot in plots.items()}
    assert dashed["loss of training, nats per token"] == [False, True, False]  # the last one begins where others end
    rate = plots["learning rate"]
    assert rate.y_range.min_interval == rate.y_range.default_span == 1e-5 and not rate.legend


def test_commands_are_those_that_work():
    def command_of(
        path: str, lines: list[dict], config: str = "A.b = 1\n", facts: dict | None = None, end: int | None = None
    ) -> str:
        make_run(path, lines, config, FACTS | (facts or {}))
        if end:
            write_end(path, end)
        return " ".join(command for _, command in next_commands(read_run(path)))

    half = [step_line(step) for step in range(1, 21)]
    stops = "EARLY_STOPPING = @EarlyStopping()\n"
    assert "TRAIN_STEPS=40" in command_of("spent", half, facts={"train_steps": 20}, end=20)
    early = command_of("early", half, stops, end=20)  # of 40
    assert "--gin.EARLY_STOPPING=None" in early and "TRAIN_STEPS" not in early
    spent = command_of("stopping", half, stops, facts={"train_steps": 20}, end=20)
    assert "--gin.TRAIN_STEPS=40 --gin.EARLY_STOPPING=None" in spent
    carried = [{**line, "tokens_processed": 9_000 + line["tokens_processed"]} for line in half]
    assert "TRAIN_TOKENS=11560" in command_of("carried", carried, facts={"train_steps": None, "train_tokens": 10_280}, end=20)
    assert "t5x_lab train" not in command_of("without", half, config="")
    of_config = command_of("of config", half, "TRAIN_TOKENS = 2560\nTRAIN_STEPS = None\n", {"train_steps": None}, end=20)
    assert "TRAIN_TOKENS=5120" in of_config and "TRAIN_STEPS" not in of_config
    assert "report ./-x OTHER_RUN" in command_of("-x", half)
    at = re.search(r"--gin_file=2024/config.gin (.*?) t5x_lab", command_of("2024", half)).group(1)
    assert binding(shlex.split(at)[0].removeprefix("--gin.")) == "MODEL_DIR = '2024'"


def test_texts_are_shown_whole_or_what_is_left_out_is_said():
    make_run("run", [step_line(step) for step in range(1, 21)], facts=FACTS)
    os.makedirs("run/evals/samples")
    for step in range(1, 21):
        write_json(
            epath.Path(f"run/evals/samples/{step}.json"), {"results": {}, "texts": {"prompts": {"We": f"at {step}\x00\x07"}}}
        )
    for name, task, text in (("encoder_decoder", "prompts", "x"), ("causal_decoder", "prompts", "y"), ("encoder", "other", "")):
        path = make_run(name, [step_line(1)], facts=FACTS | {"architecture": name})
        os.makedirs(f"{path}/evals/samples")
        write_json(epath.Path(f"{path}/evals/samples/1.json"), {"results": {}, "texts": {task: {"We": text}}})
    assert "<b>We</b>\nx" in report("encoder_decoder") and "<b>We</b>y" in report("causal_decoder")
    assert "We (empty)" in text_of(report("encoder"))
    page_text = text_of(report("run"))
    assert r"at 20\x00\x07" in page_text and "Samples of 12 more steps are in evals/." in page_text


@pytest.mark.slow
def test_training_writes_its_page_with_what_the_model_writes():
    evals = "--gin.EVALS=(@LossEvaluation(), @SamplesEvaluation())"
    prompts = ["--gin.SamplesEvaluation.prompts=('The <people>', 'We')", "--gin.SamplesEvaluation.max_tokens=8"]
    done = commands.run(*flags("causal_decoder", FULL_LM, "run", 4, "--gin.EVAL_PERIOD=2", evals, *prompts))
    assert done.returncode == 0, done.stderr
    run = t5x_lab.load("run")
    written = [text for (text,) in run.generate(["The <people>", "We"], max_tokens=8)]
    results = json.loads(pathlib.Path("run/evals/samples/4.json").read_text())
    assert results["texts"] == {"prompts": dict(zip(["The <people>", "We"], written))} and results["results"] == {}
    page_text = text_of(pathlib.Path("run/report.html").read_text())
    assert "finished at step 4." in page_text and "step 2" in page_text and html.escape("The <people>") in page_text
    assert f"causal_decoder, {run.num_parameters:,} parameters" in page_text and "t5x_lab generate --model_dir=run" in page_text
    facts = json.loads(pathlib.Path("run/run.json").read_text())
    assert facts["flops_per_step"] == facts["rows"] * run.network.flops(0, facts["decoder_length"])
    lines = [line for line in read_metrics("run") if line["split"] == "train"]
    seconds = [line["seconds"] for line in lines]
    assert seconds == sorted(seconds) and seconds[-1] >= sum(line["seconds_per_step"] for line in lines)
    (events,) = pathlib.Path("run").glob("events.out*")
    assert b"samples/prompts/The <people>" in events.read_bytes()
    with pytest.raises(UserError, match="SamplesEvaluation.prompts is empty"):
        SamplesEvaluation()


# ---- in a browser

PROBE = """<script>
const found = { errors: [] };
addEventListener("error", (event) => found.errors.push(event.message));
addEventListener("load", () => setTimeout(() => {
  const all = () => Bokeh.documents.flatMap((doc) => doc.roots());
  const ends = () => all().map((chart) => Math.round(chart.x_range.end));
  found.charts = all().length;
  found.wide = document.documentElement.scrollWidth - document.documentElement.clientWidth;
  found.by_step = ends();
  document.querySelector('[data-axis="tokens"]').click();
  setTimeout(() => {
    found.by_tokens = ends();
    const click = (run) => document.querySelector(`[data-run="run-${run}"]`).click();
    click(0);
    setTimeout(() => {
    found.alone = ends();
    click(1);
    document.querySelector('[data-axis="step"]').click();
    setTimeout(() => {
    click(0); click(1);
    setTimeout(() => {
    found.again = ends();
    click(1);
    found.hidden = all().map((chart) => chart.renderers.filter((drawn) => !drawn.visible).map((drawn) => drawn.glyph.tags[0]));
    document.body.innerHTML = `<pre id="found">${JSON.stringify(found)}</pre>`;
    }, 500); }, 500); }, 500);
  }, 1000);
}, 1500));
</script>"""


@pytest.mark.slow
@pytest.mark.parametrize("width", [1280, 390])
def test_a_browser_draws_the_curves_and_the_buttons_work(width):
    lines = [step_line(step) for step in range(1, 41)]
    page = report(make_run("one", lines + EVALUATED, facts=FACTS), make_run("two", lines[:20] + EVALUATED, facts=FACTS))
    path = pathlib.Path("probed.html").absolute()
    path.write_text(page.replace("<body>", "<body>" + PROBE, 1))
    result = found_in_browser(f"file://{path}", width)
    assert result["errors"] == [] and result["wide"] <= 0, result
    assert result["charts"] == 5 + 4  # loss, accuracy, rate, norm, speed; loss and accuracy of two tasks
    assert set(result["by_step"]) == {40}, result["by_step"]
    assert all(2560 < end < 2660 for end in result["by_tokens"]), result["by_tokens"]
    assert all(1280 <= end < 1310 for end in result["alone"][:5]), result[
        "alone"
    ]  # of the shorter run, in the charts of training
    assert set(result["again"]) == {40}, result["again"]  # nothing was shown in between, of which there is no range
    assert all(names and set(names) == {"run-1"} for names in result["hidden"]), result["hidden"]
