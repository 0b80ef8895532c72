"""From task features to model features: one converter per architecture, over SeqIO's own packing.

Besides SeqIO's features every row carries `raw_tokens`: tokens drawn from the text, which are not padding, sentinels or
end tokens that an objective added (so 568 of 626 for span corruption at 512 + 114).
"""

from collections.abc import Mapping

import seqio
import tensorflow as tf

from t5x_lab.config.errors import UserError
from t5x_lab.data.vocabularies import special_ids

PREPACKED = "decoder_target_tokens"


def convert(
    dataset: tf.data.Dataset,
    architecture: str,
    features: Mapping[str, seqio.Feature],
    lengths: Mapping[str, int],
    vocabulary: seqio.Vocabulary,
    pack: bool,
) -> tf.data.Dataset:
    """Model features of a task's examples, in rows of full length."""
    if PREPACKED in features:
        dataset = dataset.map(lambda row: {name: row[name] for name in features if name in row and name != "targets"})
    elif architecture == "encoder_decoder":
        dataset = seqio.EncDecFeatureConverter(pack=pack)(dataset, lengths)
    else:
        dataset = seqio.DecoderFeatureConverter(pack=pack)(dataset, lengths)
    denoised = "inputs" in features

    def count(row):
        tokens = [row[name] for name in ("encoder_input_tokens", "decoder_target_tokens") if name in row]
        return {**row, "raw_tokens": sum(_raw_tokens(t, vocabulary, denoised) for t in tokens)}

    return dataset.map(count, num_parallel_calls=tf.data.AUTOTUNE)


def _raw_tokens(tokens: tf.Tensor, vocabulary: seqio.Vocabulary, denoised: bool) -> tf.Tensor:
    raw = tokens != vocabulary.pad_id
    if denoised:  # otherwise the end tokens are the text's own document ends
        special = special_ids(vocabulary)
        raw &= (tokens != vocabulary.eos_id) & ~((tokens >= special.start) & (tokens < special.stop))
    return tf.reduce_sum(tf.cast(raw, tf.int32))


def model_lengths(architecture: str, features: Mapping[str, seqio.Feature], lengths: Mapping[str, int]) -> tuple[int, int]:
    """Tokens of a row for the encoder (0 without one) and for the decoder, of a task whose `lengths` are `task_lengths`."""
    if architecture == "encoder_decoder":
        return lengths["inputs"], lengths["targets"]
    return 0, lengths["targets"] if PREPACKED in features else sum(lengths.values())


def task_lengths(
    name: str, architecture: str, features: Mapping[str, seqio.Feature], lengths: Mapping[str, int]
) -> dict[str, int]:
    """The lengths this task needs, or a sentence saying why task and architecture do not go together.

    Raises:
      UserError: when a length is missing or the objective is not defined for the architecture.
    """
    has_encoder = architecture == "encoder_decoder"
    prepacked_for_encoder = "encoder_input_tokens" in features
    if PREPACKED in features and prepacked_for_encoder != has_encoder:
        right = "encoder_decoder" if prepacked_for_encoder else "decoder"
        raise UserError(
            f'The task "{name}" is made for a{"n" if has_encoder is False else ""} {right.replace("_", "-")} model, but the '
            f'model is of architecture "{architecture}". Use prefix_lm_objective_'
            f"{'encoder_decoder' if has_encoder else 'decoder'}_architecture instead."
        )
    if has_encoder and PREPACKED not in features and "inputs" not in features:
        raise UserError(
            f'The task "{name}" has no inputs (full language modelling), so an encoder would have nothing to read. Use a '
            "decoder model, or span corruption or prefix LM for an encoder-decoder."
        )
    needed = ("inputs", "targets") if "inputs" in features or prepacked_for_encoder else ("targets",)
    missing = [feature for feature in needed if feature not in lengths]
    if missing:
        raise UserError(
            f'The task "{name}" needs a length for "{missing[0]}"; TASK_FEATURE_LENGTHS gives only '
            f"{', '.join(lengths)}. Set for example --gin.TASK_FEATURE_LENGTHS={dict.fromkeys(needed, 512)}"
        )
    result = {feature: lengths[feature] for feature in needed}
    if PREPACKED in features and (len(set(result.values())) > 1 or any(length % 2 for length in result.values())):
        raise UserError(f'The task "{name}" makes rows of one even length for all features; TASK_FEATURE_LENGTHS is {result}.')
    return result
