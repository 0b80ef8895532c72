"""The evaluations that gin binds in EVALS, and early stopping.

Settings only: free of TensorFlow. `prepare` imports the module that does the work.
"""

import dataclasses
from typing import Any

from t5x_lab.config.checks import check_positive, check_range, check_types
from t5x_lab.config.errors import UserError, check_choice, did_you_mean
from t5x_lab.decoding.beam_search import BeamConfig
from t5x_lab.decoding.sampling import SamplingConfig
from t5x_lab.evaluation.evaluation import Evaluator, OutputEvaluation, ScheduledEvaluation, TaskEvaluation


@dataclasses.dataclass(frozen=True, kw_only=True)
class LossEvaluation(TaskEvaluation):
    """Teacher-forced loss of each task.

    Attributes:
      num_batches: batches of each task, from the first. None = DataConfig.eval_steps.
      batch_size: rows per batch. None = BATCH_SIZE.
    """

    name: str = "eval"
    weights: str = "each"
    num_batches: int | None = None

    def __post_init__(self):
        super().__post_init__()
        check_positive(self, "num_batches")

    def prepare(self, model: Any) -> Evaluator | None:
        from t5x_lab.evaluation.metrics.loss import LossEvaluator  # needs TensorFlow

        return LossEvaluator.create(self, self.num_batches, model)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MetricsEvaluation(OutputEvaluation):
    """Metrics that SeqIO tasks define, computed from the model's predictions and from its scores of the targets.

    Attributes:
      decoding: `SamplingConfig` (greedy by default) or `BeamConfig`. Both have a `logits_fn`.
      seed: seed of sampling.
      num_samples: number of samples of each example, the most likely of which is the prediction, as T5X's `num_decodes` of
        decoders. Log-probabilities are those after temperature, top_k and top_p.
      max_tokens: maximum tokens of a prediction. None = the length of the task's targets.
      decoder_prefix: text that every prediction begins with. The model continues it.
    """

    name: str = "infer"
    decoding: SamplingConfig | BeamConfig = SamplingConfig()
    seed: int = 0
    num_samples: int = 1
    max_tokens: int | None = None
    decoder_prefix: str = ""

    def __post_init__(self):
        super().__post_init__()
        check_positive(self, "max_tokens", "num_samples")
        check_range(self, "seed", 0, 2**32)
        if self.num_samples > 1 and isinstance(self.decoding, BeamConfig):
            raise UserError(
                f"MetricsEvaluation.num_samples is {self.num_samples}, but beam search draws no samples. Set it to 1."
            )

    def prepare(self, model: Any) -> Evaluator | None:
        from t5x_lab.evaluation.metrics.task_metrics import Decoding, MetricsEvaluator  # needs TensorFlow

        decoding = Decoding(self.decoding, self.seed, self.num_samples, self.max_tokens, self.decoder_prefix)
        return MetricsEvaluator.create(self, decoding, model)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RankingEvaluation(OutputEvaluation):
    """Rank classification: accuracy of the answer choice with the highest likelihood.

    Tasks have the features of `t5.data.preprocessors.rank_classification`, one row per choice: `inputs`, `targets`, `idx`
    (question number and choice number), `is_correct`, and optionally `weight`. Results are grouped by data set and prompt:
    by the task's attributes `data_set` and `prompt` if it has them, else by the mixtures that the mixture consists of.

    Attributes:
      choose_on: another split, on which the best prompt of each data set is chosen. Its accuracy on `split` is reported too.
        FLAN chooses on "validation" and reports on "test".
    """

    name: str = "rank"
    choose_on: str | None = None

    def prepare(self, model: Any) -> Evaluator | None:
        from t5x_lab.evaluation.ranking.ranked_tasks import RankingEvaluator  # needs TensorFlow

        return RankingEvaluator.create(self, self.choose_on, model)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClassificationEvaluation(TaskEvaluation):
    """Loss and metrics of a classification head, on tasks such as "classify_glue_cola".

    Attributes:
      outputs: whether to write the prediction of each example to inference/<name>/<task>-<step>.jsonl.
      batch_size: examples per batch.
    """

    name: str = "classify"
    outputs: bool = False
    batch_size: int | None = 32

    def prepare(self, model: Any) -> Evaluator | None:
        from t5x_lab.evaluation.classification import ClassificationEvaluator  # needs TensorFlow

        return ClassificationEvaluator.create(self, self.outputs, model)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProbeEvaluation(ScheduledEvaluation):
    """Zero-shot probes of a language model, such as BLiMP. Records are read from where RECORDS says.

    Attributes:
      probes: objects such as @Blimp(), or your own `Probe`s.
      num_examples: number of examples of each data set, from the first, and of those that set a threshold. None = all.
      batch_size: texts per batch.
    """

    name: str = "probes"
    probes: tuple = ()
    num_examples: int | None = None
    batch_size: int = 32

    def __post_init__(self):
        super().__post_init__()
        check_positive(self, "num_examples", "batch_size")

    def prepare(self, model: Any) -> Evaluator | None:
        from t5x_lab.evaluation.probes.probing import ProbeEvaluator  # needs TensorFlow

        return ProbeEvaluator(self.name, self.probes, self.num_examples, self.batch_size, model)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplesEvaluation(ScheduledEvaluation):
    """Sample texts that the model generates from fixed prompts, for the console, TensorBoard and reports. No metrics.

    Attributes:
      prompts: texts to continue, or inputs of an encoder.
      max_tokens: maximum tokens of a text.
      temperature, top_k, top_p: see `SamplingConfig`. Temperature 0 is greedy.
      seed: seed of sampling.
    """

    name: str = "samples"
    prompts: tuple[str, ...] = ()
    max_tokens: int = 40
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self):
        super().__post_init__()
        check_positive(self, "max_tokens")
        check_range(self, "seed", 0, 2**32)
        SamplingConfig(self.temperature, self.top_k, self.top_p)
        if not self.prompts:
            raise UserError('SamplesEvaluation.prompts is empty. Set it, for example to ("The people", "We must").')

    def prepare(self, model: Any) -> Evaluator | None:
        from t5x_lab.evaluation.samples import SamplesEvaluator  # needs TensorFlow

        options = {name: getattr(self, name) for name in ("max_tokens", "temperature", "top_k", "top_p", "seed")}
        return SamplesEvaluator(self.prompts, options, model)


