"""A run that was trained until it knows a few lines is asked, in Python and on the command line."""

import json
import os
import pathlib
import shutil

import commands
import jax
import numpy as np
import pytest
from runs_of_text import flags, losses

import t5x_lab
from t5x_lab.cli.main import main
from t5x_lab.config.errors import UserError
from t5x_lab.evaluation.inference.files import read_examples
from t5x_lab.evaluation.inference.infer import infer

pytestmark = pytest.mark.slow


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


def test_parameters_in_half_the_memory(trained, capsys):
    """They compute what rounded parameters in float32 compute, and are saved in float32."""
    run, wide = t5x_lab.load(trained, parameter_dtype="bfloat16"), t5x_lab.load(trained)
    assert {x.dtype.name for x in _leaves(run.params)} == {"bfloat16"}
    rounded = jax.tree.map(lambda x: x.astype("bfloat16").astype("float32"), wide.params)
    tokens = dict(decoder_input_tokens=np.array([[0, *run.vocabulary.encode("oak is a tree")]]))
    np.testing.assert_array_equal(run.logits(**tokens), wide.with_params(rounded, 400).logits(**tokens))
    run.save("copy")
    jax.tree.map(np.testing.assert_array_equal, t5x_lab.load("copy").params, rounded)

    assert main(["generate", f"--model_dir={trained}", "--prompt=oak is", "--parameter_dtype=bfloat16"]) == 0
    assert "a tree" in capsys.readouterr().out
    results = []
    for dtype in ("float32", "bfloat16"):
        assert main(["eval", f"--model_dir={trained}", f"--parameter_dtype={dtype}", "--json"]) == 0
        results.append(json.loads(capsys.readouterr().out)["400"]["eval/files_full_lm"]["loss"])
    assert results[0] != results[1] and results[1] == pytest.approx(results[0], abs=0.02)


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
    with pytest.raises(UserError, match="Pass one target per input"):
        run.score(["a"], [])

    run.save("copy")
    again = t5x_lab.load("copy")
    questions = ["cat is an", "cat is an"], [" animal", " color"]  # the same rows: one row alone is summed in another order
    np.testing.assert_array_equal(again.score(*questions), [right, wrong])


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
    shutil.copy("whole.jsonl.settings.json", "cut.jsonl.settings.json")
    assert main([*command, "--output=cut.jsonl"]) == 0
    assert pathlib.Path("cut.jsonl").read_text() == whole
    assert main([*command, "--output=whole.jsonl", "--mode=predict"]) == 0 and pathlib.Path("whole.jsonl").read_text() == whole
    assert main([*command, "--output=whole.jsonl", "--step=200"]) == 2
    assert (
        "whole.jsonl was written with step = 400, not 200" in capsys.readouterr().err
        and pathlib.Path("whole.jsonl").read_text() == whole
    )
    for name in ("scored", "other"):
        pathlib.Path(f"{name}.jsonl").write_text('{"inputs": "red is a", "score": -1.0}\n')
    shutil.copy("whole.jsonl.settings.json", "other.jsonl.settings.json")
    for output, says in (
        ("in.txt", "the same file"),
        ("scored.jsonl", "without scored.jsonl.settings.json"),
        ("other.jsonl", 'not the "prediction" of example 1'),
    ):
        before = pathlib.Path(output).read_text()
        assert main([*command, f"--output={output}"]) == 2
        assert says in capsys.readouterr().err and pathlib.Path(output).read_text() == before
    run = t5x_lab.load(trained)
    with open("in.jsonl", "w") as file:
        file.write("".join(json.dumps({"inputs": "cat is an", "targets": t}) + "\n" for t in (" animal", " tree")))
    infer(run, read_examples("in.jsonl", "score"), "scores.jsonl", mode="score", batch_size=8, sampling={})
    scores = [json.loads(line)["score"] for line in pathlib.Path("scores.jsonl").read_text().splitlines()]
    np.testing.assert_allclose(scores, run.score(["cat is an"] * 2, [" animal", " tree"]), rtol=1e-5)
    pathlib.Path("ten.txt").write_text("".join(f"{n}\n" for n in range(10)))
    shares = [list(read_examples("ten.txt", "predict", shard_id=i, num_shards=3)) for i in range(3)]
    assert sorted(e.number for share in shares for e in share) == list(range(10)) and all(
        e.inputs == str(e.number) for e in shares[1]
    )


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
        list(read_examples(name, "predict"))
    with pytest.raises(UserError, match='has no text under "targets"'):
        with open("x.jsonl", "w") as file:
            file.write('{"inputs": "x"}\n')
        list(read_examples("x.jsonl", "score"))
