"""The model, its loss and its network."""

from t5x_lab.migration.includes import ONE_BEAM
from t5x_lab.migration.project import Context
from t5x_lab.migration.rules import names
from t5x_lab.migration.rules.data import vocabulary
from t5x_lab.migration.rules.optimizer import optimizer
from t5x_lab.migration.statements import Binding, MacroReference, Reference, references, render
from t5x_lab.migration.steps import DROPPED, KEPT, RENAMED, TO_DO, Rule, Step, configurable, dtype_as, or_macro, table, to


def _model(binding: Binding, context: Context) -> Step:
    value = binding.value
    name = value.name if isinstance(value, Reference) else ""
    if context.is_own(name):
        return Step(TO_DO, note="A model of the project's own: bind its network, docs/custom/network.md")
    decoding = (context.bindings[key] for key in context.bindings if key[1] in _DECODING)
    has_beams = configurable(value) == "EncoderDecoderModel" and not any(context.is_before(each, binding) for each in decoding)
    return Step(RENAMED, ("MODEL = @ModelConfig()", *_model_defaults(context), *(ONE_BEAM if has_beams else ())))


_DECODING = ("EncoderDecoderModel.decode_fn", "predict_batch_with_aux.num_decodes")


def _model_defaults(context: Context) -> list[str]:
    """Returns T5X's defaults of a model that binds them nowhere."""
    bound = lambda parameter: any(f"{kind}.{parameter}" in context.names for kind in _MODELS)
    if context.has_t5x_model:
        return []
    defaults = {
        "z_loss": "Z_LOSS = 0.0  # T5X's default",
        "loss_normalizing_factor": "LOSS_NORMALIZING_FACTOR = None  # the sum over tokens, T5X's default",
    }
    return [line for parameter, line in defaults.items() if not bound(parameter)]


def _module(binding: Binding, context: Context) -> Step:
    value = context.resolve(binding.value)
    name = configurable(value)
    if context.other_network:
        return Step(
            TO_DO, note=f"The network is {context.other_network}, which is not here: bind it with docs/custom/network.md"
        )
    if name in ("Transformer", "DecoderWrapper", "EncoderDecoder", "DecoderOnly") and not context.is_own(value.name):
        return Step(DROPPED, note="TransformerConfig is the network")
    if isinstance(value, MacroReference) and context.has_t5x_network:
        return Step(DROPPED, note="TransformerConfig is the network")
    if isinstance(value, Reference) and value.is_call and context.is_own(value.name):
        return _linen_network(binding, context)
    return Step(TO_DO, note="A network of the project's own: bind it with docs/custom/network.md")


def _linen_network(binding: Binding, context: Context) -> Step:
    """A Linen module of the project's own, which is called as T5X's models call it."""
    lines = ["ModelConfig.network = @LinenNetwork()", f"LinenNetwork.module = {render(binding.value)}"]
    if binding.name.startswith("Decoder"):
        is_prefix = context.value(_BIDIRECTIONAL) is True
        lines.append(f'LinenNetwork.architecture = "{"prefix" if is_prefix else "causal"}_decoder"')
    return Step(RENAMED, tuple(lines))


def _network_of_config(binding: Binding, context: Context) -> Step:
    """`Transformer.config = @network.T5Config()`: T5X's defaults of what nothing binds."""
    value = context.resolve(binding.value)
    if not isinstance(value, Reference) or context.is_own(value.name):
        return Step(TO_DO, note="A configuration of the project's own: bind it with docs/custom/network.md")
    is_decoder = binding.name.startswith("Decoder")
    if context.has_t5x_model:  # whose file binds the rest
        if is_decoder:
            return Step(RENAMED, (_decoder(_bidirectional_before(binding, context)),))
        return Step(DROPPED, note="TransformerConfig is the network")
    owner = value.name.rpartition(".")[2]
    lines = [_decoder(_bidirectional_before(binding, context)) if is_decoder else _ENCODER_DECODER]
    defaults = dict(_DECODER_DEFAULTS if is_decoder else _T5_DEFAULTS)
    if f"{owner}.dropout_rate" not in context.names:
        lines.append("DROPOUT_RATE = 0.1  # T5X's default")
    for name, default in defaults.items():
        if f"{owner}.{name}" not in context.names:
            lines.append(f"TransformerConfig.{_FIELDS.get(name, name)} = {render(default)}  # T5X's default")
    return Step(RENAMED, tuple(lines))


