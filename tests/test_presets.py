"""Every preset's parameter count: T5X's table where it lists one, the shapes' own formula elsewhere."""

import dataclasses
import pathlib

import pytest
from conftest import ROOT

from t5x_lab.checkpoints.formats.huggingface.directory import find_family
from t5x_lab.config.gin_files import PACKAGE_GIN
from t5x_lab.models.model import Model
from t5x_lab.networks.lstm import LstmConfig
from t5x_lab.runs.config.gin_config import GinConfig

PRESETS = sorted(str(path.relative_to(ROOT / "gin")) for path in (ROOT / "gin" / "models").rglob("*.gin"))

# From T5X's gin files (facts of the shapes), OpenAI's released GPT-1, and the rounded counts that are commonly quoted.
T5X = {
    "t5_1_0/small": 60_506_624, "t5_1_0/base": 222_903_552, "t5_1_0/large": 737_668_096, "t5_1_0/3b": 2_851_598_336,
    "t5_1_0/11b": 11_307_321_344, "t5_1_1/tiny": 518_240, "t5_1_1/small": 76_961_152, "t5_1_1/base": 247_577_856,
    "t5_1_1/large": 783_150_080, "t5_1_1/xl": 2_849_757_184, "t5_1_1/xxl": 11_135_332_352, "decoder/base": 109_628_544,
    "gpt1/base": 116_534_784, "decoder/large": 341_231_104, "decoder/xl": 1_223_527_424, "decoder/xxl": 4_762_310_656,
}  # fmt: skip
QUOTED = {"mt5/small": 300.2e6, "mt5/base": 582.4e6, "byt5/base": 581.7e6}
OTHERS = {  # sizes that the papers have, and that transformers counts; tiny is ours
    "gemma2": ("2b", "9b", "27b"), "gemma3": ("270m", "1b", "4b", "12b", "27b"), "t5gemma2": ("270m", "1b", "4b"),
    "longt5": ("local_base", "local_large", "global_base", "global_large", "global_xl"),
    "t5gemma": ("s", "b", "l", "ml", "xl", "2b_2b", "9b_2b", "9b_9b"),
}  # fmt: skip
REDLLM = {"150m": 0.15e9, "1b": 1e9, "2b": 2e9, "4b": 4e9, "8b": 8e9}  # the sizes by which Zhang et al. 2025 call them


def formula(c) -> int:
    """Embedding and logits; per layer attention, MLP and norms; a bias table and a final norm per stack."""
    tables = c.vocab_size * c.emb_dim * (1 if c.logits_via_embedding else 2)
    if isinstance(c, LstmConfig):
        return tables + 4 * c.hidden_dim * (c.emb_dim + c.hidden_dim + 1) + c.hidden_dim * c.emb_dim
    encoder = c.num_encoder_layers * layer(c.encoder_shape, 2) + per_stack(c.encoder_shape)
    encoder += 0 if c.global_block_size is None else c.num_encoder_layers * norms(c) + 32 * c.num_heads
    decoder = c.num_decoder_layers * layer(c, 2) + per_stack(c)
    if c.has_encoder and not c.merged_attention:  # cross-attention, whose keys and values have the encoder's width
        kv = 2 * c.kv_heads * c.head_dim
        decoder += c.num_decoder_layers * (attention(c) + (c.encoder_shape.emb_dim - c.emb_dim) * kv + norms(c))
    tables += 0 if c.share_embeddings else c.vocab_size * c.encoder_shape.emb_dim
    tables += c.max_positions * c.emb_dim if c.positions == "learned" else 0
    return tables + (encoder if c.has_encoder and not c.share_stacks else 0) + (decoder if c.has_decoder else 0)


def attention(c) -> int:
    heads, bias = 2 * (c.num_heads + c.kv_heads) * c.head_dim, 1 if c.use_bias else 0
    return c.emb_dim * heads + bias * (heads - c.num_heads * c.head_dim + c.emb_dim) + (2 * c.head_dim if c.qk_norm else 0)


def norms(c) -> int:
    """Norms of a sub-layer."""
    return c.emb_dim * (2 if c.norm == "layer" else 1) * (2 if c.norm_position == "both" else 1)


def layer(c, sublayers: int) -> int:
    gates, bias = len(c.mlp_activations), 1 if c.use_bias else 0
    mlp = (gates + 1) * c.emb_dim * c.mlp_dim + bias * (gates * c.mlp_dim + c.emb_dim)
    return attention(c) + mlp + sublayers * norms(c)


