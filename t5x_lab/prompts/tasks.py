"""SeqIO tasks of records in words: with one template, with one drawn for each example, behind exemplars, as choices to rank.

Records are rendered many at a time, in Python. What is drawn, a template or exemplars, is drawn behind the cache's placeholder:
anew in each epoch, and alike with the same seed.
"""

import dataclasses
import functools
import itertools
import json
import random
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
import seqio
import tensorflow as tf

from t5x_lab.config.errors import NotHere, UserError
from t5x_lab.data.texts import VOCABULARY
from t5x_lab.prompts.config import FewShot, Records
from t5x_lab.prompts.records import as_json, fields_of, first_records
from t5x_lab.prompts.templates import NO_LABEL, Rendered, Template

RENDERED_TOGETHER = 16  # records; each of hundreds of tasks holds so many, and renders them before its first example
_TEXTS = {"inputs": tf.string, "targets": tf.string}
_ROWS = {**_TEXTS, "idx": tf.int32, "is_correct": tf.bool}


class PromptedTask(seqio.Task):
    """A SeqIO task that knows its data set and its template, by which rankings are reported.

    Attributes:
      data_set: as names have it.
      prompt: the template's name.
      words: what tells them from other words of the same records.
      what: what a cache of it is made of beside records, for messages.
    """

    def __init__(self, *args, data_set: str, prompt: str, words: str, what: str, **options):
        super().__init__(*args, **options)
        self.data_set, self.prompt, self.words, self.what = data_set, prompt, words, what


@dataclasses.dataclass(frozen=True)
class InWords:
    """What a task makes of records.

    Attributes:
      templates: what puts them into words; of several one is drawn for each example and epoch (Wei et al. 2022, section 2.1).
      source: of the records, see `records.source_of`.
      records: what their fields are called.
      shots: exemplars before each question; None = as many as fit.
      few_shot: how they stand there.
      ranked: whether each choice is a row, as `t5.data.preprocessors.rank_classification` makes them.
      input_eos: whether an end token stands between inputs and targets.
    """

    templates: tuple[Template, ...]
    source: seqio.DataSource
    records: Records
    shots: int | None = 0
    few_shot: FewShot = FewShot()
    ranked: bool = False
    input_eos: bool = False

    @property
    def draws(self) -> bool:
        return len(self.templates) > 1 or self.shots != 0

    @property
    def fingerprint(self) -> str:
        """What tells words from other words of the same records."""
        said = [[(t.jinja, t.answer_choices) for t in self.templates], self.records.names, self.records.labels, self.ranked]
        said += [self.shots, str(self.few_shot), self.input_eos] if self.draws else []
        return f"{zlib.crc32(json.dumps(said).encode()):08x}"

    def task(self, name: str, data_set: str = "") -> PromptedTask:
        """The SeqIO task. Records of which a template renders nothing are left out.

        Args:
          name: of the task.
          data_set: what reports call the data set; the task's name unless given.

        Raises:
          UserError: when choices are to be ranked of a template that has none.
        """
        without = next((template for template in self.templates if template.answer_choices is None), None)
        if self.ranked and without:
            raise UserError(f"{without} has no answer_choices, so there is nothing to rank.")
        lines, tokenize = functools.partial(as_json, records=self.records), seqio.preprocessors.tokenize
        if self.draws:
            steps = [lines, seqio.CacheDatasetPlaceholder(), functools.partial(_in_drawn_words, how=self), tokenize]
        else:
            steps = [lines, functools.partial(_in_words, how=self), tokenize, seqio.CacheDatasetPlaceholder()]
        return PromptedTask(
            name,
            self.source,
            data_set=data_set or name,
            prompt=self.templates[0].name if len(self.templates) == 1 else "drawn",
            words=self.fingerprint,
            what="" if self.draws else f"the template {self.fingerprint}",
            preprocessors=[*steps, seqio.preprocessors.append_eos_after_trim],
            output_features={
                "inputs": seqio.Feature(VOCABULARY, add_eos=self.input_eos),
                "targets": seqio.Feature(VOCABULARY),
            },
        )

    def rows(self, line: bytes, number: int, drawn: int, fits: Callable[[str], bool]) -> list[tuple]:
        """What becomes of a record: (inputs, targets); of each choice (inputs, choice, [number, choice's number], is it right).

        Args:
          line: the record, as JSON.
          number: of the record among all.
          drawn: a number that decides what is drawn.
          fits: whether inputs are short enough.
        """
        template = self.templates[drawn % len(self.templates)]
        made = self._rendered(line, template, drawn)
        if made is None:
            return []
        inputs = made.inputs if self.shots == 0 else self._behind_exemplars(made, line, template, drawn, fits)
        if not self.ranked:
            return [(inputs, made.targets)]
        if made.targets == NO_LABEL:
            return []
        _check_choices(template, made, line)
        return [(inputs, choice, [number, i], choice == made.targets) for i, choice in enumerate(made.choices)]

    def _rendered(self, line: bytes, template: Template, drawn: int) -> Rendered | None:
        try:
            return template.render(fields_of(line, self.records), drawn)
        except UserError as error:
            raise UserError(f"{error.sentence.rstrip('.')}. The record of {template.dataset}: {_start(line)}") from error

    def _behind_exemplars(
        self, question: Rendered, line: bytes, template: Template, drawn: int, fits: Callable[[str], bool]
    ) -> str:
        how, pool = self.few_shot, self._pool()
        of_question = f"{how.before_input}{question.inputs}{how.before_target}"
        exemplars: list[str] = []
        wanted = how.most if self.shots is None else self.shots
        for number in _in_random_order(len(pool), drawn):
            if len(exemplars) == wanted:
                break
            made = None if pool[number] == line else self._rendered(pool[number], template, drawn)
            if made is None or made.targets == NO_LABEL or self._is_question(made, question, template):
                continue
            exemplar = f"{how.before_input}{made.inputs}{how.before_target}{made.targets}{how.between}"
            if not fits("".join([*exemplars, exemplar, of_question])):
                break
            exemplars.append(exemplar)
        return "".join([*exemplars, of_question])

    def _is_question(self, exemplar: Rendered, question: Rendered, template: Template) -> bool:
        """Whether it asks the same; what is turned around asks many for the same, and is told by its target too."""
        same_target = exemplar.targets == question.targets or not template.turned_around
        return exemplar.inputs == question.inputs and same_target

    def _pool(self) -> list[bytes]:
        if "train" not in self.source.splits:
            raise NotHere(
                f'The data set "{self.templates[0].dataset}" has no training split, from which exemplars are taken. Say which '
                'one is: Records.splits = {"train": "validation"}, or leave the data set out.'
            )
        return first_records(self.source, self.records, "train", self.few_shot.pool)


