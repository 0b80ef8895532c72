"""`t5x_lab train`: trains a run from its configuration, or continues an interrupted run."""

import concurrent.futures
import contextlib
import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from etils import epath

from t5x_lab.checkpoints.layout import absolute_path, read_info
from t5x_lab.checkpoints.manager import Checkpoints
from t5x_lab.checkpoints.saving import Saver, suppress_event_loop_errors
from t5x_lab.config.json_files import read_dictionary
from t5x_lab.config.log import log
from t5x_lab.config.object_storage import check_storage, retry
from t5x_lab.evaluation.config import EarlyStopping
from t5x_lab.networks.network import additional_ids, check_length
from t5x_lab.observe.end import ended_at, remove_end, write_end
from t5x_lab.observe.profile import Profiled, check_profiler
from t5x_lab.partitioning.distributed import broadcast, broadcast_text, fail_together
from t5x_lab.partitioning.waiting import limit_waiting, waiting_for
from t5x_lab.report.run_directory import FACTS
from t5x_lab.runs.config.gin_config import GinConfig
from t5x_lab.runs.config.run_config import RunConfig
from t5x_lab.runs.config.task_defaults import frozen_task_bindings
from t5x_lab.runs.evaluate.evaluations import Evaluations, PreparedEvaluation, metrics_by_split, prepare_evaluations
from t5x_lab.runs.model.sharded_model import ShardedModel
from t5x_lab.runs.train.assemble import Training, assemble_run
from t5x_lab.runs.train.batch import ResolvedBatch, resolve_batch
from t5x_lab.runs.train.content import Content, check_content, fingerprint_content
from t5x_lab.runs.train.ownership import owned
from t5x_lab.runs.train.recording import Recorder, is_report_outdated, write_pictures
from t5x_lab.runs.train.starting_point import (
    StartingPoint,
    check_agreement,
    check_fits,
    describe_changes,
    find_starting_point,
    first_state,
)
from t5x_lab.runs.train.summary import (
    banner,
    describe_run,
    last_step,
    make_budget,
    make_run_directory,
    write_run_files,
    write_run_json,
)
from t5x_lab.runs.train.teacher import AddTeacher, load_teacher
from t5x_lab.training.clock import Clock, StartUp
from t5x_lab.training.hooks import Hooks, RunStart, Statistics
from t5x_lab.training.loop import Action, Budget, Diverged, Preempted
from t5x_lab.training.loop import train as train_loop
from t5x_lab.training.state import TrainState, read_counter


