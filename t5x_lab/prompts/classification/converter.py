"""Feature converter of classification tasks, which gin binds as DataConfig.converter. Imports TensorFlow when it is called."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from t5x_lab.config.errors import UserError


@dataclasses.dataclass(frozen=True)
class SequencesConverter:
    """Converts examples of a task such as "classify_glue_cola" into a classifier's batches.

    Attributes:
      head: the model's classification head, %HEAD.
    """

    head: Any

    def __call__(self, ds: Any, task_feature_lengths: Mapping[str, int]) -> Any:
        """Returns rows of `t5x_lab.models.classifier.Classifier`. See `t5x_lab.protocols.Converter`."""
        import tensorflow as tf  # keeps TensorFlow out of the core

        spec = ds.element_spec
        if not {"inputs", "lengths", "label"} <= set(spec) or "inputs" not in task_feature_lengths:
            raise UserError(
                f"A classifier needs inputs [K, T], lengths [K] and label [classes]. Examples have {', '.join(spec)}, and "
                f"TASK_FEATURE_LENGTHS {', '.join(task_feature_lengths)}. Use a task such as classify_glue_cola."
            )
        sequences, classes, length = self.head.sequences, len(self.head.classes), task_feature_lengths["inputs"]

        @tf.autograph.experimental.do_not_convert
        def to_row(example: dict[str, Any]) -> dict[str, Any]:
            expected = (("lengths", sequences, "sequences"), ("label", classes, "classes"))
            checks = [
                tf.debugging.assert_equal(tf.size(example[name]), number, f"The number of {noun} differs from the head's")
                for name, number, noun in expected
            ]
            with tf.control_dependencies(checks):
                inputs = tf.pad(example["inputs"], [[0, 0], [0, length - tf.shape(example["inputs"])[1]]])
            counters: dict[str, Any] = {name: example[name] for name in ("raw_tokens", "task") if name in example}
            return {
                "sequences": tf.ensure_shape(inputs, [sequences, length]),
                "sequence_lengths": tf.ensure_shape(example["lengths"], [sequences]),
                "class_probabilities": tf.ensure_shape(example["label"], [classes]),
                **counters,
            }

        return ds.map(to_row)
