"""docs/moving.md as it is written: a project of T5X's, with T5X's own checkpoint, is trained, evaluated, decoded and translated."""

import importlib
import json
import pathlib
import shutil
import sys

import commands
import numpy as np
import pytest
from conftest import shared_data
from helpers import documented

from t5x_lab.observe.metrics import read_metrics
from t5x_lab.runs.config.gin_config import GinConfig
from t5x_lab.runs.train.batch import resolve_batch

pytestmark = pytest.mark.exhaustive


@pytest.fixture
def project():
    """The folder of docs/moving.md, which is the working directory."""
    checkpoint = shared_data("t5x_checkpoints", "from_t5x_repository") / "test_t5_tiny.checkpoint_0"
    shutil.copy(checkpoint, "checkpoint_0")
    shutil.copy(shared_data("t5_vocabulary") / "sentencepiece.model", "sentencepiece.model")
    pathlib.Path("my_reviews.py").write_text(documented("moving.md", "def read_line"))
    pathlib.Path("finetune.gin").write_text(documented("moving.md", "include "))
    for name, number in (("train", 400), ("validation", 40)):
        lines = (f"a {('bad', 'good')[i % 2]} film number {i}\t{('bad', 'good')[i % 2]}\n" for i in range(number))
        pathlib.Path(f"{name}.tsv").write_text("".join(lines))


def test_a_project_of_t5x_is_moved_without_changing_a_line(project):
    train = ["train", "--gin_file=finetune.gin", "--gin.MODEL_DIR=runs/reviews"]

    shown = commands.run(*train, "--dry_run")
    assert shown.returncode == 0, shown.stderr
    for line in documented("moving.md", "The gin files are T5X's").splitlines():
        assert line.rstrip("…") in shown.stdout + shown.stderr or line.startswith("Starting"), line
    assert "with the parameters and the optimizer of" in shown.stdout and "checkpoint_0 (T5X)" in shown.stdout

    trained = commands.run(*train)
    assert trained.returncode == 0, trained.stderr
    metrics = {(line["split"], line["step"]): line for line in read_metrics("runs/reviews")}
    losses = [metrics["eval/reviews", step]["loss"] for step in (20, 40)]
    assert losses[1] < losses[0] and 0 <= metrics["infer/reviews", 40]["accuracy"] <= 100
    rates = [metrics["train", step]["learning_rate"] for step in (2, 11, 40)]
    assert rates == pytest.approx([0.001, 0.01, 0.01], rel=1e-5)  # warm-up over ten steps
    evaluated = commands.run("eval", "--model_dir=runs/reviews")
    assert evaluated.returncode == 0 and f"loss {losses[1]:.4f}" in evaluated.stdout, evaluated.stdout

    pathlib.Path("eval.gin").write_text(documented("moving.md", "eval_script"))
    evaluate = ["eval", "--gin_file=eval.gin"]
    results = documented("moving.md", "step 0  eval/reviews").splitlines()
    before = commands.run(*evaluate, "--gin.CHECKPOINT_PATH='checkpoint_0'", "--gin.EVAL_OUTPUT_DIR='before'")
    assert before.stdout.splitlines()[-2:] == results[:2], before.stderr
    after = commands.run(*evaluate, "--gin.CHECKPOINT_PATH='runs/reviews/checkpoint_40'", "--gin.EVAL_OUTPUT_DIR='after'")
    assert f"loss {losses[1]:.4f}" in after.stdout.splitlines()[-2], after.stderr
    assert pathlib.Path("before/evals/eval/0.json").exists() and pathlib.Path("after/evals/eval/40.json").exists()
    to_infer = pathlib.Path("eval.gin").read_text().replace("eval.gin", "infer.gin").replace("EVAL_", "INFER_")
    pathlib.Path("infer.gin").write_text(to_infer)
    of_t5x = ("--gin.CHECKPOINT_PATH='checkpoint_0'", "--gin.INFER_OUTPUT_DIR='inferred'")
    assert commands.run("infer", "--gin_file=infer.gin", *of_t5x).returncode == 0
    assert len(pathlib.Path("inferred/reviews-predict.jsonl").read_text().splitlines()) == 40
    shard = ("--gin.infer.mode='score'", "--gin.infer.shard_id=1", "--gin.infer.num_shards=2")
    assert commands.run("infer", "--gin_file=infer.gin", *of_t5x, *shard).returncode == 0
    scored = pathlib.Path("inferred/reviews-score-00001-of-00002.jsonl").read_text().splitlines()
    assert len(scored) == 20 and "score" in scored[0]
    wrong = commands.run("infer", "--gin_file=infer.gin", *of_t5x, "--gin.infer.mode='predict_with_aux'")
    assert wrong.returncode == 2 and 'infer.mode is "predict_with_aux"' in wrong.stderr, wrong.stderr

    inferred = commands.run("infer", "--model_dir=runs/reviews", "--task=reviews", "--output=answers.jsonl")
    assert inferred.returncode == 0, inferred.stderr
    assert len([json.loads(line) for line in pathlib.Path("answers.jsonl").read_text().splitlines()]) == 40

    migrated = commands.run("migrate", "finetune.gin", "--output=ours")
    assert migrated.stdout == documented("moving.md", "finetune.gin -> ours/finetune.gin"), migrated.stderr
    run = GinConfig(["ours/finetune.gin"], ['MODEL_DIR = "x"']).run()
    assert (run.train_steps, run.saving.period, run.restore.carry) == (40, 20, ("optimizer", "step"))


