"""What a training batch of a run is, told without its data: the tasks that it is made of, and its features' shapes.

Training, evaluation, `--dry_run` and `compile` take shapes from here.
"""

import dataclasses
from typing import Any

import jax

from t5x_lab.data.config import DataConfig
from t5x_lab.data.environment import check_environment
from t5x_lab.models.classifier import IDS


@dataclasses.dataclass(frozen=True)
class BatchOfTasks:
    """A training batch of all processes.

    Attributes:
      tasks: a `t5x_lab.data.mixture.WeightedTasks`.
      features: shapes and types, by name.
    """

    tasks: Any
    features: dict[str, jax.ShapeDtypeStruct]

    @property
    def lengths(self) -> tuple[int, int]:
        """Tokens of a row for the encoder and for the decoder, or of each of its sequences; 0 where it is not there."""
        if IDS in self.features:
            length = self.features[IDS].shape[-1]
            return {"encoder": (length, 0), "encoder_decoder": (length, 1)}.get(self.tasks.architecture, (0, length))
        of_side = lambda side: [x.shape[1] for name, x in self.features.items() if name.startswith(side) and len(x.shape) > 1]
        return max(of_side("encoder_"), default=0), max(of_side("decoder_"), default=0)

    @property
    def counted(self) -> list[str]:
        """What tokens are counted of: each task, or where batches do not tell them apart all together."""
        if "task_tokens" not in self.features:
            return [self.tasks.name if len(self.tasks.parts) > 1 else self.tasks.parts[0].task.name]
        return [part.task.name for part in self.tasks.trained]


def batch_of_tasks(data: DataConfig, architecture: str) -> BatchOfTasks:
    """The batch of a configuration, for a model of that architecture. Neither data nor the vocabulary's file are opened.

    Raises:
      UserError: for tasks, lengths and a converter that do not go together with each other or the model.
    """
    check_environment()
    from t5x_lab.data import mixture, pipeline

    tasks = mixture.resolve(data, architecture)
    features = pipeline.batch_features(tasks, data)
    return BatchOfTasks(
        tasks, {name: jax.ShapeDtypeStruct(tuple(x.shape), x.dtype.as_numpy_dtype) for name, x in features.items()}
    )
