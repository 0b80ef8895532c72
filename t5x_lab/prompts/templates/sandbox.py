"""Jinja environment of prompt templates: no access to Python's objects, and limits on steps, sizes and time.

Templates come with other people's collections. Jinja's sandbox hides the interpreter from them. The limits of this module end
a template that would run forever or fill the memory.
"""

import itertools
import math
import re
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

import jinja2
import jinja2.nodes
import jinja2.sandbox
import jinja2.utils
import jinja2.visitor

from t5x_lab.config.errors import UserError

MAX_STEPS = 1_000_000  # of a rendering: iterations, calls and filters; values that they read count one per 64 characters
MAX_CHARACTERS = 10_000_000  # of a text, or of all texts in a list
MAX_ITEMS = 1_000_000  # of a list with all lists in it
MAX_COUNT = 100_000  # widths, repetitions and ranges
MAX_BITS = 4_096  # of an integer
MAX_SECONDS = 10.0  # of processor time, for a rendering
STEPS_BETWEEN_LOOKS = 1_000  # at the clock, which is slow
BUDGET = "_budget"  # variable of the rendering's `Budget`
_CHARACTERS_PER_STEP = 64

# Methods that templates may call. The others of these types format, encode or copy without a limit.
_METHOD_NAMES: dict[type, str] = {
    str: "capitalize casefold center count endswith find index isalnum isalpha isascii isdecimal isdigit islower isnumeric "
    "isspace istitle isupper join ljust lower lstrip partition removeprefix removesuffix replace rfind rindex rjust "
    "rpartition rsplit rstrip split splitlines startswith strip swapcase title upper zfill",
    list: "append clear copy count extend index insert pop remove reverse sort",
    tuple: "count index",
    dict: "clear copy get items keys pop popitem setdefault update values",
}
_METHODS = {kind: frozenset(names.split()) for kind, names in _METHOD_NAMES.items()}
_CONSTANT_TIME = frozenset(["append", "get", "keys", "values", "items", "pop", "setdefault"])


class Budget:
    """Steps and time that are left for the rendering of one record."""

    def __init__(self) -> None:
        self._steps, self._next_look, self._end = 0, STEPS_BETWEEN_LOOKS, math.inf

    def charge(self, characters: int = 0) -> None:
        """Counts a step that reads or makes this number of characters and items.

        Raises:
          UserError: if the template has taken too many steps or too much time.
        """
        self._steps += 1 + characters // _CHARACTERS_PER_STEP
        if self._steps > MAX_STEPS:
            raise UserError(f"it takes more than {MAX_STEPS:,} steps. Shorten its loops")
        if self._steps >= self._next_look:
            now, self._next_look = time.thread_time(), self._steps + STEPS_BETWEEN_LOOKS
            self._end = min(self._end, now + MAX_SECONDS)
            if now > self._end:
                raise UserError(f"it takes more than {MAX_SECONDS:.0f} seconds. Shorten its loops")


