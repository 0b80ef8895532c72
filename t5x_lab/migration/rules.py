"""Rules for what each binding of T5X becomes.

A rule is a function (binding, context) -> `Step`. Names without a rule are the project's own and stay as they are, unless
they are of a module of T5X's, where a person has to decide.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from t5x_lab.config.t5x_names import hint
from t5x_lab.migration.includes import CARRY, KEEP_ALL
from t5x_lab.migration.project import SAME_MACROS, T5X_MODULES, Context
from t5x_lab.migration.statements import Binding, MacroReference, Reference, binding_text, references, render

KEPT, RENAMED, DROPPED, TO_DO = "kept", "renamed", "dropped", "to do"


class Step(NamedTuple):
    """The translation of a statement.

    Attributes:
      status: one of `KEPT`, `RENAMED`, `DROPPED`, `TO_DO`.
      lines: gin lines.
      note: why, or what to do: a sentence without its full stop, "" if it is plain.
    """

    status: str
    lines: tuple[str, ...] = ()
    note: str = ""


Rule = Callable[[Binding, Context], Step]


def translate(binding: Binding, context: Context) -> Step:
    """Returns what a binding becomes."""
    if binding.parameter and context.is_own(binding.selector):
        return _keep(binding, context)
    scope, rule = binding.scope, RULES.get((binding.scope, binding.name))
    if binding.name.startswith("DatasetConfig."):
        scope = scope or ("infer_eval" if context.is_evaluation else "train")
        rule = RULES.get((scope, binding.name)) or (RULES.get(("", binding.name)) if scope == "train" else None)
        if rule is None:
            return Step(TO_DO, note="Bind it for an evaluation in EVALS, such as mine/MetricsEvaluation.split")
    elif scope and binding.parameter and RULES.get(("", binding.name)):
        return Step(TO_DO, note="Its scope is not translated")
    if rule is None and binding.parameter:
        rule = RULES.get(("", f"{binding.selector.rpartition('.')[2]}.*"))
    if rule is not None:
        return rule(binding, context)
    if binding.parameter and _is_of_t5x(binding, context):
        of_t5x = hint(f"{binding.selector}.{binding.parameter}").strip() or "It has no counterpart"
        return Step(TO_DO, note=of_t5x.rstrip("."))
    return _keep(binding, context)


def _is_of_t5x(binding: Binding, context: Context) -> bool:
    module = context.module_of(binding.selector).split(".")[0]
    return module in T5X_MODULES or bool(hint(f"{binding.selector}.{binding.parameter}"))


def _keep(binding: Binding, context: Context) -> Step:
    """Keeps a binding of the project's, with the values of macros that have other names here."""
    if unknown := _own_references(binding.value, context):
        return Step(TO_DO, note=f"{unknown} is not known here")
    macros = [each for each in references(binding.value) if isinstance(each, MacroReference)]
    values = {each: context.resolve(each) for each in macros if _translated_macro(each, context)}
    if not values:
        return Step(KEPT)
    text = binding_text(binding)
    for macro, value in values.items():
        text = text.replace(render(macro), render(value))
    return Step(RENAMED, (text,))


def _own_references(value: Any, context: Context) -> str | None:
    """Returns a reference in a value to a configurable of T5X's that has no counterpart under its name."""
    for reference in references(value):
        selector = reference.name.rpartition("/")[2]
        if isinstance(reference, Reference) and context.module_of(selector).split(".")[0] in T5X_MODULES:
            return f"@{reference.name}"
    return None


# ---- kinds of rules


def to(name: str, *same: Any, note: str = "") -> Rule:
    """Returns the rule of a binding with the same value under another name.

    Args:
      name: the name here.
      same: values that are the default here, or that mean the same as no binding.
      note: what is different.
    """

    def rule(binding: Binding, context: Context) -> Step:
        value = binding.value
        if isinstance(value, MacroReference) and value.name == name:
            return Step(DROPPED, note=f"{name} sets it")
        if isinstance(value, MacroReference) and (macro := _translated_macro(value, context)):
            if macro.status == DROPPED or any(line.startswith(f"{name} = ") for line in macro.lines):
                return Step(DROPPED, note=f"{value.name} sets it")
            value = context.resolve(value)
        resolved = context.resolve(value)
        is_same = any(resolved is each or (resolved == each and type(resolved) is type(each)) for each in same)
        if is_same and (resolved is None or not context.differs(binding)):
            return Step(DROPPED, note="That is the default here")
        if unknown := _own_references(value, context):
            return Step(TO_DO, note=f"{unknown} is not known here")
        line = f"{name} = {render(value)}"
        status = KEPT if line == binding.text.strip() else RENAMED
        return Step(status, (line,), note)

    return rule


