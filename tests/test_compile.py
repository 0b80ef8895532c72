"""Programs compiled for devices that are not there; what is counted in them; what memory the step does not take."""

import dataclasses
import json
import math
import sys

import commands
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import exhaustive, random_batch, tiny_config

from t5x_lab.cli.main import main
from t5x_lab.config.errors import UserError
from t5x_lab.data.config import DataConfig
from t5x_lab.data.vocabularies.config import ByteVocabulary
from t5x_lab.models.config import ModelConfig
from t5x_lab.models.model import Model
from t5x_lab.networks.layer_kinds import LayerKind
from t5x_lab.observe.collectives import collectives
from t5x_lab.observe.hardware import GiB, chip
from t5x_lab.ops.cross_entropy import CrossEntropy, cross_entropy
from t5x_lab.optim.optimizers import Adafactor
from t5x_lab.optim.schedules import LearningRate
from t5x_lab.partitioning.mesh import MeshShape
from t5x_lab.partitioning.topologies import topology_devices
from t5x_lab.runs import compile as compiling
from t5x_lab.runs.compile import Report, compile_step, find_best, search, to_text
from t5x_lab.runs.config.gin_config import GinConfig
from t5x_lab.runs.model.sharded_model import ShardedModel
from t5x_lab.runs.train.assemble import assemble
from t5x_lab.runs.train.batch import resolve_batch

pytestmark = pytest.mark.slow

TINY = ["models/causal_decoder/tiny.gin", "objectives/full_lm.gin"]
COMMON = ["TRAIN_STEPS = 1", 'MODEL_DIR = "unused"', 'MIXTURE_OR_TASK_NAME = "sotu"']


@pytest.fixture(autouse=True)
def _flags_that_libtpu_knows(monkeypatch):
    """It reads the flags too, when it is loaded, and ends the process for one that is a CPU's alone."""
    jax.devices()
    monkeypatch.setenv("XLA_FLAGS", FLAGS["XLA_FLAGS"])


FLAGS = {"XLA_FLAGS": "--xla_backend_optimization_level=0"}


def compile_command(*flags):
    return commands.run("compile", *flags, "--gin.MIXTURE_OR_TASK_NAME=sotu", environment=FLAGS)


def tiny_run(*bindings):
    return GinConfig(TINY, [*COMMON, *bindings]).run()


@pytest.mark.exhaustive
def test_a_step_for_two_slices_of_a_tpu_that_is_not_there():
    flags = [*(f"--gin_file={file}" for file in TINY), "--gin.BATCH_SIZE=16", "--gin.MESH=fsdp=2,tensor=2", "--json"]
    result = compile_command("--topology=v5e:2x2", "--num_slices=2", *flags)
    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout)
    run = tiny_run("BATCH_SIZE = 16")
    model = Model(run.model)
    assert report["devices"] == 8 and report["mesh"] == {"replica": 2, "data": 1, "fsdp": 2, "sequence": 1, "tensor": 2}
    assert report["num_parameters"] == model.num_parameters and report["fits"] is True
    assert report["model_flops_per_step"] == 16 * run.model.network.flops(0, 626)
    size = report["bytes_per_device"]
    assert size["peak"] == size["arguments"] + size["temporaries"] + size["outputs"] <= size["limit"] == 16 * GiB
    # Every device holds at least its share of the parameters, which the slices do not split, and of the batch.
    assert size["arguments"] >= model.num_parameters * 4 / 4 + 6 * 16 * 626 * 4 / 4
    assert size["arguments"] < 3 * (model.num_parameters * 4 / 4 + 6 * 16 * 626 * 4 / 4)
    assert report["floor_seconds"]["compute"] > 0 and report["floor_seconds"]["memory"] > 0


ENCODER_DECODER = (
    'TransformerConfig.architecture = "encoder_decoder"', "TransformerConfig.num_encoder_layers = 2", "OBJECTIVE = 'prefix_lm'",
    "DROPOUT_RATE = 0.1", "TransformerConfig.dropout_rate = 0.1", 'TASK_FEATURE_LENGTHS = {"inputs": 64, "targets": 64}',
)  # fmt: skip


