"""Sizes and variants of the transformer."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

from t5x_lab.config.checks import check_positive, check_types
from t5x_lab.config.errors import UserError, check_choice
from t5x_lab.config.macros import macro
from t5x_lab.config.user_code import call_user_code, shown
from t5x_lab.networks.layer_kinds import LayerKind
from t5x_lab.networks.network import ARCHITECTURES
from t5x_lab.networks.rotary import RotaryScaling

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
# Activations of a layer that are saved for the backward pass, in addition to the layer's input; all others are recomputed.
# `heads`: queries, keys and values; `sublayers`: outputs of attention and MLP; `mlp`: hidden activations of the MLP.
REMAT_POLICIES: dict[str, tuple[str, ...] | None] = {
    "everything": None,
    "products": ("heads", "sublayers", "mlp"),
    "mlp": ("sublayers", "mlp"),
    "attention": ("heads", "sublayers"),
    "boundaries": (),
}
_T5X_REMAT_POLICIES = {"none": "everything", "minimal": "products", "full": "boundaries"}
DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16, "float16": jnp.float16}


@dataclasses.dataclass(frozen=True)
class EncoderShape:
    """Sizes of an encoder that differ from the decoder's, in `TransformerConfig.encoder`. None = as the decoder's."""

    emb_dim: int | None = None
    num_heads: int | None = None
    num_kv_heads: int | None = None
    head_dim: int | None = None
    mlp_dim: int | None = None
    query_pre_attn_scalar: float | None = None

    def __post_init__(self):
        check_types(self)
        check_positive(self, *(field.name for field in dataclasses.fields(self)))


@dataclasses.dataclass(frozen=True)
class TransformerShape:
    """Sizes and variants of a transformer. Field names are those of T5X's `T5Config` where it has them.

    Attributes:
      architecture: "encoder_decoder", "causal_decoder", "prefix_decoder" (bidirectional attention in the prefix, which
        `decoder_causal_attention` marks) or "encoder", which predicts tokens in place. Both decoders have the same parameters.
      vocab_size: V, the number of rows of the embedding table.
      emb_dim, num_heads, head_dim, mlp_dim: sizes. `emb_dim` need not be a multiple of `num_heads`.
      num_encoder_layers, num_decoder_layers: numbers of layers. 0 for a missing stack.
      num_kv_heads: number of key and value heads, each shared by num_heads / num_kv_heads query heads (Ainslie et al. 2023).
        None = num_heads.
      share_stacks: the encoder uses the decoder's layers, without cross-attention (Raffel et al., section 3.2.2).
      encoder: sizes of the encoder that differ from the decoder's (unbalanced stacks, Zhang et al. 2025). None = none.
      share_embeddings: encoder and decoder have one table of token embeddings. False = two; with logits_via_embedding, logits
        use the decoder's.
      merged_attention: cross-attention is part of the decoder's self-attention: one softmax over the decoder's positions and
        the encoder's output, whose keys and values are of the same projections (T5Gemma 2).
      rotary_cross_attention: rotary positions also between the decoder and the encoder's output. Positions go on from the
        encoder's last token to the decoder's first (RedLLM, Zhang et al. 2025). False: cross-attention has no positions.
      mlp_activations: one activation; or two, such as ("gelu", "linear"), for a gated MLP. Names of `ACTIVATION_FUNCTIONS` or
        elementwise functions.
      logits_via_embedding: logits use the transposed embedding table.
      scaling: "t5": kernels initialized by fan-in, embeddings N(0, 1), unscaled attention logits, tied logits divided by
        sqrt(emb_dim). "standard" (GPT, BERT, Llama): all matrices N(0, 0.02**2), attention logits divided by sqrt(head_dim),
        unscaled tied logits.
      initializer: initializer of all matrices except embedding tables, in place of that of `scaling`: a name in `INITIALIZERS`
        or a function (key, shape [inputs, outputs], dtype) -> array.
      positions: "relative" (T5's biases), "learned", "sinusoidal" (Vaswani et al. 2017), "rotary" (Su et al. 2021) or
        "none".
      relpos_buckets, relpos_max_distance: buckets of T5's relative biases. Distances from the maximum on share a bucket.
      relative_bias: "shared" in a stack (T5) or "per_layer" (T5X's scanned networks, the decoders of Wang et al.).
      bidirectional_bias: a prefix decoder has separate buckets for left and right. False, as in T5X and Wang et al., keeps the
        parameters interchangeable with a causal decoder's. True is as in Mesh TensorFlow.
      max_positions: size of the table of learned positions, 512 by default, which limits the sequence length. With rotary
        positions, the length the model was trained at, which does not limit it.
      rotary_theta, rotary_scaling: base of the wavelengths, and an optional `RotaryScaling`.
      layer_pattern: kinds of layers, such as a local and a global one, which repeat over the layers of each stack. () = all
        layers attend to all positions.
      global_block_size: tokens in a block, to whose sum the encoder's layers attend in addition to tokens (transient-global
        attention, LongT5, Guo et al. 2022). None = no blocks.
      qk_norm: RMS norm of queries and keys before the rotation (Henry et al. 2020): True for each head (Qwen 3, Gemma 3),
        "all_heads" for the heads of a layer together (OLMo 2).
      query_pre_attn_scalar: attention logits of the "standard" scaling are divided by its square root. None = head_dim.
      scale_attn_logits: attention logits of the "t5" scaling are divided by sqrt(head_dim) too (T5X's networks for GPUs).
      attention_logit_cap, logit_cap: c replaces logits x of attention or of the vocabulary by c * tanh(x / c) (Bello et al.
        2017; as in Gemma 2). None = no cap.
      scale_embeddings: multiply token embeddings by sqrt(emb_dim) (Vaswani et al. 2017, section 3.4).
      longest_sequence: maximum sequence length. None = limited by positions only.
      norm: "rms" (T5) or "layer" (with mean and bias).
      norm_position: "pre", x + f(norm(x)) with a final norm; "post", norm(x + f(x)) without one; "both", x + norm(f(norm(x)))
        with a final norm (Gemma 2); or "output", x + norm(f(x)) with a final norm (OLMo 2).
      norm_epsilon: epsilon added to the variance.
      use_bias: biases of all projections except the logits; or a tuple of "qkv" (as in Qwen 2), "out" and "mlp".
      dropout_rate: dropout rate of embeddings, sub-layer outputs, attention weights and MLP activations.
      dtype: dtype of activations. Parameters, softmax and logits are float32. "float16" is for inference only.
      scan_layers: run layers as one scan, with a compile time independent of depth, or unrolled. The parameters are the same.
      remat_policy: activations saved for the backward pass: "everything"; "products", outputs of all matrix products (T5X's
        "minimal"); "attention", those except the MLP's hidden activations; "mlp", those except queries, keys and values; or
        "boundaries", only layer inputs (T5X's "full"). Attention weights are always recomputed. T5X's names are accepted.
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
    encoder: EncoderShape | None = None
    share_embeddings: bool = True
    merged_attention: bool = False
    rotary_cross_attention: bool = False
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
    layer_pattern: tuple[LayerKind, ...] = ()
    global_block_size: int | None = None
    qk_norm: bool | str = False
    query_pre_attn_scalar: float | None = None
    scale_attn_logits: bool = False
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
        object.__setattr__(self, "layer_pattern", tuple(self.layer_pattern))
        object.__setattr__(self, "remat_policy", _T5X_REMAT_POLICIES.get(self.remat_policy, self.remat_policy))
        check_positive(self, "vocab_size", "emb_dim", "num_heads", "num_kv_heads", "head_dim", "mlp_dim", "relpos_buckets")
        check_positive(self, "max_positions", "norm_epsilon", "rotary_theta", "query_pre_attn_scalar")
        check_positive(self, "attention_logit_cap", "logit_cap", "longest_sequence", "global_block_size")
        if self.positions == "learned" and self.max_positions is None:
            object.__setattr__(self, "max_positions", 512)
        check_choice("TransformerConfig.architecture", self.architecture, ARCHITECTURES)
        for activation in self.mlp_activations:
            _check_activation(activation)
        _check_initializer(self.initializer)
        for field, allowed in _CHOICES.items():
            check_choice(f"TransformerConfig.{field}", getattr(self, field), allowed)
        if isinstance(self.qk_norm, str):
            check_choice("TransformerConfig.qk_norm", self.qk_norm, ("all_heads",))
        check_dropout(self.dropout_rate)
        _check_shapes(self)
        _check_two_stacks(self)
        _check_positions(self)

    @property
    def has_encoder(self) -> bool:
        return self.architecture in ("encoder_decoder", "encoder")

    @property
    def has_decoder(self) -> bool:
        return self.architecture != "encoder"

    @property
    def encoder_shape(self) -> "TransformerShape":
        """Sizes and variants of the encoder's layers."""
        if self.encoder is None:
            return self
        sizes = {name: size for name, size in dataclasses.asdict(self.encoder).items() if size is not None}
        try:
            return dataclasses.replace(self, encoder=None, **sizes)
        except UserError as error:
            described = ", ".join(f"{name} = {size}" for name, size in sizes.items())
            raise UserError(f"With EncoderShape's {described}: {error.sentence}") from error

    @property
    def decoder_shape(self) -> "TransformerShape":
        """Sizes and variants of the decoder's layers."""
        return self if self.global_block_size is None else dataclasses.replace(self, global_block_size=None)

    @property
    def kinds(self) -> tuple[LayerKind, ...]:
        """The different kinds of layers."""
        return tuple(dict.fromkeys(self.layer_pattern)) or (LayerKind(),)

    def kinds_of_layers(self, num_layers: int) -> list[int]:
        """Returns the index in `kinds` of each layer of a stack."""
        pattern = self.layer_pattern or self.kinds
        return [self.kinds.index(pattern[layer % len(pattern)]) for layer in range(num_layers)]

    @property
    def kv_heads(self) -> int:
        return self.num_kv_heads or self.num_heads

    def has_bias(self, where: str) -> bool:
        """Returns whether the "qkv", "out" or "mlp" projections have biases."""
        return self.use_bias is True or (self.use_bias is not False and where in self.use_bias)

    @property
    def max_length(self) -> int | None:
        """Maximum sequence length in tokens. None = unlimited."""
        limits = [self.longest_sequence, self.max_positions if self.positions == "learned" else None]
        return min((limit for limit in limits if limit is not None), default=None)


_CHOICES = {
    "scaling": ("t5", "standard"),
    "positions": ("relative", "learned", "sinusoidal", "rotary", "none"),
    "relative_bias": ("shared", "per_layer"),
    "norm": ("rms", "layer"),
    "norm_position": ("pre", "post", "both", "output"),
    "dtype": DTYPES,
    "remat_policy": REMAT_POLICIES,
}


def _check_activation(activation: str | Callable) -> None:
    if not callable(activation):
        check_choice("An activation of TransformerConfig.mlp_activations", activation, ACTIVATION_FUNCTIONS)
        return
    name = getattr(activation, "__name__", repr(activation))
    argument = jax.ShapeDtypeStruct((2, 3), jnp.bfloat16)
    try:
        result = jax.eval_shape(activation, argument)
    except Exception as error:
        raise UserError(
            f"The activation {name} of TransformerConfig.mlp_activations fails on a bfloat16 array: {type(error).__name__}: "
            f"{str(error).splitlines()[0] if str(error) else ''}. In gin, bind it without parentheses: @{name}."
        ) from error
    if (getattr(result, "shape", None), getattr(result, "dtype", None)) != (argument.shape, argument.dtype):
        raise UserError(
            f"The activation {name} of TransformerConfig.mlp_activations returns {shown(result)} for {shown(argument)}. It "
            "must keep shape and dtype."
        )


def _check_initializer(initializer: str | Callable | None) -> None:
    if initializer is None:
        return
    if not callable(initializer):
        check_choice("TransformerConfig.initializer", initializer, INITIALIZERS)
        return
    name = getattr(initializer, "__name__", repr(initializer))
    result = call_user_code(
        f"TransformerConfig.initializer fails: {name}",
        lambda: jax.eval_shape(lambda: initializer(jax.random.key(0), (3, 2), jnp.float32)),
    )
    if (getattr(result, "shape", None), getattr(result, "dtype", None)) != ((3, 2), jnp.float32):
        raise UserError(
            f"TransformerConfig.initializer {name} returns {shown(result)} for shape (3, 2) and float32. It must return an "
            "array of that shape and dtype."
        )


def check_dropout(rate: float) -> None:
    if not 0.0 <= rate < 1.0:
        raise UserError(f"DROPOUT_RATE is {rate}. It must be at least 0 and below 1.")


def _check_shapes(c: TransformerShape) -> None:
    """Raises a `UserError` for incompatible sizes and variants."""
    for where in () if isinstance(c.use_bias, bool) else c.use_bias:
        check_choice("TransformerConfig.use_bias", where, ("qkv", "out", "mlp"))
    if len(c.mlp_activations) not in (1, 2):
        raise UserError(
            f"TransformerConfig.mlp_activations is {c.mlp_activations}. Set one activation, or two for a gated MLP: "
            '("gelu", "linear").'
        )
    for stack, exists in (("encoder", c.has_encoder), ("decoder", c.has_decoder)):
        layers = getattr(c, f"num_{stack}_layers")
        if exists != (layers > 0):
            raise UserError(
                f"TransformerConfig.num_{stack}_layers is {layers}, but a model of architecture "
                f'"{c.architecture}" needs {"at least 1" if exists else "0"}.'
            )
    if c.num_heads % c.kv_heads:
        raise UserError(
            f"TransformerConfig.num_kv_heads is {c.num_kv_heads}, but num_heads = {c.num_heads} is not a multiple of it. "
            "Every key and value head serves the same number of query heads."
        )
    if c.query_pre_attn_scalar is not None and c.scaling == "t5":
        raise UserError(
            'TransformerConfig.query_pre_attn_scalar has no effect with scaling = "t5", which does not scale attention logits. '
            "Remove it."
        )
    if c.scale_attn_logits and c.scaling == "standard":
        raise UserError(
            'TransformerConfig.scale_attn_logits has no effect with scaling = "standard", which scales attention logits. '
            "Remove it."
        )


def _check_two_stacks(c: TransformerShape) -> None:
    """Raises a `UserError` for an encoder and a decoder that do not go together."""
    if c.architecture != "encoder_decoder" and (c.encoder is not None or not c.share_embeddings or c.merged_attention):
        raise UserError(
            "TransformerConfig.encoder, merged_attention and share_embeddings = False are for encoder-decoders, not for "
            f'architecture "{c.architecture}". Remove them.'
        )
    if c.merged_attention and c.encoder_shape.emb_dim != c.emb_dim:
        raise UserError(
            "TransformerConfig.merged_attention has the same projections for the encoder's output, but the encoder has emb_dim "
            f"{c.encoder_shape.emb_dim} and the decoder {c.emb_dim}. Make them equal."
        )
    if c.encoder is not None:
        if c.share_stacks:
            raise UserError("TransformerConfig.encoder has sizes of its own, which share_stacks does not allow. Remove one.")
        width = c.encoder_shape.emb_dim
        if width != c.emb_dim and (c.share_embeddings or c.positions == "learned"):
            raise UserError(
                f"The encoder has emb_dim {width} and the decoder {c.emb_dim}. Set TransformerConfig.share_embeddings = "
                'False, and positions other than "learned".'
            )
    if c.global_block_size is not None and (
        not c.has_encoder or c.share_stacks or c.positions != "relative" or c.relative_bias != "shared"
    ):
        raise UserError(
            "TransformerConfig.global_block_size is for encoders with their own layers, relative positions and a shared bias, "
            f'not for architecture "{c.architecture}" with positions = "{c.positions}", relative_bias = "{c.relative_bias}" '
            f"and share_stacks = {c.share_stacks}. Remove it."
        )
    if c.share_stacks and (c.architecture != "encoder_decoder" or c.num_encoder_layers != c.num_decoder_layers):
        raise UserError(
            'TransformerConfig.share_stacks needs architecture "encoder_decoder" with equal numbers of encoder and decoder '
            f'layers, not "{c.architecture}" with {c.num_encoder_layers} and {c.num_decoder_layers}.'
        )


def _check_positions(c: TransformerShape) -> None:
    """Raises a `UserError` for settings of positions that contradict each other or have no effect."""
    if c.relpos_max_distance <= c.relpos_buckets // 2:
        raise UserError(
            f"TransformerConfig.relpos_max_distance is {c.relpos_max_distance}. It must exceed half of relpos_buckets, which "
            f"is {c.relpos_buckets}, because each of these distances has its own bucket. T5 uses 32 buckets and distance 128."
        )
    if c.bidirectional_bias and (c.architecture != "prefix_decoder" or c.positions != "relative"):
        raise UserError(
            "TransformerConfig.bidirectional_bias applies only to a prefix decoder with relative positions, not to "
            "architecture "
            f'"{c.architecture}" with positions = "{c.positions}". Remove it.'
        )
    if c.rotary_cross_attention and (c.architecture != "encoder_decoder" or c.positions != "rotary"):
        raise UserError(
            "TransformerConfig.rotary_cross_attention is for encoder-decoders with rotary positions, not for architecture "
            f'"{c.architecture}" with positions = "{c.positions}". Remove it.'
        )
    if c.positions == "rotary" and c.head_dim % 2:
        raise UserError(f"TransformerConfig.head_dim is {c.head_dim}. It must be even for rotary positions.")
    for kind in c.layer_pattern:
        if not isinstance(kind, LayerKind):
            raise UserError(
                f"TransformerConfig.layer_pattern has {kind!r}. Its entries must be kinds of layers, such as "
                "(@local/LayerKind(), @LayerKind()) with local/LayerKind.window = 1024."
            )
        if c.positions != "rotary" and (kind.rotary_theta is not None or not kind.rotary):
            raise UserError(
                f'LayerKind.rotary and rotary_theta have no effect with TransformerConfig.positions = "{c.positions}". Set '
                'TransformerConfig.positions = "rotary", or remove them.'
            )
    if c.positions != "rotary" and (c.rotary_scaling is not None or c.rotary_theta != 10_000.0):
        raise UserError(
            f'TransformerConfig.rotary_theta and rotary_scaling have no effect with positions = "{c.positions}". Set '
            'TransformerConfig.positions = "rotary", or remove them.'
        )
    if c.positions == "sinusoidal" and c.emb_dim % 2:
        raise UserError(f"TransformerConfig.emb_dim is {c.emb_dim}. It must be even for sinusoidal positions.")