def per_stack(c) -> int:
    final_norm = 0 if c.norm_position == "post" else c.emb_dim * (2 if c.norm == "layer" else 1)
    return final_norm + (32 * c.num_heads if c.positions == "relative" else 0)


def test_all_presets_are_there():
    families = {name: ["tiny", "small", "base", "large", "xl", "xxl"] for name in ("t5_1_1", "mt5", "byt5", "decoder")}
    families |= {
        name: ["tiny", "base"]
        for name in (
            "shared_stacks", "half_layers", "causal_decoder", "prefix_decoder", "encoder", "rotary_decoder", "gpt1", "lstm"
        )
    }  # fmt: skip
    families |= {name: ["tiny", *sizes] for name, sizes in OTHERS.items()}
    families["longt5"] = ["local_tiny", "global_tiny", *OTHERS["longt5"]]
    families |= {name: ["tiny", *REDLLM] for name in ("decllm", "redllm")}
    families["t5_1_0"] = ["tiny", "small", "base", "large", "3b", "11b"]
    assert {str(pathlib.Path(preset).with_suffix("").relative_to("models")) for preset in PRESETS} >= {
        f"{family}/{size}" for family, sizes in families.items() for size in sizes
    }


@pytest.mark.slow
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


@pytest.mark.slow
@pytest.mark.parametrize("family", OTHERS)
def test_other_families_have_as_many_parameters_as_in_transformers(family):
    """Counts parameters without memory for them. transformers' vision tower and its projector do not count."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    for size in OTHERS[family]:
        model = Model(GinConfig([f"models/{family}/{size}.gin"]).model())
        settings = find_family(model.config.network)[1]
        kind = transformers.AutoModelForSeq2SeqLM if "t5" in family else transformers.AutoModelForCausalLM
        with torch.device("meta"):
            other = kind.from_config(transformers.AutoConfig.for_model(**settings))
        other.tie_weights()
        counted = {
            parameter: parameter.numel()
            for name, parameter in other.named_parameters()
            if not any(part in name for part in ("vision", "multi_modal", "eoi_embedding"))
        }
        c = model.config.network
        tied = c.vocab_size * c.emb_dim if family == "longt5" else 0  # transformers ties the logits of all T5 models
        assert sum(counted.values()) + tied == model.num_parameters, size


@pytest.mark.parametrize("size", REDLLM)
def test_redllm_has_about_as_many_parameters_as_its_decoder(size):
    decoder, both = (Model(GinConfig([f"models/{name}/{size}.gin"]).model()) for name in ("decllm", "redllm"))
    assert decoder.num_parameters == pytest.approx(REDLLM[size], rel=0.15)
    layers, network = both.config.network.num_decoder_layers, both.config.network
    others = [
        dataclasses.replace(network, num_encoder_layers=number, num_decoder_layers=number)
        for number in (layers - 1, layers + 1)
    ]
    gaps = [abs(formula(each) - decoder.num_parameters) for each in (network, *others)]
    assert gaps[0] == min(gaps)


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
    assert config.flops(512, 128) / 1e12 == pytest.approx(teraflops, rel=6e-3)


def test_flops_of_an_encoder_decoder_are_a_decoders_at_twice_the_parameters():
    """Raffel et al., Table 2: L + L layers cost what L layers cost, since a token crosses one of the stacks; L/2 + L/2 half.

    Equal but for cross-attention and for attention's square of the length, which is why 10 % is granted."""
    costs = {
        name: GinConfig([f"models/{name}/base.gin"]).model().network.flops(*lengths)
        for name, lengths in {
            "t5_1_0": (512, 512), "shared_stacks": (512, 512), "half_layers": (512, 512), "causal_decoder": (0, 1024)
        }.items()
    }  # fmt: skip
    logits = 3 * 2 * 512 * 768 * 32128
    costs = {name: cost - logits * (2 if name == "causal_decoder" else 1) for name, cost in costs.items()}
    assert costs["shared_stacks"] == costs["t5_1_0"]
    assert costs["half_layers"] * 2 == costs["t5_1_0"]
    assert costs["causal_decoder"] == pytest.approx(costs["t5_1_0"], rel=0.1)


def test_flops_of_matrix_products_are_six_times_parameters_times_tokens():
    """Every parameter but the embedding table is multiplied once per token, and the length is too short to matter."""
    for name in ("lstm", "rotary_decoder"):
        model = Model(GinConfig([f"models/{name}/base.gin"]).model())
        c = model.config.network
        used = model.num_parameters - (0 if c.logits_via_embedding else c.vocab_size * c.emb_dim)
        assert c.flops(0, 2) == pytest.approx(6 * used * 2, rel=1e-3)
