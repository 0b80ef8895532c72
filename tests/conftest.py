"""Every test runs on eight virtual CPU devices, with matrix products in full float32 and little time spent on compiling."""

import atexit
import os
import pathlib
import shutil
import tempfile

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0")
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    # Programs that several tests, or the processes they start, compile alike are compiled once.
    os.environ["JAX_COMPILATION_CACHE_DIR"] = tempfile.mkdtemp(prefix="t5x_lab_programs_")
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.3"
    atexit.register(shutil.rmtree, os.environ["JAX_COMPILATION_CACHE_DIR"], ignore_errors=True)

import jax
import pytest

jax.config.update("jax_default_matmul_precision", "highest")

ROOT = pathlib.Path(__file__).resolve().parent.parent
SHARED = ROOT.parent / "shared" / "data"


def shared_data(*parts: str) -> pathlib.Path:
    """A path in the data that tests may compare with; skips the test where they are not there."""
    path = SHARED.joinpath(*parts)
    if not path.exists():
        pytest.skip(f"needs {'/'.join(parts)} of the shared test data, which are not here")
    return path


def pytest_collection_modifyitems(items):
    """Tests that ask one trained model go to one worker, so that it is trained once."""
    for item in items:
        for model in {"trained", "known"} & set(item.fixturenames):
            item.add_marker(pytest.mark.xdist_group(model))


@pytest.fixture(autouse=True)
def _in_empty_directory(tmp_path, monkeypatch):
    """Tests write where they may."""
    monkeypatch.chdir(tmp_path)
