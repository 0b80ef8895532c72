"""What an objective is, and those without noise in their inputs: full LM, prefix LM, masked LM.

Nothing here imports TensorFlow before the SeqIO preprocessors are asked for.
"""

import dataclasses
import json
from collections.abc import Callable, Mapping
from typing import ClassVar

from t5x_lab.config.errors import UserError
from t5x_lab.config.gin_files import flag

Lengths = Mapping[str, int]
SIDES = ("encoder_", "decoder_")  # what the names of a model's features begin with


@dataclasses.dataclass(frozen=True)
class Tokens:
    """Expected tokens of an example: all that a model processes, those with loss, and those of the raw text."""

    processed: float
    with_loss: float
    raw: float


@dataclasses.dataclass(frozen=True)
class Objective:
    """What is made of a document's tokens. Subclasses are frozen dataclasses, whose fields gin may bind.

    Attributes:
      features: of an example; "loss_weights" marks the targets that an encoder alone predicts.
      features_with_eos: those that end with an end token.
    """

    features: ClassVar[tuple[str, ...]] = ("inputs", "targets")
    features_with_eos: ClassVar[tuple[str, ...]] = ("inputs", "targets")

    def refusal(self, architecture: str) -> str | None:
        """Why a model of this architecture cannot be trained so, as a sentence; None where it can."""
        if architecture == "encoder":
            return "An encoder alone predicts tokens in place and writes no targets; masked_lm is made for it."
        return None

    def needed_lengths(self, architecture: str) -> tuple[str, ...]:
        """Keys of TASK_FEATURE_LENGTHS that count; a decoder's row is as long as all of them together."""
        del architecture
        return ("inputs", "targets")

    def complete(self, lengths: Lengths, architecture: str, sentinels: int) -> dict[str, int]:
        """All needed lengths, those that were not given computed so that rows are filled.

        Raises:
          UserError: when a length is missing, or a given one would cut examples short.
        """
        del sentinels
        needed = self.needed_lengths(architecture)
        for name in needed:
            if name not in lengths:
                raise UserError(
                    f'TASK_FEATURE_LENGTHS gives no length for "{name}". Set for example '
                    f"{flag('TASK_FEATURE_LENGTHS', json.dumps(dict.fromkeys(needed, 512)))}"
                )
        return {name: lengths[name] for name in needed}

    def has_segments(self, architecture: str) -> bool:
        """Whether an example may hold several texts, told apart by features `inputs_segment_ids` and `targets_segment_ids`."""
        return False

    def tokens(self, lengths: Lengths, architecture: str, sentinels: int) -> Tokens:
        """Expected tokens of an example at complete lengths."""
        raise NotImplementedError

    def preprocessors(self) -> list[Callable]:
        """SeqIO preprocessors from {"targets": a document's tokens, without end} to `features`.

        As SeqIO's own, they take `sequence_length`, which has the needed lengths, and `output_features` where they name them.
        Examples may have a scalar `raw_tokens` beside them, tokens of text; otherwise inputs and targets are counted.
        """
        raise NotImplementedError

    def share_of_inputs(self, lengths: Lengths, sentinels: int) -> float:
        """How full inputs are, where sentinels limit that."""
        del lengths, sentinels
        return 1.0


@dataclasses.dataclass(frozen=True)
class FullLm(Objective):
    """Every token is predicted from those before it; end tokens between documents, no barrier between them."""

    features = ("targets",)
    features_with_eos = ("targets",)

    def refusal(self, architecture):
        if architecture in ("encoder_decoder", "encoder"):
            return "Full language modelling has no inputs, so an encoder would have nothing to read."
        return None

    def needed_lengths(self, architecture):
        return ("targets",)

    def tokens(self, lengths, architecture, sentinels):
        return Tokens(*(lengths["targets"],) * 3)

    def preprocessors(self):
        from t5x_lab.data import preprocessors

        return [preprocessors.chunks(lambda lengths, sentinels: [lengths["targets"]], end_documents=True)]


