"""What differs between the configurations of runs."""

from collections.abc import Sequence

from t5x_lab.report.run_directory import RunFiles

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
