"""The reference of the site, from the code: commands, what gin may bind, gin files, Python. Pages are Markdown."""

import argparse
import dataclasses
import importlib
import inspect
import pathlib
import pkgutil
import re
import types
from collections.abc import Callable, Iterator

import t5x_lab
from t5x_lab.cli.main import COMMANDS
from t5x_lab.config.gin_files import PACKAGE_GIN
from t5x_lab.config.macros import defined_macros

PACKAGE = pathlib.Path(t5x_lab.__file__).parent
TOPICS = {  # headings of configurables by folder
    "runs": "A run", "models": "Models", "networks": "Networks", "data": "Data", "prompts": "Prompted datasets",
    "optim": "Optimizers and schedules", "evaluation": "Evaluations", "decoding": "Decoding", "checkpoints": "Checkpoints",
    "partitioning": "Sharding", "observe": "Hooks", "papers": "Papers", "study": "Studies",
    "corpora": "Corpora from web crawls",
}  # fmt: skip
LAYERS = [
    "config", "ops", "networks", "decoding", "models", "partitioning", "optim", "training", "checkpoints", "observe", "data",
    "prompts", "evaluation", "papers", "tasks", "report", "corpora", "runs", "launch", "study", "migration", "cli",
]  # fmt: skip


def pages() -> dict[str, str]:
    """Markdown by path in the site."""
    page_texts = {
        "reference/commands.md": commands(),
        "reference/gin.md": configurables(),
        "reference/gin_files.md": gin_files(),
        "reference/python.md": python(),
    }
    return page_texts | {f"reference/python/{layer}.md": layer_page(layer) for layer in LAYERS}


# ---- commands


def commands() -> str:
    """Every command with its flags, as its parser has them."""
    sections = ["# Commands", "", "`t5x_lab COMMAND --help` says the same on a terminal.", ""]
    for name, purpose in COMMANDS.items():
        module = importlib.import_module(f"t5x_lab.cli.{name}")
        parser = argparse.ArgumentParser(add_help=False)
        module.add_flags(parser)
        description = " ".join((module.__doc__ or "").split())
        sections += [f"## t5x_lab {name}", "", f"{purpose[:1].upper()}{purpose[1:]}.", "", description, ""]
        rows = [_flag(action) for action in parser._actions]
        if rows:
            sections += ["| flag | default | |", "|---|---|---|", *rows, ""]
    return "\n".join(sections)


def _flag(action: argparse.Action) -> str:
    name = ", ".join(action.option_strings) or str(action.metavar or action.dest)
    value = "" if action.nargs == 0 or not action.option_strings or "=" in name else f"={action.metavar or action.dest.upper()}"
    is_none = action.default is None or action.default is False or action.default in ("", [], argparse.SUPPRESS)
    default = "required" if action.required and action.option_strings else "" if is_none else f"`{action.default}`"
    choices = f" One of {', '.join(map(str, action.choices))}." if action.choices else ""
    return f"| `{name}{value}` | {default} | {_cell((action.help or '').rstrip('.') + '.' + choices)} |"


# ---- gin


def registered() -> dict[str, Callable]:
    """Returns the configurables of t5x_lab by their names in gin files."""
    from gin.config import _REGISTRY

    import t5x_lab.corpora.configurables
    import t5x_lab.runs.config.configurables  # (registers them)
    import t5x_lab.study.config  # noqa: F401

    wrapped_objects = {selector: entry.wrapped for selector, entry in _REGISTRY._selector_map.items()}
    return {
        selector.rpartition(".")[2]: thing
        for selector, thing in sorted(wrapped_objects.items())
        if selector.startswith("t5x_lab.")
    }


def bound() -> dict[str, str]:
    """Returns the bindings of runs/defaults.gin, which is parsed before all other files."""
    text = (PACKAGE_GIN / "runs" / "defaults.gin").read_text()
    values = dict(re.findall(r"^([\w./]+) *= *(.*)$", text, re.MULTILINE))
    return {name: re.sub(r'^"([^"\']*)"$', r"'\1'", value) for name, value in values.items()}  # as Python shows texts


