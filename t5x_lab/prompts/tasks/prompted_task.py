"""Prompted SeqIO tasks: records rendered by one template or by sampled ones, few-shot, or as choices to rank.

Records are rendered in batches, in Python. Templates and exemplars are sampled after the cache placeholder: anew in each epoch,
reproducibly for a seed.
"""

import dataclasses
import functools
import itertools
import json
import random
import re
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
import seqio
import tensorflow as tf

from t5x_lab.config.errors import NotHere, UserError
from t5x_lab.config.log import log_counted
from t5x_lab.data.tasks.text_tasks import BYTE_VOCABULARY
from t5x_lab.prompts.config import FewShot, Records
from t5x_lab.prompts.records.json_records import json_records, record_fields
from t5x_lab.prompts.records.subsets import sample_records
from t5x_lab.prompts.tasks.generation_metrics import decode_references, metric_fns
from t5x_lab.prompts.templates.template import NO_LABEL, Rendered, Template

RENDER_BATCH = 16  # records rendered at a time; each of hundreds of tasks renders so many before its first example
_TEXT_FEATURES = {"inputs": tf.string, "targets": tf.string}
_RANKING_FEATURES = {**_TEXT_FEATURES, "idx": tf.int32, "is_correct": tf.bool}
_GENERATION_FEATURES = {**_TEXT_FEATURES, "references": tf.string}


class PromptedTask(seqio.Task):
    """SeqIO task that renders records with prompt templates.

    Attributes:
      data_set: slug of the data set, for reports.
      prompt: name of the template, for reports. "sampled" if there are several.
      fingerprint: hash of the templates and settings that rendered texts depend on.
      cache_content: what a cache of the task depends on besides the records, for messages.
      generates: whether it is for generation with metrics, not for ranking.
    """

    def __init__(self, *args, data_set: str, prompt: str, fingerprint: str, cache_content: str, generates: bool, **options):
        super().__init__(*args, **options)
        self.data_set, self.prompt, self.fingerprint, self.cache_content = data_set, prompt, fingerprint, cache_content
        self.generates = generates