def train(config: GinConfig, start_up: StartUp | None = None) -> None:
    """Trains until `TRAIN_STEPS` or `TRAIN_TOKENS`, continuing the run in `MODEL_DIR` if there is one.

    Args:
      config: the configuration.
      start_up: times of what the command did before.

    Raises:
      UserError: for an invalid configuration, before any data are read or parameters initialized.
      Preempted, Diverged, SaveFailed: see `t5x_lab.training.loop` and `t5x_lab.checkpoints.saving`.
    """
    clock, start_up = Clock(), start_up or StartUp()
    with contextlib.ExitStack() as stack:
        stack.enter_context(suppress_event_loop_errors())
        job = prepare(config, stack)
        start_up.finish("data, model and state")
        log(job.starting_point.reason)
        for change in job.changes:
            log(change)
        rule = job.run.early_stopping
        is_stopped = rule and job.starting_point.step is not None and job.evaluations.should_stop(rule, job.first_step)
        if is_stopped:
            job.budget.steps = job.first_step  # the evaluations of the last step may still be missing
        due_at_start = find_due_at_start(job)
        if job.budget.is_spent(job.first_step) and not due_at_start:
            goal = f"step {job.run.train_steps}" if job.run.train_steps else f"{job.run.train_tokens:,} tokens"
            why = f"{goal} is reached at step {job.first_step}. Raise TRAIN_STEPS or TRAIN_TOKENS to train on."
            if rule and is_stopped:
                why = f"{_describe_stop(rule)}. To train on, raise EarlyStopping.patience or remove EARLY_STOPPING."
            log(f"Nothing to do: {why}")
            mark_end(job, job.first_step)
            if is_report_outdated(job.run.model_dir):
                write_pictures(job.run.model_dir)
            return
        facts = describe_run(job.run, job.sharded, job.batch.lengths, job.first_step)
        log(banner(facts, job.run.data, job.first_step, job.budget))
        if job.starting_point.step is not None:
            clock = restore_clock(job.run, job.checkpoints.directory / str(job.starting_point.step), started=clock.began)
        hooks = Hooks(job.run.hooks, log)
        flops = lambda step: job.run.data.batch_size_at(step) * facts["flops_per_row"]
        recorder = Recorder(job.run, job.state, clock, job.batch.counted_tasks, flops, flops_before(job, facts), hooks)
        stack.callback(recorder.close)
        saver = make_saver(job, clock, recorder, hooks)
        profiled = Profiled(job.training.step, f"{job.run.model_dir}/profile", job.run.profile_steps)
        step = stack.enter_context(profiled)
        if jax.process_index() == 0:
            retry(lambda: remove_end(job.run.model_dir), job.run.model_dir)
            write_run_json(facts | {"began": clock.began})
        with fail_together(Preempted, Diverged), hooks.around(make_run_start(job)):
            evaluate(job, recorder, due_at_start, job.first_step, job.state)
            if due_at_start:
                stop_early(job, recorder, job.first_step, job.state)
                start_up.finish("evaluation")
            try:
                final_state = train_loop(
                    job.state,
                    job.batches,
                    step,
                    shard_batch=lambda batch: job.add_teacher(job.sharded.shard_batch(batch)),
                    budget=job.budget,
                    record=lambda step, metrics: recorder.step(step, job.statistics.due(step, metrics)),
                    actions=make_actions(job, recorder, saver),
                    bad_steps=job.run.bad_steps,
                    log=log,
                    start_up=start_up,
                    max_minutes=job.run.max_minutes,
                )
            except (Preempted, Diverged) as end:
                saver.finish(job.run.saving.grace_seconds if isinstance(end, Preempted) else None)
                raise
            saver.finish()
            mark_end(job, int(final_state.step))


@dataclasses.dataclass(frozen=True)
class Job:
    """A run that is ready to train.

    Attributes:
      run: configuration of the run.
      config: gin text of the configuration, with the values that its tasks set.
      starting_point: checkpoint or initialization that it starts from.
      batch: tasks and shapes of a batch.
      sharded: model on the mesh.
      add_teacher: function that adds a teacher's logits to a batch on the mesh, if the run has a teacher.
      training: training step and optimizer.
      statistics: values that hooks compute inside the step.
      checkpoints: checkpoints in the run directory.
      batches: training batches, at their position.
      state: training state at `first_step`.
      budget: number of steps or tokens to train.
      evaluations: prepared evaluations.
      changes: sentences on what differs from the checkpoint that the run continues from, and may differ.
    """

    run: RunConfig
    config: str
    starting_point: StartingPoint
    batch: ResolvedBatch
    sharded: ShardedModel
    add_teacher: AddTeacher
    training: Training
    statistics: Statistics
    checkpoints: Checkpoints
    batches: Any
    state: TrainState
    budget: Budget
    evaluations: Evaluations
    changes: Sequence[str]

    @property
    def first_step(self) -> int:
        return int(self.state.step)


