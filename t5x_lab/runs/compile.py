"""`t5x_lab compile`: compiles a step for devices that need not be present, and reports memory, collectives and FLOPs."""

import dataclasses
import functools
import math
import pathlib
import re
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from t5x_lab.config.errors import UserError, check_choice
from t5x_lab.decoding.generation import complete
from t5x_lab.decoding.sampling import SamplingConfig
from t5x_lab.networks.config import REMAT_POLICIES
from t5x_lab.networks.network import has_decoder, has_encoder, network_name, recomputed_flops
from t5x_lab.networks.wrapper import replace_remat_policy
from t5x_lab.observe.collectives import BETWEEN_SLICES, collectives
from t5x_lab.observe.hardware import GiB, chip
from t5x_lab.ops.platform import Target, tracing_for
from t5x_lab.runs.config.run_config import RunConfig
from t5x_lab.runs.model.sharded_model import ShardedModel, check_rows
from t5x_lab.runs.train.assemble import assemble_run
from t5x_lab.runs.train.batch import ResolvedBatch, resolve_batch
from t5x_lab.runs.train.training_flops import training_flops

MODES = ("train", "eval", "predict")
_UNITS = {"B": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


@dataclasses.dataclass(frozen=True)
class Report:
    """Memory, communication and compute of a compiled step.

    Attributes:
      topology: name of the slice, or the kind of the local devices.
      devices: number of devices.
      mesh: sizes of the mesh axes.
      mode: "train", "eval" or "predict".
      batch_size, microbatches, remat_policy: settings of the step. The remat policy is None for an LSTM.
      num_parameters: number of parameters.
      bytes_per_device: `arguments`, `temporaries`, `outputs` (without those that reuse arguments), their sum `peak`, and the
        device's `limit`, None if unknown. If the compiler rejects the program, only the peak and the limit that it reports.
      fits: the program fits the device memory.
      collectives: `count` and `bytes` by kind, per device and step, within a slice.
      between_slices: the same for communication with other slices.
      model_flops_per_step: analytic FLOPs with full attention, forward and, in training, backward.
      recomputed_flops_per_step: additional FLOPs of remat.
      floor_seconds: lower bounds of the step time. `compute`: all FLOPs at peak FLOP/s. `memory`: arguments and outputs moved
        once and temporaries twice at memory bandwidth. None if the device is unknown. A causal step can be a little faster
        than `compute`, because attention is counted in full.
      compile_seconds: time to trace and compile on this machine.
    """

    topology: str
    devices: int
    mesh: dict[str, int]
    mode: str
    batch_size: int
    microbatches: int
    remat_policy: str | None
    num_parameters: int
    bytes_per_device: dict[str, int | None]
    fits: bool
    collectives: dict[str, dict[str, int]]
    between_slices: dict[str, dict[str, int]]
    model_flops_per_step: int
    recomputed_flops_per_step: int
    floor_seconds: dict[str, float | None]
    compile_seconds: float


def compile_step(run: RunConfig, mode: str = "train", devices: Sequence | None = None, topology: str | None = None) -> Report:
    """Lowers and compiles a step of a run on its mesh and sharding rules.

    Args:
      run: configuration of the run.
      mode: "train"; "eval", teacher-forced evaluation of a batch; "predict", greedy decoding of a batch of prompts of input
        length.
      devices: devices to compile for. Default: the local devices.
      topology: their name in the report.

    Raises:
      UserError: if the mesh or the batch does not fit the devices, or the architecture cannot generate.
    """
    check_choice("--mode", mode, MODES)
    run = _with_largest_batch(run)
    devices = list(jax.devices() if devices is None else devices)
    sharded = ShardedModel(run.model, run.mesh_shape, devices, run.sharding)
    network = run.model.network
    batch = resolve_batch(run.data, network.architecture)
    lengths = batch.lengths
    rows = run.data.batch_size // (run.microbatches if mode == "train" else 1)
    check_rows(rows, sharded.row_multiple)
    if mode == "predict" and not has_encoder(network):
        lengths = (0, 2 * lengths[1])  # a prompt of the same length as the generated text
    forward_flops = run.data.batch_size * run.model.sequences * round(network.flops(*lengths) / 3)
    flops = run.data.batch_size * training_flops(run, sharded.model, *lengths) if mode == "train" else forward_flops
    sequences = run.data.batch_size * run.model.sequences

    start = time.monotonic()
    program, arguments = _program(run, sharded, mode, batch)
    with tracing_for(Target(devices[0].platform, devices[0].device_kind)):
        recomputed = sequences * recomputed_flops(network, *lengths) if mode == "train" else 0
        lowered = program.lower(*arguments)
    kind = chip(devices[0].device_kind)
    limit = round(kind.memory) if kind else None
    try:
        compiled, text = _compile(lowered, devices)
    except jax.errors.JaxRuntimeError as error:
        unknown = {"arguments": None, "temporaries": None, "outputs": None}
        sizes: dict[str, int | None] = {**unknown, **_parse_out_of_memory(error, _bytes_on_one_device(arguments))}
        fits, transfers, moved = False, {}, None
    else:
        memory: Any = compiled.memory_analysis()
        outputs = memory.output_size_in_bytes - memory.alias_size_in_bytes
        parts = {"arguments": memory.argument_size_in_bytes, "temporaries": memory.temp_size_in_bytes, "outputs": outputs}
        peak = sum(parts.values())
        sizes = {**parts, "peak": peak, "limit": limit}
        # The TPU compiler rejects a program that does not fit; the GPU compiler does not.
        fits, transfers = limit is None or peak <= limit, collectives(text)
        moved = memory.argument_size_in_bytes + memory.output_size_in_bytes + 2 * memory.temp_size_in_bytes
    floors = {
        "compute": (flops + recomputed) / len(devices) / kind.peak_flops if kind else None,
        "memory": moved / kind.bandwidth if kind and moved else None,
    }
    return Report(
        topology=topology or devices[0].device_kind,
        devices=len(devices),
        mesh=dict(sharded.mesh.shape),
        mode=mode,
        batch_size=run.data.batch_size,
        microbatches=run.microbatches,
        remat_policy=getattr(network, "remat_policy", None),
        num_parameters=sharded.model.num_parameters,
        bytes_per_device=sizes,
        fits=fits,
        collectives={kind: sums for kind, sums in transfers.items() if kind not in BETWEEN_SLICES},
        between_slices={kind: transfers[kind] for kind in BETWEEN_SLICES if kind in transfers},
        model_flops_per_step=flops,
        recomputed_flops_per_step=recomputed,
        floor_seconds=floors,
        compile_seconds=time.monotonic() - start,
    )


def _compile(lowered: jax.stages.Lowered, devices: Sequence) -> tuple[jax.stages.Compiled, str]:
    """Returns the executable and its optimized HLO as text.

    For TPUs the text is the dump of libtpu: an older jaxlib cannot read the program of a newer libtpu (jaxlib 0.10.2, libtpu
    0.0.51).
    """
    if devices[0].platform != "tpu":
        compiled = lowered.compile()
        return compiled, compiled.as_text() or ""
    with tempfile.TemporaryDirectory() as folder:
        compiled = lowered.compile(compiler_options={"xla_dump_to": folder, "xla_dump_hlo_as_text": True})
        programs = [path.read_text() for path in pathlib.Path(folder).glob("*.after_optimizations.txt")]
    return compiled, max(programs, key=len, default="")


def _program(run: RunConfig, sharded: ShardedModel, mode: str, batch: ResolvedBatch) -> tuple[Any, tuple]:
    """Returns the jitted step and its arguments as shapes with shardings."""
    features = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharded.batch_sharding), batch.features)
    if mode == "train":
        training = assemble_run(run, sharded, batch)
        return training.step, (training.abstract_state, features)
    if mode == "eval":
        return sharded.eval_step, (sharded.abstract_params, features)

    if not has_decoder(run.model.network):
        raise UserError("--mode=predict needs a decoder, which an encoder-only model does not have. Use --mode=eval.")
    sharded.model.check_can_generate("--mode=predict")
    inputs, targets = batch.lengths
    prompt = jax.ShapeDtypeStruct((run.data.batch_size, inputs or targets), jnp.int32, sharding=sharded.batch_sharding)

    predict = functools.partial(complete, sharded.model, seed=run.seed, max_tokens=targets, config=SamplingConfig(), eos_id=1)
    shardings = (sharded.param_shardings, sharded.batch_sharding)
    jitted = jax.jit(predict, in_shardings=shardings, out_shardings=sharded.batch_sharding)
    return jitted, (sharded.abstract_params, prompt)


