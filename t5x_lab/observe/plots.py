"""plots/*.png: loss, learning rate, speed and what probes score, drawn from metrics.jsonl, and what rankings found."""

from collections.abc import Mapping

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from etils import epath

from t5x_lab.observe.curves import TRAIN, Columns, curve, read_columns, read_references

PLOTS = {
    "loss": "cross-entropy, nats per token with loss",
    "learning_rate": "learning rate",
    "tokens_per_second": "tokens per second, padding excluded",
    "relative": "score of probes: chance is 0, the best one 1",
}


def write_plots(model_dir: str) -> list[str]:
    """Draws every plot that has data; returns their paths. Of references.json numbers of a metric become dashed lines."""
    columns = read_columns(model_dir)
    directory = epath.Path(model_dir) / "plots"
    directory.mkdir(parents=True, exist_ok=True)
    references = read_references(model_dir)
    paths = [_plot(columns, key, label, directory, references.get(key, {})) for key, label in PLOTS.items()]
    return [str(path) for path in paths if path]


def _plot(
    columns: Mapping[str, Columns], key: str, label: str, directory: epath.Path, references: Mapping[str, float]
) -> epath.Path | None:
    curves = {split: found for split, of in columns.items() if (found := curve(of, key, points=1000))}
    if not curves:
        return None
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    for split, found in sorted(curves.items(), key=lambda item: (item[0] != TRAIN, item[0])):
        style = {"linewidth": 1} if split == TRAIN else {"marker": "o", "markersize": 3}
        (line,) = axes.plot(found.steps, found.mean, label=split, **style)
        axes.fill_between(found.steps, found.low, found.high, color=line.get_color(), alpha=0.2, linewidth=0)
    for name, value in references.items():
        axes.axhline(value, linestyle="--", color="gray", label=name)
    axes.set(xlabel="step", ylabel=label)
    axes.grid(alpha=0.3)
    axes.legend()
    path = directory / f"{key}.png"
    with path.open("wb") as file:
        figure.savefig(file, dpi=120)
    plt.close(figure)
    return path


def plot_ranking(report: Mapping, path: epath.PathLike, title: str = "") -> None:
    """Draws the accuracies of a `t5x_lab.evaluation.ranking.accuracy.report`: a row for each data set, a dot for each prompt."""
    datasets = report["datasets"]
    figure, axes = plt.subplots(figsize=(7, 1.2 + 0.35 * len(datasets)), layout="constrained")
    for row, found in enumerate(datasets.values()):
        over, accuracies = found["over_prompts"], [accuracy["sum"] for accuracy in found["prompts"].values()]
        last = row == len(datasets) - 1
        axes.plot(accuracies, [row] * len(accuracies), "o", alpha=0.5, color="C0", label="a prompt" if last else None)
        for value, style, label in ((over["sum"]["median"], "C1-", "median"), (over["chance"]["median"], "k:", "chance")):
            axes.plot([value, value], [row - 0.35, row + 0.35], style, linewidth=2, label=label if last else None)
    axes.set(xlabel="accuracy", title=title, yticks=range(len(datasets)), yticklabels=list(datasets), xlim=(0, 1))
    axes.invert_yaxis()
    axes.grid(alpha=0.3, axis="x")
    axes.legend(loc="best")
    with epath.Path(path).open("wb") as file:
        figure.savefig(file, dpi=120)
    plt.close(figure)