@dataclasses.dataclass(frozen=True)
class PromptedTaskBuilder:
    """Builds a prompted task.

    Attributes:
      templates: templates that render records. Of several, one is sampled for each example and epoch (Wei et al. 2022,
        section 2.1).
      source: source of the records, see `records.sources.open_records`.
      records: settings of the records: field names, labels, expansion into several records.
      shots: number of exemplars before each question. None = as many as fit.
      few_shot: format of few-shot prompts.
      ranked: whether each choice is an example, as `t5.data.preprocessors.rank_classification` makes them.
      generated: whether the task is for generation with the template's metrics. Examples have `references`, the JSON of all
        accepted answers.
      input_eos: whether an EOS token separates inputs and targets.
    """

    templates: tuple[Template, ...]
    source: seqio.DataSource
    records: Records
    shots: int | None = 0
    few_shot: FewShot = FewShot()
    ranked: bool = False
    generated: bool = False
    input_eos: bool = False

    @property
    def is_random(self) -> bool:
        """Whether rendering samples templates or exemplars."""
        return len(self.templates) > 1 or self.shots != 0

    @property
    def fingerprint(self) -> str:
        """Hash of everything that rendered texts depend on, except the records."""
        templates = [(template.jinja, template.answer_choices) for template in self.templates]
        settings = [templates, self.records.names, self.records.labels, self.ranked]
        settings += [self.shots, str(self.few_shot), self.input_eos] if self.is_random else []
        settings += [[template.references for template in self.templates]] if self.generated else []
        return f"{zlib.crc32(json.dumps(settings).encode()):08x}"

    def build(self, name: str, data_set: str = "") -> PromptedTask:
        """Returns the SeqIO task. Records to which a template does not apply are dropped.

        Args:
          name: name of the task.
          data_set: name of the data set in reports. Default: the task's name.

        Raises:
          UserError: if choices should be ranked and a template has none.
        """
        no_choices = next((template for template in self.templates if template.answer_choices is None), None)
        if self.ranked and no_choices:
            raise UserError(f"{no_choices} has no answer_choices, so there is nothing to rank.")
        to_json, tokenize = functools.partial(json_records, records=self.records), seqio.preprocessors.tokenize
        if self.is_random:
            render = functools.partial(_render_sampled, builder=self)
            steps = [to_json, seqio.CacheDatasetPlaceholder(), render, tokenize]
        else:
            render = functools.partial(_render_fixed, builder=self)
            steps = [to_json, render, tokenize, seqio.CacheDatasetPlaceholder()]
        return PromptedTask(
            name,
            self.source,
            data_set=data_set or name,
            prompt=self.templates[0].name if len(self.templates) == 1 else "sampled",
            fingerprint=self.fingerprint,
            cache_content="" if self.is_random else f"the template {self.fingerprint}",
            generates=self.generated,
            preprocessors=[*steps, seqio.preprocessors.append_eos_after_trim],
            postprocess_fn=decode_references if self.generated else None,
            metric_fns=metric_fns(self.templates[0].metrics) if self.generated else None,
            output_features={
                "inputs": seqio.Feature(BYTE_VOCABULARY, add_eos=self.input_eos),
                "targets": seqio.Feature(BYTE_VOCABULARY),
            },
        )

    def render_record(self, line: bytes, number: int, seed: int, fits: Callable[[str], bool]) -> list[tuple]:
        """Renders one record into examples.

        Args:
          line: the record as JSON.
          number: number of the record.
          seed: seed of sampling.
          fits: returns whether inputs are short enough.

        Returns:
          [(inputs, targets)], for generation [(inputs, targets, references as JSON)], or for ranking one (inputs, choice,
          [record number, choice number], is_correct) per choice.
        """
        template = self.templates[seed % len(self.templates)]
        rendered = self._render(line, template, seed)
        if rendered is None:
            return []
        inputs = rendered.inputs if self.shots == 0 else self._add_exemplars(rendered, line, template, seed, fits)
        if self.generated:
            references = template.render_references(record_fields(line, self.records), rendered.targets)
            return [(inputs, rendered.targets, json.dumps(references))]
        if not self.ranked:
            return [(inputs, rendered.targets)]
        if rendered.targets == NO_LABEL:
            return []
        _check_choices(template, rendered, line)
        choices = enumerate(rendered.choices)
        return [(inputs, choice, [number, i], choice == rendered.targets) for i, choice in choices]

    def _render(self, line: bytes, template: Template, seed: int) -> Rendered | None:
        try:
            return template.render(record_fields(line, self.records), seed)
        except UserError as error:
            raise UserError(f"{error.sentence.rstrip('.')}. The record of {template.dataset}: {_excerpt(line)}") from error

    def _add_exemplars(
        self, question: Rendered, line: bytes, template: Template, seed: int, fits: Callable[[str], bool]
    ) -> str:
        few_shot, pool = self.few_shot, self.exemplar_pool()
        question_text = f"{few_shot.before_input}{question.inputs}{few_shot.before_target}"
        exemplars: list[str] = []
        num_exemplars = few_shot.most if self.shots is None else self.shots
        for number in _shuffled_range(len(pool), seed):
            if len(exemplars) == num_exemplars:
                break
            rendered = None if pool[number] == line else self._render(pool[number], template, seed)
            if rendered is None or rendered.targets == NO_LABEL or _is_same_question(rendered, question, template):
                continue
            exemplar = f"{few_shot.before_input}{rendered.inputs}{few_shot.before_target}{rendered.targets}{few_shot.between}"
            if not fits("".join([*exemplars, exemplar, question_text])):
                break
            exemplars.append(exemplar)
        if len(exemplars) < (self.shots or 1):
            wanted = f", not {self.shots}" if self.shots else ""
            log_counted(
                f"A question of {template.dataset} has {len(exemplars)} exemplars{wanted}: "
                "more do not fit into FewShot.budget or the length of inputs, or there are no more."
            )
        return "".join([*exemplars, question_text])

    def exemplar_pool(self) -> list[bytes]:
        """Returns the training records that exemplars are sampled from."""
        if "train" not in self.source.splits:
            raise NotHere(
                f'The data set "{self.templates[0].dataset}" has no training split, from which exemplars are sampled. Set one: '
                'Records.splits = {"train": "validation"}, or remove the data set.'
            )
        return sample_records(self.source, self.records, "train", self.few_shot.pool)


def _is_same_question(exemplar: Rendered, question: Rendered, template: Template) -> bool:
    """Returns whether the exemplar is the question, but for case, spaces and full stops.

    Inverted templates ask many questions of equal input, so targets count.
    """
    is_same_target = exemplar.targets == question.targets or not template.inverted
    return is_same_target and _normalize(exemplar.inputs) == _normalize(question.inputs)


