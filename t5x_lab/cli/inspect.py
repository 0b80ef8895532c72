"""Lists parameters, shapes, logical axes and sizes of a configuration, or the contents of a checkpoint of any format."""

import argparse
import json

from t5x_lab.cli.flags import add_gin_flags, add_trust_flag, chosen_step, gin_config
from t5x_lab.config.errors import NotSet, UserError


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint", nargs="?", help="run directory or checkpoint of any format whose contents are listed")
    parser.add_argument("--verify", action="store_true", help="read the whole checkpoint and compare it with its checksums")
    parser.add_argument("--model_dir", help="run directory; default: the configuration of the gin flags")
    parser.add_argument("--step", default="latest", help="step of the checkpoint, or latest")
    add_trust_flag(parser)
    add_gin_flags(parser)
    parser.add_argument("--json", action="store_true", help="print a JSON object")


def run(args: argparse.Namespace) -> None:
    if args.checkpoint:
        return _list(args)
    if args.verify:
        raise UserError("--verify needs a checkpoint: t5x_lab inspect DIR --verify.")
    from t5x_lab.checkpoints.layout import check_same_parameters, find_checkpoint
    from t5x_lab.models.classifier import make_model
    from t5x_lab.observe.model_info import model_info, parameter_rows
    from t5x_lab.runs.config.gin_config import run_config_file
    from t5x_lab.runs.train.batch import resolve_batch

    files = [run_config_file(args.model_dir, args.trust)] if args.model_dir else []
    config = gin_config(args, *files)
    model = make_model(config.model())
    if args.dry_run:
        print(config.text)
    if args.model_dir:
        check_same_parameters(find_checkpoint(args.model_dir, chosen_step(args.step)), model.abstract_params)
    network = model.config.network
    try:
        lengths = resolve_batch(config.data(), network.architecture).lengths
    except NotSet:  # a model alone: T5's lengths
        lengths = {"encoder_decoder": (512, 114), "encoder": (512, 0)}.get(network.architecture, (0, 626))
    flops = network.flops(*lengths) / sum(lengths)
    if args.json:
        print(
            json.dumps({"num_parameters": model.num_parameters, "parameters": parameter_rows(model), "flops_per_token": flops})
        )
        return
    print(model_info(model), end="")
    print(f"{flops:,.0f} FLOPs per token, forward and backward, at {lengths[0]} + {lengths[1]} tokens")


def _list(args: argparse.Namespace) -> None:
    """Lists the tensors of a checkpoint by their names in its format."""
    from t5x_lab.checkpoints.formats.location import find, open_as_saved
    from t5x_lab.checkpoints.verification import explain_damage, verify

    location, had_checksums = find(args.checkpoint, chosen_step(args.step)), False
    with explain_damage(location.path):
        tensors = open_as_saved(location)
        if args.verify and location.format == "t5x_lab":
            had_checksums = verify(location.path)
        elif args.verify:
            for tensor in tensors.values():
                for _ in tensor.chunks():
                    pass
    from t5x_lab.runs.config.checkpoint_config import read_config, text_settings

    try:
        settings, unknown = text_settings(read_config(location, args.trust)), ""
    except UserError as error:  # no configuration, or one that imports a missing user module
        settings, unknown = None, error.sentence
    total = sum(tensor.nbytes for tensor in tensors.values())
    if args.json:
        describe = lambda tensor: {"shape": list(tensor.shape), "dtype": str(tensor.dtype), "bytes": tensor.nbytes}
        listed = [{"name": name, **describe(tensor)} for name, tensor in tensors.items()]
        print(
            json.dumps(
                {"format": location.format, "path": str(location.path), "bytes": total, "text": settings, "tensors": listed}
            )
        )
        return
    width = max(map(len, tensors), default=0)
    for name, tensor in tensors.items():
        shape = "x".join(map(str, tensor.shape)) or "scalar"
        name = "".join(c if c.isprintable() and not "\ud800" <= c <= "\udfff" else ascii(c)[1:-1] for c in name)
        print(f"{name:<{width}}  {shape:>20}  {tensor.dtype!s:>8}  {tensor.nbytes:>15,}")
    verified = "; all checksums are correct" if had_checksums else "; it has no checksums"
    result = "" if not args.verify else verified if location.format == "t5x_lab" else "; all tensors are readable"
    if settings is None:
        print(f"Its text settings are unknown: {unknown}")
    else:
        print(", ".join(f"{name} {value}" for name, value in settings.items()))
    print(f"{location.path}: {location.title}, {len(tensors)} arrays, {total:,} bytes{result}")
