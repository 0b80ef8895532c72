"""Layers import only layers above them, without cycles inside a layer; the core runs without TensorFlow; --help is quick and light."""

import ast
import os
import subprocess
import sys

import pytest
from conftest import ROOT

from reference import LAYERS

WITHOUT_TENSORFLOW = LAYERS[: LAYERS.index("data")]
TENSORFLOW_SIDE = ("tensorflow", "seqio", "t5", "tensorflow_datasets", "tensorflow_text", "clu")


PACKAGES = ["t5x_lab", "tasks"]


def module_name(path) -> str:
    """Returns the dotted name of a file. `tasks/` is `t5x_lab.tasks` through a symbolic link."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    parts = ("t5x_lab", *parts) if parts[0] == "tasks" else parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {
    module_name(path): path
    for folder in PACKAGES
    for path in sorted((ROOT / folder).rglob("*.py"))
    if path.relative_to(ROOT).parts[:2] != ("t5x_lab", "tasks")
}


def imports(path) -> list[str]:
    """Returns the modules that a file imports, at module level and in functions. Names of a package are modules if files exist."""
    modules = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            modules += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            modules += [name if name in FILES or node.module == "t5x_lab" else node.module or "" for name in names]
    return list(dict.fromkeys(modules))


def files_of(layer):
    folder = ROOT / "tasks" if layer == "tasks" else ROOT / "t5x_lab" / layer
    return sorted(folder.rglob("*.py"))


@pytest.mark.parametrize("layer", LAYERS)
def test_layers_import_only_layers_above(layer):
    assert files_of(layer)
    for path in files_of(layer):
        for module in imports(path):
            parts = module.split(".")
            if parts[0] != "t5x_lab" or module == "t5x_lab.__version__":
                continue
            assert len(parts) > 1, f"{path} imports the package root, which imports everything"
            assert parts[1] in LAYERS, f"{path} imports {module}"
            assert LAYERS.index(parts[1]) <= LAYERS.index(layer), f"{path} imports {module}"


def cycles(graph: dict[str, set[str]]) -> list[tuple[str, ...]]:
    """Returns the groups of nodes that can all reach each other. Edges from a node to itself do not count."""
    graph = {node: edges & graph.keys() - {node} for node, edges in graph.items()}
    reachable = {node: _reachable(graph, node) for node in graph}
    groups = {tuple(sorted(other for other in reachable[node] if node in reachable[other])) for node in graph}
    return sorted(groups - {()})


def _reachable(graph: dict[str, set[str]], start: str) -> set[str]:
    reached: set[str] = set()
    todo = list(graph[start])
    while todo:
        node = todo.pop()
        if node not in reached:
            reached.add(node)
            todo += graph[node]
    return reached


def import_graph(name_of) -> dict[str, set[str]]:
    """Returns the import graph of the package, with files grouped by `name_of`."""
    graph: dict[str, set[str]] = {}
    for module, path in FILES.items():
        graph.setdefault(name_of(module), set()).update(name_of(name) for name in imports(path) if name in FILES)
    return graph


def folder_of(module: str) -> str:
    """Returns the sub-folder of a layer that a module is in. A file next to sub-folders stands for itself."""
    return ".".join(module.split(".")[:3])


def test_cycles_are_detected():
    graph = {"a": {"b"}, "b": {"c"}, "c": {"b", "d"}, "d": {"d"}, "e": {"a"}}
    assert cycles(graph) == [("b", "c")]


def test_files_have_no_import_cycles():
    """Includes imports inside functions."""
    assert not cycles(import_graph(lambda module: module))


def test_sub_folders_have_no_import_cycles():
    assert not cycles(import_graph(folder_of))


@pytest.mark.parametrize("layer", WITHOUT_TENSORFLOW)
def test_the_core_never_names_tensorflow(layer):
    for path in files_of(layer):
        assert not [m for m in imports(path) if m.split(".")[0] in TENSORFLOW_SIDE], path


def run_python(code: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )


@pytest.mark.slow
def test_the_core_trains_where_tensorflow_cannot_be_imported():
    """Imports the core, trains, saves, restores and generates in a process in which these packages raise when imported."""
    modules = [
        ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for layer in WITHOUT_TENSORFLOW
        for path in files_of(layer)
        if path.stem != "__init__"
    ]
    code = f"""
