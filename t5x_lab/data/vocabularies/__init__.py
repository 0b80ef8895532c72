"""Vocabularies: `config` settings, `build` SeqIO vocabularies, `sentencepiece`, `huggingface`, `sentinels`, `truncation`."""
