"""Files of other people: they run no code, and what is wrong with them ends in a sentence within seconds."""

import gzip
import json
import os
import pathlib
import shutil
import signal
import time

import pytest
from etils import epath

import t5x_lab
from t5x_lab.checkpoints.layout import INFO, finish, make_info, read_info
from t5x_lab.cli.main import main
from t5x_lab.config.errors import UserError
from t5x_lab.config.json_files import MAX_DEPTH, parse_json, read_json
from t5x_lab.config.steps import parse_step
from t5x_lab.evaluation.inference.files import read_examples
from t5x_lab.evaluation.results import ResultFiles
from t5x_lab.observe.metrics import read_metrics
from t5x_lab.observe.owner import OWNER, read_owner
from t5x_lab.prompts.templates.files import read_templates
from t5x_lab.prompts.templates.template import Template
from t5x_lab.report.page import write_report
from t5x_lab.report.run_directory import read_run

BYTES = ["VOCABULARY = @ByteVocabulary()", "TransformerConfig.vocab_size = 384"]
DEEP = "[" * 20_000 + "]" * 20_000


def attack(jinja: str) -> str:
    """Returns the error of a template that is rendered with a record."""
    start = time.process_time()
    with pytest.raises(UserError) as error:
        Template("data", "name", f"{jinja} ||| x").render({"text": "some text", "numbers": [1, 2]})
    assert time.process_time() - start < 30
    return error.value.sentence


@pytest.mark.parametrize(
    "jinja",
    [
        "{{ cycler.__init__.__globals__.os.popen('touch ran').read() }}",
        "{{ ''.__class__.__mro__[1].__subclasses__()[0] }}",
        "{{ (text|attr('__class__')).__mro__ }}",
        "{% for x in ['{0.__class__}'.format(text)] %}{{ x }}{% endfor %}",
        "{{ self.__init__.__globals__ }}",
    ],
)
def test_templates_do_not_reach_python(jinja):
    assert "unsafe" in attack(jinja) and not pathlib.Path("ran").exists()


