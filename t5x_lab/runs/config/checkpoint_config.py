"""Reads the configuration of a checkpoint: a run's gin text, or gin bindings for a Hugging Face config.json."""

import contextlib
import dataclasses
import pathlib
from collections.abc import Iterator
from typing import Any

from etils import epath

from t5x_lab.checkpoints.formats.huggingface import directory as huggingface
from t5x_lab.checkpoints.formats.location import Location, find
from t5x_lab.checkpoints.layout import read_info
from t5x_lab.config.errors import NotHere, NotSet, UserError
from t5x_lab.config.json_files import parse_json
from t5x_lab.config.log import log
from t5x_lab.config.temporary import local_copy
from t5x_lab.data.vocabularies.sentinels import num_sentinels
from t5x_lab.runs.config.gin_config import GinConfig, is_run_directory, local_file, run_config_file
from t5x_lab.runs.config.trust import check_trusted
from t5x_lab.runs.data_layer import load_data_layer

SENTENCEPIECE = "spiece.model"  # file name of a T5 tokenizer in transformers
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "sentencepiece.bpe.model", "vocab.json")
MAY_ADD_TOKENS = ("tokenizer.json", "added_tokens.json")  # may extend the vocabulary of the SentencePiece model


def read_config(location: Location, trust: bool = False) -> GinConfig:
    """Returns the configuration of a checkpoint.

    Args:
      location: the checkpoint.
      trust: whether its configuration may run any Python code.

    Raises:
      UserError: if it has none, or it is not trusted.
    """
    if location.format == "hf":
        return GinConfig((), _bindings(location.path))
    if location.format == "t5x_lab":
        text = read_info(location.path).get("config")
        file = location.path.parent.parent / "config.gin"
        if not text and location.path.parent.name == "checkpoints" and file.exists():
            text = file.read_text()
        if text:
            if not trust:
                check_trusted(text, location.path)
            return GinConfig((), (text,), source=f"in the configuration of {location.path}")
    raise UserError(
        f"{location.path} holds no configuration. Pass the model file, such as --gin_file=models/t5_1_1/small.gin, and the "
        "settings that differ, such as --gin.TransformerConfig.vocab_size=VALUE."
    )


def config_files(model_dir: str, trust: bool = False) -> list[str]:
    """Returns the gin file of a run directory or a checkpoint, as a list; [] for a checkpoint that does not describe its model.

    Raises:
      UserError: if there is no checkpoint, or its configuration is not trusted.
    """
    if is_run_directory(model_dir):
        return [run_config_file(model_dir, trust)]
    location = find(model_dir)
    return [local_file(read_config(location, trust).text)] if location.describes_model else []


def _object_bindings(config: Any, scope: str) -> Iterator[str]:
    """Yields gin bindings of the fields of a dataclass, and of the dataclasses in them, each in a scope of its own."""
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        parts = value if isinstance(value, tuple) else (value,)
        different = dict.fromkeys(part for part in parts if dataclasses.is_dataclass(part))
        scopes = {part: f"{scope}{field.name}_{i}/" for i, part in enumerate(different)}
        for part, inner in scopes.items():
            yield from _object_bindings(part, inner)
        references = [f"@{scopes[part]}{type(part).__name__}()" for part in parts] if scopes else []
        text = f"({', '.join(references)},)" if isinstance(value, tuple) else "".join(references)
        yield f"{scope}{type(config).__name__}.{field.name} = {text if scopes else repr(value)}"


def _bindings(path: epath.Path) -> tuple[str, ...]:
    """Returns gin bindings for the network, vocabulary and special tokens of a Hugging Face directory."""
    directory = pathlib.Path(local_copy(str(path)))
    network = huggingface.read_config(directory)[1]
    bindings = [line for line in _object_bindings(network, "") if not line.startswith("TransformerConfig.dropout_rate")]
    bindings.append("MODEL = @ModelConfig()")
    tokens = huggingface.special_tokens(directory, network.vocab_size)
    for remark in huggingface.remarks(directory, network):
        log(remark)
    pieces = directory / SENTENCEPIECE
    has_any = lambda names: any((directory / name).exists() for name in names)
    if network.architecture == "encoder_decoder" and pieces.exists() and not has_any(MAY_ADD_TOKENS):
        # transformers tokenizes as SentencePiece does here, and TensorFlow can read the SentencePiece model.
        bindings += ["VOCABULARY = @SentencePieceVocabulary()", f"SentencePieceVocabulary.path = {str(path / SENTENCEPIECE)!r}"]
        bindings.append(f"SentencePieceVocabulary.extra_ids = {_extra_ids(directory, pieces)}")
        tokens["input_eos"] = True
    elif has_any(TOKENIZER_FILES):
        load_data_layer()
        from t5x_lab.data.vocabularies.huggingface import read_tokenizer, special_ids_around

        before, after = special_ids_around(read_tokenizer(str(directory)))
        bindings += ["VOCABULARY = @HuggingFaceVocabulary()", f"HuggingFaceVocabulary.path = {str(path)!r}"]
        if network.architecture != "encoder_decoder":
            tokens["start"] = before.pop(0) if before else None
        tokens |= {"input_start": tuple(before), "input_eos": bool(after), "input_end": tuple(after) or None}
    return (*bindings, *(f"SpecialTokens.{name} = {value!r}" for name, value in tokens.items()))


def _extra_ids(directory: pathlib.Path, pieces: pathlib.Path) -> int:
    """Returns the number of sentinels after the pieces of a T5 tokenizer: 100, unless the tokenizer defines another number."""
    tokenizer = directory / "tokenizer_config.json"
    try:
        described = dict(parse_json(tokenizer.read_bytes())) if tokenizer.exists() else {}
        if described.get("extra_ids") is not None:
            return int(described["extra_ids"])
    except (ValueError, TypeError, OSError) as error:
        raise UserError(f"{tokenizer} is not a valid tokenizer_config.json ({type(error).__name__}: {error}).") from error
    return 0 if b"<extra_id_0>" in pieces.read_bytes() else 100


def text_settings(config: GinConfig) -> dict[str, Any]:
    """Returns dtype, special tokens, number of sentinels and vocabulary of a model. None = unknown on this machine."""
    network, tokens = config.model().network, config.special_tokens()
    settings = {"dtype": getattr(network, "dtype", None), **dataclasses.asdict(tokens), "sentinels": None, "vocabulary": None}
    try:
        vocabulary = config.vocabulary()
    except NotSet:
        return settings
    settings["vocabulary"] = str(vocabulary)
    load_data_layer()
    from t5x_lab.data.vocabularies.build import build_vocabulary

    with contextlib.suppress(NotHere):
        settings["sentinels"] = num_sentinels(vocabulary)
        if settings["end"] is None:
            settings["end"] = build_vocabulary(vocabulary).eos_id
    return settings
