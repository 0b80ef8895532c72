"""The commands for next steps with a run."""

import shlex

from t5x_lab.config.gin_files import binding, gin_flag
from t5x_lab.report.run_directory import RunFiles

FURTHER = {
    "finished": "train longer; a learning-rate schedule that has ended needs other settings",
    "training": "continue training if it is interrupted",
}


def next_commands(run: RunFiles) -> list[tuple[str, str]]:
    """Returns descriptions and commands of next steps."""
    at, has_weights = shlex.quote(_path(run)), bool(run.checkpoints)
    commands = []
    if run.config and (run.train.steps.size or not has_weights):
        further = FURTHER.get(run.state, "continue training")
        commands.append((further, " ".join(["t5x_lab train", *_continue_flags(run)])))
    if has_weights:
        writes = run.facts.get("architecture") != "encoder"
        commands += [("generate text", f"t5x_lab generate --model_dir={at} --prompt='The people' --temperature=0.7")] * writes
        commands += [
            ("evaluate its checkpoints", f"t5x_lab eval --model_dir={at} --step=all"),
            ("list its parameters", f"t5x_lab inspect --model_dir={at}"),
        ]
    return [*commands, ("compare it with another run", f"t5x_lab report {at} OTHER_RUN")]


def _path(run: RunFiles) -> str:
    return f"./{run.path}" if run.path.startswith("-") else run.path  # a path that looks like a flag


def _continue_flags(run: RunFiles) -> list[str]:
    """Returns the flags of `train` to continue; for a finished run with twice its budget, unless it stopped early."""
    path = _path(run)
    is_text = binding(f"MODEL_DIR={path}") == f"MODEL_DIR = {path!r}"  # not a literal such as 2024
    at = gin_flag("MODEL_DIR", path if is_text else repr(path))  # the directory may have been moved
    flags = [f"--gin_file={shlex.quote(f'{path}/config.gin')}", at]
    if run.state != "finished":
        return flags
    stops = (run.setting("EARLY_STOPPING") or "None") != "None"
    steps, tokens = run.number("train_steps"), run.number("train_tokens")
    processed = run.train["tokens_processed"]
    if stops and (run.last_step < steps or (len(processed) and processed[-1] < tokens)):
        return [*flags, gin_flag("EARLY_STOPPING", None)]
    if tokens > 0:
        budget = gin_flag("TRAIN_TOKENS", int(2 * tokens - run.tokens_before))
    else:
        budget = gin_flag("TRAIN_STEPS", 2 * run.last_step - run.first_step)
    return [*flags, budget, *([gin_flag("EARLY_STOPPING", None)] if stops else [])]
