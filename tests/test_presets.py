"""Every preset's parameter count: T5X's table where it lists one, the shapes' own formula elsewhere."""

import pathlib

import pytest
from conftest import ROOT

from t5x_lab.config.gin_files import PACKAGE_GIN
from t5x_lab.models.model import Model
from t5x_lab.networks.flops import flops_per_example
from t5x_lab.runs.config import GinConfig

PRESETS = sorted(str(path.relative_to(ROOT / "gin")) for path in (ROOT / "gin" / "models").rglob("*.gin"))

# From T5X's gin files (facts of the shapes), and the rounded counts that are commonly quoted.
T5X = {
    "t5_1_0/small": 60_506_624, "t5_1_0/base": 222_903_552, "t5_1_0/large": 737_668_096, "t5_1_0/3b": 2_851_598_336,
    "t5_1_0/11b": 11_307_321_344, "t5_1_1/tiny": 518_240, "t5_1_1/small": 76_961_152, "t5_1_1/base": 247_577_856,
    "t5_1_1/large": 783_150_080, "t5_1_1/xl": 2_849_757_184, "t5_1_1/xxl": 11_135_332_352, "decoder/base": 109_628_544,
    "decoder/large": 341_231_104, "decoder/xl": 1_223_527_424, "decoder/xxl": 4_762_310_656,
}  # fmt: skip
QUOTED = {"mt5/small": 300.2e6, "mt5/base": 582.4e6, "byt5/base": 581.7e6}


def formula(c) -> int:
    """Embedding and logits, per layer: attention 4dnh, MLP (activations + 1) df, a norm scale each; a bias table and a final
    norm per stack."""
    attention = 4 * c.emb_dim * c.num_heads * c.head_dim
    mlp = (len(c.mlp_activations) + 1) * c.emb_dim * c.mlp_dim
    stacks = 2 if c.has_encoder else 1
    encoder = c.num_encoder_layers * (attention + mlp + 2 * c.emb_dim)
    decoder = c.num_decoder_layers * (stacks * attention + mlp + (stacks + 1) * c.emb_dim)
    tables = c.vocab_size * c.emb_dim * (1 if c.logits_via_embedding else 2)
    return tables + encoder + decoder + stacks * (c.emb_dim + 32 * c.num_heads)


def test_all_presets_are_there():
    families = {name: ["tiny", "small", "base", "large", "xl", "xxl"] for name in ("t5_1_1", "mt5", "byt5", "decoder")}
    families["t5_1_0"] = ["tiny", "small", "base", "large", "3b", "11b"]
    assert {str(pathlib.Path(preset).with_suffix("").relative_to("models")) for preset in PRESETS} >= {
        f"{family}/{size}" for family, sizes in families.items() for size in sizes
    }


@pytest.mark.parametrize("preset", PRESETS)
def test_parameter_count(preset):
    model = Model(GinConfig([preset]).model())
    name = preset.removeprefix("models/").removesuffix(".gin")
    assert model.num_parameters == formula(model.config.network)
    if name in T5X:
        assert model.num_parameters == T5X[name]
    if name in QUOTED:
        assert model.num_parameters == pytest.approx(QUOTED[name], rel=1e-3)
    header = (PACKAGE_GIN / preset).read_text().splitlines()[0]
    assert f"{model.num_parameters:,} parameters" in header


def test_the_studys_models():
    """Wang et al. (2022), Table 1, counted from their shapes: biases per layer in the decoders; tied logits in both."""
    decoder = Model(GinConfig(["models/decoder/xxl.gin"], ['TransformerConfig.relative_bias = "per_layer"']).model())
    assert decoder.num_parameters == 4_762_357_760
    both = Model(GinConfig(["models/t5_1_1/xxl.gin"], ["TransformerConfig.logits_via_embedding = True"]).model())
    assert both.num_parameters == 11_003_736_064


@pytest.mark.parametrize(
    "size, teraflops", [("small", 0.110), ("base", 0.438), ("large", 1.504), ("xl", 5.472), ("xxl", 21.38)]
)
def test_flops_of_t5_1_1_at_512_and_128(size, teraflops):
    config = GinConfig([f"models/t5_1_1/{size}.gin"]).model().network
    assert flops_per_example(config, 512, 128) / 1e12 == pytest.approx(teraflops, rel=6e-3)
