"""Small models and batches that many tests use."""

import functools
import json
import os
from collections.abc import Container, Iterable

import jax
import numpy as np
import pytest
from conftest import ROOT
from hypothesis import Phase, settings

from t5x_lab.models.config import ModelConfig
from t5x_lab.models.model import Model
from t5x_lab.networks.config import EncoderShape
from t5x_lab.networks.layer_kinds import LayerKind
from t5x_lab.networks.lstm import LstmConfig
from t5x_lab.networks.network import Network
from t5x_lab.networks.transformer import TransformerConfig

SCALE = int(os.environ.get("PROPERTY_SCALE", "1"))  # benchmarks/properties.py draws many more cases, other ones each time


def exhaustive(*values):
    """Parameters of a test that only `make test-all` runs with them; `make test` runs the other ones."""
    return pytest.param(*values, marks=pytest.mark.exhaustive)


def exhaustive_except(values: Iterable, common: Container) -> list:
    """Returns parameter values of a test. Those outside of `common` run in `make test-all` only."""
    return [value if value in common else exhaustive(value) for value in values]


def cases(number: int, shrink: bool = True) -> settings:
    """Sets the number of cases of a property test. Every run of the tests draws the same cases."""
    phases = tuple(Phase) if shrink else (Phase.explicit, Phase.generate)
    return settings(max_examples=number * SCALE, derandomize=SCALE == 1, database=None, deadline=None, phases=phases)


ARCHITECTURES = ("encoder_decoder", "causal_decoder", "prefix_decoder")
# Further networks, as changes of one of these.
VARIANTS = {
    "gpt1": ("causal_decoder", dict(
        scaling="standard", positions="learned", max_positions=32, norm="layer", norm_position="post", use_bias=True,
        mlp_activations=("gelu",), logits_via_embedding=True)),
    "rotary": ("prefix_decoder", dict(
        scaling="standard", positions="rotary", num_kv_heads=2, mlp_activations=("silu", "linear"))),
    "sinusoidal": ("encoder_decoder", dict(positions="sinusoidal", norm="layer", logits_via_embedding=True)),
    "shared_stacks": ("encoder_decoder", dict(share_stacks=True, num_encoder_layers=2, num_decoder_layers=2)),
    "local": ("prefix_decoder", dict(
        scaling="standard", positions="rotary", num_kv_heads=2, num_decoder_layers=5,
        layer_pattern=(LayerKind(window=4, rotary_theta=100.0), LayerKind()))),
    "local_relative": ("encoder_decoder", dict(
        num_encoder_layers=4, num_decoder_layers=4, global_block_size=3,
        layer_pattern=(LayerKind(window=3, encoder_window=(3, 1)), LayerKind(window=5), LayerKind()))),
    "merged": ("encoder_decoder", dict(
        scaling="standard", positions="rotary", num_kv_heads=2, qk_norm=True, merged_attention=True, num_decoder_layers=3,
        layer_pattern=(LayerKind(window=3), LayerKind()))),
    "unbalanced": ("encoder_decoder", dict(
        positions="rotary", scaling="standard", share_embeddings=False, encoder=EncoderShape(emb_dim=24, num_heads=6),
        rotary_cross_attention=True)),
    "lstm": ("causal_decoder", {}),
}  # fmt: skip


def architecture_of(name: str) -> str:
    return VARIANTS[name][0] if name in VARIANTS else name


def tiny_config(name: str, **changes) -> Network:
    """A network of one of `ARCHITECTURES`, "encoder" or `VARIANTS`."""
    if name == "lstm":
        return LstmConfig(**{**dict(vocab_size=64, emb_dim=16, hidden_dim=24, dtype="float32"), **changes})
    architecture, variant = VARIANTS.get(name, (name, {}))
    sizes = dict(vocab_size=64, emb_dim=16, num_heads=4, head_dim=4, mlp_dim=32, dtype="float32")
    sizes["num_encoder_layers"] = 2 if architecture in ("encoder_decoder", "encoder") else 0
    sizes["num_decoder_layers"] = 0 if architecture == "encoder" else 3
    return TransformerConfig(architecture, **{**sizes, **variant, **changes})