@dataclasses.dataclass(frozen=True)
class PrefixLm(Objective):
    """A sequence is split at a uniform point; what comes before is read, what comes after is predicted (Wang et al. 2022).

    A decoder's row is one sequence. An encoder-decoder's row of inputs and targets of the same length n holds two, split at
    i and n - i, so that it has no padding.

    Attributes:
      for_encoder: whether T5's name for the task says it is for an encoder-decoder; None = either.
    """

    for_encoder: bool | None = None

    features_with_eos = ("targets",)  # documents end in one, wherever that comes to stand

    def refusal(self, architecture):
        if self.for_encoder is not None and self.for_encoder != (architecture == "encoder_decoder"):
            made, right = ("an encoder-decoder", "decoder") if self.for_encoder else ("a decoder", "encoder_decoder")
            return f"It is made for {made}. Use prefix_lm, or prefix_lm_objective_{right}_architecture."
        return super().refusal(architecture)

    def needed_lengths(self, architecture):
        return ("inputs", "targets") if architecture == "encoder_decoder" else ("targets",)

    def complete(self, lengths, architecture, sentinels):
        needed = self.needed_lengths(architecture)
        given = [lengths[name] for name in ("targets", "inputs") if name in lengths]
        complete = super().complete(dict.fromkeys(needed, given[0]) | dict(lengths), architecture, sentinels)
        if len(set(complete.values())) > 1:
            raise UserError(
                f"Prefix LM makes inputs and targets of one length, two sequences in a row; TASK_FEATURE_LENGTHS is {complete}."
            )
        if complete["targets"] < 2:
            raise UserError("Prefix LM needs sequences of at least 2 tokens, one to read and one to predict.")
        return complete

    def has_segments(self, architecture):
        return architecture == "encoder_decoder"

    def tokens(self, lengths, architecture, sentinels):
        n = lengths["targets"]
        return Tokens(n, n / 2, n)

    def preprocessors(self):
        from t5x_lab.data import preprocessors

        cut = preprocessors.chunks(lambda lengths, sentinels: [lengths["targets"]], end_documents=True)
        return [cut, preprocessors.split]


@dataclasses.dataclass(frozen=True)
class MaskedLm(Objective):
    """Tokens predicted in place by an encoder (Devlin et al. 2019): of those with loss, 80 % are replaced by the first
    sentinel, 10 % by a random token, and 10 % are kept.

    Attributes:
      noise_density: share of tokens with loss.
    """

    noise_density: float = 0.15

    features = ("inputs", "targets", "loss_weights")
    features_with_eos = ()

    def refusal(self, architecture):
        if architecture != "encoder":
            return "Masked language modelling predicts tokens in place, which an encoder alone can do; bert_style writes them."
        return None

    def needed_lengths(self, architecture):
        return ("inputs",)

    def complete(self, lengths, architecture, sentinels):
        if sentinels < 1:
            raise UserError("Masked tokens become a sentinel, and the vocabulary has none. Give it extra_ids.")
        return super().complete(lengths, architecture, sentinels)

    def tokens(self, lengths, architecture, sentinels):
        n = lengths["inputs"]
        return Tokens(n, n * self.noise_density, n)

    def preprocessors(self):
        from t5x_lab.data import preprocessors

        cut = preprocessors.chunks(lambda lengths, sentinels: [lengths["inputs"]])
        return [cut, preprocessors.mask_in_place(self.noise_density)]


def row_lengths(architecture: str, lengths: Lengths) -> tuple[int, int]:
    """Tokens of a row for the encoder (0 without one) and the decoder (0 of an encoder alone).

    Args:
      architecture: of the model.
      lengths: tokens by feature, of inputs and targets, or of the model's own features (`decoder_target_tokens`, …).
    """
    encoder, decoder = (max((n for name, n in lengths.items() if name.startswith(side)), default=0) for side in SIDES)
    if encoder or decoder:
        return encoder, decoder
    inputs, targets = lengths.get("inputs", 0), lengths.get("targets", 0)
    if architecture == "encoder":
        return inputs, 0
    return (inputs, targets) if architecture == "encoder_decoder" else (0, inputs + targets)
