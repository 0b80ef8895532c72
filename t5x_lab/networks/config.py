"""The one dataclass that describes every transformer here: encoder-decoder, causal decoder, prefix decoder."""

import dataclasses

import jax
import jax.numpy as jnp

from t5x_lab.config.checks import check_types, positive
from t5x_lab.config.errors import UserError, one_of

ARCHITECTURES = ("encoder_decoder", "causal_decoder", "prefix_decoder")
ACTIVATIONS = {
    "gelu": jax.nn.gelu,  # the tanh approximation, as in T5 1.1
    "relu": jax.nn.relu,
    "silu": jax.nn.silu,
    "swish": jax.nn.silu,
    "tanh": jnp.tanh,
    "linear": lambda x: x,
}
DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16, "float16": jnp.float16}


@dataclasses.dataclass(frozen=True)
class TransformerConfig:
    """Shapes and choices of one transformer. Field names are T5X's `T5Config` where that has them.

    Attributes:
      architecture: "encoder_decoder"; "causal_decoder"; or "prefix_decoder", a decoder that sees its prefix
        (`decoder_causal_attention`) both ways. The two decoders have identical parameters.
      vocab_size: rows of the embedding table.
      emb_dim, num_heads, head_dim, mlp_dim: sizes; heads need not divide `emb_dim`.
      num_encoder_layers, num_decoder_layers: a decoder-only model has 0 encoder layers.
      mlp_activations: one name for a plain MLP; two, such as ("gelu", "linear"), for a gated one.
      logits_via_embedding: tied logits, divided by sqrt(emb_dim).
      relative_bias: "shared" by a stack (T5), or "per_layer" (T5X's scanned networks, Wang et al.'s decoders).
      bidirectional_bias: whether a prefix decoder's buckets tell left from right. False is T5X's and Wang et al.'s
        choice and keeps the weights interchangeable with a causal decoder's; True is Mesh TensorFlow's.
      dropout_rate: for embeddings, sub-layer outputs, attention weights and MLP activations.
      dtype: of activations. Parameters, softmax and logits are float32.
      scan_layers: run the layers as one scan (compile time independent of depth) or unrolled; same parameters.
      remat_policy: "none", "minimal" (keep the outputs of matrix products) or "full" (keep only layer boundaries).
    """

    architecture: str
    vocab_size: int
    emb_dim: int
    num_heads: int
    head_dim: int
    mlp_dim: int
    num_decoder_layers: int
    num_encoder_layers: int = 0
    mlp_activations: tuple[str, ...] = ("gelu", "linear")
    logits_via_embedding: bool = False
    relative_bias: str = "shared"
    bidirectional_bias: bool = False
    relpos_buckets: int = 32
    relpos_max_distance: int = 128
    dropout_rate: float = 0.0
    dtype: str = "bfloat16"
    scan_layers: bool = True
    remat_policy: str = "none"

    def __post_init__(self):
        check_types(self)
        object.__setattr__(self, "mlp_activations", tuple(self.mlp_activations))
        positive(self, "vocab_size", "emb_dim", "num_heads", "head_dim", "mlp_dim", "num_decoder_layers", "relpos_buckets")
        one_of("TransformerConfig.architecture", self.architecture, ARCHITECTURES)
        if self.relpos_max_distance <= self.relpos_buckets:
            raise UserError(
                f"TransformerConfig.relpos_max_distance is {self.relpos_max_distance}; it must exceed relpos_buckets, which is "
                f"{self.relpos_buckets}. T5 has 32 buckets up to distance 128."
            )
        if not self.mlp_activations:
            raise UserError(
                'TransformerConfig.mlp_activations is empty; give one name, or two for a gated MLP: ("gelu", "linear").'
            )
        for activation in self.mlp_activations:
            one_of("An activation of TransformerConfig.mlp_activations", activation, ACTIVATIONS)
        one_of("TransformerConfig.relative_bias", self.relative_bias, ("shared", "per_layer"))
        one_of("TransformerConfig.dtype", self.dtype, DTYPES)
        one_of("TransformerConfig.remat_policy", self.remat_policy, ("none", "minimal", "full"))
        if not 0.0 <= self.dropout_rate < 1.0:
            raise UserError(f"DROPOUT_RATE is {self.dropout_rate}; it must be at least 0 and below 1.")
        if self.has_encoder != (self.num_encoder_layers > 0):
            raise UserError(
                f"TransformerConfig.num_encoder_layers is {self.num_encoder_layers}, but a model of architecture "
                f'"{self.architecture}" needs {"at least 1" if self.has_encoder else "0"}.'
            )
        if self.bidirectional_bias and self.architecture != "prefix_decoder":
            raise UserError(
                "TransformerConfig.bidirectional_bias is an option of a prefix decoder; an encoder always has "
                f'bidirectional buckets and "{self.architecture}" decoders never do. Remove it.'
            )

    @property
    def has_encoder(self) -> bool:
        return self.architecture == "encoder_decoder"
