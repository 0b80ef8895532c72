"""A classification head on a network: one linear layer on the state of a sequence's last token (Radford et al. 2018, 3.2).

Axis letters: B batch, K sequences of an example, D embed, C classes.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from t5x_lab.config.checks import check_types, in_range
from t5x_lab.config.errors import UserError, one_of
from t5x_lab.networks.around import Around
from t5x_lab.networks.checks import check_network
from t5x_lab.networks.config import check_dropout
from t5x_lab.networks.layers import Projection
from t5x_lab.networks.network import Constrain, Network, abstract_batch, dropout_rate
from t5x_lab.ops.dropout import dropout

CLASSIFIER = "classifier"  # of a network's module, and the beginning of the head's parameters' names


@dataclasses.dataclass(frozen=True)
class ClassificationHead:
    """What is classified, and what is learned beside it.

    Attributes:
      classes: their names; of a choice, one for each.
      combine: what becomes of an example's sequences: "none", it has one; "sum", it has two, whose states are added; "choices",
        each is a class, and has one logit.
      is_score: whether the classes are the whole numbers that a score lies between, and the prediction their mean.
      dropout_rate: of the states before the linear layer, one mask for all sequences of an example.
      lm_weight: λ, of the language-modelling loss on the same sequences; 0 = none (section 3.2, equation 5).
      lm_mean_over: "sequences": that of each sequence's mean, as their code has it; or "tokens".
      lm_on_wrong: whether sequences of wrong choices count in it.
    """

    classes: tuple[str, ...]
    combine: str = "none"
    is_score: bool = False
    dropout_rate: float = 0.1
    lm_weight: float = 0.5
    lm_mean_over: str = "sequences"
    lm_on_wrong: bool = True

    def __post_init__(self):
        check_types(self)
        object.__setattr__(self, "classes", tuple(self.classes))
        if len(set(self.classes)) < max(2, len(self.classes)) or not all(isinstance(name, str) for name in self.classes):
            raise UserError(f"ClassificationHead.classes is {self.classes}; give at least two different names.")
        one_of("ClassificationHead.combine", self.combine, ("none", "sum", "choices"))
        one_of("ClassificationHead.lm_mean_over", self.lm_mean_over, ("sequences", "tokens"))
        check_dropout(self.dropout_rate)
        in_range(self, "lm_weight", 0.0, float("inf"))
        if self.is_score and self.combine == "choices":
            raise UserError("ClassificationHead.is_score is of classes that are numbers, and choices are none.")

    @property
    def sequences(self) -> int:
        """K."""
        return {"none": 1, "sum": 2, "choices": len(self.classes)}[self.combine]

    @property
    def outputs(self) -> int:
        """Of the linear layer, for each of the states that it sees."""
        return 1 if self.combine == "choices" else len(self.classes)


class Classifier(Projection):
    """The linear layer: its matrix N(0, 0.02), its bias 0, as their code has them."""

    def __init__(self, config: ClassificationHead, size: int, *, rngs: nnx.Rngs):
        kernel = 0.02 * jax.random.normal(rngs.params(), (size, config.outputs), jnp.float32)
        super().__init__(kernel, ("embed", "classes"), "BKD,DC->BKC", ("classes",))
        self.config = config

    def __call__(self, states: jax.Array, dropout_key: jax.Array | None = None) -> jax.Array:
        """Logits of the classes, float32 [B, C], of the sequences' states [B, K, D]."""
        c = self.config
        if c.combine == "sum":
            states = jnp.sum(states, axis=1, keepdims=True)
        logits = super().__call__(dropout(states.astype(jnp.float32), c.dropout_rate, dropout_key))
        return logits[..., 0] if c.combine == "choices" else logits[:, 0]


@dataclasses.dataclass(frozen=True)
class WithHead(Around):
    """A network with a head beside it, itself a `Network`: without its classes it is what it was.

    Attributes:
      network: what it says of itself holds.
      classification_head: what it classifies.
    """

    network: Network
    classification_head: ClassificationHead

    @property
    def dropout_rate(self) -> float:
        """Above 0 where either has dropout, so that keys are made."""
        return dropout_rate(self.network) or self.classification_head.dropout_rate

    def make(self, rngs: nnx.Rngs, constrain: Constrain) -> Any:
        """As `Network.make`."""
        made: Any = self.network.make(rngs, constrain)
        if hasattr(made, CLASSIFIER):
            raise UserError(f'The network has a part "{CLASSIFIER}" of its own, as a head would be called. Call it otherwise.')
        setattr(made, CLASSIFIER, Classifier(self.classification_head, state_size(self.network), rngs=rngs))
        return made


def head_of(network: Network) -> ClassificationHead | None:
    """The head beside a network, if it has one."""
    return getattr(network, "classification_head", None)


def checked_head(network: Network) -> ClassificationHead:
    """The same.

    Raises:
      UserError: when it has none.
    """
    head = head_of(network)
    if head is None:
        raise UserError("The model has no classification head; train one with --gin_file=runs/classify.gin.")
    return head


def state_size(network: Network) -> int:
    """D, of hidden states."""
    functional = check_network(network)
    batch = abstract_batch(network, 1, 1, 1)
    return jax.eval_shape(lambda params, batch: functional.module(params)(batch), functional.abstract_params, batch).shape[-1]
