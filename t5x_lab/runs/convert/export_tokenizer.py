"""Exports a vocabulary as Hugging Face tokenizer files that tokenize as t5x_lab does.

For an encoder-decoder it is T5's or ByT5's tokenizer class, which append EOS to a text. Where these would give other ids, and
for a decoder, whose texts have a start token and no EOS, the tokenizer is built from the same pieces.
"""

import json
import pathlib
import random
import re
import shutil
import tempfile
from collections.abc import Collection
from typing import Any

from t5x_lab.data.vocabularies.config import HuggingFaceVocabulary, SentencePieceVocabulary, SpecialTokens, Vocabulary
from t5x_lab.data.vocabularies.sentencepiece import read_model
from t5x_lab.runs.config.checkpoint_config import SENTENCEPIECE
from t5x_lab.runs.data_layer import load_data_layer

_NAMES = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
_BYTES = 256
_SENTINEL = re.compile(r"▁?<extra_id_\d+>")  # mT5's have a leading space


def write_tokenizer(directory: pathlib.Path, vocabulary: Vocabulary | None, tokens: SpecialTokens, has_encoder: bool) -> str:
    """Writes tokenizer files to the directory. Returns a note for the user, empty if there is none.

    The files are compared with the vocabulary on texts of many kinds. If ids or texts differ, they are not written.
    """
    if isinstance(vocabulary, HuggingFaceVocabulary):
        load_data_layer()
        from t5x_lab.data.vocabularies.huggingface import HuggingFaceTokenizer

        HuggingFaceTokenizer(vocabulary.path).save(str(directory))
        return ""
    pieces = read_sentencepiece_bytes(vocabulary)
    if vocabulary is None or (isinstance(vocabulary, SentencePieceVocabulary) and not pieces):
        return " No tokenizer was written: the vocabulary cannot be read on this machine."
    model = None if pieces is None else _parse(pieces)
    if model is not None and not _is_unigram(model):
        return " No tokenizer was written: its SentencePiece model is not a unigram model, which transformers needs."
    inputs_end = has_encoder and tokens.input_eos is not False
    difference = ""
    for write in (*([_write_class_of_t5] if inputs_end else []), _write_built):
        with tempfile.TemporaryDirectory(dir=directory.parent) as folder:
            write(pathlib.Path(folder), vocabulary, pieces, tokens, has_encoder)
            difference = _find_difference(folder, vocabulary)
            if not difference:
                shutil.copytree(folder, directory, dirs_exist_ok=True)
                break
    if difference:
        return f" No tokenizer was written: that of transformers would differ from the vocabulary. {difference}"
    # A prompt and its continuation are one text for transformers, which would append EOS after the continuation.
    needs_note = tokens.input_eos and not has_encoder
    return " Note: the model's inputs end with EOS, which its tokenizer does not append." if needs_note else ""


def _write_class_of_t5(
    folder: pathlib.Path, vocabulary: Vocabulary, pieces: bytes | None, tokens: SpecialTokens, has_encoder: bool
) -> None:
    """Writes the settings of T5's tokenizer class, which reads the SentencePiece model, or of ByT5's."""
    kind = "ByT5Tokenizer" if pieces is None else "T5Tokenizer"
    settings = {"tokenizer_class": kind, "extra_ids": vocabulary.extra_ids, **_NAMES}  # type: ignore[union-attr]
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1) + "\n")
    if pieces is not None:
        (folder / SENTENCEPIECE).write_bytes(pieces)


def _write_built(
    folder: pathlib.Path, vocabulary: Vocabulary, pieces: bytes | None, tokens: SpecialTokens, has_encoder: bool
) -> None:
    """Writes a tokenizer that is built from the pieces or bytes."""
    extra_ids = vocabulary.extra_ids  # type: ignore[union-attr]
    start = None if has_encoder else tokens.start
    appends_eos = has_encoder and tokens.input_eos is not False
    if pieces is None:
        _save(_make_byte_tokenizer(extra_ids), folder, tokens, start, appends_eos, unk_id=2, eos_id=1)
    else:
        model = _parse(pieces)
        spec = model.trainer_spec
        _save(_make_unigram_tokenizer(model, extra_ids), folder, tokens, start, appends_eos, spec.unk_id, spec.eos_id)


def _find_difference(folder: str, config: Vocabulary) -> str:
    """Returns a sentence with a text that the tokenizer in a folder treats unlike the vocabulary, "" if there is none."""
    load_data_layer()
    from t5x_lab.data.vocabularies.build import build_vocabulary, special_ids
    from t5x_lab.data.vocabularies.huggingface import read_tokenizer

    vocabulary, tokenizer = build_vocabulary(config), read_tokenizer(folder)
    special = special_ids(vocabulary)
    for text in _sample_texts(vocabulary, special):
        ids, exported_ids = list(vocabulary.encode(text)), tokenizer.encode(text, add_special_tokens=False)
        if ids != exported_ids and not _are_equally_likely(vocabulary, ids, exported_ids):
            return f"{text!r} has the ids {_shorten(ids)} and would have {_shorten(exported_ids)}."
        expected = vocabulary.decode([i for i in ids if i not in special])
        exported = tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        if exported.strip() != expected.strip():  # at a start the classes of transformers keep or drop a space
            return f"The ids of {text!r} are the text {expected!r} and would be {exported!r}."
    return ""


