"""Data sets as a classifier reads them: which fields are its segments, its choices and its label (Radford et al. 2018, 3.3).

    start text extract                        classification
    start premise delimiter hypothesis extract    entailment
    start a delimiter b extract, and b before a   similarity
    start context delimiter answer extract        of each answer, a choice

Nothing here imports TensorFlow or opens a file.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from t5x_lab.config.checks import check_types
from t5x_lab.config.errors import UserError, one_of

START = "classify_"  # of the names of tasks
METRICS = ("accuracy", "f1", "matthews", "pearson", "spearman")


@dataclasses.dataclass(frozen=True)
class Texts:
    """The texts of one example.

    Attributes:
      segments: each of one text or more, which follow each other without a delimiter.
      choices: what stands behind the last delimiter, of each choice; none where nothing is to be chosen.
    """

    segments: tuple[tuple[str, ...], ...]
    choices: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Classification:
    """What is read of a data set's records.

    Attributes:
      data_set: of the catalogue or of DATA_SETS, by name.
      segments: fields whose texts stand between delimiters: ("premise", "hypothesis"); of several in one segment,
        (("article", "question"),), with a space between them, each is cut by itself.
      classes: their names, in the order of their numbers; of a choice, of each.
      choices: one field with a list of texts, or a field for each choice.
      label: a field with a class's name, or its number from 0.
      labels: what the label's values are instead, in the order of the classes: (1, 2) or ("A", "B").
      symmetric: whether the two segments are read in both orders.
      is_score: whether the label is a number from 0 to that of the last class, classes being whole numbers. Between two of
        these, both have a share (Tai et al. 2015, equation 17).
      metrics: of `METRICS`; the first decides which checkpoint is best. F1 is that of the second of two classes.
      left_out: values of the label whose records are left out.
      tokens: ids of start, delimiter and extract token; None = the first three behind the vocabulary's.
    """

    data_set: str
    segments: tuple[str | tuple[str, ...], ...]
    classes: tuple[str, ...]
    choices: tuple[str, ...] = ()
    label: str = "label"
    labels: tuple = ()
    symmetric: bool = False
    is_score: bool = False
    metrics: tuple[str, ...] = ("accuracy",)
    left_out: tuple = ()
    tokens: tuple[int, ...] | None = None

    def __post_init__(self):
        check_types(self)
        for name in ("segments", "classes", "choices", "labels", "metrics", "left_out"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        of = f'The Classification of "{self.data_set}"'
        for metric in self.metrics:
            one_of(f"{of} has a metric that", metric, METRICS)
        if not self.metrics or not self.segments or len(self.classes) < 2:
            raise UserError(f"{of} needs at least one of metrics, one of segments and two of classes.")
        if self.labels and len(self.labels) != len(self.classes):
            raise UserError(f"{of} has {len(self.labels)} labels for {len(self.classes)} classes; give one for each.")
        if self.choices and len(self.choices) not in (1, len(self.classes)):
            raise UserError(
                f"{of} has {len(self.choices)} choices for {len(self.classes)} classes; give the one field that has them all, "
                "a list, or a field for each."
            )
        if self.symmetric and (len(self.segments) != 2 or self.choices):
            raise UserError(f"{of} is symmetric, as two segments without choices can be; there are {len(self.segments)}.")
        if "f1" in self.metrics and len(self.classes) != 2:
            raise UserError(f"{of} has the metric f1, which is of two classes; it has {len(self.classes)}.")
        if ({"pearson", "spearman"} & {*self.metrics}) and not self.is_score:
            raise UserError(f"{of} has a correlation among its metrics, and no score: set is_score, or take it out.")
        if self.tokens is not None and (len(set(self.tokens)) != 3 or not all(type(i) is int and i >= 0 for i in self.tokens)):
            raise UserError(f"{of} has the tokens {self.tokens}; give three different ids: start, delimiter, extract.")

    @property
    def combine(self) -> str:
        """See `ClassificationHead.combine`."""
        return "choices" if self.choices else "sum" if self.symmetric else "none"

    def texts(self, fields: Mapping[str, Any]) -> Texts:
        """Those of a record.

        Raises:
          UserError: for a field that is missing or no text, and another number of choices than there are classes.
        """
        parts = [(names,) if isinstance(names, str) else names for names in self.segments]
        segments = tuple(tuple(_text(name, fields) for name in names) for names in parts)
        if len(self.choices) != 1:
            return Texts(segments, tuple(_text(name, fields) for name in self.choices))
        (name,) = self.choices
        found = fields.get(name)
        if not isinstance(found, list | tuple) or not all(isinstance(text, str) for text in found):
            raise UserError(f'the field "{name}" is {_shown(found)}; it is the list of the choices')
        if len(found) != len(self.classes):
            raise UserError(f'the field "{name}" has {len(found)} choices; all records have {len(self.classes)}')
        return Texts(segments, tuple(found))

    def probabilities(self, fields: Mapping[str, Any]) -> list[float] | None:
        """Of the classes, as the label has them; None where it is left out.

        Raises:
          UserError: for a label that is missing, or outside of the classes.
        """
        value = fields.get(self.label)
        if value in self.left_out:
            return None
        if value is None or value == "":
            raise UserError(f'it has no field "{self.label}"; it has {", ".join(fields) or "none"}')
        if self.is_score:
            return self._of_score(value)
        number = self._number(value)
        if number is None:
            known = f"0 to {len(self.classes) - 1}, or one of {', '.join(self.classes)}"
            known = f"one of {', '.join(map(str, self.labels))}" if self.labels else known
            secret = " (as of records whose labels are kept secret)" if value == -1 else ""
            raise UserError(f"the {self.label} is {value!r}{secret}; it is {known}")
        return [float(i == number) for i in range(len(self.classes))]

    def _number(self, value: Any) -> int | None:
        if self.labels:
            return next((i for i, label in enumerate(self.labels) if value == label or str(value) == str(label)), None)
        is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        whole = int(value) if is_number and value == int(value) else None
        name = str(value if whole is None else whole)  # classes may be called by numbers, and these need not begin with 0
        if name in self.classes:
            return self.classes.index(name)
        return whole if whole is not None and 0 <= whole < len(self.classes) else None

    def _of_score(self, value: Any) -> list[float]:
        highest = len(self.classes) - 1
        try:
            score = float(value)
        except (TypeError, ValueError):
            score = math.nan
        if not 0 <= score <= highest:
            raise UserError(f"the {self.label} is {value!r}; it is a number from 0 to {highest}")
        below = min(int(score), highest - 1)
        return [below + 1 - score if i == below else score - below if i == below + 1 else 0.0 for i in range(highest + 1)]


def _text(name: str, fields: Mapping[str, Any]) -> str:
    found = fields.get(name)
    if not isinstance(found, str):
        raise UserError(f'the field "{name}" is {_shown(found)}; it is a text')
    return found


def _shown(value: Any) -> str:
    return "missing" if value is None else repr(value)[:80]


@dataclasses.dataclass(frozen=True)
class SequencesConverter:
    """Makes a classifier's batches of the examples of a task such as "classify_glue_cola".

    Attributes:
      head: the model's, %HEAD.
    """

    head: Any

    def __call__(self, ds: Any, task_feature_lengths: Mapping[str, int]) -> Any:
        """Rows of `t5x_lab.models.classifier.Classifier`, see `t5x_lab.protocols.Converter`."""
        from t5x_lab.prompts.classified import rows_of

        return rows_of(ds, task_feature_lengths, self.head)


_NLI, _WITH_NOT = ("entailment", "neutral", "contradiction"), ("entailment", "not_entailment")
_SENTENCES, _HYPOTHESIS = ("sentence1", "sentence2"), ("premise", "hypothesis")
_MNLI = Classification("glue/mnli_matched", _HYPOTHESIS, _NLI)
_IS_PARAPHRASE = ("not_equivalent", "equivalent")


def _race(part: str) -> Classification:
    letters = ("A", "B", "C", "D")
    return Classification(f"race/{part}", (("article", "question"),), letters, ("options",), "answer", letters)


# The data sets of Radford et al. (2018), Table 1, and COPA.
BUILT_IN: dict[str, Classification] = {
    entry.data_set: entry
    for entry in (
        Classification("snli", _HYPOTHESIS, _NLI, left_out=(-1, "-")),
        _MNLI,
        dataclasses.replace(_MNLI, data_set="glue/mnli_mismatched"),
        Classification("glue/qnli", ("question", "sentence"), _WITH_NOT),
        Classification("glue/rte", _SENTENCES, _WITH_NOT),
        Classification("scitail", _HYPOTHESIS, ("entails", "neutral")),
        *map(_race, ("all", "middle", "high")),
        Classification(
            "story_cloze/2016",
            (tuple(f"input_sentence_{i}" for i in range(1, 5)),),
            ("1", "2"),
            ("sentence_quiz1", "sentence_quiz2"),
            "answer_right_ending",
            (1, 2),
        ),
        Classification("super_glue/copa", (("premise", "question"),), ("choice1", "choice2"), ("choice1", "choice2")),
        Classification("glue/mrpc", _SENTENCES, _IS_PARAPHRASE, symmetric=True, metrics=("f1", "accuracy")),
        Classification(
            "glue/qqp", ("question1", "question2"), ("not_duplicate", "duplicate"), symmetric=True, metrics=("f1", "accuracy")
        ),
        Classification(
            "glue/stsb", _SENTENCES, tuple("012345"), symmetric=True, is_score=True, metrics=("pearson", "spearman")
        ),
        Classification("glue/sst2", ("sentence",), ("negative", "positive")),
        Classification("glue/cola", ("sentence",), ("unacceptable", "acceptable"), metrics=("matthews", "accuracy")),
    )
}
