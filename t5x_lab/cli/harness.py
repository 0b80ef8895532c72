"""Runs lm-eval tasks on a checkpoint. Prints lm-eval's result tables and writes its result files."""

import argparse
import json
import sys

from t5x_lab.cli.flags import add_gin_flags, add_model_flags, load_model, model_config
from t5x_lab.config.errors import UserError


def add_flags(parser: argparse.ArgumentParser) -> None:
    add_model_flags(parser)
    parser.add_argument(
        "--tasks", required=True, help="names of lm-eval tasks, separated by commas; eai_eval is the suite of Wang et al. 2022"
    )
    parser.add_argument(
        "--data",
        action="append",
        default=[],
        metavar="TASK=PATH",
        help="local data file of a task, instead of the hub; repeatable; or a pattern such as records/{task}.jsonl",
    )
    parser.add_argument("--include_path", help="folder with .yaml files of further tasks")
    parser.add_argument("--limit", type=float, help="number of examples of each task, or a share below 1")
    parser.add_argument("--output_path", help="folder for lm-eval's result files, with the answer to every example")
    parser.add_argument("--num_fewshot", type=int, help="number of few-shot examples; default: the task's own")
    parser.add_argument("--batch_size", type=int, default=32, help="texts per batch; batches of long texts are smaller")
    parser.add_argument("--max_length", type=int, help="maximum tokens of a context; default: the model's positions, or 2048")
    parser.add_argument("--json", action="store_true", help="print one JSON object to stdout and everything else to stderr")
    add_gin_flags(parser, has_dry_run=False)


def run(args: argparse.Namespace) -> None:
    try:
        from lm_eval.loggers import EvaluationTracker
        from lm_eval.utils import handle_non_serializable, make_table
    except ImportError as error:
        raise UserError(f"lm-eval is not installed ({error}). Run: pip install 't5x_lab[harness]'") from error

    from t5x_lab.evaluation.harness.model import HarnessModel, add_random_baselines, ranking_report, run_harness
    from t5x_lab.evaluation.results import finite_json
    from t5x_lab.papers.eai_eval import NAME_PREFIX, TASK_FOLDER

    loaded = load_model(args, model_config(args))
    model = HarnessModel(model=loaded, batch_size=args.batch_size, max_length=args.max_length)
    tracker = EvaluationTracker(output_path=args.output_path)
    results = run_harness(
        model,
        [name.strip() for name in args.tasks.split(",") if name.strip()],
        include_paths=[TASK_FOLDER, *([args.include_path] if args.include_path else [])],
        name_prefix=NAME_PREFIX,
        data=args.data,
        limit=args.limit,
        num_fewshot=args.num_fewshot,
        evaluation_tracker=tracker,
        log_samples=True,
    )
    samples = results.pop("samples")
    add_random_baselines(results, samples)
    results["ranking"] = finite_json(ranking_report(model, samples, results["configs"]))
    results["config"] |= {"model": "t5x_lab", "model_args": {"model_dir": args.model_dir, "step": loaded.step}}
    results["contexts_cut"] = model.cut
    if args.output_path:
        tracker.save_results_aggregated(results=results, samples=samples)
        for task in results["configs"]:
            tracker.save_results_samples(task_name=task, samples=samples[task])
    out = sys.stderr if args.json else sys.stdout
    print(make_table(results), file=out)
    if results.get("groups"):
        print(make_table(results, "groups"), file=out)
    if args.json:
        print(json.dumps(results, default=handle_non_serializable, ensure_ascii=False))
