"""Results of studies: intervals, orderings, units that count, and missing cells."""

import dataclasses
import importlib
import json
import math
import pathlib
import tarfile

import numpy as np
import pytest
import scipy.stats
from test_study import STUDY

from t5x_lab.config.errors import UserError
from t5x_lab.study.config import Factor, Saving, Stage, Study
from t5x_lab.study.figures import held_out_curves
from t5x_lab.study.intervals import adjust, interval, paired_difference
from t5x_lab.study.measures import Measure, Value
from t5x_lab.study.plan import make_plan
from t5x_lab.study.quantities import compute_quantities
from t5x_lab.study.report import write_report
from t5x_lab.study.results import CellResults, common_units, informative_units, make_measure_reports, orderings, read_results
from t5x_lab.study.savings import Losses, compute_savings


def by_key(values_SU: np.ndarray) -> dict[tuple[int, str], float]:
    return {(seed, f"set {unit}"): float(x) for (seed, unit), x in np.ndenumerate(values_SU)}


def test_intervals_are_those_of_students_t():
    draw = np.random.default_rng(0)
    units = draw.normal(1.0, 2.0, (1, 12))
    expected = scipy.stats.ttest_1samp(units[0], 0.0).confidence_interval(0.95)
    result = interval(by_key(units))
    assert (result.low, result.high) == pytest.approx((expected.low, expected.high)) and (result.seeds, result.units) == (1, 12)
    seeds = draw.normal(1.0, 2.0, (4, 1))
    expected = scipy.stats.ttest_1samp(seeds[:, 0], 0.0).confidence_interval(0.95)
    result = interval(by_key(seeds))
    assert (result.low, result.high) == pytest.approx((expected.low, expected.high)) and (result.seeds, result.units) == (4, 1)
    both = draw.normal(0.0, 1.0, (3, 20)) + draw.normal(0.0, 5.0, (3, 1))  # seeds differ by more than units
    expected = scipy.stats.ttest_1samp(both.mean(axis=1), 0.0).confidence_interval(0.95)
    assert interval(by_key(both)).high == pytest.approx(expected.high)
    assert math.isnan(interval(by_key(np.ones((1, 1)))).low) and interval({}).units == 0


def test_equal_values_are_no_certainty():
    assert math.isnan(interval(by_key(np.full((3, 1), 0.05))).p_value) and interval(by_key(np.zeros((3, 1)))).p_value == 1.0
    numbers = {"a": by_key(np.array([[0.575], [0.6], [0.55]])), "b": by_key(np.array([[0.525], [0.55], [0.5]]))}
    assert not orderings(numbers, "highest")[0].is_shown


def test_differences_are_paired():
    draw = np.random.default_rng(1)
    first = draw.normal(0.0, 10.0, (1, 15))
    second = first - 0.5 + draw.normal(0.0, 0.1, (1, 15))
    result = paired_difference(by_key(first), {**by_key(second), (7, "another"): 3.0})
    expected = scipy.stats.ttest_rel(first[0], second[0]).confidence_interval(0.95)
    assert (result.low, result.high) == pytest.approx((expected.low, expected.high)) and result.low > 0
    assert result.p_value == pytest.approx(scipy.stats.ttest_rel(first[0], second[0]).pvalue)
    assert interval(by_key(first)).low < 0 < interval(by_key(first)).high  # without pairs the difference is not seen


def test_the_interval_covers_the_true_mean_as_often_as_it_says():
    draw = np.random.default_rng(2)
    covered = 0
    for _ in range(2000):
        result = interval(by_key(draw.normal(3.0, 1.0, (1, 8))))
        covered += result.low <= 3.0 <= result.high
    assert abs(covered / 2000 - 0.95) < 0.015


def test_p_values_are_adjusted_to_the_false_discovery_rate():
    """The largest k with p(k) <= k/m * rate is rejected with all smaller ones."""
    draw = np.random.default_rng(4)
    for _ in range(20):
        p_values = draw.uniform(size=30) ** draw.uniform(1, 4)
        for rate in (0.01, 0.05, 0.2):
            ordered = np.sort(p_values)
            below = np.nonzero(ordered <= np.arange(1, 31) / 30 * rate)[0]
            expected = p_values <= (ordered[below[-1]] if len(below) else -1.0)
            assert (np.array(adjust(p_values)) <= rate).tolist() == expected.tolist()
    assert adjust([0.5, math.nan]) == pytest.approx([0.5, math.nan], nan_ok=True) and adjust([]) == []


