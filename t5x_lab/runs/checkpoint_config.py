"""The configuration in a checkpoint: a run's gin text, or the bindings that a config.json of Hugging Face's amounts to."""

import contextlib
import dataclasses
import json
import pathlib
from typing import Any

from t5x_lab.checkpoints.formats import Location, huggingface
from t5x_lab.checkpoints.layout import read_info
from t5x_lab.config.errors import NotHere, NotSet, UserError
from t5x_lab.data.environment import check_environment
from t5x_lab.data.sentinels import number_of_sentinels
from t5x_lab.observe.console import say
from t5x_lab.runs.config import GinConfig

SENTENCEPIECE = "spiece.model"  # transformers' name for a T5 tokenizer's file
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "sentencepiece.bpe.model", "vocab.json")
MAY_ADD_TOKENS = ("tokenizer.json", "added_tokens.json")  # to those of a SentencePiece model beside them


def config_of(location: Location) -> GinConfig:
    """The configuration in a checkpoint.

    Raises:
      UserError: when it has none.
    """
    if location.format == "hf":
        return GinConfig((), _bindings(pathlib.Path(location.path)))
    if location.format == "t5x_lab":
        text = read_info(location.path).get("config")
        file = location.path.parent.parent / "config.gin"
        if not text and location.path.parent.name == "checkpoints" and file.exists():
            text = file.read_text()
        if text:
            return GinConfig((), (text,), source=f"in the configuration of {location.path}")
    raise UserError(
        f"{location.path} holds no configuration. Give the model's, for example --gin_file=models/t5_1_1/small.gin, and with "
        "it the sizes that differ: --gin.TransformerConfig.vocab_size=VALUE."
    )


def _bindings(directory: pathlib.Path) -> tuple[str, ...]:
    """Gin bindings of the network, the vocabulary and the special tokens that a Hugging Face directory describes."""
    network = huggingface.read_config(directory)[1]
    fields = {field.name: getattr(network, field.name) for field in dataclasses.fields(network)}
    scaling = fields.pop("rotary_scaling")
    bindings = [f"TransformerConfig.{name} = {value!r}" for name, value in fields.items() if name != "dropout_rate"]
    if scaling is not None:
        bindings.append("TransformerConfig.rotary_scaling = @RotaryScaling()")
        bindings += [f"RotaryScaling.{name} = {value!r}" for name, value in dataclasses.asdict(scaling).items()]
    bindings.append("MODEL = @ModelConfig()")
    tokens = huggingface.special_tokens(directory, network.vocab_size)
    for remark in huggingface.remarks(directory, network):
        say(remark)
    pieces = directory / SENTENCEPIECE
    has_any = lambda names: any((directory / name).exists() for name in names)
    if network.architecture == "encoder_decoder" and pieces.exists() and not has_any(MAY_ADD_TOKENS):
        # What transformers makes of these pieces is what SentencePiece does, which TensorFlow reads itself.
        bindings += ["VOCABULARY = @SentencePieceVocabulary()", f"SentencePieceVocabulary.path = {str(pieces)!r}"]
        bindings.append(f"SentencePieceVocabulary.extra_ids = {_extra_ids(directory, pieces)}")
        tokens["input_eos"] = True
    elif has_any(TOKENIZER_FILES):
        check_environment()
        from t5x_lab.data.huggingface_tokenizer import around_texts, read_tokenizer

        before, after = around_texts(read_tokenizer(str(directory)))
        bindings += ["VOCABULARY = @HuggingFaceVocabulary()", f"HuggingFaceVocabulary.path = {str(directory)!r}"]
        if network.architecture != "encoder_decoder":
            tokens["start"] = before.pop(0) if before else None
        tokens |= {"input_start": tuple(before), "input_eos": bool(after), "input_end": tuple(after) or None}
    return (*bindings, *(f"SpecialTokens.{name} = {value!r}" for name, value in tokens.items()))


def _extra_ids(directory: pathlib.Path, pieces: pathlib.Path) -> int:
    """Sentinels that a T5's tokenizer adds behind its pieces: 100, unless its configuration or the pieces have their own."""
    tokenizer = directory / "tokenizer_config.json"
    try:
        described = dict(json.loads(tokenizer.read_bytes())) if tokenizer.exists() else {}
        if described.get("extra_ids") is not None:
            return int(described["extra_ids"])
    except (ValueError, TypeError, OSError, RecursionError) as error:
        raise UserError(
            f"{tokenizer} is no tokenizer_config.json of transformers ({type(error).__name__}: {error})."
        ) from error
    return 0 if b"<extra_id_0>" in pieces.read_bytes() else 100


def text_settings(config: GinConfig) -> dict[str, Any]:
    """What a model computes in, and what it reads and writes beside the tokens of text; None = not known here."""
    network, tokens = config.model().network, config.special_tokens()
    found = {"dtype": getattr(network, "dtype", None), **dataclasses.asdict(tokens), "sentinels": None, "vocabulary": None}
    try:
        vocabulary = config.vocabulary()
    except NotSet:
        return found
    found["vocabulary"] = str(vocabulary)
    check_environment()
    from t5x_lab.data.vocabularies import build_vocabulary

    with contextlib.suppress(NotHere):
        found["sentinels"] = number_of_sentinels(vocabulary)
        if found["end"] is None:
            found["end"] = build_vocabulary(vocabulary).eos_id
    return found