@pytest.mark.parametrize(
    "jinja, limit",
    [
        ("{% for i in range(10**12) %}{% endfor %}", "number above 100,000"),
        ("{% for i in range(10**5) %}{% for j in range(10**5) %}{% endfor %}{% endfor %}", "1,000,000 steps"),
        ("{% set _budget = 1 %}{% for i in range(10**5) %}{% for j in range(10**5) %}{% endfor %}{% endfor %}", "1,000,000 steps"),
        ("{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(100) }}", "steps"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
        ("{% set x = 'a' * (3 * 10**9) %}", "characters"),
        ("{% set x = [1] * (3 * 10**9) %}", "items"),
        ("{% set n = namespace(x='a') %}{% for i in range(99) %}{% set n.x = n.x ~ n.x %}{% endfor %}", "characters"),
        ("{% set n = namespace(x='a') %}{% for i in range(99) %}{% set n.x = n.x + n.x %}{% endfor %}", "characters"),
        ("{% set n = namespace(x=7) %}{% for i in range(99) %}{% set n.x = n.x * n.x %}{% endfor %}", "integer"),
        ("{% set x = 10 ** (10 ** 10) %}", "integer"),
        ("{% set x = [1] * 1000 %}{% set x = [x] * 1000 %}{% set x = [x] * 1000 %}{{ x }}", "items"),
        ("{% set x = [] %}{% set y = x.append(x) %}{{ x }}", "items"),
        ("{% set x = 'a' * 10000 %}{{ x.replace('a', x) }}", "characters"),
        ("{% set x = 'a' * 10000 %}{{ x | replace('a', x) }}", "characters"),
        ("{% set x = 'a' * 10000 %}{{ x.join([x] * 10000) }}", "characters"),
        ("{{ ['a'] * 10000 | map('center', 10**9) | join }}", "Template"),
        ("{{ 'a' | center(10**9) }}", "number above"),
        ("{{ 'a'.ljust(10**9) }}", "number above"),
        ("{{ '%1000000000d' % 1 }}", "width"),
        ("{{ '%*d' | format(10**9, 1) }}", "width"),
        ("{{ 2.5 | round(10**9, 'ceil') }}", "number above"),
        ("{{ numbers | slice(10**9) | list | length }}", "number above"),
        ("{% for i in range(99999) %}" + "x" * 5000 + "{% endfor %}", "characters"),
    ],
)  # fmt: skip
def test_templates_have_limits(jinja, limit):
    assert limit in attack(jinja)


@pytest.mark.parametrize(
    "jinja, says",
    [
        ("{{ text | shout }}", "does not compile: No filter named 'shout'"),
        ("{{ " + "(" * 5_000 + "1" + ")" * 5_000 + " }}", "nested too deeply"),
        ("{% if 1 %}" * 200 + "{% endif %}" * 200, "does not compile"),
        ("{% include 'file' %}", "no loader"),
    ],
)
def test_templates_that_do_not_compile_are_named(jinja, says):
    assert says in attack(jinja)


def test_methods_are_called_in_loops_with_variables():
    """Jinja passes variables of loops and blocks to every call in them."""
    jinja = "{% for x in ['b', 'c'] %}{% set y = x %}{{ ', '.join(['a', y]) }}{{ y.replace('b', 'd') }} {% endfor %}||| x"
    assert Template("data", "name", jinja).render({"text": ""}).inputs == "a, bd a, cc"


def test_random_filters_depend_on_the_record_and_the_seed_only():
    template = Template("data", "name", "{{ range(1000) | list | random }} {{ text }} ||| x")
    render = lambda text, seed=0: template.render({"text": text}, seed).inputs
    assert render("a") == render("a") != render("a", seed=1)
    assert len({render(str(n)).split()[0] for n in range(20)}) > 10


@pytest.mark.parametrize(
    "text, says",
    [
        ("templates: " + DEEP, "nested too deeply"),
        ("templates: {a: {<<: {name: a}, jinja: b}}", "merge keys"),
        ("a: &a [x, x, x, x, x, x]\nb: &b [*a, *a, *a, *a, *a, *a]\ntemplates: {x: !Template {name: *b, jinja: x}}", "must be a text"),
    ],
)  # fmt: skip
def test_template_files_are_bounded(text, says, tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "templates.yaml").write_text(text)
    with pytest.raises(UserError, match=says):
        read_templates((str(tmp_path),), "data")


@pytest.mark.parametrize("nested", [DEEP, '{"a":' * 300 + "1" + "}" * 300, "[" * 101 + "]" * 101])
def test_deeply_nested_json_is_invalid(nested, tmp_path):
    with pytest.raises(ValueError, match="nested more than 100 levels"):
        parse_json(nested)
    path = epath.Path(tmp_path)
    for name in ("run.json", "metrics.jsonl", OWNER, INFO):
        (path / name).parent.mkdir(exist_ok=True)
        (path / name).write_text(nested + "\n")
    assert read_json(path / "run.json") is None
    assert read_metrics(path) == []
    assert read_owner(path / OWNER)[0].host == "an unknown host"
    with pytest.raises(UserError, match="cannot be read"):
        read_info(path)


def test_nesting_below_the_limit_is_read():
    text = "[" * MAX_DEPTH + "]" * MAX_DEPTH
    assert parse_json(text) == json.loads(text)


ATTACK = """
from __gin__ import dynamic_registration
import subprocess
from t5x_lab.optim import schedules
TransformerConfig.emb_dim = @subprocess.getoutput()
subprocess.getoutput.cmd = "touch {}"
"""


@pytest.fixture(scope="module")
def run_directory(tmp_path_factory):
    """A small model's run directory without imports."""
    path = tmp_path_factory.mktemp("stored") / "run"
    t5x_lab.from_gin(["models/decoder/tiny.gin"], BYTES).save(str(path))
    return path


def with_config(run_directory: pathlib.Path, target: pathlib.Path, text: str) -> str:
    """Returns a copy of the run directory whose configurations have this text in addition."""
    shutil.copytree(run_directory, target)
    (checkpoint,) = (target / "checkpoints").iterdir()
    info = json.loads((checkpoint / INFO).read_text())
    config = info["config"] + text
    (target / "config.gin").write_text(config)
    notes = {name: value for name, value in info.items() if name not in ("parameters", "step", "sha256", "format", "config")}
    finish(epath.Path(checkpoint), make_info(info["parameters"], info["step"], config=config, **notes))
    return str(target)


@pytest.mark.parametrize("text", [ATTACK, "\nimport somebodys\n", "\ninclude 'other.gin'\n", "\nimport somebodys\nx = (\n"])
def test_stored_configurations_run_no_code(text, run_directory, tmp_path, capsys):
    """Every command that reads a run directory names the code and does not run it."""
    (tmp_path / "somebodys.py").write_text("import pathlib; pathlib.Path('ran').touch()")
    (tmp_path / "other.gin").write_text("import somebodys")
    directory = with_config(run_directory, tmp_path / "run", text.format(tmp_path / "ran"))
    code = next(
        line for line in ("import subprocess", "import somebodys", 'include "other.gin"') if line.replace('"', "'") in text
    )
    with pytest.raises(UserError, match=f"{code}.*trust=True"):
        t5x_lab.load(directory)
    base = t5x_lab.load(str(run_directory))
    with pytest.raises(UserError, match=code):
        base.with_adapter(directory)
    with pytest.raises(UserError, match=code):
        t5x_lab.load([str(run_directory), directory])
    for command in (
        ["eval", f"--model_dir={directory}"],
        ["eval", f"--model_dir={run_directory},{directory}", "--gin.EVALS=()"],
        ["generate", f"--model_dir={directory}", "--prompt=a"],
        ["infer", f"--model_dir={directory}", "--task=sotu_full_lm", "--output=x.jsonl"],
        ["inspect", f"--model_dir={directory}"],
        ["convert", f"--source={directory}", "--to=hf", "--target=out"],
    ):
        assert main(command) == 2, command
        assert code in capsys.readouterr().err
    assert main(["inspect", directory]) == 0 and code in capsys.readouterr().out
    assert not (tmp_path / "ran").exists()


def test_a_trusted_configuration_runs_its_code(run_directory, tmp_path, capsys):
    (tmp_path / "somebodys_loss.py").write_text("import pathlib; pathlib.Path('ran').touch()")
    directory = with_config(run_directory, tmp_path / "run", "\nimport somebodys_loss\n")
    assert t5x_lab.load(directory, trust=True).step == 0 and (tmp_path / "ran").exists()
    assert main(["inspect", f"--model_dir={directory}", "--trust"]) == 0


def test_a_users_own_runs_are_trusted(run_directory, tmp_path, monkeypatch):
    """Configurations that this user saved need no flag, wherever they lie; changed ones do."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    (tmp_path / "my_own_module.py").write_text("")
    t5x_lab.from_gin(["models/decoder/tiny.gin"], [*BYTES, "import my_own_module"]).save("mine")
    shutil.move("mine", "moved")
    assert t5x_lab.load("moved").step == 0
    with_config(pathlib.Path("moved"), tmp_path / "changed", "\nimport os\n")
    with pytest.raises(UserError, match="import os"):
        t5x_lab.load("changed")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "another user"))
    with pytest.raises(UserError, match="import my_own_module"):
        t5x_lab.load("moved")


def test_names_of_steps_are_digits_from_0_to_9(tmp_path):
    assert [parse_step(name) for name in ("0", "17", str(2**63 - 1))] == [0, 17, 2**63 - 1]
    assert not any(
        map(
            parse_step,
            ("\N{SUPERSCRIPT TWO}\N{SUPERSCRIPT THREE}", "\N{ARABIC-INDIC DIGIT ONE}", str(2**63), "9" * 9_999, "-1", ""),
        )
    )
    folder = tmp_path / "run" / "evals" / "eval"
    folder.mkdir(parents=True)
    for name in ("\N{SUPERSCRIPT TWO}\N{SUPERSCRIPT THREE}", "9" * 100, "4"):
        (folder / f"{name}.json").write_text('{"results": {"a": {"loss": 1.0}}}')
    assert read_run(str(tmp_path / "run")).evaluations == {"eval/a": {4: {"loss": 1.0}}}
    assert ResultFiles(str(tmp_path / "run"), "eval", {}).steps() == [4]


def test_macros_of_macros_are_refused_at_once():
    """Nine levels of lists with thirty macros each are 30**9 values."""
    levels = [f"level{n} = [{', '.join([f'%level{n + 1}'] * 30)}]" for n in range(9)]
    text = [*BYTES, *levels, "level9 = 1", "TransformerConfig.mlp_activations = %level0"]
    start = time.process_time()
    with pytest.raises(UserError, match="has more than 1,000,000 values"):
        t5x_lab.from_gin(["models/decoder/tiny.gin"], text)
    run = tmp_run(text)
    assert write_report([run]) and time.process_time() - start < 30


def tmp_run(bindings: list[str]) -> str:
    """Returns a run directory with these bindings and a line of metrics."""
    path = pathlib.Path("reported")
    path.mkdir()
    (path / "config.gin").write_text("\n".join([*bindings, "TRAIN_STEPS = %level0", ""]))
    columns = {f"metric{n}": 1.0 for n in range(5_000)}
    (path / "metrics.jsonl").write_text(json.dumps({"step": 1, "split": "train", "loss": 1.0, **columns}) + "\n")
    return str(path)


@pytest.mark.parametrize("name", ["run.json", "config.gin", "metrics.jsonl", "END", OWNER, "references.json", "evals/a/1.json"])
def test_named_pipes_are_not_waited_for(name, tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.gin").write_text("A.b = 1\n")
    (run / name).parent.mkdir(exist_ok=True, parents=True)
    (run / name).unlink(missing_ok=True)
    os.mkfifo(run / name)
    signal.signal(signal.SIGALRM, signal.default_int_handler)  # KeyboardInterrupt
    signal.alarm(60)
    try:
        assert main(["report", str(run)]) in (0, 2)
    finally:
        signal.alarm(0)


def test_an_owner_that_is_a_directory_is_named(capsys):
    os.makedirs("run/OWNER")
    flags = [
        "--gin_file=models/decoder/tiny.gin",
        "--gin_file=objectives/full_lm.gin",
        "--gin.MODEL_DIR=run",
        "--gin.TRAIN_STEPS=1",
    ]
    assert (
        main(["train", *flags, *(f"--gin_bindings={text}" for text in BYTES), "--gin.MIXTURE_OR_TASK_NAME=sotu_full_lm"]) == 2
    )
    assert "OWNER is not a file" in capsys.readouterr().err


def test_inputs_of_inference_are_bounded(tmp_path):
    with gzip.open("bomb.txt.gz", "wb") as file:
        for _ in range(100):
            file.write(b"x" * 1_000_000)
    os.mkfifo("pipe.txt")
    (tmp_path / "deep.jsonl").write_text(DEEP + "\n")
    for name, says in (
        ("bomb.txt.gz", "has a line of more than"),
        ("pipe.txt", "is not a file"),
        ("deep.jsonl", "nested more than"),
    ):
        with pytest.raises(UserError, match=says):
            list(read_examples(name, "predict"))


@pytest.mark.parametrize(
    "name, value", [("vocab_size", 10**12), ("vocab_size", 10**400), ("d_model", 2**62), ("num_layers", 10**9), ("d_kv", -1)]
)
def test_sizes_of_foreign_models_are_bounded(name, value, tmp_path, capsys):
    config = dict(
        model_type="t5", vocab_size=64, d_model=8, d_kv=4, d_ff=16, num_layers=1, num_heads=2, pad_token_id=0, eos_token_id=1
    )
    (tmp_path / "config.json").write_text(json.dumps({**config, "decoder_start_token_id": 0, name: value}))
    (tmp_path / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    assert main(["inspect", str(tmp_path)]) in (0, 2)
    with pytest.raises(UserError):
        t5x_lab.load(str(tmp_path))
