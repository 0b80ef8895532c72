"""`t5x_lab train`: from a configuration to a trained run directory, and from an interrupted one onwards."""

import math

import jax
from etils import epath

from t5x_lab.checkpoints.layout import read_info
from t5x_lab.checkpoints.manager import Checkpoints
from t5x_lab.checkpoints.saving import Saver
from t5x_lab.config.errors import UserError
from t5x_lab.data.environment import check_environment
from t5x_lab.networks.config import TransformerConfig
from t5x_lab.networks.flops import flops_per_example
from t5x_lab.observe.console import say
from t5x_lab.observe.hardware import peak_flops
from t5x_lab.observe.model_info import model_info
from t5x_lab.observe.profile import Profiled, check_profiler
from t5x_lab.partitioning.distributed import as_the_first, ending_together
from t5x_lab.runs.assemble import Placed, Training, assemble
from t5x_lab.runs.begin import check_agreed, first_state, where_to_start
from t5x_lab.runs.config import GinConfig, RunConfig
from t5x_lab.runs.evaluate import Evaluation, Measurement
from t5x_lab.runs.recording import Recorder
from t5x_lab.training.clock import Clock
from t5x_lab.training.loop import Budget, Diverged, Hook, Preempted, every
from t5x_lab.training.loop import train as train_loop
from t5x_lab.training.state import read_counter


def train(config: GinConfig) -> None:
    """Trains until `TRAIN_STEPS` or `TRAIN_TOKENS`; continues what `MODEL_DIR` holds.

    Raises:
      UserError: for a mistake in the configuration, before data are read or parameters made.
      Preempted, Diverged, SaveFailed: see `t5x_lab.training.loop` and `t5x_lab.checkpoints.saving`.
    """
    clock = Clock()
    run = config.run()
    begin = where_to_start(run)
    if run.profile_steps:
        check_profiler()
    check_environment()
    from t5x_lab.data import pipeline  # TensorFlow, once everything that does not need it is known to be right

    architecture = run.model.network.architecture
    tasks = pipeline.resolve_tasks(run.data, architecture, run.model.network.vocab_size)
    names = [part.task.name for part in tasks.parts]
    _check_positions(run, tasks.lengths)
    placed = Placed(run.model, run.mesh_shape)
    training = _assemble(run, placed, num_tasks=len(names))
    measure = Measurement(config, placed, tasks) if run.infer_eval.period else None
    batches = pipeline.SeqioBatches(tasks, run.data, run.seed, placed.rows(run.data.batch_size))
    check_agreed(run, begin)
    make_run_directory(run.model_dir)
    checkpoints = Checkpoints(run.model_dir, run.saving, {"settings": run.identity(), "config": config.text})
    state = first_state(run, training, checkpoints, begin, batches)
    if jax.process_index() == 0:
        write_run_files(run, config.text, placed)
    say(begin.reason)
    start = int(state.step)
    budget = budget_of(run, tasks.lengths, read_counter(state.counters["tokens_processed"]))
    if budget.is_spent(start):
        goal = f"step {run.train_steps}" if run.train_steps else f"{run.train_tokens:,} tokens"
        say(f"Nothing to do: {goal} is reached at step {start}. Raise TRAIN_STEPS or TRAIN_TOKENS to train on.")
        checkpoints.close()
        return

    evaluation = Evaluation(placed, tasks, run.data)
    say(banner(run, placed, start, tasks.lengths, budget))
    if begin.step is not None:
        clock = Clock(**read_info(checkpoints.directory / str(begin.step)).get("clock", {}))
    recorder = Recorder(run, state, clock, names, tasks.lengths, placed.mesh.size, last_step(budget, start))
    saver = Saver(
        checkpoints,
        run.saving,
        batches,
        notes=lambda: {"clock": clock.state()},
        metrics=recorder.measured,
        agree=as_the_first,
        say=say,
    )
    evaluate = lambda step, state: recorder.evaluation(step, evaluation(state.params))
    hooks = [Hook(saver.save, saver.due, at_stop=True), Hook(evaluate, every(run.eval_period))]
    if measure:
        hooks.append(Hook(lambda step, state: recorder.evaluation(step, measure(state.params, step)), every(measure.period)))
    if run.saving.best_metric:
        hooks.reverse()  # a checkpoint's merit is measured before it is made; else what is trained is saved first
    profiled = Profiled(training.step, f"{run.model_dir}/profile", run.profile_steps) if run.profile_steps else None
    step = profiled or training.step
    try:
        with ending_together(Preempted, Diverged):
            try:
                train_loop(state, batches, step, put=placed.put, budget=budget, record=recorder.step, hooks=hooks)
            except (Preempted, Diverged):
                saver.finish()
                raise
            saver.finish()
    finally:
        if profiled:
            profiled.close()
        checkpoints.close()
        recorder.close()


