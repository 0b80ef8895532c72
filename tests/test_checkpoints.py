"""Saving, restoring, retention, damage, failing storage, other meshes, and checkpoints that do not fit."""

import dataclasses
import json
import math
import shutil

import jax
import numpy as np
import pytest
from etils import epath
from helpers import random_params, tiny_config

from t5x_lab.checkpoints import layout
from t5x_lab.checkpoints.checksums import _compiled, checksum_of_chunks, checksums, hexadecimal, region_sums
from t5x_lab.checkpoints.config import RestoreCheckpointConfig, SaveCheckpointConfig
from t5x_lab.checkpoints.formats.location import find
from t5x_lab.checkpoints.initial import load_params
from t5x_lab.checkpoints.layout import find_checkpoint, finished_steps, named_leaves, read_info
from t5x_lab.checkpoints.lazy_tensors import from_array
from t5x_lab.checkpoints.manager import Checkpoints, save_params
from t5x_lab.checkpoints.verification import verify
from t5x_lab.config.errors import UserError
from t5x_lab.models.config import ModelConfig
from t5x_lab.optim.optimizers import Adafactor, AdamW
from t5x_lab.optim.schedules import LearningRate
from t5x_lab.partitioning.mesh import MeshShape
from t5x_lab.runs.model.sharded_model import ShardedModel
from t5x_lab.runs.train.assemble import assemble
from t5x_lab.training.batches import SyntheticBatches


def make(mesh=MeshShape(1, 1, 1), architecture="causal_decoder", optimizer="adafactor", **changes):
    devices = mesh.first_of(jax.devices())
    sharded = ShardedModel(ModelConfig(tiny_config(architecture, **changes)), mesh, devices)
    rate = LearningRate("constant", 0.01)
    rule = AdamW(rate) if optimizer == "adamw" else Adafactor(rate, min_dim_size_to_factor=8)
    return assemble(sharded, rule, batch_size=8, microbatches=1, seed=0)


def advance(training, state, batches, steps):
    losses = []
    for _ in range(steps):
        state, metrics = training.step(state, training.sharded.shard_batch(next(batches)))
        losses.append(metrics["loss"].item())
    return state, losses


def load(model_dir, sharded):
    return load_params(find(str(model_dir)), sharded.abstract_params, sharded.model.axes)


def synthetic():
    return SyntheticBatches({"targets": 8}, 8, 64)


@pytest.mark.slow
def test_a_restored_run_continues_to_the_bit_and_only_the_newest_are_kept(tmp_path):
    training, batches = make(dropout_rate=0.1), synthetic()
    state = training.init_state(training.sharded.init_params(0))
    checkpoints = Checkpoints(tmp_path, SaveCheckpointConfig(keep=2))
    losses = []
    for step in range(1, 6):
        state, new = advance(training, state, batches, 1)
        losses += new
        checkpoints.save(step, state, batches)
    checkpoints.close()
    assert finished_steps(tmp_path) == [4, 5]
    assert not [entry for entry in (tmp_path / "checkpoints").iterdir() if "tmp" in entry.name]

    again = synthetic()
    checkpoints = Checkpoints(tmp_path, SaveCheckpointConfig(keep=2))
    restored = checkpoints.restore(4, training.abstract_state, again)
    assert int(restored.step) == 4 and again.position == 4
    restored, last = advance(training, restored, again, 1)
    assert last == losses[-1:]
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(restored), jax.device_get(state))
    checkpoints.close()


@pytest.mark.slow
def test_restoring_onto_another_mesh_keeps_every_number(tmp_path):
    eight, single = make(MeshShape(2, 2, 2)), make()
    state, _ = advance(eight, eight.init_state(eight.sharded.init_params(0)), synthetic(), 2)
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(2, state, synthetic())
    checkpoints.wait()
    for training in (single, make(MeshShape(1, 8, 1))):
        restored = checkpoints.restore(2, training.abstract_state, synthetic())
        jax.tree.map(np.testing.assert_array_equal, jax.device_get(restored), jax.device_get(state))
    checkpoints.close()


def test_parameters_alone_go_from_a_causal_to_a_prefix_decoder(tmp_path):
    causal, prefix = make(), make(architecture="prefix_decoder")
    state = causal.init_state(causal.sharded.init_params(3))
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(7, state, synthetic())
    checkpoints.close()
    params = load(tmp_path, prefix.sharded)
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(params), jax.device_get(state.params))


