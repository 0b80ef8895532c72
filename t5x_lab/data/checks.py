"""What is checked, and told, before anything is read: that vocabulary, model and tasks go together, and that data are here."""

from collections.abc import Collection, Iterable

import seqio

from t5x_lab.config.errors import NotHere, UserError, nearest
from t5x_lab.config.gin_files import flag
from t5x_lab.data.config import DataConfig
from t5x_lab.data.examples import features_of, has_text_at_0
from t5x_lab.data.mixture import Part, WeightedTasks
from t5x_lab.data.reading import shard_of_task
from t5x_lab.data.sources import is_counted_by_reading
from t5x_lab.data.vocabularies import build_vocabulary
from t5x_lab.observe.console import say


def check_vocabulary(
    tasks: WeightedTasks, config: DataConfig, vocab_size: int, more_ids: Collection[int] | None = None
) -> None:
    """Opens the vocabulary's file, and raises a `UserError` where it does not go together with the model or the tasks.

    Args:
      more_ids: that the model embeds beside the vocabulary's, as those of a soft prompt; None = not to be checked.
    """
    build_vocabulary(config.vocabulary)
    with_eos = (f.add_eos for part in tasks.parts for name, f in part.task.output_features.items() if name in part.lengths)
    if tasks.vocabulary.eos_id is None and (config.converter is None or any(with_eos)):
        raise UserError(
            f"{config.vocabulary} has no end token, which training puts behind documents. Add one to the tokenizer's files "
            '("eos_token" in tokenizer_config.json).'
        )
    if not config.pack and has_text_at_0(tasks.vocabulary):
        raise UserError(
            "DataConfig.pack is False: padding of rows that are not packed has the id 0, which is a token of "
            f"{config.vocabulary}. Leave it out."
        )
    _tell_what_is_not_read(tasks, config)
    if more_ids is not None:
        _check_more_ids(tasks, vocab_size, more_ids)
    for part in tasks.parts:
        _check_special_ids(part, vocab_size)
        for name, feature in part.task.output_features.items():
            if name in part.lengths and feature.vocabulary.vocab_size > vocab_size:
                raise UserError(
                    f'The vocabulary of feature "{name}" of task "{part.task.name}" has {feature.vocabulary.vocab_size} ids, '
                    f"the model only {vocab_size}. Set the network's (--gin.TransformerConfig.vocab_size) to at least that, or "
                    "use the "
                    "vocabulary the model was made for."
                )


def _check_more_ids(tasks: WeightedTasks, vocab_size: int, more_ids: Collection[int]) -> None:
    """Raises a `UserError` where ids before inputs are not embedded, and where no task has `more_ids` before its inputs; says
    which ones have not."""
    known = {*range(vocab_size), *more_ids}
    for part in tasks.trained:
        strange = [i for i in part.before_inputs if i not in known]
        if strange:
            raise UserError(
                f'SpecialTokens.input_start puts {len(strange)} ids before the inputs of "{part.task.name}" that the model '
                f"does not embed, such as {strange[0]}. Of a soft prompt, SOFT_PROMPT_LENGTH is the length of both."
            )
    if not more_ids:
        return
    without = [part.task.name for part in tasks.trained if not set(more_ids) <= set(part.before_inputs)]
    if without and len(without) == len(tasks.trained):
        raise UserError(
            f'What is added embeds {len(more_ids)} ids of its own, and nothing of "{tasks.name}" is read behind them: it would '
            "learn nothing. Train it on tasks that have inputs of their own, with SpecialTokens.input_start as "
            "added/soft_prompt.gin has it."
        )
    if without:
        say(f"The soft prompt is not read, and learns nothing, of {', '.join(without)}: they have no inputs of their own.")


def _check_special_ids(part: Part, vocab_size: int) -> None:
    """Raises a `UserError` where the model has no room for ids that a task puts between its texts."""
    ids = getattr(part.task, "special_ids", ())
    if max(ids, default=0) >= vocab_size:
        raise UserError(
            f'The task "{part.task.name}" reads the ids {", ".join(map(str, ids))} between its texts, and the model has '
            f"{vocab_size}: there is no room for new tokens. Make room, TransformerConfig.vocab_size = {max(ids) + 1} with "
            'RestoreCheckpointConfig.extend = ["vocab"], which appends rows to those of INITIAL_CHECKPOINT_PATH; or name ids '
            "that texts do not use, Classification.tokens."
        )


def check_readable(tasks: WeightedTasks, config: DataConfig) -> None:
    """Opens the tasks' sources; raises what they raise where their data are not here."""
    check_here(tasks.trained, tasks.split, tasks.name, config)
    for part in tasks.trained:
        if not is_counted_by_reading(part.task.source):
            part.weigh()
        if not set(part.lengths) <= set(part.task.output_features):
            shard_of_task(part, config, 0, 0, len(tasks.trained))  # whether its preprocessors make what it does not declare


def check_here(parts: Iterable[Part], split: str, name: str, config: DataConfig, setting: str = "MIXTURE_OR_TASK_NAME") -> None:
    """Raises a `NotHere` that says all that is missing of the tasks' data, and the name of the mixture without it, which
    `setting` may have."""
    by_source: dict[seqio.DataSource, list[str]] = {}  # templates over one data set have one source
    for part in parts:
        by_source.setdefault(part.task.source, []).append(part.task.name)
    missing: dict[str, list[str]] = {}
    for source, tasks in by_source.items():
        try:
            source.list_shards(split)
        except NotHere as error:
            missing.setdefault(error.sentence, []).extend(tasks)
    if missing:
        first = next(iter(missing))
        more = f" {len(missing) - 1} more data sets are missing." if len(missing) > 1 else ""
        names = [task for tasks in missing.values() for task in tasks]
        without = config.prompts.without(name, names) if config.prompts else ""
        raise NotHere(f"{first}{more}" + (f" To go on without: {flag(setting, without)}" if without else ""))


def _tell_what_is_not_read(tasks: WeightedTasks, config: DataConfig) -> None:
    """Says which settings and features a run does without, in a line each."""
    end, ends = tasks.vocabulary.eos_id, config.special_tokens.ends
    if ends and end not in ends:
        say(
            f"Training ends texts with {end}, the vocabulary's end token; SpecialTokens.end is {config.special_tokens.end}, at "
            "which the trained model stops writing. Make one of them the other."
        )
    read = {name for part in tasks.parts for name in part.lengths}
    for name in sorted(set(config.task_feature_lengths) - read):
        say(
            f'TASK_FEATURE_LENGTHS gives a length for "{name}", which nothing reads.{nearest(name, read)} The lengths read are '
            f"{', '.join(sorted(read))}."
        )
    for part in tasks.parts:
        features = features_of([part], tasks.architecture, config)
        unread = [
            f'"{name}"' for name, feature in part.task.output_features.items() if feature.required and name not in features
        ]
        if unread:
            say(
                f'Nothing reads {", ".join(unread)} of the task "{part.task.name}"; a model reads inputs and targets. Where '
                "rows are not packed (DataConfig.pack = False) it is given labels too, and other features with a length in "
                "TASK_FEATURE_LENGTHS; or make a model's features of them with a DataConfig.converter."
            )
