"""Exports a vocabulary as Hugging Face tokenizer files that tokenize as t5x_lab does.

For an encoder-decoder it is T5's or ByT5's tokenizer class. These append EOS to a text, so the tokenizer of a decoder is built
from the same pieces with a start token before the text and no EOS.
"""

import json
import pathlib
from typing import Any

from etils import epath

from t5x_lab.data.vocabularies.config import HuggingFaceVocabulary, SentencePieceVocabulary, SpecialTokens, Vocabulary
from t5x_lab.runs.config.checkpoint_config import SENTENCEPIECE
from t5x_lab.runs.data_layer import load_data_layer

_NAMES = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
_BYTES = 256


def write_tokenizer(directory: pathlib.Path, vocabulary: Vocabulary | None, tokens: SpecialTokens, has_encoder: bool) -> str:
    """Writes tokenizer files to the directory. Returns a note for the user, empty if there is none."""
    if isinstance(vocabulary, HuggingFaceVocabulary):
        load_data_layer()
        from t5x_lab.data.vocabularies.huggingface import HuggingFaceTokenizer

        HuggingFaceTokenizer(vocabulary.path).save(str(directory))
        return ""
    pieces = read_sentencepiece_bytes(vocabulary)
    if vocabulary is None or (isinstance(vocabulary, SentencePieceVocabulary) and not pieces):
        return " No tokenizer was written: the vocabulary cannot be read on this machine."
    if has_encoder and tokens.input_eos is not False:
        kind = "ByT5Tokenizer" if pieces is None else "T5Tokenizer"
        settings = {"tokenizer_class": kind, "extra_ids": vocabulary.extra_ids, **_NAMES}
        (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=1) + "\n")
        if pieces is None:
            return ""
        (directory / SENTENCEPIECE).write_bytes(pieces)
        if _is_unigram(_parse(pieces)):
            return ""
        return f" Warning: {SENTENCEPIECE} is not a unigram model, but transformers reads it as one and will return other ids."
    start = None if has_encoder else tokens.start
    if pieces is None:
        _save(_make_byte_tokenizer(vocabulary.extra_ids), directory, tokens, start, unk_id=2, eos_id=1)
    else:
        model = _parse(pieces)
        if not _is_unigram(model):
            return " No tokenizer was written: its SentencePiece model is not a unigram model."
        spec = model.trainer_spec
        _save(_make_unigram_tokenizer(model, vocabulary.extra_ids), directory, tokens, start, spec.unk_id, spec.eos_id)
    # A prompt and its continuation are one text for transformers, which would append EOS after the continuation.
    return " Note: the model's inputs end with EOS, which its tokenizer does not append." if tokens.input_eos else ""


def _parse(pieces: bytes) -> Any:
    from sentencepiece import sentencepiece_model_pb2 as formats

    return formats.ModelProto.FromString(pieces)  # type: ignore[attr-defined]


def _is_unigram(model: Any) -> bool:
    return model.trainer_spec.model_type == model.trainer_spec.UNIGRAM


def read_sentencepiece_bytes(vocabulary: Vocabulary | None) -> bytes | None:
    """Returns the content of a SentencePiece model file; None if it cannot be read."""
    if not isinstance(vocabulary, SentencePieceVocabulary):
        return None
    try:
        return epath.Path(vocabulary.path).read_bytes()
    except Exception:  # remote file systems raise various exceptions
        return None


def _make_byte_tokenizer(extra_ids: int) -> Any:
    """Makes a tokenizer of UTF-8 bytes with ids 3 to 258."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers

    special = {name: i for i, name in enumerate(("<pad>", "</s>", "<unk>"))}
    sentinels = {f"<extra_id_{i}>": 3 + _BYTES + extra_ids - 1 - i for i in range(extra_ids)}
    bytes_ = {character: 3 + byte for byte, character in enumerate(_byte_characters())}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab={**special, **bytes_, **sentinels}, merges=[], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _byte_characters() -> list[str]:
    """Returns the character of each byte in `ByteLevel` (Radford et al. 2019): printable bytes map to themselves."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = iter(range(_BYTES, 2 * _BYTES))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(_BYTES)]


def _make_unigram_tokenizer(model: Any, extra_ids: int) -> Any:
    """Makes a tokenizer of a SentencePiece unigram model, with sentinels after its pieces."""
    import tokenizers
    from tokenizers import decoders, models, normalizers, pre_tokenizers

    pieces = [(piece.piece, piece.score) for piece in model.pieces]
    pieces += [(f"<extra_id_{i}>", 0.0) for i in reversed(range(extra_ids))]
    unigram = models.Unigram(pieces, model.trainer_spec.unk_id, model.trainer_spec.byte_fallback)
    tokenizer = tokenizers.Tokenizer(unigram)
    steps: list[Any] = []
    if model.normalizer_spec.precompiled_charsmap:
        steps.append(normalizers.Precompiled(model.normalizer_spec.precompiled_charsmap))
    if model.normalizer_spec.remove_extra_whitespaces:
        steps += [normalizers.Replace(tokenizers.Regex(" {2,}"), " "), normalizers.Strip()]
    tokenizer.normalizer = normalizers.Sequence(steps)
    scheme = "always" if model.normalizer_spec.add_dummy_prefix else "never"
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    tokenizer.decoder = decoders.Metaspace(prepend_scheme=scheme)
    return tokenizer


def _save(
    tokenizer: Any, directory: pathlib.Path, tokens: SpecialTokens, start_id: int | None, unk_id: int, eos_id: int
) -> None:
    """Writes a tokenizer that adds the start token before a text and nothing after it.

    Args:
      tokenizer: a `tokenizers.Tokenizer`.
      directory: directory to write to.
      tokens: special tokens of the model.
      start_id: id of the start token. None = no start token.
      unk_id: id of the unknown token.
      eos_id: EOS id if `tokens` has none.
    """
    import transformers
    from tokenizers import processors

    name = lambda i: None if i is None or i < 0 else tokenizer.id_to_token(i)
    start = name(start_id)
    ids = {"unk_token": unk_id, "eos_token": next(iter(tokens.stop_ids), eos_id), "pad_token": tokens.padding}
    special = {kind: name(i) for kind, i in ids.items() if name(i) is not None}
    sentinels = sorted(token for token in tokenizer.get_vocab() if token.startswith("<extra_id_"))
    tokenizer.add_special_tokens([*dict.fromkeys([*special.values(), *([start] if start else [])]), *sentinels])
    if start:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{start} $A", pair=f"{start} $A {start} $B", special_tokens=[(start, start_id)]
        )
    wrapped = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=start, clean_up_tokenization_spaces=False, **special
    )
    wrapped.save_pretrained(str(directory))
