"""Real text, from the command line: the six pairs learn; runs are killed, stopped, resumed, handed on; a trained run is asked."""

import json
import os
import pathlib
import random
import resource
import signal
import threading
import time

import commands
import jax
import numpy as np
import pytest
from commands import Command
from conftest import ROOT

import t5x_lab
from t5x_lab.checkpoints.layout import find_checkpoint, finished_steps, read_info
from t5x_lab.cli.main import main
from t5x_lab.config.errors import UserError
from t5x_lab.evaluation.examples import read_examples, shard
from t5x_lab.evaluation.infer import infer
from t5x_lab.observe.metrics import read_metrics

pytestmark = pytest.mark.slow

TINY = [
    "--gin.VOCABULARY=@ByteVocabulary()", "--gin.TransformerConfig.vocab_size=384", "--gin.TransformerConfig.emb_dim=32",
    "--gin.TransformerConfig.mlp_dim=64", "--gin.TransformerConfig.head_dim=8", '--gin.TransformerConfig.dtype="float32"',
    "--gin.BATCH_SIZE=8", "--gin.DataConfig.shuffle_buffer_size=20", "--gin.DataConfig.eval_steps=2",
    "--gin.LearningRate.warmup_steps=1000", "--gin.DATA_SHARDS=1",
]  # fmt: skip
SPANS = ["--gin.MIXTURE_OR_TASK_NAME=sotu_span_corruption", '--gin.TASK_FEATURE_LENGTHS={"inputs": 64, "targets": 24}']
FULL_LM = ["--gin.MIXTURE_OR_TASK_NAME=sotu_full_lm", '--gin.TASK_FEATURE_LENGTHS={"targets": 64}']
PREFIX_LM = [
    "--gin.MIXTURE_OR_TASK_NAME=sotu_prefix_lm_objective_decoder_architecture",
    '--gin.TASK_FEATURE_LENGTHS={"targets": 64}',
]
PREFIX_LM_ED = [
    "--gin.MIXTURE_OR_TASK_NAME=sotu_prefix_lm_objective_encoder_decoder_architecture", '--gin.TASK_FEATURE_LENGTHS={"inputs": 64, "targets": 64}',
]  # fmt: skip
MODELS = {
    "causal_decoder": ["--gin_file=models/decoder/tiny.gin"],
    "prefix_decoder": ["--gin_file=models/decoder/tiny.gin", "--gin.TransformerConfig.architecture=prefix_decoder"],
    "encoder_decoder": ["--gin_file=models/t5_1_1/tiny.gin"],
    "encoder": ["--gin_file=models/encoder/tiny.gin"],
    "gpt1": ["--gin_file=models/gpt1/tiny.gin"],
    "lstm": ["--gin_file=models/lstm/tiny.gin"],
    "rotary_decoder": ["--gin_file=models/rotary_decoder/tiny.gin"],
    "shared_stacks": ["--gin_file=models/shared_stacks/tiny.gin"],
}
PAIRS = [
    ("causal_decoder", FULL_LM), ("causal_decoder", SPANS), ("prefix_decoder", PREFIX_LM), ("prefix_decoder", SPANS),
    ("encoder_decoder", PREFIX_LM_ED), ("encoder_decoder", SPANS),
]  # fmt: skip


def flags(architecture, objective, model_dir, steps, *more):
    return [
        "train",
        *MODELS[architecture],
        *objective,
        *TINY,
        f"--gin.MODEL_DIR={model_dir}",
        f"--gin.TRAIN_STEPS={steps}",
        *more,
    ]


def losses(model_dir, split="train"):
    return {
        line["step"]: (line["loss"], line.get("grad_norm"), line["raw_tokens"])
        for line in read_metrics(model_dir)
        if line["split"] == split
    }


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


