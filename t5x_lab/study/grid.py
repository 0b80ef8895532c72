"""The grid of architectures and objectives: batch shapes, tokens in them, fraction with loss, parameters and FLOPs per token.

Computed from configurations, without data or training.
"""

import bisect
import dataclasses
from collections.abc import Mapping

from t5x_lab.config.errors import UserError
from t5x_lab.data.objectives.named import OBJECTIVES
from t5x_lab.data.objectives.objective import Objective, Tokens, row_lengths
from t5x_lab.data.vocabularies.sentinels import num_sentinels
from t5x_lab.models.classifier import make_model
from t5x_lab.models.model import Model
from t5x_lab.networks.network import check_length, max_length
from t5x_lab.runs.config.gin_config import GinConfig

ARCHITECTURES = {
    "encoder-decoder": "models/t5_1_0/base.gin",
    "shared stacks": "models/shared_stacks/base.gin",
    "half the layers": "models/half_layers/base.gin",
    "causal decoder": "models/causal_decoder/base.gin",
    "prefix decoder": "models/prefix_decoder/base.gin",
    "encoder": "models/encoder/base.gin",
    "rotary decoder": "models/rotary_decoder/base.gin",
    "GPT-1": "models/gpt1/base.gin",
    "LSTM": "models/lstm/base.gin",
}
LENGTHS = {"full_lm": {"targets": 626}, "prefix_lm": {"targets": 626}}  # inputs of 512 for the others (Wang et al. 2022)
NAMES = [name for name in OBJECTIVES if not name.startswith("prefix_lm_")]


@dataclasses.dataclass(frozen=True)
class Cell:
    """An architecture with an objective.

    Attributes:
      architecture, objective: names.
      parameters: number of parameters of the model.
      lengths: length of each task feature in tokens. Empty for an incompatible pair.
      encoder_length, decoder_length: lengths of a batch row in tokens.
      fill: expected fraction of the row that is tokens; the rest is padding.
      share_with_loss: expected fraction of tokens with loss.
      flops_per_token: forward and backward FLOPs of a row, divided by its tokens without padding.
      refusal: reason why the pair is incompatible, or None.
    """

    architecture: str
    objective: str
    parameters: int
    lengths: Mapping[str, int] = dataclasses.field(default_factory=dict)
    encoder_length: int = 0
    decoder_length: int = 0
    fill: float = 0.0
    share_with_loss: float = 0.0
    flops_per_token: float = 0.0
    refusal: str | None = None


def compute_grid() -> list[Cell]:
    """Returns all cells, ordered by objective."""
    configs = {name: GinConfig([file]) for name, file in ARCHITECTURES.items()}
    models = {name: make_model(config.model()) for name, config in configs.items()}
    sentinels = {name: num_sentinels(config.vocabulary()) for name, config in configs.items()}
    return [
        _cell(architecture, objective, models[architecture], sentinels[architecture])
        for objective in NAMES
        for architecture in ARCHITECTURES
    ]


def _cell(name: str, objective_name: str, model: Model, sentinels: int) -> Cell:
    objective, network = OBJECTIVES[objective_name], model.config.network
    refusal = objective.refusal(network.architecture)
    if refusal:
        return Cell(name, objective_name, model.num_parameters, refusal=refusal)
    lengths = _fit_lengths(objective_name, objective, network, sentinels)
    encoder, decoder = row_lengths(network.architecture, lengths)
    tokens = objective.tokens(lengths, network.architecture, sentinels)
    row_tokens = _examples_per_row(encoder, decoder, tokens) * tokens.processed
    return Cell(
        name,
        objective_name,
        model.num_parameters,
        lengths,
        encoder,
        decoder,
        row_tokens / (encoder + decoder),
        tokens.with_loss / tokens.processed,
        network.flops(encoder, decoder) / row_tokens,
    )


def _examples_per_row(encoder: int, decoder: int, tokens: Tokens) -> int:
    """Returns how many examples of the expected size share a row."""
    room = [(encoder + decoder) / tokens.processed]
    if encoder and decoder:
        room = [encoder / (tokens.processed - tokens.with_loss), decoder / tokens.with_loss]
    return max(int(min(room) + 1e-9), 1)


def _fit_lengths(name: str, objective: Objective, network, sentinels: int) -> dict[str, int]:
    """Returns the usual lengths, or the longest ones that the model's learned positions allow."""
    ((feature, usual),) = LENGTHS.get(name, {"inputs": 512}).items()
    complete = lambda length: objective.complete({feature: length}, network.architecture, sentinels)

    def is_too_long(length: int) -> bool:
        try:
            lengths = complete(length)
        except UserError:  # too few tokens for the objective
            return False
        try:
            check_length(network, max(row_lengths(network.architecture, lengths)))
        except UserError:
            return True
        return False

    if max_length(network) is None or not is_too_long(usual):
        return complete(usual)
    return complete(bisect.bisect_left(range(1, usual + 1), True, key=is_too_long))


