"""A model that knows a task by heart is asked in every way there is; rank classification's rules; lm-eval on real data."""

import collections
import functools
import gzip
import json
import math
import os
import pathlib
import random
import statistics
import sys
from unittest.mock import ANY

import commands
import numpy as np
import pyarrow as pa
import pytest
from conftest import ROOT
from helpers import harness_task
from known_task import ANSWERS, CHOICES, QUESTIONS, TRAIN, WORDS, write_task

import t5x_lab
from t5x_lab.cli.main import main
from t5x_lab.config.errors import UserError
from t5x_lab.evaluation.questions import NORMALIZATIONS, Question, make_answer, pick_best
from t5x_lab.evaluation.ranking import accuracy
from t5x_lab.observe.metrics import read_metrics

SHARED = ROOT.parent / "shared" / "data"


@pytest.fixture(scope="module")
def known_run(tmp_path_factory):
    """A byte-level encoder-decoder that was trained until it knows twelve lines, in a folder with their task."""
    folder = tmp_path_factory.mktemp("known")
    before = pathlib.Path.cwd()
    os.chdir(folder)
    write_task(folder)
    command = [
        *TRAIN,
        "--gin.MODEL_DIR=run", "--gin.TRAIN_STEPS=150", "--gin.LearningRate.factors=constant", "--gin.LearningRate.base_learning_rate=0.01",
        "--gin.EVAL_PERIOD=150", "--gin.INFER_EVAL_PERIOD=75", "--gin.CHECKPOINT_PERIOD=75",
    ]  # fmt: skip
    try:
        done = commands.run(*command)
        assert done.returncode == 0, done.stderr
        yield folder
    finally:
        os.chdir(before)


@pytest.fixture
def inside(known_run, monkeypatch):
    monkeypatch.chdir(known_run)
    return known_run


@pytest.mark.slow
def test_generate_knows_all_answers(inside):
    run = t5x_lab.load("run")
    assert [texts[0] for texts in run.generate(QUESTIONS, max_tokens=8, batch_size=5)] == ANSWERS
    assert [texts[0] for texts in run.generate(QUESTIONS, max_tokens=8, beam_size=2)] == ANSWERS
    stopped = run.generate(QUESTIONS, max_tokens=8, stop=["o", "ee"], batch_size=5)
    assert [texts[0] for texts in stopped] == [word.split("o")[0].split("ee")[0] for word in ANSWERS]
    limits = [1 + i % 4 for i in range(12)]
    limited = run.generate(QUESTIONS, max_tokens=limits)
    assert [texts[0] for texts in limited] == [word[:limit] for limit, word in zip(limits, ANSWERS)]
    beams = run.generate(QUESTIONS, max_tokens=limits, beam_size=2)
    for remainder in range(4):
        assert beams[remainder::4] == run.generate(QUESTIONS[remainder::4], max_tokens=1 + remainder, beam_size=2)
    as_ids = run.generate([[*run.vocabulary.encode(q), 1] for q in QUESTIONS], max_tokens=8)
    assert [texts[0] for texts in as_ids] == ANSWERS
    for options, says in (
        ({"stop": [""]}, "empty text"), ({"seed": -1}, "seed is -1"), ({"batch_size": 0}, "batch_size is 0"),
        ({"max_tokens": [1]}, "1 numbers for 12"), ({"beam_size": 0}, "beam_size is 0"), ({"streams": [1]}, "streams has 1"),
    ):  # fmt: skip
        with pytest.raises(UserError, match=says):
            run.generate(QUESTIONS, **options)
    cut = run.generate(["x" * 100 + QUESTIONS[0]], max_tokens=8, max_length=len(QUESTIONS[0]) + run.input_eos)
    assert cut == [[ANSWERS[0]]]


@pytest.mark.slow
def test_scores_come_with_lengths_flags_and_what_was_cut(inside):
    run = t5x_lab.load("run")
    inputs = [question for question in QUESTIONS for _ in CHOICES]
    scores = run.scores(inputs, CHOICES * 12, eos=True)
    picks = scores.log_prob.reshape(12, 4).argmax(1)
    assert [CHOICES[i] for i in picks] == ANSWERS
    assert scores.tokens.tolist() == [len(c) + 1 for c in CHOICES] * 12 and scores.characters.tolist() == [5 + (c == "animal") + (c == "number") - (c == "tree") for c in CHOICES] * 12  # fmt: skip
    assert (scores.is_greedy.reshape(12, 4).sum(1) == 1).all() and not scores.cut.any()
    cut = run.scores(["pad " * 50 + QUESTIONS[0]], [ANSWERS[0]], max_length=16)
    assert cut.cut.tolist() == [200 + len(QUESTIONS[0]) + run.input_eos - 16]
    assert run.scores([], []).log_prob.shape == (0,)
    with pytest.raises(UserError, match="Inputs and targets must have one type"):
        run.scores(["a"], [[5]])
    with pytest.raises(UserError, match="Pair 0 has a target of 6 tokens"):
        run.scores(["x"], ["animal"], max_length=5)


