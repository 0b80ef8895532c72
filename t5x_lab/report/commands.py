"""The commands that one goes on with from a run."""

import shlex

from t5x_lab.config.gin_files import binding, gin_flag
from t5x_lab.report.run_directory import RunFiles

FURTHER = {
    "finished": "train it further; a learning rate that has come to its end needs its settings, too",
    "training": "go on with its training, should that be interrupted",
}


def commands_of(run: RunFiles) -> list[tuple[str, str]]:
    """What one does next with a run: why, and the command."""
    at, has_weights = shlex.quote(_path(run)), bool(run.checkpoints)
    found = []
    if run.config and (run.train.steps.size or not has_weights):
        further = FURTHER.get(run.state, "go on with its training")
        found.append((further, " ".join(["t5x_lab train", *_flags_to_go_on(run)])))
    if has_weights:
        writes = run.facts.get("architecture") != "encoder"
        found += [("let it write", f"t5x_lab generate --model_dir={at} --prompt='The people' --temperature=0.7")] * writes
        found += [
            ("evaluate its checkpoints", f"t5x_lab eval --model_dir={at} --step=all"),
            ("see its parameters", f"t5x_lab inspect --model_dir={at}"),
        ]
    return [*found, ("compare it with another, in OTHER_RUN's place", f"t5x_lab report {at} OTHER_RUN")]


def _path(run: RunFiles) -> str:
    return f"./{run.path}" if run.path.startswith("-") else run.path  # which would be a flag


def _flags_to_go_on(run: RunFiles) -> list[str]:
    """Of training; of a run that is at its end with twice its own budget, unless early stopping left some of that."""
    path = _path(run)
    is_text = binding(f"MODEL_DIR={path}") == f"MODEL_DIR = {path!r}"  # 2024 would be a number
    at = gin_flag("MODEL_DIR", path if is_text else repr(path))  # it may have been moved
    words = [f"--gin_file={shlex.quote(f'{path}/config.gin')}", at]
    if run.state != "finished":
        return words
    stops = (run.setting("EARLY_STOPPING") or "None") != "None"
    steps, tokens = run.number("train_steps"), run.number("train_tokens")
    processed = run.train["tokens_processed"]
    if stops and (run.last_step < steps or (len(processed) and processed[-1] < tokens)):
        return [*words, gin_flag("EARLY_STOPPING", None)]
    if tokens > 0:
        budget = gin_flag("TRAIN_TOKENS", int(2 * tokens - run.tokens_before))
    else:
        budget = gin_flag("TRAIN_STEPS", 2 * run.last_step - run.first_step)
    return [*words, budget, *([gin_flag("EARLY_STOPPING", None)] if stops else [])]
