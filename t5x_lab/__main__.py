"""`python -m t5x_lab`, the same as the command `t5x_lab`."""

from t5x_lab.cli.main import run_program

run_program()
