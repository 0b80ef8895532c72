"""Classification tasks: the fields of a record that are segments, choices and label (Radford et al. 2018, section 3.3).

    start text extract                        classification
    start premise delimiter hypothesis extract    entailment
    start a delimiter b extract, and b before a   similarity
    start context delimiter answer extract        multiple choice, one sequence per answer

Free of TensorFlow; opens no file.
"""

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import Any

from t5x_lab.config.checks import check_types
from t5x_lab.config.errors import UserError, check_choice

TASK_PREFIX = "classify_"  # of task names
METRICS = ("accuracy", "f1", "matthews", "pearson", "spearman")


@dataclasses.dataclass(frozen=True)
class Texts:
    """Texts of one example.

    Attributes:
      segments: segments of one or more texts, which are joined without a delimiter.
      choices: texts after the last delimiter, one per choice. Empty if the task is not multiple choice.
    """

    segments: tuple[tuple[str, ...], ...]
    choices: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Classification:
    """Classification task of a data set.

    Attributes:
      data_set: name of a built-in data set or of one of DATA_SETS.
      segments: fields of the segments: ("premise", "hypothesis"). A segment of several fields, (("article", "question"),),
        joins them with a space, and each is truncated by itself.
      classes: names of the classes, in the order of their numbers. For multiple choice, names of the choices.
      choices: one field with a list of texts, or one field per choice.
      label: field with the name of the class, or its number from 0.
      labels: values of the label field if they differ, in the order of the classes: (1, 2) or ("A", "B").
      symmetric: whether the two segments are encoded in both orders.
      is_score: whether the label is a real number between the classes, which are whole numbers from 0. A label between two
        classes is divided between both (Tai et al. 2015, equation 17).
      metrics: names from `METRICS`. The first chooses the best checkpoint. F1 is that of the second of two classes.
      left_out: values of the label whose records are dropped.
      tokens: ids of the start, delimiter and extract token. None = the first three ids after the vocabulary's.
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
        for field in ("segments", "classes", "choices", "labels", "metrics", "left_out"):
            object.__setattr__(self, field, tuple(getattr(self, field)))
        name = f'The Classification of "{self.data_set}"'
        for metric in self.metrics:
            check_choice(f"A metric of {name[0].lower()}{name[1:]}", metric, METRICS)
        if not self.metrics or not self.segments or len(self.classes) < 2:
            raise UserError(f"{name} needs at least one metric, one segment and two classes.")
        if self.labels and len(self.labels) != len(self.classes):
            raise UserError(f"{name} has {len(self.labels)} labels for {len(self.classes)} classes. Set one per class.")
        if self.choices and len(self.choices) not in (1, len(self.classes)):
            raise UserError(
                f"{name} has {len(self.choices)} choices for {len(self.classes)} classes. Set the one field with the list of "
                "choices, or one field per choice."
            )
        if self.symmetric and (len(self.segments) != 2 or self.choices):
            raise UserError(
                f"{name} is symmetric, which needs two segments and no choices. It has {len(self.segments)} segments."
            )
        if "f1" in self.metrics and len(self.classes) != 2:
            raise UserError(f"{name} has the metric f1, which needs two classes. It has {len(self.classes)}.")
        if ({"pearson", "spearman"} & {*self.metrics}) and not self.is_score:
            raise UserError(f"{name} has a correlation among its metrics, which needs a score. Set is_score, or remove it.")
        if self.tokens is not None and (len(set(self.tokens)) != 3 or not all(type(i) is int and i >= 0 for i in self.tokens)):
            raise UserError(f"{name} has the tokens {self.tokens}. Set three different ids: start, delimiter, extract.")

    @property
    def combine(self) -> str:
        """Combination of sequences in the head, see `ClassificationHead.combine`."""
        return "choices" if self.choices else "sum" if self.symmetric else "none"

    def texts(self, fields: Mapping[str, Any]) -> Texts:
        """Returns the texts of a record.

        Raises:
          UserError: for a field that is missing or not a text, or a wrong number of choices.
        """
        groups = [(names,) if isinstance(names, str) else names for names in self.segments]
        segments = tuple(tuple(_text(name, fields) for name in names) for names in groups)
        if len(self.choices) != 1:
            return Texts(segments, tuple(_text(name, fields) for name in self.choices))
        (name,) = self.choices
        choices = fields.get(name)
        if not isinstance(choices, list | tuple) or not all(isinstance(text, str) for text in choices):
            raise UserError(f'the field "{name}" is {_describe(choices)}; it must be the list of choices')
        if len(choices) != len(self.classes):
            raise UserError(f'the field "{name}" has {len(choices)} choices; every record must have {len(self.classes)}')
        return Texts(segments, tuple(choices))

    def probabilities(self, fields: Mapping[str, Any]) -> list[float] | None:
        """Returns the probability of each class according to the label, None if the record is dropped.

        Raises:
          UserError: for a missing or unknown label.
        """
        value = fields.get(self.label)
        if value in self.left_out:
            return None
        if value is None or value == "":
            raise UserError(f'it has no field "{self.label}"; it has {", ".join(fields) or "none"}')
        if self.is_score:
            return self._divide_score(value)
        number = self._class_number(value)
        if number is None:
            allowed = f"0 to {len(self.classes) - 1}, or one of {', '.join(self.classes)}"
            allowed = f"one of {', '.join(map(str, self.labels))}" if self.labels else allowed
            hidden = " (a hidden label)" if value == -1 else ""
            raise UserError(f"the {self.label} is {value!r}{hidden}; it must be {allowed}")
        return [float(i == number) for i in range(len(self.classes))]

    def _class_number(self, value: Any) -> int | None:
        if self.labels:
            return next((i for i, label in enumerate(self.labels) if value == label or str(value) == str(label)), None)
        is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        whole = int(value) if is_number and value == int(value) else None
        name = str(value if whole is None else whole)  # classes may be named by numbers, not necessarily from 0
        if name in self.classes:
            return self.classes.index(name)
        return whole if whole is not None and 0 <= whole < len(self.classes) else None

    def _divide_score(self, value: Any) -> list[float]:
        highest = len(self.classes) - 1
        try:
            score = float(value)
        except (TypeError, ValueError):
            score = math.nan
        if not 0 <= score <= highest:
            raise UserError(f"the {self.label} is {value!r}; it must be a number from 0 to {highest}")
        below = min(int(score), highest - 1)
        return [below + 1 - score if i == below else score - below if i == below + 1 else 0.0 for i in range(highest + 1)]


def _text(name: str, fields: Mapping[str, Any]) -> str:
    text = fields.get(name)
    if not isinstance(text, str):
        raise UserError(f'the field "{name}" is {_describe(text)}; it must be a text')
    return text


def _describe(value: Any) -> str:
    return "missing" if value is None else repr(value)[:80]


CLASSIFICATIONS: dict[str, Classification] = {}  # built-in tasks by data set


def register_classifications(tasks: Iterable[Classification]) -> None:
    """Adds built-in classification tasks to the registry."""
    CLASSIFICATIONS.update({task.data_set: task for task in tasks})