def test_equal_cells_are_hardly_ever_ordered():
    """Single tests find orderings of sixteen cells with the same mean in nearly every study."""
    draw, alone, together = np.random.default_rng(5), 0, 0
    for _ in range(50):
        numbers = {f"{n}": by_key(draw.normal(0.5, 0.1, (3, 1))) for n in range(16)}
        compared = orderings(numbers, "highest")
        alone += any(ordering.difference.low > 0 for ordering in compared)
        together += any(ordering.is_shown for ordering in compared)
    assert alone > 40 and together < 5


def cell(title: str, values: dict[tuple[int, str], Value], missing=()) -> CellResults:
    return CellResults(title, None, values, missing)


def test_orderings_are_shown_or_open_and_lower_may_be_better():
    draw = np.random.default_rng(3)
    base = {(0, f"{n}"): draw.normal() for n in range(30)}
    shifted = lambda by, noise: {key: Value(x + by + noise * draw.normal()) for key, x in base.items()}
    results = [
        cell("a", shifted(0.0, 0.01)),
        cell("b", shifted(1.0, 0.01)),
        cell("c", shifted(0.0, 0.01)),
        cell("none", {}, (0,)),
    ]
    units = common_units(results)
    assert len(units) == 30
    numbers = {result.title: result.numbers(units) for result in results}
    compared = {frozenset((o.better, o.worse)): o for o in orderings(numbers, "highest")}
    assert len(compared) == 3 and compared[frozenset("ab")].better == "b" and compared[frozenset("ab")].is_shown
    assert compared[frozenset("ab")].difference.low > 0.9 and not compared[frozenset("ac")].is_shown
    compared = {frozenset((o.better, o.worse)): o for o in orderings(numbers, "lowest")}
    assert compared[frozenset("ab")].better == "a" and compared[frozenset("ab")].difference.low > 0.9


def test_cells_are_compared_within_a_factor_and_over_seeds_alone(tmp_path):
    """Tasks are named after objectives, and the two texts differ by more than the two sizes do."""
    factors = (
        Factor(name="objective", values={"full LM": (), "masked LM": ()}),
        Factor(name="size", values={"small": (), "large": ()}),
    )
    loss = Measure(
        name="loss", evaluation="eval", metric="loss", best_is="lowest", percent=False, within=("objective",), over=("seeds",)
    )
    stage = Stage(name="pretrain", factors=("objective", "size"))
    study = Study(factors=factors, stages=(stage,), measures=(loss,), seeds=(0, 1, 2), equal=())
    plan, draw, expected = make_plan(study, str(tmp_path)), np.random.default_rng(5), {}
    for planned in plan.cells:
        losses = {
            f"{text}_{planned.values['objective']}": base + draw.normal(0, 0.01) for text, base in (("a", 2.0), ("b", 9.0))
        }
        if planned.values["size"] == "large":
            losses = {task: value - 0.1 for task, value in losses.items()}
        folder = tmp_path / "runs" / planned.runs["pretrain"] / "evals" / "eval"
        folder.mkdir(parents=True)
        results = {task: {"loss": value} for task, value in losses.items()}
        (folder / "9.json").write_text(json.dumps({"step": 9, "results": results}))
        expected.setdefault(planned.title, []).append(np.mean(list(losses.values())))
    reports = make_measure_reports(plan, loss)
    assert [report.title for report in reports] == ["loss: full LM", "loss: masked LM"]
    for report in reports:
        (ordering,) = report.orderings
        assert ordering.is_shown and ordering.better.endswith("large")
        interval_of_t = scipy.stats.ttest_rel(expected[ordering.worse], expected[ordering.better]).confidence_interval(0.95)
        assert (ordering.difference.low, ordering.difference.high) == pytest.approx(tuple(interval_of_t))
    (together,) = make_measure_reports(plan, dataclasses.replace(loss, within=()))
    assert not together.units
    with pytest.raises(UserError, match='"objectiv", which is not a factor. Did you mean "objective"'):
        dataclasses.replace(study, measures=(dataclasses.replace(loss, within=("objectiv",)),))
    with pytest.raises(UserError, match="Measure.over"):
        dataclasses.replace(loss, over=("units",))


