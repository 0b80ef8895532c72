"""Plots in plots/*.png: loss, learning rate, speed and probe scores from metrics.jsonl, and ranking accuracies."""

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
    "relative": "relative score of probes (0 = chance, 1 = maximum)",
}


def write_plots(model_dir: str) -> list[str]:
    """Writes all plots that have data and returns their paths. Values in references.json are dashed lines."""
    columns = read_columns(model_dir)
    directory = epath.Path(model_dir) / "plots"
    directory.mkdir(parents=True, exist_ok=True)
    references = read_references(model_dir)
    paths = [_plot(columns, key, label, directory, references.get(key, {})) for key, label in PLOTS.items()]
    return [str(path) for path in paths if path]


def _plot(
    columns: Mapping[str, Columns], key: str, label: str, directory: epath.Path, references: Mapping[str, float]
) -> epath.Path | None:
    curves = {split: points for split, column in columns.items() if (points := curve(column, key, points=1000))}
    if not curves:
        return None
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    for split, points in sorted(curves.items(), key=lambda item: (item[0] != TRAIN, item[0])):
        style = {"linewidth": 1} if split == TRAIN else {"marker": "o", "markersize": 3}
        (line,) = axes.plot(points.steps, points.mean, label=split, **style)
        axes.fill_between(points.steps, points.low, points.high, color=line.get_color(), alpha=0.2, linewidth=0)
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
    """Plots a `t5x_lab.evaluation.ranking.accuracy.report`: a row per data set, a dot per prompt."""
    datasets = report["datasets"]
    figure, axes = plt.subplots(figsize=(7, 1.2 + 0.35 * len(datasets)), layout="constrained")
    for row, dataset in enumerate(datasets.values()):
        over, accuracies = dataset["over_prompts"], [accuracy["sum"] for accuracy in dataset["prompts"].values()]
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
