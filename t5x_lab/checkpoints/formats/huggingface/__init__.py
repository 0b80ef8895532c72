"""Hugging Face's format: `directory` (reading and writing), `table` (tensor tables), one module per model family, `peft` (LoRA)."""
