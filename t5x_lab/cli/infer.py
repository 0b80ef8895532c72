"""Writes predictions, scores, rankings or classes of all examples of a task or file to JSONL. Resumes after an interruption."""

import argparse
import json
import os

from t5x_lab.cli.flags import (
    MAX_TOKENS,
    SAMPLING,
    SAMPLING_DEFAULTS,
    add_gin_flags,
    add_model_flags,
    add_process_flags,
    add_sampling_flags,
    connect_processes,
    gin_config,
    load_model,
    model_config,
    model_dirs,
    print_once,
)
from t5x_lab.cli.t5x_flags import add_t5x_flags, take_t5x_bindings


def add_flags(parser: argparse.ArgumentParser) -> None:
    add_model_flags(parser, is_required=False)
    parser.add_argument(
        "--input",
        help='.txt with one input per line, or .jsonl with "inputs", "targets" to score and "choices" to rank; also .gz, .zst',
    )
    parser.add_argument("--task", help="a SeqIO task or mixture, instead of --input")
    parser.add_argument("--split", help="split of the task; default: validation, or that of T5X's gin files")
    parser.add_argument("--output", help="the .jsonl file to write; an existing one is resumed")
    parser.add_argument(
        "--mode",
        choices=("predict", "score", "rank", "classify"),
        default="predict",
        help="generate text, score targets, rank choices, or classify",
    )
    parser.add_argument("--choice", action="append", default=[], help="a choice for lines without choices, to rank; repeatable")
    parser.add_argument("--eos", action="store_true", help="score an EOS token after targets and choices of a file")
    parser.add_argument("--batch_size", type=int, default=32, help="texts per batch; batches of long texts are smaller")
    parser.add_argument("--max_length", type=int, help="truncate inputs from the left to this number of tokens")
    parser.add_argument("--whole_inputs", action="store_true", help="do not truncate a task's inputs to TASK_FEATURE_LENGTHS")
    parser.add_argument("--shard_id", type=int, default=0, help="number of this process's shard of the input")
    parser.add_argument("--num_shards", type=int, default=1, help="number of shards of the input")
    add_sampling_flags(parser)
    parser.set_defaults(max_tokens=None, num_samples=1)  # the tokens are those of the task, if there is one
    add_gin_flags(parser)
    add_t5x_flags(parser)
    add_process_flags(parser)


def run(args: argparse.Namespace) -> None:
    with connect_processes(args):
        _run(args)


def _run(args: argparse.Namespace) -> None:
    import jax

    from t5x_lab.checkpoints.layout import absolute_path
    from t5x_lab.config.errors import UserError
    from t5x_lab.evaluation.inference.files import check_shard, read_examples
    from t5x_lab.evaluation.inference.infer import infer, ranking_report
    from t5x_lab.evaluation.results import finite_json

    _take_t5x_settings(args)
    if not args.model_dir or not args.output:
        raise UserError("Pass --model_dir with a run directory or a checkpoint, and --output with the .jsonl file to write.")
    if bool(args.input) == bool(args.task):
        raise UserError("Pass either --input with a file or --task with a name.")
    config = model_config(args, gin_is_for_model=bool(args.input))
    task_config = _config(args) if args.task else None
    args.max_tokens = args.max_tokens or (_target_length(task_config) if args.task else MAX_TOKENS)
    if args.dry_run:
        print_once((task_config or _config(args)).text)
        return
    if args.input and os.path.realpath(args.input) == os.path.realpath(args.output):
        raise UserError("--input and --output name the same file. Set another --output.")

    check_shard(args.shard_id, args.num_shards)
    shard = dict(shard_id=args.shard_id, num_shards=args.num_shards)
    read = lambda: read_examples(args.input, args.mode, args.choice, **shard)
    total = sum(1 for _ in read()) if args.input else None  # this also finds invalid lines before any work
    model = load_model(args, config)
    infer(
        model,
        read() if args.input else _task_examples(args, task_config, model, **shard),
        args.output,
        mode=args.mode,
        batch_size=args.batch_size,
        sampling=_sampling(args),
        eos=args.eos,
        max_length=args.max_length,
        settings={
            "model_dir": ",".join(str(absolute_path(directory)) for directory in model_dirs(args.model_dir)),
            "step": model.step,
            "choices": args.choice,
            "gin": [*args.gin_file, *args.gin_bindings, *args.gin],
            "whole_inputs": args.whole_inputs,
            "parameter_dtype": args.parameter_dtype,
            "weights": args.weights,
            "shard": f"{args.shard_id} of {args.num_shards}",
        },
        writes=jax.process_index() == 0,
        total=total,
    )
    if args.mode == "rank" and jax.process_index() == 0:
        print(json.dumps(finite_json(ranking_report(args.output, args.choice))))