# Defaults of T5X's networks, without those that are the same here.
_DEFAULTS = {
    "emb_dim": 512, "num_heads": 8, "head_dim": 64, "mlp_dim": 2048, "mlp_activations": ("relu",), "dtype": "float32",
}  # fmt: skip
_T5_DEFAULTS = {**_DEFAULTS, "num_encoder_layers": 6, "num_decoder_layers": 6}
_DECODER_DEFAULTS = {**_DEFAULTS, "num_layers": 6}
_FIELDS = {"num_layers": "num_decoder_layers"}


def _field(name: str) -> Rule:
    """A field of T5Config, or of the decoder's TransformerConfig."""
    equivalent = f"TransformerConfig.{_FIELDS.get(name, name)}"

    def rule(binding: Binding, context: Context) -> Step:
        if name == "dropout_rate":
            return to("DROPOUT_RATE")(binding, context)
        if name == "dtype":
            return dtype_as(equivalent)(binding, context)
        return to(equivalent)(binding, context)

    return rule


def _layer(binding: Binding, context: Context) -> Step:
    """A layer of flaxformer's: dropped where the network is T5's."""
    if context.other_network:
        return Step(TO_DO, note=f"The network is {context.other_network}, which is not here")
    if renamed := names.RULES.get(("", binding.name)):
        return renamed(binding, context)
    is_literal = not references(binding.value) and binding.value not in (None, False)
    if is_literal and binding.parameter not in _WITHOUT_EFFECT:
        return Step(TO_DO, note="Layers are not bound separately: set a field of TransformerConfig if there is one")
    return Step(DROPPED, note=_ONE_NETWORK)


def _architecture(binding: Binding, context: Context) -> Step:
    """A macro of flaxformer's architecture files, whose value is a layer."""
    if context.other_network:
        return Step(TO_DO, note=f"The network is {context.other_network}, which is not here")
    used = references(binding.value)
    if any(isinstance(each, Reference) and context.is_own(each.name) for each in used):
        return Step(TO_DO, note="A network of the project's own: bind it with docs/custom/network.md")
    return Step(DROPPED, note=_ONE_NETWORK)


def _local_radius(binding: Binding, context: Context) -> Step:
    """A macro of flaxformer's files of LongT5: the positions on each side that the encoder attends to."""
    radius = context.resolve(binding.value)
    if not context.has_longt5:
        return Step(KEPT)
    return Step(RENAMED, (f"longt5/LayerKind.encoder_window = ({render(radius)}, {render(radius)})",))


def _tokens_per_block(binding: Binding, context: Context) -> Step:
    return to("TransformerConfig.global_block_size")(binding, context) if context.has_longt5 else Step(KEPT)


def _initializer(binding: Binding, context: Context) -> Step:
    """A parameter of flax's initializers, dropped with the values of T5's files."""
    value = context.resolve(binding.value)
    if isinstance(value, MacroReference) or value in _OF_T5.get(binding.name, ()):
        return Step(DROPPED, note="Matrices are initialized as in T5's files")
    return Step(TO_DO, note="Bind TransformerConfig.initializer for matrices that are not initialized as T5's")


def _bidirectional(binding: Binding, context: Context) -> Step:
    """The attention of a decoder of T5X's files. Other networks have it where they are bound."""
    config = context.bindings.get(("", "DecoderWrapper.config"))
    if (config and context.is_before(config, binding)) or (config is None and context.has_t5x_model):
        return Step(RENAMED, (_decoder(context.resolve(binding.value) is True),))
    return Step(DROPPED, note="TransformerConfig.architecture has it")


_BIDIRECTIONAL = "DecoderOnlyModel.inputs_bidirectional_attention"
_ENCODER_DECODER = 'TransformerConfig.architecture = "encoder_decoder"'


