"""The command line: one thin file per command, each with `add_flags(parser)` and `run(args)`.

Modules here import nothing heavy at the top, so that `--help` answers at once.
"""