def test_a_run_killed_at_random_moments_has_the_losses_of_one_that_never_was():
    more = ["--gin.CHECKPOINT_PERIOD=7", "--gin.EVAL_PERIOD=1000", "--gin.DROPOUT_RATE=0.1"]
    argv = lambda name: flags("causal_decoder", FULL_LM, name, 40, *more)
    assert Command(*argv("whole")).wait() == 0
    rng = random.Random(0)
    for _ in range(2):
        begun = max(losses("killed"), default=0)
        process = Command(*argv("killed"))
        process.wait_until(lambda begun=begun: max(losses("killed"), default=0) > begun + 8)
        time.sleep(rng.random() * 0.5)
        process.kill()
        process.wait()
    assert Command(*argv("killed")).wait() == 0
    assert losses("killed") == losses("whole") and len(losses("whole")) == 40
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


def test_the_saved_configuration_alone_repeats_the_run():
    assert main(flags("causal_decoder", FULL_LM, "one", 6)) == 0
    assert main(["train", "--gin_file=one/config.gin", "--gin.MODEL_DIR=two"]) == 0
    assert losses("one") == losses("two")


def test_parameters_go_from_a_causal_to_a_prefix_decoder_and_back(capfd):
    assert main(flags("causal_decoder", FULL_LM, "causal", 6)) == 0
    assert main(flags("prefix_decoder", PREFIX_LM, "prefix", 1, "--gin.INITIAL_CHECKPOINT_PATH=causal")) == 0
    assert "Starting at step 0 with the parameters of" in capfd.readouterr().err
    fresh = flags("prefix_decoder", PREFIX_LM, "fresh", 1)
    assert main(fresh) == 0
    assert losses("prefix")[1][0] < losses("fresh")[1][0] - 0.05
    assert main([*fresh, "--gin.RESUME=False"]) == 2
    assert "Nothing is ever deleted" in capfd.readouterr().err
    before = pathlib.Path("fresh/config.gin").read_text()
    for change, says in (
        ("--gin.TransformerConfig.mlp_dim=96", "has shape (2, 32, 64) there and has shape (2, 32, 96)"),
        ("--gin.OPTIMIZER=@AdamW()", "was trained with OPTIMIZER = @Adafactor(), and this configuration has @AdamW()"),
        ("--gin.DATA_SHARDS=4", "was trained with DATA_SHARDS = 1"),
        ("--gin.MIXTURE_OR_TASK_NAME=sotu_full_lm", "was trained with MIXTURE_OR_TASK_NAME = sotu_prefix_lm"),
        ('--gin.TASK_FEATURE_LENGTHS={"targets": 32}', "was trained with TASK_FEATURE_LENGTHS"),
    ):
        assert main([*flags("prefix_decoder", PREFIX_LM, "fresh", 9), change]) == 2
        assert says in capfd.readouterr().err
        assert pathlib.Path("fresh/config.gin").read_text() == before, "a refused run must not change the directory"


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


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A prefix decoder that was trained until it knows a few lines by heart."""
    folder = tmp_path_factory.mktemp("trained")
    lines = ["red is a color", "two is a number", "cat is an animal", "oak is a tree"]
    for name in ("one", "two", "three", "four"):
        (folder / f"{name}.txt").write_text("\n".join(lines * 50))
    objective = [
        "--gin.MIXTURE_OR_TASK_NAME=files_full_lm", '--gin.TASK_FEATURE_LENGTHS={"targets": 20}', f"--gin.TextFiles.train={folder}/*.txt",
        f"--gin.TextFiles.validation={folder}/one.txt", "--gin.TextFiles.lines_per_document=1",
    ]  # fmt: skip
    run = str(folder / "run")
    more = ["--gin.LearningRate.base_learning_rate=0.5", "--gin.EVAL_PERIOD=400", "--gin.CHECKPOINT_PERIOD=200"]
    os.chdir(folder)
    done = commands.run(*flags("causal_decoder", objective, run, 400, *more))
    assert done.returncode == 0, done.stderr
    return run


def test_a_trained_run_answers_in_python(trained):
    run = t5x_lab.load(trained)
    assert run.step == 400 and run.num_parameters == sum(np.size(x) for x in _leaves(run.params))
    # The stream is cut anywhere, so the model sees lines after an end token too.
    prompts = ["red is a", "cat is an", "oak is"]
    assert [texts[0] for texts in run.generate(prompts, max_tokens=12)] == [" color", " animal", " a tree"]
    samples = run.generate(["oak is"], max_tokens=12, temperature=1.0, top_k=3, num_samples=4, seed=1)
    assert len(samples) == 1 and len(samples[0]) == 4

    right, wrong = run.score(["cat is an", "cat is an"], [" animal", " color"])
    assert right > -1 and wrong < right - 3
    with_end = run.score(["cat is an"], [" animal"], eos=True)[0]
    encode = run.vocabulary.encode
    prompt, target = encode("cat is an"), encode(" animal")
    np.testing.assert_allclose(run.score([prompt], [target]), [right], atol=1e-5)
    logits = run.logits(decoder_input_tokens=np.array([[0, *prompt, *target]]))
    assert logits.dtype == np.float32 and logits.shape == (1, 1 + len(prompt) + len(target), 384)
    log_probs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    by_hand = [log_probs[0, len(prompt) + i, token] for i, token in enumerate([*target, 1])]
    np.testing.assert_allclose([sum(by_hand[:-1]), sum(by_hand)], [right, with_end], atol=1e-3)

    tokens = np.array([[0, *prompt, *target]])
    loss = run.loss({"decoder_input_tokens": tokens[:, :-1], "decoder_target_tokens": tokens[:, 1:]})
    assert loss["weight_sum"] == tokens.shape[1] - 1
    own = [-log_probs[0, i, token] for i, token in enumerate(tokens[0, 1:])]
    np.testing.assert_allclose(loss["loss"], np.mean(own), rtol=1e-3)
    assert t5x_lab.load(trained, step=200).step == 200
    with pytest.raises(UserError, match="give one target for each input"):
        run.score(["a"], [])

    run.save("copy")
    again = t5x_lab.load("copy")
    np.testing.assert_array_equal(again.score(["cat is an"], [" animal"]), [right])


def _leaves(tree):
    return [leaf for value in tree.values() for leaf in (_leaves(value) if isinstance(value, dict) else [value])]


def test_a_trained_run_answers_on_the_command_line(trained, capsys):
    assert main(["generate", f"--model_dir={trained}", "--prompt=red is a", "--max_tokens=12"]) == 0
    assert capsys.readouterr().out == "red is a\t color\n"
    assert main(["eval", f"--model_dir={trained}", "--step=all", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert list(result) == ["200", "400"]
    logged = losses(trained, "eval/files_full_lm")[400][0]
    assert result["400"]["eval/files_full_lm"]["loss"] == pytest.approx(logged, rel=1e-6)
    assert main(["inspect", f"--model_dir={trained}", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    run = t5x_lab.load(trained)
    assert result["num_parameters"] == run.num_parameters == sum(int(np.prod(p["shape"])) for p in result["parameters"])
    assert {"name", "shape", "dtype", "axes", "bytes"} <= result["parameters"][0].keys() and result[
        "flops_per_token"
    ] > 6 * 10_000


def test_infer_writes_every_example_once_and_continues(trained, capsys):
    lines = ["red is a", "two is a", "cat is an", "oak is a"] * 3
    with open("in.txt", "w") as file:
        file.write("\n".join(lines) + "\n")
    command = ["infer", f"--model_dir={trained}", "--input=in.txt", "--max_tokens=12", "--batch_size=4"]
    assert main([*command, "--output=whole.jsonl"]) == 0
    whole = pathlib.Path("whole.jsonl").read_text()
    answers = [json.loads(line) for line in whole.splitlines()]
    assert [a["inputs"] for a in answers] == lines and answers[2]["prediction"] == " animal"
    with open("cut.jsonl", "w") as file:
        file.write(whole[: len(whole) // 2])  # as a kill in the middle of a line leaves it
    assert main([*command, "--output=cut.jsonl"]) == 0
    assert pathlib.Path("cut.jsonl").read_text() == whole
    assert main([*command, "--output=whole.jsonl", "--mode=predict"]) == 0 and pathlib.Path("whole.jsonl").read_text() == whole
    assert main([*command, "--output=whole.jsonl", "--step=200"]) == 2
    assert (
        "whole.jsonl was begun with step = 400, not 200" in capsys.readouterr().err
        and pathlib.Path("whole.jsonl").read_text() == whole
    )
    with open("scored.jsonl", "w") as file:
        file.write('{"inputs": "red is a", "score": -1.0}\n')
    for output, says in (("in.txt", "the same file"), ("scored.jsonl", 'not the "prediction" of example 1')):
        before = pathlib.Path(output).read_text()
        assert main([*command, f"--output={output}"]) == 2
        assert says in capsys.readouterr().err and pathlib.Path(output).read_text() == before
    run = t5x_lab.load(trained)
    with open("in.jsonl", "w") as file:
        file.write("".join(json.dumps({"inputs": "cat is an", "targets": t}) + "\n" for t in (" animal", " tree")))
    infer(run, read_examples("in.jsonl", "score"), "scores.jsonl", mode="score", batch_size=8, sampling={})
    scores = [json.loads(line)["score"] for line in pathlib.Path("scores.jsonl").read_text().splitlines()]
    np.testing.assert_allclose(scores, run.score(["cat is an"] * 2, [" animal", " tree"]), rtol=1e-5)
    assert sorted(sum((shard(list(range(10)), i, 3) for i in range(3)), [])) == list(range(10))


@pytest.mark.parametrize(
    "name, content, says",
    [
        ("bad.txt", b"fine\n\xff\xfe\n", "bad.txt, line 2 is not valid UTF-8"),
        ("bad.jsonl", b'{"inputs": "x"}\n[1]\n', "bad.jsonl, line 2 is not an object"),
        ("bad.jsonl", b'{"inputs": "x"\n', "bad.jsonl, line 1 is not JSON"),
        ("empty.txt", b"", "empty.txt is empty"),
    ],
)
def test_inference_input_that_cannot_be_read_names_file_and_line(name, content, says):
    with open(name, "wb") as file:
        file.write(content)
    with pytest.raises(UserError, match=says):
        read_examples(name, "predict")
    with pytest.raises(UserError, match='has no text under "targets"'):
        with open("x.jsonl", "w") as file:
            file.write('{"inputs": "x"}\n')
        read_examples("x.jsonl", "score")


def start_two_processes(model_dir, steps, *more):
    return commands.start_two(*flags("causal_decoder", FULL_LM, model_dir, steps, *more), log=model_dir)


def test_two_processes_work_like_one(capsys):
    """Training, evaluation, checkpoints from one process of eight devices to two of one and back, and generation."""
    more = ["--gin.CHECKPOINT_PERIOD=3", "--gin.EVAL_PERIOD=3"]

    def train(model_dir, steps, mesh):
        return flags("causal_decoder", FULL_LM, model_dir, steps, f"--gin.MESH={mesh}", *more)

    def two(*argv):
        processes = commands.start_two(*argv)
        assert [process.wait() for process in processes] == [0, 0], "".join(process.output() for process in processes)
        return [process.output() for process in processes]

    assert main(train("alone", 9, "fsdp=8")) == 0
    two(*train("mixed", 3, "fsdp=2"))
    assert main(train("mixed", 6, "fsdp=8")) == 0
    two(*train("mixed", 9, "tensor=2"))  # now both processes hold every row
    assert sorted(os.listdir("mixed/checkpoints")) == ["3", "6", "9"]
    for split in ("train", "eval/sotu_full_lm"):
        alone, mixed = losses("alone", split), losses("mixed", split)
        assert alone.keys() == mixed.keys() and alone
        np.testing.assert_allclose([v[0] for v in alone.values()], [v[0] for v in mixed.values()], rtol=1e-5)

    prompts = ["--prompt=The Congress of", "--prompt=We", "--max_tokens=12"]
    capsys.readouterr()
    assert main(["generate", "--model_dir=alone", *prompts]) == 0
    alone = capsys.readouterr().out
    first, second = two("generate", "--model_dir=mixed", *prompts)
    assert alone.splitlines() == [line for line in first.splitlines() if "\t" in line] and alone.count("\n") == 2
    assert "\t" not in second


def test_a_full_disk_stops_nothing_until_the_end_and_loses_nothing():
    """Files that may not grow beyond 4,000 bytes stand in for the disk; they may again once the run is asked to stop."""
    os.mkfifo("pipe")  # has no size, so that the log is whole
    log: list[str] = []
    reader = threading.Thread(target=lambda: log.append(pathlib.Path("pipe").read_text()))
    reader.start()
    process = Command(*flags("causal_decoder", FULL_LM, "run", 100_000, "--gin.CHECKPOINT_PERIOD=20"), log="pipe")
    limit = lambda size: resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
    process.wait_until(lambda: len(losses("run")) >= 45)
    limit(4000)
    before = len(losses("run"))
    time.sleep(3)
    process.terminate()
    time.sleep(1)
    assert process.is_running() and {"20", "40"} <= set(os.listdir("run/checkpoints"))
    limit(resource.RLIM_INFINITY)
    status = process.wait()
    reader.join()
    assert status == 3, log[0]
    last = finished_steps("run")[-1]
    assert "could not be saved" in log[0] and f"Saving works again: step {last} is saved" in log[0], log[0]
    assert "Traceback" not in log[0], log[0]
    assert list(losses("run")) == list(range(1, last + 1)) and last > before


def test_ctrl_c_in_one_of_two_processes_saves_and_stops_both():
    """It becomes a SIGTERM, which JAX tells the other process."""
    processes = start_two_processes("two", 100_000, "--gin.CHECKPOINT_PERIOD=100000")
    processes[0].wait_until(lambda: len(losses("two")) >= 5)
    processes[1].send_signal(signal.SIGINT)
    assert [process.wait() for process in processes] == [3, 3], "".join(process.output() for process in processes)
    (saved,) = os.listdir("two/checkpoints")
    assert int(saved) == max(losses("two"))


@pytest.mark.parametrize("killed", [0, 1])
def test_a_process_that_dies_ends_the_other_with_a_message(killed):
    """Process 0 leads, process 1 follows; neither waits for the other's ghost."""
    processes = start_two_processes("two", 100_000, "--gin.CHECKPOINT_PERIOD=5")
    processes[0].wait_until(lambda: len(losses("two")) >= 8)
    processes[killed].kill()
    assert processes[1 - killed].wait(timeout=60) not in (0, 2, 3)
    log = pathlib.Path(f"two{1 - killed}.log").read_text()
    assert "lost another process of this run" in log or "coordination service" in log.lower(), log


def test_a_profile_is_written_and_goodput_survives_a_restart():
    """Goodput against its definition: productive seconds over all since the first start, the pause between two included."""
    for steps in (8, 12):
        argv = flags("causal_decoder", FULL_LM, "run", steps, "--gin.PROFILE_STEPS=2", "--gin.CHECKPOINT_PERIOD=4")
        assert Command(*argv).wait() == 0
        time.sleep(3)
    trace = next(pathlib.Path("run/profile").rglob("*.xplane.pb"))
    planes = jax.profiler.ProfileData.from_file(str(trace)).planes
    assert "train" in {event.name for plane in planes for line in plane.lines for event in line.events}

    lines = [line for line in read_metrics("run") if line["split"] == "train"]
    counted = [line for line in lines if line["step"] not in (1, 9)]  # the first of each process compiles
    productive = sum(line["seconds_per_step"] for line in counted)
    clock = read_info(find_checkpoint("run"))["clock"]
    assert clock["productive"] == pytest.approx(productive, rel=1e-6)
    elapsed = sum(line["seconds_per_step"] for line in lines) + 3
    assert 0 < lines[-1]["goodput"] < productive / elapsed
    assert time.time() - clock["began"] > elapsed