def test_a_checkpoint_that_does_not_fit_names_the_first_difference(tmp_path):
    training = make()
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, training.init_state(training.sharded.init_params(0)), synthetic())
    checkpoints.close()
    with pytest.raises(
        UserError, match=r"mlp/wi_0/kernel has shape \(3, 16, 32\) in the checkpoint and has shape \(3, 16, 48\) in the model"
    ):
        load(tmp_path, make(mlp_dim=48).sharded)
    with pytest.raises(UserError, match="cross_attention.* is missing in the checkpoint and has shape"):
        load(tmp_path, make(architecture="encoder_decoder").sharded)


@pytest.mark.slow
def test_a_state_saved_after_a_bad_step_can_go_on(tmp_path):
    training, batches = make(), synthetic()
    state = training.init_state(training.sharded.init_params(0))
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
    with pytest.raises(UserError, match="has no finished checkpoint. Use a run directory"):
        find_checkpoint(str(tmp_path / "empty"))
    (tmp_path / "run" / "checkpoints" / "5").mkdir(parents=True)
    with pytest.raises(UserError, match="no checkpoint of step 6. It has 5"):
        find_checkpoint(str(tmp_path / "run"), 6)


@pytest.mark.slow
def test_checksums_see_every_bit_and_every_exchange_whatever_the_sharding():
    rng = np.random.default_rng(0)
    arrays = {"f": rng.normal(size=(6, 8)).astype(np.float32), "i": np.arange(8, dtype=np.int32), "s": np.float32(3.0)}
    arrays["b"], arrays["h"] = np.array([True, False]), arrays["f"].astype(jax.numpy.bfloat16)
    before = checksums(arrays)
    assert before == {name: hexadecimal(np.asarray(_compiled(None)(array))) for name, array in arrays.items()}  # on a device
    assert before == {name: checksum_of_chunks(from_array(array).chunks(max_bytes=40)) for name, array in arrays.items()}
    quarters = [(rows, columns) for rows in ((0, 2), (2, 6)) for columns in ((0, 5), (5, 8))]
    for name in ("f", "h"):
        parts = (region_sums(arrays[name][a:b, c:d], (a, c), arrays[name].shape) for (a, b), (c, d) in quarters)
        assert hexadecimal(sum(parts, np.zeros(2, np.uint32))) == before[name]
    for name, array in arrays.items():
        flat_bytes = np.atleast_1d(array).view(np.uint8).ravel()
        for bit in [0] if name == "b" else range(8 * flat_bytes.size):
            changed = flat_bytes.copy()
            changed[bit // 8] ^= 1 << bit % 8
            assert checksums({name: changed.view(array.dtype).reshape(array.shape)})[name] != before[name]
    assert checksums({"f": arrays["f"][::-1]})["f"] != before["f"] != checksums({"f": arrays["f"].T})["f"]
    training = make(MeshShape(2, 2, 2))
    params = training.sharded.init_params(0)
    results = {name: hexadecimal(np.asarray(_compiled(None)(array))) for name, array in named_leaves(params).items()}  # sharded
    assert results == checksums(named_leaves(jax.device_get(params)))


@pytest.fixture(scope="module")
def two_checkpoints(tmp_path_factory):
    """A run with checkpoints of steps 1 and 2, and the state of the second."""
    folder = tmp_path_factory.mktemp("whole")
    training, batches = make(), synthetic()
    state = training.init_state(training.sharded.init_params(0))
    checkpoints = Checkpoints(folder, notes={"config": "A = 1"})
    for step in (1, 2):
        state, _ = advance(training, state, batches, 1)
        checkpoints.save(step, state, batches)
    checkpoints.close()
    return training, jax.device_get(state), folder


@pytest.mark.slow
@pytest.mark.parametrize("damage", ["flip", "truncate", "delete"])
def test_damage_to_any_file_is_named_or_harmless(damage, two_checkpoints, tmp_path):
    """Every file of a checkpoint in turn: a sentence that offers the one before, or the same numbers."""
    training, state, whole = two_checkpoints
    rng, named = np.random.default_rng(0), set()
    files = sorted(file for file in (whole / "checkpoints" / "2").rglob("*") if file.is_file())
    for number, original in enumerate(files):
        run = tmp_path / str(number)
        shutil.copytree(whole, run)
        file = run / original.relative_to(whole)
        content = bytearray(file.read_bytes())
        if damage == "delete":
            file.unlink()
        elif damage == "truncate":
            file.write_bytes(content[: len(content) // 2])
        else:
            content[rng.integers(len(content))] ^= 1 << rng.integers(8)
            file.write_bytes(content)
        batches = synthetic()
        try:
            checkpoints = Checkpoints(run)
            assert finished_steps(run) == [1, 2], file
            restored = checkpoints.restore(2, training.abstract_state, batches)
            jax.tree.map(np.testing.assert_array_equal, jax.device_get(restored), state)
            assert batches.position == 2
        except UserError as error:
            named.add(str(original.relative_to(whole / "checkpoints" / "2")))
            assert "damaged" in error.sentence and "is of step 1. To continue from there, move" in error.sentence, error
        shutil.rmtree(run)
    assert {"info/metadata", "data/position", "params/manifest.ocdbt", "rest/manifest.ocdbt"} <= named
    assert any(name.startswith("params/ocdbt.process_0/d/") for name in named)


@pytest.mark.slow
def test_an_info_that_was_changed_and_is_still_json_is_damaged(two_checkpoints, tmp_path):
    path = epath.Path(tmp_path) / "2"
    shutil.copytree(two_checkpoints[2] / "checkpoints" / "2", path)
    info = read_info(path)
    (path / layout.INFO).write_text(json.dumps({**info, "processes": info["processes"] + 1}))
    with pytest.raises(UserError, match="info/metadata differs from what was saved"):
        read_info(path)


@pytest.mark.slow
def test_of_two_checkpoints_the_damaged_one_is_named(two_checkpoints, tmp_path):
    """Runs of a decoder and an encoder, of which the encoder's second checkpoint is damaged."""
    training, _, whole = two_checkpoints
    for name in ("main", "encoder"):
        shutil.copytree(whole, tmp_path / name)
    path = tmp_path / "encoder" / "checkpoints" / "2" / "params"
    config = RestoreCheckpointConfig(others={"encoder": str(tmp_path / "encoder")}, assignment_map=[("(.*)", r"encoder:\1")])
    sharded = training.sharded
    load = lambda: load_params(find(str(tmp_path / "main")), sharded.abstract_params, sharded.model.axes, config)
    load()
    largest = max((file for file in path.rglob("*") if file.is_file()), key=lambda file: file.stat().st_size)
    largest.write_bytes(largest.read_bytes()[:1000])
    with pytest.raises(UserError, match=rf"{path} is damaged.*is of step 1.*mv {path.parent} {tmp_path / 'encoder'}"):
        load()


def test_an_outage_is_not_called_damage(tmp_path):
    from etils import epath

    from t5x_lab.checkpoints.verification import explain_damage

    for error, match in (
        (ValueError("UNAVAILABLE: try again"), "could not be read"),
        (PermissionError(13, "no"), "could not be"),
    ):
        with pytest.raises(UserError, match=match) as caught, explain_damage(epath.Path(tmp_path)):
            raise error
        assert "damaged" not in caught.value.sentence
    with pytest.raises(jax.errors.JaxRuntimeError), explain_damage(epath.Path(tmp_path)):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")


def save_steps(model_dir, rules, steps, metrics=None):
    """Tiny checkpoints of these steps; the steps left."""
    training, batches = make(), synthetic()
    state = training.init_state(training.sharded.init_params(0))
    read_metric = lambda step, metric: (metrics or {}).get(step, {}).get(metric, math.nan)
    checkpoints = Checkpoints(model_dir, rules, read_metric=read_metric)
    for step in steps:
        checkpoints.save(step, state, batches)
        checkpoints.wait()
        if step == 2:
            (model_dir / "checkpoints" / "2" / "PINNED").touch()
    checkpoints.close()
    return finished_steps(model_dir)


@pytest.mark.slow
def test_each_rule_keeps_its_own(tmp_path):
    """The newest two, multiples of five, the lowest loss (of step 3; step 4's is not a number), and the pinned."""
    rules = SaveCheckpointConfig(keep=2, keep_period=5, best_metric="eval/t/loss")
    losses = {3: 1.0, 4: float("nan"), 6: 1.5, 8: 2.0}
    metrics = {step: {"eval/t/loss": loss} for step, loss in losses.items()}
    assert save_steps(tmp_path / "run", rules, range(1, 9), metrics) == [2, 3, 5, 7, 8]
    metrics |= {9: {"eval/t/loss": 0.5}}
    assert save_steps(tmp_path / "run", rules, [9], metrics) == [2, 5, 8, 9], "3 is no longer the best"


@pytest.mark.slow
def test_the_best_of_each_of_two_metrics_stays(tmp_path):
    best = {"eval/t/loss": "lowest", "infer/t/accuracy": "highest"}
    rules = SaveCheckpointConfig(keep=1, best_metric=best)
    metrics = {step: {"eval/t/loss": abs(step - 3), "infer/t/accuracy": -abs(step - 5)} for step in range(1, 9)}
    assert save_steps(tmp_path / "run", rules, [1, 2, 3, 4, 5, 6, 7, 8], metrics) == [2, 3, 5, 8]  # 2 is pinned
    with pytest.raises(UserError, match='best_is is "smallest"'):
        SaveCheckpointConfig(best_metric={"eval/t/loss": "smallest"})


@pytest.mark.slow
def test_all_are_kept_where_keep_is_none(tmp_path):
    assert save_steps(tmp_path / "run", SaveCheckpointConfig(keep=None), range(1, 7), {}) == [1, 2, 3, 4, 5, 6]


class Storage:
    """Checkpoints on storage that fails while `broken`, when a save begins or while its files are written."""

    directory = "somewhere"

    def __init__(self, at: str):
        self.at, self.broken, self.tried, self.saved, self.cleaned = at, True, [], [], 0
        self._pending = None

    def save(self, step, state, batches, notes):
        self.wait()
        if step in self.saved:
            return
        self.tried.append(step)
        if self.broken and self.at == "begin":
            raise OSError(28, "No space left on device")
        self._pending = step

    def is_busy(self):
        return False

    def wait(self):
        if self._pending is not None:
            step, self._pending = self._pending, None
            if self.broken:
                raise ValueError("RESOURCE_EXHAUSTED: no space left")
            self.saved.append(step)

    def recover(self):
        self.cleaned += 1


@pytest.mark.parametrize("at", ["begin", "background"])
def test_a_failing_save_is_tried_again_until_it_works_or_the_time_is_up(at, monkeypatch):
    from t5x_lab.checkpoints import saving

    now = [0.0]
    monkeypatch.setattr(saving.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(saving.time, "sleep", lambda seconds: now.__setitem__(0, now[0] + seconds))

    def saver(storage, **rules):
        messages.clear()
        return saving.Saver(storage, SaveCheckpointConfig(period=10, **rules), None, log=messages.append)

    def steps(checkpointer, first, last):
        for step in range(first, last):
            now[0] += 1.0
            if checkpointer.due(step):
                checkpointer.save(step, None)

    messages: list[str] = []
    storage = Storage(at)
    tried = saver(storage, retry_minutes=1)
    steps(tried, 1, 40)
    # 30 seconds of pauses that double: 1, 2, 4, 8 and 16 (a failure behind the scenes is seen a step later).
    assert storage.tried[0] == 10 and 4 <= len(storage.tried) <= 8 and not storage.saved and storage.cleaned == len(messages)
    assert "could not be saved" in messages[0] and "no space left" in messages[0].lower()
    storage.broken = False
    steps(tried, 40, 70)
    assert storage.saved[-2:] == [50, 60] and any("Saving works again" in line for line in messages)
    tried.finish()
    assert storage.saved[-1] == 60

    with pytest.raises(saving.SaveFailed, match="Saving was retried for 1 minutes. Earlier checkpoints are intact") as failed:
        steps(saver(Storage(at), retry_minutes=1), 1, 400)
    assert failed.value.status == 1, "which is not a user's mistake"
    tried = saver(Storage(at), retry_minutes=1, on_failure="go_on")
    steps(tried, 1, 401)  # trains on
    with pytest.raises(saving.SaveFailed):  # but cannot end without
        tried.finish()

    storage = Storage(at)
    tried = saver(storage, retry_minutes=1)
    monkeypatch.setattr(saving.time, "sleep", lambda seconds: setattr(storage, "broken", False))
    tried.save(7, None)
    tried.finish()
    assert storage.saved == [7]


def test_a_failed_save_does_not_replace_the_next_one(monkeypatch):
    """The failure of step 27 is found when step 30, the last one, is saved."""
    from t5x_lab.checkpoints import saving

    monkeypatch.setattr(saving.time, "sleep", lambda seconds: None)
    storage, messages = Storage("background"), []
    storage.is_busy = lambda: True
    saver = saving.Saver(storage, SaveCheckpointConfig(), None, log=messages.append)
    saver.save(27, None)
    storage.recover = lambda: setattr(storage, "broken", False)
    saver.save(30, None)
    assert "Step 27 could not be saved" in messages[0]
    saver.finish()
    assert storage.saved == [30]


@pytest.mark.parametrize("limit, seconds", [(None, 600), (90.0, 90)])
def test_a_stopped_run_retries_its_last_save_for_the_time_of_grace(limit, seconds, monkeypatch):
    """A cluster kills the process soon after SIGTERM, so that retrying for longer would end without a message."""
    from t5x_lab.checkpoints import saving

    now = [0.0]
    monkeypatch.setattr(saving.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(saving.time, "sleep", lambda pause: now.__setitem__(0, now[0] + pause))
    saver = saving.Saver(Storage("begin"), SaveCheckpointConfig(retry_minutes=10), None, log=lambda line: None)
    saver.save(7, None)
    with pytest.raises(saving.SaveFailed, match="Earlier checkpoints are intact"):
        saver.finish(limit)
    assert seconds <= now[0] < seconds + 61 and (limit is None or now[0] <= limit + 1)


PERMANENT = [
    PermissionError(13, "Permission denied"),
    OSError(30, "Read-only file system"),
    FileNotFoundError(2, "The specified bucket does not exist"),
    ValueError("PERMISSION_DENIED: Error writing 'gs://bucket/run': HTTP response code: 403"),
    ValueError("NOT_FOUND: The specified bucket does not exist"),
]


@pytest.mark.parametrize("error", PERMANENT, ids=lambda error: str(error)[:20])
def test_a_permanent_error_ends_the_run_at_once(error):
    from t5x_lab.checkpoints import saving

    storage, messages = Storage("begin"), []
    wrapped = RuntimeError("while saving")
    wrapped.__cause__ = error

    def save(*unused):
        raise wrapped

    storage.save = save
    with pytest.raises(saving.SaveFailed, match="Retrying does not help") as failed:
        saving.Saver(storage, SaveCheckpointConfig(), None, log=messages.append).save(7, None)
    assert str(error).partition(":")[2][:20] in str(failed.value) or "while saving" in str(failed.value)
    saver = saving.Saver(storage, SaveCheckpointConfig(on_failure="go_on"), None, log=messages.append)
    saver.save(7, None)
    assert len(messages) == 1 and "Retrying in" in messages[0]


PASSING = [
    ValueError("UNAVAILABLE: HTTP response code: 503"),
    ValueError("UNAUTHENTICATED: the token has expired"),
    OSError(28, "No space left on device", "/runs/403/PERMISSION_DENIED"),
]


@pytest.mark.parametrize("error", PASSING, ids=lambda error: str(error)[:20])
def test_an_error_that_may_pass_is_retried(error):
    from t5x_lab.checkpoints import saving

    error.__context__ = PermissionError(1, "which was handled")
    storage, messages = Storage("begin"), []

    def save(*unused):
        raise error

    storage.save = save
    saving.Saver(storage, SaveCheckpointConfig(), None, log=messages.append).save(7, None)
    assert "Retrying in 1 s" in messages[0]


def test_a_run_is_saved_by_the_clock_too(monkeypatch):
    from t5x_lab.checkpoints import saving

    now = [0.0]
    monkeypatch.setattr(saving.time, "monotonic", lambda: now[0])
    storage = Storage("begin")
    storage.broken = False
    saver = saving.Saver(storage, SaveCheckpointConfig(period=100, minutes=5, keep_period=30), None)
    for step in range(1, 101):
        now[0] += 16.0
        if saver.due(step):
            saver.save(step, None)
    saver.finish()
    assert storage.saved == [19, 30, 49, 60, 79, 90, 100]


def test_a_checkpoint_of_format_2_is_read_under_todays_names(tmp_path):
    training = make(architecture="encoder_decoder")
    params = random_params(training.sharded.model)
    old = {"cross_attention": "encoder_decoder_attention"}
    old |= {f"{name}_norm": f"pre_{name}_layer_norm" for name in ("self_attention", "cross_attention", "mlp")}
    rename = lambda tree: {old.get(k, k): rename(v) if isinstance(v, dict) else v for k, v in tree.items()}
    path = epath.Path(tmp_path) / "checkpoints" / "3"
    save_params(path, rename(params), step=3)
    file = path / "info" / "metadata"
    info = {**json.loads(file.read_text()), "format": 2}
    file.write_text(json.dumps({**info, "sha256": layout._digest(info)}))

    state = load(tmp_path, training.sharded)
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(state), params)
    assert verify(path)
    with pytest.raises(UserError, match="was written by an older t5x_lab.*carry"):
        Checkpoints(tmp_path).restore(3, training.abstract_state, None)