def _translated_macro(reference: MacroReference, context: Context) -> Step | None:
    """Returns what a macro becomes that T5X's files define and that is not one here; None for another."""
    rule, binding = RULES.get(("", reference.name)), context.bindings.get(("", reference.name))
    return rule(binding, context) if rule and binding and reference.name not in SAME_MACROS else None


def gone(why: str) -> Rule:
    """Returns the rule of a binding that needs no counterpart."""
    return lambda binding, context: Step(DROPPED, note=why)


def decide(advice: str) -> Rule:
    """Returns the rule of a binding for which a person has to decide."""
    return lambda binding, context: Step(TO_DO, note=advice)


def if_is(*plain: Any, then: str, otherwise: str) -> Rule:
    """Returns the rule of a binding that needs no counterpart with some values. Otherwise a person has to decide."""

    def rule(binding: Binding, context: Context) -> Step:
        value = context.resolve(binding.value)
        name = value.name.rpartition(".")[2] if isinstance(value, Reference) else value
        return Step(DROPPED, note=then) if any(name == each for each in plain) else Step(TO_DO, note=otherwise)

    return rule


# ---- single rules


def _optimizer(binding: Binding, context: Context) -> Step:
    value = binding.value
    if not isinstance(value, Reference):
        return Step(KEPT)
    name = value.name.rpartition("/")[2]
    if context.is_own(name):
        return Step(KEPT)
    equivalent = {"Adafactor": "Adafactor", "adamw": "AdamW", "lion": "Lion", "sgd": "Sgd"}.get(name.rpartition(".")[2])
    if equivalent == "Adafactor" or (equivalent and value.is_call):
        return Step(RENAMED, (f"OPTIMIZER = @{equivalent}()", *_optax_defaults(equivalent, None, context)))
    if name.rpartition(".")[2] == "chain":
        return _chain(context)
    return Step(TO_DO, note=f"Choose an optimizer in place of @{name} (docs/custom/optimizer.md)")


def _chain(context: Context) -> Step:
    """optax's chain of clipping and one optimizer."""
    transformations = context.value("chain.transformations") or []
    names = [each.name.rpartition(".")[2] for each in transformations if isinstance(each, Reference)]
    equivalent = [{"adamw": "AdamW", "lion": "Lion", "sgd": "Sgd"}[name] for name in names if name in ("adamw", "lion", "sgd")]
    others = [name for name in names if name not in ("adamw", "lion", "sgd", "clip_by_global_norm")]
    if len(equivalent) != 1:
        return Step(TO_DO, note="Choose an optimizer in place of the chain of optax (docs/custom/optimizer.md)")
    norm = context.value("clip_by_global_norm.max_norm") if "clip_by_global_norm" in names else None
    lines = [f"OPTIMIZER = @{equivalent[0]}()", *_optax_defaults(equivalent[0], norm, context)]
    if others:
        note = "It clips each element of the gradient, which no optimizer here does; clip_global_norm limits its norm"
        return Step(TO_DO, tuple(lines), note if others == ["clip"] else f"{', '.join(others)} has no counterpart")
    return Step(RENAMED, tuple(lines))


def _optax_defaults(name: str, norm: float | None, context: Context) -> list[str]:
    """Returns the clipping of an optimizer, and optax's defaults that differ here."""
    if name == "Adafactor":
        return []
    decay = "AdamW.weight_decay = 0.0001  # optax's default"
    lines = [decay] if name == "AdamW" and "adamw.weight_decay" not in context.names else []
    return [f"{name}.clip_global_norm = {render(norm)}", *lines]


def _learning_rate_of(owner: str) -> Rule:
    """A schedule, or a number, as the learning rate of an optimizer of optax."""

    def rule(binding: Binding, context: Context) -> Step:
        value = context.resolve(binding.value)
        if isinstance(value, int | float):
            scoped = f"{owner.lower()}/LearningRate"  # a run file may bind the schedule of the trainer
            bind = (f"{owner}.learning_rate = @{scoped}()", f'{scoped}.factors = "constant"')
            return Step(RENAMED, (*bind, f"{scoped}.base_learning_rate = {render(value)}"))
        name = value.name.rpartition(".")[2] if isinstance(value, Reference) else ""
        if name == "create_learning_rate_scheduler":
            return Step(DROPPED, note="@LearningRate() is the schedule of every optimizer")
        if name == "warmup_cosine_decay_schedule":
            return Step(RENAMED, (f"{owner}.learning_rate = @CosineDecay()",))
        if isinstance(value, Reference) and context.is_own(value.name):
            return Step(RENAMED, (f"{owner}.learning_rate = {render(value)}",))
        return Step(TO_DO, note=f"Bind a schedule to {owner}.learning_rate (docs/custom/schedule.md)")

    return rule


