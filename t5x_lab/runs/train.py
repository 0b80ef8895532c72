"""`t5x_lab train`: from a configuration to a trained run directory, and from an interrupted one onwards."""

import concurrent.futures
import contextlib
import dataclasses
import json
from typing import Any

import jax
from etils import epath

from t5x_lab.checkpoints.layout import absolute_path, read_info
from t5x_lab.checkpoints.manager import Checkpoints
from t5x_lab.checkpoints.saving import Saver, without_abandoned_writes
from t5x_lab.config.json_files import read_dictionary
from t5x_lab.evaluation.config import EarlyStopping
from t5x_lab.networks.network import check_length, more_ids
from t5x_lab.observe.console import say
from t5x_lab.observe.end import ended_at, remove_end, write_end
from t5x_lab.observe.profile import Profiled, check_profiler
from t5x_lab.partitioning.distributed import broadcast, broadcast_text, fail_together
from t5x_lab.partitioning.waiting import limit_waiting, waiting_for
from t5x_lab.report.run_directory import FACTS
from t5x_lab.runs.assemble import Training, assemble_run
from t5x_lab.runs.batch import BatchOfTasks, batch_of_tasks
from t5x_lab.runs.config import GinConfig, RunConfig
from t5x_lab.runs.evaluate import Entry, Evaluations, by_split, evaluations_of
from t5x_lab.runs.of_task import fixed_by_task
from t5x_lab.runs.owner import owned
from t5x_lab.runs.recording import Recorder
from t5x_lab.runs.sharded_model import ShardedModel
from t5x_lab.runs.starting_point import (
    StartingPoint,
    check_agreement,
    check_fits,
    find_starting_point,
    first_state,
)
from t5x_lab.runs.summary import (
    banner,
    budget_of,
    facts_of,
    last_step,
    make_run_directory,
    write_facts,
    write_run_files,
)
from t5x_lab.training.clock import Clock
from t5x_lab.training.hooks import Hooks, RunStart, Statistics
from t5x_lab.training.loop import Action, Budget, Diverged, Preempted
from t5x_lab.training.loop import train as train_loop
from t5x_lab.training.state import TrainState, read_counter


def train(config: GinConfig) -> None:
    """Trains until `TRAIN_STEPS` or `TRAIN_TOKENS`; continues what `MODEL_DIR` holds.

    Raises:
      UserError: for a mistake in the configuration, before data are read or parameters made.
      Preempted, Diverged, SaveFailed: see `t5x_lab.training.loop` and `t5x_lab.checkpoints.saving`.
    """
    clock = Clock()
    with contextlib.ExitStack() as stack:
        stack.enter_context(without_abandoned_writes())
        job = prepare(config, stack)
        say(job.starting_point.reason)
        stopping = job.run.early_stopping
        is_over = stopping and job.starting_point.step is not None and job.evaluations.is_over(stopping, job.first_step)
        if is_over:
            job.budget.steps = job.first_step  # what is due at the end may still be missing
        evaluated_at_start = at_start(job)
        if job.budget.is_spent(job.first_step) and not evaluated_at_start:
            goal = f"step {job.run.train_steps}" if job.run.train_steps else f"{job.run.train_tokens:,} tokens"
            why = f"{goal} is reached at step {job.first_step}. Raise TRAIN_STEPS or TRAIN_TOKENS to train on."
            if stopping and is_over:
                why = f"{_no_better(stopping)}. To train on, raise EarlyStopping.patience or take out EARLY_STOPPING."
            say(f"Nothing to do: {why}")
            mark_end(job, job.first_step)
            return
        facts = facts_of(job.run, job.sharded, job.batch.lengths)
        say(banner(facts, job.first_step, job.budget))
        if job.starting_point.step is not None:
            clock = clock_of(job.run, job.checkpoints.directory / str(job.starting_point.step), started=clock.began)
        hooks = Hooks(job.run.hooks, say)
        recorder = Recorder(
            job.run, job.state, clock, job.batch.counted, facts["flops_per_step"] / job.sharded.mesh.size, hooks
        )
        stack.callback(recorder.close)
        saver = make_saver(job, clock, recorder, hooks)
        step = job.training.step
        if job.run.profile_steps:
            step = profiled = Profiled(step, f"{job.run.model_dir}/profile", job.run.profile_steps)
            stack.callback(profiled.close)
        if jax.process_index() == 0:
            remove_end(job.run.model_dir)
            write_facts(facts | {"began": clock.began})
        with fail_together(Preempted, Diverged), hooks.around(start_of(job)):
            evaluate(job, recorder, evaluated_at_start, job.first_step, job.state)
            if evaluated_at_start:
                stop_early(job, recorder, job.first_step, job.state)
            try:
                ended = train_loop(
                    job.state,
                    job.batches,
                    step,
                    shard_batch=job.sharded.shard_batch,
                    budget=job.budget,
                    record=lambda step, metrics: recorder.step(step, job.statistics.due(step, metrics)),
                    actions=make_actions(job, recorder, saver),
                    bad_steps=job.run.bad_steps,
                    say=say,
                )
            except (Preempted, Diverged):
                saver.finish()
                raise
            saver.finish()
            mark_end(job, int(ended.step))


