"""What is on top of a model, its base: it is taken, saved and worked in alone."""

import copy
import functools
from typing import Any, Self

import jax
import numpy as np
from flax import traverse_util

from t5x_lab.checkpoints.config import RestoreCheckpointConfig
from t5x_lab.checkpoints.formats import find
from t5x_lab.checkpoints.formats.huggingface import peft
from t5x_lab.checkpoints.initial import load_params
from t5x_lab.checkpoints.manager import save_run
from t5x_lab.config.errors import UserError
from t5x_lab.models.model import Params
from t5x_lab.networks.additions import added_names, merged
from t5x_lab.networks.ensemble import Ensemble
from t5x_lab.optim.groups import flat_names, merge, select, trained
from t5x_lab.runs.checkpoint_config import config_of
from t5x_lab.runs.config import GinConfig
from t5x_lab.runs.sharded_model import ShardedModel

_BY_NAME = RestoreCheckpointConfig(assignment_map=(("(.*)", r"\1"),))  # what is asked for, of files that may hold more


def learned(config: GinConfig, params: Params, network: Any) -> frozenset[str]:
    """The names of parameters that were added, or that are trained (TRAINABLE, and groups that are not frozen).

    Raises:
      UserError: where these are all.
    """
    names = list(flat_names(params))
    found = added_names(params, network) | set(filter(trained(config.optimizer(), names, config.trainable()), names))
    if len(found) == len(names):
        raise UserError(
            "All parameters of this model are trained; save and load it whole. Where only what was added has changed, say so: "
            'TRAINABLE = ".*/lora/.*", for example.'
        )
    return found


class OnItsBase:
    """The functions of a `Run` for what was added to its network or learned alone (ADDED, TRAINABLE).

    All refuse ensembles with a `UserError`.
    """

    def __init__(self, config: GinConfig, sharded: ShardedModel, params: Params, step: int):
        self.config, self.sharded, self.params, self.step = config, sharded, params, step
        self.resolved: dict[str, Any] = {}  # tasks that evaluations are on, by what names them
        self._others: dict[str, Any] = {}  # models with something on top of this one, without parameters

    @property
    def network(self) -> Any:
        """What the model's network is made from."""
        return self.sharded.model.config.network

    def with_added(self, directory: str, step: int | None = None) -> Self:
        """What a run of an added kind (ADDED, TRAINABLE) learned, on top of this model, its base, whose arrays both share.

        Args:
          directory: of the run, or of `save_added`.
          step: of the run; the latest by default.

        Raises:
          UserError: when it is of another model.
        """
        self._check_one("with_added")
        location = find(directory, step)
        config = config_of(location)
        like = self._like(config)
        mine = learned(config, like.sharded.abstract_params, like.network)
        self._check_is_base(directory, like, mine)
        abstract, axes = (select(tree, mine.__contains__) for tree in (like.sharded.abstract_params, like.sharded.model.axes))
        added = load_params(location, abstract, axes, _BY_NAME)
        return like.with_params(merge(self.params, added), location.step)

    def save_added(self, directory: str) -> None:
        """Writes what was added and learned, without the base, as a run directory that `with_added` reads."""
        self._check_one("save_added")
        mine = learned(self.config, self.params, self.network)
        save_run(directory, self.config.text, select(self.params, mine.__contains__), self.step)

    def with_peft(self, directory: str) -> Self:
        """This model with LoRA that Hugging Face's `peft` saved for it; the parameters of both runs are the same arrays.

        Raises:
          UserError: when it is none, or of another model.
        """
        self._check_one("with_peft")
        lora, params = peft.read(directory, self.network)
        settings = {"modules": lora.modules, "rank": lora.rank, "alpha": lora.alpha}
        lines = [f"peft/Lora.{name} = {value!r}" for name, value in settings.items()]
        lines.append('TRAINABLE = ".*/lora/.*"')  # what was learned
        like = self._like(GinConfig((), (self.config.text, 'ADDED = {"lora": @peft/Lora()}', *lines)))
        self._check_is_base(directory, like, frozenset(params))
        places = flat_names(like.sharded.param_shardings)
        added = {name: jax.device_put(array, places[name]) for name, array in params.items()}
        return like.with_params(merge(self.params, traverse_util.unflatten_dict(added, sep="/")), self.step)

    def save_peft(self, directory: str, base: str = "") -> None:
        """Writes the LoRA of this model (ADDED) as `peft` does; `base` is what its file calls the model without."""
        self._check_one("save_peft")
        mine = added_names(self.params, self.network)
        flat = {name: np.asarray(x) for name, x in flat_names(self.params).items() if name in mine}
        peft.write(directory, self.network, flat, base)

    def merged(self) -> Self:
        """The same model without additions (ADDED), worked into its own parameters; it can be saved and converted.

        Raises:
          UserError: for an addition that cannot be merged, as adapter layers cannot.
        """
        self._check_one("merged")
        config = GinConfig((), (self.config.text, "ADDED = {}", "TRAINABLE = None"))
        sharded = self._on_the_same_mesh(config)
        work_in = jax.jit(functools.partial(merged, added=self.config.model().added), out_shardings=sharded.param_shardings)
        return type(self)(config, sharded, work_in(self.params), self.step)

    def with_params(self, params: Params, step: int) -> Self:
        """The same model with other parameters, and the programs that were compiled for it."""
        other = copy.copy(self)
        other.params, other.step = params, step
        return other

    def _like(self, config: GinConfig) -> Self:
        """A model of another configuration on the same mesh, without parameters; models that are alike share their programs."""
        key = str((config.model(), config.special_tokens(), config.vocabulary_if_set()))
        if key not in self._others:
            self._others[key] = type(self)(config, self._on_the_same_mesh(config), {}, 0)
        found = copy.copy(self._others[key])
        found.config, found.resolved = config, {}
        return found

    def _check_is_base(self, directory: str, like: "OnItsBase", mine: frozenset[str]) -> None:
        """Raises a `UserError` where this model is not what a model was learned on, but for its parameters `mine`."""
        ours = {name: x.shape for name, x in flat_names(self.params).items()}
        theirs = {name: x.shape for name, x in flat_names(like.sharded.abstract_params).items() if name not in mine}
        for name in sorted(theirs):
            if ours.get(name) != theirs[name]:
                of = f"of the shape {ours[name]}" if name in ours else "nowhere"
                raise UserError(f"{directory} is of a model with {name} {theirs[name]}, which this one, its base, has {of}.")
        if more := sorted(ours.keys() - theirs.keys() - mine):
            raise UserError(
                f"This model has {more[0]}, and what {directory} was learned on has not. Take the base alone, or merge what is "
                "added to it."
            )

    def _on_the_same_mesh(self, config: GinConfig) -> ShardedModel:
        """The model of another configuration."""
        mesh = self.sharded.mesh_shape, list(self.sharded.mesh.devices.flat)
        return ShardedModel(config.model(), *mesh, config.sharding())

    def _check_one(self, function: str) -> None:
        if isinstance(self.network, Ensemble):
            raise UserError(f"{function} is of one model, and this is an ensemble; load the member that you mean alone.")
