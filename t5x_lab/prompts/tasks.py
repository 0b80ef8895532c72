"""SeqIO tasks of a data set in words: with one template, with one drawn for each example, and with all choices to rank.

Records are rendered many at a time, in Python. A template that is drawn is drawn behind the cache's placeholder: anew in each
epoch, and alike with the same seed.
"""

import functools
from collections.abc import Callable, Sequence

import numpy as np
import seqio
import tensorflow as tf

from t5x_lab.config.errors import UserError
from t5x_lab.data.sources import TOGETHER
from t5x_lab.data.texts import VOCABULARY
from t5x_lab.prompts.records import Records, as_json, fields_of
from t5x_lab.prompts.templates import NO_LABEL, Rendered, Template, task_name

_TEXTS = {"inputs": tf.string, "targets": tf.string}
_ROWS = {**_TEXTS, "idx": tf.int32, "is_correct": tf.bool}


def prompted_task(
    template: Template, source: seqio.DataSource, records: Records, input_eos: bool = False, metrics: Sequence[Callable] = ()
) -> seqio.Task:
    """A data set with one template, under T0's name. Records that it renders nothing of are left out.

    Args:
      template: what puts the records into words.
      source: of these, see `records.source_of`.
      records: what their fields are called.
      input_eos: whether an end token stands between inputs and targets.
      metrics: SeqIO's.
    """
    return seqio.Task(
        task_name(template.dataset, template.name),
        source,
        preprocessors=[
            as_json,
            functools.partial(_in_words, template=template, records=records),
            seqio.preprocessors.tokenize,
            seqio.CacheDatasetPlaceholder(),
            seqio.preprocessors.append_eos_after_trim,
        ],
        output_features=_features(input_eos),
        metric_fns=list(metrics),
    )


def ranked_task(template: Template, source: seqio.DataSource, records: Records, input_eos: bool = False) -> seqio.Task:
    """All choices of each record with one template, a row each, as `t5.data.preprocessors.rank_classification` makes them.

    Raises:
      UserError: for a template without answer choices.
    """
    if template.answer_choices is None:
        raise UserError(f"{template} has no answer_choices, so there is nothing to rank.")
    return seqio.Task(
        f"{task_name(template.dataset, template.name)}_score_eval",
        source,
        preprocessors=[
            as_json,
            functools.partial(_choices_in_words, template=template, records=records),
            seqio.preprocessors.tokenize,
            seqio.CacheDatasetPlaceholder(),
            seqio.preprocessors.append_eos_after_trim,
        ],
        output_features=_features(input_eos),
    )


def drawn_task(
    name: str, templates: Sequence[Template], source: seqio.DataSource, records: Records, input_eos: bool = False
) -> seqio.Task:
    """A data set with one of its templates drawn for each example and epoch (Wei et al. 2022, section 2.1)."""
    return seqio.Task(
        name,
        source,
        preprocessors=[
            as_json,
            seqio.CacheDatasetPlaceholder(),
            functools.partial(_in_drawn_words, templates=tuple(templates), records=records),
            seqio.preprocessors.tokenize,
            seqio.preprocessors.append_eos_after_trim,
        ],
        output_features=_features(input_eos),
    )


def _features(input_eos: bool) -> dict[str, seqio.Feature]:
    return {"inputs": seqio.Feature(VOCABULARY, add_eos=input_eos), "targets": seqio.Feature(VOCABULARY)}


def _in_words(dataset: tf.data.Dataset, template: Template, records: Records) -> tf.data.Dataset:
    def render(lines: np.ndarray) -> list[tuple]:
        return [(made.inputs, made.targets) for made in _rendered(lines, [template] * len(lines), records) if made]

    return _many_at_a_time(dataset, ["record"], render, _TEXTS)


def _in_drawn_words(dataset: tf.data.Dataset, templates: Sequence[Template], records: Records) -> tf.data.Dataset:
    @seqio.map_over_dataset(num_seeds=1)
    def drawn(example, seed):
        return {**example, "number": tf.random.stateless_uniform([], seed, 0, 2**31 - 1, tf.int32)}

    def render(lines: np.ndarray, numbers: np.ndarray) -> list[tuple]:
        chosen = [templates[number % len(templates)] for number in numbers.tolist()]
        made = _rendered(lines, chosen, records, numbers.tolist())
        return [(one.inputs, one.targets) for one in made if one]

    return _many_at_a_time(drawn(dataset), ["record", "number"], render, _TEXTS)


def _choices_in_words(dataset: tf.data.Dataset, template: Template, records: Records) -> tf.data.Dataset:
    def render(lines: np.ndarray, numbers: np.ndarray) -> list[tuple]:
        rows = []
        for number, made in zip(numbers.tolist(), _rendered(lines, [template] * len(lines), records), strict=True):
            if made and made.targets != NO_LABEL:
                _check_choices(template, made)
                rows += [(made.inputs, x, [number, i], x == made.targets) for i, x in enumerate(made.choices)]
        return rows

    numbered = dataset.enumerate().map(lambda number, example: {**example, "number": number})
    return _many_at_a_time(numbered, ["record", "number"], render, _ROWS)


def _check_choices(template: Template, made: Rendered) -> None:
    if len(set(made.choices)) < len(made.choices):
        raise UserError(f"{template} has equal choices for a record: {', '.join(made.choices)}.")
    if made.targets not in made.choices:
        raise UserError(f'{template} has the target "{made.targets}", which is none of its choices: {", ".join(made.choices)}.')


def _rendered(
    lines: np.ndarray, templates: Sequence[Template], records: Records, seeds: Sequence[int] | None = None
) -> list[Rendered | None]:
    made = []
    for line, template, seed in zip(lines.tolist(), templates, seeds or [0] * len(lines), strict=True):
        try:
            fields = fields_of(line, records)
        except UserError as error:
            raise UserError(f"Of {template.dataset} {error.sentence}: {line[:80]!r}") from error
        made.append(template.render(fields, seed))
    return made


def _many_at_a_time(
    dataset: tf.data.Dataset, names: Sequence[str], render: Callable[..., list[tuple]], features: dict[str, tf.DType]
) -> tf.data.Dataset:
    """What `render` makes of these features of many examples, one by one; it may make fewer or more."""
    shapes = {"idx": [None, 2]}

    @tf.autograph.experimental.do_not_convert
    def made(example: dict[str, tf.Tensor]) -> dict[str, tf.Tensor]:
        def of(*arrays: np.ndarray) -> list[np.ndarray]:
            rows = render(*arrays)
            columns = zip(*rows, strict=True) if rows else [[] for _ in features]
            found = [_array(list(column), dtype) for column, dtype in zip(columns, features.values(), strict=True)]
            return [np.reshape(x, (-1, 2)) if name == "idx" else x for name, x in zip(features, found, strict=True)]

        found = tf.numpy_function(of, [example[name] for name in names], list(features.values()), stateful=False)
        return {name: tf.ensure_shape(x, shapes.get(name, [None])) for name, x in zip(features, found, strict=True)}

    return dataset.batch(TOGETHER).map(made).unbatch()


def _array(column: list, dtype: tf.DType) -> np.ndarray:
    if dtype == tf.string:
        return np.array([text.encode() for text in column], object)
    return np.array(column, dtype.as_numpy_dtype)