@pytest.mark.slow
def test_training_and_eval_measure_the_tasks_own_metrics(inside, capsys):
    assert "SpecialTokens.input_eos = True" in pathlib.Path("run/config.gin").read_text()
    logged = {m["step"]: m for m in read_metrics("run") if m["split"] == "infer/known"}
    assert list(logged) == [75, 150] and logged[150]["exact"] == 1.0
    run = t5x_lab.load("run")
    own = run.scores(QUESTIONS, ANSWERS, eos=True).log_prob.mean()
    assert main(["eval", "--model_dir=run", "--step=75,150", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert list(report) == ["75", "150"] and report["150"]["infer/known"]["exact"] == 1.0
    assert report["150"]["infer/known"]["mean_score"] == pytest.approx(own, abs=1e-4)
    assert report["150"]["eval/known"]["accuracy"] == 1.0
    lines = [json.loads(line) for line in pathlib.Path("run/inference/known-150.jsonl").read_text().splitlines()]
    assert [(x["inputs"], x["targets"], x["prediction"]) for x in lines] == list(zip(QUESTIONS, ANSWERS, ANSWERS, strict=True))
    assert main(["eval", "--model_dir=run", "--gin.MIXTURE_OR_TASK_NAME=both_known", "--follow", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert list(report) == ["75", "150"] and report["150"]["infer/known_too"]["exact"] == 1.0
    assert main(["eval", "--model_dir=run", "--gin.MIXTURE_OR_TASK_NAME=ranked", "--json"]) == 0  # T5's own rank classification
    assert json.loads(capsys.readouterr().out)["150"]["infer/ranked"]["accuracy"] == 100.0
    for step, says in (("7", "no checkpoint of step 7"), ("soon", "several numbers separated by commas")):
        assert main(["eval", "--model_dir=run", f"--step={step}"]) == 2 and says in capsys.readouterr().err


@pytest.mark.slow
def test_fine_tuning_measures_the_tasks_metrics_on_whole_inputs(inside, tmp_path, capsys):
    """TASK_FEATURE_LENGTHS truncates the inputs of training alone, as in T5X."""
    short = '--gin.TASK_FEATURE_LENGTHS={"inputs": 9, "targets": 8}'
    command = [
        "train", "--gin_file=run/config.gin", "--gin_file=runs/finetune.gin", "--gin.INITIAL_CHECKPOINT_PATH=run", short,
        f"--gin.MODEL_DIR={tmp_path}/tuned", "--gin.TRAIN_STEPS=2", "--gin.EVAL_PERIOD=2",
        "--gin.LearningRate.base_learning_rate=1e-9",
    ]  # fmt: skip
    assert main(command) == 0
    results = {line["split"]: line for line in read_metrics(f"{tmp_path}/tuned")}
    assert results["infer/known"]["exact"] == 1.0 and results["infer/known"]["step"] == 2
    capsys.readouterr()
    assert main(["eval", "--model_dir=run", short, "--json"]) == 0
    assert "were truncated to 9 tokens" in capsys.readouterr().err


@pytest.mark.slow
def test_infer_on_a_task_a_mixture_and_ranked_choices(inside, tmp_path, capsys):
    command = ["infer", "--model_dir=run", "--batch_size=2", "--max_tokens=8"]
    assert main([*command, "--task=known", f"--output={tmp_path}/known.jsonl"]) == 0
    lines = [json.loads(line) for line in pathlib.Path(tmp_path / "known.jsonl").read_text().splitlines()]
    assert [x["prediction"] for x in lines] == ANSWERS == [x["targets"] for x in lines]
    assert main([*command, "--task=both_known", "--mode=score", f"--output={tmp_path}/scored.jsonl"]) == 0
    lines = [json.loads(line) for line in pathlib.Path(tmp_path / "scored.jsonl").read_text().splitlines()]
    run = t5x_lab.load("run")
    np.testing.assert_allclose([x["score"] for x in lines], np.tile(run.score(QUESTIONS, ANSWERS, eos=True), 2), atol=1e-4)
    assert [x["task"] for x in lines] == ["known"] * 12 + ["known_too"] * 12 and all(x["is_greedy"] for x in lines)

    capsys.readouterr()
    records = [
        {"inputs": q, "targets": a, "dataset": "words" if i % 2 else "others", "prompt": f"p{i % 3}"}
        for i, (q, a) in enumerate(zip(QUESTIONS, ANSWERS, strict=True))
    ]
    (tmp_path / "ranked.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    ranked = [*command, f"--input={tmp_path}/ranked.jsonl", "--mode=rank", f"--output={tmp_path}/picks.jsonl"]
    assert main([*ranked, *(f"--choice={c}" for c in CHOICES)]) == 0
    report = json.loads(capsys.readouterr().out)
    changed = (tmp_path / "ranked.jsonl").read_text().replace("color", "tree", 1)
    (tmp_path / "changed.jsonl").write_text(changed)
    stale = [*command, f"--input={tmp_path}/changed.jsonl", "--mode=rank", f"--output={tmp_path}/picks.jsonl"]
    assert main([*stale, *(f"--choice={c}" for c in CHOICES)]) == 2
    assert "line 1 is not" in capsys.readouterr().err
    answers: dict[str, dict[str, list[str]]] = {"words": {}, "others": {}}
    for record in records:
        answers[record["dataset"]].setdefault(record["prompt"], []).append(record["targets"])
    share = lambda values: collections.Counter(values).most_common(1)[0][1] / len(values)
    constant = statistics.fmean(statistics.median(map(share, prompts.values())) for prompts in answers.values())
    assert report["average(others+words)"] == {
        **dict.fromkeys(NORMALIZATIONS, 1.0),
        "chance": 1 / len(CHOICES),
        "constant": pytest.approx(constant),
    }
    assert report["datasets"]["words"]["over_prompts"]["sum"]["prompts"] == 3

    for more, says in (
        (["--task=known", "--split=test"], 'has no split "test"'),
        (["--task=unknown"], "unknown"),
        (["--task=known", "--mode=rank"], 'has no "idx"'),
        (["--task=sotu_span_corruption", '--gin.TASK_FEATURE_LENGTHS={"inputs": 32, "targets": 16}', "--gin.ByteVocabulary.extra_ids=50"], "was trained with"),
        ([], "Pass either --input"),
    ):  # fmt: skip
        assert main([*command, *more, f"--output={tmp_path}/none.jsonl"]) == 2, more
        assert says in capsys.readouterr().err, more


@pytest.mark.exhaustive
@pytest.mark.slow
def test_infer_killed_twice_writes_every_example_once(inside, tmp_path):
    """Kill -9 in the middle, twice; the output is that of an uninterrupted run, to the byte."""
    rng = random.Random(0)
    (tmp_path / "in.txt").write_text(
        "".join(f"what is {rng.choice(list(WORDS))}{'?' * rng.randint(1, 9)}\n" for _ in range(400))
    )
    command = [
        "infer",
        "--model_dir=run",
        f"--input={tmp_path}/in.txt",
        "--batch_size=2",
        "--max_tokens=8",
        "--temperature=1.0",
    ]
    output = tmp_path / "out.jsonl"
    kills, line_counts = 0, []
    for _ in range(20):
        process = commands.Command(*command, "--seed=3", f"--output={output}", log=f"{tmp_path}/log")
        size = output.stat().st_size if output.exists() else 0
        process.wait_until(lambda size=size: kills < 2 and output.exists() and output.stat().st_size > size, pause=0.01)
        if not process.is_running():
            break
        process.kill()
        process.wait()
        kills += 1
        line_counts.append(len(output.read_bytes().splitlines()))
    assert kills == 2 and process.wait() == 0 and 0 < line_counts[0] < line_counts[1] < 400
    assert commands.run(*command, "--seed=3", f"--output={tmp_path}/whole.jsonl").returncode == 0
    assert output.read_bytes() == (tmp_path / "whole.jsonl").read_bytes()
    assert [json.loads(x)["inputs"] for x in output.read_text().splitlines()] == (tmp_path / "in.txt").read_text().splitlines()


@pytest.mark.parametrize(
    "content, mode, says",
    [
        ('{"inputs": "x"}\n{"inputs": ""}\n', "predict", "line 2 has an empty text"),
        ('{"inputs": "x"}\n{"inputs": "x"}\n', "score", 'line 1 has no text under "targets"'),
        ('{"inputs": "x", "choices": ["a"]}\n', "rank", "line 1 has no list of two or more texts"),
        ('{"inputs": "x", "choices": ["a", "b"]}\n', "rank", "line 1 does not name the right choice"),
        ('{"inputs": "x", "choices": ["a", "b"], "label": 2}\n', "rank", "Write a number from 0 to 1"),
        ('"text"\n', "predict", "line 1 is not an object"),
        ('{"inputs": "a\\ud800b"}\n', "predict", "line 1 contains half of a surrogate pair"),
    ],
)
def test_bad_lines_are_sentences_and_what_was_done_is_kept(tmp_path, content, mode, says):
    from t5x_lab.evaluation.inference.files import read_examples

    path = tmp_path / "bad.jsonl"
    path.write_text(content)
    with pytest.raises(UserError, match=says) as error:
        list(read_examples(str(path), mode))
    assert "bad.jsonl" in str(error.value)


# Rank classification, by hand.


def test_ties_and_what_is_not_a_number():
    nan = math.nan
    assert pick_best([-1.0, -2.0]) == (0, False)
    assert pick_best([-2.0, -1.0, -1.0]) == (1, True)
    assert pick_best([nan, -5.0]) == (1, False)
    assert pick_best([nan, nan]) == (None, False)
    assert pick_best([-math.inf, nan]) == (0, False)


def test_normalizations_may_disagree():
    """Worked by hand: sums -4, -5, -9; per token -4, -2.5, -3; per character -2, -1.25, -0.9."""
    result = make_answer([-4.0, -5.0, -9.0], [1, 2, 3], [2, 4, 10])
    assert result.picks == {"sum": 0, "token_mean": 1, "character_mean": 2} and not result.ties


def test_a_report_names_its_data_sets_and_spreads_over_prompts():
    questions, results = [], []
    right_of = {("a", "p"): 4, ("a", "q"): 2, ("a", "r"): 1, ("b", "p"): 3}
    for (dataset, prompt), right in right_of.items():
        for i in range(4):
            questions.append(Question("x", ("y", "z"), 0, dataset, prompt))
            results.append(make_answer([-1.0, -2.0] if i < right else [-2.0, -1.0], [1, 1], [1, 1]))
    report = accuracy.report(questions, results)
    over = report["datasets"]["a"]["over_prompts"]["sum"]
    values = [1.0, 0.5, 0.25]
    assert over["median"] == 0.5 and over["mean"] == pytest.approx(statistics.fmean(values)) and over["lowest"] == 0.25
    assert over["interquartile_range"] == pytest.approx(np.subtract(*np.percentile(values, [75, 25])))
    assert report["average(a+b)"]["sum"] == pytest.approx((0.5 + 0.75) / 2)
    only = accuracy.report(questions[:12], results[:12])
    assert "average(a)" in only and "average(a+b)" not in only
    means = [(1.0 + 0.5 + 0.25) / 3, 0.75]
    assert report["average_of_means(a+b)"] == {
        "sum": pytest.approx(np.mean(means)),
        "token_mean": ANY,
        "character_mean": ANY,
        "chance": 0.5,
        "constant": 1.0,  # all labels are 0
    }
    dev = accuracy.report(questions[4:], results[4:])  # where q is a's best
    best = accuracy.add_best_prompts(report, dev, "validation")["best_on_validation"]
    assert best["a"] == {"prompt": "q", "validation": 0.5, "sum": 0.5} and best["average(a+b)"] == pytest.approx(
        (0.5 + 0.75) / 2
    )
    lines = accuracy.table(report).splitlines()
    assert (
        lines[1].split() == ["a", "3", "50.0", "58.3", "25.0", "100.0", "37.5", "50.0", "50.0", "50.0", "100.0"]
        and len(lines) == 4
    )


def test_the_constant_answer_is_the_most_frequent_one():
    answer = make_answer([-1.0, -2.0, -3.0], [1, 1, 1], [1, 1, 1])
    ask = lambda label, weight=1.0: Question("x", ("y", "z", "w"), label, "a", "p", weight=weight)
    labels = [0, 2, 2, 1]
    assert accuracy.accuracies(map(ask, labels), [answer] * 4)["constant"] == 0.5
    weighted = [ask(0, 3.0), ask(2), ask(2)]
    assert accuracy.accuracies(weighted, [answer] * 3)["constant"] == pytest.approx(0.6)
    two = Question("x", ("y", "z"), 0, "b", "p")
    mixed = [*map(ask, labels), two], [answer] * 4 + [make_answer([-1.0, -2.0], [1, 1], [1, 1])]
    assert "constant" not in accuracy.accuracies(*mixed)  # choices of different numbers have no common answer
    report = accuracy.report(*mixed)
    assert report["datasets"]["a"]["over_prompts"]["constant"]["median"] == 0.5
    assert report["average(a+b)"]["constant"] == pytest.approx((0.5 + 1.0) / 2) and "75.0" in accuracy.table(report)


# lm-eval.


@pytest.fixture
def offline(tmp_path, monkeypatch):
    manager = pytest.importorskip("lm_eval.tasks.manager").TaskManager
    own_files_only = functools.partialmethod(manager.__init__, include_defaults=False)  # and not lm-eval's 14,000
    monkeypatch.setattr(manager, "__init__", own_files_only)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")


@pytest.mark.slow
def test_a_blank_context_does_not_end_an_evaluation(monkeypatch):
    """A SentencePiece model has no token for a space; here nothing has one."""
    instance = pytest.importorskip("lm_eval.api.instance").Instance
    from t5x_lab.evaluation.harness.model import HarnessModel

    bindings = ["VOCABULARY = @ByteVocabulary()", "TransformerConfig.vocab_size = 384"]
    for file in ("t5_1_1", "decoder"):
        run = t5x_lab.from_gin([f"models/{file}/tiny.gin"], bindings)
        model = HarnessModel(run)
        encode = model.tok_encode
        monkeypatch.setattr(model, "tok_encode", lambda text, *args, encode=encode, **more: encode(text.strip()))
        first = [] if file == "t5_1_1" else [0]  # as tok_encode begins a decoder's context
        scores = model._loglikelihood_tokens([((" ", "a"), first, [5, 6]), (("b", "a"), [*first, 7], [5, 6])])
        assert all(np.isfinite(score) for score, _ in scores)
        expected = run.score([[1] if file == "t5_1_1" else []], [[5, 6]])
        np.testing.assert_allclose(scores[0][0], expected[0], rtol=1e-4)
        if file == "t5_1_1":
            monkeypatch.setattr(run._texts.vocabulary, "encode", lambda text: [])
        requests = [instance("generate_until", {}, (text, {"until": ["x"], "max_gen_toks": 2}), 0) for text in (" ", " ")]
        alone = run.generate([[1] if file == "t5_1_1" else [0]], max_tokens=2, stop=["x"], add_start=False)
        assert model.generate_until(requests) == [alone[0][0]] * 2


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["encoder_decoder", "causal_decoder"])
def test_what_does_not_fit_the_model_does_not_end_an_evaluation(architecture, capsys):
    instance = pytest.importorskip("lm_eval.api.instance").Instance
    from t5x_lab.evaluation.harness.model import HarnessModel

    run = fresh(architecture, "SpecialTokens.input_eos = True")
    model = HarnessModel(run, max_length=8)
    instances = lambda kind, *arguments: [instance(kind, {}, args, i) for i, args in enumerate(arguments)]
    short, long = model.loglikelihood(instances("loglikelihood", ("ab", " c"), ("ab", " far too long")))
    np.testing.assert_allclose(short[0], run.score(["ab"], [" c"])[0], rtol=1e-4)
    assert long == (-math.inf, False)
    assert "1 of 2 requests have continuations of up to 13 tokens, beyond the 8 tokens" in capsys.readouterr().err
    wishes = ({"until": ["\n"], "max_gen_toks": 3}, {"until": ["\n"], "max_gen_toks": 30})
    texts = model.generate_until(instances("generate_until", *(("ab", wish) for wish in wishes)))
    assert texts[0] == run.generate(["ab"], max_tokens=3)[0][0].partition("\n")[0]
    stderr = "1 of 2 requests ask for 30 tokens (max_gen_toks), which leave no room in the 8 tokens" in capsys.readouterr().err
    assert stderr == (architecture == "causal_decoder") and (not stderr or texts[1] == "")


@pytest.mark.slow
def test_lm_eval_finds_what_the_model_knows(inside, offline, tmp_path, capsys):
    """Multiple choice, generation and perplexity tasks by `t5x_lab harness`, with lm-eval's own files."""
    data = tmp_path / "known.jsonl"
    records = [
        {"inputs": q, "answer": a, "choices": CHOICES, "label": CHOICES.index(a)}
        for q, a in zip(QUESTIONS, ANSWERS, strict=True)
    ]
    data.write_text("".join(json.dumps(r) + "\n" for r in records))
    harness_task(tmp_path, "known_choice", data, "{{inputs}}", "{{choices}}", "label", target_delimiter="")
    harness_task(
        tmp_path, "known_text", data, "{{inputs}}", None, "answer", target_delimiter="", output_type="generate_until",
        generation_kwargs={"until": ["\n"], "max_gen_toks": 8}, metric_list=[{"metric": "exact_match"}],
    )  # fmt: skip
    harness_task(
        tmp_path, "known_rolling", data, "", None, "{{answer}}", output_type="loglikelihood_rolling",
        metric_list=[{"metric": "byte_perplexity"}],
    )  # fmt: skip
    names = "known_choice,known_text,known_rolling"
    command = ["harness", "--model_dir=run", f"--tasks={names}", f"--include_path={tmp_path}", f"--output_path={tmp_path}/out"]
    assert main([*command, "--json"]) == 0
    printed = capsys.readouterr()
    results = json.loads(printed.out)["results"]
    assert results["known_choice"]["acc,none"] == 1.0 and results["known_text"]["exact_match,none"] == 1.0
    assert "known_choice" in printed.err and "|acc" in printed.err  # lm-eval's table
    run = t5x_lab.load("run")
    texts = [[*run.vocabulary.encode(a), 1] for a in ANSWERS]  # as lm-eval's own model, with the end token
    total = run.scores([[1]] * 12, texts).log_prob.sum()
    size = sum(len(a) for a in ANSWERS)
    assert results["known_rolling"]["byte_perplexity,none"] == pytest.approx(math.exp(-total / size), rel=1e-4)
    written = list((tmp_path / "out").rglob("*.json*"))
    assert any("results" in p.name for p in written) and any("samples_known_choice" in p.name for p in written)
    assert main(["harness", "--model_dir=run", "--tasks=no_such_task"]) == 2
    assert 'no task "no_such_task"' in capsys.readouterr().err


def copa(folder):
    """COPA as lm-eval tasks, on its published validation file, and the (context, choices, label) of every example."""
    source = SHARED / "eval" / "superglue" / "COPA" / "val.jsonl"
    if not source.exists():
        pytest.skip("needs ../shared/data/eval/superglue, which is not available")
    word = {"cause": "because", "effect": "therefore"}
    records = [json.loads(line) for line in source.read_text().splitlines()]
    for r in records:
        r["context"] = r["premise"].rstrip(".") + " " + word[r["question"]]
        r["choices"] = [r["choice1"][0].lower() + r["choice1"][1:], r["choice2"][0].lower() + r["choice2"][1:]]
    data = folder / "copa.jsonl"
    data.write_text("".join(json.dumps(r) + "\n" for r in records))
    harness_task(folder, "local_copa", data, "{{context}}", "{{choices}}", "label")
    return records


def samples_of(folder, task):
    (path,) = folder.rglob(f"samples_{task}_*.jsonl")
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return sorted(rows, key=lambda row: row["doc_id"])


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["encoder_decoder", "causal_decoder", "prefix_decoder"])
def test_lm_eval_on_copa_equals_an_independent_computation(architecture, offline, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = fresh(architecture)
    run.save("run")
    records = copa(tmp_path)[:16]
    command = ["harness", "--model_dir=run", "--tasks=local_copa", "--include_path=.", "--output_path=out", "--limit=16"]
    assert main(command) == 0
    rows = samples_of(tmp_path / "out", "local_copa")
    contexts = [r["context"] for r in records for _ in range(2)]
    choices = [" " + choice for r in records for choice in r["choices"]]
    scores = run.score(contexts, choices).reshape(-1, 2)
    actual = np.array([[float(x[0][0]) for x in row["resps"]] for row in rows])
    np.testing.assert_allclose(actual, scores, rtol=1e-4, atol=1e-3)
    labels = np.array([r["label"] for r in records])
    assert np.mean([row["acc"] for row in rows]) == (scores.argmax(1) == labels).mean()
    lengths = np.array([[len(c) for c in r["choices"]] for r in records])
    assert np.mean([row["acc_norm"] for row in rows]) == ((scores / lengths).argmax(1) == labels).mean()


def fresh(architecture, *more):
    sizes = ["TransformerConfig.emb_dim = 32", "TransformerConfig.vocab_size = 384", "TransformerConfig.dtype = 'float32'"]
    files = ["models/byt5/tiny.gin"] if architecture == "encoder_decoder" else ["models/decoder/tiny.gin"]
    kind = [] if architecture == "encoder_decoder" else [f"TransformerConfig.architecture = '{architecture}'"]
    return t5x_lab.from_gin(files, ["VOCABULARY = @ByteVocabulary()", *sizes, *kind, *more], seed=3)


@pytest.mark.slow
def test_the_exported_weights_under_lm_evals_own_model_give_the_same(offline, tmp_path, monkeypatch):
    """Converted to Hugging Face and run by lm-eval's `hf` model: accuracies and log-probabilities to 1e-3.

    With T5 1.0's tied logits: lm-eval ties those of every T5 under transformers 5, also where the model does not.
    """
    pytest.importorskip("accelerate")  # of the extra "compare", with torch
    from t5x_lab.runs import harness

    monkeypatch.chdir(tmp_path)
    fresh("encoder_decoder", "TransformerConfig.logits_via_embedding = True").save("run")
    copa(tmp_path)
    assert main(["convert", "--from=t5x_lab", "--to=hf", "--source=run", "--target=hf_model"]) == 0
    common = ["--tasks", "local_copa", "--include_path", ".", "--batch_size", "16", "--log_samples", "--limit", "40"]
    settings = {
        "ours": ("--model", "t5x_lab", "--model_args", "model_dir=run"),
        "theirs": (
            "--model", "hf", "--device", "cpu", "--model_args",
            "pretrained=hf_model,backend=seq2seq,dtype=float32,add_bos_token=False",
        ),
    }  # fmt: skip
    results = {}
    for name, argv in settings.items():
        monkeypatch.setattr(sys, "argv", ["lm_eval", *argv, *common, "--output_path", name])
        harness.cli_evaluate()
        results[name] = samples_of(tmp_path / name, "local_copa")
    for a, b in zip(results["ours"], results["theirs"], strict=True):
        np.testing.assert_allclose([float(x[0][0]) for x in a["resps"]], [float(x[0][0]) for x in b["resps"]], atol=1e-3)
        assert (a["acc"], a["acc_norm"]) == (b["acc"], b["acc_norm"])


@pytest.mark.slow
def test_an_exported_run_has_a_model_card_that_the_hubs_library_reads(inside, tmp_path):
    hub = pytest.importorskip("huggingface_hub")  # of the extra "compare", with transformers
    assert main(["convert", "--source=run", "--to=hf", f"--target={tmp_path}/words"]) == 0
    card = hub.ModelCard.load(tmp_path / "words" / "README.md")
    assert (card.data.library_name, card.data.pipeline_tag) == ("transformers", "text2text-generation")
    (metrics,) = json.loads(pathlib.Path("run/evals/infer/150.json").read_text())["results"].values()
    parameters = t5x_lab.load("run").num_parameters
    assert (
        f"| infer/known | exact {metrics['exact']:.4g}" in card.text and f"- Parameters: {parameters:,}, float32" in card.text
    )
    assert "- Trained on: `known`" in card.text and 'AutoModelForSeq2SeqLM.from_pretrained("words")' in card.text


@pytest.mark.slow
def test_infer_reads_compressed_files_and_draws_alike_in_any_number_of_shards(inside, tmp_path, capsys):
    lines = [f"what is {word}{'?' * n}" for word in WORDS for n in (1, 2, 3)]
    text = "".join(line + "\n" for line in lines).encode()
    (tmp_path / "in.txt").write_bytes(text)
    (tmp_path / "in.txt.gz").write_bytes(gzip.compress(text))
    (tmp_path / "in.txt.zst").write_bytes(pa.compress(text, codec="zstd", asbytes=True))
    command = ["infer", "--model_dir=run", "--batch_size=1", "--max_tokens=8", "--temperature=1.0", "--seed=3"]
    read = lambda name: [json.loads(line) for line in (tmp_path / name).read_text().splitlines()]
    for kind in ("", ".gz", ".zst"):
        assert main([*command, f"--input={tmp_path}/in.txt{kind}", f"--output={tmp_path}/whole{kind}.jsonl"]) == 0
        assert read(f"whole{kind}.jsonl") == read("whole.jsonl")
    for shard in range(3):
        shares = [f"--shard_id={shard}", "--num_shards=3", f"--output={tmp_path}/share.{shard}"]
        assert main([*command, f"--input={tmp_path}/in.txt.gz", *shares]) == 0
        assert read(f"share.{shard}") == read("whole.jsonl")[shard::3]
    of_task = ["--task=known", "--num_shards=2"]
    assert main([*command, *of_task[:1], f"--output={tmp_path}/task.jsonl"]) == 0
    assert main([*command, *of_task, "--shard_id=1", f"--output={tmp_path}/task.1"]) == 0
    assert read("task.1") == read("task.jsonl")[1::2]
    (tmp_path / "bad.txt.gz").write_bytes(gzip.compress(text)[:-20])
    assert main([*command, f"--input={tmp_path}/bad.txt.gz", f"--output={tmp_path}/none.jsonl"]) == 2
    assert "bad.txt.gz is no valid gzip file" in capsys.readouterr().err and not (tmp_path / "none.jsonl").exists()


@pytest.mark.slow
def test_inputs_of_a_task_are_cut_as_in_training_unless_asked_for_whole(inside, tmp_path):
    command = [
        "infer",
        "--model_dir=run",
        "--task=known",
        "--max_tokens=8",
        '--gin.TASK_FEATURE_LENGTHS={"inputs": 9, "targets": 8}',
    ]
    read = lambda name: [json.loads(line) for line in (tmp_path / name).read_text().splitlines()]
    assert (
        main([*command, f"--output={tmp_path}/cut"]) == 0
        and main([*command, "--whole_inputs", f"--output={tmp_path}/whole"]) == 0
    )
    lengths = [len(question) + 1 for question in QUESTIONS]
    assert [line["cut"] for line in read("cut")] == [length - 9 for length in lengths]
    assert [line["cut"] for line in read("whole")] == [0] * 12 and [line["prediction"] for line in read("whole")] == ANSWERS
    run = t5x_lab.load("run")
    cut = [[*run.vocabulary.encode(question)[:8], 1] for question in QUESTIONS]
    assert [line["prediction"] for line in read("cut")] == [texts[0] for texts in run.generate(cut, max_tokens=8)]


@pytest.mark.slow
def test_metrics_equal_those_of_seqios_evaluator_with_another_way_to_predict(inside, capsys):
    """Predictions and scores by teacher-forced logits alone, token by token, at a step where not all is known."""
    import seqio

    run = t5x_lab.load("run", step=75)
    eos = run.eos_id

    def step_by_step(inputs: list[int]) -> list[int]:
        written: list[int] = []
        while len(written) < 8 and eos not in written:
            logits = run.logits(encoder_input_tokens=[[*inputs]], decoder_input_tokens=[[0, *written]])
            written.append(int(logits[0, -1].argmax()))
        return written + [eos] * (8 - len(written))

    def score(inputs: list[int], targets: list[int]) -> float:
        logits = run.logits(encoder_input_tokens=[inputs], decoder_input_tokens=[[0, *targets[:-1]]])[0].astype(np.float64)
        log_probs = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
        return float(sum(log_probs[i, token] for i, token in enumerate(targets)))

    class AsTheyAre(seqio.PassThroughFeatureConverter):
        TASK_FEATURES = {}  # noqa: RUF012
        pack = False

    def measured(task):
        evaluator = seqio.Evaluator(task, AsTheyAre(), eval_split="validation", async_compute_metrics=False)
        every = lambda data: [(int(i), x["inputs"].tolist(), x["targets"].tolist()) for i, x in data.as_numpy_iterator()]
        metrics, _ = evaluator.evaluate(
            compute_metrics=True,
            step=75,
            predict_fn=lambda data: [(i, step_by_step(inputs)) for i, inputs, _ in every(data)],
            score_fn=lambda data: [(i, score(inputs, targets)) for i, inputs, targets in every(data)],
        )
        return {name: float(getattr(metric, "value", metric)) for name, metric in metrics.result()[task].items()}

    argv = ["eval", "--model_dir=run", "--step=75", "--json"]
    assert main(argv) == 0
    expected_known, reported = measured("known"), json.loads(capsys.readouterr().out)["75"]["infer/known"]
    assert reported["exact"] == expected_known["exact"] and reported["mean_score"] == pytest.approx(
        expected_known["mean_score"], abs=1e-4
    )
    ranking = "EVALS = (@MetricsEvaluation(), @RankingEvaluation())"
    assert main([*argv, "--gin.MIXTURE_OR_TASK_NAME=ranked", f"--gin_bindings={ranking}"]) == 0
    reported, expected_ranked = json.loads(capsys.readouterr().out)["75"], measured("ranked")
    assert reported["infer/ranked"] == pytest.approx(expected_ranked)
    assert reported["rank/ranked"]["sum"] == pytest.approx(expected_ranked["accuracy"] / 100)
    assert reported["rank/ranked"]["f1_sum"] == pytest.approx(expected_ranked["mean_4class_f1"] / 100)


@pytest.mark.slow
def test_ranking_by_files_tasks_and_lm_eval_is_one(inside, offline, tmp_path, capsys):
    """The same questions at a step where not all is known; targets of tasks end with an end token, lm-eval's do not."""
    records = [{"inputs": q, "choices": CHOICES, "label": CHOICES.index(a)} for q, a in zip(QUESTIONS, ANSWERS, strict=True)]
    (tmp_path / "q.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    infer = ["infer", "--model_dir=run", "--step=75", "--mode=rank"]
    report = {}
    for name, argv in {
        "file": [f"--input={tmp_path}/q.jsonl"], "file with ends": [f"--input={tmp_path}/q.jsonl", "--eos"], "task": ["--task=ranked"],
    }.items():  # fmt: skip
        assert main([*infer, *argv, f"--output={tmp_path}/{name}.jsonl"]) == 0
        (dataset_metrics,) = json.loads(capsys.readouterr().out)["datasets"].values()
        report[name] = dataset_metrics["prompts"]["only"]
    read = lambda name: [json.loads(line) for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()]
    for actual, expected in zip(read("task"), read("file with ends"), strict=True):
        np.testing.assert_allclose(actual["scores"], expected["scores"], rtol=1e-5)
        assert (actual["tokens"], actual["characters"], actual["picks"]) == (
            expected["tokens"],
            expected["characters"],
            expected["picks"],
        )
    assert report["task"] == report["file with ends"]
    harness_task(tmp_path, "choice", tmp_path / "q.jsonl", "{{inputs}}", "{{choices}}", "label", target_delimiter="")
    assert main(["harness", "--model_dir=run", "--step=75", "--tasks=choice", f"--include_path={tmp_path}", "--json"]) == 0
    reported = json.loads(capsys.readouterr().out)
    assert reported["results"]["choice"]["acc,none"] == report["file"]["sum"]
    assert reported["results"]["choice"]["acc_norm,none"] == report["file"]["character_mean"]
    assert reported["ranking"]["datasets"]["choice"]["prompts"]["only"] == report["file"]