def macros() -> dict[str, tuple[str, list[str]]]:
    """Returns, by macro, its default ("" = none) and the parameters that it sets."""
    definitions: dict[str, tuple[str, list[str]]] = {}
    for name, thing in registered().items():
        for field in dataclasses.fields(thing) if dataclasses.is_dataclass(thing) else ():
            if macro := field.metadata.get("macro"):
                definitions.setdefault(macro, (_default_of(field), []))[1].append(f"{name}.{field.name}")
    for name, value in bound().items():
        if "." not in name:
            definitions[name] = (value, definitions.get(name, ("", []))[1])
        if value.startswith("%"):
            definitions.setdefault(value[1:], ("", []))[1].append(name)
    return dict(sorted(definitions.items()))


def configurables() -> str:
    """Every configurable: its sentence, and of each parameter its default, what feeds it and its sentence."""
    sections = [
        "# What gin may bind",
        "",
        "A parameter is set by `Name.parameter = value` in a gin file or by `--gin.Name.parameter=value`. Names in capitals "
        "are macros, as T5X's users know them: `--gin.BATCH_SIZE=64` sets what they feed.",
        "",
        "## Macros",
        "",
        "| macro | default | feeds |",
        "|---|---|---|",
    ]
    for macro, (default, feeds) in macros().items():
        shown = f"`{default}`" if default else "to be given"
        sections.append(f"| `{macro}` | {_cell(shown)} | {', '.join(f'[`{name}`](#{_anchor(name)})' for name in feeds)} |")
    by_topic: dict[str, list[tuple[str, Callable]]] = {topic: [] for topic in TOPICS}
    for name, thing in sorted(registered().items(), key=lambda item: item[0].lower()):
        by_topic[thing.__module__.split(".")[1]].append((name, thing))
    for topic, title in TOPICS.items():
        sections += ["", f"## {title}"]
        for name, thing in by_topic[topic]:
            sections += ["", f"### {name} {{#{name.lower()}}}", "", _summary(thing), "", *_parameters(name, thing)]
    return "\n".join(sections) + "\n"


def _anchor(name: str) -> str:
    return name.rpartition("/")[2].partition(".")[0].lower()


def _summary(thing: Callable) -> str:
    """Returns the text of a docstring before its sections."""
    text = re.split(r"\n\s*(?:Args|Attributes|Returns|Raises|Yields):\n", inspect.getdoc(thing) or "")[0]
    return text.strip()


def _parameters(name: str, thing: Callable) -> list[str]:
    rows = []
    descriptions, values = sentences(thing), bound()
    for parameter, default, macro in parameters(thing):
        default = macro or values.get(f"{name}.{parameter}", default).removeprefix("%")
        shown = f"`{default}`" if default else "to be given"
        for scoped, value in values.items():
            if "/" in scoped and scoped.partition("/")[2] == f"{name}.{parameter}":
                shown += f"; of `{scoped.partition('/')[0]}/{name}` `{value.removeprefix('%')}`"
        rows.append(f"| `{name}.{parameter}` | {_cell(shown)} | {_cell(descriptions.get(parameter, '').rstrip('.'))}. |")
    return ["| parameter | default, or its macro | |", "|---|---|---|", *rows] if rows else []


def parameters(thing: Callable) -> Iterator[tuple[str, str, str]]:
    """(name, default as gin says it or "", macro or "") of each."""
    if dataclasses.is_dataclass(thing):
        for field in dataclasses.fields(thing):
            if field.init:
                yield field.name, _default_of(field), field.metadata.get("macro", "")
        return
    for parameter in inspect.signature(thing).parameters.values():
        if parameter.name != "self" and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            yield parameter.name, "" if parameter.default is parameter.empty else _shown(parameter.default), ""


def _default_of(field: dataclasses.Field) -> str:
    if field.default is not dataclasses.MISSING:
        return _shown(field.default)
    return _shown(field.default_factory()) if field.default_factory is not dataclasses.MISSING else ""


def _shown(value: object) -> str:
    """A value as gin says it, about."""
    if isinstance(value, types.FunctionType | type):
        return f"@{value.__name__}"
    if dataclasses.is_dataclass(value):
        return f"@{type(value).__name__}()"
    return repr(value)


def sentences(thing: Callable) -> dict[str, str]:
    """Returns the description of each parameter. Docstrings of base classes are read first and overridden."""
    descriptions: dict[str, str] = {}
    for base in reversed(thing.__mro__[:-1]) if isinstance(thing, type) else [thing]:
        for doc in (
            base.__doc__,
            getattr(base, "__init__", None) and base.__init__.__doc__ if isinstance(base, type) else None,
        ):
            descriptions |= _parse_sections(inspect.cleandoc(doc or ""))
    return descriptions


