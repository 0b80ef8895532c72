"""docs/prompts.md's tutorial as it is written, on synthetic records of T0's 38 data sets: trained and evaluated."""

import json
import pathlib

import commands
import pytest
import synthetic_records
from conftest import shared_data
from helpers import documented

from t5x_lab.observe.metrics import read_metrics
from t5x_lab.papers.data_sets import T0_TRAIN

pytestmark = pytest.mark.exhaustive
SMALL = [
    "--gin.VOCABULARY=@ByteVocabulary()", "--gin.TransformerConfig.vocab_size=384", "--gin.TransformerConfig.emb_dim=16",
    "--gin.TransformerConfig.num_heads=2", "--gin.TransformerConfig.head_dim=8", "--gin.TransformerConfig.mlp_dim=32",
    "--gin.TransformerConfig.num_encoder_layers=1", "--gin.TransformerConfig.num_decoder_layers=1",
    '--gin.TransformerConfig.dtype="float32"', '--gin.TASK_FEATURE_LENGTHS={"inputs": 128, "targets": 32}', "--gin.BATCH_SIZE=8",
    '--gin.tickets/RankingEvaluation.lengths={"inputs": 512, "targets": 32}', "--gin.DATA_SHARDS=1", "--gin.CHECKPOINT_PERIOD=3",
]  # fmt: skip


def test_a_data_set_of_ones_own_beside_t0s():
    """Replaces the hub by records in files and the small model by a tiny one."""
    folder = pathlib.Path("records")
    for entry in T0_TRAIN:
        (folder / entry.name).mkdir(parents=True)
        rows = synthetic_records.records(entry.name, 30)
        (folder / entry.name / "train.jsonl").write_text("".join(json.dumps(record) + "\n" for record in rows))
    templates = pathlib.Path("templates/tickets/templates.yaml")
    templates.parent.mkdir(parents=True)
    templates.write_text(documented("prompts.md", "urgent_or_not"))
    lines = documented("prompts.md", '{"message"').strip().splitlines()
    pathlib.Path("tickets.jsonl").write_text("\n".join(lines * 20))
    pathlib.Path("tickets_dev.jsonl").write_text("\n".join(lines * 3))
    gin = documented("prompts.md", "COLLECTIONS = ").replace(
        "promptsource/templates", str(shared_data("prompts", "promptsource_templates"))
    )
    pathlib.Path("tickets.gin").write_text(
        gin.replace('all/Records.hub = "{hub}"', 'all/Records.files = "records/{dataset}/{split}.jsonl"')
    )

    train = ["train", "--gin_file=tickets.gin", *SMALL, "--gin.MODEL_DIR=runs/tickets"]
    trained = commands.run(*train, "--gin.TRAIN_STEPS=3")
    assert trained.returncode == 0, trained.stderr
    assert [line["step"] for line in read_metrics("runs/tickets") if line["split"] == "train"] == [1, 2, 3]
    of_training = pathlib.Path("runs/tickets/evals/tickets/3.json").read_text()
    report = json.loads(of_training)["report"]["datasets"]["tickets"]
    assert report["prompts"].keys() == {"urgent_or_not", "which_queue"} and report["over_prompts"]["chance"]["median"] == 0.5
    assert pathlib.Path("runs/tickets/plots/tickets.png").exists()
    evaluated = commands.run("eval", "--model_dir=runs/tickets")
    assert evaluated.returncode == 0 and "tickets" in evaluated.stderr, evaluated.stderr
    assert pathlib.Path("runs/tickets/evals/tickets/3.json").read_text() == of_training
    table = pathlib.Path("runs/tickets/evals/tickets/3.txt").read_text().splitlines()
    assert table[0].startswith("data set") and table[1].split()[:2] == ["tickets", "2"]