@dataclasses.dataclass(frozen=True)
class EarlyStopping:
    """Ends the training when an evaluation metric stops improving.

    Attributes:
      metric: "<name>/<task>/<metric>" of an evaluation in EVALS, such as "eval/sotu_full_lm/loss".
      patience: number of evaluations without a new best value after which training ends.
      best_is: "lowest" or "highest".
      min_delta: minimum improvement that counts as a new best value.
    """

    metric: str
    patience: int = 5
    best_is: str = "lowest"
    min_delta: float = 0.0

    def __post_init__(self):
        check_types(self)
        check_positive(self, "patience")
        check_choice("EarlyStopping.best_is", self.best_is, ("lowest", "highest"))
        if not self.min_delta >= 0:
            raise UserError(f"EarlyStopping.min_delta is {self.min_delta}. It must not be negative.")

    def should_stop(self, values: list[float]) -> bool:
        """Returns whether none of the last `patience` values, in the order of steps, is a new best value."""
        sign = 1.0 if self.best_is == "highest" else -1.0
        best, evaluations_since_best = -float("inf"), 0
        for value in values:
            is_new_best = sign * value > best + self.min_delta if best > -float("inf") else value == value
            best, evaluations_since_best = (sign * value, 0) if is_new_best else (best, evaluations_since_best + 1)
        return evaluations_since_best >= self.patience and best > -float("inf")  # without any value training goes on


def check_metric_name(setting: str, metric: str, names: list[str]) -> None:
    """Raises a `UserError` unless `metric` is "<name>/<task>/<metric>" of an evaluation in `names`."""
    parts = metric.split("/", 2)
    if len(parts) < 3:
        raise UserError(f'{setting} is "{metric}". It must be <name>/<task>/<metric>, such as "eval/sotu_full_lm/loss".')
    if parts[0] not in names:
        raise UserError(
            f'{setting} is "{metric}", but EVALS has no evaluation "{parts[0]}".{did_you_mean(parts[0], names)} It has '
            f"{', '.join(names) or 'none'}."
        )
