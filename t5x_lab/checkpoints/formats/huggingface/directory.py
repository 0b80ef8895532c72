"""Hugging Face's format: directories with safetensors and a config.json, as `transformers` reads and writes them."""

import dataclasses
import json
import pathlib
from collections.abc import Mapping
from typing import Any

from etils import epath

from t5x_lab.checkpoints.formats.huggingface import gemma, gpt1, llama, safetensors_files, t5, t5gemma, t5gemma2
from t5x_lab.checkpoints.formats.huggingface.table import Family
from t5x_lab.checkpoints.formats.source import Source
from t5x_lab.checkpoints.layers import network_parts
from t5x_lab.checkpoints.lazy_tensors import LazyTensor
from t5x_lab.config.errors import UserError
from t5x_lab.config.json_files import parse_json
from t5x_lab.config.temporary import local_copy
from t5x_lab.networks.config import DTYPES
from t5x_lab.networks.head import find_head
from t5x_lab.networks.network import Network
from t5x_lab.networks.transformer import TransformerConfig

NAME, TITLE, DESCRIBES_MODEL = "hf", "Hugging Face", True
FAMILIES: dict[str, Family] = {
    "t5": t5.FAMILY,
    "mt5": t5.FAMILY,
    "umt5": t5.FAMILY,
    "longt5": t5.FAMILY,
    "openai-gpt": gpt1.FAMILY,
    "llama": llama.FAMILY,
    "mistral": llama.FAMILY,
    "qwen2": llama.FAMILY,
    "qwen3": llama.FAMILY,
    "smollm3": llama.FAMILY,
    "olmo2": llama.FAMILY,
    "gemma2": gemma.FAMILY,
    "gemma3_text": gemma.FAMILY,
    "gemma3": gemma.FAMILY,
    "t5gemma": t5gemma.FAMILY,
    "t5gemma2": t5gemma2.FAMILY,
}
_ENCODER_DECODERS = (t5.FAMILY, t5gemma.FAMILY, t5gemma2.FAMILY)
_GEMMAS = (gemma.FAMILY, t5gemma.FAMILY, t5gemma2.FAMILY)
T5_TOKENS: Mapping[str, int | None] = {"pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 1}
_TABLES_OF_T5GEMMA = ("model.decoder.embed_tokens.weight", "model.encoder.text_model.embed_tokens.weight")
_MAX_SIZE = 2**31 - 1  # of a dimension, whose indices are int32
_IGNORED = (  # tensors of older versions that no model reads
    "rotary_emb.inv_freq",
    ".attn.bias",
    ".attn.masked_bias",
    "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight",
)
# Settings of generation_config.json that are not supported, with values that have no effect. Others are reported.
_GENERATION = {
    "do_sample": (False,), "num_beams": (1,), "repetition_penalty": (1.0,), "encoder_repetition_penalty": (1.0,),
    "no_repeat_ngram_size": (0,), "encoder_no_repeat_ngram_size": (0,), "min_length": (0,), "min_new_tokens": (0,),
    "bad_words_ids": (), "suppress_tokens": (), "begin_suppress_tokens": (), "forced_bos_token_id": (),
    "forced_eos_token_id": (), "sequence_bias": (), "penalty_alpha": (), "exponential_decay_length_penalty": (),
}  # fmt: skip


def find(root: epath.Path, step: int | None) -> epath.Path | None:
    if not (root.is_dir() and ((root / "config.json").exists() or list(root.glob("*.safetensors")))):
        return None
    if step is not None:
        raise UserError(f"{root} is a Hugging Face model, which has no steps. Remove --step.")
    return root


def step_of(path: epath.Path) -> int:
    return 0


def open(path: epath.Path) -> Source:
    return Source(path, 0, _open_params(pathlib.Path(local_copy(str(path)))))


def open_as_saved(path: epath.Path) -> Mapping[str, LazyTensor]:
    return safetensors_files.open_directory(pathlib.Path(local_copy(str(path))))


def read_config(directory: pathlib.Path) -> tuple[Family, TransformerConfig]:
    """Returns the model family and the network for a config.json.

    Raises:
      UserError: if the model type is not supported, or the file is damaged.
    """
    path = directory / "config.json"
    try:
        config = parse_json(path.read_bytes())
        kind = config["model_type"]
        if kind not in FAMILIES:
            raise UserError(f'{path} has model_type "{kind}". t5x_lab reads {", ".join(FAMILIES)}.')
        network = dataclasses.replace(FAMILIES[kind].from_hf_config(config), dtype=_dtype(config, directory))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ArithmeticError) as error:
        raise UserError(f"{path} is not a valid config.json ({type(error).__name__}: {error}).") from error
    for field in dataclasses.fields(network):
        size = getattr(network, field.name)
        if isinstance(size, int) and size > _MAX_SIZE:
            raise UserError(f"{path} sets {field.name} to more than {_MAX_SIZE:,}. Do not trust this model.")
    return FAMILIES[kind], network


