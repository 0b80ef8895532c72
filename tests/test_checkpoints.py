"""Saving, restoring, retention, other meshes, and checkpoints that do not fit."""

import dataclasses

import jax
import numpy as np
import pytest
from helpers import tiny_config

from t5x_lab.checkpoints.manager import Checkpoints, find_checkpoint, finished_steps, restore_params
from t5x_lab.config.errors import UserError
from t5x_lab.models.model import ModelConfig
from t5x_lab.optim.optimizers import Adafactor
from t5x_lab.optim.schedules import LearningRate
from t5x_lab.partitioning.mesh import MeshShape
from t5x_lab.runs.assemble import Placed, assemble
from t5x_lab.training.batches import SyntheticBatches


def make(mesh=MeshShape(1, 1, 1), architecture="causal_decoder", **changes):
    devices = jax.devices()[: mesh.data * mesh.fsdp * mesh.tensor]
    placed = Placed(ModelConfig(tiny_config(architecture, **changes)), mesh, devices)
    optimizer = Adafactor(LearningRate("constant", 0.01), min_dim_size_to_factor=8)
    return assemble(placed, optimizer, batch_size=8, microbatches=1, seed=0)


def advance(training, state, batches, steps):
    losses = []
    for _ in range(steps):
        state, metrics = training.step(state, training.placed.put(next(batches)))
        losses.append(metrics["loss"].item())
    return state, losses


def synthetic():
    return SyntheticBatches({"targets": 8}, 8, 64)


def test_a_restored_run_continues_to_the_bit_and_only_the_newest_are_kept(tmp_path):
    training, batches = make(dropout_rate=0.1), synthetic()
    state = training.start(training.placed.init_params(0))
    checkpoints = Checkpoints(tmp_path, keep=2)
    losses = []
    for step in range(1, 6):
        state, new = advance(training, state, batches, 1)
        losses += new
        checkpoints.save(step, state, batches)
    checkpoints.close()
    assert finished_steps(tmp_path) == [4, 5]
    assert not [entry for entry in (tmp_path / "checkpoints").iterdir() if "tmp" in entry.name]

    again = synthetic()
    checkpoints = Checkpoints(tmp_path, keep=2)
    restored = checkpoints.restore(4, training.abstract_state, again)
    assert int(restored.step) == 4 and again.position == 4
    restored, last = advance(training, restored, again, 1)
    assert last == losses[-1:]
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(restored), jax.device_get(state))
    checkpoints.close()


@pytest.mark.slow
def test_restoring_onto_another_mesh_keeps_every_number(tmp_path):
    eight, one = make(MeshShape(2, 2, 2)), make()
    state, _ = advance(eight, eight.start(eight.placed.init_params(0)), synthetic(), 2)
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(2, state, synthetic())
    checkpoints.wait()
    for training in (one, make(MeshShape(1, 8, 1))):
        restored = checkpoints.restore(2, training.abstract_state, synthetic())
        jax.tree.map(np.testing.assert_array_equal, jax.device_get(restored), jax.device_get(state))
    checkpoints.close()


def test_parameters_alone_go_from_a_causal_to_a_prefix_decoder(tmp_path):
    causal, prefix = make(), make(architecture="prefix_decoder")
    state = causal.start(causal.placed.init_params(3))
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(7, state, synthetic())
    checkpoints.close()
    params = restore_params(find_checkpoint(str(tmp_path)), prefix.placed.abstract_params)
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(params), jax.device_get(state.params))


def test_a_checkpoint_that_does_not_fit_names_the_first_difference(tmp_path):
    training = make()
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, training.start(training.placed.init_params(0)), synthetic())
    checkpoints.close()
    with pytest.raises(UserError, match=r"mlp/wi_0/kernel has shape \(3, 16, 32\) there and has shape \(3, 16, 48\)"):
        restore_params(find_checkpoint(str(tmp_path)), make(mlp_dim=48).placed.abstract_params)
    with pytest.raises(UserError, match="encoder.* is missing there"):
        restore_params(find_checkpoint(str(tmp_path)), make(architecture="encoder_decoder").placed.abstract_params)


@pytest.mark.slow
def test_a_state_saved_after_a_bad_step_can_go_on(tmp_path):
    training, batches = make(), synthetic()
    state = training.start(training.placed.init_params(0))
    state = dataclasses.replace(state, healthy=state.healthy & False)
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(0, state, batches)
    checkpoints.wait()
    restored, _ = advance(training, checkpoints.restore(0, training.abstract_state, batches), batches, 2)
    assert int(restored.step) == 2
    checkpoints.close()


def test_places_without_a_checkpoint_are_sentences(tmp_path):
    with pytest.raises(UserError, match="does not exist"):
        find_checkpoint(str(tmp_path / "nothing"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="holds no finished checkpoint"):
        find_checkpoint(str(tmp_path / "empty"))
    (tmp_path / "run" / "checkpoints" / "5").mkdir(parents=True)
    with pytest.raises(UserError, match="no checkpoint of step 6; it has 5"):
        find_checkpoint(str(tmp_path / "run"), 6)