def test_units_at_the_constant_answer_do_not_count():
    values = lambda learned: {
        (seed, unit): Value(x + 0.001 * seed, 0.5, 0.6) for seed in range(3) for unit, x in (("at it", 0.6), ("above", learned))
    }
    results = [cell("a", values(0.6)), cell("b", values(0.9))]
    assert informative_units(results, common_units(results), "highest") == ["above"]
    assert informative_units([cell("none", {}, (0, 1, 2)), *results], ["at it", "above"], "highest") == ["above"]
    without = [cell("a", {(0, "x"): Value(0.1)}), cell("b", {(0, "x"): Value(0.2)})]
    assert informative_units(without, ["x"], "highest") == ["x"]


def test_a_deleted_result_is_missing_and_no_earlier_one_takes_its_place(tmp_path):
    plan = make_plan(STUDY, str(tmp_path))
    measure = Measure(name="BLiMP", evaluation="blimp", metric="score")
    for number, run in enumerate(plan.runs.values()):
        folder = pathlib.Path(run.model_dir) / "evals" / "blimp"
        folder.mkdir(parents=True, exist_ok=True)
        numbers = {data_set: {"score": 0.5 + 0.01 * number, "chance": 0.5} for data_set in ("one", "two")}
        (folder / "4.json").write_text(json.dumps({"step": 4, "results": {}, "report": {"probes": {"blimp": numbers}}}))
    results = {cell.title: cell for cell in read_results(plan, measure)}
    assert all(len(cell.values) == 4 and not cell.missing for cell in results.values())
    adapted = plan.runs["adapt-causal_decoder-mlm-lm_a-seed1"]
    pathlib.Path(adapted.model_dir, "evals/blimp/4.json").unlink()
    path = pathlib.Path(plan.runs["pretrain-causal_decoder-full_lm-seed0"].model_dir, "evals/blimp/4.json")
    content = json.loads(path.read_text())
    del content["report"]["probes"]["blimp"]["two"]  # one data set of another cell
    path.write_text(json.dumps(content))
    results = {cell.title: cell for cell in read_results(plan, measure)}
    assert results["causal decoder, MLM, LM-A"].missing == [1] and len(results["causal decoder, MLM, LM-A"].values) == 2
    assert results["causal decoder, MLM, none"].missing == []

    plan = dataclasses.replace(plan, study=dataclasses.replace(STUDY, measures=(measure,)))
    for seed in STUDY.seeds:
        run = plan.runs[f"adapt-prefix_decoder-mlm-lm_a-seed{seed}"]
        pathlib.Path(run.model_dir, "evals/blimp/4.json").unlink()
    page = write_report(plan, {}, ["pretrain: equal tokens in 6 runs"]).read_text()
    assert "<td>prefix decoder, MLM, LM-A</td>" in page and "data:image/svg+xml;base64," in page and 'src="figures' not in page
    text = (tmp_path / "report.md").read_text()
    assert "| prefix decoder, MLM, LM-A | missing |" in text and "| causal decoder, MLM, LM-A |" in text
    assert "1, missing: 1 |" in text and "Of one unit, one: " in text and "| random answer | 50.0 |" in text
    assert "Checked: pretrain: equal tokens in 6 runs." in text and f"t5x_lab train --gin_file={tmp_path}/gin/pretrain-" in text
    for kind, begins in (("png", b"\x89PNG"), ("pdf", b"%PDF"), ("svg", b"<?xml")):
        assert (tmp_path / f"figures/measure-blimp.{kind}").read_bytes().startswith(begins)
    assert "![measure-blimp](figures/measure-blimp.png)" in text and not (tmp_path / "figures/loss-pretrain.png").exists()
    report = json.loads((tmp_path / "report.json").read_text())["measures"]["BLiMP"]
    assert report["units"] == ["one"] and report["cells"]["causal decoder, MLM, LM-A"]["missing_seeds"] == [1]


