"""`t5x_lab convert`: converts checkpoints between formats, with one chunk of a tensor in memory at a time."""

import dataclasses
import pathlib
import shutil
import tempfile

import numpy as np
from etils import epath

from t5x_lab.checkpoints.formats import t5x_lab
from t5x_lab.checkpoints.formats.huggingface import directory as huggingface
from t5x_lab.checkpoints.formats.location import FORMATS, Location, find, open_source
from t5x_lab.checkpoints.formats.source import Source
from t5x_lab.checkpoints.layers import network_parts
from t5x_lab.checkpoints.layout import COMMIT, absolute_path, finished_steps
from t5x_lab.checkpoints.lazy_tensors import LazyTensor, check_shape, mean
from t5x_lab.checkpoints.verification import explain_damage
from t5x_lab.config.errors import NotSet, UserError
from t5x_lab.config.object_storage import is_object_storage, is_storage_error
from t5x_lab.config.temporary import copy_files
from t5x_lab.data.vocabularies.config import HuggingFaceVocabulary, SpecialTokens, Vocabulary
from t5x_lab.networks.network import Network, has_encoder
from t5x_lab.runs.config.checkpoint_config import SENTENCEPIECE, read_config
from t5x_lab.runs.config.gin_config import GinConfig
from t5x_lab.runs.config.trust import remember
from t5x_lab.runs.convert.export_tokenizer import read_sentencepiece_bytes, write_tokenizer
from t5x_lab.runs.convert.model_card import model_card
from t5x_lab.runs.data_layer import load_data_layer

TOKENIZER = "tokenizer"  # folder of a Hugging Face tokenizer in a run directory


def convert(
    location: Location, target: str, to: str, *, config: GinConfig | None = None, dtype: str = "float32", average: int = 1
) -> str:
    """Writes a checkpoint to a new directory. The directory appears when it is complete.

    Args:
      location: a checkpoint of any format. See `formats.location.find`.
      target: new directory. In t5x_lab's format it is a run directory.
      to: "t5x_lab" or "hf".
      config: configuration. Required if the source has none.
      dtype: dtype of the weights in Hugging Face's format.
      average: number of checkpoints of the run, up to this one, whose mean is written.

    Returns:
      A summary.

    Raises:
      UserError: if the source is damaged or does not fit the configuration, or `target` exists or cannot be written.
    """
    config = config or read_config(location)
    network = config.model().network
    if to == "hf":
        huggingface.find_family(network)
    path = _check_target(target, location)
    with explain_damage(location.path):
        source, steps = _open_mean(location, average)
        tensors = _read_tensors(source, network)
        count = sum(tensor.size for tensor in tensors.values())
        new = _new_folder(path)
        try:
            notes = ""
            if to == "hf":
                special, vocabulary = config.special_tokens(), _vocabulary(config)
                if vocabulary and config.input_vocabulary() != vocabulary:
                    raise UserError("A Hugging Face model has one tokenizer, but this run has an INPUT_VOCABULARY beside it.")
                ids = {
                    "pad_token_id": _padding_id(special, vocabulary, network),
                    "bos_token_id": special.start,
                    "eos_token_id": _end_id(special, vocabulary),
                }
                huggingface.write(new, tensors, network, dtype, ids)
                notes = write_tokenizer(new, vocabulary, special, has_encoder(network))
                card = model_card(path.name, epath.Path(location.path), config, steps, count, dtype)
                (new / "README.md").write_text(card)
            else:
                _write_run(new, path, tensors, source.step, config)
            source.check()
            new.chmod(0o755)  # mkdtemp creates a private directory
            _move(new, path)
        except Exception as error:
            if is_object_storage(path):
                path.rmtree(missing_ok=True)
            if not is_storage_error(error):
                raise
            problem = getattr(error, "strerror", None) or error
            raise UserError(f"{target} cannot be written: {problem}. The incomplete files were removed.") from error
        finally:
            shutil.rmtree(new, ignore_errors=True)
    description = (
        f"the mean of the steps {', '.join(map(str, steps))} of {location.path.parent.parent}" if average > 1 else location.path
    )
    return f"Converted {description} ({location.title}) to {target} ({FORMATS[to].TITLE}): {count:,} parameters.{notes}"


