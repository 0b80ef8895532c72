"""Protocols and base classes for a user's own objects. Gin binds any object that satisfies a protocol."""

from t5x_lab.data.converter import Converter
from t5x_lab.data.objectives.denoising import Denoising
from t5x_lab.data.objectives.objective import Objective
from t5x_lab.evaluation.evaluation import Evaluation, EvaluationResult
from t5x_lab.evaluation.probes.probe import Probe
from t5x_lab.models.loss import Loss
from t5x_lab.networks.module_network import ModuleNetwork
from t5x_lab.networks.network import Decoder, Module, Network
from t5x_lab.networks.peft import PeftMethod
from t5x_lab.optim.optimizers import Optax, Optimizer
from t5x_lab.optim.schedules import Schedule
from t5x_lab.training.hooks import Hook

Addition, OfModule = PeftMethod, ModuleNetwork  # deprecated aliases, removed in the next release

__all__ = [
    "Converter",
    "Decoder",
    "Denoising",
    "Evaluation",
    "EvaluationResult",
    "Hook",
    "Loss",
    "Module",
    "ModuleNetwork",
    "Network",
    "Objective",
    "Optax",
    "Optimizer",
    "PeftMethod",
    "Probe",
    "Schedule",
]
