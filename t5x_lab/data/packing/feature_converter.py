"""Feature converter: from tasks' features to the model features of an architecture, packed or not.

Model features are SeqIO's. In addition there is `raw_tokens` [B], tokens of text that a row was made of, and for mixtures
`task_tokens` [B, tasks], tokens by task.
"""

import dataclasses
from collections.abc import Mapping

import seqio
import tensorflow as tf

from t5x_lab.data.objectives.objective import Lengths, row_lengths
from t5x_lab.data.packing.rows import GROUP, pack_batches


@dataclasses.dataclass(frozen=True)
class FeatureConverter:
    """Converts `inputs` and `targets` (and `loss_weights`, for an encoder-only model) to model features.

    Examples may have model features instead, such as `decoder_target_tokens`, which are used unchanged.
    `<feature>_segment_ids` number the texts of one example.

    Attributes:
      architecture: architecture of the model.
      pack: whether a row may hold several examples.
      start: start token of decoders.
      eos: EOS token.
      input_eos: EOS token of an encoder's inputs, if they have a vocabulary of their own. None = `eos`.
      num_tasks: number of tasks that examples come from.
      passthrough: other features that are kept unchanged in unpacked rows. Those with a length are padded to it with 0.
    """

    architecture: str
    pack: bool = True
    start: int = 0
    eos: int = 1
    input_eos: int | None = None
    num_tasks: int = 1
    passthrough: tuple[str, ...] = ()

    def __call__(self, ds: tf.data.Dataset, task_feature_lengths: Lengths) -> tf.data.Dataset:
        """Returns rows. See `t5x_lab.protocols.Converter`."""
        return self.batches(ds, task_feature_lengths, GROUP, drop_remainder=False).unbatch()

    def batches(
        self, ds: tf.data.Dataset, task_feature_lengths: Lengths, rows: int, drop_remainder: bool = True
    ) -> tf.data.Dataset:
        """Returns batches of rows.

        Args:
          ds: examples.
          task_feature_lengths: tokens by feature. A decoder's row holds inputs and targets.
          rows: rows per batch.
          drop_remainder: whether a last batch with fewer rows is dropped.
        """
        lengths = dict(zip(("encoder", "decoder"), row_lengths(self.architecture, task_feature_lengths), strict=True))
        used = {name: n for name, n in lengths.items() if n}
        to_streams = lambda group: {name: _model_features(name, group) or self._stream(name, group) for name in used}
        finish = dict if self.architecture == "encoder" else self._with_decoder_inputs
        padded_lengths = {name: task_feature_lengths[name] for name in self.passthrough if name in task_feature_lengths}
        if padded_lengths:
            ds = seqio.trim_and_pad_dataset(ds, padded_lengths)
        return pack_batches(
            ds, to_streams, finish, used, rows, pack=self.pack, num_tasks=self.num_tasks, drop_remainder=drop_remainder,
            eos={"encoder": self.eos if self.input_eos is None else self.input_eos, "decoder": self.eos},
            passthrough=self.passthrough,
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
        """Adds shifted targets as decoder inputs, within each segment, and loss weights, unless the batch has them."""
        targets = batch["decoder_target_tokens"]
        shifted = tf.pad(targets, [[0, 0], [1, 0]], constant_values=self.start)[:, :-1]
        is_token = targets > 0
        if "decoder_segment_ids" in batch:
            is_token = batch["decoder_segment_ids"] > 0  # 0 is a token of some vocabularies
            shifted = tf.where((batch["decoder_positions"] == 0) & is_token, self.start, shifted)
        return {"decoder_input_tokens": shifted, "decoder_loss_weights": tf.cast(is_token, tf.int32), **batch}


def _model_features(side: str, group: Mapping[str, tf.RaggedTensor]) -> dict[str, tf.RaggedTensor]:
    """Returns the model features of the encoder or decoder that examples have, token features first."""
    return {name: x for name, x in sorted(group.items(), key=lambda item: "_tokens" not in item[0]) if name.startswith(side)}


def _inputs_and_targets(group: Mapping[str, tf.RaggedTensor]) -> dict[str, tf.RaggedTensor]:
    """Concatenates inputs and targets, with loss on the targets."""
    targets = group["targets"]
    if "inputs" not in group:
        return {"decoder_target_tokens": targets}
    tokens = tf.concat([group["inputs"], targets], axis=1)
    size = tokens.row_lengths()
    prefix = tf.repeat(group["inputs"].row_lengths(), size)
    position = tf.ragged.range(size).values
    flags = {
        "decoder_loss_weights": position >= prefix,
        # One more than the prefix: decoder inputs are shifted right by one.
        "decoder_causal_attention": position <= prefix,
    }
    return {"decoder_target_tokens": tokens, **{name: tokens.with_values(x) for name, x in flags.items()}}