def prepare(config: GinConfig, stack: contextlib.ExitStack) -> Job:
    """Builds the run. Configuration errors are found before the run directory is changed.

    Resources that must be closed at the end are registered in `stack`.
    """
    run = config.run()
    check_storage(run.model_dir)
    limit_waiting(run.wait_minutes)
    start = find_starting_point(run)
    if run.profile_steps:
        check_profiler()
    # Imports TensorFlow, after all checks that do not need it.
    batch = resolve_batch(run.data, run.model.network.architecture)
    from t5x_lab.data.pipeline import checks
    from t5x_lab.data.pipeline.batches import SeqioBatches
    from t5x_lab.data.pipeline.stateful_functions import reject_stateful_functions

    tasks = batch.tasks
    check_classes(tasks, run)
    checks.check_vocabulary(tasks, run.data, run.model.network.vocab_size, additional_ids(run.model.network))
    check_length(run.model.network, max(batch.lengths))
    content = fingerprint_content(run.data, tasks)
    documents = count_documents(tasks, run, start)
    sharded = ShardedModel(run.model, run.mesh_shape, rules=run.sharding)
    add_teacher = load_teacher(run)
    statistics = Statistics(run.hooks)
    training = assemble_run(run, sharded, batch, statistics)
    # The value is stored with the run, because inference may run without the task.
    if run.data.special_tokens.input_eos not in (None, tasks.input_eos):
        log(
            f"SpecialTokens.input_eos is {not tasks.input_eos}, but the tasks use {tasks.input_eos}, which is stored with "
            "the run."
        )
    fixed = frozen_task_bindings(config.text, run.data.mixture_or_task_name, run.train_steps, run.eval_period)
    config = GinConfig((), (config.text, f"SpecialTokens.input_eos = {tasks.input_eos}", *fixed))
    with reject_stateful_functions():  # a checkpoint could not store their position
        batches = SeqioBatches(tasks, run.data, run.seed, sharded.rows)
    evaluations = prepare_evaluations(run, config, sharded)

    make_run_directory(run.model_dir)
    stack.enter_context(owned(run.model_dir))
    start = find_starting_point(run)  # again: a previous run may have written in the meantime
    check_agreement(run, start)
    check_fits(run, start, training.abstract_state)
    changes = _check_changes(run, start, config.text, content)
    notes = {"settings": run.identity(), "config": config.text, "documents": documents, "content": content}
    checkpoints = Checkpoints(run.model_dir, run.saving, notes, evaluations.read_metric)
    stack.push(checkpoints.close)
    with waiting_for("the state that the run starts from, in all processes"):
        state = first_state(run, training, checkpoints, start, batches)
    batches.step = int(state.step)
    if jax.process_index() == 0:
        write_run_files(run, config.text, sharded)
    budget = make_budget(run, batch.lengths, read_counter(state.counters["tokens_processed"]))
    return Job(
        run, config.text, start, batch, sharded, add_teacher, training, statistics, checkpoints, batches, state, budget,
        evaluations, changes,
    )  # fmt: skip


def _check_changes(run: RunConfig, start: StartingPoint, config: str, content: Content) -> list[str]:
    """Returns sentences on what differs from the checkpoint that the run continues from, and may differ.

    Raises:
      UserError: for what must not differ.
    """
    if start.step is None:
        return []
    checkpoint = absolute_path(run.model_dir) / "checkpoints" / str(start.step)
    changed_modules = check_content(checkpoint, content)
    return [change for change in (describe_changes(checkpoint, config), changed_modules) if change]


def check_classes(tasks: Any, run: RunConfig) -> None:
    """Raises a `UserError` if the classes of a task differ from those of the model's head."""
    from t5x_lab.prompts.classification.task import check_head

    for component in tasks.components:
        check_head(component.task, run.model.head)


def count_documents(tasks: Any, run: RunConfig, start: StartingPoint) -> dict[str, int]:
    """Counts the documents that mixing rates depend on, once per run, in the first process. See `DocumentFiles`."""
    from t5x_lab.data.pipeline.failures import report_failing_record
    from t5x_lab.data.sources.text_files import document_counts

    document_counts.clear()
    if start.step is not None:
        document_counts.update(read_info(absolute_path(run.model_dir) / "checkpoints" / str(start.step)).get("documents", {}))
    with concurrent.futures.ThreadPoolExecutor(1) as pool, report_failing_record(tasks.train_components, run.data.split):
        counting = pool.submit(tasks.rates) if jax.process_index() == 0 else None
        while not broadcast(counting is None or bool(concurrent.futures.wait([counting], timeout=60).done)):
            pass  # counting may take longer than the timeout of a broadcast
        if counting:
            counting.result()
    document_counts.update(json.loads(broadcast_text(json.dumps(document_counts))))
    return dict(document_counts)


