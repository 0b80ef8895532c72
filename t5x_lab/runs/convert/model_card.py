"""Model card of an exported model: README.md with the metadata that Hugging Face's hub reads."""

import contextlib
import json
from collections.abc import Sequence
from typing import Any

from etils import epath

from t5x_lab.config.errors import NotSet, UserError
from t5x_lab.config.json_files import parse_json
from t5x_lab.networks.network import Network, has_encoder
from t5x_lab.runs.config.gin_config import GinConfig

CARD = """---
library_name: transformers
pipeline_tag: {pipeline}
tags: [t5x_lab, {architecture}]
---

# {name}

{facts}

```python
from transformers import {auto_class}, AutoTokenizer

tokenizer, model = AutoTokenizer.from_pretrained("{name}"), {auto_class}.from_pretrained("{name}")
```
{evaluations}
## To be completed before publication

- License (`license:` in the metadata above), languages (`language:`), and terms of the training data.
- Intended use, limitations and known biases.
"""


def model_card(name: str, source: epath.Path, config: GinConfig, steps: Sequence[int], num_parameters: int, dtype: str) -> str:
    """Returns the text of a model card with what the run's directory says of the model.

    Args:
      name: name of the model.
      source: checkpoint that was exported. The evaluations of a single step are read from its run directory.
      config: configuration of the run.
      steps: step of the checkpoint, or of those whose mean it is.
      num_parameters: number of parameters.
      dtype: data type of the exported weights.
    """
    network: Network = config.model().network
    is_seq2seq = has_encoder(network)
    facts = {
        "Architecture": network.architecture.replace("_", " "),
        "Parameters": f"{num_parameters:,}, {dtype}",
        "Training step": f"{steps[0]:,}" if len(steps) == 1 else f"mean of {', '.join(f'{step:,}' for step in steps)}",
        **_training_facts(config),
    }
    return CARD.format(
        pipeline="text2text-generation" if is_seq2seq else "text-generation",
        architecture=network.architecture.replace("_", "-"),
        name=name,
        facts="\n".join(f"- {key}: {value}" for key, value in facts.items()),
        auto_class="AutoModelForSeq2SeqLM" if is_seq2seq else "AutoModelForCausalLM",
        evaluations=_evaluations(source, steps[0]) if len(steps) == 1 else "",
    )


def _training_facts(config: GinConfig) -> dict[str, Any]:
    with contextlib.suppress(NotSet, UserError):  # an imported model has no data
        data = config.data()
        return {
            "Trained on": f"`{data.mixture_or_task_name}`" + (f", objective `{data.objective}`" if data.objective else ""),
            "Lengths": json.dumps(data.task_feature_lengths),
            "Batch": f"{data.batch_size} rows",
        }
    return {}


def _evaluations(source: epath.Path, step: int) -> str:
    number = lambda metric: isinstance(metric, int | float)  # None stands for NaN
    files = sorted((source.parent.parent / "evals").glob(f"*/{step}.json"))
    rows = [
        f"| {file.parent.name}/{task} | {', '.join(f'{key} {value:.4g}' for key, value in metrics.items() if number(value))} |"
        for file in files
        for task, metrics in parse_json(file.read_text()).get("results", {}).items()
    ]
    return "\n".join(["", f"## Evaluations at step {step}", "", "| task | metrics |", "|---|---|", *rows, ""]) if rows else ""
