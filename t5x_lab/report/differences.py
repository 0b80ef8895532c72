"""Differences between the configurations of runs."""

import re
from collections.abc import Mapping, Sequence

from t5x_lab.report.run_directory import RunFiles

ROOT = "RunConfig"
ALWAYS_DIFFERENT = ("MODEL_DIR",)


def find_differences(runs: Sequence[RunFiles]) -> dict[str, list[str | None]]:
    """Returns the values of each setting that differs between runs, by name; None if a run does not have it.

    A setting that all runs bind to a macro is represented by the macro. Runs without config.gin are ignored.
    """
    configured = [run for run in runs if run.settings]
    names = dict.fromkeys(name for run in configured for name in run.settings if name not in ALWAYS_DIFFERENT)
    differs = lambda values: len(set(values)) > 1
    return {
        name: [run.setting(name) for run in runs]
        for name in sorted(names)
        if differs(run.settings.get(name) for run in configured) and differs(run.setting(name) for run in configured)
    }


def referenced_settings(settings: Mapping[str, str]) -> set[str]:
    """Returns the settings that `RunConfig` refers to, directly or not; all settings without a `RunConfig`.

    Other bindings, such as those of an unused optimizer, have no effect unless the user's code reads them.
    """
    by_configurable: dict[str, list[str]] = {}
    for name in settings:
        by_configurable.setdefault(_configurable(name), []).append(name)
    reached, todo = set[str](), [ROOT]
    while todo:
        if (at := todo.pop()) not in reached:
            reached.add(at)
            references = [
                name for of_it in by_configurable.get(at, ()) for name in re.findall(r"[@%]([\w./]+)", settings[of_it])
            ]
            todo += [at.partition("/")[2], *(_without_module(name) for name in references)]
    return {name for name in settings if _configurable(name) in reached or ROOT not in by_configurable}


def _configurable(name: str) -> str:
    """Returns the configurable of a parameter; a macro itself."""
    return _without_module(name.rpartition(".")[0] or name)


def _without_module(name: str) -> str:
    scope, slash, last = name.rpartition("/")
    return scope + slash + last.rpartition(".")[2]
