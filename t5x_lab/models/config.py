"""Configuration of a network and its loss."""

import dataclasses
import math

from t5x_lab.config.checks import check_range, check_types
from t5x_lab.config.errors import UserError
from t5x_lab.config.macros import macro
from t5x_lab.models.loss import Loss, check_losses, check_normalizer
from t5x_lab.networks.checks import FeatureMismatch, check_network
from t5x_lab.networks.head import ClassificationHead, WithHead, find_head
from t5x_lab.networks.module_network import ModuleNetwork
from t5x_lab.networks.network import Network
from t5x_lab.networks.peft import PeftMethod, PeftNetwork, check_peft


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """A network and its loss.

    Attributes:
      network: a `Network`, or the class of an NNX module. See `ModuleNetwork`.
      peft: PEFT methods by the name in their parameters' names, such as {"lora": @Lora()}.
      head: classification head. With a head, the classification loss is trained. See `Classifier`.
      z_loss: weight of log(Z)**2 per token with loss. T5 uses 1e-4.
      label_smoothing: probability mass that moves from the target to all other tokens.
      loss_normalizing_factor: divisor of the loss. See `weights_and_normalizer`. None is the sum over tokens, as in T5X.
      losses: additional loss terms by the name of their metric. See `Loss`.
      cross_entropy_weight: factor of cross-entropy and z-loss. With 0 only `losses` are trained; the metrics still include the
        cross-entropy.
      unchecked: the error of a trial with SeqIO's model features, if the network or a loss reads other features.
    """

    network: Network
    peft: dict[str, PeftMethod] = dataclasses.field(default_factory=dict, metadata=macro("PEFT"))
    head: ClassificationHead | None = dataclasses.field(default=None, metadata=macro("HEAD"))
    z_loss: float = dataclasses.field(default=1e-4, metadata=macro("Z_LOSS"))
    label_smoothing: float = dataclasses.field(default=0.0, metadata=macro("LABEL_SMOOTHING"))
    loss_normalizing_factor: float | str | None = dataclasses.field(
        default="NUM_REAL_TARGET_TOKENS", metadata=macro("LOSS_NORMALIZING_FACTOR")
    )
    losses: dict[str, Loss] = dataclasses.field(default_factory=dict)
    cross_entropy_weight: float = 1.0
    unchecked: UserError | None = dataclasses.field(default=None, init=False, repr=False, compare=False)

    @property
    def sequences(self) -> int:
        """Number of sequences per row of a batch."""
        return self.head.sequences if self.head else 1

    def __post_init__(self):
        if callable(self.network) and not hasattr(self.network, "make"):
            object.__setattr__(self, "network", ModuleNetwork(self.network))
        check_types(self)
        if self.head and find_head(self.network) is None:  # `dataclasses.replace` passes a network that has a head
            object.__setattr__(self, "network", WithHead(self.network, self.head))
        if self.peft and not hasattr(self.network, "peft"):
            check_peft(self.peft)
            object.__setattr__(self, "network", PeftNetwork(self.network, tuple(self.peft.items())))
        check_normalizer(self.loss_normalizing_factor)
        if self.z_loss < 0:
            raise UserError(f"Z_LOSS is {self.z_loss}; it must not be negative. T5 uses 1e-4. 0.0 turns it off.")
        if not 0.0 <= self.label_smoothing < 1.0:
            raise UserError(f"LABEL_SMOOTHING is {self.label_smoothing}; it must be at least 0 and below 1.")
        check_range(self, "cross_entropy_weight", 0.0, math.inf)
        if not self.losses and not self.cross_entropy_weight:
            raise UserError("ModelConfig.cross_entropy_weight is 0 and ModelConfig.losses is empty. Set one of them.")
        try:
            check_losses(self.losses, self.network, check_network(self.network))
        except FeatureMismatch as error:
            object.__setattr__(self, "unchecked", error)  # the features may come from the run's converter