class Sandbox(jinja2.sandbox.SandboxedEnvironment):
    """Environment whose templates need a `Budget` as the variable `BUDGET`.

    Args:
      filters: further filters, by name.
      bounded_filters: further filters that charge the budget themselves.
    """

    intercepted_binops = frozenset(("*", "**", "+", "%"))

    def __init__(self, filters: Mapping[str, Callable], bounded_filters: Mapping[str, Callable]):
        super().__init__(optimized=False)  # an optimizer would compute constants such as 10**10**10 before any budget
        del self.globals["lipsum"]  # its text is random
        self.globals |= {"zip": zip, "range": _range}
        plain = jinja2.sandbox.SandboxedEnvironment()
        plain.filters |= filters
        self.filters |= {name: _with_budget(name, plain) for name in plain.filters}
        self.filters |= {"_counted": _counted, "_concatenated": _concatenated, **bounded_filters}

    @staticmethod
    def concat(texts: Iterable[str]) -> str:
        """Joins the output of a template, a macro or a block."""
        return "".join(_within_limit(texts))

    def compile_template(self, tree: jinja2.nodes.Template) -> jinja2.Template:
        """Compiles a parsed template with its loops and concatenations counted."""
        return self.from_string(_CountSteps().visit(tree))

    def wrap_str_format(self, value: Any) -> None:
        """Returns None, so that `str.format` is refused like other methods outside `_METHODS`: its widths have no limit."""

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        for kind, names in _METHODS.items():
            if isinstance(obj, kind):
                return attr in names
        return super().is_safe_attribute(obj, attr, value)

    def call(self, context: Any, function: Any, *args: Any, **kwargs: Any) -> Any:
        budget, owner, name = context.parent[BUDGET], getattr(function, "__self__", None), getattr(function, "__name__", "")
        if isinstance(owner, str | list | tuple | dict):
            named = {key: value for key, value in kwargs.items() if not key.startswith("_")}  # without Jinja's own
            _check_growth(f"{type(owner).__name__}.{name}", owner, *args, **named)
            budget.charge(0 if name in _CONSTANT_TIME else len(owner))
        budget.charge(sum(map(size, (*args, *kwargs.values()))))
        result = super().call(context, function, *args, **kwargs)
        budget.charge(0 if name in _CONSTANT_TIME else size(result))
        return result

    def call_binop(self, context: Any, operator: str, first: Any, second: Any) -> Any:
        _check_operands(operator, first, second)
        result = super().call_binop(context, operator, first, second)
        context.parent[BUDGET].charge(0 if isinstance(result, int | float) else size(result))
        return result


class _CountSteps(jinja2.visitor.NodeTransformer):
    """Sends what loops iterate over, and what `~` concatenates, through filters that count it."""

    def visit_For(self, node: jinja2.nodes.For) -> jinja2.nodes.Node:
        self.generic_visit(node)
        node.iter = _filter_node("_counted", node.iter)
        return node

    def visit_Concat(self, node: jinja2.nodes.Concat) -> jinja2.nodes.Node:
        self.generic_visit(node)
        return _filter_node("_concatenated", jinja2.nodes.List(node.nodes, lineno=node.lineno))


def _filter_node(name: str, argument: Any) -> jinja2.nodes.Filter:
    return jinja2.nodes.Filter(argument, name, [], [], None, None, lineno=argument.lineno)