@pytest.mark.parametrize(
    "bindings, numbers",
    [
        exhaustive(('MESH = "fsdp=4"', 'TASK_FEATURE_LENGTHS = {"targets": 64}'), (1, 2, 4)),
        exhaustive(('MESH = "fsdp=2,tensor=2"', *ENCODER_DECODER), (1, 2, 4)),
        exhaustive(('MESH = "data=4"', 'TASK_FEATURE_LENGTHS = {"targets": 64}'), (1, 2)),
        exhaustive(('MESH = "data=2,tensor=2"', *ENCODER_DECODER), (1,)),
    ],
    ids=["decoder", "encoder_decoder with dropout", "replicated decoder", "partly replicated encoder_decoder"],
)
def test_every_gradient_crosses_slices_once_a_step_however_many_microbatches(bindings, numbers):
    """Gradients cross slices in float32, each device its share. No other large arrays cross slices."""
    sent = []
    for microbatches in numbers:
        run = tiny_run("BATCH_SIZE = 64", f"MICROBATCHES = {microbatches}", *bindings)
        report = compile_step(run, devices=topology_devices("v5e:2x2", num_slices=2))
        received = report.between_slices["recv"]["bytes"]
        assert received == pytest.approx(report.between_slices["send"]["bytes"], rel=0.01), report
        sent.append(report.between_slices["send"]["bytes"])
    assert max(sent) < 1.01 * min(sent), sent
    assert report.num_parameters <= sent[0] < 1.1 * report.num_parameters + 2**14, (sent, report.num_parameters)


@pytest.mark.slow
def test_a_program_that_does_not_fit_says_by_how_much_and_what_to_change():
    run = ["--gin_file=models/t5_1_1/base.gin", "--gin_file=objectives/span_corruption.gin", "--gin.BATCH_SIZE=512"]
    result = compile_command("--topology=v5e:1x1", *run)
    assert result.returncode == 0, result.stderr
    assert "does not fit: " in result.stdout and "GiB too much" in result.stdout
    assert "remat_policy=boundaries" in result.stdout


@pytest.mark.parametrize("mode", ["train", "eval", "predict"])
def test_every_mode_compiles_for_the_local_devices(mode):
    run = tiny_run("BATCH_SIZE = 8", 'TASK_FEATURE_LENGTHS = {"targets": 16}', 'MESH = "data=2,fsdp=2,tensor=2"')
    report = compile_step(run, mode)
    assert report.fits and report.devices == 8 and report.bytes_per_device["limit"] is None
    # A prompt of 16 tokens is read before 16 more are written.
    forward = run.model.network.flops(0, 32 if mode == "predict" else 16) * 8 / 3
    assert report.model_flops_per_step == round(forward * (3 if mode == "train" else 1))
    assert "compiled; the memory size of this device is unknown" in to_text(report)


def test_one_text_is_split_over_devices():
    settings = ("BATCH_SIZE = 1", "DATA_SHARDS = 1", 'TASK_FEATURE_LENGTHS = {"targets": 1024}')
    single = compile_step(tiny_run(*settings), devices=jax.devices()[:1])
    split = compile_step(tiny_run(*settings, 'MESH = "sequence=4"'), devices=jax.devices()[:4])
    assert split.bytes_per_device["temporaries"] < single.bytes_per_device["temporaries"] / 3
    assert (
        split.bytes_per_device["arguments"] < single.bytes_per_device["arguments"] / 2
    )  # parameters and their slots are split
    # Queries, keys, values and results of 2 layers with 4 heads of 3, and the table of 32,128 tokens, forward and backward.
    heads, table = 1024 * 4 * 3, 32128 * 8
    assert (
        0 < split.collectives["all-to-all"]["bytes"] <= 4 * (2 * 2 * 4 * heads + 2 * 2 * table) / 4
    )  # float32, a quarter each


