"""Classification head: a linear layer on the hidden state of a sequence's last token (Radford et al. 2018, section 3.2).

Axis letters: B batch, K sequences of an example, D embed, C classes.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from t5x_lab.config.checks import check_range, check_types
from t5x_lab.config.errors import UserError, check_choice
from t5x_lab.networks.checks import check_network
from t5x_lab.networks.config import check_dropout
from t5x_lab.networks.layers import Projection
from t5x_lab.networks.network import Constrain, Network, abstract_batch, dropout_rate
from t5x_lab.networks.wrapper import NetworkWrapper
from t5x_lab.ops.dropout import dropout

CLASSIFIER = "classifier"  # attribute of the network's module and first part of the head's parameter names


@dataclasses.dataclass(frozen=True)
class ClassificationHead:
    """The classes, the sequences of an example and the auxiliary language-modeling loss.

    Attributes:
      classes: names of the classes; for multiple choice, one name per choice.
      combine: "none": an example has one sequence; "sum": it has two, whose states are added; "choices": it has one sequence
        per class, each of which gives one logit.
      is_score: the classes are integers that a score lies between, and the prediction is the expected value.
      dropout_rate: dropout rate of the states before the linear layer, with one mask for all sequences of an example.
      lm_weight: λ, the weight of the language-modeling loss on the same sequences (section 3.2, equation 5). 0 turns it off.
      lm_mean_over: "sequences": the mean over sequences of each sequence's mean loss, as in the authors' code; or "tokens".
      lm_on_wrong: the language-modeling loss includes the sequences of wrong choices.
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
            raise UserError(f"ClassificationHead.classes is {self.classes}; give at least two names, all different.")
        check_choice("ClassificationHead.combine", self.combine, ("none", "sum", "choices"))
        check_choice("ClassificationHead.lm_mean_over", self.lm_mean_over, ("sequences", "tokens"))
        check_dropout(self.dropout_rate)
        check_range(self, "lm_weight", 0.0, float("inf"))
        if self.is_score and self.combine == "choices":
            raise UserError(
                'ClassificationHead.is_score needs numeric classes, and combine = "choices" has none. Set one of them only.'
            )

    @property
    def sequences(self) -> int:
        """K, the number of sequences of an example."""
        return {"none": 1, "sum": 2, "choices": len(self.classes)}[self.combine]

    @property
    def outputs(self) -> int:
        """Number of outputs of the linear layer."""
        return 1 if self.combine == "choices" else len(self.classes)


class Classifier(Projection):
    """The linear layer. Kernel N(0, 0.02) and bias 0, as in the code of Radford et al."""

    def __init__(self, config: ClassificationHead, size: int, *, rngs: nnx.Rngs):
        kernel = 0.02 * jax.random.normal(rngs.params(), (size, config.outputs), jnp.float32)
        super().__init__(kernel, ("embed", "classes"), "BKD,DC->BKC", ("classes",))
        self.config = config

    def __call__(self, states: jax.Array, dropout_key: jax.Array | None = None) -> jax.Array:
        """Returns class logits, float32 [B, C], for the sequences' states [B, K, D]."""
        c = self.config
        if c.combine == "sum":
            states = jnp.sum(states, axis=1, keepdims=True)
        logits = super().__call__(dropout(states.astype(jnp.float32), c.dropout_rate, dropout_key))
        return logits[..., 0] if c.combine == "choices" else logits[:, 0]


@dataclasses.dataclass(frozen=True)
class WithHead(NetworkWrapper):
    """A `Network` with a classification head. Its language-model outputs do not change.

    Attributes:
      network: the base network.
      classification_head: the head.
    """

    network: Network
    classification_head: ClassificationHead

    @property
    def dropout_rate(self) -> float:
        """Above 0 if the network or the head has dropout, so that random keys are made."""
        return dropout_rate(self.network) or self.classification_head.dropout_rate

    def make(self, rngs: nnx.Rngs, constrain: Constrain) -> Any:
        """Makes the network and its classification head. See `Network.make`."""
        network: Any = self.network.make(rngs, constrain)
        if hasattr(network, CLASSIFIER):
            raise UserError(
                f'The network has an attribute "{CLASSIFIER}", which is the name of the classification head. Rename it.'
            )
        setattr(network, CLASSIFIER, Classifier(self.classification_head, state_size(self.network), rngs=rngs))
        return network


def find_head(network: Network) -> ClassificationHead | None:
    """Returns the classification head of a network, or None."""
    return getattr(network, "classification_head", None)


def require_head(network: Network) -> ClassificationHead:
    """Returns the classification head of a network.

    Raises:
      UserError: if it has none.
    """
    head = find_head(network)
    if head is None:
        raise UserError("The model has no classification head; train one with --gin_file=runs/classify.gin.")
    return head


def state_size(network: Network) -> int:
    """Returns D, the size of the hidden states."""
    functional = check_network(network)
    batch = abstract_batch(network, 1, 1, 1)
    return jax.eval_shape(lambda params, batch: functional.module(params)(batch), functional.abstract_params, batch).shape[-1]