def _parse_sections(doc: str) -> dict[str, str]:
    """Returns the descriptions in the sections Args and Attributes. Several names may share one."""
    descriptions: dict[str, str] = {}
    for section in re.findall(r"^(?:Args|Attributes):\n((?:  .*\n?|\n)+)", doc, re.MULTILINE):
        for names, text in re.findall(r"^  ([\w*]+(?:, [\w*]+)*): ((?:.*\n?)(?:   .*\n?)*)", section, re.MULTILINE):
            descriptions |= dict.fromkeys(names.split(", "), " ".join(text.split()))
    return descriptions


def gin_files() -> str:
    """The gin files that come with the package, with what their first comment says."""
    sections = [
        "# Gin files",
        "",
        "They are found by these names wherever one works: `--gin_file=models/t5_1_1/small.gin`.",
        "",
    ]
    for folder in sorted(path for path in PACKAGE_GIN.iterdir() if path.is_dir()):
        sections += [f"## {folder.name}", "", "| file | | macros |", "|---|---|---|"]
        for path in sorted(folder.rglob("*.gin")):
            text = path.read_text()
            comment = re.match(r"(?:#.*\n)+", text)
            first = re.sub(r"\n?# ?", " ", comment.group(0)) if comment else ""
            summary = re.split(r"(?<=[.:]) (?= |[A-Z`])|  ", " ".join(first.split()))[0]
            shown = ", ".join(f"`{name}`" for name in dict.fromkeys(defined_macros(text)) if name not in ("MODEL",))
            sections.append(f"| `{path.relative_to(PACKAGE_GIN)}` | {_cell(summary)} | {shown} |")
        sections.append("")
    return "\n".join(sections)


# ---- Python


def modules(layer: str) -> list[str]:
    """The modules of a folder, its own first."""
    package = importlib.import_module(f"t5x_lab.{layer}")
    infos = pkgutil.walk_packages(package.__path__, f"t5x_lab.{layer}.")
    return [module.name for module in infos if not any(part.startswith("_") for part in module.name.split("."))]


def python() -> str:
    """Returns the page of the main functions, which links to the pages of all layers."""
    called = ["t5x_lab.runs.model.load.load", "t5x_lab.runs.model.load.from_gin", "t5x_lab.runs.model.run.Run"]
    links = [f"* [`t5x_lab.{layer}`](python/{layer}.md): {_first_line(f't5x_lab.{layer}')}" for layer in LAYERS]
    lines = [
        "# Python",
        "",
        *_shown_here(called),
        "## Data sets of one's own",
        "",
        *_shown_here(["t5x_lab.data_sets.register"]),
    ]
    lines += ["## What one's own objects may be", "", f"`t5x_lab.protocols` has these. {_first_line('t5x_lab.protocols')}", ""]
    return "\n".join([*lines, *_shown_here(protocols()), "## All modules, layer by layer", "", *links, ""])


def _shown_here(names: list[str]) -> list[str]:
    """Returns the entries of these objects. Links to them lead to the pages of their layers."""
    options = ["    options:", "      skip_local_inventory: true", "      heading_level: 3", ""]
    return [line for name in names for line in (f"::: {name}", *options)]


def protocols() -> list[str]:
    """The full names of what `t5x_lab.protocols` has."""
    module = importlib.import_module("t5x_lab.protocols")
    objects = {name: getattr(module, name) for name in module.__all__}
    return [f"{getattr(thing, '__module__', '')}.{name}" for name, thing in objects.items() if hasattr(thing, "__module__")]


def layer_page(layer: str) -> str:
    lines = [f"# t5x_lab.{layer}", "", _first_line(f"t5x_lab.{layer}"), ""]
    for name in modules(layer):
        lines += [f"::: {name}", "    options:", "      show_root_heading: true", ""]
    return "\n".join(lines)


def _first_line(module: str) -> str:
    return (importlib.import_module(module).__doc__ or "").strip().partition("\n\n")[0].replace("\n", " ")


def _cell(text: str) -> str:
    """Text in a cell of a table, where code needs no escapes."""
    escaped = {"|": "\\|", "<": "&lt;"}
    return " ".join(re.sub(r"(`[^`]*`)|[|<]", lambda match: match[1] or escaped[match[0]], text).split())
