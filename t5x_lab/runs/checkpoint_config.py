"""The configuration in a checkpoint: a run's gin text, or the bindings that a config.json of Hugging Face's amounts to."""

import dataclasses
import json
import pathlib

from t5x_lab.checkpoints.formats import Location, huggingface
from t5x_lab.checkpoints.layout import read_info
from t5x_lab.config.errors import UserError
from t5x_lab.runs.config import GinConfig

SENTENCEPIECE = "spiece.model"  # transformers' name for a T5 tokenizer's file
_THEIR_SENTENCEPIECES = (SENTENCEPIECE, "tokenizer.model", "sentencepiece.bpe.model")


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
            return GinConfig((), (text,))
    raise UserError(
        f"{location.path} holds no configuration. Give the model's, for example --gin_file=models/t5_1_1/small.gin, and with "
        "it the sizes that differ: --gin.TransformerConfig.vocab_size=VALUE."
    )


def _bindings(directory: pathlib.Path) -> tuple[str, ...]:
    """Gin bindings of the network and the vocabulary that a Hugging Face directory describes."""
    network = huggingface.read_config(directory)[1]
    fields = {field.name: getattr(network, field.name) for field in dataclasses.fields(network)}
    bindings = [f"TransformerConfig.{name} = {value!r}" for name, value in fields.items() if name != "dropout_rate"]
    bindings.append("MODEL = @ModelConfig()")
    tokenizer = directory / "tokenizer_config.json"
    try:
        described = dict(json.loads(tokenizer.read_bytes())) if tokenizer.exists() else {}
        extra_ids = int(described.get("extra_ids") or 0)
    except (ValueError, TypeError, OSError, RecursionError) as error:
        raise UserError(
            f"{tokenizer} is no tokenizer_config.json of transformers ({type(error).__name__}: {error})."
        ) from error
    pieces = next((directory / name for name in _THEIR_SENTENCEPIECES if (directory / name).exists()), None)
    if pieces:
        bindings += ["VOCABULARY = @SentencePieceVocabulary()", f"SentencePieceVocabulary.path = {str(pieces)!r}"]
        bindings.append(f"SentencePieceVocabulary.extra_ids = {extra_ids}")
    elif "ByT5" in str(described.get("tokenizer_class")):
        bindings += ["VOCABULARY = @ByteVocabulary()", f"ByteVocabulary.extra_ids = {extra_ids or 100}"]
    return tuple(bindings)
