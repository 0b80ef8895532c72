"""Translates the files of a project, writes them, and reports what each statement became."""

import dataclasses
import os
import pathlib
import re
import shutil
from collections.abc import Callable, Collection, Iterator, Sequence

from t5x_lab.config.errors import UserError, write_error
from t5x_lab.config.gin_files import PACKAGE_GIN
from t5x_lab.migration.command_line import find_file
from t5x_lab.migration.includes import Counterpart, counterpart, t5x_file
from t5x_lab.migration.project import T5X_MODULES, Context, Project
from t5x_lab.migration.scripts import (
    commands_of,
    file_for,
    gin_files,
    has_variable,
    is_script,
    read_script,
    translate_script,
)
from t5x_lab.migration.statements import Binding, Import, Include, MacroReference, Statement, binding_text, references
from t5x_lab.migration.steps import DROPPED, KEPT, RENAMED, TO_DO, Step
from t5x_lab.migration.translate import RULES, translate

STATUSES = (KEPT, RENAMED, DROPPED, TO_DO)
_T5S_OWN_MODULES = ("t5.data.mixtures", "t5.data.tasks")  # tasks of the t5 library may be imported


@dataclasses.dataclass(frozen=True)
class MigratedFile:
    """A translated file.

    Attributes:
      source, target: paths of the file and of its translation.
      text: the translation.
      steps: statements and what they became.
    """

    source: pathlib.Path
    target: pathlib.Path
    text: str
    steps: Sequence[tuple[Statement, Step]]

    def count(self, status: str) -> int:
        return sum(step.status == status for statement, step in self.steps if type(statement) is not Statement)


def migrate(
    files: Sequence[str],
    output: str,
    search_paths: Sequence[str],
    known_macros: Collection[str],
    include_folder: str = "",
    kept_macros: Collection[str] = (),
) -> list[MigratedFile]:
    """Returns the translations of gin files and launch scripts, and of the files that they include or name, not yet written.

    Args:
      files: gin files and shell scripts of a T5X project.
      output: folder for the translations.
      search_paths: folders in which included files are.
      known_macros: macros of t5x_lab. Others are of the project, and are left out where nothing uses them any more.
      include_folder: folder in front of translated files in includes. "": they are read in the folder of translations.
      kept_macros: macros of t5x_lab that files bind as such. Others of a project with such a name are renamed.

    Raises:
      UserError: for a file that cannot be read, or two with the same place in the folder.
    """
    scripts = {path: read_script(path) for path in map(pathlib.Path, files) if is_script(path)}
    files = [file for file in files if pathlib.Path(file) not in scripts]
    named = [gin_files(text, search_paths) for text in scripts.values()]
    files += dict.fromkeys(file for own, _ in named for file in own if file not in files)
    t5x_files = dict.fromkeys(file for _, other in named for file in other)
    commands = [command for text in scripts.values() for command in commands_of(text, search_paths)]
    project = Project(files, search_paths, known_macros, kept_macros, RULES, commands)
    steps = {path: _translate_file(path, project, include_folder) for path in project.files}
    used = {name for of_file in steps.values() for each, step in of_file for name in _macros_used(each, step)}
    migrated = []
    for path, of_file in steps.items():
        of_file = [(each, _leave_out_unused(each, step, used | set(known_macros))) for each, step in of_file]
        target = pathlib.Path(output) / _place(path)
        text = "".join(line for each, step in of_file for line in _lines(each, step))
        migrated.append(MigratedFile(path, target, text, of_file))
    for path, script in scripts.items():
        text, script_steps = translate_script(script, search_paths, known_macros, RULES)
        migrated.append(MigratedFile(path, pathlib.Path(output) / _place(path), text, script_steps))
    for file in t5x_files:
        if (translation := counterpart(file)) and translation.lines:
            lines = (*translation.lines, *_changes(translation, find_file(file, search_paths)))
            text = "".join(f"{line}\n" for line in (f"# {t5x_file(file)} of T5X.", *lines))
            migrated.append(MigratedFile(pathlib.Path(file), pathlib.Path(output) / file_for(file), text, ()))
    sources: dict[pathlib.Path, MigratedFile] = {}
    for each in migrated:
        other = sources.setdefault(each.target, each)
        if other.text != each.text:
            raise UserError(
                f"{each.source} and {other.source} would both be written to {each.target}. Migrate them one after the other."
            )
    return list(sources.values())


def _place(path: pathlib.Path) -> pathlib.Path:
    relative = pathlib.Path(os.path.relpath(path))
    return pathlib.Path(path.name) if relative.parts[0] == ".." else relative


def _translate_file(path: pathlib.Path, project: Project, include_folder: str) -> list[tuple[Statement, Step]]:
    contexts = project.contexts(path)
    in_folder = lambda include: _translate_include(include, project, path, include_folder)
    return [(each, _translate(each, contexts, in_folder)) for each in project.files[path]]


def _translate(statement: Statement, contexts: Sequence[Context], translate_include: Callable[[Include], Step]) -> Step:
    if isinstance(statement, Binding):
        return _translate_binding(statement, contexts)
    if isinstance(statement, Include):
        return translate_include(statement)
    if isinstance(statement, Import):
        if statement.module.split(".")[0] in T5X_MODULES and statement.module not in _T5S_OWN_MODULES:
            is_gin = statement.module == "__gin__.dynamic_registration"
            return Step(KEPT) if is_gin else Step(DROPPED, note="Names of t5x_lab need no import")
        return Step(KEPT)
    return Step(KEPT)  # comments


