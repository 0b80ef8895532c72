"""How many tokens a model can read and write, and inputs cut to that."""

from collections.abc import Sequence

from t5x_lab.config.errors import UserError
from t5x_lab.data.cutting import Ids, cut_left
from t5x_lab.networks.network import Network, has_encoder, max_length, more_ids


class LengthLimits:
    """The limits of a network's sequences.

    Args:
      network: what it is.
    """

    def __init__(self, network: Network):
        self._network, self.has_encoder = network, has_encoder(network)

    @property
    def max_positions(self) -> int | None:
        """Tokens that the model can tell the positions of; None where nothing limits them."""
        return max_length(self._network)

    def room(self, max_length: int | None, written: int) -> int | None:
        """Tokens of an input beside `written` ones, where `max_length` or positions limit a sequence; None = any number.

        Of a decoder, whose last token is written and not read.
        """
        limits = [limit for limit in (max_length, self.max_positions) if limit is not None]
        return min(limits) - (0 if self.has_encoder else written - 1) if limits else None

    def fit_prompts(
        self,
        prompts: Sequence[Ids],
        limits: Sequence[int],
        max_length: int | None,
        names: Sequence[str],
        openings: Sequence[Ids] = (),
    ) -> list[Ids]:
        """Prompts cut from the left where `max_length` is given, so that `limits` follow.

        Args:
          openings: what stays of a prompt that begins with it; the first of these that one does.

        Raises:
          UserError: for a prompt that cannot be read, by its name.
        """
        fitting = []
        for prompt, limit, name in zip(prompts, limits, names, strict=True):
            room, kept = self.room(max_length, limit), _length_of_opening(prompt, openings)
            self._check_ids(prompt, name)
            if self.max_positions is not None and limit > self.max_positions:
                raise UserError(f"{name}: {limit} tokens to write are more than the model's {self.max_positions} positions.")
            if room is not None and room < min(len(prompt), kept + 1):
                most = room if self.has_encoder else room - kept + limit
                raise UserError(
                    f"{name}: beside {limit} tokens to write there is no room for a prompt in {most} tokens. Write fewer, or "
                    "raise max_length."
                )
            if room is not None and len(prompt) > room and max_length is None:
                raise UserError(
                    f"{name} has {len(prompt) - kept} tokens, more than the {room - kept} that the model's positions leave "
                    f"beside {limit} to write. Shorten it, or give max_length={self.max_positions} to cut such prompts from "
                    "the left."
                )
            fitting.append(cut_left(prompt, room, kept))
        return fitting

    def fit_inputs(
        self,
        inputs: Sequence[Ids],
        targets: Sequence[Ids],
        max_length: int | None,
        names: Sequence[str],
        openings: Sequence[Ids] = (),
    ) -> list[Ids]:
        """Inputs cut from the left, behind their openings as `fit_prompts` has them, to leave room for their targets.

        Raises:
          UserError: for a target that does not fit, or inputs that cannot be read, by their name.
        """
        fitting = []
        for text, target, name in zip(inputs, targets, names, strict=True):
            room, kept = self.room(max_length, len(target)), _length_of_opening(text, openings)
            self._check_ids(text, name)
            # An encoder's decoder has a limit of its own; a decoder reads at least one token before the target's.
            most = self.room(max_length, 0) if self.has_encoder else None
            if (most is not None and len(target) > most) or (
                (kept or not self.has_encoder) and room is not None and room < min(len(text), kept + 1)
            ):
                limit = self.room(max_length, 1)
                raise UserError(
                    f"{name} has a target of {len(target)} tokens, which leaves no room for inputs in the {limit} that "
                    "max_length or the model's positions allow; only inputs are cut. Shorten it."
                )
            fitting.append(cut_left(text, room, kept))
        return fitting

    def _check_ids(self, text: Ids, name: str) -> None:
        if not text:
            reads = "an encoder" if self.has_encoder else "a decoder without a start token"
            raise UserError(f"{name} has no tokens to read; {reads} reads at least one.")
        more = more_ids(self._network)
        wrong = [i for i in text if not 0 <= i < self._network.vocab_size and i not in more]
        if wrong:
            raise UserError(f"{name} holds the id {wrong[0]}; the model's are 0 to {self._network.vocab_size - 1}.")


def _length_of_opening(ids: Ids, openings: Sequence[Ids]) -> int:
    return next((len(opening) for opening in openings if ids[: len(opening)] == opening), 0)
