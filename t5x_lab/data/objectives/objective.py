"""Base class of training objectives. Free of TensorFlow until the preprocessors are built."""

import dataclasses
import json
from collections.abc import Callable, Mapping
from typing import ClassVar

from t5x_lab.config.errors import UserError
from t5x_lab.config.gin_files import gin_flag

Lengths = Mapping[str, int]
FEATURE_PREFIXES = ("encoder_", "decoder_")  # prefixes of the names of model features


@dataclasses.dataclass(frozen=True)
class Tokens:
    """Expected tokens of an example: processed by the model, with loss, and of raw text."""

    processed: float
    with_loss: float
    raw: float


@dataclasses.dataclass(frozen=True)
class Objective:
    """Training objective: makes examples from the tokens of documents.

    Subclasses are frozen dataclasses whose fields gin may bind.

    Attributes:
      features: features of an example. "loss_weights" marks the targets that an encoder-only model predicts.
      features_with_eos: features that end with an EOS token.
    """

    features: ClassVar[tuple[str, ...]] = ("inputs", "targets")
    features_with_eos: ClassVar[tuple[str, ...]] = ("inputs", "targets")

    def refusal(self, architecture: str) -> str | None:
        """Returns why a model of this architecture cannot be trained on the objective, as a sentence, or None if it can."""
        if architecture == "encoder":
            return "An encoder-only model predicts tokens in place and has no targets. Use masked_lm."
        return None

    def needed_lengths(self, architecture: str) -> tuple[str, ...]:
        """Returns the keys of TASK_FEATURE_LENGTHS that are used. A decoder's row is as long as their sum."""
        del architecture
        return ("inputs", "targets")

    def complete(self, lengths: Lengths, architecture: str, sentinels: int) -> dict[str, int]:
        """Returns all needed lengths. Missing ones are computed so that rows are full.

        Args:
          lengths: TASK_FEATURE_LENGTHS.
          architecture: architecture of the model.
          sentinels: number of sentinels of the vocabulary.

        Raises:
          UserError: if a length is missing and cannot be computed, or would truncate examples.
        """
        del sentinels
        needed = self.needed_lengths(architecture)
        for name in needed:
            if name not in lengths:
                raise UserError(
                    f'TASK_FEATURE_LENGTHS has no length for "{name}". Set for example '
                    f"{gin_flag('TASK_FEATURE_LENGTHS', json.dumps(dict.fromkeys(needed, 512)))}"
                )
        return {name: lengths[name] for name in needed}

    def has_segments(self, architecture: str) -> bool:
        """Returns whether an example may hold several texts, numbered by `inputs_segment_ids` and `targets_segment_ids`."""
        return False

    def tokens(self, lengths: Lengths, architecture: str, sentinels: int) -> Tokens:
        """Returns the expected tokens of an example at complete lengths."""
        raise NotImplementedError

    def preprocessors(self) -> list[Callable]:
        """Returns SeqIO preprocessors from {"targets": tokens of a document without EOS} to `features`.

        Like SeqIO's own, they may take `sequence_length`, which has the needed lengths, and `output_features`. Examples may
        have a scalar `raw_tokens`, the number of tokens of text. Otherwise inputs and targets are counted.
        """
        raise NotImplementedError

    def share_of_inputs(self, lengths: Lengths, sentinels: int) -> float:
        """Returns the share of the input length that examples fill, given the number of sentinels."""
        del lengths, sentinels
        return 1.0


def row_lengths(architecture: str, lengths: Lengths) -> tuple[int, int]:
    """Returns the tokens of a row for the encoder and for the decoder, 0 for a missing one.

    Args:
      architecture: architecture of the model.
      lengths: tokens of inputs and targets, or of model features such as `decoder_target_tokens`.
    """
    encoder, decoder = (
        max((n for name, n in lengths.items() if name.startswith(side)), default=0) for side in FEATURE_PREFIXES
    )
    if encoder or decoder:
        return encoder, decoder
    inputs, targets = lengths.get("inputs", 0), lengths.get("targets", 0)
    if architecture == "encoder":
        return inputs, 0
    return (inputs, targets) if architecture == "encoder_decoder" else (0, inputs + targets)
