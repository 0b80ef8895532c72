"""What happens beside training: the protocol of hooks, and how they are called."""

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
    """What a hook knows of a run when it begins.

    Attributes:
      model_dir: where it is kept; a path or an address, such as gs://….
      first_step, last_step: done before, and the last as far as it is known.
      config: all of its gin configuration.
      num_parameters: of the model.
    """

    model_dir: str
    first_step: int
    last_step: int
    config: str = ""
    num_parameters: int = 0


class Hook:
    """What happens beside training. A user's class has those of these methods that it wants, and need not inherit.

    Methods run on the first process, or on all where the class says `every_process = True`. A hook that fails does not end the
    training, unless it fails at the start.
    """

    every_process = False
    period = 1  # steps between two times that `statistics` become metrics

    def on_start(self, run: RunStart) -> None:
        """Before the first step."""

    def on_step(self, step: int, metrics: Metrics) -> None:
        """After each step, with its numbers; called when the next one is under way already."""

    def on_evaluation(self, step: int, split: str, metrics: Metrics) -> None:
        """After an evaluation of the state after `step`; `split` is "<name of the evaluation>/<task>"."""

    def on_media(self, step: int, split: str, values: Mapping[str, Any]) -> None:
        """After an evaluation that found more than numbers: by name, texts, images and what else `seqio.metrics` has."""

    def on_save(self, step: int) -> None:
        """When the checkpoint of `step` is on disk."""

    def on_end(self, error: BaseException | None) -> None:
        """After the last step, or after what ended the training."""

    def statistics(self, params: Any, gradients: Any, updates: Any) -> dict[str, jax.Array]:
        """Scalars that become metrics of the step; compiled into every step, they had better be cheap.

        Args:
          params, gradients, updates: nested dicts of arrays, before the step; without those of frozen parameters.
        """
        return {}


METHODS = [name for name in vars(Hook) if name.startswith("on_") or name == "statistics"]


def check_hooks(hooks: Sequence[Any]) -> None:
    """Raises a `UserError` for an object that has none of a hook's methods."""
    for hook in hooks:
        if isinstance(hook, type):
            raise UserError(f"HOOKS has the class {hook.__name__}; write @{hook.__name__}() to make a hook of it.")
        if not any(callable(getattr(hook, name, None)) for name in METHODS):
            raise UserError(f"HOOKS has {hook!r}, which has no method of a hook: {', '.join(METHODS)}.")
        period = getattr(hook, "period", 1)
        if not isinstance(period, int) or period < 1:
            raise UserError(f"The hook {_name(hook)} has the period {period!r}; it is a number of steps, at least 1.")


class Hooks:
    """Calls the hooks of a run.

    Args:
      hooks: objects with any of `METHODS`.
      say: prints a line.
    """

    def __init__(self, hooks: Sequence[Any], log: Callable[[str], None] = print):
        is_main = jax.process_index() == 0
        self._hooks = [hook for hook in hooks if is_main or getattr(hook, "every_process", False)]
        self._started: list[Any] = []
        self._say = log
        self._failing: set[tuple[int, str]] = set()

    @contextlib.contextmanager
    def around(self, run: RunStart) -> Iterator[None]:
        """Starts the hooks, and ends those that started.

        Raises:
          UserError: with the name of a hook that fails at the start.
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
                if key not in self._failing:  # said once, until it works again
                    where = describe_user_code_error(error) or describe_error(error)
                    at = f" of step {args[0]}" if isinstance(args[0], int) else ""
                    goes_on = "" if method == "on_end" else " Training goes on."
                    self._say(f"The hook {_name(hook)} failed in {method}{at}: {where}.{goes_on}")
                self._failing.add(key)


class Statistics:
    """What hooks measure in the compiled step.

    Args:
      hooks: of which those count that have `statistics`.
    """

    def __init__(self, hooks: Sequence[Any] = ()):
        self._hooks = [hook for hook in hooks if hasattr(hook, "statistics")]
        self._periods: dict[str, int] = {}

    # Not in a `lax.cond` by the period: a CPU's programs with collectives in a branch hang when they come from the cache.

    def measure(self, params: Any, gradients: Any, updates: Any) -> dict[str, jax.Array]:
        """All statistics of a step."""
        found: dict[str, jax.Array] = {}
        for hook in self._hooks:
            what = f"The hook {_name(hook)}"
            given = (params, gradients, updates)
            shapes = call_user_code(f"{what} fails in statistics", lambda hook=hook: jax.eval_shape(hook.statistics, *given))
            if not isinstance(shapes, dict):
                raise UserError(f"{what} has the statistics {shown(shapes)}; they are a dict of scalars by name.")
            for name, shape in shapes.items():
                if getattr(shape, "shape", None) != ():
                    raise UserError(f"{what} has the statistic {name!r}, {shown(shape)}; they are a dict of scalars by name.")
                check_metric(f"{what} has a statistic that", name)
                if name in found:
                    raise UserError(f'{what} has the statistic "{name}", which another hook has too.')
            self._periods |= dict.fromkeys(shapes, getattr(hook, "period", 1))
            found |= {name: jnp.float32(value) for name, value in hook.statistics(*given).items()}
        return found

    def due(self, step: int, metrics: Metrics) -> dict[str, float | None]:
        """Metrics of a step without those statistics whose period its number is no multiple of."""
        return {name: value for name, value in metrics.items() if step % self._periods.get(name, 1) == 0}


def _name(hook: Any) -> str:
    return type(hook).__name__