@functools.cache
def tiny_model(name: str, **changes) -> Model:
    return Model(ModelConfig(tiny_config(name, **changes)))


@functools.cache
def compiled(function) -> "jax.stages.Wrapped":
    """A jitted method of a `tiny_model`; tests that ask the same of one share its program."""
    return jax.jit(function)


def random_params(model: Model, seed: int = 0) -> dict:
    """Weights with which everything matters, biases and scales too; no program is compiled for them."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda x: rng.normal(0, 0.3, x.shape).astype(np.float32), model.abstract_params)


def documented(page: str, containing: str) -> str:
    """The first block of code in a page of docs/ that contains a text."""
    blocks = (ROOT / "docs" / page).read_text().split("```")[1::2]
    return next(block for block in blocks if containing in block).partition("\n")[2]


def random_batch(architecture: str, rows: int = 4, length: int = 12, seed: int = 0, vocab_size: int = 64) -> dict:
    """Unpacked rows of random lengths, padded; a decoder's first tokens are its prefix."""
    architecture = architecture_of(architecture)
    rng = np.random.default_rng(seed)

    def tokens(width):
        x = rng.integers(2, vocab_size, (rows, width)).astype(np.int32)
        return np.where(np.arange(width) < rng.integers(width // 2, width + 1, (rows, 1)), x, 0)

    targets = tokens(length)
    batch = {
        "decoder_target_tokens": targets,
        "decoder_input_tokens": np.pad(targets, ((0, 0), (1, 0)))[:, :-1],
        "decoder_loss_weights": (targets > 0).astype(np.int32),
    }
    if architecture == "encoder_decoder":
        batch["encoder_input_tokens"] = tokens(length + 4)
    else:
        prefix = rng.integers(1, length // 2, (rows, 1))
        batch["decoder_causal_attention"] = (np.arange(length) <= prefix).astype(np.int32)
        batch["decoder_loss_weights"] *= (np.arange(length) >= prefix).astype(np.int32)
    return batch


def pack_rows(batch: dict, first: int, second: int, architecture: str) -> dict:
    """One packed row of two unpacked ones, as SeqIO packs: segments numbered from 1, positions that start again."""
    architecture = architecture_of(architecture)
    packed = {}
    sides = {"decoder": "decoder_target_tokens"}
    if architecture == "encoder_decoder":
        sides["encoder"] = "encoder_input_tokens"
    for side, tokens in sides.items():
        lengths = [int((batch[tokens][row] > 0).sum()) for row in (first, second)]
        width = 2 * batch[tokens].shape[1]
        for name in [name for name in batch if name.startswith(side)]:
            parts = [batch[name][row][:length] for row, length in zip((first, second), lengths)]
            packed[name] = np.pad(np.concatenate(parts), (0, width - sum(lengths)))[None]
        segments = np.repeat([1, 2, 0], [*lengths, width - sum(lengths)])
        positions = np.concatenate([np.arange(lengths[0]), np.arange(lengths[1]), np.zeros(width - sum(lengths), int)])
        packed[f"{side}_segment_ids"] = segments[None].astype(np.int32)
        packed[f"{side}_positions"] = positions[None].astype(np.int32)
    return packed


def harness_task(folder, name, data, text, choices, label, **more):
    """A task file as lm-eval reads them, with a local .jsonl file."""
    fields = {
        "task": name, "dataset_path": "json", "dataset_kwargs": {"data_files": {"validation": str(data)}},
        "output_type": "multiple_choice", "validation_split": "validation", "doc_to_text": text, "doc_to_choice": choices,
        "doc_to_target": label, "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}], **more,
    }  # fmt: skip
    (folder / f"{name}.yaml").write_text(json.dumps({k: v for k, v in fields.items() if v is not None}))  # JSON is YAML


def set_max_separate_tasks(monkeypatch, number: int) -> None:
    """Sets the number of tasks above which a mixture is read as one dataset."""
    monkeypatch.setattr("t5x_lab.data.pipeline.reading.MAX_SEPARATE_TASKS", number)
