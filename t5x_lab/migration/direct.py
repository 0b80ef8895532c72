"""Configurations of T5X that a command takes as they are: translated in memory, if every statement has a counterpart."""

import importlib.util
import os
import pathlib
import shutil
import tempfile
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

from t5x_lab.config.errors import UserError
from t5x_lab.config.gin_files import PACKAGE_GIN
from t5x_lab.migration.command_line import find_file, macros_of_flags, together, values_in
from t5x_lab.migration.includes import counterpart, t5x_file
from t5x_lab.migration.project import Project
from t5x_lab.migration.statements import Binding, Import, Include, Statement
from t5x_lab.migration.steps import DROPPED, RENAMED, TO_DO
from t5x_lab.migration.write import MigratedFile, migrate, write

_LIBRARIES = ("t5x", "flaxformer")
_OF_RUNS = ("train.", "DatasetConfig.", "EncoderDecoderModel.", "DecoderOnlyModel.")
_FLAGS = "flags.gin"


class Translation(NamedTuple):
    """The files that a command reads in place of T5X's.

    Attributes:
      file: gin file, with the bindings of the command line.
      folder: temporary folder of this file and of those that it includes.
      notes: what was translated, for people.
    """

    file: str
    folder: str
    notes: str


def translate_t5x(
    files: Sequence[str], bindings: Sequence[str], search_paths: Sequence[str], known_macros: Collection[str]
) -> Translation | None:
    """Translates files and bindings of the command line together, if one of the files imports or includes parts of T5X.

    Args:
      files, bindings, search_paths: see `t5x_lab.config.gin_files.parse`.
      known_macros: macros of t5x_lab.

    Returns:
      The translation; None if the files are those of t5x_lab.

    Raises:
      UserError: if a person has to decide about a statement. The message lists all such statements.
    """
    paths = [find_file(file, search_paths) for file in files]
    are_of_t5x = [_is_of_t5x(path, search_paths) if path else counterpart(file) is not None for file, path in zip(files, paths)]
    if not any(are_of_t5x):
        return None
    folder = pathlib.Path(tempfile.mkdtemp(prefix="t5x_lab_"))
    flags = folder / _FLAGS
    text = together([str(path.absolute()) if path else file for file, path in zip(files, paths)], bindings)
    flags.write_text(text)
    translated = str(folder / "translated")
    kept_macros = macros_of_flags(text, [path for path in paths if path], search_paths)
    migrated = migrate([str(flags)], translated, search_paths, known_macros, include_folder=translated, kept_macros=kept_macros)
    try:
        _check(migrated, flags)
    except UserError:
        shutil.rmtree(folder)
        raise
    write(migrated)
    return Translation(str(migrated[0].target), str(folder), _notes(migrated, flags))


def values_in_t5x_files(files: Sequence[str], search_paths: Sequence[str], names: Collection[str]) -> dict[str, Any]:
    """Returns the last values of names that files of T5X's bind, with macros replaced. Those of other files are left out."""
    paths = (find_file(file, search_paths) for file in files)
    return values_in([path for path in paths if path and _is_of_t5x(path, search_paths)], search_paths, names)


def _is_of_t5x(path: pathlib.Path, search_paths: Sequence[str]) -> bool:
    if path.resolve().is_relative_to(PACKAGE_GIN):
        return False
    try:
        project = Project([str(path)], search_paths)
    except UserError:
        return False  # the command's own parser says what is wrong
    return any(_names_t5x(statement) for statements in project.files.values() for statement in statements)


def _names_t5x(statement: Statement) -> bool:
    """Returns whether a statement is one that only T5X reads. Imports of an installed T5X may be of its networks."""
    if isinstance(statement, Import):
        library = statement.module.split(".")[0]
        return library in _LIBRARIES and importlib.util.find_spec(library) is None
    if isinstance(statement, Binding):
        return statement.name.startswith(_OF_RUNS)
    return isinstance(statement, Include) and t5x_file(statement.path) is not None


def _check(migrated: Sequence[MigratedFile], flags: pathlib.Path) -> None:
    open_ones = [
        f"  {_place(each, flags, statement)}: {statement.first_line}\n    {step.note}."
        for each in migrated
        for statement, step in each.steps
        if step.status == TO_DO
    ]
    if open_ones:
        raise UserError(
            f"The gin files are T5X's, and {len(open_ones)} of their statements need a decision. Translate the files with "
            "t5x_lab migrate FILE --output=FOLDER, edit the lines that it names, and pass those files:\n" + "\n".join(open_ones)
        )


def _notes(migrated: Sequence[MigratedFile], flags: pathlib.Path) -> str:
    """Returns a line for each statement that has another name here, and for each file of T5X's."""
    lines = ["The gin files are T5X's. They are read as:"]
    for each in migrated:
        for statement, step in each.steps:
            is_of_project = isinstance(statement, Include) and t5x_file(statement.path) is None
            if step.status == RENAMED and not is_of_project:
                place = _place(each, flags, statement)
                lines.append(f"  {place}: {statement.first_line} -> {'; '.join(step.lines)}")
    left_out = sum(each.count(DROPPED) for each in migrated)
    lines.append(f"  Left out: {left_out} statements. t5x_lab migrate writes the reason beside each of them.")
    return "\n".join(lines)


def _place(each: MigratedFile, flags: pathlib.Path, statement: Statement) -> str:
    return "command line" if each.source == flags else f"{os.path.relpath(each.source)}, line {statement.line}"
