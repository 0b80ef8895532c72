"""All tasks of one data set: with one template, with sampled templates, without instruction, for ranking, for generation."""

import dataclasses
import functools
import re
import weakref

import seqio

from t5x_lab.config.errors import UserError
from t5x_lab.config.log import log_once
from t5x_lab.prompts.config import PromptConfig
from t5x_lab.prompts.data_sets import DATA_SETS, USER_SOURCES, DataSet
from t5x_lab.prompts.records.locations import MIN_KEPT_FRACTION, RecordLocation
from t5x_lab.prompts.records.subsets import SampledRecords
from t5x_lab.prompts.tasks.generation_metrics import METRICS, metric_fns
from t5x_lab.prompts.tasks.prompted_task import PromptedTaskBuilder
from t5x_lab.prompts.tasks.registry import register
from t5x_lab.prompts.templates.files import TEMPLATE_SETS, TemplateSet, data_sets_in, read_templates, task_name
from t5x_lab.prompts.templates.template import Template

RANKED = "_score_eval"  # suffix of tasks for ranking
GENERATED = "_generate_eval"  # suffix of tasks for generation with metrics


def all_data_sets(prompts: PromptConfig) -> dict[str, DataSet]:
    """Returns the data sets that have prompted tasks, by name: built-in ones, the user's, and those with template files."""
    built_in = {name: data_set for name, data_set in DATA_SETS.items() if data_set.has_templates}
    folders = (*prompts.templates, *(template_set.folder for template_set in TEMPLATE_SETS))
    others = (*prompts.data_sets, *USER_SOURCES, *data_sets_in(folders))
    return {**built_in, **{name: DataSet(name) for name in others if name not in built_in}}


@dataclasses.dataclass(frozen=True)
class Form:
    """Form of a data set as one task. By default a template is sampled for each example.

    Attributes:
      num_templates: number of templates to sample from, from the first. None = all.
      no_instruction: use the template without an instruction.
      with_name: use that template, with the data set's name in front.
      suffix: suffix of task names.
    """

    num_templates: int | None = None
    no_instruction: bool = False
    with_name: bool = False
    suffix: str = ""


_OLD_SUFFIXES = {"plain": "no_instruction", "named": "dataset_name"}  # of the last release


def split_form(name: str) -> tuple[str, Form | None]:
    """Splits a name into the name without the form's suffix, and the form, None if it has none."""
    match = re.fullmatch(r"(.+)_(?:([1-9]\d*)templates|(no_instruction|plain)|(dataset_name|named))", name)
    if not match:
        return name, None
    suffix = name[len(match[1]) :]
    if suffix[1:] in _OLD_SUFFIXES:
        new_suffix = f"_{_OLD_SUFFIXES[suffix[1:]]}"
        log_once(f'Task names with the suffix "{suffix}" will stop working in the next release. Use "{new_suffix}".')
    return match[1], Form(int(match[2]) if match[2] else None, bool(match[3]), bool(match[4]), suffix)