@dataclasses.dataclass(frozen=True)
class Job:
    """A run that is ready to train.

    Attributes:
      run: its configuration.
      config: the text of that, with what its tasks say.
      starting_point: what it starts from.
      batch: what it reads, and its shapes.
      sharded, training: its model on the mesh, its step and optimizer.
      statistics: what hooks measure in the step.
      checkpoints: of its directory.
      batches: at their position.
      state: at `first_step`.
      budget: when it ends.
      evaluations: of the run, made ready.
    """

    run: RunConfig
    config: str
    starting_point: StartingPoint
    batch: BatchOfTasks
    sharded: ShardedModel
    training: Training
    statistics: Statistics
    checkpoints: Checkpoints
    batches: Any
    state: TrainState
    budget: Budget
    evaluations: Evaluations

    @property
    def first_step(self) -> int:
        return int(self.state.step)


def prepare(config: GinConfig, stack: contextlib.ExitStack) -> Job:
    """Builds everything; what can be wrong with the configuration is found before the run's directory is touched.

    What is to be closed at the end is left to `stack`.
    """
    run = config.run()
    limit_waiting(run.wait_minutes)
    start = find_starting_point(run)
    if run.profile_steps:
        check_profiler()
    # TensorFlow, once everything that does not need it is known to be right.
    batch = batch_of_tasks(run.data, run.model.network.architecture)
    from t5x_lab.data import checks, pipeline, python_functions

    tasks = batch.tasks
    check_classes(tasks, run)
    checks.check_vocabulary(tasks, run.data, run.model.network.vocab_size, more_ids(run.model.network))
    check_length(run.model.network, max(batch.lengths))
    documents = count_documents(tasks, run, start)
    sharded = ShardedModel(run.model, run.mesh_shape, rules=run.sharding)
    statistics = Statistics(run.hooks)
    training = assemble_run(run, sharded, batch, statistics)
    # Who reads prompts later may not have the task.
    if run.data.special_tokens.input_eos not in (None, tasks.input_eos):
        say(f"SpecialTokens.input_eos is {not tasks.input_eos}; of the tasks' inputs it is {tasks.input_eos}, which is kept.")
    fixed = fixed_by_task(config.text, run.data.mixture_or_task_name, run.train_steps, run.eval_period)
    config = GinConfig((), (config.text, f"SpecialTokens.input_eos = {tasks.input_eos}", *fixed))
    with python_functions.refused_if_stateful():  # whose position no checkpoint could hold
        batches = pipeline.SeqioBatches(tasks, run.data, run.seed, sharded.rows(run.data.batch_size))
    evaluations = evaluations_of(run, config, sharded)

    make_run_directory(run.model_dir)
    stack.enter_context(owned(run.model_dir))
    start = find_starting_point(run)  # again: the owner before may have written since
    check_agreement(run, start)
    check_fits(run, start, training.abstract_state)
    notes = {"settings": run.identity(), "config": config.text, "documents": documents}
    checkpoints = Checkpoints(run.model_dir, run.saving, notes, evaluations.measured)
    stack.push(checkpoints.close)
    with waiting_for("the state that the run starts from, in all processes"):
        state = first_state(run, training, checkpoints, start, batches)
    if jax.process_index() == 0:
        write_run_files(run, config.text, sharded)
    budget = budget_of(run, batch.lengths, read_counter(state.counters["tokens_processed"]))
    return Job(run, config.text, start, batch, sharded, training, statistics, checkpoints, batches, state, budget, evaluations)


def check_classes(tasks: Any, run: RunConfig) -> None:
    """Raises a `UserError` where the tasks have other classes than the model's head."""
    from t5x_lab.prompts.classified import check_head

    for part in tasks.parts:
        check_head(part.task, run.model.head)