def test_arguments_are_the_bytes_of_the_state_and_the_batch():
    run = tiny_run("BATCH_SIZE = 8", 'TASK_FEATURE_LENGTHS = {"targets": 16}')
    sharded = ShardedModel(run.model, MeshShape(1, 1, 1), jax.devices()[:1])
    training = assemble(sharded, run.optimizer, batch_size=8, microbatches=1, seed=0)
    state = sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(training.abstract_state))
    shapes = {name: x.shape for name, x in resolve_batch(run.data, "causal_decoder").features.items()}
    used = {name: shape for name, shape in shapes.items() if name != "decoder_positions"}  # relative biases need none
    report = compile_step(run, devices=jax.devices()[:1])
    assert report.bytes_per_device["arguments"] == state + 4 * sum(math.prod(shape) for shape in used.values())


@pytest.mark.parametrize(
    "flags, says",
    [
        (["--topology=v5e:0x2"], "It must be a TPU generation and the chips along each axis"),
        (["--topology=v5e:4x4", "--gin.BATCH_SIZE=8", "--search"], "cannot be split over"),
        (["--topology=v5e:4x4", "--gin.BATCH_SIZE=8", "--mode=eval"], "cannot be split over"),
        (["--topology=v4"], "It must be a TPU generation and the chips along each axis"),
        (["--topology=v9:2x2"], 'libtpu has no slice "v9:2x2"'),
        (["--num_slices=2"], "--num_slices needs a --topology"),
        (["--topology=v5e:2x2", "--mode=serve"], '--mode is "serve"'),
        (["--topology=v5e:2x2", "--gin.MESH=fsdp=3"], "multiple of 3 devices, but there are 4"),
        (["--topology=v5e:2x2", "--num_slices=2", "--gin.MESH=replica=1,fsdp=8"], "there are 2 slices"),
    ],
)
def test_mistakes_are_sentences(flags, says, capfd):
    argv = ["compile", *flags, *(f"--gin_file={file}" for file in TINY), "--gin.MIXTURE_OR_TASK_NAME=sotu"]
    assert main(argv) == 2
    error = capfd.readouterr().err
    assert says in error and "Traceback" not in error, error


@pytest.mark.parametrize("mesh", ["data=-1", "data=-1,tensor=4", "data=4,fsdp=2,tensor=8"])
def test_each_process_holds_the_rows_of_its_devices_and_each_row_has_one_owner(mesh, monkeypatch):
    """Sixteen hosts of four chips each; the tensor axes cross hosts."""
    sharded = ShardedModel(
        ModelConfig(tiny_config("causal_decoder", num_heads=8)), MeshShape.parse(mesh), topology_devices("v4:4x4x4")
    )
    where = sharded.batch_sharding.devices_indices_map((128, 3))
    owners = np.zeros(128, int)
    for process in range(16):
        monkeypatch.setattr(jax, "process_index", lambda process=process: process)
        sharded.__dict__.pop("_shards", None)
        rows = sharded.rows(128)
        held = [range(128)[index[0]] for device, index in where.items() if device.process_index == process]
        assert rows.held.tolist() == sorted(set().union(*held)) and set(rows.owned) <= set(rows.held)
        owners[rows.owned] += 1
    assert (owners == 1).all()


def test_missing_libtpu_is_one_sentence(monkeypatch):
    monkeypatch.setitem(sys.modules, "libtpu", None)
    with pytest.raises(UserError, match=r"pip install 't5x_lab\[compile\]'"):
        topology_devices("v5e:2x2")


