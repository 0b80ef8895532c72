"""Tokenizer files beside weights in Hugging Face's format, with which `transformers` reads texts as t5x_lab does.

An encoder-decoder's is T5's or ByT5's own class. Those put an end token behind a text, so that a decoder's is built of the same
pieces, with its start token before a text and nothing behind.
"""

import json
import pathlib
from typing import Any

from etils import epath

from t5x_lab.data.config import (
    HuggingFaceVocabulary,
    SentencePieceVocabulary,
    SpecialTokens,
    Vocabulary,
)
from t5x_lab.data.environment import check_environment
from t5x_lab.runs.checkpoint_config import SENTENCEPIECE

_NAMES = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
_BYTES = 256


def write_tokenizer(directory: pathlib.Path, vocabulary: Vocabulary | None, tokens: SpecialTokens, has_encoder: bool) -> str:
    """Writes the files into the directory; returns a sentence where there are none to write."""
    if isinstance(vocabulary, HuggingFaceVocabulary):
        check_environment()
        from t5x_lab.data.huggingface_tokenizer import HuggingFaceTokenizer

        HuggingFaceTokenizer(vocabulary.path).save(str(directory))
        return ""
    pieces = pieces_of(vocabulary)
    if vocabulary is None or (isinstance(vocabulary, SentencePieceVocabulary) and not pieces):
        return " No tokenizer is beside it: the configuration's vocabulary cannot be read from here."
    if has_encoder and tokens.input_eos is not False:
        kind = "ByT5Tokenizer" if pieces is None else "T5Tokenizer"
        described = {"tokenizer_class": kind, "extra_ids": vocabulary.extra_ids, **_NAMES}
        (directory / "tokenizer_config.json").write_text(json.dumps(described, indent=1) + "\n")
        if pieces is None:
            return ""
        (directory / SENTENCEPIECE).write_bytes(pieces)
        if _is_unigram(_parsed(pieces)):
            return ""
        return f" transformers reads {SENTENCEPIECE} as a unigram model, which it is not: its ids will differ."
    start = None if has_encoder else tokens.start
    if pieces is None:
        _save(_of_bytes(vocabulary.extra_ids), directory, tokens, start, unknown=2, end=1)
    else:
        model = _parsed(pieces)
        if not _is_unigram(model):
            return " No tokenizer is beside it: its SentencePiece model is not of the unigram kind."
        spec = model.trainer_spec
        _save(_of_pieces(model, vocabulary.extra_ids), directory, tokens, start, spec.unk_id, spec.eos_id)
    # A text and its continuation are one text there: an end token would stand behind both.
    return " Inputs end with an end token here; its tokenizer puts none behind a text." if tokens.input_eos else ""


def _parsed(pieces: bytes) -> Any:
    from sentencepiece import sentencepiece_model_pb2 as formats

    return formats.ModelProto.FromString(pieces)  # type: ignore[attr-defined]


def _is_unigram(model: Any) -> bool:
    return model.trainer_spec.model_type == model.trainer_spec.UNIGRAM


def pieces_of(vocabulary: Vocabulary | None) -> bytes | None:
    """A SentencePiece model's file, where it can be read."""
    if not isinstance(vocabulary, SentencePieceVocabulary):
        return None
    try:
        return epath.Path(vocabulary.path).read_bytes()
    except Exception:  # any failure of a remote file system means the same here
        return None


def _of_bytes(extra_ids: int) -> Any:
    """UTF-8 bytes as ids 3 to 258."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers

    special = {name: i for i, name in enumerate(("<pad>", "</s>", "<unk>"))}
    sentinels = {f"<extra_id_{i}>": 3 + _BYTES + extra_ids - 1 - i for i in range(extra_ids)}
    bytes_ = {letter: 3 + byte for byte, letter in enumerate(_letters_of_bytes())}
    built = tokenizers.Tokenizer(models.BPE(vocab={**special, **bytes_, **sentinels}, merges=[], unk_token="<unk>"))
    built.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    built.decoder = decoders.ByteLevel()
    return built


def _letters_of_bytes() -> list[str]:
    """What `ByteLevel` writes each byte as (Radford et al. 2019): itself where it can be seen, else a letter from 256 on."""
    seen = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = iter(range(_BYTES, 2 * _BYTES))
    return [chr(byte) if byte in seen else chr(next(others)) for byte in range(_BYTES)]


def _of_pieces(model: Any, extra_ids: int) -> Any:
    """A SentencePiece model of the unigram kind, with sentinels behind its pieces."""
    import tokenizers
    from tokenizers import decoders, models, normalizers, pre_tokenizers

    pieces = [(piece.piece, piece.score) for piece in model.pieces]
    pieces += [(f"<extra_id_{i}>", 0.0) for i in reversed(range(extra_ids))]
    unigram = models.Unigram(pieces, model.trainer_spec.unk_id, model.trainer_spec.byte_fallback)
    built = tokenizers.Tokenizer(unigram)
    steps: list[Any] = []
    if model.normalizer_spec.precompiled_charsmap:
        steps.append(normalizers.Precompiled(model.normalizer_spec.precompiled_charsmap))
    if model.normalizer_spec.remove_extra_whitespaces:
        steps += [normalizers.Replace(tokenizers.Regex(" {2,}"), " "), normalizers.Strip()]
    built.normalizer = normalizers.Sequence(steps)
    scheme = "always" if model.normalizer_spec.add_dummy_prefix else "never"
    built.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    built.decoder = decoders.Metaspace(prepend_scheme=scheme)
    return built


def _save(built: Any, directory: pathlib.Path, tokens: SpecialTokens, begin: int | None, unknown: int, end: int) -> None:
    """Writes the tokenizer, its special tokens named as its pieces of these ids are; `end` where `tokens` say none.

    It puts `begin` before a text, and nothing behind.
    """
    import transformers
    from tokenizers import processors

    name = lambda i: None if i is None or i < 0 else built.id_to_token(i)
    start = name(begin)
    ids = {"unk_token": unknown, "eos_token": next(iter(tokens.ends), end), "pad_token": tokens.padding}
    special = {kind: name(i) for kind, i in ids.items() if name(i) is not None}
    sentinels = sorted(token for token in built.get_vocab() if token.startswith("<extra_id_"))
    built.add_special_tokens([*dict.fromkeys([*special.values(), *([start] if start else [])]), *sentinels])
    if start:
        built.post_processor = processors.TemplateProcessing(
            single=f"{start} $A", pair=f"{start} $A {start} $B", special_tokens=[(start, begin)]
        )
    wrapped = transformers.PreTrainedTokenizerFast(
        tokenizer_object=built, bos_token=start, clean_up_tokenization_spaces=False, **special
    )
    wrapped.save_pretrained(str(directory))
