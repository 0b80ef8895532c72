"""plots/*.png: loss, learning rate, speed and what probes score, drawn from metrics.jsonl, and what rankings found."""

from collections.abc import Mapping

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from etils import epath

from t5x_lab.observe.metrics import read_metrics

PLOTS = {
    "loss": "cross-entropy, nats per token with loss",
    "learning_rate": "learning rate",
    "tokens_per_second": "tokens per second, padding excluded",
    "relative": "score of probes: chance is 0, the best one 1",
}


def write_plots(model_dir: str, reference_losses: Mapping[str, float] = {}) -> list[str]:
    """Draws every plot that has data; returns their paths. `reference_losses` become dashed lines in the loss."""
    lines = read_metrics(model_dir)
    directory = epath.Path(model_dir) / "plots"
    directory.mkdir(parents=True, exist_ok=True)
    paths = [_plot(lines, key, label, directory, reference_losses if key == "loss" else {}) for key, label in PLOTS.items()]
    return [str(path) for path in paths if path]


def _plot(lines: list[dict], key: str, label: str, directory: epath.Path, references: Mapping[str, float]) -> epath.Path | None:
    splits = sorted({line["split"] for line in lines if line.get(key) is not None}, key=lambda s: s != "train")
    if not splits:
        return None
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    for split in splits:
        points = [(line["step"], line[key]) for line in lines if line["split"] == split and line.get(key) is not None]
        steps, values = zip(*points, strict=True)
        style = {"alpha": 0.8, "linewidth": 1} if split == "train" else {"marker": "o", "markersize": 3}
        axes.plot(steps, values, label=split, **style)
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
    """Draws the accuracies of a `t5x_lab.evaluation.accuracy.report`: a row for each data set, a dot for each prompt."""
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
