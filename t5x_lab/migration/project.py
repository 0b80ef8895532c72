"""The gin files of a project with their includes, and the values that they have together."""

import dataclasses
import functools
import math
import pathlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from t5x_lab.config.errors import UserError
from t5x_lab.config.t5x_names import UNCHANGED_MACROS
from t5x_lab.migration.includes import RUN_MACROS, counterpart, t5x_file
from t5x_lab.migration.statements import (
    Binding,
    Import,
    Include,
    MacroReference,
    Reference,
    Statement,
    parse_statements,
    read_statements,
    rename_macros,
)

Rules = Mapping[tuple[str, str], Callable[..., Any]]  # by scope and name
# Libraries whose configurables have counterparts. Names of other modules are the project's own.
T5X_MODULES = ("t5x", "seqio", "optax", "flax", "flaxformer", "jax", "__main__", "t5", "gin", "__gin__")
# Parts of flaxformer and T5X whose networks are not T5.
OTHER_NETWORKS = ("longt5", "moe", "calm_t5", "perceiver", "perceiver_ar", "h_transformer", "bert", "dual_encoder", "fido")

_DATA_PARAMETERS = {
    "train": "train_dataset_cfg", "train_eval": "train_eval_dataset_cfg", "infer_eval": "infer_eval_dataset_cfg",
}  # fmt: skip


class Command(NamedTuple):
    """The gin files and bindings that a command of T5X reads.

    Attributes:
      text: gin text that includes its files and has its bindings after them.
      program: "train", "eval" or "infer".
    """

    text: str
    program: str


class Project:
    """Gin files, read with the files that they include.

    Args:
      files: the files.
      search_paths: folders in which included files are, besides the working directory and the folder of each file.
      macros: macros of t5x_lab. One of the project's with the name of another of these is renamed.
      kept_macros: macros that bindings of t5x_lab's own command line set, so that they have their meaning here.
      rules: rules of T5X's names, for contexts.
      commands: commands that read the files. A file is translated as they read it, with their bindings.

    Attributes:
      files: statements of each file, the given ones first.
      roots: the given files.
    """

    def __init__(
        self,
        files: Sequence[str],
        search_paths: Sequence[str] = (),
        macros: Collection[str] = (),
        kept_macros: Collection[str] = (),
        rules: Rules = MappingProxyType({}),
        commands: Sequence[Command] = (),
    ):
        self._rules, self._kept_macros = rules, frozenset(kept_macros)
        others = (name for name in macros if name not in UNCHANGED_MACROS and name not in self._kept_macros)
        self._renamed = {name: f"PROJECT_{name}" for name in others}
        self.roots = [pathlib.Path(file) for file in files]
        self._search_paths = [pathlib.Path(path) for path in ("", *search_paths)]
        self._statements: dict[pathlib.Path, list[Statement]] = {}  # of files and commands
        self._contexts: dict[tuple[pathlib.Path, pathlib.Path], Context] = {}
        self._commands = {pathlib.Path(f"command {i}"): command for i, command in enumerate(commands)}
        for root in (*self.roots, *self._commands):
            self._read(root, ())
        self.files = {path: each for path, each in self._statements.items() if path not in self._commands}

    def _read(self, path: pathlib.Path, including: tuple[pathlib.Path, ...]) -> None:
        if path in including:
            raise UserError(f"{including[-1]} includes {path}, which includes it.")
        if path not in self._statements:
            command = self._commands.get(path)
            statements = parse_statements(command.text, "a command") if command else read_statements(path)
            self._statements[path] = [
                rename_macros(each, self._renamed) if isinstance(each, Binding) else each for each in statements
            ]
        for statement in self._statements[path]:
            if isinstance(statement, Include) and (included := self.find(statement.path, path)):
                self._read(included, (*including, path))

    def find(self, include: str, path: pathlib.Path) -> pathlib.Path | None:
        """Returns the file of the project that a file includes; None for a file of T5X, ours, or one that is not there."""
        return None if counterpart(include) else self.find_any(include, path)

    def find_any(self, include: str, path: pathlib.Path) -> pathlib.Path | None:
        """Returns the file that a file includes, also a copy of one of T5X's; None if it is not there."""
        folders = [*self._search_paths, *path.parents]
        return next((folder / include for folder in folders if (folder / include).is_file()), None)

    def statements(self, path: pathlib.Path) -> Iterator[Statement]:
        """Yields the statements of a file and of those that it includes, in gin's order."""
        for statement in self._statements[path]:
            if isinstance(statement, Include) and (included := self.find(statement.path, path)):
                yield from self.statements(included)
            yield statement

    @property
    def commands(self) -> "list[Context]":
        """The statements of each command."""
        return [self._context(path, path) for path in self._commands]

    def contexts(self, path: pathlib.Path) -> "list[Context]":
        """Returns what is bound where a file is used: in each command and given file that include it, or alone."""
        users = [root for root in (*self._commands, *self.roots) if path in self._included(root)] or [path]
        return [self._context(user, path) for user in users]

    def _context(self, root: pathlib.Path, path: pathlib.Path) -> "Context":
        if (root, path) not in self._contexts:
            program = self._commands[root].program if root in self._commands else ""
            imports = [each for each in self._statements[path] if isinstance(each, Import)]
            self._contexts[root, path] = Context(
                list(self.statements(root)), self._rules, self._kept_macros, root, program, imports
            )
        return self._contexts[root, path]

    def _included(self, path: pathlib.Path) -> set[pathlib.Path]:
        """Returns the files that a file includes, and those that they include."""
        includes = (each.path for each in self._statements[path] if isinstance(each, Include))
        direct = {included for include in includes if (included := self.find(include, path))}
        return direct.union(*map(self._included, direct))


