"""Configuration: `run_config`, `gin_config`, `configurables`, `task_defaults`, `checkpoint_config`."""
