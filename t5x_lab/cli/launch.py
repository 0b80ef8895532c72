"""Writes the file that runs a command on a cluster. The command is checked before: t5x_lab launch … -- train --gin_file=…"""

import argparse
import pathlib
import re
import shlex
import sys

KINDS = ("slurm", "jobset", "hosts")
_PROCESS_COMMANDS = ("train", "eval", "infer", "generate")  # those that several processes run together


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(command=[])  # the words after `--`
    parser.add_argument("--kind", choices=KINDS, required=True, help="Slurm script, GKE JobSet, or a script for each host")
    parser.add_argument("--output", required=True, help="file to write")
    parser.add_argument("--name", default="t5x-lab", help="name of the job")
    parser.add_argument("--max_restarts", type=int, default=100, help="number of restarts after failures")
    parser.add_argument("--env", action="append", default=[], metavar="NAME=VALUE", help="environment variable; repeatable")
    hosts = parser.add_argument_group("slurm and hosts")
    hosts.add_argument("--hosts", type=int, default=1, help="number of hosts, each with one process")
    slurm = parser.add_argument_group("slurm")
    slurm.add_argument("--gpus_per_host", type=int, default=8, help="number of GPUs of a host; 0 = none")
    slurm.add_argument("--time", help="time limit, such as 24:00:00; default: the partition's")
    slurm.add_argument(
        "--sbatch", action="append", default=[], metavar="OPTION", help="option such as partition=gpu; repeatable"
    )
    jobset = parser.add_argument_group("jobset")
    jobset.add_argument("--topology", help="TPU slice, such as v5p:4x4x4")
    jobset.add_argument("--num_slices", type=int, default=1, help="number of slices")
    jobset.add_argument("--image", help="container image with t5x_lab; default: a name to replace in the file")
    jobset.add_argument("--volume", action="append", default=[], metavar="CLAIM:PATH", help="volume of the pods; repeatable")
    others = parser.add_argument_group("hosts")
    others.add_argument("--coordinator_address", help="address of host 0 with a free port, such as host0:1234")


def run(args: argparse.Namespace) -> None:
    from t5x_lab.config.errors import UserError
    from t5x_lab.config.json_files import write_atomically
    from t5x_lab.config.object_storage import check_local

    if not args.command or args.command[0] not in _PROCESS_COMMANDS:
        raise UserError(
            f"Write the command after `--`, such as t5x_lab launch … -- train --gin_file=my_run.gin. It must be one of "
            f"{', '.join(_PROCESS_COMMANDS)}."
        )
    check_local("--output", args.output)
    for flag in ("hosts", "num_slices"):
        if getattr(args, flag) < 1:
            raise UserError(f"--{flag} is {getattr(args, flag)}. It must be at least 1.")
    environment = dict(_pair(text, "=", "--env") for text in args.env)
    text, hosts, devices = {"slurm": _slurm, "jobset": _jobset, "hosts": _hosts}[args.kind](args, environment)
    if args.command[0] == "train":
        _check_run(args, hosts, devices)
    write_atomically(pathlib.Path(args.output), text)
    print(f"{args.output}: {hosts} {'host' if hosts == 1 else 'hosts'}. Start it with: {_start(args)}")


def _program(args: argparse.Namespace, is_distributed: bool) -> list[str]:
    flags = ["--distributed"] if is_distributed and "--distributed" not in args.command else []
    return ["t5x_lab", *args.command, *flags]


def _slurm(args: argparse.Namespace, environment: dict):
    from t5x_lab.launch.slurm import make_batch_script

    settings = dict(nodes=args.hosts, gpus_per_node=args.gpus_per_host, max_restarts=args.max_restarts, time=args.time)
    program = _program(args, is_distributed=args.hosts > 1)
    text = make_batch_script(args.name, program, **settings, options=args.sbatch, environment=environment)
    return text, args.hosts, args.hosts * args.gpus_per_host or None


def _jobset(args: argparse.Namespace, environment: dict):
    import yaml

    from t5x_lab.config.errors import UserError
    from t5x_lab.launch.jobset import IMAGE, Volume, make_jobset
    from t5x_lab.launch.slices import parse_slice

    tpu = parse_slice(args.topology, "--kind=jobset")
    if not re.fullmatch(r"[a-z]([-a-z0-9]{0,40}[a-z0-9])?", args.name):
        raise UserError(f'--name is "{args.name}". Kubernetes needs at most 42 lower case letters, digits and hyphens.')
    hosts = tpu.hosts * args.num_slices
    volumes = [Volume(*_pair(text, ":", "--volume")) for text in args.volume]
    code = shlex.join(_program(args, is_distributed=hosts > 1))
    settings = dict(max_restarts=args.max_restarts, num_slices=args.num_slices, volumes=volumes, environment=environment)
    jobset = make_jobset(args.name, code, tpu, image=args.image or IMAGE, **settings)
    return yaml.safe_dump(jobset, sort_keys=False, width=1000), hosts, tpu.chips * args.num_slices


def _hosts(args: argparse.Namespace, environment: dict):
    from t5x_lab.config.errors import UserError
    from t5x_lab.launch.hosts import make_host_script

    if not re.fullmatch(r"[^:/\s]+:\d+", args.coordinator_address or ""):
        raise UserError("--kind=hosts needs the address of host 0 with a free port, such as --coordinator_address=host0:1234.")
    settings = dict(hosts=args.hosts, coordinator=args.coordinator_address, max_restarts=args.max_restarts)
    return make_host_script(_program(args, is_distributed=False), **settings, environment=environment), args.hosts, None


def _check_run(args: argparse.Namespace, hosts: int, devices: int | None) -> None:
    """Builds the run of the command, and warns of what does not suit several hosts.

    Raises:
      UserError: for an invalid configuration or mesh, or a run directory that pods do not share.
    """
    from t5x_lab.cli.flags import gin_config
    from t5x_lab.cli.main import parse
    from t5x_lab.config.errors import UserError

    run = gin_config(parse(*args.command)[1]).run()
    if devices is not None:
        run.mesh_shape.resolve(devices, args.num_slices)
    paths = [volume.partition(":")[2] for volume in args.volume]
    is_shared = "://" in run.model_dir or any(f"{run.model_dir}/".startswith(f"{path.rstrip('/')}/") for path in paths)
    if args.kind == "jobset" and not is_shared:
        raise UserError(
            f"MODEL_DIR is {run.model_dir}, which ends with its pod. Set it to a bucket, such as gs://my-bucket/runs/x, or to "
            "a path on a volume: --volume=CLAIM:PATH."
        )
    if run.data.shards % hosts:
        print(
            f"t5x_lab launch: DATA_SHARDS is {run.data.shards} and there are {hosts} hosts, so that some read the same data. A "
            f"multiple of {hosts} is best, such as --gin.DATA_SHARDS={hosts}. It is fixed for a run.",
            file=sys.stderr,
        )


def _start(args: argparse.Namespace) -> str:
    file = shlex.quote(args.output)
    starts = {"slurm": f"sbatch {file}", "jobset": f"kubectl apply -f {file}", "hosts": f"bash {file} NUMBER, on every host"}
    return starts[args.kind]


def _pair(text: str, separator: str, flag: str) -> tuple[str, str]:
    """Returns the parts of a flag's value around a separator.

    Raises:
      UserError: if one is missing.
    """
    from t5x_lab.config.errors import UserError

    name, _, value = text.partition(separator)
    if not name or not value:
        example = "NAME=VALUE" if separator == "=" else "CLAIM:PATH"
        raise UserError(f"{flag} is {text}. It must be {example}.")
    return name, value
