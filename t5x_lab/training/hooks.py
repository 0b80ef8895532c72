"""Hooks: user code that runs at the start, after steps, evaluations and saves, and at the end of training."""

import contextlib
import dataclasses
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from t5x_lab.config.errors import UserError
from t5x_lab.config.user_code import call_user_code, describe_error, describe_user_code_error, shown
from t5x_lab.models.loss import check_metric

Metrics = Mapping[str, float | None]


@dataclasses.dataclass(frozen=True)
class RunStart:
    """Information about a run for `on_start`.

    Attributes:
      model_dir: run directory, a path or a URL such as gs://...
      first_step: number of steps done before.
      last_step: number of the last step, an estimate for a token budget.
      config: full gin configuration.
      num_parameters: number of parameters of the model.
    """

    model_dir: str
    first_step: int
    last_step: int
    config: str = ""
    num_parameters: int = 0


class Hook:
    """A training hook. A user's class defines any of these methods and need not inherit from this one.

    Methods run on the first process, or on all processes if `every_process` is True. A failing hook is logged and does not end
    training, unless it fails in `on_start`.
    """

    every_process = False
    period = 1  # number of steps between two values of `statistics` in the metrics

    def on_start(self, run: RunStart) -> None:
        """Called before the first step."""

    def on_step(self, step: int, metrics: Metrics) -> None:
        """Called with the metrics of each step, while the next step already runs."""

    def on_evaluation(self, step: int, split: str, metrics: Metrics) -> None:
        """Called with the metrics of each evaluation. `split` is "<evaluation>/<task>"."""

    def on_media(self, step: int, split: str, values: Mapping[str, Any]) -> None:
        """Called with the other `seqio.metrics` of an evaluation, such as texts and images, by name."""

    def on_saving(self, step: int) -> None:
        """Called before the checkpoint of `step` is written. A run that is killed later continues after this step."""

    def on_save(self, step: int) -> None:
        """Called when the checkpoint of `step` is on disk."""

    def on_end(self, error: BaseException | None) -> None:
        """Called after the last step, or with the error that ended training."""

    def statistics(self, params: Any, gradients: Any, updates: Any) -> dict[str, jax.Array]:
        """Returns scalars that become metrics of the step. They are compiled into every training step.

        Args:
          params, gradients, updates: nested dicts of arrays before the step, without frozen parameters.
        """
        return {}


METHODS = [name for name in vars(Hook) if name.startswith("on_") or name == "statistics"]


def check_hooks(hooks: Sequence[Any]) -> None:
    """Raises a `UserError` for an object without any method of a hook."""
    for hook in hooks:
        if isinstance(hook, type):
            raise UserError(f"HOOKS has the class {hook.__name__}. Bind an instance with parentheses: @{hook.__name__}().")
        if not any(callable(getattr(hook, name, None)) for name in METHODS):
            raise UserError(f"HOOKS has {hook!r}, which has none of the methods of a hook: {', '.join(METHODS)}.")
        period = getattr(hook, "period", 1)
        if not isinstance(period, int) or period < 1:
            raise UserError(f"The hook {_name(hook)} has the period {period!r}. It must be a number of steps, at least 1.")


class Hooks:
    """Calls the hooks of a run.

    Args:
      hooks: objects with any of `METHODS`.
      log: function that logs a line.
    """

    def __init__(self, hooks: Sequence[Any], log: Callable[[str], None] = print):
        is_main = jax.process_index() == 0
        self._hooks = [hook for hook in hooks if is_main or getattr(hook, "every_process", False)]
        self._started: list[Any] = []
        self._log = log
        self._failing: set[tuple[int, str]] = set()

    @contextlib.contextmanager
    def around(self, run: RunStart) -> Iterator[None]:
        """Starts the hooks, and ends those that were started.

        Raises:
          UserError: if a hook fails in `on_start`.
        """
        try:
            for hook in self._hooks:
                if hasattr(hook, "on_start"):
                    call_user_code(f"The hook {_name(hook)} fails in on_start", lambda hook=hook: hook.on_start(run))
                self._started.append(hook)
            yield
        except BaseException as error:
            self._call("on_end", error)
            raise
        self._call("on_end", None)

    def step(self, step: int, metrics: Metrics) -> None:
        self._call("on_step", step, types.MappingProxyType(dict(metrics)))

    def evaluation(self, step: int, split: str, metrics: Metrics) -> None:
        self._call("on_evaluation", step, split, types.MappingProxyType(dict(metrics)))

    def media(self, step: int, split: str, values: Mapping[str, Any]) -> None:
        self._call("on_media", step, split, types.MappingProxyType(dict(values)))

    def saving(self, step: int) -> None:
        self._call("on_saving", step)

    def save(self, step: int) -> None:
        self._call("on_save", step)

    def _call(self, method: str, *args: Any) -> None:
        for hook in self._started:
            if not hasattr(hook, method):
                continue
            key = (id(hook), method)
            try:
                getattr(hook, method)(*args)
                self._failing.discard(key)
            except Exception as error:
                if key not in self._failing:  # logged once, until it works again
                    description = describe_user_code_error(error) or describe_error(error)
                    step = f" of step {args[0]}" if isinstance(args[0], int) else ""
                    hint = "" if method == "on_end" else " Training goes on."
                    self._log(f"The hook {_name(hook)} failed in {method}{step}: {description}.{hint}")
                self._failing.add(key)


class Statistics:
    """The statistics that hooks compute in the training step.

    Args:
      hooks: hooks. Those without `statistics` are ignored.
    """

    def __init__(self, hooks: Sequence[Any] = ()):
        self._hooks = [hook for hook in hooks if hasattr(hook, "statistics")]
        self._periods: dict[str, int] = {}

    # No `lax.cond` for the period: on CPU, cached programs with collectives in a branch hang.

    def compute(self, params: Any, gradients: Any, updates: Any) -> dict[str, jax.Array]:
        """Returns all statistics of a step."""
        statistics: dict[str, jax.Array] = {}
        for hook in self._hooks:
            label = f"The hook {_name(hook)}"
            trees = (params, gradients, updates)
            shapes = call_user_code(f"{label} fails in statistics", lambda hook=hook: jax.eval_shape(hook.statistics, *trees))
            if not isinstance(shapes, dict):
                raise UserError(f"{label} returns {shown(shapes)} from statistics. It must return a dict of scalars by name.")
            for name, shape in shapes.items():
                if getattr(shape, "shape", None) != ():
                    raise UserError(f"{label} returns {shown(shape)} for the statistic {name!r}. It must be a scalar.")
                check_metric(f"A statistic of the hook {_name(hook)}", name)
                if name in statistics:
                    raise UserError(f'{label} has the statistic "{name}", which another hook has, too. Rename one of them.')
            self._periods |= dict.fromkeys(shapes, getattr(hook, "period", 1))
            statistics |= {name: jnp.float32(value) for name, value in hook.statistics(*trees).items()}
        return statistics

    def due(self, step: int, metrics: Metrics) -> dict[str, float | None]:
        """Returns the metrics of a step, without statistics that are not due at this step."""
        return {name: value for name, value in metrics.items() if step % self._periods.get(name, 1) == 0}


def _name(hook: Any) -> str:
    return type(hook).__name__