def special_tokens(directory: pathlib.Path, vocab_size: int) -> dict[str, Any]:
    """Returns start token, EOS ids and padding as fields of `SpecialTokens`.

    If a decoder has a tokenizer, its start token takes precedence.

    Raises:
      UserError: if generation_config.json is damaged, or the start token is not in the vocabulary.
    """
    config = parse_json((directory / "config.json").read_bytes())
    try:
        config |= {name: value for name, value in _generation(directory).items() if value is not None}
        is_gemma = FAMILIES[config["model_type"]] in _GEMMAS
        if is_gemma:  # ids of the decoder's configuration are those of its class where they are missing
            config = {"bos_token_id": 2, "eos_token_id": 1, "pad_token_id": 0, **(config.get("decoder") or {}), **config}
        first = lambda ids: ids[0] if isinstance(ids, list) else ids
        padding = max(first(config.get("pad_token_id")) or 0, 0)  # some files have -1 for none
        end = config.get("eos_token_id")
        eos_ids = tuple(i for i in (end if isinstance(end, list) else [end]) if i is not None and i < vocab_size)
        ids = {"end": eos_ids if len(eos_ids) > 1 else eos_ids[0] if eos_ids else None, "padding": padding}
        if config.get("is_encoder_decoder", FAMILIES[config["model_type"]] in _ENCODER_DECODERS):
            start = config.get("decoder_start_token_id")
            start = (config["bos_token_id"] if is_gemma else padding) if start is None else int(start)
            if not 0 <= start < vocab_size:
                raise UserError(
                    f"{directory} has decoder_start_token_id {start}, but only {vocab_size} ids. Correct its config.json."
                )
        else:
            start = first(config.get("bos_token_id"))
            start = start if start is not None and 0 <= start < vocab_size else None
    except (OSError, ValueError, TypeError, IndexError, AttributeError) as error:
        raise UserError(f"{directory}/generation_config.json is not valid ({type(error).__name__}: {error}).") from error
    return {"start": start, **ids}


def _generation(directory: pathlib.Path) -> dict[str, Any]:
    path = directory / "generation_config.json"
    return dict(parse_json(path.read_bytes())) if path.exists() else {}


def remarks(directory: pathlib.Path, network: TransformerConfig) -> list[str]:
    """Returns notes on differences from `transformers`, for a directory that `special_tokens` has read."""
    settings, notes = _generation(directory), []
    unsupported = [name for name, neutral in _GENERATION.items() if settings.get(name) not in (None, [], {}, *neutral)]
    if unsupported:
        notes.append(
            f"{directory}/generation_config.json sets {', '.join(unsupported)}, which is ignored. Generation is greedy and "
            "without penalties by default."
        )
    config = parse_json((directory / "config.json").read_bytes())
    if "text_config" in config or "text_config" in (config.get("encoder") or {}):
        notes.append(f"{directory} has a model of images and text. Its text model is read.")
    if not network.logits_via_embedding and _is_headless(safetensors_files.open_directory(directory)):
        notes.append(f"{directory} has no language-modeling head. Its embeddings are used instead.")
    return notes


def _is_headless(tensors: Mapping[str, LazyTensor]) -> bool:
    """Returns whether a Llama was saved without its language-modeling head."""
    return "embed_tokens.weight" in tensors and "lm_head.weight" not in tensors


def _dtype(config: Mapping[str, Any], directory: pathlib.Path) -> str:
    """Returns the dtype that `transformers` uses: that of config.json, or of the stored tensors."""
    named = str(config.get("dtype") or config.get("torch_dtype") or "").removeprefix("torch.")
    if not named:
        try:
            tensors = iter(safetensors_files.open_directory(directory).values())
            named = str(next(tensors).dtype)
        except (UserError, StopIteration):  # reported when the tensors are read
            named = "float32"
    return named if named in DTYPES else "float32"


def _open_params(directory: pathlib.Path) -> dict[str, LazyTensor]:
    """Returns our parameters by unstacked name.

    Raises:
      UserError: if files are damaged, or have other tensors than config.json describes.
    """
    family, config = read_config(directory)
    tensors: dict[str, LazyTensor] = {}
    stored = safetensors_files.open_directory(directory)
    for name, tensor in stored.items():
        canonical_name = None if name.endswith(_IGNORED) else family.canonical_name(name)
        if canonical_name is not None:
            existing = tensors.setdefault(canonical_name, tensor)
            if existing is not tensor and not existing.equals(tensor):
                raise UserError(f"{directory} has different values for {name} and {canonical_name}, which must be equal.")
    _check_tied(tensors, config, directory, _is_headless(stored))
    params, shapes = {}, {name: part.shape for name, part in network_parts(config).items()}
    for entry in family.entries(config):
        if entry.name not in tensors:
            raise UserError(f"{directory} is incomplete: {entry.name}, which its config.json requires, is missing.")
        params.update(entry.split(tensors.pop(entry.name), shapes, str(directory)))
    if tensors:
        raise UserError(f"{directory} has {next(iter(tensors))}, which does not fit its config.json.")
    return params


