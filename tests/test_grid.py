"""The table of architectures and objectives: what is committed, what papers say, and what the pipeline makes."""

import functools
import re

import jax
import numpy as np
import pytest
from conftest import ROOT
from helpers import exhaustive

from t5x_lab.data.config import DataConfig
from t5x_lab.data.objectives.denoising import Denoising
from t5x_lab.data.objectives.named import OBJECTIVES
from t5x_lab.data.pipeline.batches import SeqioBatches, resolve_tasks
from t5x_lab.data.vocabularies.config import ByteVocabulary
from t5x_lab.models.classifier import make_model
from t5x_lab.runs.config.gin_config import GinConfig
from t5x_lab.runs.train.batch import resolve_batch
from t5x_lab.study.grid import ARCHITECTURES, NAMES, compute_grid


@functools.cache
def cells():
    return {(cell.architecture, cell.objective): cell for cell in compute_grid()}


@functools.cache
def page() -> list[dict[tuple[str, str], str]]:
    """Returns the tables of the committed page, as cells by row and column."""
    text = (ROOT / "docs" / "architectures_and_objectives.md").read_text()
    blocks = [
        [line.strip("| ").split(" | ") for line in block.splitlines()] for block in re.findall(r"(?:^\|.*\n)+", text, re.M)
    ]
    return [
        {(row[0], column): cell for row in rows for column, cell in zip(header, row, strict=True)}
        for header, _, *rows in blocks
    ]


def test_the_committed_page_has_the_pairs_that_configurations_allow():
    """Checks which pairs are on the page. What it says of them is compared with the pipeline below."""
    architectures, _, _, rows, costs = page()
    assert len(cells()) == len(ARCHITECTURES) * len(NAMES) == len(costs) // (len(ARCHITECTURES) + 1) * len(ARCHITECTURES)
    for architecture, name in cells():
        assert (costs[name, architecture] == "–") == (OBJECTIVES[name].refusal(cell_architecture(architecture)) is not None)
        count = architectures[architecture, "parameters"].replace(",", "")
        model = GinConfig([ARCHITECTURES[architecture]]).model() if name == NAMES[0] else None
        if model:
            shapes = jax.eval_shape(lambda key, model=model: make_model(model).init(key), jax.random.key(0))
            assert int(count) == sum(leaf.size for leaf in jax.tree.leaves(shapes))
    assert len(rows) == 5 * len(NAMES)


@functools.cache
def cell_architecture(name):
    return GinConfig([ARCHITECTURES[name]]).model().network.architecture


def test_what_the_papers_say():
    """Wang et al. (2022), section 3.2: FLM 100 %, PLM 50 %, span corruption 114 of 626."""
    assert cells()["causal decoder", "full_lm"].share_with_loss == 1.0
    assert cells()["prefix decoder", "prefix_lm"].share_with_loss == 0.5
    for name, lengths in (("encoder-decoder", (512, 114)), ("prefix decoder", (0, 626)), ("causal decoder", (0, 626))):
        cell = cells()[name, "span_corruption"]
        assert (cell.encoder_length, cell.decoder_length) == lengths
        assert cell.share_with_loss == pytest.approx(114 / 626)
    assert cells()["GPT-1", "full_lm"].parameters == 116_534_784
    for cell in cells().values():
        assert (cell.refusal is None) == (cell.flops_per_token > 0) == (cell.encoder_length + cell.decoder_length > 0)


def test_shared_stacks_cost_what_two_stacks_cost_and_half_the_layers_half():
    for objective in ("span_corruption", "prefix_lm"):
        whole, shared, half = (
            cells()[name, objective].flops_per_token for name in ("encoder-decoder", "shared stacks", "half the layers")
        )
        assert shared == whole and half < 0.6 * whole


def fixed(name):
    """Whether examples have one length, and so fill their rows; i.i.d. noise, UL2's kinds and whole documents do not."""
    objective = OBJECTIVES[name]
    if isinstance(objective, Denoising):
        return (objective.targets == "whole" and objective.merge_documents) or objective.mean_noise_span_length is not None
    return name in ("full_lm", "prefix_lm", "masked_lm")


SOME = ["span_corruption_10_10", "span_corruption_25_3", "replace_spans", "drop_tokens", "bert_style",
        "mass_style", "deshuffling"]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, kind",
    [
        ("full_lm", "causal decoder"),
        ("masked_lm", "encoder"),
        ("span_corruption_50_2", "causal decoder"),
        *((name, kind) for name in ("prefix_lm", "span_corruption", "ul2") for kind in ("encoder-decoder", "prefix decoder")),
        *(exhaustive(name, ("encoder-decoder", "prefix decoder")[number % 2]) for number, name in enumerate(SOME)),
    ],
)
def test_the_pipeline_makes_what_the_table_says(name, kind):
    """Compares the page with 64 real rows: shapes, how full they are, the share of tokens with loss, FLOPs per token."""
    architecture = kind.replace("-", "_").replace(" ", "_")
    cell = cells()[kind, name]
    assert not cell.refusal
    config = DataConfig("sotu", dict(cell.lengths), 64, ByteVocabulary(), objective=name, shards=1, shuffle_buffer_size=99)
    tasks = resolve_tasks(config, architecture, 384)
    assert resolve_batch(config, architecture).lengths == (cell.encoder_length, cell.decoder_length)
    batch = next(SeqioBatches(tasks, config, seed=0))  # shuffled, as in training
    streams = {
        "encoder_input_tokens": cell.encoder_length,
        "decoder_target_tokens": cell.decoder_length,
    }
    for stream, length in streams.items():
        assert (stream in batch) == bool(length) and (not length or batch[stream].shape == (64, length))
    tokens = np.concatenate([batch[s].reshape(-1) for s, length in streams.items() if length])
    weights = batch["encoder_loss_weights" if architecture == "encoder" else "decoder_loss_weights"]
    share = weights.sum() / (tokens > 0).sum()
    # A prefix LM's split is uniform: a deviation of 0.29 a row. Rows that end 128 documents may be short.
    error = 4 * 0.29 / 8 if name == "prefix_lm" and architecture != "encoder_decoder" else 0.02
    assert share == pytest.approx(cell.share_with_loss, abs=error if name != "ul2" else 0.05)
    *_, rows, costs = page()
    columns = {
        "encoder-decoder": "encoder-decoders",
        "causal decoder": "decoders",
        "prefix decoder": "decoders",
        "encoder": "encoder",
    }
    shape, fill, share_with_loss = rows[name, columns[kind]].split(", ")
    assert shape == " + ".join(str(length) for length in streams.values() if length)
    assert share == pytest.approx(float(share_with_loss[:-1]) / 100, abs=error if name != "ul2" else 0.05)
    if fixed(name) or name == "ul2":
        full = (tokens > 0).mean()
        assert full == pytest.approx(float(fill[:-1]) / 100, abs=0.03)
        network = GinConfig([ARCHITECTURES[kind]]).model().network
        flops = network.flops(cell.encoder_length, cell.decoder_length) / (full * sum(streams.values()))
        assert float(costs[name, kind]) * 1e9 == pytest.approx(flops, rel=0.03)