class DataSetTasks:
    """Builds and registers the tasks of a data set.

    Args:
      data_set: the data set.
      prompts: settings of the run.
      template_set: the only templates to use. None = the user's first, then the library's.
      shots: number of exemplars before each question. None = as many as fit.
      suffix: suffix of task names for the number of exemplars.
    """

    def __init__(
        self,
        data_set: DataSet,
        prompts: PromptConfig,
        template_set: TemplateSet | None = None,
        shots: int | None = 0,
        suffix: str = "",
    ):
        self.data_set, self._prompts, self._shots, self._suffix = data_set, prompts, shots, suffix
        self.records = RecordLocation(data_set, prompts)
        self._prefix = template_set.prefix if template_set else ""
        self._max_records = template_set.max_records if template_set else None
        sets = [template_set] if template_set else TEMPLATE_SETS
        self._folders = (*(() if template_set else prompts.templates), *(entry.folder for entry in sets))

    @functools.cached_property
    def templates(self) -> tuple[Template, ...]:
        return read_templates(self._folders, self.data_set.source_name)

    @property
    def instruction_templates(self) -> tuple[Template, ...]:
        """Templates with an instruction.

        Raises:
          UserError: if there is none.
        """
        templates = tuple(template for template in self.templates if not template.no_instruction)
        if not templates:
            raise UserError(
                f'All templates of the data set "{self.data_set.name}" have no instruction (no_instruction: true). Add one '
                "that has one."
            )
        return templates

    @property
    def ranking_templates(self) -> tuple[Template, ...]:
        """Templates that ask for the data set's original task and have choices, as in T0-Eval."""
        templates = self.instruction_templates
        return tuple(template for template in templates if template.original_task and template.answer_choices)

    @property
    def generation_templates(self) -> tuple[Template, ...]:
        """Templates that ask for the data set's original task without choices, and have metrics of generated answers."""
        templates = self.instruction_templates
        return tuple(t for t in templates if t.original_task and not t.answer_choices and metric_fns(t.metrics))

    def register(self, name: str) -> str | None:
        """Registers the task or mixture of this name, which has no prefix and suffix. Returns its full name.

        Returns None if the data set has no task of this name.

        Raises:
          UserError: if templates or records are missing, or a template cannot be used as the name asks.
        """
        base, form = split_form(name)
        if self.data_set.slug == name:
            return self.sampled_task(Form())
        if self.data_set.slug == base and form:
            return self.sampled_task(form)
        if self.data_set.slug == name.removesuffix(RANKED):
            return self.ranking_mixture() or self._raise_no_templates("choices of its original task to rank")
        if self.data_set.slug == name.removesuffix(GENERATED):
            return self.generation_mixture() or self._raise_no_templates(f"one of the metrics {', '.join(METRICS)}")
        if self.data_set.source_name not in data_sets_in(self._folders):
            return None
        by_name = {self._template_task_name(template): template for template in self.templates}
        suffix = next((suffix for suffix in (RANKED, GENERATED) if name.endswith(suffix)), "")
        template = by_name.get(name.removesuffix(suffix))
        return self.template_task(template, suffix) if template else None

    def template_task(self, template: Template, suffix: str = "") -> str:
        """Registers the task with one template, for training or with the suffix `RANKED` or `GENERATED`. Returns its name."""
        return self._register(f"{self._template_task_name(template)}{suffix}", (template,), suffix)

    def sampled_task(self, form: Form) -> str:
        """Registers the task with a sampled template and returns its name."""
        return self._register(f"{self.data_set.slug}{form.suffix}", self._form_templates(form))

    def ranking_mixture(self) -> str:
        """Registers the mixture of ranking tasks of all `ranking_templates`. Returns its name, "" if there are none."""
        return self._evaluation_mixture(self.ranking_templates, RANKED)

    def generation_mixture(self) -> str:
        """Registers the mixture of generation tasks of all `generation_templates`. Returns its name, "" if there are none."""
        return self._evaluation_mixture(self.generation_templates, GENERATED)

    def _evaluation_mixture(self, templates: tuple[Template, ...], suffix: str) -> str:
        tasks = [(self.template_task(template, suffix), 1.0) for template in templates]
        name = f"{self._prefix}{self.data_set.slug}{suffix}{self._suffix}"
        return register(seqio.Mixture(name, tasks), self.data_set.slug) if tasks else ""

    def _raise_no_templates(self, missing: str) -> str:
        raise UserError(f'No template of the data set "{self.data_set.name}" has {missing}.')

    def _form_templates(self, form: Form) -> tuple[Template, ...]:
        name = self.data_set.name
        if not (form.no_instruction or form.with_name):
            templates = self.instruction_templates
            if form.num_templates and form.num_templates > len(templates):
                raise UserError(f'The data set "{name}" has {len(templates)} templates, not {form.num_templates}.')
            return templates[: form.num_templates]
        template = next((template for template in self.templates if template.no_instruction), None)
        if template is None:
            raise UserError(f'The data set "{name}" has no template with "no_instruction: true" in its metadata.')
        if not form.with_name:
            return (template,)
        suffix = re.sub(r"[/_]+", " ", name)
        return (dataclasses.replace(template, name=form.suffix[1:], jinja=f"[{suffix}] {template.jinja}"),)

    def _template_task_name(self, template: Template) -> str:
        return f"{task_name(self.data_set.source_name, template.name)}{self.data_set.suffix}"

    def _register(self, name: str, templates: tuple[Template, ...], suffix: str = "") -> str:
        source = self.records.source()
        builder = PromptedTaskBuilder(
            templates,
            _sampled_records(source, self._max_records) if self._max_records else source,
            self.records.fields,
            shots=self._shots,
            few_shot=self._prompts.few_shot,
            ranked=suffix == RANKED,
            generated=suffix == GENERATED,
            input_eos=self._prompts.input_eos,
        )
        data_set = f"{self._prefix}{self.data_set.slug}{self._suffix}"
        return register(builder.build(f"{self._prefix}{name}{self._suffix}", data_set), self.data_set.slug)


def _sampled_records(source: seqio.DataSource, number: int) -> seqio.DataSource:
    """Returns the source of a sample of the records, the same object for all templates."""
    if source not in _sampled_sources:
        _sampled_sources[source] = SampledRecords(source, number)
        _sampled_sources[source].min_kept_fraction = MIN_KEPT_FRACTION
    return _sampled_sources[source]


_sampled_sources: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()
