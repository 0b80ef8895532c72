"""`t5x_lab convert`: a checkpoint of one format written in another, a chunk of one tensor in memory at a time."""

import pathlib
import shutil
import tempfile

import numpy as np
from etils import epath

from t5x_lab.checkpoints.formats import FORMATS, Location, Source, huggingface, open_source, t5x_lab
from t5x_lab.checkpoints.layers import parts_of
from t5x_lab.checkpoints.lazy_tensors import LazyTensor, check_shape
from t5x_lab.checkpoints.verification import explaining_damage
from t5x_lab.config.errors import NotSet, UserError
from t5x_lab.data.config import HuggingFaceVocabulary, SpecialTokens, Vocabulary
from t5x_lab.data.environment import check_environment
from t5x_lab.networks.network import Network, has_encoder
from t5x_lab.runs.checkpoint_config import SENTENCEPIECE, config_of
from t5x_lab.runs.config import GinConfig
from t5x_lab.runs.export_tokenizer import pieces_of, write_tokenizer

TOKENIZER = "tokenizer"  # the folder of a run's tokenizer, where that is transformers'


def convert(location: Location, target: str, to: str, *, config: GinConfig | None = None, dtype: str = "float32") -> str:
    """Writes a checkpoint to the new directory `target`, which appears when it is whole.

    Args:
      location: a checkpoint of any format; see `formats.find`.
      target: must not exist. In t5x_lab's format it becomes a run directory.
      to: "t5x_lab" or "hf".
      config: the configuration, where the source has none of its own.
      dtype: of the numbers in Hugging Face's format.

    Returns:
      a sentence on what was done.

    Raises:
      UserError: when the source is damaged or does not fit the configuration, or the target is there or impossible.
    """
    config = config or config_of(location)
    network = config.model().network
    if to == "hf":
        huggingface.family_of(network)
    goal = _new_directory(target, location)
    with explaining_damage(location.path):
        opened = open_source(location)
        tensors = _in_model_order(opened, network)
        try:
            goal.parent.mkdir(parents=True, exist_ok=True)
            new = pathlib.Path(tempfile.mkdtemp(prefix=f".{goal.name}.", dir=goal.parent))
        except OSError as error:
            raise UserError(f"{target} cannot be written: {error.strerror}. Name another directory.") from error
        try:
            notes = ""
            if to == "hf":
                special, vocabulary = config.special_tokens(), _vocabulary(config)
                end = _end_id(special, vocabulary)
                ids = {"pad_token_id": special.padding, "bos_token_id": special.start, "eos_token_id": end}
                huggingface.write(new, tensors, network, dtype, ids)
                notes = write_tokenizer(new, vocabulary, special, has_encoder(network))
            else:
                _write_run(new, goal, tensors, opened.step, config)
            opened.check()
            new.chmod(0o755)  # what mkdtemp made is for its owner alone
            new.rename(goal)
        except OSError as error:
            raise UserError(f"{target} cannot be written: {error.strerror or error}. Nothing is left of it.") from error
        finally:
            shutil.rmtree(new, ignore_errors=True)
    count = sum(tensor.size for tensor in tensors.values())
    return f"{location.path} ({location.title}) is now in {target} ({FORMATS[to].TITLE}): {count:,} parameters.{notes}"


def _new_directory(target: str, location: Location) -> pathlib.Path:
    if "://" in target:
        raise UserError(f"{target} is remote; convert writes to a local directory. Copy it there afterwards.")
    goal = pathlib.Path(target).absolute()
    if goal.exists():
        raise UserError(f"{target} exists, and nothing is ever overwritten. Name a new directory.")
    inside = pathlib.Path(location.path).parent if location.path.parent.name == "checkpoints" else pathlib.Path(location.path)
    if inside in goal.parents:
        raise UserError(f"{target} lies inside the source. Name a directory beside it.")
    return goal


def _in_model_order(source: Source, network: Network) -> dict[str, LazyTensor]:
    """The source's parameters, each in the model's shape, in the model's order."""
    parts = parts_of(network)
    where = str(source.path)
    for name in parts:
        if name not in source.params:
            raise UserError(f"{where} does not hold {name}: it is of another model. Give the configuration it was made with.")
    for name in source.params:
        if name not in parts:
            raise UserError(
                f"{where} holds {name}, which the configuration's model does not have. Give the one it was made with."
            )
    tensors = {}
    for name, part in parts.items():
        tensor = source.params[name]
        joined_heads = tensor.size == part.size and len(tensor.shape) != len(part.shape)
        if not joined_heads:
            check_shape(name, tensor.shape, part.shape, where)
        tensors[name] = tensor.reshape(part.shape).cast(np.dtype(np.float32))  # as parameters are kept
    return tensors


def _write_run(new: pathlib.Path, goal: pathlib.Path, tensors: dict[str, LazyTensor], step: int, config: GinConfig) -> None:
    """The run keeps the vocabulary that it was trained with."""
    vocabulary, text = _vocabulary(config), config.text
    if pieces := pieces_of(vocabulary):
        (new / SENTENCEPIECE).write_bytes(pieces)
        text = GinConfig((), (text, f"SentencePieceVocabulary.path = {str(goal / SENTENCEPIECE)!r}")).text
    elif isinstance(vocabulary, HuggingFaceVocabulary):
        write_tokenizer(new / TOKENIZER, vocabulary, config.special_tokens(), has_encoder(config.model().network))
        text = GinConfig((), (text, f"HuggingFaceVocabulary.path = {str(goal / TOKENIZER)!r}")).text
    (new / "config.gin").write_text(text)
    parts = parts_of(config.model().network)
    t5x_lab.write(epath.Path(new) / "checkpoints" / str(step), tensors, parts, step, config=text)


def _end_id(special: SpecialTokens, vocabulary: Vocabulary | None) -> int | tuple[int, ...] | None:
    if special.end is not None or vocabulary is None:
        return 1 if special.end is None else special.end
    check_environment()
    from t5x_lab.data.vocabularies import build_vocabulary

    try:
        return build_vocabulary(vocabulary).eos_id
    except UserError:  # it cannot be read from here, which is said where its tokenizer is written
        return 1


def _vocabulary(config: GinConfig) -> Vocabulary | None:
    try:
        return config.vocabulary()
    except NotSet:  # a model without one
        return None
