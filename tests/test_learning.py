"""Real text, from the command line: every architecture learns, by objectives of every kind; budgets, mixtures, a user's own tasks."""

import os
import pathlib

import commands
import numpy as np
import pytest
from helpers import documented, exhaustive
from runs_of_text import FULL_LM, PREFIX_LM, SPANS, flags, losses

import t5x_lab
from t5x_lab.cli.main import main
from t5x_lab.config.errors import UserError
from t5x_lab.observe.metrics import read_metrics

pytestmark = pytest.mark.slow


TEXT = lambda objective: ["--gin.MIXTURE_OR_TASK_NAME=sotu", f"--gin.OBJECTIVE={objective}"]
INPUTS = ['--gin.TASK_FEATURE_LENGTHS={"inputs": 64}']
LSTM = ["--gin.LstmConfig.vocab_size=384", "--gin.LstmConfig.emb_dim=32", "--gin.LstmConfig.hidden_dim=64"]


@pytest.mark.parametrize(
    "architecture, task, data",
    [
        ("causal_decoder", "sotu_full_lm", FULL_LM),
        exhaustive("prefix_decoder", "sotu_prefix_lm_objective_decoder_architecture", PREFIX_LM),
        ("encoder_decoder", "sotu_span_corruption", SPANS),
        exhaustive("shared_stacks", "sotu_mass_style", TEXT("mass_style") + INPUTS),
        exhaustive("prefix_decoder", "sotu_deshuffling", TEXT("deshuffling") + INPUTS),
        exhaustive("rotary_decoder", "sotu_drop_tokens", TEXT("drop_tokens") + INPUTS),
        exhaustive("encoder_decoder", "sotu_ul2", TEXT("ul2") + INPUTS),
        exhaustive("encoder", "sotu_masked_lm", TEXT("masked_lm") + INPUTS),
        exhaustive("gpt1", "sotu_full_lm", TEXT("full_lm") + FULL_LM[1:]),
        exhaustive("lstm", "sotu_prefix_lm", [*TEXT("prefix_lm"), '--gin.TASK_FEATURE_LENGTHS={"targets": 63}', *LSTM]),
    ],
)  # fmt: skip
def test_every_architecture_learns_from_real_text(architecture, task, data):
    done = commands.run(*flags(architecture, data, "run", 40, "--gin.EVAL_PERIOD=40"))
    assert done.returncode == 0, done.stderr
    train, held_out = losses("run"), losses("run", f"eval/{task}")
    first, last = train[1][0], np.mean([train[step][0] for step in range(31, 41)])
    assert len(train) == 40 and first > 5.5 and last < first - 1.2, (first, last)  # ln 384 = 5.95
    assert set(held_out) == {40} and held_out[40][0] < first - 1.2
    for name in ("config.gin", "model-info.txt", "plots/loss.png", "plots/learning_rate.png", "plots/tokens_per_second.png"):
        assert os.path.getsize(f"run/{name}") > 0
    assert os.listdir("run/checkpoints") == ["40"]
    assert [name for name in os.listdir("run") if name.startswith("events.out")]
    line = read_metrics("run")[-2]
    assert {
        "step", "split", "loss", "accuracy", "learning_rate", "grad_norm", "seconds_per_step", "tokens_per_second", "mfu",
        "data_wait_fraction",
    } <= line.keys()  # fmt: skip
    assert 0 < line["tokens_with_loss"] <= line["tokens_processed"] and 0 < line["raw_tokens"] <= line["tokens_processed"]


def test_a_budget_of_tokens_ends_training_at_the_first_step_that_spends_it():
    argv = [flag for flag in flags("causal_decoder", FULL_LM, "run", 0) if "TRAIN_STEPS" not in flag]
    assert main([*argv, "--gin.TRAIN_TOKENS=5000", "--gin.CHECKPOINT_PERIOD=6"]) == 0
    tokens = [line["tokens_processed"] for line in read_metrics("run") if line["split"] == "train"]
    assert tokens[-1] >= 5000 > tokens[-2] and tokens[0] == 8 * 64
    assert str(len(tokens)) in os.listdir("run/checkpoints")
    assert main([*argv, "--gin.TRAIN_TOKENS=7000"]) == 0  # goes on, counting from the beginning
    tokens = [line["tokens_processed"] for line in read_metrics("run") if line["split"] == "train"]
    assert tokens[-1] >= 7000 > tokens[-2] and tokens == sorted(tokens)


