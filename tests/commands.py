"""The command `t5x_lab` and scripts in processes of their own, forked from one that has imported everything already.

A Python that starts afresh spends ten CPU-seconds on importing TensorFlow, SeqIO and JAX; a fork spends none. The process that
is forked from has imported, and done nothing else: no backend of JAX is started in it, no TensorFlow operation is run.
"""

import atexit
import multiprocessing
import os
import runpy
import socket
import sys
import time
import traceback
from multiprocessing import forkserver
from typing import NamedTuple

from conftest import COMPILE_FAST, ROOT

ON_ONE_DEVICE = {"XLA_FLAGS": COMPILE_FAST}

_server = multiprocessing.get_context("forkserver")
_server.set_forkserver_preload(["tensorflow", "commands_preload"])


_started: list["Command"] = []


def end_all() -> None:
    """Kills what a test left running."""
    while _started:
        command = _started.pop()
        if command.is_running():
            command.kill()
            command.wait()


def end_server() -> None:
    """Ends the process that commands are forked from, and waits for it, so that what they took is counted."""
    forkserver._forkserver._stop()


class Done(NamedTuple):
    """Exit status and output of a command."""

    returncode: int
    stdout: str
    stderr: str


class Command:
    """A running command.

    Args:
      argv: words after `t5x_lab`; or the path of a script, and words after it.
      log: a file that the output is appended to.
      stdout: another file for what goes to stdout; the same by default.
      environment: what is different in the environment; None for what is not in it.
    """

    def __init__(self, *argv: str, log: str = "log", stdout: str | None = None, environment: dict | None = None):
        self.log = os.path.abspath(log)
        out = self.log if stdout is None else os.path.abspath(stdout)
        self._process = _server.Process(
            target=_run, args=(argv, os.getcwd(), self.log, out, {**ON_ONE_DEVICE, **(environment or {})})
        )
        self._process.start()
        self.pid = self._process.pid
        _started.append(self)

    def is_running(self) -> bool:
        return self._process.is_alive()

    def wait(self, timeout: float | None = None) -> int:
        """The exit status; minus the signal's number for one that was killed."""
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise TimeoutError(f"still running after {timeout} s: {self.output()}")
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        self._process.kill()

    def terminate(self) -> None:
        self._process.terminate()

    def wait_until(self, condition, pause: float = 0.02) -> None:
        """Returns when the condition holds, or the command has ended."""
        while self.is_running() and not condition():
            time.sleep(pause)

    def output(self) -> str:
        with open(self.log, errors="replace") as file:
            return file.read()


def run(*argv: str, environment: dict | None = None, timeout: float | None = None) -> Done:
    """Runs a command to its end."""
    log, out = (f"{os.getpid()}_{time.monotonic_ns()}.{kind}" for kind in ("err", "out"))
    command = Command(*argv, log=log, stdout=out, environment=environment)
    status = command.wait(timeout)
    with open(out) as stdout:
        done = Done(status, stdout.read(), command.output())
    os.unlink(out)
    os.unlink(log)
    return done


def call(function, *args):
    """Returns the value of a test module's function, called in another process."""
    receiver, sender = _server.Pipe(duplex=False)
    process = _server.Process(target=_call, args=(sender, function, args))
    process.start()
    sender.close()
    result = receiver.recv()
    process.join()
    return result


def call_two(function, *args) -> list:
    """Returns the values of a test module's function in two jointly initialized processes with one device each."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    pipes, processes = [], []
    for index in range(2):
        receiver, sender = _server.Pipe(duplex=False)
        processes.append(_server.Process(target=_call_joined, args=(sender, address, index, function, args)))
        processes[-1].start()
        sender.close()
        pipes.append(receiver)
    values = [pipe.recv() for pipe in pipes]
    for process in processes:
        process.join()
    return values


def _call_joined(pipe, address: str, index: int, function, args) -> None:
    os.environ.update(ON_ONE_DEVICE)
    import jax

    from t5x_lab.partitioning.distributed import initialize

    initialize(address, 2, index)
    pipe.send(function(*args))
    jax.distributed.shutdown()  # which waits for the other one


def _call(pipe, function, args) -> None:
    pipe.send(function(*args))


def start_two(*argv: str, log: str = "two", devices: int = 1) -> list[Command]:
    """The command as two real processes that work as one, over loopback with Gloo, with so many devices each."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    place = [f"--coordinator_address=localhost:{port}", "--num_processes=2"]
    # As users start it: with the threads that the command itself takes care of.
    flags = f"{ON_ONE_DEVICE['XLA_FLAGS']} --xla_force_host_platform_device_count={devices}"
    environment = {"XLA_FLAGS": flags, "NPROC": None}
    return [
        Command(*argv, *place, f"--process_id={index}", log=f"{log}{index}.log", environment=environment) for index in range(2)
    ]


def _run(argv: tuple[str, ...], directory: str, log: str, out: str, environment: dict) -> None:
    """Runs the command in the child process."""
    os.setsid()
    os.chdir(directory)
    for name, value in environment.items():
        os.environ.pop(name, None)
        os.environ.update({} if value is None else {name: value})
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    for number, path in ((1, out), (2, log)):
        os.dup2(os.open(path, flags, 0o644), number)
    if str(ROOT) not in sys.path:
        sys.path.insert(0, str(ROOT))
    status = 1
    try:
        if argv[0].endswith(".py"):
            sys.argv = list(argv)
            sys.path.insert(0, os.path.dirname(argv[0]))
            runpy.run_path(argv[0], run_name="__main__")
            status = 0
        else:
            sys.argv = ["t5x_lab", *argv]
            from t5x_lab.cli.main import main

            status = main(list(argv))
        atexit._run_exitfuncs()
    except SystemExit as error:
        status = int(error.code or 0)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