def _schedule(binding: Binding, context: Context) -> Step:
    value = context.resolve(binding.value)
    name = value.name.rpartition(".")[2] if isinstance(value, Reference) else ""
    if name and context.is_own(value.name):
        return Step(RENAMED, (f"LEARNING_RATE = {render(value)}",))
    if name == "create_learning_rate_scheduler":
        return Step(DROPPED, note="@LearningRate() is the schedule of the run")
    return Step(TO_DO, note="Bind LEARNING_RATE to a schedule (docs/custom/schedule.md)")


def _vocabulary(binding: Binding, context: Context) -> Step:
    value = binding.value
    name = value.name.rpartition(".")[2] if isinstance(value, Reference) else ""
    if name in ("SentencePieceVocabulary", "ByteVocabulary") and not context.is_own(value.name):
        lines = [f"VOCABULARY = @{name}()"]
        if "SentencePieceVocabulary.extra_ids" not in context.names and name == "SentencePieceVocabulary":
            lines.append("SentencePieceVocabulary.extra_ids = 0  # SeqIO's default")
        if "ByteVocabulary.extra_ids" not in context.names and name == "ByteVocabulary":
            lines.append("ByteVocabulary.extra_ids = 0  # SeqIO's default")
        return Step(RENAMED, tuple(lines))
    return (
        Step(KEPT) if name and context.is_own(value.name) else Step(TO_DO, note="Bind @SentencePieceVocabulary() or your own")
    )


def _model(binding: Binding, context: Context) -> Step:
    value = binding.value
    name = value.name if isinstance(value, Reference) else ""
    if context.is_own(name):
        return Step(TO_DO, note="A model of the project's own: bind its network, docs/custom/network.md")
    return Step(RENAMED, ("MODEL = @ModelConfig()", *_model_defaults(context)))


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
    name = value.name.rpartition(".")[2] if isinstance(value, Reference) else ""
    if context.other_network:
        return Step(
            TO_DO, note=f"The network is {context.other_network}, which is not here: bind it with docs/custom/network.md"
        )
    if name in ("Transformer", "DecoderWrapper", "EncoderDecoder", "DecoderOnly") and not context.is_own(value.name):
        return Step(DROPPED, note="TransformerConfig is the network")
    return Step(TO_DO, note="A network of the project's own: bind it with docs/custom/network.md")


def _network_of_config(binding: Binding, context: Context) -> Step:
    """`Transformer.config = @network.T5Config()`: T5X's defaults of what nothing binds."""
    value = context.resolve(binding.value)
    if not isinstance(value, Reference) or context.is_own(value.name):
        return Step(TO_DO, note="A configuration of the project's own: bind it with docs/custom/network.md")
    is_decoder = binding.name.startswith("Decoder")
    owner = value.name.rpartition(".")[2]
    lines = [] if is_decoder else ['TransformerConfig.architecture = "encoder_decoder"']
    if is_decoder:
        is_prefix = context.value("DecoderOnlyModel.inputs_bidirectional_attention") is True
        lines = [f'TransformerConfig.architecture = "{"prefix" if is_prefix else "causal"}_decoder"']
    defaults = dict(_DECODER_DEFAULTS if is_decoder else _T5_DEFAULTS)
    if f"{owner}.dropout_rate" not in context.names:
        lines.append("DROPOUT_RATE = 0.1  # T5X's default")
    for name, default in defaults.items():
        if f"{owner}.{name}" not in context.names:
            lines.append(f"TransformerConfig.{_FIELDS.get(name, name)} = {render(default)}  # T5X's default")
    return Step(RENAMED, tuple(lines))


# Defaults of T5X's networks, without those that are the same here.
_T5_DEFAULTS = {
    "emb_dim": 512, "num_heads": 8, "num_encoder_layers": 6, "num_decoder_layers": 6, "head_dim": 64, "mlp_dim": 2048,
    "mlp_activations": ("relu",), "dtype": "float32",
}  # fmt: skip
_DECODER_DEFAULTS = {
    "emb_dim": 512, "num_heads": 8, "num_layers": 6, "head_dim": 64, "mlp_dim": 2048, "mlp_activations": ("relu",),
    "dtype": "float32",
}  # fmt: skip
_FIELDS = {"num_layers": "num_decoder_layers"}


def _dtype_as(name: str) -> Rule:
    """A dtype, as text or as `@jax.numpy.bfloat16`."""

    def rule(binding: Binding, context: Context) -> Step:
        value = context.resolve(binding.value)
        return Step(RENAMED, (f"{name} = {render(value.name.rpartition('.')[2] if isinstance(value, Reference) else value)}",))

    return rule


