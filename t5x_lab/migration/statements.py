"""Statements of a gin file with their source text, read without imports and without building anything."""

import contextlib
import dataclasses
import io
import pathlib
import tokenize
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from gin import config_parser

from t5x_lab.config.errors import UserError


class Reference(NamedTuple):
    """`@name` of a configurable; `@name()`, its result, with `is_call`."""

    name: str
    is_call: bool


class MacroReference(NamedTuple):
    """`%name`."""

    name: str


@dataclasses.dataclass(frozen=True)
class Statement:
    """A statement, or the comments and blank lines between two.

    Attributes:
      text: source text, whole lines.
      line: number of the first line, from 1.
    """

    text: str
    line: int

    @property
    def first_line(self) -> str:
        return self.text.strip().split("\n")[0]

    @property
    def comment(self) -> str:
        """The comment at the end of the last line, "# …", or ""."""
        with contextlib.suppress(tokenize.TokenError, SyntaxError):
            tokens = tokenize.generate_tokens(io.StringIO(self.text.strip()).readline)
            comments = [token.string for token in tokens if token.type == tokenize.COMMENT]
            return comments[-1] if comments and self.text.strip().endswith(comments[-1]) else ""
        return ""


@dataclasses.dataclass(frozen=True)
class Import(Statement):
    """An import of `module`, which has the name `bound` in the file."""

    module: str
    bound: str


@dataclasses.dataclass(frozen=True)
class Include(Statement):
    path: str


@dataclasses.dataclass(frozen=True)
class Binding(Statement):
    """`scope/selector.parameter = value`; for a macro `selector = value`, with `parameter` "".

    The value is a literal of Python with `Reference` and `MacroReference` inside.
    """

    scope: str
    selector: str
    parameter: str
    value: Any

    @property
    def name(self) -> str:
        """The name without scope and module: `DatasetConfig.split`, or that of a macro."""
        name = self.selector.rpartition(".")[2]
        return f"{name}.{self.parameter}" if self.parameter else name


class _Delegate(config_parser.ParserDelegate):
    def configurable_reference(self, scoped_configurable_name, evaluate):
        return Reference(scoped_configurable_name, evaluate)

    def macro(self, macro_name):
        return MacroReference(macro_name)


def read_statements(path: pathlib.Path) -> list[Statement]:
    """Returns the statements of a file in order. Their texts joined are the file, but blocks become single bindings.

    Raises:
      UserError: for a file that is not there, or that gin cannot parse.
    """
    try:
        return parse_statements(path.read_text(encoding="utf-8-sig"), str(path))
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not a gin file: {error}.") from error


def parse_statements(text: str, source: str) -> list[Statement]:
    """Returns the statements of a text. See `read_statements`.

    Args:
      text: gin text.
      source: where it is from, for messages.
    """
    try:
        parsed = list(config_parser.ConfigParser(text, _Delegate()))
    except (SyntaxError, ValueError) as error:
        reason = " ".join(str(getattr(error, "msg", None) or error).split()).rstrip(".")
        place = f"{source}, line {error.lineno}," if isinstance(error, SyntaxError) and error.lineno else source
        raise UserError(f"{place} is not gin: {reason}.") from error
    except tokenize.TokenError as error:
        reason, (line, _) = error.args
        raise UserError(f"{source}, line {line}, is not gin: {reason}.") from error
    lines = list(io.StringIO(text))  # gin's lines end at "\n" only
    starts = [each.location.line_num for each in parsed]
    statements: list[Statement] = [Statement("".join(lines[: starts[0] - 1] if starts else lines), 1)]
    for each, start, end in zip(parsed, starts, [*starts[1:], len(lines) + 1]):
        own = lines[start - 1 : end - 1]
        body, rest = _split_comments(own)
        if not isinstance(each, config_parser.BlockDeclaration):
            statements.append(_statement(each, body, start))
        statements.append(Statement(rest, start + len(own) - rest.count("\n")))
    return [statement for statement in statements if statement.text or type(statement) is not Statement]


def _split_comments(lines: Sequence[str]) -> tuple[str, str]:
    """Returns the lines of a statement, and the comments and blank lines after it."""
    end = len(lines)
    while end > 1 and (not lines[end - 1].strip() or lines[end - 1].lstrip().startswith("#")):
        end -= 1
    return "".join(lines[:end]), "".join(lines[end:])


def _statement(parsed: Any, text: str, line: int) -> Statement:
    if isinstance(parsed, config_parser.ImportStatement):
        return Import(text, line, parsed.module, parsed.bound_name())
    if isinstance(parsed, config_parser.IncludeStatement):
        return Include(text, line, parsed.filename)
    is_in_block = text[:1].isspace()
    binding = Binding(text, line, parsed.scope, parsed.selector, parsed.arg_name, parsed.value)
    if not is_in_block:
        return binding
    comment = dataclasses.replace(binding, text=text.strip()).comment
    return dataclasses.replace(binding, text=f"{binding_text(binding)}{f'  {comment}' if comment else ''}\n")


def binding_text(binding: Binding) -> str:
    scope = f"{binding.scope}/" if binding.scope else ""
    parameter = f".{binding.parameter}" if binding.parameter else ""
    return f"{scope}{binding.selector}{parameter} = {render(binding.value)}"


def render(value: Any) -> str:
    """Returns a value as gin text."""
    if isinstance(value, Reference):
        return f"@{value.name}{'()' if value.is_call else ''}"
    if isinstance(value, MacroReference):
        return f"%{value.name}"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{render(key)}: {render(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(render, value)) + "]"
    if isinstance(value, tuple):
        return "(" + ", ".join(map(render, value)) + ("," if len(value) == 1 else "") + ")"
    return repr(value).replace("'", '"') if isinstance(value, str) and '"' not in value and "'" not in value else repr(value)


def rename_macros(binding: Binding, names: Mapping[str, str]) -> Binding:
    """Returns a binding with other names of macros, that it defines and that its value refers to."""
    references = {name: MacroReference(new_name) for name, new_name in names.items()}
    selector = names.get(binding.selector, binding.selector) if not binding.parameter else binding.selector
    renamed = dataclasses.replace(binding, selector=selector, value=replace_macros(binding.value, references))
    return binding if renamed == binding else dataclasses.replace(renamed, text=f"{binding_text(renamed)}\n")


def replace_macros(value: Any, values: Mapping[str, Any]) -> Any:
    """Returns a value with other values in the place of some macros, by their names."""
    if isinstance(value, MacroReference):
        return values.get(value.name, value)
    if isinstance(value, dict):
        return {replace_macros(key, values): replace_macros(item, values) for key, item in value.items()}
    if isinstance(value, list | tuple) and not isinstance(value, Reference):
        return type(value)(replace_macros(item, values) for item in value)
    return value


def macros_of(statements: Sequence[Statement]) -> set[str]:
    """Returns the names of macros that statements bind."""
    return {each.selector for each in statements if isinstance(each, Binding) and not each.parameter and not each.scope}


def macros_in(statements: Sequence[Statement]) -> set[str]:
    """Returns the names of macros that statements refer to."""
    used = (each for statement in statements if isinstance(statement, Binding) for each in references(statement.value))
    return {each.name for each in used if isinstance(each, MacroReference)}


def references(value: Any) -> list[Reference | MacroReference]:
    """Returns the references in a value."""
    if isinstance(value, Reference | MacroReference):
        return [value]
    if isinstance(value, dict):
        return [reference for pair in value.items() for item in pair for reference in references(item)]
    items = value if isinstance(value, list | tuple) else ()
    return [reference for item in items for reference in references(item)]