def _bidirectional_before(binding: Binding, context: Context) -> bool:
    """Returns whether a binding before another one makes the decoder a prefix decoder."""
    bidirectional = context.bindings.get(("", _BIDIRECTIONAL))
    return bidirectional is not None and context.is_before(bidirectional, binding) and context.value(_BIDIRECTIONAL) is True


def _decoder(is_prefix: bool) -> str:
    return f'TransformerConfig.architecture = "{"prefix" if is_prefix else "causal"}_decoder"'


def _converter(binding: Binding, context: Context) -> Step:
    if isinstance(binding.value, Reference) and context.is_own(binding.value.name):
        return Step(RENAMED, (f"DataConfig.converter = {render(Reference(binding.value.name, True))}",))
    if configurable(context.resolve(binding.value)).startswith("PassThrough"):
        return Step(TO_DO, note="Bind DataConfig.converter for examples that need no conversion (docs/custom/converter.md)")
    return Step(DROPPED, note="The features follow the architecture")


def _input_vocabulary(binding: Binding, context: Context) -> Step:
    of_outputs = context.value("EncoderDecoderModel.output_vocabulary")
    if context.is_from(binding.value, "VOCABULARY") or context.resolve(binding.value) == of_outputs:
        return Step(DROPPED, note="VOCABULARY is that of inputs too")
    return vocabulary(binding, context, "INPUT_VOCABULARY")


_OF_T5: dict[str, tuple] = {
    "normal.stddev": (1.0, 1e-6), "variance_scaling.scale": (1.0,), "variance_scaling.mode": ("fan_in", "fan_avg"),
    "variance_scaling.distribution": ("truncated_normal", "normal", "uniform"),
}  # fmt: skip
# Parameters of flaxformer's layers that do not change what they compute.
_WITHOUT_EFFECT = frozenset((
    "name", "dtype", "kernel_axis_names", "axis_name", "broadcast_dims", "cast_input_dtype", "one_hot", "attend_dtype",
    "broadcast_dropout", "activation_partitioning_dims",
))  # fmt: skip
_ONE_NETWORK = "Layers are not bound separately: the fields of TransformerConfig have what T5's files set"
_LAYERS = (
    "RelativePositionBiases", "Encoder", "Decoder", "EncoderDecoder", "EncoderLayer", "DecoderLayer", "DenseGeneral",
    "MultiHeadDotProductAttention", "Embed", "T5LayerNorm", "Dropout", "MlpBlock",
)  # fmt: skip
_MODELS = ("EncoderDecoderModel", "DecoderOnlyModel")
_NAMES_OF_FIELDS = (
    "vocab_size", "emb_dim", "num_heads", "num_encoder_layers", "num_decoder_layers", "num_layers", "head_dim",
    "mlp_dim", "mlp_activations", "dropout_rate", "logits_via_embedding", "dtype", "scan_layers", "remat_policy",
    "scale_attn_logits",
)  # fmt: skip


def _of_models(*parameters: str) -> str:
    return " ".join(f"{model}.{parameter}" for model in _MODELS for parameter in parameters)


RULES = table(
    ("MODEL", _model),
    ("train.model evaluate.model infer.model", or_macro("MODEL", _model)),
    (_of_models("module"), _module),
    (_of_models("output_vocabulary", "vocabulary"), or_macro("VOCABULARY", vocabulary)),
    (_of_models("input_vocabulary"), _input_vocabulary),
    (_of_models("optimizer_def"), or_macro("OPTIMIZER", optimizer)),
    (_of_models("feature_converter_cls"), _converter),
    (_BIDIRECTIONAL, _bidirectional),
    ("Transformer.config DecoderWrapper.config", _network_of_config),
    *((f"T5Config.{name} TransformerConfig.{name}", _field(name)) for name in _NAMES_OF_FIELDS),
    (" ".join(f"{layer}.*" for layer in _LAYERS), _layer),
    ("ARCHITECTURE BIAS_INIT DROPOUT_FACTORY", _architecture),
    ("normal.* variance_scaling.*", _initializer),
    ("LOCAL_RADIUS", _local_radius),
    ("TOKENS_PER_BLOCK", _tokens_per_block),
)
