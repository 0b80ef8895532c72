"""Command line: `main`, `flags`, `process`, and one module per command with `add_flags(parser)` and `run(args)`.

Modules here import JAX and TensorFlow only inside functions, so that `--help` is fast.
"""
