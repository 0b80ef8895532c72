"""Description of a run before training: budget, banner, dry run, run.json and config.gin."""

import math
from collections.abc import Mapping
from typing import Any

import jax
from etils import epath

from t5x_lab import __version__
from t5x_lab.checkpoints.layout import finished_steps
from t5x_lab.config.errors import NotHere, UserError, write_error
from t5x_lab.config.json_files import write_json
from t5x_lab.config.object_storage import retry
from t5x_lab.data.config import DataConfig
from t5x_lab.networks.config import DTYPES, TransformerShape
from t5x_lab.networks.network import additional_ids, check_length
from t5x_lab.observe.hardware import peak_flops
from t5x_lab.observe.model_info import model_info
from t5x_lab.ops.attention import has_kernels
from t5x_lab.report.run_directory import FACTS
from t5x_lab.runs.config.gin_config import GinConfig
from t5x_lab.runs.config.run_config import RunConfig
from t5x_lab.runs.config.trust import remember
from t5x_lab.runs.evaluate.evaluations import prepare_evaluations
from t5x_lab.runs.model.sharded_model import ShardedModel
from t5x_lab.runs.train.assemble import assemble_run
from t5x_lab.runs.train.batch import ResolvedBatch, resolve_batch
from t5x_lab.runs.train.starting_point import check_fits, find_starting_point
from t5x_lab.runs.train.training_flops import training_flops
from t5x_lab.training.loop import Budget


def make_budget(run: RunConfig, lengths: tuple[int, int], processed: int) -> Budget:
    """Returns the budget of a run that has processed `processed` tokens. `lengths`: encoder and decoder length."""
    max_tokens = lambda step: run.data.batch_size_at(step) * run.model.sequences * sum(lengths)
    return Budget(run.train_steps or math.inf, run.train_tokens or math.inf, processed, max_tokens)


def last_step(budget: Budget, first_step: int) -> int:
    """Returns the number of the last step; for a token budget, an estimate without padding."""
    if budget.steps < math.inf:
        return int(budget.steps)
    step, processed = first_step, budget.processed
    while processed < budget.tokens:
        step += 1
        processed += budget.max_tokens(step)
    return step


def dry_run(config: GinConfig) -> str:
    """Returns the resolved configuration, the parameter and memory table and the starting point, without reading examples."""
    run = config.run()
    sharded = ShardedModel(run.model, run.mesh_shape, rules=run.sharding)
    batch = resolve_batch(run.data, run.model.network.architecture)
    lengths = batch.lengths
    notes = _check_data(run, config, batch, sharded)
    training = assemble_run(run, sharded, batch)
    try:
        starting_point = find_starting_point(run)
        check_fits(run, starting_point, training.abstract_state)
        start = starting_point.reason
    except UserError:
        raise
    except Exception as error:  # a remote directory that is not reachable from this machine
        start = f"The starting point is unknown: {_unreadable(run)} cannot be read from here ({type(error).__name__})."
    check_length(run.model.network, max(lengths))
    text = banner(describe_run(run, sharded, lengths), run.data, 0, make_budget(run, lengths, 0))
    return "\n".join([with_model_info(config, sharded), text, start, *notes])


def _check_data(run: RunConfig, config: GinConfig, batch: ResolvedBatch, sharded: ShardedModel) -> list[str]:
    """Checks the data and the vocabulary. Returns a note if they are not on this machine."""
    from t5x_lab.data.pipeline import checks

    try:
        checks.check_vocabulary(batch.tasks, run.data, run.model.network.vocab_size, additional_ids(run.model.network))
        checks.check_readable(batch.tasks, run.data)
        prepare_evaluations(run, config, sharded)
    except Exception as missing:
        if isinstance(missing, UserError) and not isinstance(missing, NotHere):
            raise
        # A user's task may raise any exception if its data are not on this machine.
        reason = missing.sentence if isinstance(missing, UserError) else f"{type(missing).__name__}: {missing}"
        return [f"The data were not checked: {reason}"]
    return []


def _unreadable(run: RunConfig) -> str:
    try:
        finished_steps(run.model_dir)
    except Exception:
        return f"MODEL_DIR {run.model_dir}"
    return f"INITIAL_CHECKPOINT_PATH {run.initial_checkpoint_path}"


def with_model_info(config: GinConfig, sharded: ShardedModel) -> str:
    """Returns the configuration of the run and the parameter and memory table."""
    return f"{config.used_text}\n{model_info(sharded.model, sharded.partitioner)}"