def _bytes_on_one_device(arguments: tuple) -> int:
    return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(arguments))


def _parse_out_of_memory(error: jax.errors.JaxRuntimeError, arguments: int) -> dict[str, int | None]:
    """Returns the memory sizes in the compiler's out-of-memory error. Other errors are raised again."""
    match = re.search(r"\(([\d.]+)([BKMGT])\) exceeds available HBM \(([\d.]+)([BKMGT])\)", str(error))
    if not match:
        raise error
    needed, limit = (round(float(match[i]) * _UNITS[match[i + 1]]) for i in (1, 3))
    if "HLO temporaries" in str(error):
        # Here the compiler's "temporaries" include the arguments.
        return {"arguments": arguments, "temporaries": max(needed - arguments, 0), "peak": needed, "limit": limit}
    return {"peak": needed, "limit": limit}


def search(run: RunConfig, devices: Sequence | None = None, topology: str | None = None) -> Iterator[Report]:
    """Compiles the training step with various settings and yields every report. See `find_best`.

    With the run's batch size it tries remat policies, those with the least recomputation first, then more microbatches. With
    the first settings that fit it doubles the batch size as long as the step fits.
    """
    if not hasattr(run.model.network, "remat_policy"):
        raise UserError(f"--search needs remat policies, which {network_name(run.model.network)} does not support.")
    kind = (jax.devices() if devices is None else devices)[0].device_kind
    if chip(kind) is None:
        raise UserError(f'--search needs a device with known memory size. The size of "{kind}" is unknown; pass a --topology.')
    rows = ShardedModel(run.model, run.mesh_shape, None if devices is None else list(devices), run.sharding).row_multiple
    run = _with_largest_batch(run)
    check_rows(run.data.batch_size, rows)
    lengths = resolve_batch(run.data, run.model.network.architecture).lengths
    policies = sorted(
        REMAT_POLICIES, key=lambda policy: recomputed_flops(replace_remat_policy(run.model.network, policy), *lengths)
    )
    microbatches = 1
    while run.data.batch_size % microbatches == 0 and (run.data.batch_size // microbatches) % rows == 0:
        for policy in policies:
            candidate = _replace_settings(run, run.data.batch_size, microbatches, policy)
            report = compile_step(candidate, devices=devices, topology=topology)
            yield report
            while report.fits:
                candidate = _replace_settings(candidate, 2 * candidate.data.batch_size, microbatches, policy)
                report = compile_step(candidate, devices=devices, topology=topology)
                yield report
                if not report.fits:
                    return
        microbatches *= 2


def find_best(reports: Sequence[Report]) -> Report | None:
    """Returns the report that fits with the fewest FLOPs per example, then the largest batch, then the least memory."""

    def cost(report: Report):
        flops = (report.model_flops_per_step + report.recomputed_flops_per_step) / report.batch_size
        return round(flops), -report.batch_size, report.bytes_per_device["peak"]

    return min((report for report in reports if report.fits), key=cost, default=None)


def _with_largest_batch(run: RunConfig) -> RunConfig:
    """Returns the run with the largest batch size of its schedule, for which there must be memory."""
    largest = max(size for _, size in run.data.named_batch_sizes())
    return dataclasses.replace(run, data=dataclasses.replace(run.data, batch_size=largest, batch_schedule={}))


def _replace_settings(run: RunConfig, batch_size: int, microbatches: int, policy: str) -> RunConfig:
    return dataclasses.replace(
        run,
        model=dataclasses.replace(run.model, network=replace_remat_policy(run.model.network, policy)),
        data=dataclasses.replace(run.data, batch_size=batch_size),
        microbatches=microbatches,
    )


def to_text(report: Report) -> str:
    """Formats the report as a table, with advice for a program that does not fit."""
    size, floors = report.bytes_per_device, report.floor_seconds
    axes = ", ".join(f"{axis}={n}" for axis, n in report.mesh.items() if n > 1) or "one device"
    seconds = lambda s: "unknown for this device" if s is None else f"{s:.4g} s"
    flops = f"{report.model_flops_per_step:.4g} model FLOPs, {report.recomputed_flops_per_step:.3g} recomputed FLOPs"
    lines = [
        f"devices        {report.devices} x {report.topology}, mesh {axes}",
        f"model          {report.num_parameters:,} parameters",
        f"settings       {settings(report)}",
        f"step           {flops}",
        f"memory         arguments    {_bytes(size['arguments'])} on each device",
        f"               temporaries  {_bytes(size['temporaries'])}",
        f"               outputs      {_bytes(size['outputs'])}",
        f"               peak         {_bytes(size['peak'])} of {_bytes(size['limit']).strip()}",
        f"               {_verdict(report)}",
        f"lower bounds   {seconds(floors['compute'])} compute, {seconds(floors['memory'])} memory bandwidth",
        *_transfers("collectives", report.collectives),
        *_transfers("between slices", report.between_slices),
        f"compiled in    {report.compile_seconds:.0f} s",
    ]
    return "\n".join(lines)


def _transfers(title: str, transfers: dict[str, dict[str, int]]) -> list[str]:
    return [
        f"{title if i == 0 else '':<15}{kind:<20}{sums['count']:8,} {_bytes(sums['bytes'])}"
        for i, (kind, sums) in enumerate(transfers.items())
    ]


def _bytes(number: int | None) -> str:
    if number is None:
        return "  unknown    "
    return f"{number / GiB:9.2f} GiB" if number >= GiB else f"{number * 1024 / GiB:9.2f} MiB"


def settings(report: Report) -> str:
    """Formats the settings of the step."""
    if report.mode != "train":
        return f"{report.mode}, batch size {report.batch_size}"
    policy = f", remat policy {report.remat_policy}" if report.remat_policy else ""
    return f"batch size {report.batch_size}, microbatches {report.microbatches}{policy}"


def _verdict(report: Report) -> str:
    size = report.bytes_per_device
    if report.fits:
        return "fits" if size["limit"] is not None else "compiled; the memory size of this device is unknown"
    over = f"does not fit: {((size['peak'] or 0) - (size['limit'] or 0)) / GiB:.2f} GiB too much per device. "
    if report.mode != "train":
        return over + f"Reduce the batch size: --gin.BATCH_SIZE={max(report.batch_size // 2, 1)}."
    if report.remat_policy not in (None, "boundaries"):
        return over + "Save fewer activations: --gin.TransformerConfig.remat_policy=boundaries. Or use --search."
    options = [n for n in range(report.microbatches + 1, report.batch_size + 1) if report.batch_size % (n * _rows(report)) == 0]
    if options:
        return over + f"Use more microbatches: --gin.MICROBATCHES={options[0]}. Or use --search."
    return over + "Use more devices, or larger fsdp and tensor axes in MESH."


def _rows(report: Report) -> int:
    return report.mesh["replica"] * report.mesh["data"] * report.mesh["fsdp"]
