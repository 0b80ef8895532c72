"""Texts to token ids and back, and checks of the texts that a user asks a model about."""

import itertools
import operator
from collections.abc import Callable, Sequence

import numpy as np

from t5x_lab.config.errors import UserError
from t5x_lab.runs.padding import Ids


class Texts:
    """Encodes inputs and decodes completions with a model's vocabulary.

    Args:
      vocabulary: a SeqIO vocabulary.
      has_encoder: whether inputs go into an encoder; else a completion continues its prompt.
      end_ids: what ends a text that is written.
      eos_id: what ends one that is read; -1 = nothing.
      around_inputs: () -> ids before and after inputs; asked when a text is encoded.
    """

    def __init__(
        self,
        vocabulary,
        has_encoder: bool,
        end_ids: tuple[int, ...],
        eos_id: int,
        around_inputs: Callable[[], tuple[Ids, Ids]],
    ):
        self.vocabulary, self._has_encoder, self._end_ids, self._eos_id = vocabulary, has_encoder, end_ids, eos_id
        self._around_inputs = around_inputs

    def encode(self, text: str, eos: bool = False) -> Ids:
        if eos and self._eos_id < 0:
            raise UserError(
                "The tokenizer has no end token. Set SpecialTokens.end to the id that ends texts, or leave out eos."
            )
        return [*self.vocabulary.encode(text), *((self._eos_id,) if eos else ())]

    def encode_input(self, text: str | Sequence[int]) -> Ids:
        """Ids of an input; ids are taken as they are."""
        if not isinstance(text, str):
            return ids_of(text)
        before, after = self._around_inputs()
        return [*before, *self.vocabulary.encode(text), *after]

    def completion(self, prompt: Ids, tokens: np.ndarray, stop: Sequence[str] = ()) -> str:
        """The text of generated tokens, up to the first of the texts `stop` in it.

        A decoder's tokens are decoded together with the prompt, which tells whether a space comes between.
        """
        vocabulary, ends = self.vocabulary, self._end_ids
        ids = list(itertools.takewhile(lambda token: token not in ends, map(int, tokens)))
        text = vocabulary.decode(ids)
        if not self._has_encoder and prompt and prompt[-1] not in ends:
            prompt = [token for token in prompt if token not in (*ends, vocabulary.eos_id)]  # SeqIO's decode would stop there
            before, both = vocabulary.decode(prompt), vocabulary.decode(prompt + ids)
            if both.startswith(before):
                text = both[len(before) :]
        return text[: min((at for end in stop if (at := text.find(end)) >= 0), default=len(text))]


def ids_of(row) -> Ids:
    """A text's token ids, as a list.

    Raises:
      UserError: for anything else.
    """
    try:
        return [operator.index(i) for i in row]
    except TypeError as error:
        raise UserError(f"{row!r:.40} is neither a text nor a list of token ids.") from error


def without_padding(rows, padding: int) -> list[Ids]:
    """Rows of an array without the padding at their ends; lists of ids as they are."""
    found = []
    for row in rows:
        ids = ids_of(row)
        while isinstance(rows, np.ndarray) and ids and ids[-1] == padding:
            ids.pop()
        found.append(ids)
    return found


def check_texts(function: str, texts, name: str = "texts") -> None:
    if isinstance(texts, str):
        raise UserError(f"{function} takes {name} as a list; write [{texts[:20]!r}] for a single one.")


def check_pairs(inputs, targets) -> None:
    """Raises a `UserError` unless inputs and targets of `score` are as many, and of one kind."""
    for texts in (inputs, targets):
        check_texts("score", texts)
    if len(inputs) != len(targets):
        raise UserError(f"score was given {len(inputs)} inputs and {len(targets)} targets; give one target for each input.")
    if len({isinstance(text, str) for text in (*inputs, *targets)}) > 1:
        raise UserError("score was given texts and token ids together; give inputs and targets of one kind.")


def check_generation(prompts, stop: Sequence[str], num_samples: int, seed: int, streams: Sequence[int] | None) -> None:
    """Raises a `UserError` for arguments of `generate` that make no sense."""
    check_texts("generate", prompts)
    check_texts("generate", stop, "stop")
    if num_samples < 1:
        raise UserError(f"num_samples is {num_samples}; it must be at least 1.")
    if "" in stop:
        raise UserError("stop holds an empty text, which every text contains; leave it out.")
    if not 0 <= seed < 2**32:
        raise UserError(f"seed is {seed}; it must be at least 0 and below 2**32.")
    if streams is not None and len(streams) != len(prompts):
        raise UserError(f"streams has {len(streams)} numbers for {len(prompts)} prompts; give one for each.")


def check_beams(beam_size: int, temperature: float, num_samples: int) -> None:
    """Raises a `UserError` for arguments of `generate` that do not go with a beam search."""
    if temperature or num_samples > beam_size:
        raise UserError(
            f"beam_size is {beam_size}, which does not go with temperature {temperature} and num_samples {num_samples}: a beam "
            "search draws nothing, and finds no more than beam_size texts."
        )


def limits_of(max_tokens: int | Sequence[int], number: int) -> list[int]:
    """The most tokens to write after each prompt."""
    try:
        given = np.asarray(max_tokens)
    except ValueError:  # lists of different lengths
        given = np.asarray(None)
    if given.ndim > 1 or given.dtype.kind not in "iu":
        raise UserError(f"max_tokens is {max_tokens!r:.40}; it is a whole number, or one for each prompt.")
    limits = [int(given)] * number if given.ndim == 0 else [int(limit) for limit in given]
    if len(limits) != number:
        raise UserError(f"max_tokens has {len(limits)} numbers for {number} prompts; give one number, or one for each.")
    if min(limits, default=1) < 1:
        raise UserError(f"max_tokens is {min(limits)}; it must be at least 1.")
    return limits


def numbered(kind: str, texts: Sequence) -> list[str]:
    """What messages call each of the texts."""
    return [f"{kind} {number}" for number in range(len(texts))]
