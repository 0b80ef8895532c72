"""What a user's own objects may be, and what helps to make them. Gin binds whatever satisfies one of these protocols."""

from t5x_lab.data.converter import Converter
from t5x_lab.data.objective import Objective
from t5x_lab.evaluation.config import Evaluation
from t5x_lab.models.loss import Loss
from t5x_lab.networks.additions import Addition
from t5x_lab.networks.network import Decoder, Module, Network
from t5x_lab.networks.of_module import OfModule
from t5x_lab.optim.optimizers import Optax, Optimizer
from t5x_lab.optim.schedules import Schedule
from t5x_lab.training.hooks import Hook

__all__ = [
    "Addition",
    "Converter",
    "Decoder",
    "Evaluation",
    "Hook",
    "Loss",
    "Module",
    "Network",
    "Objective",
    "OfModule",
    "Optax",
    "Optimizer",
    "Schedule",
]