def _with_budget(name: str, plain: jinja2.Environment) -> Callable:
    """Returns a filter that counts what it reads and makes."""

    @jinja2.pass_context
    def call(context: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        _check_growth(name, value, *args, **kwargs)
        budget = context.parent[BUDGET]
        budget.charge(sum(map(size, (value, *args, *kwargs.values()))))
        result = plain.call_filter(name, value, args, kwargs, context)
        budget.charge(size(result))
        return result

    return call


@jinja2.pass_context
def _counted(context: Any, items: Iterable) -> Iterator:
    budget = context.parent[BUDGET]
    for item in items:
        budget.charge()
        yield item


@jinja2.pass_context
def _concatenated(context: Any, values: list) -> str:
    context.parent[BUDGET].charge(size(values))
    return "".join(map(str, values))


def _range(*bounds: int) -> range:
    numbers = range(*bounds)
    _check_count(max(map(abs, (*bounds, 0))) if len(bounds) < 3 else len(numbers))
    return numbers


def size(value: Any) -> int:
    """Returns the number of characters and items of a value. Nested values count as often as they occur.

    Raises:
      UserError: if there are more than `MAX_CHARACTERS` or `MAX_ITEMS`.
    """
    characters, items, values = 0, 0, [value]
    while values:
        value = values.pop()
        if isinstance(value, str | bytes):
            characters += len(value)
        elif isinstance(value, range):
            items += len(value)
        elif isinstance(value, jinja2.utils.Namespace):
            values.append(object.__getattribute__(value, "_Namespace__attrs"))
        elif isinstance(value, Collection):
            items += len(value)
            _check_items(items)
            values.extend(itertools.chain(value, value.values()) if isinstance(value, Mapping) else value)
    _check_characters(characters)
    _check_items(items)
    return characters + items


def _within_limit(texts: Iterable[str]) -> Iterator[str]:
    total = 0
    for text in texts:
        total += len(text)
        _check_characters(total)
        yield text


def _check_characters(count: float) -> None:
    if count > MAX_CHARACTERS:
        raise UserError(f"it makes a text of more than {MAX_CHARACTERS:,} characters. Shorten its loops and texts")


def _check_items(count: float) -> None:
    if count > MAX_ITEMS:
        raise UserError(f"it makes a list of more than {MAX_ITEMS:,} items. Shorten its loops and lists")


def _check_count(count: Any, most: int = MAX_COUNT) -> None:
    if isinstance(count, int) and abs(count) > most:
        raise UserError(f"it asks for a width or number above {most:,}. Use a smaller one")


def _check_operands(operator: str, first: Any, second: Any) -> None:
    """Raises `UserError` if `*`, `**` or `%` would make too large a number, text or list."""
    if operator == "%" and isinstance(first, str):
        _check_format(first)
    if operator == "*":
        for items, count in ((first, second), (second, first)):
            if isinstance(items, Collection) and isinstance(count, int):
                check = _check_characters if isinstance(items, str | bytes) else _check_items
                check(len(items) * count)
    if operator in ("*", "**") and isinstance(first, int) and isinstance(second, int):
        bits = first.bit_length() * second if operator == "**" else first.bit_length() + second.bit_length()
        if bits > MAX_BITS:
            raise UserError(f"it computes an integer of more than {MAX_BITS:,} bits. Use smaller numbers")


def _check_format(text: Any, *_: Any, **__: Any) -> None:
    if re.search(r"%[^a-zA-Z%]*(\d{6,}|\*)", str(text)):
        raise UserError("it formats with a width of more than five digits, or with *. Use a smaller one")


def _check_replace(text: Any, old: Any = "", new: Any = "", *_: Any, **__: Any) -> None:
    if isinstance(text, str) and isinstance(old, str) and isinstance(new, str):
        _check_characters(len(text) + text.count(old) * len(new))


def _check_join(separator: Any, items: Any = ()) -> None:
    if isinstance(separator, str) and isinstance(items, Collection):
        _check_characters(size(items) + len(items) * len(separator))


def _check_indent(text: Any, width: Any = 4, *_: Any, **__: Any) -> None:
    _check_count(width)
    _check_characters(str(text).count("\n") * (len(width) if isinstance(width, str) else width))


def _check_wordwrap(text: Any, *args: Any, **kwargs: Any) -> None:
    longest = max(map(size, (*args, *kwargs.values())), default=0)
    _check_characters(len(str(text)) * (1 + longest))


def _check_numbers(most: int) -> Callable:
    def check(_: Any, *args: Any, **kwargs: Any) -> None:
        for value in (*args, *kwargs.values()):
            _check_count(value, most)

    return check


# What grows beyond the values that it reads: filters by their names, methods as "type.name". Checked before it is called.
_GROWING: dict[str, Callable[..., None]] = {
    **dict.fromkeys(("replace", "str.replace"), _check_replace),
    "str.join": _check_join,
    "join": lambda items, separator="", *_, **__: _check_join(separator, items),
    "format": _check_format,
    "indent": _check_indent,
    "wordwrap": _check_wordwrap,
    **dict.fromkeys(
        ["batch", "center", "slice", "str.center", "str.ljust", "str.rjust", "str.zfill", "tojson"], _check_numbers(MAX_COUNT)
    ),
    "round": _check_numbers(100),
}


def _check_growth(name: str, *args: Any, **kwargs: Any) -> None:
    if name in _GROWING:
        _GROWING[name](*args, **kwargs)