def _translate_binding(binding: Binding, contexts: Sequence[Context]) -> Step:
    """Returns what a binding becomes, which has to be the same for all given files that include its file."""
    steps = [(translate(binding, context), context.root) for context in contexts]
    needed = [(step, root) for step, root in steps if not step.is_unneeded] or steps
    different: dict[tuple[str, tuple[str, ...]], pathlib.Path] = {}
    for step, root in needed:
        different.setdefault((step.status, step.lines), root)
    if any(has_variable(line) for step, _ in needed for line in step.lines):
        return Step(TO_DO, note="A launch script sets its value by a variable of the shell. Set it in the script")
    if len(different) == 1:
        return needed[0][0]
    described = "; ".join(f"{'; '.join(lines) or status} for {root}" for (status, lines), root in different.items())
    return Step(TO_DO, note=f"It becomes different things: {described}. Copy this file for one of them")


def _translate_include(statement: Include, project: Project, path: pathlib.Path, folder: str) -> Step:
    if translation := counterpart(statement.path):
        lines = (*translation.lines, *_changes(translation, project.find_any(statement.path, path)))
        return Step(RENAMED, lines) if lines else Step(DROPPED, note=translation.note)
    if included := project.find(statement.path, path):
        place = (pathlib.Path(folder) / _place(included)).as_posix()
        return Step(KEPT if place == statement.path else RENAMED, (f'include "{place}"',))
    if (PACKAGE_GIN / statement.path).is_file():
        return Step(KEPT)
    if t5x_file(statement.path):
        return Step(TO_DO, note=f"{statement.path} has no counterpart. Write what it binds with docs/from_t5x.md")
    return Step(TO_DO, note=f"{statement.path} is not found. Pass its folder with --gin_search_paths")


def _changes(translation: Counterpart, copy: pathlib.Path | None) -> list[str]:
    """Returns the lines of a run file's counterpart that a changed copy of the file, in the project, sets otherwise."""
    if copy is None or translation.is_model or not translation.lines:
        return []
    project = Project([str(copy)], rules=RULES)
    (context,) = project.contexts(copy)
    steps = [(each, translate(each, context)) for each in project.files[copy] if isinstance(each, Binding)]
    lines = [line for each, step in steps if step.status in (KEPT, RENAMED) for line in step.lines or (binding_text(each),)]
    split = lambda line: line.split("  # ")[0].partition(" = ")[::2]
    own, of_t5x = (dict(map(split, each)) for each in (lines, translation.lines))
    changed = [name for name in of_t5x if own.get(name, of_t5x[name]) != of_t5x[name]]
    macros = {macro for name in changed for macro in re.findall(r"%(\w+)", own[name]) if ("", macro) not in RULES}
    changed = [*sorted(macros & own.keys()), *changed]  # a macro of the copy's own is defined before it is read
    return [f"{name} = {own[name]}  # in {copy}" for name in changed]


def _macros_used(statement: Statement, step: Step) -> Iterator[str]:
    """Yields the macros in a translation."""
    if not isinstance(statement, Binding) or step.status == DROPPED or (step.status == TO_DO and not step.lines):
        return
    text = "".join(step.lines)
    for reference in references(statement.value):
        if isinstance(reference, MacroReference) and (not step.lines or f"%{reference.name}" in text):
            yield reference.name


def _leave_out_unused(statement: Statement, step: Step, needed: Collection[str]) -> Step:
    if not isinstance(statement, Binding) or statement.parameter or statement.scope or step.status != KEPT:
        return step
    return step if statement.selector in needed else Step(DROPPED, note="Nothing that is left uses it")


def _lines(statement: Statement, step: Step) -> Iterator[str]:
    """Yields the lines of a translation."""
    if step.status == KEPT and not step.note:
        yield statement.text if not step.lines or statement.comment else "".join(f"{line}\n" for line in step.lines)
        return
    if step.status in (DROPPED, TO_DO):
        first, *others = statement.text.rstrip("\n").split("\n")
        mark = "TO DO, " if step.status == TO_DO else ""
        yield "".join(f"# {line}\n" for line in (f"{mark}{first}", *others))
        yield f"#   {step.note}.\n"
    elif step.note:
        yield f"# {step.note}.\n"
    comment = statement.comment if step.status in (KEPT, RENAMED) else ""
    for line in step.lines:
        yield f"{line}  {comment}\n" if comment and "  # " not in line else f"{line}\n"
        comment = ""  # it is about the first of several lines


def write(migrated: Sequence[MigratedFile]) -> None:
    """Writes the translations.

    Raises:
      UserError: if a file exists, or cannot be written.
    """
    for each in migrated:
        if each.target.exists():
            raise UserError(f"{each.target} exists. Choose another --output, or remove it.")
    for each in migrated:
        try:
            each.target.parent.mkdir(parents=True, exist_ok=True)
            each.target.write_text(each.text)
            if is_script(each.source):
                shutil.copymode(each.source, each.target)
        except OSError as error:
            raise write_error(each.target, error) from error


def report(migrated: Sequence[MigratedFile]) -> str:
    """Returns a line for each file and for each statement that a person has to decide about."""
    lines = []
    for each in migrated:
        counts = ", ".join(f"{each.count(status)} {status}" for status in STATUSES if each.count(status))
        lines.append(f"{each.source} -> {each.target}: {counts or 'no statements'}")
        for statement, step in each.steps:
            if step.status == TO_DO:
                lines.append(f"  line {statement.line}: {statement.first_line}\n    {step.note}.")
    totals = {status: sum(each.count(status) for each in migrated) for status in STATUSES}
    whole = sum(not each.count(TO_DO) for each in migrated)
    lines.append(f"{whole} of {len(migrated)} files are whole; statements: {', '.join(f'{totals[s]} {s}' for s in STATUSES)}.")
    return "\n".join(lines)
