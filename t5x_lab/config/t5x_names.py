"""Table of T5X's gin names and their equivalents: for hints in error messages, docs/from_t5x.md and `t5x_lab migrate`.

It has the names that public projects bind, without modules: macros, `Class.parameter`, or a class for all its parameters. Names
whose translation depends on their value or on other bindings have a rule in t5x_lab/migration/rules besides.
"""

from collections.abc import Iterator
from typing import NamedTuple


class Row(NamedTuple):
    """Names of T5X with the same equivalent.

    Attributes:
      t5x_names: names separated by spaces; braces at the end stand for several names: `train.{model, model_dir}`.
      equivalents: names to use instead, "" if there are none.
      note: additional information, a sentence without capital letter and full stop.
      defaults: values of T5X's names that are the default here.
    """

    t5x_names: str
    equivalents: str
    note: str = ""
    defaults: tuple = ()


# Names with the same meaning in T5X and here.
UNCHANGED_MACROS = (
    "MODEL", "OPTIMIZER", "VOCABULARY", "MIXTURE_OR_TASK_NAME", "TASK_FEATURE_LENGTHS", "BATCH_SIZE", "MODEL_DIR",
    "TRAIN_STEPS", "EVAL_PERIOD", "Z_LOSS", "INITIAL_CHECKPOINT_PATH", "DROPOUT_RATE", "LABEL_SMOOTHING",
    "LOSS_NORMALIZING_FACTOR", "CHECKPOINT_PERIOD", "USE_CACHED_TASKS",
)  # fmt: skip
UNCHANGED_PARAMETERS = (
    "SaveCheckpointConfig.period", "SaveCheckpointConfig.keep", "RestoreCheckpointConfig.strict",
    "RestoreCheckpointConfig.assignment_map", "SentencePieceVocabulary.extra_ids", "ByteVocabulary.extra_ids",
    "Adafactor.decay_rate", "Adafactor.step_offset", "Adafactor.clipping_threshold", "Adafactor.min_dim_size_to_factor",
    "Adafactor.multiply_by_parameter_scale",
)  # fmt: skip


# Macros that projects define and refer to. `migrate` translates what refers to them.
PROJECT_MACROS = "Macros of projects"

