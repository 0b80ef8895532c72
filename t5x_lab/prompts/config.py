"""Settings of prompted datasets: record locations, few-shot prompts, collections. Free of TensorFlow; opens no file."""

import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import Any

from t5x_lab.config.checks import check_positive, check_types
from t5x_lab.config.errors import UserError, check_choice
from t5x_lab.config.log import log
from t5x_lab.config.macros import macro

FORMS = ("each", "sampled", "ranked")


@dataclasses.dataclass(frozen=True)
class Records:
    """Location of the records of a data set, or of all data sets by one pattern.

    Patterns may contain "{dataset}" (name of the data set), "{split}", "{tfds}" and "{hub}" (names of the data set in
    TensorFlow Datasets and on Hugging Face's hub).

    Attributes:
      files: pattern of .jsonl, .json (lines), .csv, .tsv, .parquet or .tfrecord files, or patterns by split. All but .parquet
        may end in .gz, and all but .parquet and .tfrecord in .zst. Fields of .csv files may be quoted; quotes in .tsv files
        are text. Example: "corpora/{dataset}/{split}*.jsonl.gz".
      tfds: name in TensorFlow Datasets, such as "glue/mrpc:2.0.0", "{tfds}" (the prepared version), or "huggingface:{dataset}".
      saved: folder that Hugging Face's `datasets` wrote with `save_to_disk`, with one table per split.
      hub: name on Hugging Face's hub or in its cache, such as "nyu-mll/glue:mrpc" or "{hub}". Needs `datasets`.
      splits: name of a split in the source, by its name here: {"validation": "dev"}. Others keep their names.
      columns: column names of .csv and .tsv files without a header line.
      numbers: fields of .csv and .tsv files that are numbers.
      lists: features of .tfrecord files that are lists. Others have one value; the files do not tell one from a list of one.
      labels: fields that are names in the source and numbers in templates: {"label": ("entailment", "not_entailment")}.
        Built-in data sets define theirs.
      names: name of a field in the source, by its name here: {"text": "sentence"}. Dots select fields of nested objects.
      each: f(record) -> list of records, to expand or drop records of the source.
      num_examples: number of training records, for mixing rates. None = the built-in number, else counted.
    """

    files: str | dict[str, str] | None = None
    tfds: str | None = None
    saved: str | None = None
    hub: str | None = None
    splits: dict[str, str] = dataclasses.field(default_factory=dict)
    columns: tuple[str, ...] = ()
    numbers: tuple[str, ...] = ("label",)
    lists: tuple[str, ...] = ()
    labels: dict[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    names: dict[str, str] = dataclasses.field(default_factory=dict)
    each: Callable | None = None
    num_examples: int | None = None

    def __post_init__(self):
        check_types(self)
        check_positive(self, "num_examples")
        locations = [name for name in ("files", "tfds", "saved", "hub") if getattr(self, name)]
        if len(locations) != 1:
            raise UserError(
                f"Records has {' and '.join(locations) or 'neither files, tfds, saved nor hub'}. Set exactly one of them, for "
                'example Records.files = "corpora/{dataset}/{split}.jsonl".'
            )

    def file_pattern(self, dataset: str, split: str, external_names: Mapping[str, str] = {}) -> str:
        """Returns the file pattern of a split, "" if there is none."""
        pattern = self.files.get(split, "") if isinstance(self.files, dict) else self.files or ""
        return fill_pattern(pattern, dataset=dataset, split=self.splits.get(split, split), **external_names)


def task_slug(text: str) -> str:
    """Returns a data set's name as it stands in task names: characters other than letters, digits, "_" and "." become "_"."""
    return re.sub(r"[^\w.]+", "_", text)


def fill_pattern(pattern: str, **values: str) -> str:
    """Replaces the names in braces.

    Raises:
      UserError: for unknown names in braces.
    """
    try:
        return pattern.format(**values)
    except (KeyError, ValueError, IndexError) as error:
        allowed = ", ".join(f"{{{name}}}" for name in values)
        raise UserError(f'"{pattern}" contains unknown names in braces ({error}). Allowed are {allowed}.') from error


@dataclasses.dataclass(frozen=True)
class FewShot:
    """Format of few-shot prompts, for tasks and collections whose names end in "_5_shot" or "_many_shot".

    Exemplars are training records, rendered with the template of the question. They are sampled for each question, epoch and
    seed. The question itself, also with other case, spaces or full stops, is never an exemplar. The log counts questions with
    fewer exemplars than asked.

    Attributes:
      before_input, before_target: text before the input and the target of exemplars and of the question.
      between: text between exemplars.
      budget: maximum tokens of the question with its exemplars. Exemplars that do not fit are left out. None = the length of
        inputs, less one for an EOS token. "many" means as many as fit.
      most: maximum number of exemplars for "many".
      pool: number of training records that exemplars are sampled from. They are chosen by their hash.
    """

    before_input: str = ""
    before_target: str = "\n"
    between: str = "\n\n"
    budget: int | None = None
    most: int = 16
    pool: int = 2_000

    def __post_init__(self):
        check_types(self)
        check_positive(self, "budget", "most", "pool")


@dataclasses.dataclass(frozen=True)
class Collection:
    """Mixture of prompted data sets.

    Attributes:
      members: names of data sets, of other collections, or of SeqIO tasks and mixtures.
      form: "each" template of a data set is a task. Or a data set is one task, with a template "sampled" for each example and
        epoch. Or, for evaluation, the choices of each template are "ranked"; data sets without choices are generated and
        compared by the metrics of their templates.
      cap: if a data set has more training records than this, each of its templates counts cap / templates of them, as in T0.
        Otherwise each template counts all of them. None = no cap.
      maximum: maximum number of records that a data set counts, as in FLAN. None = no limit.
      rates: mixing rates of members, in place of these rules: {"mine": 20000.0}.
    """

    members: tuple[str, ...]
    form: str = "each"
    cap: int | None = 500_000
    maximum: int | None = None
    rates: dict[str, float] = dataclasses.field(default_factory=dict)

    def __post_init__(self):
        check_types(self)
        if self.form == "drawn":
            log('Collection.form = "drawn" is now "sampled". The old value will stop working in the next release.')
            object.__setattr__(self, "form", "sampled")
        check_choice("Collection.form", self.form, FORMS)
        check_positive(self, "cap", "maximum")
        for name, rate in self.rates.items():
            if name not in self.members:
                raise UserError(
                    f'Collection.rates has a rate for "{name}", which is not a member. Members are {", ".join(self.members)}.'
                )
            if not isinstance(rate, int | float) or not rate > 0:
                raise UserError(f'Collection.rates["{name}"] is {rate!r}. It must be a number above 0.')


@dataclasses.dataclass(frozen=True)
class PromptConfig:
    """Settings of prompted datasets. See `t5x_lab.prompts.prompts.Prompts`, which gin binds."""

    templates: tuple[str, ...] = dataclasses.field(default=(), metadata=macro("TEMPLATES"))
    records: Records | None = dataclasses.field(default=None, metadata=macro("RECORDS"))
    data_sets: dict[str, Records] = dataclasses.field(default_factory=dict, metadata=macro("DATA_SETS"))
    collections: dict[str, Collection] = dataclasses.field(default_factory=dict, metadata=macro("COLLECTIONS"))
    classifications: dict[str, Any] = dataclasses.field(default_factory=dict, metadata=macro("CLASSIFICATIONS"))
    clean: Callable | None = None
    few_shot: FewShot = FewShot()
    input_eos: bool = False