# Gin files of the models that Wang et al. (2022) compare; the page says what they are.
WANG_ET_AL = (
    "## The grid of Wang et al. (2022)",
    "",
    "*What Language Model Architecture and Pretraining Objective Work Best for Zero-Shot Generalization?* compares three "
    "architectures, two objectives, adaptation and multi-task fine-tuning. The model files have a smaller size where `xxl` "
    "is replaced by `small`, `base`, `large` or `xl`.",
    "",
    "| model | full or prefix LM | masked LM (span corruption) |",
    "|---|---|---|",
    "| causal decoder: `models/decoder/xxl.gin` | `objectives/full_lm.gin` | `objectives/span_corruption.gin` |",
    '| prefix decoder: the same with `TransformerConfig.architecture = "prefix_decoder"` | `objectives/prefix_lm.gin` | '
    "`objectives/span_corruption.gin` |",
    "| encoder-decoder: `models/t5_1_1/xxl.gin` | `objectives/prefix_lm.gin` with half the `BATCH_SIZE` | "
    "`objectives/span_corruption.gin` |",
    "",
    "| further step | files |",
    "|---|---|",
    "| language modelling after masked pre-training (LM adaptation) | `objectives/full_lm.gin` or `objectives/prefix_lm.gin`, "
    "and `runs/adapt.gin` |",
    "| masked pre-training of a prefix decoder after a causal one (non-causal MLM adaptation) | "
    "`objectives/span_corruption.gin` and `runs/adapt.gin`, with the architecture changed |",
    "| multi-task fine-tuning (MT-F) on T0's data sets | `recipes/mt_f.gin` |",
    "| zero-shot evaluation | `recipes/t0_eval.gin`; `t5x_lab harness --tasks=eai_eval` |",
    "",
)


def to_markdown(cells: list[Cell]) -> str:
    """Returns the page docs/architectures_and_objectives.md."""
    by_pair = {(cell.architecture, cell.objective): cell for cell in cells}
    reasons = sorted({cell.refusal for cell in cells if cell.refusal})
    note = {reason: f"incompatible [{i}]" for i, reason in enumerate(reasons, start=1)}

    def shape(cell: Cell) -> str:
        if cell.refusal:
            return note[cell.refusal]
        parts = [str(n) for n in (cell.encoder_length, cell.decoder_length) if n]
        return f"{' + '.join(parts)}, {cell.fill:.0%}, {cell.share_with_loss:.1%}"

    def cost(cell: Cell) -> str:
        return "–" if cell.refusal else f"{cell.flops_per_token / 1e9:.3f}"

    kinds = {"encoder-decoders": "encoder-decoder", "decoders": "causal decoder", "GPT-1": "GPT-1", "encoder": "encoder"}
    lines = [
        "# Architectures and objectives",
        "",
        "Generated by `t5x_lab table`. Tests compare it with the batches of the data pipeline.",
        "",
        "## Architectures",
        "",
        "| architecture | file | parameters |",
        "|---|---|---:|",
        *(f"| {name} | `{file}` | {by_pair[name, NAMES[0]].parameters:,} |" for name, file in ARCHITECTURES.items()),
        "",
        *WANG_ET_AL,
        "## Batch rows, how full they are, and the fraction of tokens with loss",
        "",
        "Encoder + decoder length in tokens, for inputs of 512 tokens or sequences of 626. GPT-1 has 512 positions. Target "
        "lengths are computed. The first percentage is that of tokens in a row; the rest is padding, which a vocabulary with "
        "100 sentinels needs for objectives with more spans. The second is that of tokens with loss among the tokens.",
        "",
        f"| objective | {' | '.join(kinds)} |",
        "|---|" + "---|" * len(kinds),
        *(f"| {name} | " + " | ".join(shape(by_pair[kind, name]) for kind in kinds.values()) + " |" for name in NAMES),
        "",
        "Incompatible pairs:",
        "",
        *(f"{i}. {reason}" for i, reason in enumerate(reasons, start=1)),
        "",
        "## GFLOPs per token, forward and backward",
        "",
        "Matrix products and full attention of a row, divided by its tokens without padding. Each token passes through one of "
        "the stacks.",
        "",
        f"| objective | {' | '.join(ARCHITECTURES)} |",
        "|---|" + "---:|" * len(ARCHITECTURES),
        *(f"| {name} | " + " | ".join(cost(by_pair[a, name]) for a in ARCHITECTURES) + " |" for name in NAMES),
    ]
    return "\n".join(lines) + "\n"
