"""Parameters, shapes, logical axes and bytes of a configuration or of a run's checkpoint."""

import argparse
import json

from t5x_lab.cli.flags import add_gin_flags, chosen_step, gin_config
from t5x_lab.config.errors import UserError


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model_dir", help="a run directory; without it, the configuration of the gin flags")
    parser.add_argument("--step", default="latest", help="a checkpoint's step, or latest")
    add_gin_flags(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> None:
    from t5x_lab.checkpoints.layout import check_same_tree, find_checkpoint
    from t5x_lab.models.model import Model
    from t5x_lab.networks.flops import flops_per_token
    from t5x_lab.observe.model_info import model_info, parameter_rows
    from t5x_lab.runs.config import run_config_file

    files = [run_config_file(args.model_dir)] if args.model_dir else []
    config = gin_config(args, *files)
    model = Model(config.model())
    if args.dry_run:
        print(config.text)
    if args.model_dir:
        check_same_tree(find_checkpoint(args.model_dir, chosen_step(args.step)), model.abstract_params)
    network = model.config.network
    try:
        lengths = config.data().model_lengths(network.architecture)
    except UserError:  # a model alone: T5's lengths
        lengths = {"encoder_decoder": (512, 114), "encoder": (512, 0)}.get(network.architecture, (0, 626))
    flops = flops_per_token(network, *lengths)
    if args.json:
        print(
            json.dumps({"num_parameters": model.num_parameters, "parameters": parameter_rows(model), "flops_per_token": flops})
        )
        return
    print(model_info(model), end="")
    print(f"{flops:,.0f} FLOPs per token, forward and backward, at {lengths[0]} + {lengths[1]} tokens")
