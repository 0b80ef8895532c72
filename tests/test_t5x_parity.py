"""Logits, losses and five Adafactor steps equal T5X's own, on five models that T5X trained."""

import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import shared_data
from flax import traverse_util

from t5x_lab.models.config import ModelConfig
from t5x_lab.models.model import Model
from t5x_lab.networks.transformer import TransformerConfig
from t5x_lab.optim.optimizers import Adafactor
from t5x_lab.optim.schedules import LearningRate

pytestmark = pytest.mark.slow

MODELS = ["t5_1_1", "t5_1_0", "t5_1_1_scanned", "decoder_causal", "decoder_prefix"]
ARCHITECTURES = {False: "encoder_decoder", "causal": "causal_decoder", "prefix": "prefix_decoder"}


def our_model(folder, scanned: bool, **changes) -> Model:
    described = json.loads((folder / "config.json").read_text())
    config = described["config"]
    network = TransformerConfig(
        architecture=ARCHITECTURES[described["decoder_only"]],
        vocab_size=described["vocab_size"],
        num_decoder_layers=config.get("num_decoder_layers", config.get("num_layers")),
        num_encoder_layers=config.get("num_encoder_layers", 0),
        **{name: config[name] for name in ("emb_dim", "num_heads", "head_dim", "mlp_dim", "logits_via_embedding")},
        mlp_activations=tuple(config["mlp_activations"]),
        relative_bias="per_layer" if scanned else "shared",
        dtype="float32",
        **changes,
    )
    return Model(ModelConfig(network, z_loss=described["z_loss"], loss_normalizing_factor=None))


def from_t5x(t5x_params: dict[str, np.ndarray], model: Model) -> dict:
    """T5X's parameters under our names: single layers or a layer axis in the middle become our leading layer axis."""
    params = {}
    for name, shape in traverse_util.flatten_dict(model.abstract_params, sep="/").items():
        source = name.replace("encoder/final_norm", "encoder/encoder_norm").replace(
            "decoder/final_norm", "decoder/decoder_norm"
        )
        source = source.replace("logits_dense", "decoder/logits_dense").replace(
            "cross_attention/", "encoder_decoder_attention/"
        )
        source = re.sub(r"/(\w+)_norm/(?=scale$)", r"/pre_\1_layer_norm/", source) if "/layers/" in source else source
        if source.startswith("encoder/"):
            source = source.replace("self_attention", "attention")
        if not model.config.network.has_encoder:
            source = source.replace("token_embedder", "decoder/token_embedder")
        stack = source.split("/")[0]
        if "/layers/" not in source:
            value = t5x_params[source]
        elif source.replace("/layers/", "/layers_0/") in t5x_params:
            value = np.stack([t5x_params[source.replace("/layers/", f"/layers_{i}/")] for i in range(shape.shape[0])])
        else:
            value = np.moveaxis(t5x_params[source.replace("/layers/", f"/{stack}/")], 1, 0)
        params[name] = jnp.asarray(value.reshape(shape.shape))
    return traverse_util.unflatten_dict(params, sep="/")


def relative_difference(a, b) -> float:
    return float(np.abs(np.asarray(a) - np.asarray(b)).max() / np.abs(np.asarray(b)).max())


@pytest.mark.parametrize("scan_layers", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", MODELS)
def test_logits_losses_and_parameters_equal_t5x(name, scan_layers):
    folder = shared_data("t5x_checkpoints", name)
    expected = np.load(folder / "expected.npz")
    model = our_model(folder, scanned="scanned" in name, scan_layers=scan_layers)
    part = lambda prefix: {key[len(prefix) :]: expected[key] for key in expected.files if key.startswith(prefix)}
    params, after = (from_t5x(part(prefix), model) for prefix in ("params_before/", "params_after_5/"))
    assert sum(x.size for x in part("params_before/").values()) == model.num_parameters
    batch = {key: jnp.asarray(value) for key, value in part("batch/").items()}

    assert relative_difference(jax.jit(model.logits)(params, batch), expected["logits"]) < 1e-5

    optimizer = Adafactor(LearningRate("constant", 0.01), min_dim_size_to_factor=16).make(model.axes)
    state = optimizer.init(params)
    loss_and_gradient = jax.jit(jax.value_and_grad(lambda p: model.loss(p, batch).objective))
    update = jax.jit(optimizer.update)
    for step in range(5):
        loss, grads = loss_and_gradient(params)
        np.testing.assert_allclose(loss, expected["losses"][step], rtol=1e-5)
        updates, state = update(grads, state, params)
        params = optax.apply_updates(params, updates)
    differences = jax.tree.map(relative_difference, params, after)
    assert max(jax.tree.leaves(differences)) < 1e-5, differences
