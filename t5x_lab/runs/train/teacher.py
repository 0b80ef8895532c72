"""The teacher of a training run, see `t5x_lab.models.distillation`."""

from collections.abc import Callable

import jax

from t5x_lab.checkpoints.formats.location import find
from t5x_lab.checkpoints.initial import load_params
from t5x_lab.config.errors import UserError
from t5x_lab.config.log import log
from t5x_lab.models.distillation import teacher_features
from t5x_lab.networks.network import has_encoder
from t5x_lab.runs.config.checkpoint_config import read_config
from t5x_lab.runs.config.run_config import RunConfig
from t5x_lab.runs.model.sharded_model import ShardedModel

Features = dict[str, jax.Array]
AddTeacher = Callable[[Features], Features]


def load_teacher(run: RunConfig) -> AddTeacher:
    """Returns the function that adds the teacher's logits to a sharded batch. Without a teacher it changes nothing.

    Raises:
      UserError: if there is no such model, or it has another vocabulary.
    """
    if run.teacher is None:
        return lambda batch: batch
    location, top = find(run.teacher.path), run.teacher.top
    config = read_config(location)
    sharded = ShardedModel(config.model(), run.mesh_shape, rules=run.sharding)
    network, student = sharded.model.config.network, run.model.network
    if network.vocab_size != student.vocab_size:
        raise UserError(
            f"The teacher {location.path} has vocab_size {network.vocab_size} and the student {student.vocab_size}. "
            "Distillation compares their distributions: use a teacher with the student's vocabulary."
        )
    if has_encoder(network) and not has_encoder(student):
        raise UserError(f"The teacher {location.path} has an encoder, and the student has none. Use a decoder as Teacher.path.")
    params = load_params(location, sharded.abstract_params, sharded.model.axes)
    log(f"Teacher: {location.path}, {sharded.model.num_parameters:,} parameters.")
    start = config.special_tokens().start or 0

    @jax.jit
    def compute(params, batch: Features) -> Features:
        return teacher_features(sharded.model.network(params), has_encoder(network), batch, top, start)

    return lambda batch: batch | compute(params, batch)
