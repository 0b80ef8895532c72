"""Hugging Face's format: `directory` (reading and writing), `table` (tensor tables), a module per model family, `peft`."""
