"""Every architecture with every objective: batch shapes, share of tokens with loss, parameters, FLOPs per token, or why not.

Computed from the descriptions alone, in a second; nothing is read or trained.
"""

import bisect
import dataclasses
from collections.abc import Mapping

from t5x_lab.config.errors import UserError
from t5x_lab.data.objectives.named import OBJECTIVES
from t5x_lab.data.objectives.objective import Objective, row_lengths
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
LENGTHS = {"full_lm": {"targets": 626}, "prefix_lm": {"targets": 626}}  # of the others, inputs of 512 (Wang et al. 2022)
NAMES = [name for name in OBJECTIVES if not name.startswith("prefix_lm_")]


@dataclasses.dataclass(frozen=True)
class Cell:
    """One architecture with one objective.

    Attributes:
      architecture, objective: their names.
      parameters: of the model.
      lengths: tokens per task feature; empty where the pair is refused.
      encoder_length, decoder_length: tokens of a row of a batch.
      share_with_loss: expected tokens with loss over tokens processed.
      flops_per_token: forward and backward, of a full row.
      refusal: why the two do not go together, or None.
    """

    architecture: str
    objective: str
    parameters: int
    lengths: Mapping[str, int] = dataclasses.field(default_factory=dict)
    encoder_length: int = 0
    decoder_length: int = 0
    share_with_loss: float = 0.0
    flops_per_token: float = 0.0
    refusal: str | None = None


def grid() -> list[Cell]:
    """All cells, objective by objective."""
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
    lengths = _lengths_that_fit(objective_name, objective, network, sentinels)
    encoder, decoder = row_lengths(network.architecture, lengths)
    tokens = objective.tokens(lengths, network.architecture, sentinels)
    return Cell(
        name,
        objective_name,
        model.num_parameters,
        lengths,
        encoder,
        decoder,
        tokens.with_loss / tokens.processed,
        network.flops(encoder, decoder) / (encoder + decoder),
    )


def _lengths_that_fit(name: str, objective: Objective, network, sentinels: int) -> dict[str, int]:
    """The usual lengths; the longest shorter ones, where a model has fewer learned positions."""
    ((given, usual),) = LENGTHS.get(name, {"inputs": 512}).items()
    complete = lambda length: objective.complete({given: length}, network.architecture, sentinels)

    def is_too_long(length: int) -> bool:
        try:
            lengths = complete(length)
        except UserError:  # the objective has no room in so few tokens
            return False
        try:
            check_length(network, max(row_lengths(network.architecture, lengths)))
        except UserError:
            return True
        return False

    if max_length(network) is None or not is_too_long(usual):
        return complete(usual)
    return complete(bisect.bisect_left(range(1, usual + 1), True, key=is_too_long))


def as_markdown(cells: list[Cell]) -> str:
    """The page docs/architectures_and_objectives.md."""
    by_pair = {(cell.architecture, cell.objective): cell for cell in cells}
    reasons = sorted({cell.refusal for cell in cells if cell.refusal})
    note = {reason: f"refused [{i}]" for i, reason in enumerate(reasons, start=1)}

    def shape(cell: Cell) -> str:
        if cell.refusal:
            return note[cell.refusal]
        parts = [str(n) for n in (cell.encoder_length, cell.decoder_length) if n]
        return f"{' + '.join(parts)}, {cell.share_with_loss:.1%}"

    def cost(cell: Cell) -> str:
        return "–" if cell.refusal else f"{cell.flops_per_token / 1e9:.3f}"

    kinds = {"encoder-decoders": "encoder-decoder", "decoders": "causal decoder", "GPT-1": "GPT-1", "encoder": "encoder"}
    lines = [
        "# Architectures and objectives",
        "",
        "Written by `t5x_lab table`; a test compares it with what the pipeline makes.",
        "",
        "## Architectures",
        "",
        "| architecture | file | parameters |",
        "|---|---|---:|",
        *(f"| {name} | `{file}` | {by_pair[name, NAMES[0]].parameters:,} |" for name, file in ARCHITECTURES.items()),
        "",
        "## Rows of a batch, and the share of their tokens that has loss",
        "",
        "At inputs of 512 tokens, or sequences of 626; GPT-1 has 512 positions. Encoder + decoder; targets are computed.",
        "",
        f"| objective | {' | '.join(kinds)} |",
        "|---|" + "---|" * len(kinds),
        *(f"| {name} | " + " | ".join(shape(by_pair[kind, name]) for kind in kinds.values()) + " |" for name in NAMES),
        "",
        "Refused, because:",
        "",
        *(f"{i}. {reason}" for i, reason in enumerate(reasons, start=1)),
        "",
        "## GFLOPs per token, forward and backward",
        "",
        "Matrix products and attention in full, of encoder and decoder tokens together: each token crosses one of the stacks.",
        "",
        f"| objective | {' | '.join(ARCHITECTURES)} |",
        "|---|" + "---:|" * len(ARCHITECTURES),
        *(f"| {name} | " + " | ".join(cost(by_pair[a, name]) for a in ARCHITECTURES) + " |" for name in NAMES),
    ]
    return "\n".join(lines) + "\n"