def _or_macro(name: str, otherwise: Rule) -> Rule:
    """Returns the rule of a binding that is usually the macro `name`, and else what the macro could be."""

    def rule(binding: Binding, context: Context) -> Step:
        return (to(name) if isinstance(binding.value, MacroReference) else otherwise)(binding, context)

    return rule


def _field(name: str) -> Rule:
    """A field of T5Config, or of the decoder's TransformerConfig."""
    equivalent = f"TransformerConfig.{_FIELDS.get(name, name)}"

    def rule(binding: Binding, context: Context) -> Step:
        if context.is_own(binding.selector):
            return Step(KEPT)
        if name == "dropout_rate":
            return to("DROPOUT_RATE")(binding, context)
        if name == "dtype":
            return _dtype_as(equivalent)(binding, context)
        return to(equivalent)(binding, context)

    return rule


def _partitions(binding: Binding, context: Context) -> Step:
    value = context.resolve(binding.value)
    if isinstance(value, tuple | list) and all(isinstance(each, int) for each in value):
        value = math.prod(value)
    if value == 1 and context.differs(binding):
        return Step(RENAMED, ('MESH = "data=-1"',))
    if value in (None, 1):
        return Step(DROPPED, note="Every device has the whole model, as by default here")
    if isinstance(value, int):
        return Step(RENAMED, (f'MESH = "data=-1,tensor={value}"',))
    return Step(TO_DO, note='Set MESH = "data=-1,tensor=N" for N partitions')


def _microbatches(binding: Binding, context: Context) -> Step:
    return to("MICROBATCHES", None)(binding, context)


def _batch_size(binding: Binding, context: Context) -> Step:
    """The batch size, and as many shards of the data as divide it."""
    size, step = context.resolve(binding.value), to("BATCH_SIZE")(binding, context)
    if step.status == DROPPED or not isinstance(size, int) or size % DATA_SHARDS == 0:
        return step
    return Step(RENAMED, (*step.lines, f"DATA_SHARDS = {math.gcd(size, DATA_SHARDS)}  # it must divide BATCH_SIZE"))


def _module_to_import(binding: Binding, context: Context) -> Step:
    value = context.resolve(binding.value)
    if isinstance(value, str):
        return Step(RENAMED, (f"import {value}",))
    return Step(DROPPED, note="Import the module of the tasks in this file: import my_tasks")


def _restore_mode(binding: Binding, context: Context) -> Step:
    value = context.resolve(binding.value)
    if value in ("specific", "latest"):
        return Step(DROPPED, note="A run directory gives its latest checkpoint, a path with a step that step")
    return Step(TO_DO, note="Call t5x_lab eval --step=all for all checkpoints of a run")


def _restored_path(binding: Binding, context: Context) -> Step:
    """The checkpoint to start from, whose optimizer and step T5X restores too."""
    if context.resolve(binding.value) in (None, "", [], ()):
        return Step(DROPPED, note="That is the default here")
    return Step(RENAMED, (*to("INITIAL_CHECKPOINT_PATH")(binding, context).lines, CARRY))


def _period(binding: Binding, context: Context) -> Step:
    step = to("CHECKPOINT_PERIOD")(binding, context)
    if "SaveCheckpointConfig.keep" in context.names or context.has_t5x_run:
        return step
    return Step(RENAMED, (*step.lines, KEEP_ALL))


def _fallback(binding: Binding, context: Context) -> Step:
    if context.resolve(binding.value) is True:
        return Step(RENAMED, ("RestoreCheckpointConfig.strict = False",), "Parameters that the checkpoint lacks are fresh")
    return Step(DROPPED, note="That is the default here")


def _assignment_map(binding: Binding, context: Context) -> Step:
    lines = (f"RestoreCheckpointConfig.assignment_map = {render(binding.value)}",)
    return Step(TO_DO, lines, "Names of parameters differ (docs/from_t5x.md): t5x_lab inspect lists them")


def _sampling(field: str, partner: str, default: str) -> Rule:
    """A parameter of T5X's sampling, with the default of the other one if nothing binds it."""

    def rule(binding: Binding, context: Context) -> Step:
        step = to(f"SamplingConfig.{field}")(binding, context)
        lines = () if f"temperature_sample.{partner}" in context.names else (f"{default}  # T5X's default",)
        return Step(RENAMED, (*step.lines, *lines), step.note)

    return rule


def _beams(binding: Binding, context: Context) -> Step:
    value = context.resolve(binding.value)
    return Step(RENAMED, ("MetricsEvaluation.decoding = @BeamConfig()", f"BeamConfig.size = {render(value)}"))


