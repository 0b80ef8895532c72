"""The tasks and feature shapes of a training batch, determined without reading data.

Used by training, evaluation, `--dry_run` and `compile`.
"""

import dataclasses
from typing import Any

import jax

from t5x_lab.data.config import DataConfig
from t5x_lab.models.classifier import IDS
from t5x_lab.runs.data_layer import load_data_layer


@dataclasses.dataclass(frozen=True)
class ResolvedBatch:
    """A global training batch, of all processes together.

    Attributes:
      tasks: a `t5x_lab.data.tasks.mixture.ResolvedMixture`.
      features: shapes and dtypes by feature name.
    """

    tasks: Any
    features: dict[str, jax.ShapeDtypeStruct]

    @property
    def lengths(self) -> tuple[int, int]:
        """Encoder and decoder length in tokens, of a row or of each of its sequences. 0 = no encoder or decoder."""
        if IDS in self.features:
            length = self.features[IDS].shape[-1]
            return {"encoder": (length, 0), "encoder_decoder": (length, 1)}.get(self.tasks.architecture, (0, length))
        side_lengths = lambda side: [
            x.shape[1] for name, x in self.features.items() if name.startswith(side) and len(x.shape) > 1
        ]
        return max(side_lengths("encoder_"), default=0), max(side_lengths("decoder_"), default=0)

    @property
    def counted_tasks(self) -> list[str]:
        """Names of the tasks whose tokens are counted; the mixture's name if batches do not tell tasks apart."""
        if "task_tokens" not in self.features:
            return [self.tasks.name if len(self.tasks.components) > 1 else self.tasks.components[0].task.name]
        return [component.task.name for component in self.tasks.train_components]


def resolve_batch(data: DataConfig, architecture: str) -> ResolvedBatch:
    """Returns the batch of a configuration for an architecture, without opening data or vocabulary files.

    Raises:
      UserError: for tasks, lengths or a converter that do not fit each other or the architecture.
    """
    load_data_layer()
    from t5x_lab.data.pipeline.rows import batch_features
    from t5x_lab.data.tasks import mixture

    tasks = mixture.resolve_mixture(data, architecture)
    features = batch_features(tasks, data)
    return ResolvedBatch(
        tasks, {name: jax.ShapeDtypeStruct(tuple(x.shape), x.dtype.as_numpy_dtype) for name, x in features.items()}
    )