@pytest.mark.exhaustive
def test_the_tutorial_works_as_it_is_written():
    """docs/custom_data.md: its module and gin file, in an empty directory with a text; trained, resumed, counted."""
    pathlib.Path("my_tasks.py").write_text(documented("custom_data.md", "seqio.TaskRegistry.add"))
    pathlib.Path("my_run.gin").write_text(documented("custom_data.md", "import my_tasks"))
    pathlib.Path("my_text.txt").write_text(
        "\n".join(f"It is line {n} of a text that somebody wrote, and it goes on." for n in range(900))
    )
    short = ["--gin.CHECKPOINT_PERIOD=20", "--gin.DATA_SHARDS=1", "--gin.DataConfig.shuffle_buffer_size=100"]
    argv = ["train", "--gin_file=my_run.gin", *short, "--gin.DataConfig.eval_steps=2"]
    for tokens in (20_000, 25_000):  # the second time it is continued
        done = commands.run(*argv, f"--gin.TRAIN_TOKENS={tokens}")
        assert done.returncode == 0, done.stderr
        train = [line for line in read_metrics("runs/mine") if line["split"] == "train"]
        assert train[-1]["tokens_processed"] >= tokens > train[-2]["tokens_processed"]
    assert "Continuing after step" in done.stderr
    assert train[-1]["loss"] < train[0]["loss"] - 1
    changed = commands.run(*argv, "--gin.shifted_tokens.rate=0.1")
    assert changed.returncode == 2 and "was trained with OBJECTIVE" in changed.stderr, changed.stderr


@pytest.mark.exhaustive
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
        done = commands.run(*flags("encoder_decoder", data, "run", steps, "--gin.CHECKPOINT_PERIOD=3", "--gin.EVAL_PERIOD=2"))
        assert done.returncode == 0, done.stderr
    of_tasks = {"tokens_processed/sotu_span_corruption", "tokens_processed/sotu_deshuffling"}
    for line in [line for line in read_metrics("run") if line["split"] == "train"]:
        assert of_tasks & set(line) == (of_tasks if line["step"] in (2, 3, 4, 5) else set())  # evaluations, and last steps
        if line["step"] != 1:
            assert sum(line[name] for name in of_tasks) == line["tokens_processed"] and all(line[name] for name in of_tasks)
    assert {"eval/sotu_span_corruption", "eval/sotu_deshuffling"} <= {line["split"] for line in read_metrics("run")}


def test_an_encoder_alone_predicts_in_place_and_does_not_generate():
    data = ["--gin.MIXTURE_OR_TASK_NAME=sotu_masked_lm", '--gin.TASK_FEATURE_LENGTHS={"inputs": 32}']
    assert main(flags("encoder", data, "run", 3)) == 0
    run = t5x_lab.load("run")
    assert run.logits(encoder_input_tokens=np.array([[5, 6, 358]])).shape == (1, 3, 384)
    for refused in (lambda: run.generate(["x"]), lambda: run.score(["x"], ["y"])):
        with pytest.raises(UserError, match="An encoder-only model predicts masked tokens in place"):
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


@pytest.mark.exhaustive
def test_a_users_own_task_and_mixture_with_rates(tmp_path):
    (tmp_path / "my_tasks.py").write_text(MY_TASKS)
    (tmp_path / "words.txt").write_text("".join(f"word {n}\tnumber {n}\n" for n in range(50)))
    mixture = ["--gin_bindings=import my_tasks", "--gin.MIXTURE_OR_TASK_NAME=my_mixture", SPANS[1]]
    done = commands.run(*flags("encoder_decoder", mixture, "run", 4))
    assert done.returncode == 0, done.stderr
    assert set(losses("run", "eval/my_words")) == {4} and set(losses("run", "eval/sotu_span_corruption")) == {4}