def make_run_start(job: Job) -> RunStart:
    return RunStart(
        model_dir=job.run.model_dir,
        first_step=job.first_step,
        last_step=last_step(job.budget, job.first_step),
        config=job.config,
        num_parameters=job.sharded.model.num_parameters,
    )


def restore_clock(run: RunConfig, checkpoint: epath.Path, started: float) -> Clock:
    """Returns the clock of a checkpoint, without the time between the end of the run and the start of this process.

    run.json has the start of an earlier continuation that did not write a checkpoint.
    """
    clock = Clock(**read_info(checkpoint).get("clock", {}))
    began = read_dictionary(epath.Path(run.model_dir) / FACTS).get("began")
    clock.began = max(clock.began, began) if isinstance(began, float) else clock.began
    clock.leave_out(ended_at(run.model_dir) or started, started)
    return clock


def flops_before(job: Job, facts: Mapping[str, Any]) -> float:
    """Returns the FLOPs of the run's steps before the first step of this process."""
    if job.starting_point.step is None:
        return 0.0
    stored = read_info(job.checkpoints.directory / str(job.starting_point.step)).get("flops")
    return job.first_step * facts["flops_per_step"] if stored is None else stored  # an earlier version stored none


def make_saver(job: Job, clock: Clock, recorder: Recorder, hooks: Hooks) -> Saver:
    return Saver(
        job.checkpoints,
        job.run.saving,
        job.batches,
        notes=lambda: {"clock": clock.state(), "flops": recorder.flops},
        saving=hooks.saving,
        saved=hooks.save,
        agree=broadcast,
        log=log,
    )


def stop_early(job: Job, recorder: Recorder, step: int, state: TrainState) -> None:
    """Ends training if EARLY_STOPPING requires it. The last step is then evaluated like any last step."""
    rule, evaluations = job.run.early_stopping, job.evaluations
    if rule and evaluations.should_stop(rule, step):
        log(f"{_describe_stop(rule)}. Training ends at step {step}.")
        job.budget.steps = step
        evaluate(job, recorder, evaluations.without_results(step, evaluations.due_at_end(step)), step, state)


def mark_end(job: Job, step: int) -> None:
    if jax.process_index() == 0:
        retry(lambda: write_end(job.run.model_dir, step), job.run.model_dir)


def _describe_stop(rule: EarlyStopping) -> str:
    return f"{rule.metric} has not improved for {rule.patience} evaluations"


def find_due_at_start(job: Job) -> list[PreparedEvaluation]:
    """Returns the evaluations that run before the first step.

    These are the evaluations with `at_start`; in a continued run, those due at its checkpoint that have no results.
    """
    step, evaluations = job.first_step, job.evaluations
    if job.starting_point.step is None:
        return evaluations.due_at_start(step)  # even if an earlier attempt without a checkpoint was evaluated
    due = evaluations.due_at_end(step) if job.budget.is_spent(step) else evaluations.due(step)
    return evaluations.without_results(step, due)


def evaluate(job: Job, recorder: Recorder, entries: list[PreparedEvaluation], step: int, state: TrainState) -> None:
    """Runs evaluations and records their results."""
    for entry, result in job.evaluations.evaluate(entries, step, state.params, state.average, "Training goes on."):
        recorder.evaluation(step, metrics_by_split(entry.name, result))
        for task, media in result.media.items():
            recorder.media(step, f"{entry.name}/{task}", media)


def make_actions(job: Job, recorder: Recorder, saver: Saver) -> list[Action]:
    """Returns the actions between steps, in this order: the state is saved before it is evaluated."""
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
