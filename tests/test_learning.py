"""Real text, from the command line: every pair of architecture and objective learns; budgets, mixtures, a user's own tasks."""

import os
import pathlib

import commands
import numpy as np
import pytest
from conftest import ROOT
from runs_of_text import FULL_LM, PREFIX_LM, PREFIX_LM_ED, SPANS, flags, losses

import t5x_lab
from t5x_lab.cli.main import main
from t5x_lab.config.errors import UserError
from t5x_lab.observe.metrics import read_metrics

pytestmark = pytest.mark.slow


PAIRS = [
    ("causal_decoder", FULL_LM), ("causal_decoder", SPANS), ("prefix_decoder", PREFIX_LM), ("prefix_decoder", SPANS),
    ("encoder_decoder", PREFIX_LM_ED), ("encoder_decoder", SPANS),
]  # fmt: skip


@pytest.mark.parametrize(
    "architecture, objective", PAIRS, ids=lambda value: value if isinstance(value, str) else value[0].split("sotu_")[1]
)
def test_each_pair_learns_from_real_text(architecture, objective):
    done = commands.run(*flags(architecture, objective, "run", 60), "--gin.EVAL_PERIOD=30")
    assert done.returncode == 0, done.stderr
    train = losses("run")
    assert len(train) == 60
    first, last = train[1][0], np.mean([train[step][0] for step in range(51, 61)])
    assert first > 5.5 and last < first - 2.0, (first, last)  # ln 384 = 5.95
    held_out = losses("run", "eval/" + objective[0].split("=")[1])
    assert set(held_out) == {30, 60} and held_out[60][0] < first - 2.0
    for name in ("config.gin", "model-info.txt", "plots/loss.png", "plots/learning_rate.png", "plots/tokens_per_second.png"):
        assert os.path.getsize(f"run/{name}") > 0
    assert os.listdir("run/checkpoints") == ["60"]
    assert [name for name in os.listdir("run") if name.startswith("events.out")]
    line = read_metrics("run")[-2]
    assert {
        "step", "split", "loss", "accuracy", "learning_rate", "grad_norm", "seconds_per_step", "tokens_per_second", "mfu",
        "tokens_processed", "tokens_with_loss", "raw_tokens", "data_wait_fraction",
    } <= line.keys()  # fmt: skip


@pytest.mark.parametrize(
    "architecture, objective, lengths",
    [
        ("encoder_decoder", "bert_style", {"inputs": 64}),
        ("shared_stacks", "mass_style", {"inputs": 64}),
        ("prefix_decoder", "deshuffling", {"inputs": 64}),
        ("encoder_decoder", "replace_spans", {"inputs": 64}),
        ("rotary_decoder", "drop_tokens", {"inputs": 64}),
        ("encoder_decoder", "span_corruption_50_3", {"inputs": 64}),
        ("encoder_decoder", "ul2", {"inputs": 64}),
        ("encoder_decoder", "prefix_lm", {"targets": 63}),
        ("encoder", "masked_lm", {"inputs": 64}),
        ("gpt1", "full_lm", {"targets": 64}),
        ("lstm", "prefix_lm", {"targets": 63}),
    ],
)
def test_every_objective_learns_from_real_text(architecture, objective, lengths):
    """Forty steps; counts of tokens are those of the objective."""
    data = ["--gin.MIXTURE_OR_TASK_NAME=sotu", f"--gin.OBJECTIVE={objective}", f"--gin.TASK_FEATURE_LENGTHS={lengths}"]
    lstm = ["--gin.LstmConfig.vocab_size=384", "--gin.LstmConfig.emb_dim=32", "--gin.LstmConfig.hidden_dim=64"]
    more = lstm if architecture == "lstm" else []
    done = commands.run(*flags(architecture, data, "run", 40, "--gin.EVAL_PERIOD=40", "--gin.CHECKPOINT_PERIOD=40", *more))
    assert done.returncode == 0, done.stderr
    train = losses("run")
    first, last = train[1][0], np.mean([train[step][0] for step in range(31, 41)])
    assert len(train) == 40 and last < first - 1.2, (first, last)
    assert losses("run", f"eval/sotu_{objective}")[40][0] < first - 1.2
    line = read_metrics("run")[-2]
    assert 0 < line["tokens_with_loss"] <= line["tokens_processed"]
    assert 0 < line["raw_tokens"] <= line["tokens_processed"]


def test_a_budget_of_tokens_ends_training_at_the_first_step_that_spends_it():
    argv = [flag for flag in flags("causal_decoder", FULL_LM, "run", 0) if "TRAIN_STEPS" not in flag]
    assert main([*argv, "--gin.TRAIN_TOKENS=5000", "--gin.CHECKPOINT_PERIOD=6"]) == 0
    tokens = [line["tokens_processed"] for line in read_metrics("run") if line["split"] == "train"]
    assert tokens[-1] >= 5000 > tokens[-2] and tokens[0] == 8 * 64
    assert str(len(tokens)) in os.listdir("run/checkpoints")
    assert main([*argv, "--gin.TRAIN_TOKENS=7000"]) == 0  # goes on, counting from the beginning
    tokens = [line["tokens_processed"] for line in read_metrics("run") if line["split"] == "train"]
    assert tokens[-1] >= 7000 > tokens[-2] and tokens == sorted(tokens)