def _check_tied(tensors: dict[str, LazyTensor], config: TransformerConfig, directory: pathlib.Path, headless: bool) -> None:
    """Removes or adds the output matrix in `tensors`, so that it exists exactly if logits are not tied.

    A `headless` model was saved without its language-modeling head.
    """
    tables = ("shared.weight", "model.embed_tokens.weight", "transformer.tokens_embed.weight", *_TABLES_OF_T5GEMMA)
    name = "lm_head.out_proj.weight" if any(table in tensors for table in _TABLES_OF_T5GEMMA) else "lm_head.weight"
    head, table = tensors.get(name), next((tensors[name] for name in tables if name in tensors), None)
    if not config.logits_via_embedding and head is None and table is not None:
        if "shared.weight" not in tensors and not headless:  # a T5 without one is tied in `transformers` 5
            raise UserError(f"{directory} is incomplete: {name}, which its config.json requires, is missing.")
        tensors[name] = table  # tied without T5 1.0's scaling
    elif config.logits_via_embedding and head is not None and table is not None:
        if not head.equals(table):
            raise UserError(
                f"{directory} has an output matrix ({name}), but its config.json ties logits to embeddings. Correct "
                "tie_word_embeddings or scale_decoder_outputs in it."
            )
        del tensors[name]


def find_family(config: Network) -> tuple[Family, dict[str, Any]]:
    """Returns the family of a network and its config.json.

    Raises:
      UserError: if `transformers` has no class for it.
    """
    gemma_settings = ("attention_logit_cap", "logit_cap", "scale_embeddings")
    for family in dict.fromkeys(FAMILIES.values()):
        fits = family in _GEMMAS or not any(getattr(config, name, None) for name in gemma_settings)
        hf_config = family.to_hf_config(config) if fits and isinstance(config, TransformerConfig) else None
        if hf_config:
            return family, hf_config
    if find_head(config):
        raise UserError(
            "The Hugging Face format does not support our classification head. Remove it: set HEAD = None in the "
            "configuration, with RestoreCheckpointConfig.strict = False."
        )
    if getattr(config, "peft", ()):
        raise UserError(
            "The Hugging Face format does not support PEFT modules. Merge them first with run.merged(), or write LoRA with "
            "run.save_peft(...)."
        )
    raise UserError(
        "transformers has no class for this network. Supported are encoder-decoders with relative biases (T5; umT5 with biases "
        "per layer), causal decoders with learned positions, post-norm and biases (GPT-1), causal decoders with rotary "
        "positions, RMS norms and gated SiLU (Llama; Mistral with windows; Qwen 2 with biases of queries, keys and values; "
        "Qwen 3 with norms of queries and keys; SmolLM3 with layers of two kinds; OLMo 2 with norms of outputs), and with "
        "gated GELU and norms before and after sub-layers (Gemma 2; Gemma 3 with norms of queries and keys; encoder-decoders "
        "T5Gemma with two tables of embeddings, and T5Gemma 2 with merged attention)."
    )


def write(
    directory: pathlib.Path,
    tensors: Mapping[str, LazyTensor],
    config: Network,
    dtype: str = "float32",
    tokens: Mapping[str, int | tuple[int, ...] | None] = T5_TOKENS,
) -> list[str]:
    """Writes a directory that `transformers` loads with `from_pretrained`. Returns the names of its files.

    Args:
      directory: existing directory.
      tensors: our tensors by unstacked name.
      config: the network.
      dtype: "float32", "bfloat16" or "float16".
      tokens: `pad_token_id`, `bos_token_id` (start token of a decoder) and `eos_token_id`.

    Raises:
      UserError: if `transformers` has no class for the network.
    """
    family, hf_config = find_family(config)
    names = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
    stored_dtype = safetensors_files.DTYPES[names[dtype]]
    files = safetensors_files.write(
        directory, {entry.name: entry.export(tensors).cast(stored_dtype) for entry in family.entries(config)}
    )
    if hf_config.get("is_encoder_decoder"):
        ids = dict(tokens)
        for stack in (hf_config.get("encoder"), hf_config.get("decoder")):
            if stack is not None:  # where T5Gemma's classes read them
                stack.update(ids)
                stack.get("text_config", {}).update(ids)
        tokens = {**tokens, "decoder_start_token_id": tokens["bos_token_id"]}
        if "decoder" not in hf_config:
            del tokens["bos_token_id"]
    (directory / "config.json").write_text(json.dumps({**hf_config, **tokens, "dtype": dtype}, indent=1) + "\n")
    (directory / "generation_config.json").write_text(json.dumps(tokens, indent=1) + "\n")
    return [*files, "config.json", "generation_config.json"]
