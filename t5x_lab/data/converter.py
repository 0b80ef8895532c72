"""What makes a model's features of a task's examples: the protocol that ours and SeqIO's satisfy, and a user's."""

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable


@runtime_checkable
class Converter(Protocol):
    """Makes rows of examples. `seqio.EncDecFeatureConverter()` is one.

    It may have more:
      batches(dataset, task_feature_lengths, rows, drop_remainder) -> batches at once, where that costs less than putting
        single rows together.
    """

    def __call__(self, ds: Any, task_feature_lengths: Mapping[str, int]) -> Any:
        """A `tf.data.Dataset` of rows, each a dictionary of features; training, evaluation, `--dry_run` and `compile` read
        the features' shapes off it, so these must be known.

        Networks are given all features but loss weights, and a loss of one's own is given all. The library itself reads
        SeqIO's `<side>_target_tokens`, `<side>_input_tokens`, `<side>_loss_weights` and `<side>_segment_ids`, and counts
        `raw_tokens` [] and `task_tokens` [tasks] where there are any.

        Args:
          ds: examples with the tasks' features, and the scalars `raw_tokens`, tokens of text that an example was made of, and
            `task`, the number of its task. Tasks in a mixture lend each other the token features that one of them lacks,
            empty.
          task_feature_lengths: tokens of each feature, for the longest of the tasks.
        """
        ...