def describe_run(run: RunConfig, sharded: ShardedModel, lengths: tuple[int, int], first_step: int = 0) -> dict[str, Any]:
    """Returns the content of run.json. `lengths`: encoder and decoder length."""
    rows = run.data.batch_size_at(first_step + 1)
    flops = training_flops(run, sharded.model, *lengths)
    kind = sharded.mesh.devices.flat[0].device_kind
    return {
        "version": __version__,
        "architecture": run.model.network.architecture,
        "num_parameters": sharded.model.num_parameters,
        "attention": _attention(run),
        "mixture_or_task_name": run.data.mixture_or_task_name,
        "rows": rows * run.model.sequences,
        "encoder_length": lengths[0],
        "decoder_length": lengths[1],
        "train_steps": run.train_steps,
        "train_tokens": run.train_tokens,
        "flops_per_step": rows * flops,
        "flops_per_row": flops,
        "devices": sharded.mesh.size,
        "device_kind": kind,
        "peak_flops": peak_flops(kind),
        "processes": jax.process_count(),
        "mesh": ", ".join(f"{axis}={size}" for axis, size in sharded.mesh.shape.items()),
        "model_dir": run.model_dir,
    }


def banner(facts: Mapping[str, Any], data: DataConfig, first_step: int, budget: Budget) -> str:
    """Returns the summary that is logged before training."""
    end, peak = last_step(budget, first_step), facts["peak_flops"]
    rows = sum(map(data.batch_size_at, range(first_step + 1, end + 1)))
    sequences = facts["rows"] // data.batch_size_at(first_step + 1)
    encoder, decoder = facts["encoder_length"], facts["decoder_length"]
    tokens = facts["rows"] * (encoder + decoder)
    later = {step: size for step, size in sorted(data.batch_schedule.items()) if first_step + 1 < step <= end}
    schedule = ", ".join(f"{size * sequences:,} rows from step {step:,}" for step, size in later.items())
    return "\n".join(
        [
            f"devices     {facts['devices']} x {facts['device_kind']}, {facts['processes']} process(es), mesh {facts['mesh']}",
            f"model       {facts['architecture']}, {facts['num_parameters']:,} parameters"
            + (f", attention in {facts['attention']}" if facts["attention"] else ""),
            f"data        {facts['mixture_or_task_name']}, {facts['rows']} rows of {encoder} + {decoder} tokens = {tokens:,} "
            f"per batch{'; ' if schedule else ''}{schedule}",
            f"steps       {first_step} to {'about ' if facts['train_tokens'] else ''}{end}: "
            f"{rows * sequences * (encoder + decoder):,} tokens with padding, {float(facts['flops_per_row'] * rows):.3g} FLOPs "
            "(forward and backward, full attention)",
            f"MFU         these FLOPs, without recomputation, relative to {peak:.3g} FLOP/s per device"
            if peak
            else "MFU         not available: the peak FLOP/s of this device are unknown",
            f"directory   {facts['model_dir']}",
        ]
    )


def _attention(run: RunConfig) -> str | None:
    """Returns the implementation of attention in the library's transformer; None for another network."""
    network = run.model.network
    if not isinstance(network, TransformerShape):
        return None
    return "fused kernels" if has_kernels(DTYPES[network.dtype], network.head_dim) else "blocks of XLA's operations"


def make_run_directory(model_dir: str) -> None:
    try:
        retry(lambda: epath.Path(model_dir).mkdir(parents=True, exist_ok=True), model_dir)
    except OSError as error:
        raise UserError(
            f"MODEL_DIR {model_dir} cannot be written: {error.strerror or error}. Choose another directory."
        ) from error


def write_run_json(facts: Mapping[str, Any]) -> None:
    """Writes run.json, which the report reads."""
    path = epath.Path(facts["model_dir"]) / FACTS
    try:
        retry(lambda: write_json(path, facts, indent=1), path)
    except OSError as error:
        raise write_error(path, error) from error


def write_run_files(run: RunConfig, config_text: str, sharded: ShardedModel) -> None:
    """Writes config.gin and model-info.txt."""
    directory = epath.Path(run.model_dir)
    files = {"config.gin": config_text, "model-info.txt": model_info(sharded.model, sharded.partitioner)}
    try:
        for name, text in files.items():
            retry(lambda: (directory / name).write_text(text), directory)
        remember(config_text)
    except OSError as error:
        raise write_error(directory / "config.gin", error) from error
