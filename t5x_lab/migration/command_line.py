"""The gin files and bindings of one command as one gin file, which is translated like a file of the project."""

import pathlib
from collections.abc import Collection, Sequence
from typing import Any

from t5x_lab.migration.project import Project
from t5x_lab.migration.statements import macros_in, macros_of, parse_statements


def together(files: Sequence[str], bindings: Sequence[str]) -> str:
    """Returns a gin text that includes the files and has the bindings after them, as gin reads a command."""
    includes = (f'include "{file}"' for file in files)
    return "".join(f"{line}\n" for line in (*includes, *bindings))


def find_file(file: str, search_paths: Sequence[str]) -> pathlib.Path | None:
    """Returns the path of a file in the working directory or a search path; None if it is not there."""
    folders = (pathlib.Path(folder) for folder in ("", *search_paths))
    return next((folder / file for folder in folders if (folder / file).is_file()), None)


def values_in(files: Sequence[pathlib.Path], search_paths: Sequence[str], names: Collection[str]) -> dict[str, Any]:
    """Returns the last values that files bind to names, with macros replaced. Names without a value are left out."""
    contexts = [Project([str(file)], search_paths).contexts(file)[0] for file in files]
    return {name: value for context in contexts for name in names if (value := context.value(name)) is not None}


def macros_of_flags(text: str, files: Sequence[pathlib.Path], search_paths: Sequence[str]) -> set[str]:
    """Returns the macros that bindings of the command line set, and that no file of the project sets or reads.

    Args:
      text: gin text of `together`.
      files: files of the project.
      search_paths: folders in which included files are.
    """
    project = Project([str(file) for file in files], search_paths)
    statements = [statement for of_file in project.files.values() for statement in of_file]
    return macros_of(parse_statements(text, "the flags")) - macros_of(statements) - macros_in(statements)
