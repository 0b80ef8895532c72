"""The library's own converter: from tasks' features to those of an architecture, packed or not.

The features are SeqIO's, and besides them `raw_tokens` [B], tokens of text that a row was made of, and where several tasks
are mixed `task_tokens` [B, tasks], tokens by task.
"""

import dataclasses
from collections.abc import Mapping

import seqio
import tensorflow as tf

from t5x_lab.data.objective import Lengths, row_lengths
from t5x_lab.data.rows import GROUP, batches_of_rows


@dataclasses.dataclass(frozen=True)
class FeatureConverter:
    """Makes an architecture's features of `inputs` and `targets` (and of `loss_weights`, for an encoder alone).

    Examples may have the architecture's own features instead, `decoder_target_tokens` and so on: those go into rows as they
    are. `<feature>_segment_ids` tell texts of one example apart.

    Attributes:
      architecture: of the model.
      pack: several examples in a row.
      start: what decoders read first.
      end: what ends a text.
      num_tasks: how many tasks the examples are from.
      passed: other features that go over as they are, where rows are not packed; the first axis of those with a length is
        filled up to it with 0.
    """

    architecture: str
    pack: bool = True
    start: int = 0
    end: int = 1
    num_tasks: int = 1
    passed: tuple[str, ...] = ()

    def __call__(self, ds: tf.data.Dataset, task_feature_lengths: Lengths) -> tf.data.Dataset:
        """Rows, see `t5x_lab.protocols.Converter`."""
        return self.batches(ds, task_feature_lengths, GROUP, drop_remainder=False).unbatch()

    def batches(
        self, ds: tf.data.Dataset, task_feature_lengths: Lengths, rows: int, drop_remainder: bool = True
    ) -> tf.data.Dataset:
        """Batches of rows.

        Args:
          ds: examples.
          task_feature_lengths: tokens by feature; a decoder's row has room for inputs and targets.
          rows: of a batch.
          drop_remainder: whether a last batch with fewer rows is left out.
        """
        lengths = dict(zip(("encoder", "decoder"), row_lengths(self.architecture, task_feature_lengths), strict=True))
        used = {name: n for name, n in lengths.items() if n}
        to_streams = lambda group: {name: _given(name, group) or self._stream(name, group) for name in used}
        finish = dict if self.architecture == "encoder" else self._with_decoder_inputs
        with_length = {name: task_feature_lengths[name] for name in self.passed if name in task_feature_lengths}
        if with_length:
            ds = seqio.trim_and_pad_dataset(ds, with_length)
        return batches_of_rows(
            ds, to_streams, finish, used, rows, pack=self.pack, num_tasks=self.num_tasks, drop_remainder=drop_remainder,
            end=self.end, kept=self.passed,
        )  # fmt: skip

    def _stream(self, side: str, group: Mapping[str, tf.RaggedTensor]) -> dict[str, tf.RaggedTensor]:
        if self.architecture == "encoder":
            names = {"input_tokens": "inputs", "target_tokens": "targets", "loss_weights": "loss_weights"}
            return {f"encoder_{name}": group[feature] for name, feature in names.items()}
        if self.architecture != "encoder_decoder":
            return _inputs_and_targets(group)
        feature, name = ("inputs", "input_tokens") if side == "encoder" else ("targets", "target_tokens")
        ids = {f"{side}_segment_ids": group[f"{feature}_segment_ids"]} if f"{feature}_segment_ids" in group else {}
        return {f"{side}_{name}": group[feature], **ids}

    def _with_decoder_inputs(self, batch: Mapping[str, tf.Tensor]) -> dict[str, tf.Tensor]:
        """With the targets shifted to the right within their segment, and loss weights, where there are none."""
        targets = batch["decoder_target_tokens"]
        shifted = tf.pad(targets, [[0, 0], [1, 0]], constant_values=self.start)[:, :-1]
        is_token = targets > 0
        if "decoder_segment_ids" in batch:
            is_token = batch["decoder_segment_ids"] > 0  # 0 is a token of some vocabularies
            shifted = tf.where((batch["decoder_positions"] == 0) & is_token, self.start, shifted)
        return {"decoder_input_tokens": shifted, "decoder_loss_weights": tf.cast(is_token, tf.int32), **batch}


def _given(side: str, group: Mapping[str, tf.RaggedTensor]) -> dict[str, tf.RaggedTensor]:
    """The side's features, where examples have them; the first is one that gives the tokens."""
    return {name: x for name, x in sorted(group.items(), key=lambda item: "_tokens" not in item[0]) if name.startswith(side)}


def _inputs_and_targets(group: Mapping[str, tf.RaggedTensor]) -> dict[str, tf.RaggedTensor]:
    """As one sequence, with loss on the targets."""
    targets = group["targets"]
    if "inputs" not in group:
        return {"decoder_target_tokens": targets}
    tokens = tf.concat([group["inputs"], targets], axis=1)
    size = tokens.row_lengths()
    prefix = tf.repeat(group["inputs"].row_lengths(), size)
    position = tf.ragged.range(size).values
    flags = {
        "decoder_loss_weights": position >= prefix,
        # One more than the prefix: decoder inputs are shifted to the right by one.
        "decoder_causal_attention": position <= prefix,
    }
    return {"decoder_target_tokens": tokens, **{name: tokens.with_values(x) for name, x in flags.items()}}