def _in_random_order(count: int, seed: int) -> Iterator[int]:
    """0 … count-1, each once."""
    draw, seen = random.Random(seed), set[int]()
    while len(seen) < count:
        number = draw.randrange(count)
        if number not in seen:
            seen.add(number)
            yield number


def _in_words(dataset: tf.data.Dataset, how: InWords) -> tf.data.Dataset:
    undrawn = dataset.enumerate().map(lambda number, example: {**example, "number": number, "drawn": 0})
    return _rows(undrawn, how, lambda text: True)


def _in_drawn_words(
    dataset: tf.data.Dataset, sequence_length: Mapping[str, int] | None, output_features: Mapping, how: InWords
) -> tf.data.Dataset:
    @seqio.map_over_dataset(num_seeds=1)
    def with_draw(example: dict, seed: tf.Tensor) -> dict:
        return {**example, "drawn": tf.random.stateless_uniform([], seed, 0, 2**31 - 1, tf.int32)}

    if how.shots != 0:
        with tf.init_scope():  # before the first question, and outside the graph of many tasks
            how._pool()
    numbered = dataset.enumerate().map(lambda number, example: {**example, "number": number})
    length = (sequence_length or {}).get("inputs")
    most = how.few_shot.budget or (length and length - 1)
    encode = output_features["inputs"].vocabulary.encode
    # A vocabulary makes no more tokens than a text has bytes, which are four a character at most.
    return _rows(with_draw(numbered), how, lambda text: not most or len(text) <= most // 4 or len(encode(text)) <= most)


def _rows(dataset: tf.data.Dataset, how: InWords, fits: Callable[[str], bool]) -> tf.data.Dataset:
    def rows(lines: np.ndarray, numbers: np.ndarray, drawn: np.ndarray) -> list[tuple]:
        each = zip(lines.tolist(), numbers.tolist(), drawn.tolist(), strict=True)
        return list(itertools.chain.from_iterable(how.rows(*one, fits) for one in each))

    return _many_at_a_time(dataset, ["record", "number", "drawn"], rows, _ROWS if how.ranked else _TEXTS)


def _check_choices(template: Template, made: Rendered, line: bytes) -> None:
    wrong = ""
    if len(set(made.choices)) < len(made.choices):
        wrong = f"has equal choices: {', '.join(made.choices)}"
    elif made.targets not in made.choices:
        wrong = f'has the target "{made.targets}", which is none of its choices: {", ".join(made.choices)}'
    if wrong:
        raise UserError(f"{template} {wrong}. The record of {template.dataset}: {_start(line)}")


def _start(line: bytes) -> str:
    text = line.decode("utf-8", "replace")
    return text if len(text) <= 200 else f"{text[:200]}…"


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

    return dataset.batch(RENDERED_TOGETHER).map(made).unbatch()


def _array(column: list, dtype: tf.DType) -> np.ndarray:
    if dtype == tf.string:
        return np.array([text.encode() for text in column], object)
    return np.array(column, dtype.as_numpy_dtype)
