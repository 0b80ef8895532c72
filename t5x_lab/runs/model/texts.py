"""Encoding of input texts, decoding of completions, and checks of a caller's arguments."""

import functools
import itertools
import operator
from collections.abc import Callable, Sequence

import numpy as np

from t5x_lab.config.errors import UserError
from t5x_lab.runs.model.padding import Ids


class Texts:
    """Encodes inputs and decodes completions with a model's vocabulary.

    Args:
      vocabulary: SeqIO vocabulary of targets.
      input_vocabulary: SeqIO vocabulary of inputs.
      has_encoder: whether inputs go to an encoder. Else a completion continues its prompt.
      stop_ids: ids that stop generation.
      eos_id: EOS token of input texts, -1 = none.
      input_affixes: () -> (ids before inputs, ids after inputs).
    """

    def __init__(
        self,
        vocabulary,
        input_vocabulary,
        has_encoder: bool,
        stop_ids: tuple[int, ...],
        eos_id: int,
        input_affixes: Callable[[], tuple[Ids, Ids]],
    ):
        self.vocabulary, self._input_vocabulary = vocabulary, input_vocabulary
        self._has_encoder, self._stop_ids, self._eos_id = has_encoder, stop_ids, eos_id
        self._input_affixes = input_affixes

    def encode(self, text: str, eos: bool = False) -> Ids:
        """Returns the ids of a text, with an EOS token if `eos`."""
        if eos and self._eos_id < 0:
            raise UserError("The tokenizer has no EOS token. Set SpecialTokens.end to its id, or leave out eos.")
        return [*self.vocabulary.encode(text), *((self._eos_id,) if eos else ())]

    def encode_input(self, text: str | Sequence[int]) -> Ids:
        """Returns the ids of an input text. Ids are returned unchanged."""
        if not isinstance(text, str):
            return to_token_ids(text)
        prefix, suffix = self._input_affixes()
        return [*prefix, *self._input_vocabulary.encode(text), *suffix]

    def completion(self, prompt: Ids, tokens: np.ndarray, stop: Sequence[str] = (), skip_special_tokens: bool = True) -> str:
        """Returns the text of generated tokens, cut before the first of the `stop` texts.

        A decoder's tokens are decoded together with the prompt, which decides whether a space separates them.
        """
        vocabulary, stop_ids = self.vocabulary, self._stop_ids
        ids = list(itertools.takewhile(lambda token: token not in stop_ids, map(int, tokens)))
        decode = vocabulary.decode
        if skip_special_tokens:
            ids = [token for token in ids if token not in self._special_ids]
        else:
            decode = getattr(vocabulary, "decode_with_special_tokens", decode)
        text = decode(ids)
        if not self._has_encoder and prompt and prompt[-1] not in stop_ids:
            # SeqIO's decode would stop at these ids.
            prompt = [token for token in prompt if token not in (*stop_ids, vocabulary.eos_id)]
            prompt_text, whole_text = decode(prompt), decode(prompt + ids)
            if whole_text.startswith(prompt_text):
                text = whole_text[len(prompt_text) :]
        positions = (position for stop_text in stop if (position := text.find(stop_text)) >= 0)
        return text[: min(positions, default=len(text))]

    @functools.cached_property
    def _special_ids(self) -> frozenset[int]:
        from t5x_lab.data.vocabularies.build import special_ids  # imports TensorFlow

        return special_ids(self.vocabulary)


def to_token_ids(row) -> Ids:
    """Returns token ids as a list.

    Raises:
      UserError: for anything else.
    """
    try:
        return [operator.index(i) for i in row]
    except TypeError as error:
        raise UserError(f"{row!r:.40} is neither a text nor a list of token ids.") from error


def strip_padding(rows, padding: int) -> list[Ids]:
    """Returns the rows of an array without padding at their ends. Lists of ids are returned unchanged."""
    stripped = []
    for row in rows:
        ids = to_token_ids(row)
        while isinstance(rows, np.ndarray) and ids and ids[-1] == padding:
            ids.pop()
        stripped.append(ids)
    return stripped


def check_texts(function: str, texts, name: str = "texts") -> None:
    """Raises a `UserError` for a single text in place of a list."""
    if isinstance(texts, str):
        raise UserError(f"{function} takes {name} as a list. For a single text write [{texts[:20]!r}].")


def check_pairs(inputs, targets) -> None:
    """Raises a `UserError` unless inputs and targets of `score` have equal numbers and types."""
    for texts in (inputs, targets):
        check_texts("score", texts)
    if len(inputs) != len(targets):
        raise UserError(f"score got {len(inputs)} inputs and {len(targets)} targets. Pass one target per input.")
    if len({isinstance(text, str) for text in (*inputs, *targets)}) > 1:
        raise UserError("score got both texts and token ids. Inputs and targets must have one type.")


def check_generation(prompts, stop: Sequence[str], num_samples: int, seed: int, streams: Sequence[int] | None) -> None:
    """Raises a `UserError` for invalid arguments of `generate`."""
    check_texts("generate", prompts)
    check_texts("generate", stop, "stop")
    if num_samples < 1:
        raise UserError(f"num_samples is {num_samples}. It must be at least 1.")
    if "" in stop:
        raise UserError("stop contains an empty text, which every text contains. Remove it.")
    if not 0 <= seed < 2**32:
        raise UserError(f"seed is {seed}. It must be at least 0 and below 2**32.")
    if streams is not None and len(streams) != len(prompts):
        raise UserError(f"streams has {len(streams)} numbers for {len(prompts)} prompts. Pass one per prompt.")


def check_beams(beam_size: int, temperature: float, num_samples: int) -> None:
    """Raises a `UserError` for arguments of `generate` that do not fit a beam search."""
    if temperature or num_samples > beam_size:
        raise UserError(
            f"beam_size is {beam_size}, but temperature is {temperature} and num_samples is {num_samples}. A beam search needs "
            "temperature 0, and returns at most beam_size texts."
        )


def resolve_max_tokens(max_tokens: int | Sequence[int], number: int) -> list[int]:
    """Returns the maximum number of new tokens of each prompt."""
    try:
        values = np.asarray(max_tokens)
    except ValueError:  # lists of different lengths
        values = np.asarray(None)
    if values.ndim > 1 or values.dtype.kind not in "iu":
        raise UserError(f"max_tokens is {max_tokens!r:.40}. It must be a whole number, or one per prompt.")
    limits = [int(values)] * number if values.ndim == 0 else [int(limit) for limit in values]
    if len(limits) != number:
        raise UserError(f"max_tokens has {len(limits)} numbers for {number} prompts. Pass one number, or one per prompt.")
    if min(limits, default=1) < 1:
        raise UserError(f"max_tokens is {min(limits)}. It must be at least 1.")
    return limits


def item_names(noun: str, items: Sequence) -> list[str]:
    """Returns names of numbered items for messages."""
    return [f"{noun} {number}" for number in range(len(items))]