def test_tokens_saved_by_an_adaptation_are_those_of_known_curves(tmp_path):
    """The loss is 100 / tokens + 2 from scratch and 100 / (4 tokens) + 2 in the adaptation, which needs a quarter of the tokens."""
    saving = Saving(
        name="LM-A", adapted={"objective": "MLM", "adaptation": "LM-A", "architecture": "causal decoder"},
        scratch={"objective": "full LM", "architecture": "causal decoder"}, stage="adapt", scratch_stage="pretrain",
    )  # fmt: skip
    plan = make_plan(dataclasses.replace(STUDY, savings=(saving,)), str(tmp_path))
    quantities = compute_quantities(plan)
    for name, q in quantities.items():
        before, speed = q.last_step - q.steps, 4 if name.startswith("adapt") else 1
        steps = [before + 1 + i * (q.steps - 1) / 40 for i in range(41)]  # also steps that are no numbers of lines
        lines = [
            {"step": int(100 * step), "split": f"eval/{task}", "loss": 100 / (speed * (step - before) * q.batch_tokens) + 2 + shift}
            for step in steps for task, shift in (("a", -0.1), ("b", 0.1))
        ]  # fmt: skip
        folder = pathlib.Path(plan.runs[name].model_dir)
        folder.mkdir(parents=True)
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        scaled = {"steps": 100 * q.steps, "last_step": 100 * q.last_step, "batch_tokens": q.batch_tokens / 100}
        quantities[name] = dataclasses.replace(q, **scaled)
    saved = compute_savings(plan, saving, quantities)
    assert [s.seed for s in saved] == [0, 1]
    for s in saved:  # two steps of adaptation are worth eight from scratch, which has four
        assert s.tokens == pytest.approx(2 * 8 * 65) and math.isnan(s.ratio)
        assert s.ratio_at_scratch == pytest.approx(4, rel=0.03)
    measure = Measure(name="held-out loss", evaluation="eval", metric="loss", best_is="lowest", stages=("pretrain", "adapt"))
    curves = held_out_curves(plan, make_measure_reports(plan, measure)[0], quantities)["causal decoder, MLM, LM-A"]
    flops = [quantities[f"{run}-seed0"].flops for run in ("pretrain-causal_decoder-mlm", "adapt-causal_decoder-mlm-lm_a")]
    for losses, flops_P in curves:
        assert flops_P[0] > flops[0] and flops_P[-1] == pytest.approx(sum(flops)) and len(losses.losses) == len(flops_P)
    page = write_report(plan, quantities, [])
    text = (tmp_path / "report.md").read_text()
    assert "| not reached | more than 2.00 | 4." in text and "Mean ratio at the last loss from scratch: " in text
    (pathlib.Path(plan.runs["adapt-causal_decoder-mlm-lm_a-seed1"].model_dir) / "metrics.jsonl").unlink()
    assert [s.seed for s in compute_savings(plan, saving, quantities)] == [0]
    longer = Losses(np.array([100.0, 200.0, 400.0]), np.array([3.0, 2.0, 1.0]))
    assert longer.tokens_to(1.5) == 300 and longer.tokens_to(3.5) == 100 and math.isnan(longer.tokens_to(0.9))
    assert page.exists()
    with pytest.raises(UserError, match='LM-A/Saving.stage is "adopt", which is not a stage. Did you mean "adapt"'):
        dataclasses.replace(STUDY, savings=(dataclasses.replace(saving, stage="adopt"),))
    with pytest.raises(UserError, match='Saving.scratch has the value "PLM"'):
        dataclasses.replace(STUDY, savings=(dataclasses.replace(saving, scratch={"objective": "PLM"}),))


def write_scores(model_dir: pathlib.Path, results: dict[int, tuple[float, float]]) -> None:
    """Writes accuracies of two tasks around a mean, by step: on the choosing examples, and on the reported ones."""
    for step, scores in results.items():
        for evaluation, score in zip(("choosing", "reported"), scores, strict=True):
            folder = model_dir / "evals" / evaluation
            folder.mkdir(parents=True, exist_ok=True)
            tasks = {"a": {"accuracy": score - 0.1}, "b": {"accuracy": score + 0.1}}
            (folder / f"{step}.json").write_text(json.dumps({"step": step, "results": tasks}))


