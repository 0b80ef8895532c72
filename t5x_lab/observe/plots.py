"""plots/*.png: loss, learning rate and speed, drawn from metrics.jsonl."""

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
