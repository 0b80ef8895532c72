"""The lm-eval command with run directories as models.

python -m t5x_lab.runs.harness --model t5x_lab --model_args model_dir=runs/x --tasks mine --include_path tasks/
"""

from lm_eval.__main__ import cli_evaluate
from lm_eval.api.registry import register_model

from t5x_lab.config.errors import UserError
from t5x_lab.evaluation.harness.model import HarnessModel
from t5x_lab.runs.model.load import load


@register_model("t5x_lab")
class RunDirectory(HarnessModel):
    """A run directory as a model of lm-eval. The arguments are those in `--model_args`.

    Args:
      model_dir, step, mesh, parameter_dtype: see `t5x_lab.load`.
      options: see `HarnessModel`. Other options that lm-eval passes are ignored.
    """

    def __init__(
        self,
        model_dir: str | None = None,
        step: int | None = None,
        mesh: str | None = None,
        parameter_dtype: str = "float32",
        **options,
    ):
        if not model_dir:
            raise UserError("Pass a run directory, such as --model_args model_dir=runs/x.")
        options = {name: options[name] for name in ("batch_size", "max_length", "max_gen_toks") if name in options}
        super().__init__(load(model_dir, step=step, mesh=mesh, parameter_dtype=parameter_dtype), **options)


if __name__ == "__main__":
    cli_evaluate()
