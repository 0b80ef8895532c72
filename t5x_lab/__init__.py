"""t5x_lab: pre-training in T5X's style. Gin files bind one Flax transformer to SeqIO tasks on sharded meshes.

    run = t5x_lab.load("runs/demo")
    run.generate(["Fellow citizens of the"], max_tokens=32)

Importing this package imports neither JAX nor TensorFlow; `load` and `from_gin` do when they are first used.
"""

from t5x_lab.config.object_storage import use_fsspec

__version__ = "0.1.0"
__all__ = ["from_gin", "load"]


def __getattr__(name: str):
    if name in __all__:
        from t5x_lab.runs.model import load

        return getattr(load, name)
    raise AttributeError(f"module 't5x_lab' has no attribute {name!r}")


use_fsspec()
