"""What differs between the configurations of runs."""

import re
from collections.abc import Mapping, Sequence

from t5x_lab.report.run_directory import RunFiles

ROOT = "RunConfig"
ALWAYS_DIFFERENT = ("MODEL_DIR",)


def differences(runs: Sequence[RunFiles]) -> dict[str, list[str | None]]:
    """By name of a setting that is not the same in all runs, each run's; None where it has none.

    What every run calls by a macro is left to the macro; where only some do, the macro's value counts. A run without config.gin
    has no part in it.
    """
    configured = [run for run in runs if run.settings]
    names = dict.fromkeys(name for run in configured for name in run.settings if name not in ALWAYS_DIFFERENT)
    differs = lambda values: len(set(values)) > 1
    return {
        name: [run.setting(name) for run in runs]
        for name in sorted(names)
        if differs(run.settings.get(name) for run in configured) and differs(run.setting(name) for run in configured)
    }


def referred(settings: Mapping[str, str]) -> set[str]:
    """Names of settings that a run's configuration leads to by references and macros; all, where it has no `RunConfig`.

    What is bound beside them, such as the settings of another optimizer, changes nothing unless the user's code asks for it.
    """
    of: dict[str, list[str]] = {}
    for name in settings:
        of.setdefault(_configurable(name), []).append(name)
    found, todo = set[str](), [ROOT]
    while todo:
        if (at := todo.pop()) not in found:
            found.add(at)
            references = [name for of_it in of.get(at, ()) for name in re.findall(r"[@%]([\w./]+)", settings[of_it])]
            todo += [at.partition("/")[2], *(_without_module(name) for name in references)]
    return {name for name in settings if _configurable(name) in found or ROOT not in of}


def _configurable(name: str) -> str:
    """What a parameter is of; a macro is its own."""
    return _without_module(name.rpartition(".")[0] or name)


def _without_module(name: str) -> str:
    scope, slash, last = name.rpartition("/")
    return scope + slash + last.rpartition(".")[2]
