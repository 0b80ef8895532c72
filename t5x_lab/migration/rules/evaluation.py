"""Evaluations, decoding, and T5X's commands eval and infer."""

from t5x_lab.migration.project import Context
from t5x_lab.migration.statements import Binding, render
from t5x_lab.migration.steps import DEFAULT, DROPPED, RENAMED, TO_DO, Rule, Step, configurable, gone, if_is, keep, table, to


def _evaluated(owner: str) -> Rule:
    """`train.infer_eval_dataset_cfg` and `train.train_eval_dataset_cfg`."""

    def rule(binding: Binding, context: Context) -> Step:
        is_off = context.resolve(binding.value) is None
        if owner == "infer":
            own = context.bindings.get(("", "train.eval_period"))
            has_own = own is not None and context.binds_macro("EVAL_PERIOD") and context.is_before(own, binding)
            period = render(own.value) if own and has_own else "%EVAL_PERIOD"
            return Step(RENAMED, (f"INFER_EVAL_PERIOD = {None if is_off else period}",))
        if is_off:
            return Step(RENAMED, ("EVALS = (@infer/MetricsEvaluation(),)",))
        if context.differs(binding):
            return Step(RENAMED, ("EVALS = (@LossEvaluation(), @infer/MetricsEvaluation())",))
        return Step(DROPPED, note="The loss is evaluated every EVAL_PERIOD steps")

    return rule


def _before_training(binding: Binding, context: Context) -> Step:
    step = to("LossEvaluation.at_start", False)(binding, context)
    if step.status == DROPPED or not context.has_metrics:
        return step
    return Step(RENAMED, (*step.lines, f"MetricsEvaluation.at_start = {render(binding.value)}"))


def _period(binding: Binding, context: Context) -> Step:
    if context.resolve(binding.value) == 0:
        return Step(TO_DO, note="Evaluations have a period: leave those out of EVALS that shall not run")
    step = to("EVAL_PERIOD")(binding, context)
    has_own = binding.parameter and step.status == RENAMED and context.binds_macro("EVAL_PERIOD") and context.has_metrics
    return Step(RENAMED, (*step.lines, f"INFER_EVAL_PERIOD = {render(binding.value)}")) if has_own else step


def _decoding(binding: Binding, context: Context) -> Step:
    value = context.resolve(binding.value)
    name = configurable(value)
    if name == "temperature_sample" and not context.is_own(value.name):
        return Step(RENAMED, ("MetricsEvaluation.decoding = @SamplingConfig()",))
    if name == "beam_search" and not context.is_own(value.name):
        size = () if "predict_batch_with_aux.num_decodes" in context.names else ("BeamConfig.size = 1  # T5X's default",)
        return Step(RENAMED, ("MetricsEvaluation.decoding = @BeamConfig()", *size))
    return Step(TO_DO, note="Greedy decoding is the default; set MetricsEvaluation.decoding")


def _sampling(field: str, partner: str, default: str) -> Rule:
    """A parameter of T5X's sampling, with the default of the other one if nothing binds it."""

    def rule(binding: Binding, context: Context) -> Step:
        step = to(f"SamplingConfig.{field}")(binding, context)
        lines = () if f"temperature_sample.{partner}" in context.names else (f"{default}  # T5X's default",)
        return Step(RENAMED, (*step.lines, *lines), step.note)

    return rule


def _beams(binding: Binding, context: Context) -> Step:
    """The number of hypotheses of beam search; where T5X samples, the number of samples, of which it takes the most likely."""
    model, default = "EncoderDecoderModel", "beam_search"
    if "DecoderOnlyModel" in binding.selector:
        model, default = "DecoderOnlyModel", "temperature_sample"
    if (configurable(context.value(f"{model}.decode_fn")) or default) == "temperature_sample":
        return to("MetricsEvaluation.num_samples", 1)(binding, context)
    return Step(
        RENAMED, ("MetricsEvaluation.decoding = @BeamConfig()", f"BeamConfig.size = {render(context.written(binding.value))}")
    )


def _split(binding: Binding, context: Context) -> Step:
    return to("MetricsEvaluation.split")(binding, context) if context.is_evaluation else keep(binding, context)


_FLAGS = ("output_dir", "restore_checkpoint_cfg", "partitioner", "checkpoint_period")
_ONE_SHARD = "One process reads the whole input, unless --shard_id and --num_shards are set"
RULES = table(
    ("train.eval_period EVAL_PERIOD", _period),
    ("train.run_eval_before_training", _before_training),
    ("train.train_eval_dataset_cfg", _evaluated("eval")),
    ("train.infer_eval_dataset_cfg", _evaluated("infer")),
    ("train.inference_evaluator_cls evaluate.inference_evaluator_cls", gone("@infer/MetricsEvaluation() evaluates")),
    ("EncoderDecoderModel.decode_fn DecoderOnlyModel.decode_fn", _decoding),
    ("predict_batch_with_aux.num_decodes", _beams),
    ("temperature_sample.temperature", _sampling("temperature", "topk", "SamplingConfig.top_k = 1")),
    ("temperature_sample.topk", _sampling("top_k", "temperature", "SamplingConfig.temperature = 1.0")),
    ("temperature_sample.max_decode_steps", to("MetricsEvaluation.max_tokens")),
    ("evaluate.dataset_cfg infer.dataset_cfg", gone("The run has its data")),
    (" ".join(f"evaluate.{name} infer.{name}" for name in _FLAGS), gone("A flag of the command t5x_lab eval or infer")),
    ("infer.mode", if_is("predict", then=DEFAULT, otherwise="t5x_lab infer has --mode=predict for texts and --mode=score")),
    ("infer.shard_id", if_is(0, None, then=_ONE_SHARD, otherwise="Pass --shard_id to t5x_lab infer")),
    ("infer.num_shards", if_is(1, None, then=_ONE_SHARD, otherwise="Pass --num_shards to t5x_lab infer")),
    ("MIXTURE_OR_TASK_SPLIT", _split),
    ("CHECKPOINT_PATH", gone("A flag of the command: --model_dir")),
    ("EVAL_OUTPUT_DIR INFER_OUTPUT_DIR", gone("A flag of the command: --output")),
)
