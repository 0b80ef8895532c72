"""What gin says about data sets in words, as plain dataclasses: nothing here imports TensorFlow or opens a file."""

import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping

from t5x_lab.config.checks import check_types, positive
from t5x_lab.config.errors import UserError, one_of
from t5x_lab.config.macros import macro
from t5x_lab.prompts.classification import BUILT_IN, START, Classification

FORMS = ("each", "drawn", "ranked")


@dataclasses.dataclass(frozen=True)
class Records:
    """Where the records of a data set lie, or those of all data sets by one rule.

    In a rule, "{dataset}" stands for a data set's name, "{split}" for the split, "{tfds}" and "{hub}" for what TensorFlow
    Datasets and Hugging Face's hub call it.

    Attributes:
      files: a pattern of .jsonl, .json (lines), .csv, .tsv, .parquet or .tfrecord files, or patterns by split; all but .parquet
        may be gzipped, as in "corpora/{dataset}/{split}*.jsonl.gz".
      tfds: a name in TensorFlow Datasets, such as "glue/mrpc:2.0.0", "{tfds}" (what is prepared), or "huggingface:{dataset}".
      saved: a folder that Hugging Face's `datasets` saved (`save_to_disk`), by split.
      hub: a name on Hugging Face's hub, of its cache where that has it, such as "nyu-mll/glue:mrpc" or "{hub}"; needs
        `datasets`.
      splits: what a split is called there, by its name here: {"validation": "dev"}; others are called the same.
      columns: of .csv and .tsv files whose first line does not name them.
      numbers: fields of .csv and .tsv files that are numbers.
      labels: fields whose values are names there and numbers in templates: {"label": ("entailment", "not_entailment")}; the
        catalogue knows them of the data sets that it has.
      names: fields that are called otherwise there, by their names here: {"text": "sentence"}; dots lead into objects.
      each: f(record) -> the records that it stands for, where one there holds several, or none.
      num_examples: training records, where rates depend on that and the catalogue does not know; None = they are counted.
    """

    files: str | dict[str, str] | None = None
    tfds: str | None = None
    saved: str | None = None
    hub: str | None = None
    splits: dict[str, str] = dataclasses.field(default_factory=dict)
    columns: tuple[str, ...] = ()
    numbers: tuple[str, ...] = ("label",)
    labels: dict[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    names: dict[str, str] = dataclasses.field(default_factory=dict)
    each: Callable | None = None
    num_examples: int | None = None

    def __post_init__(self):
        check_types(self)
        positive(self, "num_examples")
        given = [name for name in ("files", "tfds", "saved", "hub") if getattr(self, name)]
        if len(given) != 1:
            raise UserError(
                f"Records has {' and '.join(given) or 'neither files, tfds, saved nor hub'}. Give exactly one of them, for "
                'example Records.files = "corpora/{dataset}/{split}.jsonl".'
            )

    def pattern(self, dataset: str, split: str, elsewhere: Mapping[str, str] = {}) -> str:
        """Where the files of a split are; "" where nothing is said of it."""
        pattern = self.files.get(split, "") if isinstance(self.files, dict) else self.files or ""
        return named(pattern, dataset=dataset, split=self.splits.get(split, split), **elsewhere)


def in_names(text: str) -> str:
    """Letters, digits, "_" and "." of a text, all else as "_": a data set's name in those of tasks."""
    return re.sub(r"[^\w.]+", "_", text)


def named(rule: str, **names: str) -> str:
    """A rule with names in place of those in braces.

    Raises:
      UserError: for other braces.
    """
    try:
        return rule.format(**names)
    except (KeyError, ValueError, IndexError) as error:
        known = ", ".join(f"{{{name}}}" for name in names)
        raise UserError(f'In "{rule}" stand braces that mean nothing ({error}); there may be {known} in it.') from error


@dataclasses.dataclass(frozen=True)
class FewShot:
    """How questions stand behind exemplars, in tasks and collections whose names end in "_5_shot" or "_many_shot".

    Exemplars are training records, put into words by the question's own template, chosen anew for each question, epoch and
    seed; the question itself is never one of them.

    Attributes:
      before_input, before_target: before each of them, the question's too.
      between: exemplars.
      budget: most tokens of a question and its exemplars together, of which so many are left out as do not fit; None = the
        length of inputs, less one for an end token. "many" are as many as fit.
      most: exemplars of "many".
      pool: training records to choose from, the first N.
    """

    before_input: str = ""
    before_target: str = "\n"
    between: str = "\n\n"
    budget: int | None = None
    most: int = 16
    pool: int = 2_000

    def __post_init__(self):
        check_types(self)
        positive(self, "budget", "most", "pool")


@dataclasses.dataclass(frozen=True)
class Collection:
    """Data sets that are mixed.

    Attributes:
      members: names of data sets, of other collections, or of any task or mixture of SeqIO's.
      form: "each" template of a data set is a task; or a data set is one task that has a template "drawn" for each example and
        epoch; or the choices of each of its templates are "ranked", in an evaluation.
      cap: of a data set with more training records than this, each template counts for cap / templates of them, of another for
        all of them, as in T0; None = for all.
      maximum: most records that a data set counts for, as in FLAN; None = no limit.
      rates: of members, instead of what these rules give: {"mine": 20000.0}.
    """

    members: tuple[str, ...]
    form: str = "each"
    cap: int | None = 500_000
    maximum: int | None = None
    rates: dict[str, float] = dataclasses.field(default_factory=dict)

    def __post_init__(self):
        check_types(self)
        one_of("Collection.form", self.form, FORMS)
        positive(self, "cap", "maximum")
        for name, rate in self.rates.items():
            if name not in self.members:
                raise UserError(f'Collection.rates names "{name}", which is none of its members: {", ".join(self.members)}.')
            if not isinstance(rate, int | float) or not rate > 0:
                raise UserError(f'Collection.rates gives "{name}" the rate {rate!r}; it is a number above 0.')


@dataclasses.dataclass(frozen=True)
class Prompts:
    """Data sets of labelled records, put into words by templates: what names such as `t0_train` stand for, see `names`.

    Attributes:
      templates: folders of promptsource's kind, <data set>/templates.yaml; the first that has a data set is taken, t5x_lab's
        own last.
      records: where all data sets lie, by one rule.
      data_sets: where single ones lie, the user's own too, by name.
      collections: the user's own, by name.
      classifications: the user's own, by name: "mine" is the task "classify_mine".
      clean: f(text) -> what is read of it, of texts that are classified or probed, such as @standardize; None = all, as it is.
      few_shot: of names that end in "_5_shot".
      input_eos: whether an end token stands between inputs and targets.
    """

    templates: tuple[str, ...] = dataclasses.field(default=(), metadata=macro("TEMPLATES"))
    records: Records | None = dataclasses.field(default=None, metadata=macro("RECORDS"))
    data_sets: dict[str, Records] = dataclasses.field(default_factory=dict, metadata=macro("DATA_SETS"))
    collections: dict[str, Collection] = dataclasses.field(default_factory=dict, metadata=macro("COLLECTIONS"))
    classifications: dict[str, Classification] = dataclasses.field(default_factory=dict, metadata=macro("CLASSIFICATIONS"))
    clean: Callable | None = None
    few_shot: FewShot = FewShot()
    input_eos: bool = False

    def __post_init__(self):
        check_types(self)
        own = (
            ("DATA_SETS", self.data_sets, Records),
            ("COLLECTIONS", self.collections, Collection),
            ("CLASSIFICATIONS", self.classifications, Classification),
        )
        for what, entries, kind in own:
            for name, entry in entries.items():
                if not isinstance(entry, kind):
                    raise UserError(f'{what}["{name}"] is {entry!r}; it must be {kind.__name__}, as @x/{kind.__name__}().')

    def classification(self, name: str) -> Classification | None:
        """What the task of this name classifies; None of another kind of name."""
        return self._classifications().get(name)

    def classified_names(self) -> list[str]:
        """The tasks that are classified."""
        return list(self._classifications())

    def _classifications(self) -> dict[str, Classification]:
        own = {in_names(name): entry for name, entry in {**BUILT_IN, **self.classifications}.items()}
        return {f"{START}{name}": entry for name, entry in own.items()}

    def declare(self, name: str) -> bool:
        """Makes the task or mixture of this name known to SeqIO; False where it is none of a data set's or a collection's.

        Raises:
          UserError: where templates or the place of records are missing, or a template cannot be what the name asks for.
        """
        from t5x_lab.prompts.names import declare

        return declare(name, self)

    def without(self, name: str, tasks: Iterable[str]) -> str:
        """The name of a collection without the data sets of these tasks; "" where it is none."""
        from t5x_lab.prompts.names import without

        return without(name, tasks)

    def names(self) -> Iterable[str]:
        """Names of data sets and collections, to compare a mistyped one with."""
        from t5x_lab.prompts.names import names

        return names(self)