def _are_equally_likely(vocabulary: Any, ids: list[int], others: list[int]) -> bool:
    """Returns whether two segmentations by a unigram model have equal scores, of which either may be chosen."""
    pieces = getattr(vocabulary, "tokenizer", None)
    if pieces is None or max((*ids, *others), default=0) >= pieces.GetPieceSize():
        return False
    if any(pieces.IsControl(i) or pieces.IsUnknown(i) for i in set(ids) ^ set(others)):
        return False
    score, other_score = (sum(map(pieces.GetScore, row)) for row in (ids, others))
    return abs(score - other_score) < 1e-3


def _shorten(ids: list[int]) -> str:
    return str(ids) if len(ids) <= 12 else f"{str(ids[:12])[:-1]}, …]"


def _sample_texts(vocabulary: Any, special: Collection[int]) -> list[str]:
    """Returns texts of many kinds: spaces, scripts, characters without a piece, and texts of the vocabulary's own pieces.

    Names of sentinels are left out: `transformers` reads them as the sentinels, SentencePiece as text.
    """
    sampler = random.Random(0)
    ids = [i for i in range(vocabulary.vocab_size) if i not in special]
    pieces = [vocabulary.decode([i]) for i in sampler.sample(ids, min(400, len(ids)))]
    pieces = [piece for piece in pieces if "\ufffd" not in piece]
    mixed = ["".join(sampler.choices([*pieces, " ", "  ", "a", ". "], k=8)) for _ in range(200)]
    return [
        "Hello world, how are you?", "", " ", "a", " a", "a ", "two  spaces", " \t tab\nline", "Straße ﬁne Ⅳ ①",
        "日本語のテキスト。", "zero\u200bwidth no\u00a0break", "ＦＵＬＬ width", "\u2581 \u2581\u2581x",
        "Ünïcödé é", "naïve café", "emoji 😀 👩‍👩‍👧 end", "ا ل ع ر ب ي ة",
        "3.14 1,000 50%", "don't \"quote\" <b>tag</b>", *pieces, *mixed,
    ]  # fmt: skip


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
        return read_model(vocabulary.path)
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
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    steps += [decoders.Strip(" ", 1, 0)] if model.normalizer_spec.add_dummy_prefix else []
    tokenizer.decoder = decoders.Sequence(steps)
    is_own = lambda piece: piece.type == piece.USER_DEFINED and not _SENTINEL.fullmatch(piece.piece)
    user_defined = [piece.piece for piece in model.pieces if is_own(piece)]
    tokenizer.add_tokens([tokenizers.AddedToken(piece, normalized=False, special=False) for piece in user_defined])
    return tokenizer


def _save(
    tokenizer: Any,
    directory: pathlib.Path,
    tokens: SpecialTokens,
    start_id: int | None,
    appends_eos: bool,
    unk_id: int,
    eos_id: int,
) -> None:
    """Writes a tokenizer that adds the start token before a text, and EOS or nothing after it.

    Args:
      tokenizer: a `tokenizers.Tokenizer`.
      directory: directory to write to.
      tokens: special tokens of the model.
      start_id: id of the start token. None = no start token.
      appends_eos: whether a text ends with EOS.
      unk_id: id of the unknown token.
      eos_id: EOS id if `tokens` has none.
    """
    import transformers
    from tokenizers import processors

    name = lambda i: None if i is None or i < 0 else tokenizer.id_to_token(i)
    start = name(start_id)
    ids = {"unk_token": unk_id, "eos_token": next(iter(tokens.stop_ids), eos_id), "pad_token": tokens.padding}
    special = {kind: name(i) for kind, i in ids.items() if name(i) is not None}
    sentinels = sorted(token for token in tokenizer.get_vocab() if _SENTINEL.fullmatch(token))
    tokenizer.add_special_tokens([*dict.fromkeys([*special.values(), *([start] if start else [])]), *sentinels])
    end = special.get("eos_token") if appends_eos else None
    if start or end:
        single = " ".join(token for token in (start, "$A", end) if token)
        around = [(token, tokenizer.token_to_id(token)) for token in (start, end) if token]
        pair = f"{single} {single.replace('$A', '$B')}"
        tokenizer.post_processor = processors.TemplateProcessing(single=single, pair=pair, special_tokens=around)
    wrapped = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=start, clean_up_tokenization_spaces=False, **special
    )
    wrapped.save_pretrained(str(directory))
