"""The tasks of one data set: with one of its templates, with one drawn, with none, and with all choices to rank."""

import dataclasses
import functools
import pathlib
import re
import weakref

import seqio

from t5x_lab.config.errors import UserError
from t5x_lab.prompts.catalogue import CATALOGUE, REGISTERED, DataSet
from t5x_lab.prompts.config import Prompts
from t5x_lab.prompts.flan import MOST_RECORDS
from t5x_lab.prompts.places import LEAST_KEPT, RecordsOfDataSet
from t5x_lab.prompts.records import FirstRecords
from t5x_lab.prompts.registry import register
from t5x_lab.prompts.tasks import InWords
from t5x_lab.prompts.templates import Template, data_sets_in, read_templates, task_name

OWN_TEMPLATES = str(pathlib.Path(__file__).parents[1] / "tasks" / "templates")
OWN = "flan_"  # before names of data sets with t5x_lab's own templates, of which FLAN reads so many records
RANKED = "_score_eval"


def known_data_sets(prompts: Prompts) -> dict[str, DataSet]:
    """Those of the catalogue, of the user, and those that there are templates of, by name."""
    others = (*prompts.data_sets, *REGISTERED, *data_sets_in((*prompts.templates, OWN_TEMPLATES)))
    return {**CATALOGUE, **{name: DataSet(name) for name in others if name not in CATALOGUE}}


@dataclasses.dataclass(frozen=True)
class Form:
    """How a data set is put into words, unless each template has a task of its own: by a template drawn for each example.

    Attributes:
      number: of the first so many; None = of all.
      plain: by the template without an instruction.
      named: by that, with the data set's name before it.
    """

    number: int | None = None
    plain: bool = False
    named: bool = False

    @property
    def end(self) -> str:
        """Of names that say so."""
        return "_named" if self.named else "_plain" if self.plain else f"_{self.number}templates" if self.number else ""


def split_form(name: str) -> tuple[str, Form | None]:
    """A name without the end that says a form, and the form; None where it says none."""
    found = re.fullmatch(r"(.+)_(?:([1-9]\d*)templates|(plain)|(named))", name)
    if not found:
        return name, None
    return found[1], Form(number=int(found[2]) if found[2] else None, plain=bool(found[3]), named=bool(found[4]))


class TasksOfDataSet:
    """Makes the tasks of a data set, and puts them into SeqIO's registry.

    Args:
      data_set: which.
      prompts: of the run.
      is_own: whether it is put into words by t5x_lab's own templates alone, FLAN's way; else by those of the user first.
      shots: exemplars before each question; None = many.
      end: of the names, which says so.
    """

    def __init__(
        self,
        data_set: DataSet,
        prompts: Prompts,
        is_own: bool,
        shots: int | None = 0,
        end: str = "",
    ):
        self.data_set, self._prompts, self._shots, self._end = data_set, prompts, shots, end
        self.records = RecordsOfDataSet(data_set, prompts)
        self._start, self._folders = (OWN, ()) if is_own else ("", prompts.templates)
        self._folders = (*self._folders, OWN_TEMPLATES)

    @functools.cached_property
    def templates(self) -> tuple[Template, ...]:
        return read_templates(self._folders, self.data_set.whole)

    @property
    def asking(self) -> tuple[Template, ...]:
        """Those with an instruction.

        Raises:
          UserError: when there is none.
        """
        found = tuple(template for template in self.templates if not template.plain)
        if not found:
            raise UserError(
                f'All templates of the data set "{self.data_set.name}" are plain; write one that asks for something.'
            )
        return found

    @property
    def to_rank(self) -> tuple[Template, ...]:
        """Those that ask for the data set's own task and have choices, as T0-Eval takes them."""
        return tuple(template for template in self.asking if template.original_task and template.answer_choices)

    def called(self, name: str) -> str | None:
        """Registers the task or mixture that has this name, without what `end` and `start` say; None where none has.

        Raises:
          UserError: when templates or the place of records are missing, or a template cannot be what the name asks for.
        """
        base, form = split_form(name)
        if self.data_set.slug == name:
            return self.drawn(Form())
        if self.data_set.slug == base and form:
            return self.drawn(form)
        if self.data_set.slug == name.removesuffix(RANKED):
            return self.ranked() or self._nothing_to_rank()
        if self.data_set.whole not in data_sets_in(self._folders):
            return None
        template = next((t for t in self.templates if self._task_of(t) == name.removesuffix(RANKED)), None)
        return self.with_template(template, ranked=name.endswith(RANKED)) if template else None

    def with_template(self, template: Template, ranked: bool = False) -> str:
        return self._task(f"{self._task_of(template)}{RANKED if ranked else ''}", (template,), ranked)

    def drawn(self, form: Form) -> str:
        return self._task(f"{self.data_set.slug}{form.end}", self._of(form))

    def ranked(self) -> str:
        """A mixture of the choices with each of `to_rank`; "" where there are none."""
        tasks = [(self.with_template(template, ranked=True), 1.0) for template in self.to_rank]
        name = f"{self._start}{self.data_set.slug}{RANKED}{self._end}"
        return register(seqio.Mixture(name, tasks), self.data_set.slug) if tasks else ""

    def _nothing_to_rank(self) -> str:
        raise UserError(f'No template of the data set "{self.data_set.name}" has choices for its own task to rank.')

    def _of(self, form: Form) -> tuple[Template, ...]:
        if not (form.plain or form.named):
            if form.number and form.number > len(self.asking):
                raise UserError(f'The data set "{self.data_set.name}" has {len(self.asking)} templates, not {form.number}.')
            return self.asking[: form.number]
        plain = next((template for template in self.templates if template.plain), None)
        if plain is None:
            raise UserError(
                f'The data set "{self.data_set.name}" has no template that is marked "plain: true" in its metadata, which '
                "gives the fields without an instruction."
            )
        words = re.sub(r"[/_]+", " ", self.data_set.name)
        return (dataclasses.replace(plain, name="named", jinja=f"[{words}] {plain.jinja}") if form.named else plain,)

    def _task_of(self, template: Template) -> str:
        return f"{task_name(self.data_set.whole, template.name)}{self.data_set.end}"

    def _task(self, name: str, templates: tuple[Template, ...], ranked: bool = False) -> str:
        how = InWords(
            templates,
            self._first(self.records.source()) if self._start else self.records.source(),
            self.records.fields,
            shots=self._shots,
            few_shot=self._prompts.few_shot,
            ranked=ranked,
            input_eos=self._prompts.input_eos,
        )
        task = how.task(f"{self._start}{name}{self._end}", f"{self._start}{self.data_set.slug}{self._end}")
        return register(task, self.data_set.slug)

    def _first(self, source: seqio.DataSource) -> seqio.DataSource:
        """So many records as FLAN reads, of a source; one for all templates."""
        if source not in _first:
            _first[source] = FirstRecords(source, MOST_RECORDS)
            _first[source].least_kept = LEAST_KEPT
        return _first[source]


_first: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()
