"""EAI-Eval of Wang et al. (2022): lm-eval task files of its 31 tasks, `t5x_lab harness --tasks=eai_eval`."""

import pathlib

TASK_FOLDER = str(pathlib.Path(__file__).parent)
NAME_PREFIX = "eai_"  # prefix of the task names, which `--data` may leave out