# Ordered by topic as in the documentation.
TABLE: dict[str, tuple[Row, ...]] = {
    "The run": (
        Row("RANDOM_SEED train.random_seed", "SEED", "0 by default, so runs are reproducible", defaults=(None,)),
        Row(
            "USE_HARDWARE_RNG train.use_hardware_rng", "", "every run is reproducible; random numbers do not depend on the mesh"
        ),
        Row("train.model", "MODEL"),
        Row("train.model_dir", "MODEL_DIR"),
        Row("train.total_steps", "TRAIN_STEPS", "or TRAIN_TOKENS; counted from 0 also when fine-tuning"),
        Row("train.{train_dataset_cfg, get_dataset_fn}", "DataConfig", "its parameters, or their macros"),
        Row("get_deterministic_dataset", "", "the order of the data is always reproducible"),
        Row("train.checkpoint_cfg CheckpointConfig.{save, restore}", "SaveCheckpointConfig, RestoreCheckpointConfig"),
        Row("train.partitioner", "MESH"),
        Row("train.trainer_cls", "MICROBATCHES, OPTIMIZER", "the trainer itself is not bound"),
        Row("train.summarize_config_fn", "", "config.gin and model-info.txt are always written"),
        Row("train.concurrent_metrics", "", "the library does this itself"),
        Row("train.stats_period", "", "metrics.jsonl has every step; the console a line a minute"),
        Row("train.actions", "HOOKS", "called after steps, evaluations and saves"),
        Row("TerminateOnNanAction", "BAD_STEPS", "a non-finite step changes no parameter, and ends the run by default"),
        Row("train.run_eval_before_training", "LossEvaluation.at_start, MetricsEvaluation.at_start"),
        Row("Trainer.num_microbatches", "MICROBATCHES"),
        Row("Trainer.learning_rate_fn", "LearningRate", "bound to the optimizer"),
        Row(
            "Trainer.weight_metrics_computer",
            "Norms",
            "HOOKS = (…, @Norms()): norms of gradients, parameters and updates by layer",
        ),
        Row("precompile", "", "t5x_lab compile compiles the training step"),
    ),
    "Data": (
        Row("MIXTURE_OR_TASK_MODULE DatasetConfig.module", "", 'write "import my_tasks" in a gin file'),
        Row("DatasetConfig.use_cached", "USE_CACHED_TASKS"),
        Row(
            "SHUFFLE_TRAIN_EXAMPLES DatasetConfig.shuffle",
            "DataConfig.shuffle",
            "for training; evaluation data are never shuffled",
            defaults=(True,),
        ),
        Row("DatasetConfig.mixture_or_task_name", "MIXTURE_OR_TASK_NAME"),
        Row("DatasetConfig.task_feature_lengths", "TASK_FEATURE_LENGTHS"),
        Row("DatasetConfig.batch_size", "BATCH_SIZE"),
        Row("DatasetConfig.seed", "SEED", defaults=(None,)),
        Row("DatasetConfig.pack", "DataConfig.pack", defaults=(True,)),
        Row("DatasetConfig.use_custom_packing_ops", "", "packing needs no custom ops"),
        Row("DatasetConfig.split", "DataConfig.split, DataConfig.eval_split", "t5x_lab infer takes --split"),
        Row("EVAL_STEPS train.eval_steps", "DataConfig.eval_steps"),
        Row(
            "SentencePieceVocabulary.sentencepiece_model_file",
            "SentencePieceVocabulary.path",
            "@SentencePieceVocabulary() is t5x_lab's, with 100 extra_ids by default; SeqIO's has 0",
        ),
        Row("PassThroughVocabulary", "VOCABULARY"),
    ),
    "Model": (
        Row("EncoderDecoderModel DecoderOnlyModel", "ModelConfig", "MODEL = @ModelConfig(), as in the model files"),
        Row("EncoderDecoderModel.module DecoderOnlyModel.module", "ModelConfig.network"),
        Row(
            "EncoderDecoderModel.output_vocabulary DecoderOnlyModel.vocabulary",
            "VOCABULARY",
            "also of inputs, unless INPUT_VOCABULARY is set",
        ),
        Row("EncoderDecoderModel.input_vocabulary", "INPUT_VOCABULARY", "None by default, which is VOCABULARY"),
        Row("EncoderDecoderModel.optimizer_def DecoderOnlyModel.optimizer_def", "OPTIMIZER"),
        Row("EncoderDecoderModel.z_loss DecoderOnlyModel.z_loss loss_fn.z_loss", "Z_LOSS"),
        Row(
            "EncoderDecoderModel.label_smoothing DecoderOnlyModel.label_smoothing loss_fn.label_smoothing",
            "LABEL_SMOOTHING",
            defaults=(0.0,),
        ),
        Row(
            "EncoderDecoderModel.loss_normalizing_factor DecoderOnlyModel.loss_normalizing_factor "
            "loss_fn.loss_normalizing_factor",
            "LOSS_NORMALIZING_FACTOR",
            'None is the sum over tokens, as in T5X; the default is "NUM_REAL_TARGET_TOKENS"',
        ),
        Row(
            "DecoderOnlyModel.inputs_bidirectional_attention",
            "TransformerConfig.architecture",
            '"prefix_decoder" for True, "causal_decoder" for False',
        ),
        Row("Transformer DecoderWrapper T5Config", "TransformerConfig", "with T5Config's parameters under the same names"),
        Row("TransformerConfig.num_layers", "TransformerConfig.num_decoder_layers"),
        Row("NUM_EMBEDDINGS", "TransformerConfig.vocab_size"),
        Row("EMBED_DIM", "TransformerConfig.emb_dim"),
        Row("HEAD_DIM", "TransformerConfig.head_dim"),
        Row("NUM_HEADS", "TransformerConfig.num_heads"),
        Row("MLP_DIM", "TransformerConfig.mlp_dim"),
        Row("NUM_ENCODER_LAYERS", "TransformerConfig.num_encoder_layers"),
        Row("NUM_DECODER_LAYERS", "TransformerConfig.num_decoder_layers"),
        Row("T5Config.float32_attention_logits TransformerConfig.float32_attention_logits", "", "attention logits are float32"),
        Row("ARCHITECTURE", "ModelConfig.network"),
        Row("ACTIVATION_DTYPE", "TransformerConfig.dtype"),
        Row(
            "BIAS_INIT variance_scaling normal",
            "TransformerConfig.initializer",
            "the default of matrices follows TransformerConfig.scaling",
        ),
        Row("MlpBlock.activations", "TransformerConfig.mlp_activations"),
        Row("MlpBlock.intermediate_dim", "TransformerConfig.mlp_dim"),
        Row("MlpBlock.use_bias", "TransformerConfig.use_bias", defaults=(False,)),
        Row("Dropout.rate DROPOUT_FACTORY", "DROPOUT_RATE"),
        Row("RelativePositionBiases.num_buckets", "TransformerConfig.relpos_buckets", defaults=(32,)),
        Row("RelativePositionBiases.max_distance", "TransformerConfig.relpos_max_distance", defaults=(128,)),
        Row(
            "RelativePositionBiases Encoder Decoder EncoderDecoder EncoderLayer DecoderLayer MultiHeadDotProductAttention "
            "DenseGeneral MlpBlock Embed Dropout T5LayerNorm",
            "TransformerConfig",
            "one network with all of Flaxformer's options for T5; layers are not bound separately",
        ),
        Row("IA3 IA3Attention", "PEFT", "docs/custom/peft.md: IA3 as an example; adapter layers and LoRA are in peft/*.gin"),
        Row("LOCAL_RADIUS", "LayerKind.encoder_window", "LongT5's: 127 is (127, 127)"),
        Row("TOKENS_PER_BLOCK", "TransformerConfig.global_block_size", "LongT5's"),
        Row("ACTIVATION_PARTITIONING_DIMS", "ShardingRules.activations"),
    ),
    "Optimizer and schedule": (
        Row("Adafactor.logical_factor_rules", "Adafactor.min_dim_size_to_factor", "factors follow logical axes"),
        Row("Adafactor.factored", "Adafactor.min_dim_size_to_factor", "a large number for False"),
        Row("HParamMap", "Groups.groups", "an optimizer for each pattern of parameter names"),
        Row("Adafactor.global_norm_clip_threshold", "Adafactor.clip_global_norm", defaults=(None,)),
        Row("Adafactor.weight_decay_rate_lr_exponent", "Adafactor.weight_decay_lr_exponent", defaults=(None,)),
        Row("Adafactor.weight_decay_rate", "Adafactor.weight_decay"),
        Row("Adafactor.beta1", "Adafactor.momentum"),
        Row("Adafactor.dtype_momentum", "Adafactor.momentum_dtype"),
        Row(
            "create_learning_rate_scheduler",
            "LearningRate",
            'with the same factors and formulas; T5X\'s defaults are "constant * linear_warmup * rsqrt_decay", 0.5 and 1,000 '
            'steps of warm-up, those here "constant * rsqrt_decay", 1.0 and 10,000',
        ),
        Row("warmup_cosine_decay_schedule.peak_value", "CosineDecay.peak"),
        Row("warmup_cosine_decay_schedule.warmup_steps", "CosineDecay.warmup_steps"),
        Row("warmup_cosine_decay_schedule.decay_steps", "CosineDecay.total_steps"),
        Row("warmup_cosine_decay_schedule.end_value", "CosineDecay.floor"),
        Row("warmup_cosine_decay_schedule", "CosineDecay"),
        Row("adamw", "AdamW"),
        Row("lion", "Lion"),
        Row("sgd", "Sgd"),
        Row(
            "chain clip_by_global_norm",
            "OPTIMIZER",
            "one optimizer; AdamW.clip_global_norm has the place of clip_by_global_norm",
        ),
        Row("clip", "AdamW.clip_value", "also of Lion and Sgd"),
        Row(
            "MultiOptimizer ModelParamTraversal match_any",
            "Groups.groups",
            "[(pattern, optimizer, or None to freeze), …]",
        ),
    ),
    "Checkpoints": (
        Row("CHECKPOINT_PATH RestoreCheckpointConfig.path", "INITIAL_CHECKPOINT_PATH"),
        Row(
            "RestoreCheckpointConfig.mode",
            "",
            "a run directory selects its latest checkpoint, a path with a step that step",
        ),
        Row(
            "RestoreCheckpointConfig.fallback_to_scratch",
            "RestoreCheckpointConfig.strict",
            "its opposite: strict = False for fallback_to_scratch = True",
        ),
        Row(
            "RestoreCheckpointConfig.dtype",
            "",
            "training has float32 parameters; t5x_lab eval, infer and generate take --parameter_dtype",
        ),
        Row("SaveCheckpointConfig.dtype", "", "checkpoints are float32"),
        Row(
            "SaveCheckpointConfig.save_dataset SaveCheckpointConfig.keep_dataset_checkpoints",
            "",
            "the position in the data is always saved",
        ),
        Row("SaveCheckpointConfig.checkpointer_cls RestoreCheckpointConfig.checkpointer_cls", "", "checkpoints are Orbax's"),
    ),
    "Partitioning": (
        Row("NUM_MODEL_PARTITIONS PjitPartitioner.num_partitions", "MESH", '"data=-1,tensor=4" for 4 partitions'),
        Row(
            "MODEL_PARALLEL_SUBMESH PjitPartitioner.model_parallel_submesh",
            "MESH",
            "JAX assigns devices; -1 is the remaining number",
        ),
        Row(
            "standard_logical_axis_rules PjitPartitioner.logical_axis_rules ModelBasedPjitPartitioner.logical_axis_rules "
            "LOGICAL_AXIS_RULES",
            "ShardingRules.parameters",
            "a dictionary of changes to the default; also ShardingRules.activations",
        ),
        Row("PjitPartitioner ModelBasedPjitPartitioner", "MESH"),
        Row("MoePjitPartitioner MoeTrainer", "", "no mixture of experts"),
    ),
    "Evaluation and inference": (
        Row("train.eval_period", "EVAL_PERIOD"),
        Row(
            "train.{train_eval_dataset_cfg, train_eval_get_dataset_fn} get_training_eval_datasets",
            "LossEvaluation",
            "of the run's own task, unless LossEvaluation.task names another",
        ),
        Row("train.{infer_eval_dataset_cfg, inference_evaluator_cls} Evaluator", "INFER_EVAL_PERIOD, EVALS, MetricsEvaluation"),
        Row("Evaluator.num_examples EVALUATOR_NUM_EXAMPLES", "MetricsEvaluation.num_examples", defaults=(None,)),
        Row("MIXTURE_OR_TASK_SPLIT", "MetricsEvaluation.split"),
        Row("EVALUATOR_USE_MEMORY_CACHE Evaluator.use_memory_cache", "", "targets are kept in memory"),
        Row(
            "Evaluator.logger_cls JSONLogger JSONLogger.write_n_results JSON_WRITE_N_RESULTS",
            "",
            "predictions go to MODEL_DIR/inference",
        ),
        Row("evaluate EVAL_OUTPUT_DIR", "", "use t5x_lab eval --model_dir=… --output=…"),
        Row("infer INFER_OUTPUT_DIR", "", "use t5x_lab infer --model_dir=… --task=… --output=…"),
        Row(
            "predict_batch_with_aux.num_decodes",
            "BeamConfig.size, MetricsEvaluation.num_samples",
            "beams of an encoder-decoder, samples of a decoder",
        ),
        Row(
            "predict_batch_with_aux temperature_sample beam_search",
            "",
            "flags of t5x_lab infer and generate: --temperature, --top_k, --beam_size, --beam_alpha",
        ),
    ),
    PROJECT_MACROS: (
        Row("EVAL_BATCH_SIZE", "MetricsEvaluation.batch_size, LossEvaluation.batch_size", "BATCH_SIZE by default"),
        Row("NUM_LAYERS", "TransformerConfig.num_decoder_layers"),
        Row("SCALE", "TransformerConfig.initializer"),
        Row("LEARNING_RATE", "LearningRate.base_learning_rate"),
        Row("DECAY_STEPS", "LearningRate.steps_per_cycle"),
        Row("TRAINABLE_REGEX", "TRAINABLE", "a regular expression that matches whole names of parameters"),
        Row("INIT_CHECKPOINT", "INITIAL_CHECKPOINT_PATH"),
        Row("NUM_EXPERT_PARTITIONS", "", "no mixture of experts"),
    ),
}