def dry_run(config: GinConfig) -> str:
    """The resolved configuration, the parameter and memory table, and what a run would begin with; touches no data."""
    run = config.run()
    placed = Placed(run.model, run.mesh_shape)
    _assemble(run, placed, num_tasks=1)
    lengths = run.data.model_lengths(run.model.network.architecture)
    try:
        start = where_to_start(run).reason
    except UserError:
        raise
    except Exception as error:  # a remote directory that this machine cannot reach
        start = f"{run.model_dir} cannot be read from here ({type(error).__name__}); what a run would begin with is not known."
    _check_positions(run, lengths)
    summary = banner(run, placed, 0, lengths, budget_of(run, lengths, 0))
    return "\n".join([config.text, model_info(placed.model, placed.mesh), summary, start])


def _check_positions(run: RunConfig, lengths: tuple[int, int]) -> None:
    if isinstance(run.model.network, TransformerConfig):
        run.model.network.check_length(max(lengths))


def _assemble(run: RunConfig, placed: Placed, num_tasks: int) -> Training:
    return assemble(
        placed,
        run.optimizer,
        batch_size=run.data.batch_size,
        microbatches=run.microbatches,
        seed=run.seed,
        num_tasks=num_tasks,
    )


def budget_of(run: RunConfig, lengths: tuple[int, int], processed: int) -> Budget:
    """The run's budget, of which so many tokens are spent."""
    most = run.data.batch_size * sum(lengths)
    return Budget(run.train_steps or math.inf, run.train_tokens or math.inf, processed, most)


def last_step(budget: Budget, start: int) -> int:
    """The number of the last step; of a budget of tokens, if there were no padding."""
    if budget.steps < math.inf:
        return int(budget.steps)
    return start + math.ceil((budget.tokens - budget.processed) / budget.most_per_step)


def make_run_directory(model_dir: str) -> None:
    try:
        epath.Path(model_dir).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"MODEL_DIR {model_dir} cannot be written to: {error.strerror}. Choose another.") from error


def write_run_files(run: RunConfig, config_text: str, placed: Placed) -> None:
    """Writes config.gin and model-info.txt, once it is sure that the run goes on with them."""
    directory = epath.Path(run.model_dir)
    (directory / "config.gin").write_text(config_text)
    (directory / "model-info.txt").write_text(model_info(placed.model, placed.mesh))


def banner(run: RunConfig, placed: Placed, start: int, lengths: tuple[int, int], budget: Budget) -> str:
    """What one wants to know before a run begins; `lengths` are the encoder's and the decoder's."""
    devices = placed.mesh.devices.flat
    encoder, decoder = lengths
    tokens = run.data.batch_size * (encoder + decoder)
    steps = last_step(budget, start) - start
    flops = run.data.batch_size * flops_per_example(run.model.network, encoder, decoder) * steps
    kind = devices[0].device_kind
    peak = peak_flops(kind)
    return "\n".join(
        [
            f"devices     {placed.mesh.size} x {kind}, {jax.process_count()} process(es), mesh "
            + ", ".join(f"{axis}={size}" for axis, size in placed.mesh.shape.items()),
            f"model       {run.model.network.architecture}, {placed.model.num_parameters:,} parameters",
            f"data        {run.data.mixture_or_task_name}, {run.data.batch_size} rows of {encoder} + {decoder} tokens = "
            f"{tokens:,} per batch",
            f"steps       {start} to {'about ' if run.train_tokens else ''}{start + steps}: {tokens * steps:,} tokens, "
            f"{float(flops):.3g} FLOPs (forward and backward, attention in full)",
            f"MFU         those FLOPs, recomputation not counted, against {peak:.3g} FLOP/s per device"
            if peak
            else "MFU         none: this device's peak is unknown",
            f"directory   {run.model_dir}",
        ]
    )
