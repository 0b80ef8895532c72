"""Bytes that reading a checkpoint takes from the disk, counted by TensorStore: each is read once, and by one process."""

import pathlib

import commands
import jax
import numpy as np
import pytest
import tensorstore as ts
from flax import serialization
from helpers import exhaustive, tiny_config
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from t5x_lab.checkpoints.config import RestoreCheckpointConfig
from t5x_lab.checkpoints.formats import t5x, t5x_lab
from t5x_lab.checkpoints.formats.location import find
from t5x_lab.checkpoints.initial import carry_over, load_params
from t5x_lab.checkpoints.layers import network_parts
from t5x_lab.checkpoints.layout import absolute_path, finish, make_info, named_leaves, read_info
from t5x_lab.checkpoints.lazy_tensors import from_array
from t5x_lab.checkpoints.manager import Checkpoints
from t5x_lab.checkpoints.sharded_arrays import read_each, read_together, to_array
from t5x_lab.checkpoints.verification import verify
from t5x_lab.config.errors import UserError
from t5x_lab.models.config import ModelConfig
from t5x_lab.optim.groups import flat_names
from t5x_lab.optim.optimizers import AdamW
from t5x_lab.partitioning.mesh import MeshShape
from t5x_lab.runs.model.sharded_model import ShardedModel
from t5x_lab.runs.train.assemble import Training, assemble

pytestmark = pytest.mark.slow
# Large enough that the index of the chunks, which readers at one time may read twice, is a small part.
SIZES = dict(num_decoder_layers=4, emb_dim=256, mlp_dim=1024, num_heads=8, head_dim=32, vocab_size=2048)
BACKWARDS = RestoreCheckpointConfig(layers={"decoder": [3, 2, 1, 0]})
HALF = RestoreCheckpointConfig(layers={"decoder": [0, 3]})
CARRY = RestoreCheckpointConfig(carry=("optimizer", "step"))


class NoBatches:
    """Returns the shares for a run without data."""

    def save(self, directory):
        return []

    def needs(self, name):
        return False

    def restore(self, directory, checkpoint):
        pass


def make(mesh: MeshShape, **changes) -> Training:
    config = ModelConfig(tiny_config("causal_decoder", **{**SIZES, **changes}))
    sharded = ShardedModel(config, mesh, mesh.first_of(jax.devices()))
    return assemble(sharded, AdamW(), batch_size=8, microbatches=1, seed=0)


def save(directory: str, mesh: MeshShape) -> None:
    training = make(mesh)
    state = training.init_state(training.sharded.init_params(0))
    rng = np.random.default_rng(0)  # zeros would have no bytes
    fill = lambda x: jax.device_put(rng.normal(size=x.shape).astype(x.dtype), x.sharding) if x.ndim else x
    checkpoints = Checkpoints(directory, notes={"config": "A = 1"})
    checkpoints.save(3, jax.tree.map(fill, state), NoBatches())
    checkpoints.close()


def bytes_read() -> int:
    metrics = ts.experimental_collect_matching_metrics("/tensorstore/kvstore/file/bytes_read")
    return sum(value["value"] for metric in metrics for value in metric["values"])


def size(path) -> int:
    return sum(file.stat().st_size for file in pathlib.Path(path).rglob("*") if file.is_file())


def shares_read(directory: str, mesh: MeshShape) -> dict[str, float]:
    """Returns the bytes that each way of restoring reads, as shares of the bytes it needs. Orbax may cache bytes it just wrote."""
    training, place, shares = make(mesh), find(directory), {}
    sharded, path = training.sharded, absolute_path(directory) / "checkpoints" / "3"

    def measure(name, read, needs):
        before = bytes_read()
        result = read()
        shares[name] = (bytes_read() - before) / needs
        return result

    load = lambda target=sharded, **rules: load_params(place, target.abstract_params, target.model.axes, **rules)
    params_size, rest_size = size(path / "params"), size(path / "rest")
    checkpoints = Checkpoints(directory)
    restore = lambda: checkpoints.restore(3, training.abstract_state, None)
    state = measure("restore", restore, params_size + rest_size)
    checkpoints.close()
    params = measure("parameters", load, params_size)
    backwards = measure("rules", lambda: load(config=BACKWARDS), params_size)
    half = make(mesh, num_decoder_layers=2).sharded
    measure("half of the layers", lambda: load(half, config=HALF), params_size)
    args = (training.init_state(params), sharded.abstract_params, sharded.model.axes, CARRY)
    carried = measure("carry", lambda: carry_over(place, *args), rest_size)
    gathered = jax.jit(lambda tree: tree, out_shardings=sharded.replicated)
    on_host = lambda tree: named_leaves(jax.device_get(gathered(tree)))
    actual, expected = on_host(backwards), on_host(params)
    for name, x in actual.items():
        np.testing.assert_array_equal(x, expected[name][::-1] if "/layers/" in name else expected[name])
    jax.tree.map(np.testing.assert_array_equal, on_host(carried.opt_state), on_host(state.opt_state))
    return shares


@pytest.mark.parametrize("saved_on", [*map(exhaustive, (MeshShape(1, 1, 1), MeshShape(1, 8, 1))), MeshShape(2, 2, 2)], ids=str)
def test_nothing_is_read_twice(saved_on):
    save("run", saved_on)
    for mesh in (MeshShape(1, 1, 1), MeshShape(1, 8, 1), MeshShape(2, 2, 2)):
        for name, share in shares_read("run", mesh).items():
            assert 0.5 < share < 1.1, f"{name} on {mesh}: {share:.2f}"
    before = bytes_read()
    verify(absolute_path("run/checkpoints/3"))
    assert (bytes_read() - before) / (size("run/checkpoints/3/params") + size("run/checkpoints/3/rest")) < 1.1