def _open_mean(location: Location, number: int) -> tuple[Source, list[int]]:
    """Opens a checkpoint, or the mean of the last checkpoints of a run up to it. Also returns their steps.

    Raises:
      UserError: if the run does not have as many checkpoints.
    """
    if number == 1:
        source = open_source(location)
        return source, [source.step]
    run, is_of_run = location.path.parent.parent, location.path.parent.name == "checkpoints"
    if location.format != t5x_lab.NAME or not is_of_run:
        raise UserError(f"--average is {number}, but {location.path} is not a checkpoint in a run directory of t5x_lab.")
    steps = [step for step in finished_steps(run) if step <= location.step]
    if len(steps) < number:
        raise UserError(
            f"--average is {number}, but {run} has only the steps {', '.join(map(str, steps))} up to {location.step}. "
            "SaveCheckpointConfig.keep sets how many checkpoints a run keeps."
        )
    steps = steps[-number:]
    sources = [open_source(find(str(run), step, location.weights)) for step in steps]
    params = {name: mean([source.params[name] for source in sources]) for name in sources[-1].params}

    def check() -> None:
        for source in sources:
            source.check()

    return dataclasses.replace(sources[-1], params=params, check=check), steps


def _check_target(target: str, location: Location) -> epath.Path:
    path = absolute_path(target)
    if path.exists():
        raise UserError(f"{target} exists. Choose a new directory.")
    source = location.path.parent if location.path.parent.name == "checkpoints" else location.path
    if source in path.parents:
        raise UserError(f"{target} is inside the source directory. Choose a directory outside of it.")
    return path


def _new_folder(path: epath.Path) -> pathlib.Path:
    """Returns a new folder to write a directory in: beside it, or on the local disk for object storage."""
    try:
        if is_object_storage(path):
            return pathlib.Path(tempfile.mkdtemp(prefix="t5x_lab_"))
        path.parent.mkdir(parents=True, exist_ok=True)
        return pathlib.Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror}. Choose another directory.") from error


def _move(new: pathlib.Path, path: epath.Path) -> None:
    if not is_object_storage(path):
        new.rename(path)
        return
    copy_files(new, path, last=COMMIT)


def _read_tensors(source: Source, network: Network) -> dict[str, LazyTensor]:
    """Returns the source's parameters in the model's shapes and order."""
    parts = network_parts(network)
    for name in parts:
        if name not in source.params:
            raise UserError(f"{source.path} has no parameter {name}. Pass the configuration it was trained with.")
    for name in source.params:
        if name not in parts:
            raise UserError(
                f"{source.path} holds {name}, which the model does not have. Pass the configuration it was trained with."
            )
    tensors = {}
    for name, part in parts.items():
        tensor = source.params[name]
        joined_heads = tensor.size == part.size and len(tensor.shape) != len(part.shape)
        if not joined_heads:
            check_shape(name, tensor.shape, part.shape, str(source.path))
        tensors[name] = tensor.reshape(part.shape).cast(np.dtype(np.float32))
    return tensors


def _write_run(new: pathlib.Path, path: epath.Path, tensors: dict[str, LazyTensor], step: int, config: GinConfig) -> None:
    """Writes a run directory at `new`, with a copy of the vocabulary, for its final location `path`."""
    vocabulary, text = _vocabulary(config), config.text
    if pieces := read_sentencepiece_bytes(vocabulary):
        (new / SENTENCEPIECE).write_bytes(pieces)
        text = GinConfig((), (text, f"SentencePieceVocabulary.path = {str(path / SENTENCEPIECE)!r}")).text
    elif isinstance(vocabulary, HuggingFaceVocabulary):
        write_tokenizer(new / TOKENIZER, vocabulary, config.special_tokens(), has_encoder(config.model().network))
        text = GinConfig((), (text, f"HuggingFaceVocabulary.path = {str(path / TOKENIZER)!r}")).text
    (new / "config.gin").write_text(text)
    remember(text)
    parts = network_parts(config.model().network)
    t5x_lab.write(epath.Path(new) / "checkpoints" / str(step), tensors, parts, step, config=text)


def _end_id(special: SpecialTokens, vocabulary: Vocabulary | None) -> int | tuple[int, ...] | None:
    if special.end is not None or vocabulary is None:
        return 1 if special.end is None else special.end
    load_data_layer()
    from t5x_lab.data.vocabularies.build import build_vocabulary

    try:
        return build_vocabulary(vocabulary).eos_id
    except UserError:  # it cannot be read on this machine; `write_tokenizer` reports that
        return 1


def _padding_id(special: SpecialTokens, vocabulary: Vocabulary | None, network: Network) -> int | None:
    """Returns the padding id, None for id 0 of a decoder whose vocabulary has no padding: `transformers` would mask a token."""
    if special.padding or has_encoder(network):
        return special.padding
    if vocabulary is None:
        return None
    load_data_layer()
    from t5x_lab.data.vocabularies.build import build_vocabulary, has_padding

    try:
        return special.padding if has_padding(build_vocabulary(vocabulary)) else None
    except UserError:  # see `_end_id`
        return None


def _vocabulary(config: GinConfig) -> Vocabulary | None:
    try:
        return config.vocabulary()
    except NotSet:
        return None
