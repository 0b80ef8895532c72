"""Task files for lm-eval: the 31 tasks of EAI-Eval, `--tasks eai_eval --include_path` this folder."""
