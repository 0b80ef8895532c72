"""Gin names of the last release: they are replaced by the current names when a configuration is read, with a log line.

Delete a row one release after the renaming.
"""

import re

from t5x_lab.config.log import log_once

# Old gin name: new name. Macros, configurables, parameters ("Configurable.parameter") and files ("folder/file.gin").
RENAMED = {
    "ADDED": "PEFT",
    "head_of_task": "task_head",
    "best_metric_of_task": "task_best_metric",
    "added/adapters.gin": "peft/adapters.gin",
    "added/lora.gin": "peft/lora.gin",
    "added/soft_prompt.gin": "peft/soft_prompt.gin",
    "ModelConfig.added": "ModelConfig.peft",
    "MetricsEvaluation.beginning": "MetricsEvaluation.decoder_prefix",
    "MetricsEvaluation.cut_inputs": "MetricsEvaluation.truncate_inputs",
    "RankingEvaluation.cut_inputs": "RankingEvaluation.truncate_inputs",
    "Sentiment.behind": "Sentiment.suffix",
}
_NAMES = "|".join(re.escape(name) for name in sorted(RENAMED, key=len, reverse=True))
_PATTERN = re.compile(rf"(?<![\w.])(?<!\w/(?=added/))(?:{_NAMES})(?![\w/])")  # a scope may precede a name, but no folder a file


def replace_old_names(text: str) -> str:
    """Returns gin text with the names of the last release replaced. Each replaced name is logged once."""
    used = dict.fromkeys(_PATTERN.findall(text))
    for name in used:
        log_once(f'The gin name "{name}" is now "{RENAMED[name]}". The old name will stop working in the next release.')
    return _PATTERN.sub(lambda match: RENAMED[match[0]], text) if used else text
