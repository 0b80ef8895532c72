"""Launch scripts: commands of T5X's programs in shell files become commands of t5x_lab, with their flags translated."""

import dataclasses
import pathlib
import re
import tempfile
from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

from t5x_lab.config.errors import UserError
from t5x_lab.migration.includes import counterpart, t5x_file
from t5x_lab.migration.project import Context, Project, Rules
from t5x_lab.migration.statements import Binding, Statement, macros_of, read_statements
from t5x_lab.migration.steps import DROPPED, KEPT, RENAMED, TO_DO, Step
from t5x_lab.migration.translate import translate

SUFFIXES = (".sh", ".bash", ".ksh", ".zsh", ".sbatch", ".slurm", ".sub")
_PROGRAM = re.compile(
    r"""\S*python[\d.]*(?:\s+-u)?\s+(?:-m\s+t5x\.(\w+)|["']?\S*(?:t5x|T5X\w*\}?)/(\w+)\.py["']?)(?=[\s\\]|$)"""
)
_COMMANDS = ("train", "eval", "infer")
_WORD = re.compile(r"""(?:\\.|'[^']*'|"(?:\\.|[^"\\])*"|`[^`]*`|\$\([^()]*\)|\$?\{[^}]*\}|[^\s\\'"`;|&<>()])+""", re.DOTALL)
_SPACE = re.compile(r"(?:[ \t]|\\\n)+")
_QUOTED = re.compile(r"""'([^']*)'|"((?:\\.|[^"\\])*)"|\\(.)""", re.DOTALL)
_SHELL = re.compile('"⟦([^⟧]*)⟧"')  # a value that only the shell knows, as a string of gin, with other quotes inside
_QUOTES = str.maketrans("\"'", "⟪⟫")
_PLAIN_VALUE = re.compile(r"[\w./:@%+-]+")
# Flags of T5X's programs that t5x_lab has too.
_SAME_FLAGS = (
    "gin_search_paths", "tfds_data_dir", "seqio_additional_cache_dirs", "alsologtostderr", "logtostderr", "multiprocess_gpu",
    "coordinator_address", "process_count", "process_index", "dry_run",
)  # fmt: skip
# Bindings that `t5x_lab eval` and `t5x_lab infer` take as T5X's programs do.
_OF_EVALUATION = ("CHECKPOINT_PATH", "EVAL_OUTPUT_DIR", "INFER_OUTPUT_DIR", "RestoreCheckpointConfig.mode")


@dataclasses.dataclass(frozen=True)
class Flag(Statement):
    """A flag of a command.

    Attributes:
      name: the name without dashes.
      value: the value without the shell's quotes, None if there is none. Variables are not replaced.
      start, end: the flag with its value in the text of the script.
    """

    name: str
    value: str | None
    start: int
    end: int


class Launch(NamedTuple):
    """A command of T5X in a script: the program's name, its place in the text, and the flags."""

    program: str
    start: int
    end: int
    flags: Sequence[Flag]


def is_script(path: pathlib.Path) -> bool:
    """Returns whether a file is a shell script."""
    if path.suffix in SUFFIXES:
        return True
    try:
        with path.open() as file:
            return path.suffix != ".gin" and file.read(2) == "#!"
    except (OSError, UnicodeDecodeError):
        return False


def read_script(path: pathlib.Path) -> str:
    """Returns the text of a script.

    Raises:
      UserError: if it cannot be read.
    """
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read: {error}.") from error


def gin_files(text: str, search_paths: Sequence[str]) -> tuple[list[str], list[str]]:
    """Returns the gin files that the commands of a script name: those of the project, and those of T5X with a counterpart.

    Files whose names have variables, or that are not there, are left out.
    """
    of_project, of_t5x = dict[str, None](), dict[str, None]()
    for launch in _launches(text):
        for file in (flag.value for flag in launch.flags if flag.name == "gin_file" and flag.value):
            if counterpart(file):
                of_t5x[file] = None
            elif path := find_file(file, [*search_paths, *search_paths_of(launch)]):
                of_project[str(path)] = None
    return list(of_project), list(of_t5x)


def search_paths_of(launch: Launch) -> list[str]:
    """Returns the search paths of a command, those with variables left out."""
    values = [flag.value or "" for flag in launch.flags if flag.name == "gin_search_paths"]
    return [path for value in values for path in value.split(",") if path and "$" not in path]


def find_file(file: str, search_paths: Sequence[str]) -> pathlib.Path | None:
    """Returns the path of a file in the working directory or a search path."""
    folders = (pathlib.Path(folder) for folder in ("", *search_paths))
    return next((folder / file for folder in folders if (folder / file).is_file()), None)


def own_file(t5x_path: str) -> str:
    """Returns the name of the file with the counterpart of a file of T5X's. As flags it would override other files."""
    return "of_t5x/" + "_".join(pathlib.PurePosixPath(t5x_path).parts[-2:])


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
        of_launch = _translate_flags(launch, search_paths, known_macros, rules)
        steps += of_launch
        edits.append((launch.start, launch.end, f"t5x_lab {launch.program}"))
        notes = []
        for flag, step in of_launch:
            if step.status == RENAMED:
                edits.append((flag.start, flag.end, _separator(text, flag).join(step.lines)))
            if step.status in (DROPPED, TO_DO):
                edits.append((flag.start - len(_separator(text, flag)), flag.end, ""))
            if step.note:
                mark = "TO DO, " if step.status == TO_DO else ""
                notes.append(f"# {mark}{' '.join(flag.text.split())}: {step.note}.\n")
        start = _line_start(text, launch.start)
        indent = text[start : len(text) - len(text[start:].lstrip(" \t"))]
        edits.append((start, start, "".join(f"{indent}{note}" for note in notes)))
    for start, end, new in sorted(edits, reverse=True):
        text = text[:start] + new + text[end:]
    return text, steps