def test_the_tutorial_works_as_it_is_written():
    """docs/your_own.md: its module and gin file, in an empty directory with a text; trained, resumed, counted."""
    blocks = (ROOT / "docs" / "your_own.md").read_text().split("```")[1::2]
    module = next(block for block in blocks if "seqio.TaskRegistry.add" in block)
    run = next(block for block in blocks if block.startswith("\nimport my_tasks"))
    pathlib.Path("my_tasks.py").write_text(module.removeprefix("python\n"))
    pathlib.Path("my_run.gin").write_text(run)
    pathlib.Path("my_text.txt").write_text(
        "\n".join(f"It is line {n} of a text that somebody wrote, and it goes on." for n in range(900))
    )
    argv = ["train", "--gin_file=my_run.gin", "--gin.CHECKPOINT_PERIOD=20"]
    for tokens in (20_000, 25_000):  # the second time it is continued
        done = commands.run(*argv, f"--gin.TRAIN_TOKENS={tokens}")
        assert done.returncode == 0, done.stderr
        train = [line for line in read_metrics("runs/mine") if line["split"] == "train"]
        assert train[-1]["tokens_processed"] >= tokens > train[-2]["tokens_processed"]
    assert "Continuing after step" in done.stderr
    assert train[-1]["loss"] < train[0]["loss"] - 1
    changed = commands.run(*argv, "--gin.shifted_tokens.rate=0.1")
    assert changed.returncode == 2 and "was trained with OBJECTIVE" in changed.stderr, changed.stderr


def test_tokens_are_counted_for_each_task_of_a_mixture():
    with open("mixed.py", "w") as file:
        file.write(
            "import seqio, t5x_lab.tasks\n"
            "seqio.MixtureRegistry.add('mixed', [('sotu_span_corruption', 3.0), ('sotu_deshuffling', 1.0)])\n"
        )
    data = [
        "--gin_bindings=import mixed",
        "--gin.MIXTURE_OR_TASK_NAME=mixed",
        '--gin.TASK_FEATURE_LENGTHS={"inputs": 64, "targets": 64}',
    ]
    for steps in (3, 5):
        done = commands.run(*flags("encoder_decoder", data, "run", steps, "--gin.CHECKPOINT_PERIOD=3"))
        assert done.returncode == 0, done.stderr
    for line in [line for line in read_metrics("run") if line["split"] == "train"]:
        counts = {name: line[f"tokens_processed/{name}"] for name in ("sotu_span_corruption", "sotu_deshuffling")}
        assert sum(counts.values()) == line["tokens_processed"]
    assert all(counts.values())
    assert {"eval/sotu_span_corruption", "eval/sotu_deshuffling"} <= {line["split"] for line in read_metrics("run")}


def test_an_encoder_alone_predicts_in_place_and_does_not_generate():
    data = ["--gin.MIXTURE_OR_TASK_NAME=sotu_masked_lm", '--gin.TASK_FEATURE_LENGTHS={"inputs": 32}']
    assert main(flags("encoder", data, "run", 3)) == 0
    run = t5x_lab.load("run")
    assert run.logits(encoder_input_tokens=np.array([[5, 6, 358]])).shape == (1, 3, 384)
    for refused in (lambda: run.generate(["x"]), lambda: run.score(["x"], ["y"])):
        with pytest.raises(UserError, match="an encoder alone predicts masked tokens in place"):
            refused()
    assert main(["generate", "--model_dir=run", "--prompt=x"]) == 2


MY_TASKS = """
import functools
import seqio
import t5x_lab.tasks
from t5.data import preprocessors

vocabulary = seqio.ByteVocabulary(extra_ids=100)
seqio.TaskRegistry.add(
    "my_words",
    source=seqio.TextLineDataSource({"train": "words.txt", "validation": "words.txt"}),
    preprocessors=[
        functools.partial(preprocessors.parse_tsv, field_names=["inputs", "targets"]),
        seqio.preprocessors.tokenize,
        seqio.preprocessors.append_eos,
    ],
    output_features={"inputs": seqio.Feature(vocabulary), "targets": seqio.Feature(vocabulary)},
)
seqio.MixtureRegistry.add("my_mixture", [("my_words", 3.0), ("sotu_span_corruption", 1.0)])
"""


def test_a_users_own_task_and_mixture_with_rates(tmp_path):
    (tmp_path / "my_tasks.py").write_text(MY_TASKS)
    (tmp_path / "words.txt").write_text("".join(f"word {n}\tnumber {n}\n" for n in range(50)))
    mixture = ["--gin_bindings=import my_tasks", "--gin.MIXTURE_OR_TASK_NAME=my_mixture", SPANS[1]]
    done = commands.run(*flags("encoder_decoder", mixture, "run", 4))
    assert done.returncode == 0, done.stderr
    assert set(losses("run", "eval/my_words")) == {4} and set(losses("run", "eval/sotu_span_corruption")) == {4}