def _dataset(scope: str, owner: str, parameter: str, macro: str) -> Rule:
    """A setting of the data of an evaluation, which are those of training unless they differ."""

    def rule(binding: Binding, context: Context) -> Step:
        value = context.resolve(binding.value)
        if binding.name == "DatasetConfig.task_feature_lengths" and value is None:
            return (
                Step(RENAMED, (f"{owner}.truncate_inputs = None",)) if scope == "infer_eval" else Step(DROPPED, note=_LIBRARY)
            )
        of_training = context.value(f"DatasetConfig.{binding.parameter}", "train")
        is_macro = isinstance(binding.value, MacroReference) and binding.value.name == macro
        if of_training == value or (of_training is None and is_macro):
            return Step(DROPPED, note="That of training")
        return Step(RENAMED, (f"{owner}.{parameter} = {render(binding.value)}",))

    return rule


def _evaluated(owner: str) -> Rule:
    """`train.infer_eval_dataset_cfg` and `train.train_eval_dataset_cfg`."""

    def rule(binding: Binding, context: Context) -> Step:
        is_off = context.resolve(binding.value) is None
        if owner == "infer":
            return Step(RENAMED, (f"INFER_EVAL_PERIOD = {'None' if is_off else '%EVAL_PERIOD'}",))
        if is_off:
            return Step(RENAMED, ("EVALS = (@infer/MetricsEvaluation(),)",))
        return Step(DROPPED, note="The loss is evaluated every EVAL_PERIOD steps")

    return rule


def _schedule_factor(binding: Binding, context: Context) -> Step:
    """The first of the parameters of T5X's schedule that is bound also writes its defaults that differ here."""
    parameter = binding.parameter
    lines = [f"LearningRate.{parameter} = {render(binding.value)}"]
    prefix = "create_learning_rate_scheduler."
    bound = [name for _, name in context.bindings if name.startswith(prefix)]
    if bound and bound[0] == binding.name and not context.has_t5x_run:
        lines += [
            f"LearningRate.{name} = {render(value)}  # T5X's default"
            for name, value in _SCHEDULE_DEFAULTS.items()
            if f"{prefix}{name}" not in context.names
        ]
    return Step(RENAMED, tuple(lines))


DATA_SHARDS = 4  # the default of the macro
_SCHEDULE_DEFAULTS = {"factors": "constant * linear_warmup * rsqrt_decay", "base_learning_rate": 0.5, "warmup_steps": 1000}
_MODELS = ("EncoderDecoderModel", "DecoderOnlyModel")
_DATASETS = ("train", "train_eval", "infer_eval")
_LIBRARY = "The library does this itself"
_COMMAND = "A flag of the command"
_ONE_NETWORK = "Layers are not bound separately: the fields of TransformerConfig have what T5's files set"