@dataclasses.dataclass(eq=False)
class Context:
    """The statements of a file and of those that it includes.

    Attributes:
      all_statements: the statements in gin's order.
      rules: rules of T5X's names.
      kept_macros: see `Project`.
      root: the file.
      program: T5X's program that reads them, "" if it is not known.
      imports: imports of the file whose statements are translated, which come before those of other files.
    """

    all_statements: Sequence[Statement]
    rules: Rules
    kept_macros: frozenset[str] = frozenset()
    root: pathlib.Path = pathlib.Path()
    program: str = ""
    imports: Sequence[Import] = ()

    @functools.cached_property
    def modules(self) -> Mapping[str, str]:
        """Modules by their names in the files."""
        imports = (each for each in self.all_statements if isinstance(each, Import))
        return {each.bound: each.module for each in (*imports, *self.imports)}

    @functools.cached_property
    def bindings(self) -> Mapping[tuple[str, str], Binding]:
        """The last binding of each scope and name. Names of the project's own have their module.

        Macros of T5X's run files, which are not read, are in line 0.
        """
        of_runs = RUN_MACROS if self.has_t5x_run else {}
        of_t5x = {("", name): Binding("", 0, "", name, "", value) for name, value in of_runs.items()}
        bindings = (each for each in self.all_statements if isinstance(each, Binding))
        return of_t5x | {(each.scope, self._full_name(each)): each for each in bindings}

    def _full_name(self, binding: Binding) -> str:
        is_own = binding.parameter and self.is_own(binding.selector)
        return f"{binding.selector}.{binding.parameter}" if is_own else binding.name

    def parameter(self, reference: Reference, name: str) -> Any:
        """Returns the resolved value of a parameter of what a reference names, None if it is not bound."""
        scope, _, selector = reference.name.rpartition("/")
        return self.value(f"{selector if self.is_own(selector) else selector.rpartition('.')[2]}.{name}", scope)

    @functools.cached_property
    def _places(self) -> Mapping[int, int]:
        return {id(statement): i for i, statement in enumerate(self.all_statements)}

    def is_before(self, first: Binding, second: Binding) -> bool:
        """Returns whether a statement stands before another one. Those of T5X's files, which are not read, do not."""
        return self._places.get(id(first), math.inf) < self._places.get(id(second), 0)

    def is_before_run(self, binding: Binding) -> bool:
        """Returns whether a run file of T5X's is included after a statement, so that it binds its parameters again."""
        return self._places.get(id(binding), math.inf) < self._place_of_run

    @functools.cached_property
    def _place_of_run(self) -> int:
        includes = ((i, counterpart(each.path)) for i, each in enumerate(self.all_statements) if isinstance(each, Include))
        return max((i for i, translation in includes if translation is not None and translation.is_run), default=-1)

    @functools.cached_property
    def names(self) -> frozenset[str]:
        """All bound names, without scopes."""
        return frozenset(name for _, name in self.bindings)

    @functools.cached_property
    def data_scopes(self) -> Mapping[str, str]:
        """The scope of `DatasetConfig` for "train", "train_eval" and "infer_eval". Two may share one."""
        configs = {role: self.value(f"train.{name}") for role, name in _DATA_PARAMETERS.items()}
        scopes = {role: value.name.rpartition("/")[0] for role, value in configs.items() if isinstance(value, Reference)}
        return {role: role for role in _DATA_PARAMETERS} | scopes

    @functools.cached_property
    def included(self) -> frozenset[str]:
        """T5X's files that are included, such as "t5x/configs/runs/pretrain.gin"."""
        paths = (t5x_file(each.path) for each in self.all_statements if isinstance(each, Include))
        return frozenset(path for path in paths if path)

    @property
    def has_t5x_model(self) -> bool:
        """Whether a file of T5X's defines the network and its settings."""
        return any(each is not None and each.is_model for each in map(counterpart, self.included))

    @property
    def has_t5x_network(self) -> bool:
        """Whether a file of flaxformer's defines T5's or LongT5's layers."""
        return any("/architectures/" in path and counterpart(path) is not None for path in self.included)

    @property
    def has_examples_alone(self) -> bool:
        """Whether the network is one of T5X's examples, without files of flaxformer's."""
        return self.has_t5x_model and not any(path.startswith("flaxformer/") for path in self.included)

    @property
    def has_longt5(self) -> bool:
        """Whether a file of flaxformer's defines LongT5's layers."""
        return any("/longt5/" in path for path in self.included)

    @property
    def has_t5x_run(self) -> bool:
        """Whether a file of T5X's defines the training run."""
        return any(each is not None and each.is_run for each in map(counterpart, self.included))

    def includes_run(self, name: str) -> bool:
        """Returns whether a run file of T5X's is included, such as "finetune"."""
        return f"t5x/configs/runs/{name}.gin" in self.included

    @property
    def has_metrics(self) -> bool:
        """Whether a training run evaluates the metrics of its tasks."""
        name = "train.infer_eval_dataset_cfg"
        return self.value(name) is not None if name in self.names else self.includes_run("finetune")

    @property
    def is_evaluation(self) -> bool:
        """Whether the files are for T5X's commands eval or infer."""
        if self.program:
            return self.program != "train"
        starts = ("evaluate.", "infer.")
        return any(name.startswith(starts) for name in self.names) or any("/eval" in p or "/infer" in p for p in self.included)

    def module_of(self, selector: str) -> str:
        """Returns the module that a selector `network.T5Config` is of, as it is imported; "" for a bare name."""
        first, _, rest = selector.partition(".")
        if not rest:
            return ""
        module = self.modules.get(first, first)
        return f"{module}.{rest.rpartition('.')[0]}".rstrip(".")

    def is_own(self, selector: str) -> bool:
        """Returns whether a selector, with or without a scope, is of a module of the project's own."""
        first = selector.rpartition("/")[2].partition(".")[0]
        module = self.modules.get(first)
        return module is not None and module.split(".")[0] not in T5X_MODULES

    def resolve(self, value: Any) -> Any:
        """Returns a value with macros replaced by their values, where these are known."""
        for _ in range(20):
            macro = self.bindings.get(("", value.name)) if isinstance(value, MacroReference) else None
            if macro is None:
                return value
            value = macro.value
        return value

    def binds_macro(self, name: str) -> bool:
        """Returns whether a statement of the project binds a macro."""
        return ("", name) in self.bindings and self.bindings["", name].line > 0

    def is_from(self, value: Any, macro: str) -> bool:
        """Returns whether a value is a macro, or one whose value is that of the macro."""
        for _ in range(20):
            if not isinstance(value, MacroReference) or value.name == macro:
                return isinstance(value, MacroReference)
            binding = self.bindings.get(("", value.name))
            value = None if binding is None else binding.value
        return False

    def written(self, value: Any) -> Any:
        """Returns a value with macros of T5X replaced. One of the project stays, since a command may set it."""
        is_own = isinstance(value, MacroReference) and self.binds_macro(value.name) and ("", value.name) not in self.rules
        return value if is_own else self.resolve(value)

    def value(self, name: str, scope: str = "") -> Any:
        """Returns the resolved value of a name, None if it is not bound."""
        binding = self.bindings.get((scope, name))
        return None if binding is None else self.resolve(binding.value)

    def differs(self, binding: Binding) -> bool:
        """Returns whether another statement binds the same name to another value, so that the value here is no default."""
        others = (each for each in self.all_statements if isinstance(each, Binding) and each.name == binding.name)
        value = self.resolve(binding.value)
        return any(each.scope == binding.scope and self.resolve(each.value) != value for each in others)

    @property
    def other_network(self) -> str | None:
        """The part of flaxformer or T5X that defines the network, if it has no counterpart."""
        places = [*self.modules.values(), *(path for path in self.included if counterpart(path) is None)]
        return next((name for place in places for name in OTHER_NETWORKS if name in place.replace("/", ".").split(".")), None)
