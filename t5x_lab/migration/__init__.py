"""`t5x_lab migrate`: gin files of T5X projects as gin files of t5x_lab.

statements.py   reads a gin file without building anything
project.py      files with their includes, and what macros and parameters are in the end
rules.py        what each statement becomes
write.py        translates files, writes them and the report
"""
