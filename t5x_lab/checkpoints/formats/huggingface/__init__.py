"""Hugging Face's format: directories that `transformers` saved or will load, of safetensors and a config.json."""

import dataclasses
import json
import pathlib
from collections.abc import Mapping
from typing import Any

from etils import epath

from t5x_lab.checkpoints.formats.huggingface import gemma2, gpt1, llama, safetensors_files, t5
from t5x_lab.checkpoints.formats.huggingface.table import Family
from t5x_lab.checkpoints.formats.source import Source
from t5x_lab.checkpoints.layers import parts_of
from t5x_lab.checkpoints.lazy_tensors import LazyTensor
from t5x_lab.config.errors import UserError
from t5x_lab.networks.config import DTYPES
from t5x_lab.networks.head import find_head
from t5x_lab.networks.network import Network
from t5x_lab.networks.transformer import TransformerConfig

NAME, TITLE = "hf", "Hugging Face"
FAMILIES: dict[str, Family] = {
    "t5": t5.FAMILY,
    "mt5": t5.FAMILY,
    "openai-gpt": gpt1.FAMILY,
    "llama": llama.FAMILY,
    "qwen2": llama.FAMILY,
    "qwen3": llama.FAMILY,
    "gemma2": gemma2.FAMILY,
}
T5_TOKENS: Mapping[str, int | None] = {"pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 1}
_MAX_LAYERS = 10_000
_LEFT_OUT = (  # what older versions saved, and no model reads
    "rotary_emb.inv_freq",
    ".attn.bias",
    ".attn.masked_bias",
    "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight",
)
# Of generation_config.json, with what asks for nothing; what greedy decoding does not heed is said.
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
        raise UserError(f"{root} is a model of Hugging Face's, which has no steps. Leave --step out.")
    if "://" in str(root):
        raise UserError(f"{root} is remote; a model of Hugging Face's is read from a local directory. Copy it first.")
    return root


def step_of(path: epath.Path) -> int:
    return 0


def open(path: epath.Path) -> Source:
    return Source(path, 0, _open_params(pathlib.Path(path)))


def open_as_saved(path: epath.Path) -> Mapping[str, LazyTensor]:
    return safetensors_files.open_directory(pathlib.Path(path))


def read_config(directory: pathlib.Path) -> tuple[Family, TransformerConfig]:
    """The network that a config.json describes.

    Raises:
      UserError: when it is of a kind that is not read, or damaged.
    """
    path = directory / "config.json"
    try:
        config = json.loads(path.read_bytes())
        kind = config["model_type"]
        if kind not in FAMILIES:
            raise UserError(f'{path} is of a model of type "{kind}"; t5x_lab reads {", ".join(FAMILIES)}.')
        network = dataclasses.replace(FAMILIES[kind].to_ours(config), dtype=_dtype(config, directory))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
        raise UserError(f"{path} is no config.json of transformers ({type(error).__name__}: {error}).") from error
    if network.num_encoder_layers + network.num_decoder_layers > _MAX_LAYERS:
        raise UserError(f"{path} promises more than {_MAX_LAYERS:,} layers. Do not trust this model.")
    return FAMILIES[kind], network


def special_tokens(directory: pathlib.Path, vocab_size: int) -> dict[str, Any]:
    """What a model's decoder reads first, what ends its texts, and padding, by `SpecialTokens`' names.

    Where a decoder has a tokenizer, that tells its start token better: it puts one before a text or does not.

    Raises:
      UserError: when generation_config.json is damaged, or the model has no such start token.
    """
    config = json.loads((directory / "config.json").read_bytes())
    try:
        config |= {name: value for name, value in _generation(directory).items() if value is not None}
        first = lambda ids: ids[0] if isinstance(ids, list) else ids
        padding = max(first(config.get("pad_token_id")) or 0, 0)  # some write -1 for none
        end = config.get("eos_token_id")
        ends = tuple(i for i in (end if isinstance(end, list) else [end]) if i is not None and i < vocab_size)
        ids = {"end": ends if len(ends) > 1 else ends[0] if ends else None, "padding": padding}
        if config.get("is_encoder_decoder", config["model_type"] in ("t5", "mt5")):
            start = config.get("decoder_start_token_id")
            start = padding if start is None else int(start)
            if not 0 <= start < vocab_size:
                raise UserError(f"{directory} starts texts with the id {start}, of {vocab_size} rows. Correct its config.json.")
        else:
            start = first(config.get("bos_token_id"))
            start = start if start is not None and 0 <= start < vocab_size else None
    except (OSError, ValueError, TypeError, IndexError, AttributeError) as error:
        raise UserError(
            f"{directory}/generation_config.json is none of transformers ({type(error).__name__}: {error})."
        ) from error
    return {"start": start, **ids}


def _generation(directory: pathlib.Path) -> dict[str, Any]:
    path = directory / "generation_config.json"
    return dict(json.loads(path.read_bytes())) if path.exists() else {}


def remarks(directory: pathlib.Path, network: TransformerConfig) -> list[str]:
    """Sentences on what of a model is not as `transformers` would have it; for a directory that `special_tokens` has read."""
    settings, found = _generation(directory), []
    unread = [name for name, nothing in _GENERATION.items() if settings.get(name) not in (None, [], {}, *nothing)]
    if unread:
        found.append(
            f"{directory}/generation_config.json sets {', '.join(unread)}, which is not read: texts are written greedily and "
            "without penalties, unless other arguments are given."
        )
    if not network.logits_via_embedding and _is_headless(safetensors_files.open_directory(directory)):
        found.append(f"{directory} holds a model without a head for language modelling; its embeddings take that place.")
    return found


def _is_headless(tensors: Mapping[str, LazyTensor]) -> bool:
    """Whether a Llama was saved without the names that a model for language modelling has."""
    return "embed_tokens.weight" in tensors and "lm_head.weight" not in tensors


def _dtype(config: Mapping[str, Any], directory: pathlib.Path) -> str:
    """What `transformers` computes in: the type that config.json names, else that of the numbers."""
    named = str(config.get("dtype") or config.get("torch_dtype") or "").removeprefix("torch.")
    if not named:
        try:
            named = str(next(iter(safetensors_files.open_directory(directory).values())).dtype)
        except UserError:  # which is said where the numbers are read
            named = "float32"
    return named if named in DTYPES else "float32"


def _open_params(directory: pathlib.Path) -> dict[str, LazyTensor]:
    """Our parameters, by unstacked names.

    Raises:
      UserError: when files are damaged, or hold other tensors than config.json promises.
    """
    family, config = read_config(directory)
    found: dict[str, LazyTensor] = {}
    opened = safetensors_files.open_directory(directory)
    for name, tensor in opened.items():
        if not name.endswith(_LEFT_OUT):
            known = found.setdefault(family.aliases(name), tensor)
            if known is not tensor and not known.equals(tensor):
                raise UserError(f"{directory} holds {name} and {family.aliases(name)}, which should be the same and are not.")
    _check_tied(found, config, directory, _is_headless(opened))
    ours, shapes = {}, {name: part.shape for name, part in parts_of(config).items()}
    for entry in family.entries(config):
        if entry.name not in found:
            raise UserError(f"{directory} holds no {entry.name}, which its config.json promises: it is not whole.")
        ours.update(entry.ours_of(found.pop(entry.name), shapes, str(directory)))
    if found:
        raise UserError(f"{directory} holds {next(iter(found))}, which a model of its config.json does not have.")
    return ours


def _check_tied(found: dict[str, LazyTensor], config: TransformerConfig, directory: pathlib.Path, headless: bool) -> None:
    """Makes the output matrix one tensor where logits are tied and two where they are not.

    A `headless` model was saved without the names that one for language modelling has.
    """
    tables = ("shared.weight", "model.embed_tokens.weight", "transformer.tokens_embed.weight")
    head, table = found.get("lm_head.weight"), next((found[name] for name in tables if name in found), None)
    if not config.logits_via_embedding and head is None and table is not None:
        if "model.embed_tokens.weight" in found and not headless:  # a T5 without one is tied in `transformers` 5
            raise UserError(f"{directory} holds no lm_head.weight, which its config.json promises: it is not whole.")
        found["lm_head.weight"] = table  # tied after all, without T5 1.0's scaling: the same numbers twice
    elif config.logits_via_embedding and head is not None and table is not None:
        if not head.equals(table):
            raise UserError(
                f"{directory} has logits of their own (lm_head.weight), and its config.json says that they are tied to the "
                "embeddings. Set tie_word_embeddings or scale_decoder_outputs in it to what the model was trained with."
            )
        del found["lm_head.weight"]


def family_of(config: Network) -> tuple[Family, dict[str, Any]]:
    """The family that a network of ours belongs to, and its config.json.

    Raises:
      UserError: when it belongs to none.
    """
    only_gemmas = ("attention_logit_cap", "logit_cap", "scale_embeddings")
    for family in dict.fromkeys(FAMILIES.values()):
        fits = family is gemma2.FAMILY or not any(getattr(config, name, None) for name in only_gemmas)
        theirs = family.to_theirs(config) if fits and isinstance(config, TransformerConfig) else None
        if theirs:
            return family, theirs
    if find_head(config):
        raise UserError(
            "transformers' format has no place for a classification head. Take the network without it: HEAD = None in the "
            "configuration, with RestoreCheckpointConfig.strict = False."
        )
    if getattr(config, "peft", ()):
        raise UserError(
            "transformers' format has no place for what is added to this network (PEFT). Work it into the network's own "
            "parameters first, run.merged(), or write LoRA alone, run.save_peft(…)."
        )
    raise UserError(
        "transformers has no class for this network. What it has: encoder-decoders with relative biases (T5), causal decoders "
        "with learned positions, post-norm and biases (GPT-1), and causal decoders with rotary positions, RMS norms and gated "
        "SiLU (Llama; with biases of queries, keys and values, Qwen 2; with their norms, Qwen 3; with capped logits and a "
        "gated GELU, Gemma 2)."
    )


def write(
    directory: pathlib.Path,
    tensors: Mapping[str, LazyTensor],
    config: Network,
    dtype: str = "float32",
    tokens: Mapping[str, int | tuple[int, ...] | None] = T5_TOKENS,
) -> list[str]:
    """Writes a directory that `transformers` loads with `from_pretrained`; returns the names of its files.

    Args:
      tensors: ours, by unstacked names.
      config: the network.
      dtype: of the numbers: "float32", "bfloat16" or "float16".
      tokens: `pad_token_id`, `bos_token_id` (what a decoder reads first) and `eos_token_id`.

    Raises:
      UserError: when `transformers` has no class for such a network.
    """
    family, theirs = family_of(config)
    names = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
    to = safetensors_files.DTYPES[names[dtype]]
    files = safetensors_files.write(directory, {entry.name: entry.theirs(tensors).cast(to) for entry in family.entries(config)})
    if theirs.get("is_encoder_decoder"):
        tokens = {**tokens, "decoder_start_token_id": tokens["bos_token_id"]}
        del tokens["bos_token_id"]
    (directory / "config.json").write_text(json.dumps({**theirs, **tokens, "dtype": dtype}, indent=1) + "\n")
    (directory / "generation_config.json").write_text(json.dumps(tokens, indent=1) + "\n")
    return [*files, "config.json", "generation_config.json"]
