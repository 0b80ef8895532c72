"""Adapter for lm-eval: `model` answers its requests, `data_files` points its tasks to local data."""
