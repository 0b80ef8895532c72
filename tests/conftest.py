"""Every test runs on eight virtual CPU devices, with matrix products in full float32 and little time spent on compiling."""

import atexit
import gc
import importlib.metadata
import os
import pathlib
import shutil
import sys
import tempfile

# A CPU's programs are compiled without optimization and, where jaxlib has them as an option, without XLA's MLIR emitters: four
# times as fast.
COMPILE_FAST = "--xla_backend_optimization_level=0"
if tuple(map(int, importlib.metadata.version("jaxlib").split(".")[:2])) < (0, 11):
    COMPILE_FAST += " --xla_cpu_use_fusion_emitters=false"
os.environ.setdefault("XLA_FLAGS", f"--xla_force_host_platform_device_count=8 {COMPILE_FAST}")
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("NPROC", "64")  # enough threads for the collectives of eight devices, as in t5x_lab/config/threads.py
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    # Programs that several tests, workers or commands compile alike are compiled once. With a size, files are locked.
    os.environ["JAX_COMPILATION_CACHE_DIR"] = tempfile.mkdtemp(prefix="t5x_lab_programs_")
    os.environ["JAX_COMPILATION_CACHE_MAX_SIZE"] = str(1 << 30)
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.15"
    atexit.register(shutil.rmtree, os.environ["JAX_COMPILATION_CACHE_DIR"], ignore_errors=True)

import jax
import pytest

jax.config.update("jax_default_matmul_precision", "highest")
jax.config.update("jax_numpy_rank_promotion", "raise")

ROOT = pathlib.Path(__file__).resolve().parent.parent
SHARED = ROOT.parent / "shared" / "data"
DATA = pathlib.Path(__file__).resolve().parent / "data"


def shared_data(*parts: str) -> pathlib.Path:
    """A path in the data that tests may compare with: those in `tests/data`, else the shared ones, else the test skips."""
    for root in (DATA, SHARED):
        if root.joinpath(*parts).exists():
            return root.joinpath(*parts)
    pytest.skip(f"needs {'/'.join(parts)} of the shared test data, which are not here")


def pytest_collection_finish():
    """Excludes what test modules have imported from garbage collections, which would visit a million objects each time."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure():
    if "commands" in sys.modules:
        sys.modules["commands"].end_server()


@pytest.fixture(autouse=True)
def _leaves_nothing_running():
    yield
    if "commands" in sys.modules:
        sys.modules["commands"].end_all()


@pytest.fixture(autouse=True)
def _in_empty_directory(tmp_path, monkeypatch):
    """Tests write where they may, and find no module of another test: gin files put the working directory on Python's path."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