def _rules() -> Mapping[tuple[str, str], Rule]:
    rules: dict[tuple[str, str], Rule] = {}

    def add(rule: Rule, *names: str, scope: str = "") -> None:
        rules.update({(scope, name): rule for name in names})

    # The run
    add(to("SEED", None), "RANDOM_SEED", "train.random_seed")
    add(gone("Every run is reproducible, on every mesh"), "USE_HARDWARE_RNG", "train.use_hardware_rng")
    add(to("MODEL_DIR"), "train.model_dir")
    add(to("TRAIN_STEPS"), "train.total_steps")
    add(to("EVAL_PERIOD"), "train.eval_period")
    add(to("DataConfig.eval_steps"), "EVAL_STEPS", "train.eval_steps")
    add(gone("The run has its model"), "train.model", "evaluate.model", "infer.model")
    add(gone("The run has its data"), "train.train_dataset_cfg", "evaluate.dataset_cfg", "infer.dataset_cfg")
    add(gone(_LIBRARY), "train.checkpoint_cfg", "CheckpointConfig.save", "CheckpointConfig.restore", "train.partitioner")
    add(gone(_LIBRARY), "train.trainer_cls", "train.summarize_config_fn", "train.concurrent_metrics", "train.get_dataset_fn")
    add(gone("metrics.jsonl has every step"), "train.stats_period")
    add(to("LossEvaluation.at_start", False), "train.run_eval_before_training")
    instead = "Hooks have the place of actions: HOOKS, docs/custom/hooks.md"
    add(if_is(None, {}, then=instead, otherwise=instead), "train.actions")
    add(_evaluated("eval"), "train.train_eval_dataset_cfg")
    add(_evaluated("infer"), "train.infer_eval_dataset_cfg")
    add(gone("@infer/MetricsEvaluation() evaluates"), "train.inference_evaluator_cls", "evaluate.inference_evaluator_cls")
    add(_microbatches, "Trainer.num_microbatches", "Trainer.num_microbatches")
    add(_schedule, "Trainer.learning_rate_fn")
    add(decide("HOOKS = (..., @Norms()) has norms by layer"), "Trainer.weight_metrics_computer")
    # Data
    add(_module_to_import, "MIXTURE_OR_TASK_MODULE", "DatasetConfig.module")
    for name, equivalent in (
        ("mixture_or_task_name", "MIXTURE_OR_TASK_NAME"), ("task_feature_lengths", "TASK_FEATURE_LENGTHS"),
        ("use_cached", "USE_CACHED_TASKS"),
    ):  # fmt: skip
        add(to(equivalent), f"DatasetConfig.{name}")
    add(_batch_size, "BATCH_SIZE", "DatasetConfig.batch_size")
    add(to("DataConfig.shuffle", True), "SHUFFLE_TRAIN_EXAMPLES", "DatasetConfig.shuffle")
    add(to("DataConfig.split", "train"), "DatasetConfig.split")
    add(to("DataConfig.pack", True), "DatasetConfig.pack")
    add(to("SEED", None), "DatasetConfig.seed")
    add(gone("Packing needs no custom operations"), "DatasetConfig.use_custom_packing_ops")
    for scope, owner in (("train_eval", "LossEvaluation"), ("infer_eval", "MetricsEvaluation")):
        for name, equivalent, macro in (
            ("mixture_or_task_name", "task", "MIXTURE_OR_TASK_NAME"),
            ("task_feature_lengths", "lengths", "TASK_FEATURE_LENGTHS"),
            ("batch_size", "batch_size", "BATCH_SIZE"),
        ):
            add(_dataset(scope, owner, equivalent, macro), f"DatasetConfig.{name}", scope=scope)
        add(to(f"{owner}.split", "validation"), "DatasetConfig.split", scope=scope)
        for name in ("shuffle", "seed", "pack", "use_custom_packing_ops", "use_cached", "module"):
            add(
                gone("Evaluations read their split in order, as training reads its tasks"), f"DatasetConfig.{name}", scope=scope
            )
    add(_vocabulary, "VOCABULARY")
    add(to("SentencePieceVocabulary.path"), "SentencePieceVocabulary.sentencepiece_model_file")
    add(to("SentencePieceVocabulary.extra_ids"), "SentencePieceVocabulary.extra_ids")
    add(to("ByteVocabulary.extra_ids"), "ByteVocabulary.extra_ids")
    # Model
    add(_model, "MODEL")
    for kind in _MODELS:
        add(_module, f"{kind}.module")
        add(_or_macro("VOCABULARY", _vocabulary), f"{kind}.output_vocabulary", f"{kind}.vocabulary")
        add(_input_vocabulary, f"{kind}.input_vocabulary")
        add(_or_macro("OPTIMIZER", _optimizer), f"{kind}.optimizer_def")
        add(to("Z_LOSS"), f"{kind}.z_loss")
        add(to("LABEL_SMOOTHING", 0.0), f"{kind}.label_smoothing")
        add(to("LOSS_NORMALIZING_FACTOR"), f"{kind}.loss_normalizing_factor")
        add(_decoding, f"{kind}.decode_fn")
        add(_converter, f"{kind}.feature_converter_cls")
    add(to("Z_LOSS"), "loss_fn.z_loss")
    add(to("LABEL_SMOOTHING", 0.0), "loss_fn.label_smoothing")
    add(to("LOSS_NORMALIZING_FACTOR"), "loss_fn.loss_normalizing_factor")
    add(gone("TransformerConfig.architecture has it"), "DecoderOnlyModel.inputs_bidirectional_attention")
    add(_network_of_config, "Transformer.config", "DecoderWrapper.config")
    for owner in ("T5Config", "TransformerConfig"):
        for name in (
            "vocab_size", "emb_dim", "num_heads", "num_encoder_layers", "num_decoder_layers", "num_layers", "head_dim",
            "mlp_dim", "mlp_activations", "dropout_rate", "logits_via_embedding", "dtype", "scan_layers", "remat_policy",
        ):  # fmt: skip
            add(_field(name), f"{owner}.{name}")
        add(gone("Attention logits are float32"), f"{owner}.float32_attention_logits")
    for macro, field in (
        ("NUM_EMBEDDINGS", "vocab_size"), ("EMBED_DIM", "emb_dim"), ("HEAD_DIM", "head_dim"), ("NUM_HEADS", "num_heads"),
        ("MLP_DIM", "mlp_dim"), ("NUM_ENCODER_LAYERS", "num_encoder_layers"), ("NUM_DECODER_LAYERS", "num_decoder_layers"),
        ("ACTIVATION_DTYPE", "dtype"),
    ):  # fmt: skip
        add(to(f"TransformerConfig.{field}"), macro)
    for layer in (
        "RelativePositionBiases", "Encoder", "Decoder", "EncoderDecoder", "EncoderLayer", "DecoderLayer", "DenseGeneral",
        "MultiHeadDotProductAttention", "Embed", "T5LayerNorm", "Dropout", "MlpBlock",
    ):  # fmt: skip
        add(_layer, f"{layer}.*")
    # Optimizer and schedule
    add(_optimizer, "OPTIMIZER")
    for name, equivalent in (
        ("decay_rate", "decay_rate"), ("step_offset", "step_offset"), ("clipping_threshold", "clipping_threshold"),
        ("multiply_by_parameter_scale", "multiply_by_parameter_scale"), ("min_dim_size_to_factor", "min_dim_size_to_factor"),
        ("weight_decay_rate", "weight_decay"), ("beta1", "momentum"),
    ):  # fmt: skip
        add(to(f"Adafactor.{equivalent}"), f"Adafactor.{name}")
    add(_dtype_as("Adafactor.momentum_dtype"), "Adafactor.dtype_momentum")
    standard = ("standard_logical_factor_rules",)
    why = "Second moments are factored by the axes of each parameter; Adafactor.min_dim_size_to_factor turns it off"
    add(if_is(*standard, then="Factors follow the axes of parameters", otherwise=why), "Adafactor.logical_factor_rules")
    add(gone("Its optimizer is OPTIMIZER"), "chain.transformations", "clip_by_global_norm.max_norm", "clip.max_delta")
    for owner, equivalent in (("adamw", "AdamW"), ("lion", "Lion"), ("sgd", "Sgd")):
        add(_learning_rate_of(equivalent), f"{owner}.learning_rate")
        for name in ("b1", "b2", "weight_decay", "momentum", "nesterov"):
            add(to(f"{equivalent}.{name}"), f"{owner}.{name}")
        add(to(f"{equivalent}.epsilon"), f"{owner}.eps")
    for name, equivalent in (
        ("peak_value", "peak"),
        ("warmup_steps", "warmup_steps"),
        ("decay_steps", "total_steps"),
        ("end_value", "floor"),
    ):
        add(to(f"CosineDecay.{equivalent}"), f"warmup_cosine_decay_schedule.{name}")
    add(
        if_is(0.0, 0, then="The warm-up begins at 0", otherwise="The warm-up begins at 0"),
        "warmup_cosine_decay_schedule.init_value",
    )
    for name in (
        "factors", "base_learning_rate", "warmup_steps", "decay_factor", "steps_per_decay", "steps_per_cycle", "step_offset",
        "min_learning_rate",
    ):  # fmt: skip
        add(_schedule_factor, f"create_learning_rate_scheduler.{name}")
    # Checkpoints
    add(_period, "SaveCheckpointConfig.period")
    add(to("SaveCheckpointConfig.keep"), "SaveCheckpointConfig.keep")
    add(
        if_is("float32", None, then="Checkpoints are float32", otherwise="Checkpoints are float32"),
        "SaveCheckpointConfig.dtype",
    )
    add(gone("The position in the data is always saved"), "SaveCheckpointConfig.save_dataset")
    add(gone("Checkpoints are Orbax's"), "SaveCheckpointConfig.checkpointer_cls", "RestoreCheckpointConfig.checkpointer_cls")
    add(_restored_path, "RestoreCheckpointConfig.path")
    add(_restore_mode, "RestoreCheckpointConfig.mode")
    add(gone("Parameters are float32"), "RestoreCheckpointConfig.dtype")
    add(_fallback, "RestoreCheckpointConfig.fallback_to_scratch")
    add(to("RestoreCheckpointConfig.strict", True), "RestoreCheckpointConfig.strict")
    add(_assignment_map, "RestoreCheckpointConfig.assignment_map")
    # Partitioning
    add(_partitions, "PjitPartitioner.num_partitions", "NUM_MODEL_PARTITIONS")
    add(_partitions, "PjitPartitioner.model_parallel_submesh", "MODEL_PARALLEL_SUBMESH")
    add(_partitions, "ModelBasedPjitPartitioner.num_partitions", "ModelBasedPjitPartitioner.model_parallel_submesh")
    rules_note = "Add them to ShardingRules.parameters and activations (docs/custom/sharding.md)"
    add(
        if_is("standard_logical_axis_rules", then="They are the default", otherwise=rules_note),
        "PjitPartitioner.logical_axis_rules",
        "ModelBasedPjitPartitioner.logical_axis_rules",
    )
    add(if_is([], (), None, then="They are the default", otherwise=rules_note), "standard_logical_axis_rules.additional_rules")
    dims_note = 'To shard parameters in two dimensions set MESH, such as "fsdp=-1,tensor=4"'
    dims = tuple(f"standard_logical_axis_rules.{kind}_partitioning_dims" for kind in ("activation", "parameter"))
    add(if_is(1, then="That is the default here", otherwise=dims_note), *dims, "ACTIVATION_PARTITIONING_DIMS")
    # Evaluation and inference
    add(to("MetricsEvaluation.num_examples", None), "Evaluator.num_examples", "EVALUATOR_NUM_EXAMPLES")
    add(gone("Targets are kept in memory"), "EVALUATOR_USE_MEMORY_CACHE", "Evaluator.use_memory_cache")
    add(
        gone("Predictions go to MODEL_DIR/inference"),
        "JSON_WRITE_N_RESULTS",
        "JSONLogger.write_n_results",
        "Evaluator.logger_cls",
    )
    add(_beams, "predict_batch_with_aux.num_decodes")
    add(_sampling("temperature", "topk", "SamplingConfig.top_k = 1"), "temperature_sample.temperature")
    add(_sampling("top_k", "temperature", "SamplingConfig.temperature = 1.0"), "temperature_sample.topk")
    add(to("MetricsEvaluation.max_tokens"), "temperature_sample.max_decode_steps")
    for name in ("output_dir", "restore_checkpoint_cfg", "partitioner", "mode", "checkpoint_period", "shard_id", "num_shards"):
        add(gone(f"{_COMMAND} t5x_lab eval or infer"), f"evaluate.{name}", f"infer.{name}")
    add(gone(f"{_COMMAND}: --model_dir"), "CHECKPOINT_PATH")
    add(gone(f"{_COMMAND}: --output"), "EVAL_OUTPUT_DIR", "INFER_OUTPUT_DIR")
    return rules


