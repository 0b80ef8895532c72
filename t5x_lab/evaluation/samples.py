"""Texts that a model writes behind prompts while it is trained."""

from typing import Any

import seqio

from t5x_lab.config.errors import UserError
from t5x_lab.evaluation.config import Measured, SamplesEvaluation
from t5x_lab.evaluation.results import PROMPTS


class Samples:
    """Lets models write behind the same prompts every time.

    Args:
      how: see there.
      model: a `t5x_lab.runs.run.Run`.

    Attributes:
      settings: see `Evaluation.prepare`.

    Raises:
      UserError: for a network that writes nothing.
    """

    def __init__(self, how: SamplesEvaluation, model: Any):
        if not model.generates:
            raise UserError("SamplesEvaluation lets the model write, which needs a network that decodes step by step.")
        self._prompts = list(how.prompts)
        self._options = {name: getattr(how, name) for name in ("max_tokens", "temperature", "top_k", "top_p", "seed")}
        self.settings = {"prompts": self._prompts, **self._options}

    def __call__(self, model: Any) -> Measured:
        texts = [text for (text,) in model.generate(self._prompts, **self._options)]
        return Measured({}, media={PROMPTS: {prompt: seqio.metrics.Text(text) for prompt, text in zip(self._prompts, texts)}})