HLO = """HloModule m

%add (a: f32[], b: f32[]) -> f32[] {
  ROOT %s = f32[] add(%a, %b)
}

%scatter (p: f32[16]) -> f32[2] {
  ROOT %rs = f32[2]{0} reduce-scatter(%p), dimensions={0}, to_apply=%add
}

%inner (p: (s32[], bf16[4,8])) -> (s32[], bf16[4,8]) {
  %g = bf16[4,8]{1,0} collective-permute(%x), source_target_pairs={{0,1}}
}

%compute_of_channel_7 (p: f32[16]) -> f32[16] {
  ROOT %again = f32[16]{0} all-reduce(%p), channel_id=7, to_apply=%add
}

%all-reduce-scatter.1 (p: f32[16]) -> f32[4] {
  %whole = f32[16]{0} all-reduce(%p), channel_id=8, to_apply=%add
}

%inner_condition (p: (s32[], bf16[4,8])) -> pred[] {
  %limit = s32[]{:T(128)} constant(3)
  ROOT %lt = pred[] compare(%i, %limit), direction=LT
}

%outer (p: (s32[], f32[16])) -> (s32[], f32[16]) {
  %w = (s32[], bf16[4,8]) while(%t), condition=%inner_condition, body=%inner
  %r = f32[16]{0} all-reduce(%y), channel_id=7, to_apply=%add
  %r2 = f32[16]{0} fusion(%y), kind=kCustom, calls=%compute_of_channel_7
  %rs = f32[4]{0} fusion(%y), kind=kCustom, calls=%all-reduce-scatter.1
  %s = (f32[2]{0}, f32[16]{0}) all-gather-start(%z), dimensions={0}
  %q = ((f32[16]{0}), f32[2]{0}, u32[]) async-start(%z), calls=%scatter
  %u = f32[2]{0} async-done(%q), calls=%scatter
}

%of_hosts (p: f32[16]) -> f32[16] {
  %sent = (f32[16]{0:T(8,128)}, u32[]{:S(2)}, token[]) send(%p, %t), channel_id=9, is_host_transfer=true, frontend_attributes={_xla_host_transfer_handler_name="xla_megascale_runtime"}
  %sent-done = token[] send-done(%sent), channel_id=9, is_host_transfer=true
  %got = (f32[16]{0}, u32[], token[]) recv(%t), channel_id=9, is_host_transfer=true, frontend_attributes={_xla_host_transfer_handler_name="xla_megascale_runtime"}
  %printed = (f32[16]{0}, u32[], token[]) send(%p, %t), channel_id=11, is_host_transfer=true
  %piece = f32[4]{0} reduce-scatter(%p), channel_id=9, dimensions={0}, to_apply=%add
  %swapped = f32[16]{0} all-to-all(%p), channel_id=8, dimensions={0}
}

ENTRY %main (p0: f32[16]) -> f32[16] {
  %w2 = (s32[], f32[16]) while(%t2), condition=%c, body=%outer, backend_config={"known_trip_count":{"n":"5"}}
  %w3 = (s32[], f32[16]) while(%t3), condition=%inner_condition, body=%of_hosts
  %last = (f32[16]{0}, bf16[2]{0}) all-reduce-start(%a, %b), to_apply=%add
}
"""


def test_collectives_in_loops_count_as_often_as_the_loops_run():
    """Collectives of different kinds may have the same channel."""
    assert collectives(HLO) == {
        "all-gather": {"count": 5, "bytes": 5 * 64},
        "all-reduce": {"count": 6, "bytes": 5 * 64 + 68},
        "reduce-scatter": {"count": 13, "bytes": 5 * 8 + 5 * 16 + 3 * 16},
        "all-to-all": {"count": 3, "bytes": 3 * 64},
        "collective-permute": {"count": 15, "bytes": 15 * 64},
        "send": {"count": 3, "bytes": 3 * 64},
        "recv": {"count": 3, "bytes": 3 * 64},
    }


def test_collectives_of_a_real_program():
    """A product whose contracted dimension is split needs one sum over devices; seven in a scan need seven."""
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    split = jax.NamedSharding(mesh, jax.P(None, "x"))
    whole = jax.NamedSharding(mesh, jax.P())

    def program(x, y):
        def body(carry, _):
            product = jax.lax.with_sharding_constraint(carry @ y.T, whole)
            return jax.lax.with_sharding_constraint(jnp.tile(product, (1, 4)), split), None

        return jax.lax.scan(body, x, length=7)[0]

    shape = jax.ShapeDtypeStruct((16, 64), jnp.float32, sharding=split)
    rows = jax.ShapeDtypeStruct((16, 64), jnp.float32, sharding=split)
    result = collectives(jax.jit(program, out_shardings=split).lower(shape, rows).compile().as_text())
    assert result["all-reduce"] == {"count": 7, "bytes": 7 * 16 * 16 * 4}