import sys
sys.modules.update(dict.fromkeys({TENSORFLOW_SIDE}))  # importing a module that is None raises
import importlib, t5x_lab
for module in {modules}:
    importlib.import_module(module)
import jax
from t5x_lab.checkpoints.manager import Checkpoints
from t5x_lab.optim.optimizers import Adafactor
from t5x_lab.runs.train.assemble import assemble
from t5x_lab.runs.model.sharded_model import ShardedModel
from t5x_lab.training.batches import SyntheticBatches
run = t5x_lab.from_gin(["models/t5_1_1/tiny.gin"], ["TransformerConfig.vocab_size = 100"])
sharded = run.sharded
training = assemble(sharded, Adafactor(), batch_size=4, microbatches=1, seed=0)
batches = SyntheticBatches({{"inputs": 8, "targets": 8}}, 4, 100)
state, metrics = training.step(training.init_state(sharded.init_params(0)), sharded.shard_batch(next(batches)))
checkpoints = Checkpoints("run"); checkpoints.save(1, state, batches); checkpoints.wait()
state = checkpoints.restore(1, training.abstract_state, batches)
print(run.score([[5, 6]], [[7, 8]]), float(metrics["loss"]))
"""
    done = run_python(code)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("[-")


def test_importing_the_package_is_light():
    done = run_python("import t5x_lab, sys; print([m for m in ('jax', 'tensorflow', 'flax', 'numpy') if m in sys.modules])")
    assert done.stdout.strip() == "[]", done


def test_help_answers_at_once_without_jax_or_tensorflow():
    code = """
import sys, time
from t5x_lab.cli.main import COMMANDS, main
for command in ([], *([name] for name in COMMANDS)):
    began = time.process_time()
    assert main([*command, "--help"]) == 0 and not {'jax', 'tensorflow'} & set(sys.modules), command
    assert time.process_time() - began < 2, command
"""
    done = run_python(code)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("usage") == done.stdout.count("usage: t5x_lab") > 10


def test_no_module_is_without_a_word_on_what_it_is_for():
    for path in sorted((ROOT / "t5x_lab").rglob("*.py")) + sorted((ROOT / "tasks").glob("*.py")):
        assert ast.get_docstring(ast.parse(path.read_text())), path


RESOLVERS = {"resolve_tasks", "resolve_mixture", "find_members", "known_names"}


def test_commands_load_the_data_layer_before_they_resolve_names():
    """It checks the installed packages, with a sentence, and keeps TensorFlow off the accelerator."""
    checked = []
    for path in sorted([*(ROOT / "t5x_lab" / "cli").glob("*.py"), *(ROOT / "t5x_lab" / "runs").rglob("*.py")]):
        for function in ast.walk(ast.parse(path.read_text())):
            if isinstance(function, ast.FunctionDef):
                nodes = list(ast.walk(function))
                imported = {alias.name for node in nodes if isinstance(node, ast.ImportFrom) for alias in node.names}
                if imported & RESOLVERS:
                    called = {getattr(node.func, "id", "") for node in nodes if isinstance(node, ast.Call)}
                    assert "load_data_layer" in called, f"{path}: {function.name}"
                    checked.append(function.name)
    assert len(checked) >= 3


def test_names_of_the_library_resolve_where_nothing_else_registered_them():
    code = """
from t5x_lab.data.config import DataConfig
from t5x_lab.data.tasks.names import find_members
from t5x_lab.data.vocabularies.config import ByteVocabulary
from t5x_lab.prompts.prompts import Prompts
for name in ("sotu_full_lm", "t5_glue_cola"):
    config = DataConfig(name, {"inputs": 8, "targets": 8}, 4, ByteVocabulary(), prompts=Prompts())
    print(*(member.task.name for member in find_members(config)))
"""
    done = run_python(code)
    assert done.stdout.split() == ["sotu_full_lm", "t5_glue_cola"], done.stderr
