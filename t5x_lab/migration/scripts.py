"""Launch scripts: commands of T5X's programs in shell files become commands of t5x_lab, with their flags translated."""

import dataclasses
import pathlib
import re
from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

from t5x_lab.config.errors import UserError
from t5x_lab.migration.command_line import find_file, macros_of_flags, together, values_in
from t5x_lab.migration.includes import counterpart, t5x_file
from t5x_lab.migration.project import Command, Context, Project, Rules
from t5x_lab.migration.shell import command_end, is_quoted, read_words, unquote
from t5x_lab.migration.statements import Binding, Import, Statement, parse_statements, render
from t5x_lab.migration.steps import DROPPED, KEPT, RENAMED, TO_DO, Step
from t5x_lab.migration.translate import translate

SUFFIXES = (".sh", ".bash", ".ksh", ".zsh", ".sbatch", ".slurm", ".sub")
_PYTHON = (
    r"(?<![\w./${-])(?:[\w./${}~-]*/)?(?:python[\d.]*|\$\{?\w*(?:PY|py)\w*\}?)"
    r"(?:[ \t]+-[WX][ \t]+\S+|[ \t]+-[A-Z]\S*|[ \t]+-u)*[ \t]+"
)
_PROGRAM = re.compile(
    _PYTHON + r"""(?:-m[ \t]+t5x\.(\w+)|["']?(?:\S*/)?t5x/(\w+)\.py["']?|["']?\$\{?T5X\w*\}?/(\w+)\.py["']?)(?=[\s\\]|$)"""
)
_COMMANDS = ("train", "eval", "infer")
_SHELL = re.compile('"⟦([^⟧]*)⟧"')  # a value that only the shell knows, as a string of gin, with other quotes inside
_QUOTES = str.maketrans("\"'", "⟪⟫")
_PLAIN_VALUE = re.compile(r"[\w./:@%+-]+")
_SWITCHES = ("alsologtostderr", "logtostderr", "multiprocess_gpu", "dry_run")  # flags without a value
# Flags of T5X's programs that t5x_lab has too.
_SAME_FLAGS = (
    *_SWITCHES, "gin_search_paths", "tfds_data_dir", "seqio_additional_cache_dirs", "coordinator_address", "process_count",
    "process_index",
)  # fmt: skip
# Bindings that `t5x_lab eval` and `t5x_lab infer` take as T5X's programs do.
_OF_EVALUATION = (
    "CHECKPOINT_PATH", "EVAL_OUTPUT_DIR", "INFER_OUTPUT_DIR", "RestoreCheckpointConfig.mode", "infer.mode", "infer.shard_id",
    "infer.num_shards",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Flag(Statement):
    """A flag of a command, or another word of it.

    Attributes:
      name: the name without dashes, "" for another word.
      value: the value without the shell's quotes, None if there is none. Variables are not replaced.
      start, end: the flag with its value in the text of the script.
    """

    name: str
    value: str | None
    start: int
    end: int


class Launch(NamedTuple):
    """A command of T5X in a script.

    Attributes:
      program: "train", "eval" or "infer".
      start, end: the words up to the program's name in the text.
      flags: the words after them.
      problem: why the command is left as it is, "" if it is translated.
    """

    program: str
    start: int
    end: int
    flags: Sequence[Flag]
    problem: str = ""


def is_script(path: pathlib.Path) -> bool:
    """Returns whether a file is a shell script."""
    if path.suffix in (".gin", *SUFFIXES):
        return path.suffix != ".gin"
    try:
        with path.open() as file:
            return file.read(2) == "#!"
    except (OSError, UnicodeDecodeError):
        return False


def read_script(path: pathlib.Path) -> str:
    """Returns the text of a script.

    Raises:
      UserError: if it cannot be read.
    """
    try:
        with path.open(newline="") as file:  # keeps the ends of lines
            return file.read()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read: {error}.") from error


def gin_files(text: str, search_paths: Sequence[str]) -> tuple[list[str], list[str]]:
    """Returns the gin files that the commands of a script name: those of the project, and those of T5X with a counterpart.

    Files whose names have variables, or that are not there, are left out.
    """
    own, other = dict[str, None](), dict[str, None]()
    for launch in _launches(text):
        for file in (flag.value for flag in launch.flags if flag.name == "gin_file" and flag.value):
            if counterpart(file):
                other[file] = None
            elif path := find_file(file, [*search_paths, *search_paths_of(launch)]):
                own[str(path)] = None
    return list(own), list(other)


def search_paths_of(launch: Launch) -> list[str]:
    """Returns the search paths of a command, those with variables left out."""
    values = [flag.value or "" for flag in launch.flags if flag.name == "gin_search_paths"]
    return [path for value in values for path in value.split(",") if path and "$" not in path]


def file_for(t5x_path: str) -> str:
    """Returns the name of the file with the counterpart of a file of T5X's. As flags it would override other files."""
    return "t5x_files/" + "_".join(pathlib.PurePosixPath(t5x_file(t5x_path) or t5x_path).parts[1:])


def translate_script(
    text: str, search_paths: Sequence[str], known_macros: Collection[str], rules: Rules
) -> tuple[str, list[tuple[Statement, Step]]]:
    """Returns the translation of a script, and what each flag became. Everything but T5X's commands stays as it is.

    Args:
      text: the script.
      search_paths, known_macros: see `write.migrate`.
      rules: rules of T5X's names.
    """
    edits: list[tuple[int, int, str]] = []
    steps: list[tuple[Statement, Step]] = []
    for launch in _launches(text):
        if launch.problem:
            line = text.count("\n", 0, launch.start) + 1
            whole = Flag(text[launch.start : launch.end], line, "", None, launch.start, launch.end)
            steps.append((whole, Step(TO_DO, note=launch.problem)))
            continue
        translated = _translate_flags(launch, search_paths, known_macros, rules)
        steps += translated
        paths = _paths_in_files(launch, [*search_paths, *search_paths_of(launch)])
        edits.append((launch.start, launch.end, " ".join((f"t5x_lab {launch.program}", *paths))))
        notes = []
        for flag, step in translated:
            separator = _separator(text, flag)
            if step.status == RENAMED:
                edits.append((flag.start, flag.end, separator.join(step.lines)))
            elif step.status != KEPT and not step.lines:
                edits.append((flag.start - len(separator), flag.end, ""))
            if step.note:
                mark = "TO DO, " if step.status == TO_DO else ""
                notes.append(f"# {mark}{' '.join(flag.text.split())}: {step.note}.\n")
        start = _line_start(text, launch.start)
        indent = text[start : len(text) - len(text[start:].lstrip(" \t"))]
        edits.append((start, start, "".join(f"{indent}{note}" for note in notes)))
    for start, end, new in sorted(edits, reverse=True):
        text = text[:start] + new + text[end:]
    return text, steps


def _paths_in_files(launch: Launch, search_paths: Sequence[str]) -> list[str]:
    """Returns flags of the checkpoint and the output directory of an evaluation that its gin files bind."""
    if launch.program == "train":
        return []
    _, files = _command(launch, (), search_paths)
    in_flags = {flag.name for flag in launch.flags}
    names = [name for name in ("CHECKPOINT_PATH", "EVAL_OUTPUT_DIR", "INFER_OUTPUT_DIR") if f"gin.{name}" not in in_flags]
    values = values_in(files, search_paths, names)
    return [_as_flag(f"{name} = {render(value)}") for name, value in values.items() if isinstance(value, str)]


def _launches(text: str) -> Iterator[Launch]:
    for match in _PROGRAM.finditer(text):
        program, line = match[1] or match[2] or match[3], text[_line_start(text, match.start()) : match.start()]
        if line.lstrip().startswith("#"):
            continue
        flags = list(_flags(text, match.end()))
        mode = next((flag.value for flag in flags if flag.name == "run_mode"), "train")
        program = mode if program == "main" else program
        if program not in _COMMANDS:
            continue
        problem = ""
        if is_quoted(line):
            problem = "It is inside a quoted text: translate it by hand"
        elif not command_end(text, flags[-1].end if flags else match.end()):
            problem = "Its end is not understood: translate it by hand"
        yield Launch(program, match.start(), match.end(), flags, problem)


def _flags(text: str, position: int) -> Iterator[Flag]:
    """Yields the words from a position to the end of the command, flags with their values."""
    spans = read_words(text, position)
    while spans:
        start, end = spans.pop(0)
        name, equals, value = text[start:end].partition("=")
        is_flag = name.startswith("-")
        name = name.lstrip("-") if is_flag else ""
        if is_flag and not equals and name not in _SWITCHES and spans and text[spans[0][0]] != "-":
            value_start, end = spans.pop(0)
            equals, value = " ", text[value_start:end]
        line = text.count("\n", 0, start) + 1
        yield Flag(text[start:end], line, name, unquote(value) if equals else None, start, end)


def _line_start(text: str, position: int) -> int:
    """Returns where the line of a position starts, with the lines before that a backslash continues."""
    start = text.rfind("\n", 0, position) + 1
    while re.search(r"\\\r?\n$", text[:start]):
        start = text.rfind("\n", 0, start - 1) + 1
    return start


def _separator(text: str, flag: Flag) -> str:
    """Returns the space before a flag, with the backslash that continues a line."""
    match = re.search(r"(?:[ \t]|\\\r?\n)*$", text[: flag.start])
    return match[0] if match else ""


def _translate_flags(
    launch: Launch, search_paths: Sequence[str], known_macros: Collection[str], rules: Rules
) -> list[tuple[Flag, Step]]:
    texts = {flag: text for flag in launch.flags if (text := _gin_text(flag)) is not None}
    bindings = _bindings_of(launch)
    statements, context = _read_together(launch, list(bindings.values()), search_paths, known_macros, rules)
    by_flag = dict(zip(bindings, statements, strict=True))
    paths = [*search_paths, *search_paths_of(launch)]
    unchanged = lambda flag, note: Step(TO_DO, (flag.text,), note)
    steps = []
    for flag in launch.flags:
        if flag in by_flag:
            is_taken = launch.program != "train" and by_flag[flag].name in _OF_EVALUATION
            step = Step(KEPT) if is_taken else _as_flags(_translate_flag(by_flag[flag], bindings[flag], context))
        elif flag in texts:
            step = Step(KEPT) if _is_import(texts[flag]) else unchanged(flag, "It is not a binding of gin")
        elif flag.name == "gin_file":
            step = _translate_gin_file(flag, paths)
        elif flag.name == "run_mode":
            step = Step(DROPPED)
        elif flag.name in _SAME_FLAGS:
            step = Step(KEPT)
        elif not flag.name:
            has_variables = "$" in flag.text
            step = unchanged(flag, "Only the shell knows its flags: translate them by hand") if has_variables else Step(KEPT)
        else:
            step = Step(TO_DO, note=f"t5x_lab {launch.program} has no such flag")
        steps.append((flag, step))
    return steps


def _translate_flag(binding: Binding, text: str, context: Context) -> Step:
    """Returns what a binding becomes. A macro of the project's may have another name by now than in the flag's text."""
    step = translate(binding, context)
    has_new_name = step.status == KEPT and not text.startswith(f"{binding.selector} ")
    return Step(RENAMED, (binding.text.strip(),)) if has_new_name and not binding.parameter else step


def _gin_text(flag: Flag) -> str | None:
    """Returns the gin text of a flag, with values that only the shell knows as marked strings; None for other flags."""
    if flag.name.startswith("gin.") and flag.value is not None:
        name, value = flag.name.removeprefix("gin."), flag.value
    elif flag.name == "gin_bindings" and flag.value is not None:
        if "=" not in flag.value:
            return flag.value
        name, _, value = (part.strip() for part in flag.value.partition("="))
    else:
        return None
    outside = re.sub(r"'[^']*'|\"[^\"]*\"", "", value)
    return f'{name} = "⟦{value.translate(_QUOTES)}⟧"' if re.search("[$`]", outside) else f"{name} = {value}"


def _is_binding(text: str) -> bool:
    return _kinds(text) == [Binding]


def _is_import(text: str) -> bool:
    return _kinds(text) == [Import]


def _kinds(text: str) -> list[type]:
    """Returns the kinds of the statements of a text; [] if gin cannot parse it."""
    try:
        return [type(each) for each in parse_statements(f"{text}\n", "the flags")]
    except UserError:
        return []


def _read_together(
    launch: Launch, bindings: Sequence[str], search_paths: Sequence[str], known_macros: Collection[str], rules: Rules
) -> tuple[list[Binding], Context]:
    """Returns the bindings of a command as statements, and what is bound there and in its gin files."""
    search_paths = [*search_paths, *search_paths_of(launch)]
    command, paths = _command(launch, bindings, search_paths)
    macros = macros_of_flags(command.text, paths, search_paths)
    (context,) = Project((), search_paths, set(known_macros) - macros, rules=rules, commands=[command]).commands
    in_flags = context.all_statements[len(context.all_statements) - len(bindings) :]
    return [each for each in in_flags if isinstance(each, Binding)], context


def commands_of(text: str, search_paths: Sequence[str]) -> list[Command]:
    """Returns what the commands of a script read. Values that only the shell knows are marked strings (`has_variable`)."""
    return [
        _command(launch, list(_bindings_of(launch).values()), [*search_paths, *search_paths_of(launch)])[0]
        for launch in _launches(text)
        if not launch.problem
    ]


def _bindings_of(launch: Launch) -> dict[Flag, str]:
    return {flag: text for flag in launch.flags if (text := _gin_text(flag)) is not None and _is_binding(text)}


def _command(launch: Launch, bindings: Sequence[str], search_paths: Sequence[str]) -> tuple[Command, list[pathlib.Path]]:
    """Returns what a command reads, and its files of the project."""
    named = [flag.value for flag in launch.flags if flag.name == "gin_file" and flag.value]
    paths = {file: path for file in named if (path := find_file(file, search_paths))}
    files = [str(paths.get(file, file)) for file in named if file in paths or t5x_file(file)]
    return Command(together(files, bindings), launch.program), list(paths.values())


def has_variable(value: object) -> bool:
    """Returns whether a value, or a line, has a part that only the shell knows."""
    return "⟦" in str(value)


def _translate_gin_file(flag: Flag, search_paths: Sequence[str]) -> Step:
    value = flag.value or ""
    if translation := counterpart(value):
        if not translation.lines:
            return Step(DROPPED, note=translation.note)
        return Step(RENAMED, (f"--gin_file={file_for(value)}",))
    if find_file(value, search_paths):
        return Step(KEPT)
    if t5x_file(value):
        return Step(TO_DO, note=f"{value} has no counterpart. Write what it binds with docs/from_t5x.md")
    if "$" in value:
        return Step(TO_DO, (flag.text,), "Only the shell knows its name: migrate the files that it may be")
    return Step(TO_DO, (flag.text,), f"{value} is not found. Pass its folder with --gin_search_paths")


def _as_flags(step: Step) -> Step:
    """Returns a step whose gin lines are flags. Those of a decision that is open are left out."""
    return step._replace(lines=tuple(map(_as_flag, step.lines)) if step.status == RENAMED else ())


def _as_flag(line: str) -> str:
    line = line.split("  # ")[0].strip()
    name, _, value = line.partition(" = ")
    value = _SHELL.sub(r"\1", value).replace("⟦", "").replace("⟧", "")
    value = re.sub(r'"([^"\']*)"', r"'\1'", value).translate({b: a for a, b in _QUOTES.items()})
    escaped = value.replace("\\", "\\\\").replace('"', '\\"')
    if not value:  # an import
        return f'--gin_bindings="{line}"'
    return f"--gin.{name}={value}" if _PLAIN_VALUE.fullmatch(value) else f'--gin.{name}="{escaped}"'
