"""Length limits of a model, and truncation of prompts and inputs to them."""

from collections.abc import Sequence

from t5x_lab.config.errors import UserError
from t5x_lab.data.vocabularies.truncation import Ids, cut_left
from t5x_lab.networks.network import Network, additional_ids, has_encoder, max_length


class LengthLimits:
    """Length limits of a network's sequences.

    Args:
      network: configuration of the network.
    """

    def __init__(self, network: Network):
        self._network, self.has_encoder = network, has_encoder(network)

    @property
    def max_positions(self) -> int | None:
        """Maximum length of a sequence, None if unlimited."""
        return max_length(self._network)

    def input_limit(self, max_length: int | None, new_tokens: int) -> int | None:
        """Returns the maximum tokens of an input before `new_tokens` tokens, None if unlimited.

        A decoder does not read the last new token.
        """
        limits = [limit for limit in (max_length, self.max_positions) if limit is not None]
        return min(limits) - (0 if self.has_encoder else new_tokens - 1) if limits else None

    def truncate_prompts(
        self,
        prompts: Sequence[Ids],
        limits: Sequence[int],
        max_length: int | None,
        names: Sequence[str],
        protected_prefixes: Sequence[Ids] = (),
    ) -> list[Ids]:
        """Truncates prompts from the left if `max_length` is set, to leave room for new tokens.

        Args:
          prompts: token ids.
          limits: maximum number of new tokens of each prompt.
          max_length: maximum length of a sequence. None = do not truncate.
          names: names of the prompts in messages.
          protected_prefixes: prefixes that truncation keeps. The first that a prompt begins with applies.

        Raises:
          UserError: for a prompt that cannot be read. The message has its name.
        """
        truncated = []
        for prompt, limit, name in zip(prompts, limits, names, strict=True):
            room, prefix = self.input_limit(max_length, limit), _prefix_length(prompt, protected_prefixes)
            self._check_ids(prompt, name)
            if self.max_positions is not None and limit > self.max_positions:
                raise UserError(f"{name}: {limit} new tokens exceed the model's maximum of {self.max_positions}.")
            if room is not None and room < min(len(prompt), prefix + 1):
                total = room if self.has_encoder else room - prefix + limit
                raise UserError(
                    f"{name}: with {limit} new tokens there is no room for a prompt in {total} tokens. Lower max_tokens, or "
                    "increase max_length."
                )
            if room is not None and len(prompt) > room and max_length is None:
                raise UserError(
                    f"{name} has {len(prompt) - prefix} tokens, more than the {room - prefix} that the model's maximum leaves "
                    f"for it with {limit} new tokens. Shorten it, or set max_length={self.max_positions} to truncate prompts "
                    "from the left."
                )
            truncated.append(cut_left(prompt, room, prefix))
        return truncated

    def truncate_inputs(
        self,
        inputs: Sequence[Ids],
        targets: Sequence[Ids],
        max_length: int | None,
        names: Sequence[str],
        protected_prefixes: Sequence[Ids] = (),
    ) -> list[Ids]:
        """Truncates inputs from the left to leave room for their targets. See `truncate_prompts` for the arguments.

        Raises:
          UserError: for a target that does not fit, or inputs that cannot be read. The message has the name.
        """
        truncated = []
        for text, target, name in zip(inputs, targets, names, strict=True):
            room, prefix = self.input_limit(max_length, len(target)), _prefix_length(text, protected_prefixes)
            self._check_ids(text, name)
            # The decoder behind an encoder has its own limit. A decoder reads at least one token before the target.
            target_limit = self.input_limit(max_length, 0) if self.has_encoder else None
            has_no_room = room is not None and room < min(len(text), prefix + 1)
            if (target_limit is not None and len(target) > target_limit) or ((prefix or not self.has_encoder) and has_no_room):
                limit = self.input_limit(max_length, 1)
                raise UserError(
                    f"{name} has a target of {len(target)} tokens, which leaves no room for inputs in the {limit} tokens that "
                    "max_length or the model allows. Only inputs are truncated. Shorten the target."
                )
            truncated.append(cut_left(text, room, prefix))
        return truncated

    def _check_ids(self, text: Ids, name: str) -> None:
        if not text:
            reader = "An encoder" if self.has_encoder else "A decoder without a start token"
            raise UserError(f"{name} has no tokens. {reader} needs at least one.")
        extra = additional_ids(self._network)
        invalid = [i for i in text if not 0 <= i < self._network.vocab_size and i not in extra]
        if invalid:
            raise UserError(f"{name} contains the id {invalid[0]}. The model's ids are 0 to {self._network.vocab_size - 1}.")


def _prefix_length(ids: Ids, prefixes: Sequence[Ids]) -> int:
    return next((len(prefix) for prefix in prefixes if ids[: len(prefix)] == prefix), 0)