def remove_task(model_dir: pathlib.Path, step: int, task: str) -> None:
    path = model_dir / "evals/choosing" / f"{step}.json"
    content = json.loads(path.read_text())
    path.write_text(json.dumps({**content, "results": {name: x for name, x in content["results"].items() if name != task}}))


def test_a_step_is_chosen_by_other_examples(tmp_path):
    write_scores(tmp_path, {1: (0.5, 0.9), 2: (0.8, 0.4), 3: (0.7, 0.6)})
    measure = Measure(name="accuracy", evaluation="reported", metric="accuracy")
    mean = lambda measure: np.mean([value.value for value in measure.read(str(tmp_path)).values()])
    assert mean(measure) == pytest.approx(0.6)  # the last step
    assert list(dataclasses.replace(measure, tasks=("b",)).read(str(tmp_path))) == ["b"]
    chosen = dataclasses.replace(measure, chosen_by="choosing")
    assert mean(chosen) == pytest.approx(0.4)
    assert mean(dataclasses.replace(chosen, best_is="lowest")) == pytest.approx(0.9)
    (tmp_path / "evals/reported/2.json").unlink()  # a step without the reported result does not count
    assert mean(chosen) == pytest.approx(0.6)
    remove_task(tmp_path, 3, "a")  # the mean of one task, which is higher, is not compared with that of two
    assert mean(chosen) == pytest.approx(0.9)
    assert dataclasses.replace(measure, chosen_by="nowhere").read(str(tmp_path)) == {}
    with pytest.raises(UserError, match="Choose by an evaluation of other examples"):
        dataclasses.replace(measure, chosen_by="reported")


def test_a_rate_is_chosen_by_other_examples_and_all_seeds(tmp_path):
    rates = Factor(name="rate", values={"0.1": (), "0.2": (), "0.4": ()})
    stage = Stage(name="train", factors=("architecture", "rate"))
    measure = Measure(
        name="accuracy", evaluation="reported", metric="accuracy", chosen_by="choosing", best_of=("rate",),
        published={"causal decoder": 0.7},
    )  # fmt: skip
    study = Study(factors=(STUDY.factors[0], rates), stages=(stage,), measures=(measure,), seeds=(0, 1))
    plan = make_plan(study, str(tmp_path))
    run = lambda title, seed: plan.runs[
        next(cell.runs["train"] for cell in plan.cells if (cell.title, cell.seed) == (title, seed))
    ]
    scores = {"0.1": (0.5, 0.9), "0.2": (0.7, 0.6), "0.4": (0.2, 0.8)}  # the first would be the best by the reported examples
    for rate, at_best in scores.items():
        for seed in (0, 1):
            write_scores(pathlib.Path(run(f"causal decoder, {rate}", seed).model_dir), {1: (0.1, 0.99), 2: at_best})
    write_scores(pathlib.Path(run("prefix decoder, 0.1", 0).model_dir), {1: (0.3, 0.3)})
    write_scores(pathlib.Path(run("prefix decoder, 0.1", 1).model_dir), {1: (0.3, 0.3)})
    write_scores(pathlib.Path(run("prefix decoder, 0.4", 1).model_dir), {1: (0.9, 0.9)})  # one seed of two
    report = make_measure_reports(plan, measure)[0]
    assert {title: mean.mean for title, mean in report.means.items()} == pytest.approx(
        {"causal decoder, 0.2": 0.6, "prefix decoder, 0.1": 0.3}
    )
    assert [cell.published for cell in report.cells] == [0.7, None]
    assert len(report.orderings) == 1
    for seed in (0, 1):
        remove_task(pathlib.Path(run("causal decoder, 0.2", seed).model_dir), 2, "a")  # one task of two
        remove_task(pathlib.Path(run("causal decoder, 0.2", seed).model_dir), 1, "a")
    assert "causal decoder, 0.1" in make_measure_reports(plan, measure)[0].means
    everything = make_measure_reports(plan, dataclasses.replace(measure, best_of=()))[0]
    assert len(everything.cells) == 6 and everything.means["causal decoder, 0.1"].mean == pytest.approx(0.9)
    with pytest.raises(UserError, match="Measure.best_of of .accuracy. is .*, but Measure.chosen_by is None"):
        dataclasses.replace(measure, chosen_by=None)
    with pytest.raises(UserError, match='Measure.best_of of "accuracy" has "rat", which is not a factor. Did you mean "rate"'):
        dataclasses.replace(plan.study, measures=(dataclasses.replace(measure, best_of=("rat",)),))


