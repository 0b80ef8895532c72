"""Tokens that an adaptation saves: those of training from scratch to the same held-out loss, over those of the adaptation.

Wang et al. (2022, section 5) save 1.6 times with LM adaptation and 3.3 times with non-causal masked-LM adaptation.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence

import numpy as np

from t5x_lab.observe.curves import read_columns
from t5x_lab.study.config import Saving
from t5x_lab.study.intervals import Interval, interval
from t5x_lab.study.plan import Cell, Plan
from t5x_lab.study.quantities import Quantities


@dataclasses.dataclass(frozen=True)
class Losses:
    """Held-out losses of a run.

    Attributes:
      tokens: tokens of the run itself until each evaluation, padding included, [P].
      losses: losses, [P].
    """

    tokens: np.ndarray
    losses: np.ndarray

    def tokens_to(self, loss: float) -> float:
        """Returns the tokens until a loss is first reached, interpolated between evaluations. NaN if it never is."""
        reached = np.flatnonzero(self.losses <= loss)
        if not len(reached):
            return math.nan
        i = reached[0]
        if i == 0:
            return float(self.tokens[0])
        share = (self.losses[i - 1] - loss) / (self.losses[i - 1] - self.losses[i])
        return float(self.tokens[i - 1] + share * (self.tokens[i] - self.tokens[i - 1]))


@dataclasses.dataclass(frozen=True)
class Saved:
    """Result of one seed.

    Attributes:
      seed: seed.
      tokens: tokens of the adaptation.
      loss: held-out loss after them.
      scratch_tokens: tokens from scratch to this loss. NaN if it is not reached.
      all_scratch_tokens: tokens of the whole training from scratch.
      tokens_to_scratch: tokens of adaptation to the last loss of the training from scratch. NaN if it is not reached.
    """

    seed: int
    tokens: float
    loss: float
    scratch_tokens: float
    all_scratch_tokens: float
    tokens_to_scratch: float

    @property
    def ratio(self) -> float:
        """Tokens from scratch over tokens of adaptation, for the loss after it. NaN if that is not reached from scratch."""
        return self.scratch_tokens / self.tokens

    @property
    def ratio_at_scratch(self) -> float:
        """The same for the last loss of the training from scratch. NaN if the adaptation does not reach it."""
        return self.all_scratch_tokens / self.tokens_to_scratch


def compute_savings(plan: Plan, saving: Saving, quantities: Mapping[str, Quantities]) -> list[Saved]:
    """Returns the result of each seed that has both runs with losses."""
    adapted, scratch = _runs(plan, saving.adapted, saving.stage), _runs(plan, saving.scratch, saving.scratch_stage)
    results = []
    for seed in plan.study.seeds:
        curves = [
            held_out_losses(plan.runs[runs[seed]].model_dir, saving.evaluation, quantities[runs[seed]])
            for runs in (adapted, scratch)
            if seed in runs
        ]
        if len(curves) == 2 and all(len(curve.losses) for curve in curves):
            results.append(_compare(seed, *curves))
    return results


def mean_ratio(ratios: Sequence[float]) -> Interval:
    """Returns the mean over seeds with its interval."""
    return interval({(seed, "ratio"): ratio for seed, ratio in enumerate(ratios)})


def _compare(seed: int, adapted: Losses, scratch: Losses) -> Saved:
    tokens, loss = float(adapted.tokens[-1]), float(adapted.losses[-1])
    last_loss = float(scratch.losses[-1])
    return Saved(seed, tokens, loss, scratch.tokens_to(loss), float(scratch.tokens[-1]), adapted.tokens_to(last_loss))


def _runs(plan: Plan, values: Mapping[str, str], stage: str) -> dict[int, str]:
    """Returns the runs of a stage by seed. Cells that differ only after it share them."""
    is_meant = lambda cell: values.items() <= cell.values.items() and stage in cell.runs
    cells: list[Cell] = list(filter(is_meant, plan.cells))
    return {cell.seed: cell.runs[stage] for cell in reversed(cells)}


def held_out_losses(model_dir: str, evaluation: str, quantities: Quantities) -> Losses:
    """Returns the mean loss over the tasks of an evaluation, at the steps where all of them have it."""
    columns = [c for split, c in read_columns(model_dir).items() if split.startswith(f"{evaluation}/")]
    by_step: dict[int, list[float]] = {}
    for of_task in columns:
        for step, loss in zip(of_task.steps, of_task["loss"], strict=True):
            if math.isfinite(loss):
                by_step.setdefault(int(step), []).append(float(loss))
    before = quantities.last_step - quantities.steps
    steps = sorted(step for step, losses in by_step.items() if len(losses) == len(columns) and step > before)
    tokens = [(step - before) * quantities.batch_tokens for step in steps]
    return Losses(np.array(tokens, float), np.array([np.mean(by_step[step]) for step in steps]))