def _decoding(binding: Binding, context: Context) -> Step:
    value = context.resolve(binding.value)
    name = value.name.rpartition(".")[2] if isinstance(value, Reference) else ""
    if name == "temperature_sample" and not context.is_own(value.name):
        return Step(DROPPED, note="SamplingConfig is the default of evaluations")
    if name == "beam_search" and not context.is_own(value.name):
        size = () if "predict_batch_with_aux.num_decodes" in context.names else ("BeamConfig.size = 1  # T5X's default",)
        return Step(RENAMED, ("MetricsEvaluation.decoding = @BeamConfig()", *size))
    return Step(TO_DO, note="Greedy decoding is the default; set MetricsEvaluation.decoding")


def _converter(binding: Binding, context: Context) -> Step:
    if isinstance(binding.value, Reference) and context.is_own(binding.value.name):
        return Step(RENAMED, (f"DataConfig.converter = {render(Reference(binding.value.name, True))}",))
    return Step(DROPPED, note="The features follow the architecture")


def _input_vocabulary(binding: Binding, context: Context) -> Step:
    if isinstance(binding.value, MacroReference) and binding.value.name == "VOCABULARY":
        return Step(DROPPED, note="VOCABULARY is that of inputs too")
    return to("INPUT_VOCABULARY")(binding, context)


