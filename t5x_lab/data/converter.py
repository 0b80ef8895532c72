"""Protocol of feature converters, which the library's, SeqIO's and a user's satisfy."""

from collections.abc import Mapping
from typing import Any, Protocol


class Converter(Protocol):
    """Converts examples to rows of model features. `seqio.EncDecFeatureConverter()` is one.

    A converter may also have `batches(dataset, task_feature_lengths, rows, drop_remainder)`, which returns batches, if that is
    faster than batching rows.
    """

    def __call__(self, ds: Any, task_feature_lengths: Mapping[str, int]) -> Any:
        """Returns a `tf.data.Dataset` of rows, each a dictionary of features with static shapes.

        Networks receive all features except loss weights, and a custom loss receives all. The library reads SeqIO's
        `<side>_target_tokens`, `<side>_input_tokens`, `<side>_loss_weights` and `<side>_segment_ids`, and counts `raw_tokens`
        [] and `task_tokens` [tasks] if they exist.

        Args:
          ds: examples with the tasks' features and two scalars: `raw_tokens`, tokens of text that an example was made of, and
            `task`, the number of its task. Token features that a task of a mixture lacks are empty.
          task_feature_lengths: tokens of each feature, the maximum over tasks.
        """
        ...
