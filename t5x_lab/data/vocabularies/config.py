"""Settings of vocabularies and special tokens. Free of TensorFlow."""

import dataclasses

from t5x_lab.config.checks import check_range, check_types
from t5x_lab.config.errors import UserError

T5_SENTINELS = 100


@dataclasses.dataclass(frozen=True)
class SentencePieceVocabulary:
    """SentencePiece vocabulary, with sentinels after its pieces (T5: 32,000 + 100).

    Attributes:
      path: path of the model file, local or remote, wherever `etils.epath` reads.
      extra_ids: number of sentinels. With 0 the pieces `<extra_id_0>` and so on (mT5) or `<unused0>` and so on (Gemma) are the
        sentinels, if the model has them.
    """

    path: str = "gs://t5-data/vocabs/cc_all.32000/sentencepiece.model"
    extra_ids: int = 100

    def __post_init__(self):
        check_types(self)
        check_range(self, "extra_ids", 0, 10_000)


@dataclasses.dataclass(frozen=True)
class ByteVocabulary:
    """Byte vocabulary: UTF-8 bytes, 3 special ids and sentinels. Needs no file.

    Attributes:
      extra_ids: number of sentinels. With 0 the last 100 bytes are the sentinels, as in ByT5's pre-training (Xue et al. 2022).
    """

    extra_ids: int = 100

    def __post_init__(self):
        check_types(self)
        check_range(self, "extra_ids", 0, 10_000)


@dataclasses.dataclass(frozen=True)
class HuggingFaceVocabulary:
    """Any tokenizer that `transformers` can read. Slower in a training pipeline than the other vocabularies.

    Attributes:
      path: directory that `transformers` saved, a tokenizer.json file, or a directory with GPT-1's encoder_bpe_40000.json and
        vocab_40000.bpe as published by OpenAI.
    """

    path: str

    def __post_init__(self):
        check_types(self)


Vocabulary = SentencePieceVocabulary | ByteVocabulary | HuggingFaceVocabulary


@dataclasses.dataclass(frozen=True)
class SpecialTokens:
    """Special token ids that the model was trained with. Defaults are T5's.

    Attributes:
      start: start token of a decoder. None = no start token: the decoder reads the first token of a text and does not predict
        it, as in Qwen.
      end: id that stops generation, or several ids (Llama 3). None = the vocabulary's EOS token. The EOS token of input texts
        is the vocabulary's, else the first of these.
      padding: padding id of arrays.
      input_start: ids before an input text, after a decoder's start token, such as a BERT tokenizer's [CLS].
      input_eos: whether inputs end with an EOS token. None = as the task defines.
      input_end: EOS token of inputs if it differs, such as a BERT tokenizer's [SEP].
    """

    start: int | None = 0
    end: int | tuple[int, ...] | None = None
    padding: int = 0
    input_start: tuple[int, ...] = ()
    input_eos: bool | None = None
    input_end: tuple[int, ...] | None = None

    def id_before_texts(self, eos_id: int) -> int:
        """Returns the id before a text in training: the start token, else the EOS token of the previous text."""
        return next(i for i in (self.start, *self.stop_ids, eos_id) if i is not None)

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Ids that stop generation, empty if it is the vocabulary's EOS token."""
        return () if self.end is None else (self.end,) if isinstance(self.end, int) else self.end

    def __post_init__(self):
        check_types(self)
        for name in ("start", "end", "padding", "input_start", "input_end"):
            value = getattr(self, name)
            if min(value if isinstance(value, tuple) else (value or 0,), default=0) < 0:
                raise UserError(f"SpecialTokens.{name} is {getattr(self, name)}. Ids must not be negative.")