def _launches(text: str) -> Iterator[Launch]:
    for match in _PROGRAM.finditer(text):
        program, line = match[1] or match[2], text[_line_start(text, match.start()) : match.start()]
        flags = list(_flags(text, match.end()))
        mode = next((flag.value for flag in flags if flag.name == "run_mode"), "train")
        program = mode if program == "main" else program
        if program in _COMMANDS and not line.lstrip().startswith("#"):
            yield Launch(program, match.start(), match.end(), flags)


def _flags(text: str, position: int) -> Iterator[Flag]:
    """Yields the flags from a position to the end of the command."""
    matches = []
    while space := _SPACE.match(text, position):
        word = _WORD.match(text, space.end())
        if word is None or re.match(r"\d?[<>]", text[space.end() :]):  # the command ends, or its output is redirected
            break
        matches.append(word)
        position = word.end()
    while matches:
        word = matches.pop(0)
        name, equals, value = word[0].partition("=")
        end = word.end()
        takes_next = not equals and name.startswith(("--gin", "--tfds", "--seqio", "--coordinator", "--process", "--run_mode"))
        if takes_next and matches and not matches[0][0].startswith("-"):
            following = matches.pop(0)
            equals, value, end = "=", following[0], following.end()
        line = text.count("\n", 0, word.start()) + 1
        name = name.lstrip("-") if name.startswith("-") else ""
        yield Flag(text[word.start() : end], line, name, _unquote(value) if equals else None, word.start(), end)


def _unquote(word: str) -> str:
    def plain(match: re.Match) -> str:
        if match[2] is not None:
            return re.sub(r'\\(["\\`$])', r"\1", match[2])
        return match[1] if match[1] is not None else "" if match[3] == "\n" else match[3]

    return _QUOTED.sub(plain, word)


def _line_start(text: str, position: int) -> int:
    """Returns where the line of a position starts, with the lines before that a backslash continues."""
    start = text.rfind("\n", 0, position) + 1
    while text[:start].endswith("\\\n"):
        start = text.rfind("\n", 0, start - 1) + 1
    return start


def _separator(text: str, flag: Flag) -> str:
    """Returns the space before a flag, with the backslash that continues a line."""
    start = flag.start
    while start and text[start - 1] in " \t\n":
        start -= 2 if text[start - 2 : start] == "\\\n" else 1
    return text[start : flag.start]


def _translate_flags(
    launch: Launch, search_paths: Sequence[str], known_macros: Collection[str], rules: Rules
) -> list[tuple[Flag, Step]]:
    bindings = {flag: text for flag in launch.flags if (text := _binding_text(flag)) is not None}
    statements, context = _read_together(launch, list(bindings.values()), search_paths, known_macros, rules)
    by_flag = dict(zip(bindings, statements))
    steps = []
    for flag in launch.flags:
        if flag in by_flag:
            is_path = launch.program != "train" and by_flag[flag].name in _OF_EVALUATION
            step = Step(KEPT) if is_path else _as_flags(translate(by_flag[flag], context))
        elif flag.name == "gin_file":
            step = _translate_gin_file(flag, [*search_paths, *search_paths_of(launch)])
        elif flag.name == "run_mode":
            step = Step(DROPPED)
        elif flag.name in _SAME_FLAGS or not flag.name:
            step = Step(KEPT)
        else:
            step = Step(TO_DO, note=f"t5x_lab {launch.program} has no such flag")
        steps.append((flag, step))
    return steps


def _binding_text(flag: Flag) -> str | None:
    """Returns the gin binding of a flag, with values that only the shell knows as marked strings; None for other flags."""
    if flag.name.startswith("gin.") and flag.value is not None:
        name, value = flag.name.removeprefix("gin."), flag.value
    elif flag.name == "gin_bindings" and flag.value is not None:
        name, _, value = (part.strip() for part in flag.value.partition("="))
    else:
        return None
    outside = re.sub(r"'[^']*'|\"[^\"]*\"", "", value)
    return f'{name} = "⟦{value.translate(_QUOTES)}⟧"' if re.search("[$`]", outside) else f"{name} = {value}"


def _read_together(
    launch: Launch, bindings: Sequence[str], search_paths: Sequence[str], known_macros: Collection[str], rules: Rules
) -> tuple[list[Binding], Context]:
    """Returns the bindings of a command as statements, and what is bound there and in its gin files."""
    search_paths = [*search_paths, *search_paths_of(launch)]
    with tempfile.TemporaryDirectory() as folder:
        together = pathlib.Path(folder) / "flags.gin"
        includes = []
        for file in (flag.value for flag in launch.flags if flag.name == "gin_file" and flag.value):
            path = find_file(file, search_paths)
            if path or t5x_file(file):
                includes.append(f'include "{path.absolute() if path else file}"\n')
        together.write_text("".join([*includes, *(f"{binding}\n" for binding in bindings)]))
        own = macros_of(read_statements(together))
        project = Project([str(together)], search_paths, set(known_macros) - own, rules)
        statements = [each for each in project.files[together] if isinstance(each, Binding)]
        context = project.context(together)
        return statements, dataclasses.replace(context, program=launch.program)


def _translate_gin_file(flag: Flag, search_paths: Sequence[str]) -> Step:
    value = flag.value or ""
    if translation := counterpart(value):
        if not translation.lines:
            return Step(DROPPED, note=translation.note)
        return Step(RENAMED, (f"--gin_file={own_file(value)}",))
    if t5x_file(value) and not find_file(value, search_paths):
        return Step(TO_DO, note=f"{value} has no counterpart. Write what it binds with docs/from_t5x.md")
    return Step(KEPT)


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