def count_documents(tasks: Any, run: RunConfig, start: StartingPoint) -> dict[str, int]:
    """Numbers of documents that rates depend on, counted once in a run's life, by the first process; see `DocumentFiles`."""
    from t5x_lab.data.failures import naming_what_fails
    from t5x_lab.data.sources import counted

    counted.clear()
    if start.step is not None:
        counted.update(read_info(absolute_path(run.model_dir) / "checkpoints" / str(start.step)).get("documents", {}))
    with concurrent.futures.ThreadPoolExecutor(1) as pool, naming_what_fails(tasks.trained, run.data.split):
        counting = pool.submit(tasks.rates) if jax.process_index() == 0 else None
        while not broadcast(counting is None or bool(concurrent.futures.wait([counting], timeout=60).done)):
            pass  # counting may take longer than processes wait for each other
        if counting:
            counting.result()
    counted.update(json.loads(broadcast_text(json.dumps(counted))))
    return dict(counted)


def start_of(job: Job) -> RunStart:
    return RunStart(
        model_dir=job.run.model_dir,
        first_step=job.first_step,
        last_step=last_step(job.budget, job.first_step),
        config=job.config,
        num_parameters=job.sharded.model.num_parameters,
    )


def clock_of(run: RunConfig, checkpoint: epath.Path, started: float) -> Clock:
    """The clock that a checkpoint has, without the time from an end of the run until this process started.

    What an extension of the run left out that came to no checkpoint is in run.json.
    """
    clock = Clock(**read_info(checkpoint).get("clock", {}))
    began = read_dictionary(epath.Path(run.model_dir) / FACTS).get("began")
    clock.began = max(clock.began, began) if isinstance(began, float) else clock.began
    clock.leave_out(ended_at(run.model_dir) or started, started)
    return clock


def make_saver(job: Job, clock: Clock, recorder: Recorder, hooks: Hooks) -> Saver:
    return Saver(
        job.checkpoints,
        job.run.saving,
        job.batches,
        notes=lambda: {"clock": clock.state()},
        saved=hooks.save,
        agree=broadcast,
        say=say,
    )


def stop_early(job: Job, recorder: Recorder, step: int, state: TrainState) -> None:
    """Ends the training where EARLY_STOPPING says so; the last step is then evaluated as any last step is."""
    rule, evaluations = job.run.early_stopping, job.evaluations
    if rule and evaluations.is_over(rule, step):
        say(f"{_no_better(rule)}: training ends with step {step}.")
        job.budget.steps = step
        evaluate(job, recorder, evaluations.without_results(step, evaluations.due_at_end(step)), step, state)


def mark_end(job: Job, step: int) -> None:
    if jax.process_index() == 0:
        write_end(job.run.model_dir, step)


def _no_better(rule: EarlyStopping) -> str:
    return f"{rule.metric} has not been better for {rule.patience} evaluations"


def at_start(job: Job) -> list[Entry]:
    """The evaluations that are due before the first step: those that ask for it, and of a run that goes on those that were due
    at its checkpoint, where they have no results."""
    step, evaluations = job.first_step, job.evaluations
    if job.starting_point.step is None:
        return evaluations.due_at_start(step)  # also where a run that came to no checkpoint was evaluated
    due = evaluations.due_at_end(step) if job.budget.is_spent(step) else evaluations.due(step)
    return evaluations.without_results(step, due)


def evaluate(job: Job, recorder: Recorder, entries: list[Entry], step: int, state: TrainState) -> None:
    """Measures the state, writes and records what is found."""
    for entry, found in job.evaluations.measure(entries, step, state.params, state.average, "Training goes on."):
        recorder.evaluation(step, by_split(entry.name, found))
        for task, media in found.media.items():
            recorder.media(step, f"{entry.name}/{task}", media)


def make_actions(job: Job, recorder: Recorder, saver: Saver) -> list[Action]:
    """What happens between steps, in this order: what is trained is saved first."""
    evaluations, budget = job.evaluations, job.budget

    def evaluated(step: int, state: TrainState) -> None:
        due = evaluations.due_at_end(step) if budget.is_spent(step) else evaluations.due(step)
        evaluate(job, recorder, due, step, state)
        if not budget.is_spent(step):
            stop_early(job, recorder, step, state)

    return [
        Action(saver.save, saver.due, at_stop=True),
        Action(evaluated, lambda step: bool(evaluations.due(step))),
    ]
