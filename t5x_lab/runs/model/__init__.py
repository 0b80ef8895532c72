"""Models for inference: `load` and `run` (`Run`), on `sharded_model` and `inference`.

`peft` saves, loads and merges adapters.
"""
