"""Runs lm-eval tasks on a checkpoint, and prints and writes lm-eval's own results."""

import argparse
import json
import sys

from t5x_lab.cli.flags import add_model_flags, chosen_step, model_dirs
from t5x_lab.config.errors import UserError


def add_flags(parser: argparse.ArgumentParser) -> None:
    add_model_flags(parser)
    parser.add_argument(
        "--tasks", required=True, help="names of lm-eval's tasks, joined by commas; eai_eval are those of Wang et al. 2022"
    )
    parser.add_argument(
        "--data",
        action="append",
        default=[],
        metavar="TASK=PATH",
        help="records of a task in a file, instead of the hub's; repeat it, or give a rule, such as records/{task}.jsonl",
    )
    parser.add_argument("--include_path", help="a folder with further tasks' .yaml files")
    parser.add_argument("--limit", type=float, help="only the first N examples of each task, or a share below 1")
    parser.add_argument("--output_path", help="where lm-eval's result files go, with every example's answer")
    parser.add_argument("--num_fewshot", type=int, help="examples before the question; a task's own number by default")
    parser.add_argument("--batch_size", type=int, default=32, help="texts at a time; fewer of long ones")
    parser.add_argument("--max_length", type=int, help="tokens of a context that are read; the model's positions, or 2048")
    parser.add_argument("--json", action="store_true", help="print one JSON object, and everything else to stderr")


def run(args: argparse.Namespace) -> None:
    try:
        from lm_eval.loggers import EvaluationTracker
        from lm_eval.utils import handle_non_serializable, make_table
    except ImportError as error:
        raise UserError(f"lm-eval is not installed ({error}). Run: pip install 't5x_lab[harness]'") from error

    from t5x_lab.evaluation.harness import HarnessModel, add_random_baselines, ranking, run_harness
    from t5x_lab.evaluation.results import as_json
    from t5x_lab.runs.load import load

    step = chosen_step(args.step)
    loaded = load(model_dirs(args.model_dir), step=step, weights=args.weights)
    model = HarnessModel(model=loaded, batch_size=args.batch_size, max_length=args.max_length)
    tracker = EvaluationTracker(output_path=args.output_path)
    results = run_harness(
        model,
        [name.strip() for name in args.tasks.split(",") if name.strip()],
        include_path=args.include_path,
        data=args.data,
        limit=args.limit,
        num_fewshot=args.num_fewshot,
        evaluation_tracker=tracker,
        log_samples=True,
    )
    samples = results.pop("samples")
    add_random_baselines(results, samples)
    results["ranking"] = as_json(ranking(model, samples, results["configs"]))
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
