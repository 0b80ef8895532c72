"""`t5x_lab convert`: `convert` writes a checkpoint in another format, `export_tokenizer` its tokenizer, `model_card` a card."""
