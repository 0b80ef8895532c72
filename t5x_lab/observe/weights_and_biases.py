"""Weights & Biases hook. Needs the extra `wandb`."""

import dataclasses
import pathlib
import uuid
from collections.abc import Mapping
from typing import Any

from etils import epath

from t5x_lab.config.checks import check_types
from t5x_lab.config.errors import UserError
from t5x_lab.config.temporary import make_temporary_folder
from t5x_lab.config.user_code import describe_error
from t5x_lab.training.hooks import RunStart
from t5x_lab.training.loop import Preempted


@dataclasses.dataclass
class WeightsAndBiases:
    """Hook that logs all metrics to https://wandb.ai, or to files with mode = "offline".

    A continued run continues its Weights & Biases run, whose id is stored in MODEL_DIR.

    Attributes:
      project, entity, name, group, tags: see `wandb.init`. The name defaults to the last part of MODEL_DIR.
      mode: "online", "offline" or "disabled". None = the environment variable WANDB_MODE.
    """

    project: str
    entity: str | None = None
    name: str | None = None
    group: str | None = None
    tags: tuple[str, ...] = ()
    mode: str | None = None

    def __post_init__(self):
        check_types(self)
        self._run: Any = None

    def on_start(self, run: RunStart) -> None:
        try:
            import wandb
        except ImportError as error:
            raise UserError("WeightsAndBiases needs the package wandb: pip install 't5x_lab[wandb]'.") from error
        is_remote = "://" in run.model_dir
        self._run = self._init(wandb, run, is_remote)
        # A separate step metric, because steps after the last checkpoint of a killed run are logged again.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def _init(self, wandb: Any, run: RunStart, is_remote: bool) -> Any:
        options = dict(
            project=self.project,
            entity=self.entity,
            name=self.name or pathlib.PurePath(run.model_dir).name,
            group=self.group,
            tags=list(self.tags),
            mode=self.mode,
            id=_run_id(epath.Path(run.model_dir)),
            resume="allow",
            dir=str(make_temporary_folder()) if is_remote else run.model_dir,
            config={"gin": run.config, "num_parameters": run.num_parameters, "model_dir": run.model_dir},
        )
        try:
            return wandb.init(**options)
        except Exception as error:
            raise UserError(
                f"Weights & Biases could not start a run ({describe_error(error)}). Log in with `wandb login`, or set "
                "--gin.WeightsAndBiases.mode=offline."
            ) from error

    def on_step(self, step: int, metrics: Mapping[str, float | None]) -> None:
        self._log(step, "train", metrics)

    def on_evaluation(self, step: int, split: str, metrics: Mapping[str, float | None]) -> None:
        self._log(step, split, metrics)

    def on_end(self, error: BaseException | None) -> None:
        if self._run is not None:
            self._run.finish(exit_code=0 if error is None or isinstance(error, Preempted) else 1)

    def _log(self, step: int, split: str, metrics: Mapping[str, float | None]) -> None:
        values = {f"{split}/{name}": value for name, value in metrics.items() if value is not None}
        self._run.log({"step": step, **values})


def _run_id(model_dir: epath.Path) -> str:
    """Returns the Weights & Biases id of a run directory, which is stored in it."""
    path = model_dir / "wandb_id"
    if not path.exists():
        path.write_text(uuid.uuid4().hex[:16])
    return path.read_text()