def expand_names(t5x_names: str) -> Iterator[str]:
    """Yields the single names in `Row.t5x_names`."""
    for name in t5x_names.replace(", ", ",").split():
        owner, brace, parameters = name.partition(".{")
        yield from (f"{owner}.{parameter}" for parameter in parameters[:-1].split(",")) if brace else (name,)


ROWS = {name: row for rows in TABLE.values() for row in rows for name in expand_names(row.t5x_names)}


def hint(name: str) -> str:
    """Returns a hint for an unknown gin name if it is a name of T5X, otherwise "".

    Args:
      name: name in the gin file: `network.T5Config.emb_dim`, `train/utils.DatasetConfig.pack`, `RANDOM_SEED`.
    """
    parts = name.rpartition("/")[2].split(".")
    for t5x_name in (".".join(parts[-2:]), parts[-1], *parts[-2:-1]):
        if row := ROWS.get(t5x_name):
            return f" T5X's {t5x_name} {_describe(row)}."
    return ""


def _describe(row: Row) -> str:
    if row.equivalents:
        return f"is {row.equivalents} here" + (f": {row.note}" if row.note else "")
    return f"has no equivalent: {row.note}"


def documentation() -> str:
    """Returns the table in Markdown, with a section per topic."""
    sections = []
    for topic, rows in TABLE.items():
        lines = [f"### {topic}", "", "| T5X | here |", "|---|---|"]
        for row in rows:
            t5x_names = ", ".join(f"`{name}`" for name in expand_names(row.t5x_names))
            equivalents = ", ".join(f"`{name}`" for name in row.equivalents.split(", ")) if row.equivalents else "none"
            lines.append(f"| {t5x_names} | {equivalents}{': ' + row.note if row.note else ''} |")
        sections.append("\n".join(lines))
    return "\n\n".join(sections) + "\n"