def fake(run, fits_below):
    """A report as if memory were rows of a microbatch times what the policy keeps."""
    num_arrays = {"everything": 9, "products": 5, "mlp": 3, "attention": 3, "boundaries": 1}[run.model.network.remat_policy]
    peak = run.data.batch_size // run.microbatches * num_arrays
    sizes = {"arguments": 0, "temporaries": peak, "outputs": 0, "peak": peak, "limit": fits_below}
    again = run.data.batch_size * (9 - num_arrays)
    settings = (run.data.batch_size, run.microbatches, run.model.network.remat_policy)
    floors = {"compute": None, "memory": None}
    flops = 100 * run.data.batch_size
    return Report("fake", 8, {}, "train", *settings, 1, sizes, peak <= fits_below, {}, {}, flops, again, floors, 0.0)


@pytest.mark.parametrize(
    "fits_below, expected", [(144, (16, 1, "everything")), (90, (16, 1, "products")), (8, (16, 2, "boundaries")), (3, None)]
)
def test_search_returns_what_recomputes_least_and_fits(monkeypatch, fits_below, expected):
    monkeypatch.setattr(compiling, "compile_step", lambda run, **unused: fake(run, fits_below))
    monkeypatch.setattr(compiling, "chip", lambda kind: chip("TPU v4"))
    reports = list(search(tiny_run("BATCH_SIZE = 16")))
    result = find_best(reports)
    assert (result and (result.batch_size, result.microbatches, result.remat_policy)) == expected


def temporaries(function, *arguments) -> int:
    return jax.jit(function).lower(*arguments).compile().memory_analysis().temp_size_in_bytes


@pytest.mark.parametrize("vocab_size", [32_128, 250_112])
def test_cross_entropy_takes_the_memory_of_a_chunk_not_of_all_logits(vocab_size):
    """T5's and mT5's vocabularies, 16,384 tokens of 64: all logits in float32 are 2.0 and 15.3 GiB."""
    hidden = jax.ShapeDtypeStruct((32, 512, 64), jnp.bfloat16)
    matrix = jax.ShapeDtypeStruct((64, vocab_size), jnp.float32)
    targets, weights = (jax.ShapeDtypeStruct((32, 512), dtype) for dtype in (jnp.int32, jnp.float32))

    def fused(hidden, matrix, targets, weights):
        return cross_entropy(hidden, matrix, targets, weights, CrossEntropy(z_loss=1e-4))[0]

    def plain(hidden, matrix, targets, weights):
        logits = jnp.einsum("BTD,DV->BTV", hidden.astype(jnp.float32), matrix)
        log_z = jax.nn.logsumexp(logits, axis=-1)
        target = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
        return jnp.sum((log_z - target + 1e-4 * log_z**2) * weights)

    logits = 32 * 512 * vocab_size * 4
    chunked, whole = (
        temporaries(jax.grad(function, argnums=(0, 1)), hidden, matrix, targets, weights) for function in (fused, plain)
    )
    print(f"{vocab_size}: chunked {chunked / GiB:.2f} GiB, plain {whole / GiB:.2f} GiB, logits {logits / GiB:.2f} GiB")
    assert whole >= logits and chunked < logits / 3


@pytest.mark.parametrize("architecture", ["encoder_decoder", "prefix_decoder"])
def test_no_attention_weights_are_kept_for_the_backward_pass(architecture):
    """Nothing that the scans over layers hand to the backward pass has both a query's and a key's length."""
    config = tiny_config(architecture, dtype="bfloat16", emb_dim=40, remat_policy="products")
    model = Model(ModelConfig(config))
    batch = random_batch(architecture, seed=0)
    lengths = {x.shape[1] for x in batch.values()}
    program = jax.make_jaxpr(jax.grad(lambda params: model.loss(params, batch).objective))(model.abstract_params)
    shapes = [v.aval.shape for e in program.eqns if e.primitive.name == "scan" for v in e.outvars]
    assert any(len(shape) == 5 for shape in shapes), "queries, keys and values are kept"
    assert not [shape for shape in shapes if len(shape) >= 4 and sum(size in lengths for size in shape[2:]) >= 2]