def test_a_converted_checkpoint_is_read_in_parts():
    model, rng = make(MeshShape(1, 1, 1), emb_dim=512).sharded.model, np.random.default_rng(0)
    network = model.config.network
    tensors = {n: from_array(rng.normal(size=part.shape).astype(np.float32)) for n, part in network_parts(network).items()}
    path = absolute_path("run/checkpoints/0")
    t5x_lab.write(path, tensors, network_parts(network), 0, config="A = 1")
    axes = flat_names(model.axes)
    for split in ("embed", "vocab", "mlp", "heads"):
        of_axis = {name: names.index(split) for name, names in axes.items() if split in names}
        for host in range(8):  # as if each of eight read its part
            before, needed = bytes_read(), 0
            tensors = t5x_lab.open_part(path, "params")
            for name, axis in of_axis.items():
                part = tensors[name].shape[axis] // 8
                needed += tensors[name].narrow(axis, host * part, (host + 1) * part).read_all().nbytes
            assert (bytes_read() - before) / needed < 1.1, (split, host)


@pytest.mark.parametrize("scanned", [False, True], ids=["a file a layer", "scanned"])
def test_layers_of_t5x_are_read_once_for_all_devices(scanned):
    """Also where they take more memory than TensorStore keeps."""
    layers, shape = 12, (768, 2048)
    name, root = "target.encoder.{}.mlp.wi.kernel", pathlib.Path("t5x/checkpoint_5")
    layer = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    names = ["encoder"] if scanned else [f"layers_{i}" for i in range(layers)]
    for stored in names:
        size_on_disk = [768, layers, 2048] if scanned else list(shape)
        metadata = {"shape": size_on_disk, "chunks": size_on_disk, "dtype": "<f4", "compressor": None}
        store = {"driver": "file", "path": f"{root.absolute()}/{name.format(stored)}/"}
        array = np.broadcast_to(layer[:, None], size_on_disk) if scanned else layer
        ts.open({"driver": "zarr", "kvstore": store, "metadata": metadata}, create=True).result().write(array).result()
    index = {n: {"mlp": {"wi": {"kernel": f"PLACEHOLDER://{name.format(n)}"}}} for n in names}
    tree = {"target": {"encoder": index}, "state": {"step": np.int32(5)}}
    (root / "checkpoint").write_bytes(serialization.msgpack_serialize({"version": 3, "optimizer": tree}))
    for devices in (1, 8):
        mesh = Mesh(np.array(jax.devices()[:devices]), ("fsdp",))
        sharding = NamedSharding(mesh, P(None, "fsdp"))
        like = jax.ShapeDtypeStruct((layers, *shape), np.float32, sharding=sharding)
        saved, before = t5x.open_as_saved(absolute_path(str(root))), bytes_read()
        tensors = [saved[f"target/encoder/{n}/mlp/wi/kernel"] for n in names]
        pieces = list(enumerate([tensors[0].index(1, i) for i in range(layers)] if scanned else tensors))
        read = to_array(like, pieces, None)
        assert bytes_read() - before < 1.1 * size(root), devices
        np.testing.assert_array_equal(read[layers - 1], layer)


def test_what_no_other_process_has_is_not_copied(monkeypatch):
    """A state that fills more than half of a device's memory is restored too."""
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(4, 2), ("fsdp", "tensor"))
    arrays = {
        "split": jax.device_put(np.zeros((64, 64), np.float32), NamedSharding(mesh, P("fsdp", "tensor"))),
        "copied": jax.device_put(np.ones((64, 64), np.float32), NamedSharding(mesh, P("fsdp"))),
    }
    pointers = lambda array: [shard.data.unsafe_buffer_pointer() for shard in array.addressable_shards]
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    result = read_together(arrays, lambda split: split)
    assert pointers(result["split"]) == pointers(arrays["split"])
    before = pointers(arrays["split"])
    own_arrays = read_each(arrays, lambda name, leaf: leaf)
    assert pointers(own_arrays["split"]) == before and own_arrays["copied"].sharding == arrays["copied"].sharding
    read_each(arrays, lambda name, leaf: leaf + 1)
    assert all(array.is_deleted() for array in arrays.values())


@pytest.mark.parametrize("config", [BACKWARDS, HALF], ids=["all of it", "a part of it"])
def test_what_is_read_by_rules_is_verified_too(config):
    save("run", MeshShape(1, 8, 1))
    path = absolute_path("run/checkpoints/3")
    sharded = make(MeshShape(1, 8, 1), num_decoder_layers=len(config.layers["decoder"])).sharded
    load_params(find("run"), sharded.abstract_params, sharded.model.axes, config)
    info = read_info(path)
    sums = {**info["checksums"], "params/decoder/layers/mlp/wo/kernel": "0" * 16}
    without_checksums = {
        key: value for key, value in info.items() if key not in ("checksums", "sha256", "format", "step", "parameters")
    }
    finish(path, make_info(info["parameters"], 3, **without_checksums, checksums=sums))
    with pytest.raises(UserError, match="params/decoder/layers/mlp/wo/kernel differs from what was saved"):
        load_params(find("run"), sharded.abstract_params, sharded.model.axes, config)


@pytest.mark.parametrize("mesh", [MeshShape(1, 2, 1), *map(exhaustive, (MeshShape(2, 1, 1), MeshShape(1, 1, 2)))], ids=str)
def test_a_process_reads_its_share_and_the_copies_come_from_the_other_one(mesh):
    save("run", MeshShape(1, 1, 1))
    for name, shares in ((name, (share, other[name])) for share_of, other in [commands.call_two(shares_read, "run", mesh)]
                         for name, share in share_of.items()):  # fmt: skip
        assert max(shares) < 0.6 and sum(shares) < 1.1, f"{name}: {shares}"
