"""Gin files and tasks are found from a wheel, an editable install and a bare checkout; the stable packages win."""

import os
import pathlib
import subprocess
import sys
import zipfile

import pytest
from conftest import ROOT

pytestmark = pytest.mark.slow

PROBE = """
import importlib.util, os, t5x_lab
from t5x_lab.config.gin_files import PACKAGE_GIN
assert (PACKAGE_GIN / "runs" / "pretrain.gin").exists() and importlib.util.find_spec("t5x_lab.tasks.sotu")
"""
USES = """
from t5x_lab.data.tasks import names as tasks
from t5x_lab.data.environment import check_environment
from t5x_lab.runs.config.gin_config import GinConfig
check_environment()
assert GinConfig(["models/t5_1_1/small.gin"]).model().network.emb_dim == 512
assert "sotu_span_corruption" in tasks.known_names() and "c4_v220_full_lm" in tasks.known_names()
"""


def probe(python: str, code: str = PROBE, **environment) -> str:
    """Runs the code in an empty directory; returns where the package was found."""
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    code += "\nprint('found', os.path.dirname(t5x_lab.__file__))"
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, env={**clean, **environment})
    assert done.returncode == 0, done.stderr
    return done.stdout.split()[-1]


def test_from_a_wheel(tmp_path):
    """Built from a copy of the committed files, and unpacked as pip would, in front of this environment's packages."""
    source = tmp_path / "source"
    files = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True).stdout.split("\0")
    if not any(files):
        pytest.skip("needs a git checkout to know the project's files")
    for file in filter(None, files):
        if (ROOT / file).exists() or (ROOT / file).is_symlink():
            target = source / file
            target.parent.mkdir(parents=True, exist_ok=True)
            if (ROOT / file).is_symlink():
                target.symlink_to(os.readlink(ROOT / file))
            else:
                target.write_bytes((ROOT / file).read_bytes())
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "-w", str(tmp_path), str(source)]
    built = subprocess.run(command, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    (wheel,) = tmp_path.glob("t5x_lab-*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert "t5x_lab/gin/models/t5_1_1/small.gin" in names and "t5x_lab/tasks/sotu.py" in names and "t5x_lab/py.typed" in names
    assert not [name for name in names if name.startswith(("gin/", "tasks/", "tests/"))]
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    assert probe(sys.executable, PROBE + USES, PYTHONPATH=str(tmp_path / "site")) == str(tmp_path / "site" / "t5x_lab")


@pytest.mark.exhaustive
def test_from_a_bare_checkout():
    assert probe(sys.executable, PYTHONPATH=str(ROOT)) == str(ROOT / "t5x_lab")


@pytest.mark.exhaustive
def test_from_an_editable_install():
    """The suite itself runs in one; outside of the checkout and without PYTHONPATH it is found all the same."""
    shown = subprocess.run([sys.executable, "-m", "pip", "show", "-f", "t5x_lab"], capture_output=True, text=True).stdout
    if "Editable project location" not in shown:
        pytest.skip("t5x_lab is not installed in editable form here")
    assert pathlib.Path(probe(sys.executable)).resolve() == (ROOT / "t5x_lab").resolve()


def test_the_stable_packages_are_in_place_after_one_install():
    import seqio.version
    import tensorflow_datasets.version

    assert "dev" not in seqio.version.__version__ and "nightly" not in tensorflow_datasets.version.__version__
    assert tuple(map(int, tensorflow_datasets.version.__version__.split("."))) >= (4, 9, 10)
