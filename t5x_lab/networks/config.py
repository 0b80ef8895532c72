"""Shapes and choices of the transformers here, in one dataclass."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

from t5x_lab.config.checks import check_types, positive
from t5x_lab.config.errors import UserError, one_of
from t5x_lab.config.macros import macro
from t5x_lab.config.user_code import shown, tried
from t5x_lab.networks.network import ARCHITECTURES

ACTIVATION_FUNCTIONS = {
    "gelu": jax.nn.gelu,  # the tanh approximation, as in T5 1.1
    "relu": jax.nn.relu,
    "silu": jax.nn.silu,
    "swish": jax.nn.silu,
    "tanh": jnp.tanh,
    "linear": lambda x: x,
}
INITIALIZERS = {
    "glorot_normal": jax.nn.initializers.glorot_normal(),
    "glorot_uniform": jax.nn.initializers.glorot_uniform(),
    "he_normal": jax.nn.initializers.he_normal(),
    "he_uniform": jax.nn.initializers.he_uniform(),
    "lecun_normal": jax.nn.initializers.lecun_normal(),
    "lecun_uniform": jax.nn.initializers.lecun_uniform(),
    "orthogonal": jax.nn.initializers.orthogonal(),
    "zeros": jax.nn.initializers.zeros,
}
# What the backward pass finds of a layer's forward pass, beside the layer's input; it computes the rest again. `heads` are
# queries, keys and values; `sublayers` what attention adds to the residual; `mlp` the MLP's hidden products.
REMAT_POLICIES: dict[str, tuple[str, ...] | None] = {
    "everything": None,
    "products": ("heads", "sublayers", "mlp"),
    "mlp": ("sublayers", "mlp"),
    "attention": ("heads", "sublayers"),
    "boundaries": (),
}
_REMAT_OF_T5X = {"none": "everything", "minimal": "products", "full": "boundaries"}
DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16, "float16": jnp.float16}


@dataclasses.dataclass(frozen=True)
class RotaryScaling:
    """Scaling of rotations for texts longer than a model was trained on.

    Attributes:
      factor: what wavelengths are multiplied by.
      kind: which of them: "linear", all (Chen et al. 2023); "llama3", those longer than original_length / low_freq_factor
        (Grattafiori et al. 2024). Names are those of transformers.
      low_freq_factor, high_freq_factor: wavelengths shorter than original_length / high_freq_factor stay; in between it is
        interpolated.
      original_length: of the texts that the model was trained on before.
    """

    factor: float
    kind: str = "llama3"
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_length: int = 8192

    def __post_init__(self):
        check_types(self)
        one_of("RotaryScaling.kind", self.kind, ("linear", "llama3"))
        positive(self, "factor", "low_freq_factor", "original_length")
        if not self.high_freq_factor > self.low_freq_factor:
            raise UserError(
                f"RotaryScaling.high_freq_factor is {self.high_freq_factor}; it must exceed low_freq_factor, which is "
                f"{self.low_freq_factor}."
            )


@dataclasses.dataclass(frozen=True)
class TransformerShape:
    """Shapes and choices of one transformer, of `TransformerConfig`. Field names are T5X's `T5Config` where that has them.

    Attributes:
      architecture: "encoder_decoder"; "causal_decoder"; "prefix_decoder", a decoder that sees its prefix
        (`decoder_causal_attention`) both ways; or "encoder", which predicts tokens in place. The two decoders have
        identical parameters.
      vocab_size: rows of the embedding table.
      emb_dim, num_heads, head_dim, mlp_dim: sizes; heads need not divide `emb_dim`.
      num_encoder_layers, num_decoder_layers: 0 for the stack that an architecture does not have.
      num_kv_heads: heads of keys and values, each shared by num_heads / num_kv_heads query heads (Ainslie et al. 2023);
        None = num_heads.
      share_stacks: the encoder runs through the decoder's layers, without their cross-attention (Raffel et al., section
        3.2.2).
      mlp_activations: one for a plain MLP; two, such as ("gelu", "linear"), for a gated one: names of `ACTIVATION_FUNCTIONS`,
        or functions of an array, elementwise.
      logits_via_embedding: tied logits.
      scaling: "t5": weights initialised by fan-in and embeddings N(0, 1), attention logits as they are, tied logits
        divided by sqrt(emb_dim); or "standard" (GPT, BERT, Llama): every matrix N(0, 0.02**2), attention logits divided by
        sqrt(head_dim), tied logits as they are.
      initializer: of every matrix but embedding tables, in the place of `scaling`'s: one of `INITIALIZERS`, or a function
        (key, shape [inputs, outputs], dtype) -> array, as JAX's are.
      positions: "relative" (T5's biases), "learned", "sinusoidal" (Vaswani et al. 2017), "rotary" (Su et al. 2021) or
        "none".
      relpos_buckets, relpos_max_distance: of T5's biases; distances beyond the largest one share a bucket.
      relative_bias: "shared" by a stack (T5), or "per_layer" (T5X's scanned networks, Wang et al.'s decoders).
      bidirectional_bias: whether a prefix decoder's buckets tell left from right. False is T5X's and Wang et al.'s
        choice and keeps the weights interchangeable with a causal decoder's; True is Mesh TensorFlow's.
      max_positions: rows of the table of learned positions (512 unless given), the longest sequence there is; of rotary
        positions the length that the model was trained at, which limits nothing.
      rotary_theta, rotary_scaling: base of the rotations' wavelengths, and a `RotaryScaling` of them or None.
      qk_norm: RMS norms of each head's queries and keys, before they are rotated (Henry et al. 2020; as in Qwen3).
      attention_logit_cap, logit_cap: c turns attention's, or the vocabulary's, logits x into c * tanh(x / c) (Bello et al.
        2017; as in Gemma 2); None = as they are.
      scale_embeddings: multiplies embedded tokens by sqrt(emb_dim) (Vaswani et al. 2017, section 3.4).
      longest_sequence: longer ones are refused; None = any that positions allow.
      norm: "rms" (T5) or "layer" (with mean and bias).
      norm_position: "pre", x + f(norm(x)) with a final norm; "post", norm(x + f(x)) without one; or "both",
        x + norm(f(norm(x))) with a final norm (as in Gemma 2).
      norm_epsilon: added to the variance.
      use_bias: a bias on every matrix but the logits'; or where there is one, of "qkv" (as in Qwen 2), "out" and "mlp".
      dropout_rate: for embeddings, sub-layer outputs, attention weights and MLP activations.
      dtype: of activations. Parameters, softmax and logits are float32.
      scan_layers: run the layers as one scan (compile time independent of depth) or unrolled; same parameters.
      remat_policy: what is kept of a layer for its backward pass: "everything"; "products", the outputs of all its matrix
        products (T5X's "minimal"); only those of its "attention" or its "mlp"; or only the "boundaries" between layers
        (T5X's "full"). Attention weights are computed again under every policy. T5X's names work too.
    """

    architecture: str
    vocab_size: int
    emb_dim: int
    num_heads: int
    head_dim: int
    mlp_dim: int
    num_decoder_layers: int = 0
    num_encoder_layers: int = 0
    num_kv_heads: int | None = None
    share_stacks: bool = False
    mlp_activations: tuple[str | Callable, ...] = ("gelu", "linear")
    logits_via_embedding: bool = False
    scaling: str = "t5"
    initializer: str | Callable | None = None
    positions: str = "relative"
    relative_bias: str = "shared"
    bidirectional_bias: bool = False
    relpos_buckets: int = 32
    relpos_max_distance: int = 128
    max_positions: int | None = None
    rotary_theta: float = 10_000.0
    rotary_scaling: RotaryScaling | None = None
    qk_norm: bool = False
    attention_logit_cap: float | None = None
    logit_cap: float | None = None
    scale_embeddings: bool = False
    longest_sequence: int | None = None
    norm: str = "rms"
    norm_position: str = "pre"
    norm_epsilon: float = 1e-6
    use_bias: bool | tuple[str, ...] = False
    dropout_rate: float = dataclasses.field(default=0.0, metadata=macro("DROPOUT_RATE"))
    dtype: str = "bfloat16"
    scan_layers: bool = True
    remat_policy: str = "everything"

    def __post_init__(self):
        check_types(self)
        object.__setattr__(self, "mlp_activations", tuple(self.mlp_activations))
        object.__setattr__(self, "remat_policy", _REMAT_OF_T5X.get(self.remat_policy, self.remat_policy))
        positive(self, "vocab_size", "emb_dim", "num_heads", "num_kv_heads", "head_dim", "mlp_dim", "relpos_buckets")
        positive(self, "max_positions", "norm_epsilon", "rotary_theta")
        positive(self, "attention_logit_cap", "logit_cap", "longest_sequence")
        if self.positions == "learned" and self.max_positions is None:
            object.__setattr__(self, "max_positions", 512)
        one_of("TransformerConfig.architecture", self.architecture, ARCHITECTURES)
        for activation in self.mlp_activations:
            _check_activation(activation)
        _check_initializer(self.initializer)
        for field, allowed in _CHOICES.items():
            one_of(f"TransformerConfig.{field}", getattr(self, field), allowed)
        check_dropout(self.dropout_rate)
        _check_shapes(self)

    @property
    def has_encoder(self) -> bool:
        return self.architecture in ("encoder_decoder", "encoder")

    @property
    def has_decoder(self) -> bool:
        return self.architecture != "encoder"

    @property
    def kv_heads(self) -> int:
        return self.num_kv_heads or self.num_heads

    def has_bias(self, where: str) -> bool:
        """Whether the matrices of "qkv", "out" (of an attention) or "mlp" have biases."""
        return self.use_bias is True or (self.use_bias is not False and where in self.use_bias)

    @property
    def max_length(self) -> int | None:
        """Tokens that the model can tell the positions of; None where nothing limits them."""
        limits = [self.longest_sequence, self.max_positions if self.positions == "learned" else None]
        return min((limit for limit in limits if limit is not None), default=None)


_CHOICES = {
    "scaling": ("t5", "standard"),
    "positions": ("relative", "learned", "sinusoidal", "rotary", "none"),
    "relative_bias": ("shared", "per_layer"),
    "norm": ("rms", "layer"),
    "norm_position": ("pre", "post", "both"),
    "dtype": DTYPES,
    "remat_policy": REMAT_POLICIES,
}


def _check_activation(activation: str | Callable) -> None:
    if not callable(activation):
        one_of("An activation of TransformerConfig.mlp_activations", activation, ACTIVATION_FUNCTIONS)
        return
    name = getattr(activation, "__name__", repr(activation))
    given = jax.ShapeDtypeStruct((2, 3), jnp.bfloat16)
    try:
        result = jax.eval_shape(activation, given)
    except Exception as error:
        raise UserError(
            f"The activation {name} of TransformerConfig.mlp_activations fails on a bfloat16 array: {type(error).__name__}: "
            f"{str(error).splitlines()[0] if str(error) else ''}. In gin, write @{name} without parentheses."
        ) from error
    if (getattr(result, "shape", None), getattr(result, "dtype", None)) != (given.shape, given.dtype):
        raise UserError(
            f"The activation {name} of TransformerConfig.mlp_activations makes {shown(result)} of {shown(given)}; it must "
            "keep both."
        )


def _check_initializer(initializer: str | Callable | None) -> None:
    if initializer is None:
        return
    if not callable(initializer):
        one_of("TransformerConfig.initializer", initializer, INITIALIZERS)
        return
    name = getattr(initializer, "__name__", repr(initializer))
    result = tried(
        f"TransformerConfig.initializer fails: {name}",
        lambda: jax.eval_shape(lambda: initializer(jax.random.key(0), (3, 2), jnp.float32)),
    )
    if (getattr(result, "shape", None), getattr(result, "dtype", None)) != ((3, 2), jnp.float32):
        raise UserError(f"TransformerConfig.initializer {name} makes {shown(result)} for the shape (3, 2) and float32.")


def check_dropout(rate: float) -> None:
    if not 0.0 <= rate < 1.0:
        raise UserError(f"DROPOUT_RATE is {rate}; it must be at least 0 and below 1.")


def _check_shapes(c: TransformerShape) -> None:
    """Raises a `UserError` for sizes and choices that contradict each other."""
    if c.relpos_max_distance <= c.relpos_buckets // 2:
        raise UserError(
            f"TransformerConfig.relpos_max_distance is {c.relpos_max_distance}; it must exceed half of relpos_buckets, which "
            f"is {c.relpos_buckets}: each of these distances has a bucket of its own. T5 has 32 buckets up to distance 128."
        )
    for where in () if isinstance(c.use_bias, bool) else c.use_bias:
        one_of("TransformerConfig.use_bias", where, ("qkv", "out", "mlp"))
    if len(c.mlp_activations) not in (1, 2):
        raise UserError(
            f"TransformerConfig.mlp_activations is {c.mlp_activations}; give one name, or two for a gated MLP: "
            '("gelu", "linear").'
        )
    for stack, there in (("encoder", c.has_encoder), ("decoder", c.has_decoder)):
        layers = getattr(c, f"num_{stack}_layers")
        if there != (layers > 0):
            raise UserError(
                f"TransformerConfig.num_{stack}_layers is {layers}, but a model of architecture "
                f'"{c.architecture}" needs {"at least 1" if there else "0"}.'
            )
    if c.num_heads % c.kv_heads:
        raise UserError(
            f"TransformerConfig.num_kv_heads is {c.num_kv_heads}, which does not divide num_heads = {c.num_heads}; every head "
            "of keys and values serves the same number of queries."
        )
    if c.share_stacks and (c.architecture != "encoder_decoder" or c.num_encoder_layers != c.num_decoder_layers):
        raise UserError(
            "TransformerConfig.share_stacks gives an encoder the decoder's layers; it needs architecture "
            f'"encoder_decoder" and as many encoder as decoder layers, not "{c.architecture}" with {c.num_encoder_layers} and '
            f"{c.num_decoder_layers}."
        )
    if c.bidirectional_bias and (c.architecture != "prefix_decoder" or c.positions != "relative"):
        raise UserError(
            "TransformerConfig.bidirectional_bias is an option of a prefix decoder with relative positions; an encoder "
            f'always has bidirectional buckets and "{c.architecture}" decoders never do. Remove it.'
        )
    if c.positions == "rotary" and c.head_dim % 2:
        raise UserError(f"TransformerConfig.head_dim is {c.head_dim}; rotary positions turn pairs, so it must be even.")
    if c.positions != "rotary" and (c.rotary_scaling is not None or c.rotary_theta != 10_000.0):
        raise UserError(
            f'TransformerConfig.rotary_theta and rotary_scaling turn queries and keys, which positions = "{c.positions}" do '
            'not. Set TransformerConfig.positions = "rotary", or leave them out.'
        )
    if c.positions == "sinusoidal" and c.emb_dim % 2:
        raise UserError(f"TransformerConfig.emb_dim is {c.emb_dim}; sinusoidal positions come in pairs, so it must be even.")