def _normalize(text: str) -> str:
    return re.sub(r"\s+|\.(?!\w)", "", text.casefold())


def _shuffled_range(count: int, seed: int) -> Iterator[int]:
    """Yields 0 … count-1 in random order."""
    sampler, unique = random.Random(seed), set[int]()
    while len(unique) < count:
        number = sampler.randrange(count)
        if number not in unique:
            unique.add(number)
            yield number


def _render_fixed(dataset: tf.data.Dataset, builder: PromptedTaskBuilder) -> tf.data.Dataset:
    numbered = dataset.enumerate().map(lambda number, example: {**example, "number": number, "seed": 0})
    return _render_dataset(numbered, builder, lambda text: True)


def _render_sampled(
    dataset: tf.data.Dataset,
    sequence_length: Mapping[str, int] | None,
    output_features: Mapping,
    builder: PromptedTaskBuilder,
) -> tf.data.Dataset:
    @seqio.map_over_dataset(num_seeds=1)
    def add_seed(example: dict, seed: tf.Tensor) -> dict:
        return {**example, "seed": tf.random.stateless_uniform([], seed, 0, 2**31 - 1, tf.int32)}

    if builder.shots != 0:
        with tf.init_scope():  # before the first question, and outside the graph of many tasks
            builder.exemplar_pool()
    numbered = dataset.enumerate().map(lambda number, example: {**example, "number": number})
    length = (sequence_length or {}).get("inputs")
    budget = builder.few_shot.budget or (length and length - 1)
    encode = output_features["inputs"].vocabulary.encode
    # A text has at most as many tokens as bytes, and a character at most four bytes.
    fits = lambda text: not budget or len(text) <= budget // 4 or len(encode(text)) <= budget
    return _render_dataset(add_seed(numbered), builder, fits)


def _render_dataset(dataset: tf.data.Dataset, builder: PromptedTaskBuilder, fits: Callable[[str], bool]) -> tf.data.Dataset:
    def render(lines: np.ndarray, numbers: np.ndarray, seeds: np.ndarray) -> list[tuple]:
        records = zip(lines.tolist(), numbers.tolist(), seeds.tolist(), strict=True)
        return list(itertools.chain.from_iterable(builder.render_record(*record, fits) for record in records))

    features = _RANKING_FEATURES if builder.ranked else _GENERATION_FEATURES if builder.generated else _TEXT_FEATURES
    return _map_batches(dataset, ["record", "number", "seed"], render, features)


def _check_choices(template: Template, rendered: Rendered, line: bytes) -> None:
    problem = ""
    if len(set(rendered.choices)) < len(rendered.choices):
        problem = f"has equal choices: {', '.join(rendered.choices)}"
    elif rendered.targets not in rendered.choices:
        problem = f'has the target "{rendered.targets}", which is not one of its choices: {", ".join(rendered.choices)}'
    if problem:
        raise UserError(f"{template} {problem}. The record of {template.dataset}: {_excerpt(line)}")


def _excerpt(line: bytes) -> str:
    text = line.decode("utf-8", "replace")
    return text if len(text) <= 200 else f"{text[:200]}…"


def _map_batches(
    dataset: tf.data.Dataset, names: Sequence[str], render: Callable[..., list[tuple]], features: dict[str, tf.DType]
) -> tf.data.Dataset:
    """Applies `render` to batches of these features. It may return fewer or more examples than it gets."""
    shapes = {"idx": [None, 2]}

    @tf.autograph.experimental.do_not_convert
    def render_batch(example: dict[str, tf.Tensor]) -> dict[str, tf.Tensor]:
        def call(*arrays: np.ndarray) -> list[np.ndarray]:
            rows = render(*arrays)
            columns = zip(*rows, strict=True) if rows else [[] for _ in features]
            outputs = [_to_array(list(column), dtype) for column, dtype in zip(columns, features.values(), strict=True)]
            return [np.reshape(x, (-1, 2)) if name == "idx" else x for name, x in zip(features, outputs, strict=True)]

        outputs = tf.numpy_function(call, [example[name] for name in names], list(features.values()), stateful=False)
        return {name: tf.ensure_shape(x, shapes.get(name, [None])) for name, x in zip(features, outputs, strict=True)}

    return dataset.batch(RENDER_BATCH).map(render_batch).unbatch()


def _to_array(column: list, dtype: tf.DType) -> np.ndarray:
    if dtype == tf.string:
        return np.array([text.encode() for text in column], object)
    return np.array(column, dtype.as_numpy_dtype)
