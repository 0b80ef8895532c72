"""Fingerprints of what a configuration names and does not hold: the vocabulary's file, templates, modules of the user."""

from collections.abc import Mapping
from typing import Any

from etils import epath

from t5x_lab.checkpoints.layout import initial_checkpoint_flags, read_info
from t5x_lab.config.errors import UserError
from t5x_lab.config.user_code import user_modules
from t5x_lab.data.config import DataConfig

Content = dict[str, dict[str, str]]


def fingerprint_content(data: DataConfig, tasks: Any) -> Content:
    """Returns hashes by kind and name.

    Args:
      data: data configuration of the run.
      tasks: `ResolvedMixture` of the run.
    """
    from t5x_lab.data.vocabularies.build import fingerprint

    templates = {component.task.name: getattr(component.task, "fingerprint", "") for component in tasks.components}
    return {
        "vocabulary": {str(v): fingerprint(v) for v in (data.vocabulary, data.input_vocabulary) if v},
        "templates": {name: value for name, value in templates.items() if value},
        "modules": user_modules(),
    }


def check_content(checkpoint: epath.Path, content: Content) -> str:
    """Compares content with that of a run's checkpoint.

    Returns:
      A sentence with the user's modules that differ, "" if none do.

    Raises:
      UserError: if the vocabulary's file or a template differs.
    """
    stored = read_info(checkpoint).get("content", {})
    for kind, change in (("vocabulary", "other tokens"), ("templates", "other texts")):
        for name in _changed(stored.get(kind, {}), content[kind]):
            raise UserError(
                f"The {kind} {name} changed since the checkpoint {checkpoint}: it had the fingerprint {stored[kind][name]} and "
                f"has {content[kind][name]}, so the run would go on with {change}. Restore it, or start a new MODEL_DIR with "
                f"{initial_checkpoint_flags(checkpoint.parent.parent)}"
            )
    changed = _changed(stored.get("modules", {}), content["modules"])
    return f"Your modules that changed since that checkpoint: {', '.join(changed)}." if changed else ""


def _changed(stored: Mapping[str, str], current: Mapping[str, str]) -> list[str]:
    return [name for name in sorted(stored.keys() & current.keys()) if stored[name] != current[name]]
