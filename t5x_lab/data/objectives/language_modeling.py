"""Language modelling objectives: full LM, prefix LM, masked LM."""

import dataclasses

from t5x_lab.config.errors import UserError
from t5x_lab.data.objectives.objective import Objective, Tokens


@dataclasses.dataclass(frozen=True)
class FullLm(Objective):
    """Full language modelling: every token is predicted from all previous ones. EOS tokens separate documents."""

    features = ("targets",)
    features_with_eos = ("targets",)

    def refusal(self, architecture):
        if architecture in ("encoder_decoder", "encoder"):
            return "Full language modelling has no inputs for an encoder."
        return None

    def needed_lengths(self, architecture):
        return ("targets",)

    def tokens(self, lengths, architecture, sentinels):
        return Tokens(*(lengths["targets"],) * 3)

    def preprocessors(self):
        from t5x_lab.data.objectives import preprocessors  # needs TensorFlow

        return [preprocessors.chunk(lambda lengths, sentinels: [lengths["targets"]], end_documents=True)]


@dataclasses.dataclass(frozen=True)
class PrefixLm(Objective):
    """Prefix language modelling: a sequence is split at a uniform point into inputs and targets (Wang et al. 2022).

    A decoder's row is one sequence. An encoder-decoder's row, with inputs and targets of equal length n, holds two sequences
    split at i and n - i, so that it has no padding.

    Attributes:
      for_encoder: whether T5's task name restricts it to encoder-decoders. None = any architecture.
    """

    for_encoder: bool | None = None

    features_with_eos = ("targets",)  # documents end with EOS, in inputs or targets

    def refusal(self, architecture):
        if self.for_encoder is not None and self.for_encoder != (architecture == "encoder_decoder"):
            noun, other = ("an encoder-decoder", "decoder") if self.for_encoder else ("a decoder", "encoder_decoder")
            return f"It is for {noun}. Use prefix_lm, or prefix_lm_objective_{other}_architecture."
        return super().refusal(architecture)

    def needed_lengths(self, architecture):
        return ("inputs", "targets") if architecture == "encoder_decoder" else ("targets",)

    def complete(self, lengths, architecture, sentinels):
        needed = self.needed_lengths(architecture)
        length = lengths.get("targets", lengths.get("inputs"))
        default = {} if length is None else dict.fromkeys(needed, length)
        complete = super().complete(default | dict(lengths), architecture, sentinels)
        if len(set(complete.values())) > 1:
            raise UserError(
                "Prefix LM needs inputs and targets of equal length, two sequences per row. TASK_FEATURE_LENGTHS is "
                f"{complete}."
            )
        if complete["targets"] < 2:
            raise UserError("Prefix LM needs sequences of at least 2 tokens, one input and one target.")
        return complete

    def has_segments(self, architecture):
        return architecture == "encoder_decoder"

    def tokens(self, lengths, architecture, sentinels):
        n = lengths["targets"]
        return Tokens(n, n / 2, n)

    def preprocessors(self):
        from t5x_lab.data.objectives import preprocessors  # needs TensorFlow

        chunk = preprocessors.chunk(lambda lengths, sentinels: [lengths["targets"]], end_documents=True)
        return [chunk, preprocessors.split_prefix]


@dataclasses.dataclass(frozen=True)
class MaskedLm(Objective):
    """Masked language modelling for an encoder-only model (Devlin et al. 2019).

    Of the tokens with loss, 80 % are replaced by the first sentinel, 10 % by a random token, and 10 % are unchanged.

    Attributes:
      noise_density: share of tokens with loss.
    """

    noise_density: float = 0.15

    features = ("inputs", "targets", "loss_weights")
    features_with_eos = ()

    def refusal(self, architecture):
        if architecture != "encoder":
            return "Masked language modelling predicts tokens in place, which needs an encoder-only model. Use bert_style."
        return None

    def needed_lengths(self, architecture):
        return ("inputs",)

    def complete(self, lengths, architecture, sentinels):
        if sentinels < 1:
            raise UserError("Masked tokens are replaced by a sentinel, but the vocabulary has none. Set its extra_ids.")
        return super().complete(lengths, architecture, sentinels)

    def tokens(self, lengths, architecture, sentinels):
        n = lengths["inputs"]
        return Tokens(n, n * self.noise_density, n)

    def preprocessors(self):
        from t5x_lab.data.objectives import preprocessors  # needs TensorFlow

        chunk = preprocessors.chunk(lambda lengths, sentinels: [lengths["inputs"]])
        return [chunk, preprocessors.mask_in_place(self.noise_density)]