def test_rates_batches_decoded_texts_and_metrics_are_those_of_t5x(project, monkeypatch):
    """T5X's schedule by its formula, its batches by SeqIO's converter, its evaluation by SeqIO's evaluator with transformers' model."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    import seqio

    gin = "--gin_file=finetune.gin"
    in_float32 = "--gin.TransformerConfig.dtype=float32"  # so that both choose the same of two tokens that are nearly as likely
    assert commands.run("train", gin, "--gin.MODEL_DIR=run", in_float32).returncode == 0
    infer = ("infer", "--model_dir=run", "--task=reviews", "--output=answers.jsonl")
    assert commands.run(*infer).returncode == 0
    assert commands.run("convert", "--source=run", "--to=hf", "--target=hf").returncode == 0
    metrics = {(line["split"], line["step"]): line for line in read_metrics("run")}

    rates = [max(1e-8, 0.01 * min(1.0, step / 10)) for step in range(40)]  # 1e-8 is the smallest rate of T5X
    assert [metrics["train", step + 1]["learning_rate"] for step in range(40)] == pytest.approx(rates, rel=1e-6)

    monkeypatch.syspath_prepend(str(pathlib.Path.cwd()))
    lengths = {"inputs": 32, "targets": 4}
    importlib.import_module("my_reviews")
    try:
        packed = seqio.get_dataset("reviews", lengths, seqio.EncDecFeatureConverter(pack=True), "train")
        shapes = {name: x.shape for name, x in next(packed.batch(16).as_numpy_iterator()).items()}
        data = GinConfig([], [pathlib.Path("run/config.gin").read_text()]).run().data
        batch = resolve_batch(data, "encoder_decoder").features
        assert shapes == {name: batch[name].shape for name in shapes}
        model = transformers.AutoModelForSeq2SeqLM.from_pretrained("hf").eval()

        def predict(dataset):
            rows = list(dataset.as_numpy_iterator())
            ids = torch.tensor(np.stack([row["encoder_input_tokens"] for _, row in rows])).long()
            out = model.generate(ids, attention_mask=(ids > 0).long(), max_new_tokens=4, do_sample=False, num_beams=1)
            return [(int(i), tokens) for (i, _), tokens in zip(rows, out[:, 1:].tolist(), strict=True)]

        evaluator = seqio.Evaluator(
            "reviews", seqio.EncDecFeatureConverter(pack=False), sequence_length=lengths, async_compute_metrics=False
        )
        results, predictions = evaluator.evaluate(compute_metrics=True, step=40, predict_fn=predict)
    finally:
        seqio.TaskRegistry.remove("reviews")
        sys.modules.pop("my_reviews")
    (tokens,) = predictions["reviews"].values()
    decode = evaluator.eval_tasks[0].output_features["targets"].vocabulary.decode
    answers = [json.loads(line)["prediction"] for line in pathlib.Path("answers.jsonl").read_text().splitlines()]
    assert answers == [decode(list(map(int, each))) for each in tokens]
    assert metrics["infer/reviews", 40]["accuracy"] == results.result()["reviews"]["accuracy"]