def _sampling(args: argparse.Namespace) -> dict:
    """Returns the arguments of `Run.generate`. Of several samples the most likely is the last."""
    several = {"num_samples": args.num_samples, "sort_samples": True} if args.num_samples > 1 else {}
    return {name: getattr(args, name) for name in SAMPLING} | several


def _take_t5x_settings(args: argparse.Namespace) -> None:
    """Applies T5X's bindings of checkpoint, output directory and task. T5X writes DIRECTORY/TASK-MODE.jsonl."""
    is_t5x = args.output is None
    take_t5x_bindings(args, output="INFER_OUTPUT_DIR")
    if is_t5x and args.model_dir and args.output and not args.input:
        config = _config(args)
        args.task = args.task or config.build("DataConfig.mixture_or_task_name")
        _take_evaluation(args, config.build("MetricsEvaluation"))
        shard = f"-{args.shard_id:05d}-of-{args.num_shards:05d}" if args.num_shards > 1 else ""
        args.output = f"{args.output}/{args.task}-{args.mode}{shard}.jsonl"
    args.split = args.split or "validation"


# Flags, and the fields of `BeamConfig` and `SamplingConfig`.
_OF_BEAMS = {"beam_size": "size", "beam_alpha": "alpha"}
_OF_SAMPLES = {name: name for name in ("temperature", "top_k", "top_p")}


def _take_evaluation(args: argparse.Namespace, evaluation) -> None:
    """Applies what T5X's gin files set for the split, the lengths and the decoding, unless flags set it."""
    from t5x_lab.decoding.beam_search import BeamConfig

    args.split = args.split or evaluation.split
    args.max_tokens = args.max_tokens or evaluation.max_tokens
    args.whole_inputs = args.whole_inputs or evaluation.truncate_inputs is None
    if any(getattr(args, flag) != SAMPLING_DEFAULTS[flag] for flag in (*_OF_BEAMS, *_OF_SAMPLES)):
        return
    decoding = evaluation.decoding
    for flag, field in (_OF_BEAMS if isinstance(decoding, BeamConfig) else _OF_SAMPLES).items():
        setattr(args, flag, getattr(decoding, field))
    args.num_samples = evaluation.num_samples


def _config(args: argparse.Namespace):
    from t5x_lab.config.gin_files import binding
    from t5x_lab.runs.config.checkpoint_config import config_files

    task = (binding(f"MIXTURE_OR_TASK_NAME={args.task}"),) if args.task else ()
    return gin_config(args, *config_files(model_dirs(args.model_dir)[0], args.trust), "runs/infer.gin", fixed=task)


def _target_length(config) -> int:
    """Returns the number of tokens that are generated for a task: the length of its targets, as in evaluations and in T5X."""
    lengths = config.build("DataConfig.task_feature_lengths") or {}
    return lengths.get("targets") or MAX_TOKENS


def _task_examples(args: argparse.Namespace, config, model, **shard: int):
    from t5x_lab.runs.data_layer import load_data_layer

    load_data_layer()
    from t5x_lab.data.pipeline.batches import resolve_tasks
    from t5x_lab.evaluation.inference.task_examples import read_task_examples

    network, data = model.network, config.data()
    mixture = resolve_tasks(data, network.architecture, network.vocab_size)
    options = dict(stop_ids=model.stop_ids, cut=not args.whole_inputs, **shard)
    vocabularies = {"inputs": model.input_vocabulary, "targets": model.vocabulary}
    return read_task_examples(mixture, args.split, args.mode, vocabularies, **options)