def _layer(binding: Binding, context: Context) -> Step:
    """A layer of flaxformer's: dropped where the network is T5's."""
    if context.other_network:
        return Step(TO_DO, note=f"The network is {context.other_network}, which is not here")
    if binding.name == "MlpBlock.activations":
        return to("TransformerConfig.mlp_activations")(binding, context)
    if binding.name == "RelativePositionBiases.num_buckets":
        return to("TransformerConfig.relpos_buckets", 32)(binding, context)
    if binding.name == "RelativePositionBiases.max_distance":
        return to("TransformerConfig.relpos_max_distance", 128)(binding, context)
    if binding.name == "MlpBlock.intermediate_dim":
        return to("TransformerConfig.mlp_dim")(binding, context)
    if binding.name == "Dropout.rate":
        return to("DROPOUT_RATE")(binding, context)
    is_literal = not references(binding.value) and binding.value not in (None, False)
    if is_literal and binding.parameter not in _WITHOUT_EFFECT:
        return Step(TO_DO, note="Layers are not bound separately: set a field of TransformerConfig if there is one")
    return Step(DROPPED, note=_ONE_NETWORK)


# Parameters of flaxformer's layers that do not change what they compute.
_WITHOUT_EFFECT = frozenset((
    "name", "dtype", "kernel_axis_names", "axis_name", "broadcast_dims", "cast_input_dtype", "one_hot", "attend_dtype",
    "broadcast_dropout", "activation_partitioning_dims",
))  # fmt: skip


RULES = _rules()
