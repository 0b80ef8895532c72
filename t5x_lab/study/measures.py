"""`Measure`: a number of the evaluations of a study's runs that its tables compare."""

import dataclasses
import math
import pathlib
from collections.abc import Mapping
from typing import Any

from t5x_lab.config.checks import check_types
from t5x_lab.config.errors import UserError, check_choice
from t5x_lab.config.json_files import read_dictionary
from t5x_lab.config.steps import parse_step
from t5x_lab.evaluation.results import FOLDER


@dataclasses.dataclass(frozen=True)
class Value:
    """The result of a unit, such as a data set.

    Attributes:
      value: the result.
      chance: expected result of guessing. NaN if unknown.
      constant: result of the best constant answer. NaN if unknown.
    """

    value: float
    chance: float = math.nan
    constant: float = math.nan


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measure:
    """A number that is compared between cells. It is read from the result files of an evaluation.

    Attributes:
      name: title of its column.
      evaluation: name of the evaluation, the folder of its results.
      chosen_by: name of another evaluation. Of the steps with both, the one with its best mean counts. Its examples should be
        others, such as those of another split. None = the last evaluated step.
      metric: key of the metric. Results of probes and of rankings have a unit for each data set; the metric of rankings is a
        normalization, such as "sum", and its median over prompts counts. Benchmarks such as GLUE have a unit for each part,
        with the metric "score". Other results have a unit for each task.
      units: "reported" as above, or "tasks" for a unit for each task also of rankings, whose tasks have one prompt each.
      best_of: factors that are chosen, such as the learning rate. Of the cells that differ in these alone, the one with the
        best mean of `chosen_by` over seeds is compared. () compares all cells.
      tasks: units that count, such as tasks or data sets. () = all.
      stages: stages that may have the evaluation. The last of them that a cell has is read. () = all stages.
      best_is: "highest" or "lowest".
      within: factors whose values must be the same in cells that are compared, such as the objective for held-out losses. ()
        compares all cells.
      over: what intervals are over: ("seeds", "units"), or ("seeds",) if the units are no sample of others, such as two texts.
      percent: whether tables show the number times 100.
      published: published numbers, by the names of a cell's values, joined by ", ".
    """

    name: str
    evaluation: str
    metric: str
    units: str = "reported"
    chosen_by: str | None = None
    best_of: tuple = ()
    tasks: tuple = ()
    stages: tuple = ()
    best_is: str = "highest"
    within: tuple = ()
    over: tuple = ("seeds", "units")
    percent: bool = True
    published: dict = dataclasses.field(default_factory=dict)

    def __post_init__(self):
        check_types(self)
        check_choice("Measure.best_is", self.best_is, ("highest", "lowest"))
        check_choice("Measure.units", self.units, ("reported", "tasks"))
        if self.over not in (("seeds", "units"), ("seeds",)):
            raise UserError(f'Measure.over is {self.over}. It must be ("seeds", "units") or ("seeds",).')
        if self.chosen_by == self.evaluation:
            raise UserError(
                f'Measure.evaluation and Measure.chosen_by of "{self.name}" are both "{self.evaluation}". The best of several '
                "results on the same examples is too good. Choose by an evaluation of other examples."
            )
        if self.best_of and self.chosen_by is None:
            raise UserError(
                f'Measure.best_of of "{self.name}" is {self.best_of}, but Measure.chosen_by is None. Set it to the '
                "evaluation that chooses, such as one of another split."
            )

    def read(self, model_dir: str) -> dict[str, Value]:
        """Returns the results of the chosen step by unit; {} if there are none."""
        steps = _result_files(model_dir, self.evaluation)
        if self.chosen_by is not None:
            chosen = self.choose_step(model_dir)
            steps = {} if chosen is None else {chosen.step: steps[chosen.step]}
        return self._values(read_dictionary(steps[max(steps)])) if steps else {}

    def choose_step(self, model_dir: str) -> "ChosenStep | None":
        """Returns the best step by the evaluation `chosen_by`, of steps where the measured evaluation has results too.

        Steps with fewer units than others are not chosen: their mean is over other units. None without results.
        """
        assert self.chosen_by is not None
        steps = _result_files(model_dir, self.evaluation)
        by_step = {
            step: [value.value for value in self._values(read_dictionary(path)).values()]
            for step, path in sorted(_result_files(model_dir, self.chosen_by).items())
            if step in steps
        }
        most = max(map(len, by_step.values()), default=0)
        if most == 0:
            return None
        means = {step: sum(values) / most for step, values in by_step.items() if len(values) == most}
        step = self.best(means)
        return ChosenStep(step, means[step], most)

    def best(self, means: Mapping[Any, float]) -> Any:
        """Returns the key of the best mean, the first of equal ones."""
        choose = max if self.best_is == "highest" else min
        return choose(means, key=lambda key: means[key])

    def _values(self, content: Mapping[str, Any]) -> dict[str, Value]:
        values = {}
        if self.units == "reported":
            values = self._of_probes(content) | self._of_rankings(content) | self._of_benchmarks(content)
        values = values or self._of_tasks(content)
        is_counted = lambda unit: not self.tasks or unit in self.tasks
        return {unit: value for unit, value in values.items() if is_counted(unit) and math.isfinite(value.value)}

    def _of_probes(self, content: Mapping[str, Any]) -> dict[str, Value]:
        probes = content.get("report", {}).get("probes", {})
        return {
            data_set: Value(_number(numbers, self.metric), _number(numbers, "chance"))
            for data_sets in probes.values()
            for data_set, numbers in data_sets.items()
        }

    def _of_rankings(self, content: Mapping[str, Any]) -> dict[str, Value]:
        data_sets = content.get("report", {}).get("datasets", {})
        median = lambda numbers, name: _number(numbers.get("over_prompts", {}).get(name, {}), "median")
        return {
            data_set: Value(median(numbers, self.metric), median(numbers, "chance"), median(numbers, "constant"))
            for data_set, numbers in data_sets.items()
        }

    def _of_benchmarks(self, content: Mapping[str, Any]) -> dict[str, Value]:
        benchmarks = content.get("report", {}).get("benchmarks", {})
        return {
            part: Value(_number(numbers, self.metric))
            for benchmark in benchmarks.values()
            for part, numbers in benchmark.get("parts", {}).items()
        }

    def _of_tasks(self, content: Mapping[str, Any]) -> dict[str, Value]:
        return {
            task: Value(_number(numbers, self.metric), _number(numbers, "chance"), _number(numbers, "constant"))
            for task, numbers in content.get("results", {}).items()
        }


@dataclasses.dataclass(frozen=True)
class ChosenStep:
    """The step of a run that an evaluation chooses, and the mean of this evaluation over so many units."""

    step: int
    mean: float
    num_units: int


def _result_files(model_dir: str, evaluation: str) -> dict[int, pathlib.Path]:
    """Returns the result files of an evaluation by step."""
    folder = pathlib.Path(model_dir) / FOLDER / evaluation
    return {step: path for path in folder.glob("*.json") if (step := parse_step(path.stem)) is not None}


def _number(numbers: Mapping[str, Any], name: str) -> float:
    value = numbers.get(name)
    return float(value) if isinstance(value, int | float) else math.nan
