"""`t5x_lab migrate`: gin files of T5X projects as gin files of t5x_lab.

statements.py   reads a gin file without building anything
includes.py     counterparts of T5X's own files
project.py      files with their includes, and what macros and parameters are in the end
steps.py        steps of a translation, and kinds of rules
rules/          what the bindings of T5X become, by topic
translate.py    what any binding becomes
command_line.py the gin files and bindings of one command as one file
shell.py        words of shell scripts
scripts.py      commands of T5X in launch scripts
write.py        translates files, writes them and the report
direct.py       translates what a command of t5x_lab reads, in memory
"""