def test_parts_of_a_benchmark_are_units(tmp_path):
    parts = {"CoLA": {"score": 50.0, "t5_glue_cola": {"matthews": 50.0}}, "STS-B": {"score": 80.0}}
    report = {"benchmarks": {"glue": {"average": None, "parts": parts, "missing": ["SST-2"]}}}
    folder = tmp_path / "evals" / "infer"
    folder.mkdir(parents=True)
    (folder / "5.json").write_text(json.dumps({"step": 5, "results": {"t5_glue_cola": {"matthews": 50.0}}, "report": report}))
    measure = Measure(name="GLUE", evaluation="infer", metric="score", percent=False)
    assert {unit: value.value for unit, value in measure.read(str(tmp_path)).items()} == {"CoLA": 50.0, "STS-B": 80.0}
    of_tasks = dataclasses.replace(measure, metric="matthews", units="tasks")
    assert {unit: value.value for unit, value in of_tasks.read(str(tmp_path)).items()} == {"t5_glue_cola": 50.0}
    with pytest.raises(UserError, match="Choose one of"):
        dataclasses.replace(measure, units="prompts")


def test_an_archive_of_results_has_the_same_numbers(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(pathlib.Path(__file__).parents[1] / "benchmarks")
    archived = importlib.import_module("study_results")
    plan = make_plan(STUDY, str(tmp_path / "study"))
    measure = Measure(name="BLiMP", evaluation="blimp", metric="score")
    for number, run in enumerate(plan.runs.values()):
        folder = pathlib.Path(run.model_dir) / "evals" / "blimp"
        folder.mkdir(parents=True, exist_ok=True)
        numbers = {"one": {"score": 0.5 + 0.01 * number, "chance": 0.5}}
        (folder / "4.json").write_text(json.dumps({"step": 4, "report": {"probes": {"blimp": numbers}}}))
        lines = [{"step": step, "split": "train", "loss": 1.0} for step in range(1, 121)]
        lines.insert(60, {"step": 60, "split": "eval/sotu", "loss": 2.0})
        (folder.parents[1] / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        (tmp_path / "study" / "finished").mkdir(exist_ok=True)
        (tmp_path / "study" / "finished" / f"{run.name}.json").write_text("{}")
    unfinished = tmp_path / "study" / "runs" / "pretrain-of_another-seed1"
    unfinished.mkdir()
    archived.main(plan.study_dir, str(tmp_path / "results.tar.xz"), "1")
    with tarfile.open(tmp_path / "results.tar.xz") as archive:
        archive.extractall(tmp_path / "unpacked", filter="data")
    unpacked = make_plan(dataclasses.replace(STUDY, seeds=(1,)), str(tmp_path / "unpacked"))
    of_seed_1 = make_plan(dataclasses.replace(STUDY, seeds=(1,)), plan.study_dir)
    assert read_results(unpacked, measure) == read_results(of_seed_1, measure)
    assert not list((tmp_path / "unpacked" / "runs").glob("*seed0"))
    assert {file.stem for file in (tmp_path / "unpacked" / "finished").iterdir()} == {*unpacked.runs}
    assert not (tmp_path / "unpacked" / "runs" / unfinished.name).exists()
    metrics = (tmp_path / "unpacked" / "runs" / "pretrain-causal_decoder-mlm-seed1" / "metrics.jsonl").read_text()
    assert [json.loads(line)["step"] for line in metrics.splitlines()] == [50, 60, 100, 120]
