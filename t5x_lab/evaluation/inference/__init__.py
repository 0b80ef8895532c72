"""Batch inference for `t5x_lab infer`: examples of files (`files`) and of tasks (`task_examples`), JSONL results (`infer`)."""
