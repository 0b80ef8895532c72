"""`t5x_lab compile`: the program of a step, compiled for devices that need not be there, and what it would take of them."""

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

from t5x_lab.config.errors import UserError, one_of
from t5x_lab.decoding.generation import complete
from t5x_lab.decoding.sampling import SamplingConfig
from t5x_lab.networks.around import with_policy
from t5x_lab.networks.config import REMAT_POLICIES
from t5x_lab.networks.network import has_decoder, has_encoder, name_of, recomputed_flops
from t5x_lab.observe.collectives import BETWEEN_SLICES, collectives
from t5x_lab.observe.hardware import GiB, chip
from t5x_lab.runs.assemble import assemble_run
from t5x_lab.runs.batch import BatchOfTasks, batch_of_tasks
from t5x_lab.runs.config import RunConfig
from t5x_lab.runs.sharded_model import ShardedModel, check_rows
from t5x_lab.runs.training_flops import step_flops

MODES = ("train", "eval", "predict")
_UNITS = {"B": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


@dataclasses.dataclass(frozen=True)
class Report:
    """What a compiled step takes.

    Attributes:
      topology: the slice's name, or the kind of the local devices.
      devices: how many.
      mesh: sizes by axis.
      mode: the step that was compiled.
      batch_size, microbatches, remat_policy: what was compiled; an LSTM has no policy.
      num_parameters: of the model.
      bytes_per_device: `arguments`, `temporaries`, `outputs` (that are not written over arguments), their sum `peak`, and the
        `limit`, None where it is unknown. Of a program that the compiler refuses only the peak and the limit are known,
        as it gives them.
      fits: whether the compiler found room for it.
      collectives: kind to `count` and `bytes`, of one device in one step, within a slice.
      between_slices: the same of what is sent to other slices and received from them.
      model_flops_per_step: by hand, forward and backward when training; attention counted in full.
      recomputed_flops_per_step: what remat adds to them.
      floor_seconds: `compute`, both FLOPs at the devices' peak rate; `memory`, arguments and outputs moved once and temporaries
        twice (written and read) at the memory's bandwidth. None where the device is unknown. Attention is counted in
        full, so that a causal step may be a little faster than the first.
      compile_seconds: of tracing and compiling, on this machine.
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
    """Lowers and compiles a run's own step on its own mesh and rules.

    Args:
      run: the configuration.
      mode: "train"; "eval", the teacher-forced evaluation of a batch; "predict", greedy decoding of a batch of prompts as long
        as its inputs.
      devices: what to compile for, the local devices if None.
      topology: what to call them.

    Raises:
      UserError: when the mesh or the batch do not fit the devices, or the architecture does not generate.
    """
    one_of("--mode", mode, MODES)
    devices = list(jax.devices() if devices is None else devices)
    sharded = ShardedModel(run.model, run.mesh_shape, devices, run.sharding)
    network = run.model.network
    batch = batch_of_tasks(run.data, network.architecture)
    lengths = batch.lengths
    rows = run.data.batch_size // (run.microbatches if mode == "train" else 1)
    check_rows(rows, sharded.row_multiple)
    if mode == "predict" and not has_encoder(network):
        lengths = (0, 2 * lengths[1])  # a prompt as long as what is written
    of_forward = run.data.batch_size * run.model.sequences * round(network.flops(*lengths) / 3)
    flops = step_flops(run, sharded, lengths) if mode == "train" else of_forward
    again = run.data.batch_size * run.model.sequences * recomputed_flops(network, *lengths) if mode == "train" else 0

    began = time.monotonic()
    program, arguments = _program(run, sharded, mode, batch)
    lowered = program.lower(*arguments)
    kind = chip(devices[0].device_kind)
    limit = round(kind.memory) if kind else None
    try:
        compiled, text = _compile(lowered, devices)
    except jax.errors.JaxRuntimeError as error:
        unknown = {"arguments": None, "temporaries": None, "outputs": None}
        sizes: dict[str, int | None] = {**unknown, **_memory_of_refusal(error, _bytes_on_one_device(arguments))}
        fits, found, moved = False, {}, None
    else:
        memory: Any = compiled.memory_analysis()
        outputs = memory.output_size_in_bytes - memory.alias_size_in_bytes
        parts = {"arguments": memory.argument_size_in_bytes, "temporaries": memory.temp_size_in_bytes, "outputs": outputs}
        peak = sum(parts.values())
        sizes = {**parts, "peak": peak, "limit": limit}
        # A TPU's compiler refuses what does not fit, a GPU's does not.
        fits, found = limit is None or peak <= limit, collectives(text)
        moved = memory.argument_size_in_bytes + memory.output_size_in_bytes + 2 * memory.temp_size_in_bytes
    floors = {
        "compute": (flops + again) / len(devices) / kind.peak_flops if kind else None,
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
        collectives={kind: sums for kind, sums in found.items() if kind not in BETWEEN_SLICES},
        between_slices={kind: found[kind] for kind in BETWEEN_SLICES if kind in found},
        model_flops_per_step=flops,
        recomputed_flops_per_step=again,
        floor_seconds=floors,
        compile_seconds=time.monotonic() - began,
    )


def _compile(lowered: jax.stages.Lowered, devices: Sequence) -> tuple[jax.stages.Compiled, str]:
    """The executable and its program as text.

    libtpu writes its program itself: an older jaxlib cannot read what a newer libtpu compiled (jaxlib 0.10.2, libtpu 0.0.51).
    """
    if devices[0].platform != "tpu":
        compiled = lowered.compile()
        return compiled, compiled.as_text() or ""
    with tempfile.TemporaryDirectory() as folder:
        compiled = lowered.compile(compiler_options={"xla_dump_to": folder, "xla_dump_hlo_as_text": True})
        programs = [path.read_text() for path in pathlib.Path(folder).glob("*.after_optimizations.txt")]
    return compiled, max(programs, key=len, default="")


def _program(run: RunConfig, sharded: ShardedModel, mode: str, batch: BatchOfTasks) -> tuple[Any, tuple]:
    """The jitted step and its arguments, as shapes with shardings."""
    features = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharded.batch_sharding), batch.features)
    if mode == "train":
        training = assemble_run(run, sharded, batch)
        return training.step, (training.abstract_state, features)
    if mode == "eval":
        return sharded.eval_step, (sharded.abstract_params, features)

    if not has_decoder(run.model.network):
        raise UserError("--mode=predict generates text, which an encoder alone cannot; compile it with --mode=eval.")
    sharded.model.check_generates("--mode=predict")
    inputs, targets = batch.lengths
    prompt = jax.ShapeDtypeStruct((run.data.batch_size, inputs or targets), jnp.int32, sharding=sharded.batch_sharding)

    predict = functools.partial(complete, sharded.model, seed=run.seed, max_tokens=targets, config=SamplingConfig(), eos_id=1)
    shardings = (sharded.param_shardings, sharded.batch_sharding)
    jitted = jax.jit(predict, in_shardings=shardings, out_shardings=sharded.batch_sharding)
    return jitted, (sharded.abstract_params, prompt)


def _bytes_on_one_device(arguments: tuple) -> int:
    return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(arguments))


def _memory_of_refusal(error: jax.errors.JaxRuntimeError, arguments: int) -> dict[str, int | None]:
    """What the compiler gives as its reason, of the temporaries or of all; any other error is passed on."""
    found = re.search(r"\(([\d.]+)([BKMGT])\) exceeds available HBM \(([\d.]+)([BKMGT])\)", str(error))
    if not found:
        raise error
    needed, limit = (round(float(found[i]) * _UNITS[found[i + 1]]) for i in (1, 3))
    if "HLO temporaries" in str(error):
        # What the compiler calls temporaries here is all of the program's memory, the arguments included.
        return {"arguments": arguments, "temporaries": max(needed - arguments, 0), "peak": needed, "limit": limit}
    return {"peak": needed, "limit": limit}


def search(run: RunConfig, devices: Sequence | None = None, topology: str | None = None) -> Iterator[Report]:
    """Compiles the training step with other settings, and yields every report; `best` of them is the answer.

    Of the run's batch size, first the policies that recompute least with one microbatch, then more microbatches for those that
    do not fit; with the first that fits, batches twice as large as long as they fit.
    """
    if not hasattr(run.model.network, "remat_policy"):
        raise UserError(f"--search tries remat policies, which a {name_of(run.model.network)} does not have.")
    kind = (jax.devices() if devices is None else devices)[0].device_kind
    if chip(kind) is None:
        raise UserError(f'--search needs a device whose memory is known, which "{kind}" is not; give it a --topology.')
    rows = ShardedModel(run.model, run.mesh_shape, None if devices is None else list(devices), run.sharding).row_multiple
    check_rows(run.data.batch_size, rows)
    lengths = batch_of_tasks(run.data, run.model.network.architecture).lengths
    policies = sorted(REMAT_POLICIES, key=lambda policy: recomputed_flops(with_policy(run.model.network, policy), *lengths))
    microbatches = 1
    while run.data.batch_size % microbatches == 0 and (run.data.batch_size // microbatches) % rows == 0:
        for policy in policies:
            tried = _with(run, run.data.batch_size, microbatches, policy)
            report = compile_step(tried, devices=devices, topology=topology)
            yield report
            while report.fits:
                tried = _with(tried, 2 * tried.data.batch_size, microbatches, policy)
                report = compile_step(tried, devices=devices, topology=topology)
                yield report
                if not report.fits:
                    return
        microbatches *= 2


def best(reports: Sequence[Report]) -> Report | None:
    """Of those that fit, the one with the fewest FLOPs an example; then the largest batch; then the least memory."""

    def cost(report: Report):
        flops = (report.model_flops_per_step + report.recomputed_flops_per_step) / report.batch_size
        return round(flops), -report.batch_size, report.bytes_per_device["peak"]

    return min((report for report in reports if report.fits), key=cost, default=None)


def _with(run: RunConfig, batch_size: int, microbatches: int, policy: str) -> RunConfig:
    return dataclasses.replace(
        run,
        model=dataclasses.replace(run.model, network=with_policy(run.model.network, policy)),
        data=dataclasses.replace(run.data, batch_size=batch_size),
        microbatches=microbatches,
    )


def to_text(report: Report) -> str:
    """The report as a table; of a program that does not fit, by how much and what to change."""
    size, floors = report.bytes_per_device, report.floor_seconds
    axes = ", ".join(f"{axis}={n}" for axis, n in report.mesh.items() if n > 1) or "one device"
    seconds = lambda s: "unknown for this device" if s is None else f"{s:.4g} s"
    flops = f"{report.model_flops_per_step:.4g} FLOPs of the model, {report.recomputed_flops_per_step:.3g} computed again"
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
        f"at the least   {seconds(floors['compute'])} by computing, {seconds(floors['memory'])} by moving memory",
        *_transfers("collectives", report.collectives),
        *_transfers("between slices", report.between_slices),
        f"compiled in    {report.compile_seconds:.0f} s",
    ]
    return "\n".join(lines)


def _transfers(title: str, found: dict[str, dict[str, int]]) -> list[str]:
    return [
        f"{title if i == 0 else '':<15}{kind:<20}{sums['count']:8,} {_bytes(sums['bytes'])}"
        for i, (kind, sums) in enumerate(found.items())
    ]


def _bytes(number: int | None) -> str:
    if number is None:
        return "  unknown    "
    return f"{number / GiB:9.2f} GiB" if number >= GiB else f"{number * 1024 / GiB:9.2f} MiB"


def settings(report: Report) -> str:
    """What was compiled, in a line."""
    if report.mode != "train":
        return f"{report.mode}, batch size {report.batch_size}"
    policy = f", remat policy {report.remat_policy}" if report.remat_policy else ""
    return f"batch size {report.batch_size}, microbatches {report.microbatches}{policy}"


def _verdict(report: Report) -> str:
    size = report.bytes_per_device
    if report.fits:
        return "fits" if size["limit"] is not None else "compiled; this device's memory is not known"
    over = f"does not fit: {((size['peak'] or 0) - (size['limit'] or 0)) / GiB:.2f} GiB too much on each device. "
    if report.mode != "train":
        return over + f"Take fewer rows at a time: --gin.BATCH_SIZE={max(report.batch_size // 2, 1)}."
    if report.remat_policy not in (None, "boundaries"):
        return over + "Keep less of each layer: --gin.TransformerConfig.remat_policy=boundaries. Or see --search."
    more = [n for n in range(report.microbatches + 1, report.batch_size + 1) if report.batch_size % (n * _rows(report)) == 0]
    if more:
        return over + f"Process the batch in more parts: --gin.MICROBATCHES={more[0]}. Or see --search."
    return over + "Split the model over more devices: a larger slice, or more of MESH in fsdp and tensor."


def _rows(report: Report) -> int:
    return report.mesh["replica"] * report.mesh["data"] * report.mesh["fsdp"]