@pytest.mark.parametrize("architecture", [exhaustive("causal_decoder"), "encoder_decoder"])
def test_the_program_of_a_pattern_does_not_grow_with_the_number_of_layers(architecture):
    """Local and global layers in a scan, also with a remainder."""
    pattern, lines = (LayerKind(window=4), LayerKind(window=4), LayerKind()), set()
    for layers in (6, 24, 49):
        encoder = {"num_encoder_layers": layers} if architecture == "encoder_decoder" else {}
        config = tiny_config(architecture, num_decoder_layers=layers, layer_pattern=pattern, **encoder)
        model, batch = Model(ModelConfig(config)), random_batch(architecture, seed=0)
        program = jax.make_jaxpr(jax.grad(lambda params: model.loss(params, batch).objective))(model.abstract_params)
        lines.add(str(program).count("\n"))
    assert max(lines) - min(lines) < 5


def test_what_a_policy_keeps_falls_from_everything_to_boundaries():
    def saved_bytes(policy):
        model = Model(ModelConfig(dataclasses.replace(tiny_config("encoder_decoder"), remat_policy=policy)))
        batch = random_batch("encoder_decoder", seed=0)
        program = jax.make_jaxpr(jax.grad(lambda params: model.loss(params, batch).objective))(model.abstract_params)
        forward = [e for e in program.eqns if e.primitive.name == "scan"][:2]
        return sum(math.prod(v.aval.shape) for e in forward for v in e.outvars)

    sizes = [saved_bytes(policy) for policy in ("everything", "products", "mlp", "boundaries")]
    assert sizes == sorted(sizes, reverse=True) and len(set(sizes)) == 4
    assert saved_bytes("boundaries") < saved_bytes("attention") < saved_bytes("products")


def test_peak_memory_falls_as_microbatches_grow():
    network = tiny_config("encoder_decoder", emb_dim=64, mlp_dim=256, remat_policy="boundaries")
    sharded = ShardedModel(ModelConfig(network), MeshShape(1, 1, 1), jax.devices()[:1])
    peaks = []
    for microbatches in (1, 2, 4, 8):
        optimizer = Adafactor(LearningRate("constant", 0.01))
        training = assemble(sharded, optimizer, batch_size=128, microbatches=microbatches, seed=0)
        batch = {
            f"{side}_{name}": jax.ShapeDtypeStruct((128, 64), jnp.int32)
            for side, name in [
                ("encoder", "input_tokens"),
                ("decoder", "input_tokens"),
                ("decoder", "target_tokens"),
                ("decoder", "loss_weights"),
            ]
        }
        compiled = training.step.lower(training.abstract_state, batch).compile()
        peaks.append(compiled.memory_analysis().temp_size_in_bytes)
    assert peaks == sorted(peaks, reverse=True) and peaks[-1] < 0.4 * peaks[0], peaks


@pytest.mark.parametrize(
    "architecture, objective, lengths",
    [("encoder_decoder", "span_corruption", {"inputs": 32}), ("prefix_decoder", "prefix_lm", {"targets": 63})],
)
def test_the_features_of_a_batch_are_told_without_opening_a_task(architecture, objective, lengths):
    from t5x_lab.data.pipeline.batches import SeqioBatches, resolve_tasks

    data = DataConfig("sotu", lengths, 4, ByteVocabulary(), objective=objective, shards=1)
    batch = next(SeqioBatches(resolve_tasks(data, architecture, 10**6), data, seed=0))
    expected = resolve_batch(data, architecture).features
    assert {name: (x.shape, x.dtype) for name, x in batch.items()} == {name: (x.shape, x.dtype) for name, x in expected.items()}
