"""From examples to model features: one converter per architecture, packed or not.

The features are SeqIO's, and besides them `raw_tokens` [B], tokens of text that a row was made of, and where several tasks
are mixed `task_tokens` [B, tasks], tokens by task.
"""

from collections.abc import Mapping

import tensorflow as tf

from t5x_lab.data.rows import batches_of_rows


def convert(
    dataset: tf.data.Dataset, architecture: str, lengths: tuple[int, int], rows: int, *, pack: bool, num_tasks: int = 1,
    drop_remainder: bool = True, start: int = 0, end: int = 1,
) -> tf.data.Dataset:  # fmt: skip
    """Batches of model features.

    Args:
      dataset: examples: `targets`, `inputs` where the tasks have them, `loss_weights` for an encoder alone, and the scalars
        `raw_tokens` and, of several tasks, `task`.
      architecture: of the model.
      lengths: tokens of a row for the encoder and for the decoder.
      rows: of a batch.
      pack: several examples in a row.
      num_tasks: how many tasks the examples are from.
      drop_remainder: whether a last batch with fewer rows is left out.
      start: what decoders read first.
      end: what ends a text.
    """
    to_streams, finish = {
        "encoder_decoder": (_encoder_decoder, _autoregressive),
        "causal_decoder": (_decoder, _autoregressive),
        "prefix_decoder": (_decoder, _autoregressive),
        "encoder": (_encoder, lambda batch, pack, start: batch),
    }[architecture]
    by_stream = {name: n for name, n in zip(("encoder", "decoder"), lengths, strict=True) if n}
    finish_rows = lambda batch: finish(batch, pack, start)
    return batches_of_rows(
        dataset, to_streams, finish_rows, by_stream, rows, pack=pack, num_tasks=num_tasks, drop_remainder=drop_remainder,
        end=end,
    )  # fmt: skip


def _encoder_decoder(group):
    return {
        "encoder": {"encoder_input_tokens": group["inputs"]},
        "decoder": {"decoder_target_tokens": group["targets"]},
    }


def _decoder(group):
    """Inputs and targets as one sequence, with loss on the targets."""
    targets = group["targets"]
    if "inputs" not in group:
        return {"decoder": {"decoder_target_tokens": targets}}
    tokens = tf.concat([group["inputs"], targets], axis=1)
    size = tokens.row_lengths()
    prefix = tf.repeat(group["inputs"].row_lengths(), size)
    position = tf.ragged.range(size).values
    flags = {
        "decoder_loss_weights": position >= prefix,
        # One more than the prefix: decoder inputs are shifted to the right by one.
        "decoder_causal_attention": position <= prefix,
    }
    return {"decoder": {"decoder_target_tokens": tokens, **{name: tokens.with_values(x) for name, x in flags.items()}}}


def _encoder(group):
    return {
        "encoder": {
            "encoder_input_tokens": group["inputs"],
            "encoder_target_tokens": group["targets"],
            "encoder_loss_weights": group["loss_weights"],
        }
    }


def _autoregressive(batch: Mapping[str, tf.Tensor], pack: bool, start: int) -> dict[str, tf.Tensor]:
    """Adds decoder inputs, the targets shifted to the right within their segment, and loss weights where there are none."""
    shifted = tf.pad(batch["decoder_target_tokens"], [[0, 0], [1, 0]], constant_values=start)[:, :-1]
    is_token = batch["decoder_target_tokens"] > 0
    if pack:
        is_token = batch["decoder_segment_ids"] > 0  # 0 is a token of some vocabularies
        shifted = tf.where((batch["decoder_positions"] == 0) & is_token, start, shifted)
    weights = batch.get("decoder_loss_weights", tf.cast(is_token, tf.int32))
    return {**batch, "decoder_input_tokens": shifted, "decoder_loss_weights": weights}
