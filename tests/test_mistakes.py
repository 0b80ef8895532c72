"""Every mistake of a user is one sentence on stderr, with the nearest name, and exit status 2."""

import errno
import os
import pathlib
import re
import sys

import pytest
import seqio

from t5x_lab.cli.main import main
from t5x_lab.config.errors import UserError
from t5x_lab.config.gin_files import binding
from t5x_lab.runs.config.gin_config import GinConfig

TRAIN = [
    "train", "--gin_file=models/t5_1_1/tiny.gin", "--gin_file=objectives/span_corruption.gin", "--gin.MODEL_DIR=run",
    "--gin.TRAIN_STEPS=3", "--gin.VOCABULARY=@ByteVocabulary()", "--gin.MIXTURE_OR_TASK_NAME=sotu",
]  # fmt: skip


@pytest.mark.parametrize(
    "flags, says",
    [
        (
            ["--gin.TransformerConfg.emb_dim=3"],
            'no configurable "TransformerConfg" (on the command line). Did you mean "TransformerConfig"',
        ),
        (
            ["--gin.TransformerConfig.emb_dimm=3"],
            "TransformerConfig has no parameter 'emb_dimm' (on the command line). Did you mean \"emb_dim\"",
        ),
        (
            ["--gin_bindings=OBJECTIVE = full_lm"],
            'Gin cannot parse the value full_lm. Put text in quotes: "full_lm"',
        ),
        (
            ["--gin.EVALS=(@LossEvaluation(),"],
            "ends before a bracket or quote is closed (EOF in multi-line statement",
        ),
        (["--gin.TRAIN_STEP=3"], 'The macro TRAIN_STEP is not used. Did you mean "TRAIN_STEPS"'),
        (
            ["--gin.MIXTURE_OR_TASK_NAME=sotu_span_coruption"],
            'no task or mixture "sotu_span_coruption". Did you mean "sotu_span_corruption"',
        ),
        (['--gin.TransformerConfig.mlp_activations=("gelou", "linear")'], 'is "gelou". Did you mean "gelu"'),
        (["--gin.MESH=tensor=8"], "MESH shards num_heads = 4 over tensor=8 devices, but 4 is not a multiple of that"),
        (["--gin.MESH=data=3"], "MESH is data=3, fsdp=1, tensor=1, which needs 3 devices, but there are 8."),
        (["--gin.MESH=data=2"], "MESH is data=2, fsdp=1, tensor=1, which needs 2 devices, but there are 8."),
        (["--gin.MESH=datta=3"], 'MESH has the axis "datta". Did you mean "data"'),
        (["--gin.BATCH_SIZE=many"], "DataConfig.batch_size is 'many'. It must be an integer"),
        (["--gin.BATCH_SIZE=0"], "DataConfig.batch_size is 0. It must be greater than zero"),
        (["--gin.BATCH_SIZE=6"], "BATCH_SIZE is 6, which is not a multiple of DATA_SHARDS=4"),
        (["--gin.MICROBATCHES=7"], "BATCH_SIZE is 128, which is not a multiple of MICROBATCHES=7"),
        (["--gin.DROPOUT_RATE=1.5"], "DROPOUT_RATE is 1.5. It must be at least 0 and below 1"),
        (["--gin.LOSS_NORMALIZING_FACTOR=NUM_REAL_TARGET_TOKEN"], 'Did you mean "NUM_REAL_TARGET_TOKENS"'),
        (["--gin.LearningRate.factors=constant * rsqrt_deca"], 'Did you mean "rsqrt_decay"'),
        (["--gin.OPTIMIZER=@AdamX()"], 'no configurable "AdamX" (on the command line). Did you mean "AdamW"'),
        (
            ["--gin.MIXTURE_OR_TASK_NAME=sotu_full_lm"],
            'has the objective full_lm, but OBJECTIVE is "span_corruption". Use the name of the text alone',
        ),
        (
            ["--gin.OBJECTIVE=full_lm", "--gin.TASK_FEATURE_LENGTHS={'targets': 64}"],
            "Full language modelling has no inputs for an encoder",
        ),
        (
            ["--gin.OBJECTIVE=prefix_lm_objective_decoder_architecture"],
            "It is for a decoder. Use prefix_lm, or prefix_lm_objective_encoder_decoder_architecture",
        ),
        (["--gin.OBJECTIVE=masked_lm"], "predicts tokens in place, which needs an encoder-only model. Use bert_style"),
        (["--gin.OBJECTIVE=span_coruption"], 'Did you mean "span_corruption"'),
        (["--gin.OBJECTIVE=None"], '"sotu" is plain text. Set an objective, for example'),
        (
            ["--gin.OBJECTIVE=@Denoising()", "--gin.Denoising.inputs=permutd"],
            "Denoising.inputs is 'permutd'. Did you mean \"permuted\"",
        ),
        (["--gin.TRAIN_TOKENS=1000"], "TRAIN_STEPS is 3 and TRAIN_TOKENS is 1000. Set exactly one of them"),
        (["--gin.TASK_FEATURE_LENGTHS={'inputs': 2}"], "Inputs of 2 tokens and 100 sentinels have no room for 15% noise"),
        (["--gin.MIXTURE_OR_TASK_NAME=files_span_corruption"], "needs your files. Set '--gin.TextFiles.train=FOLDER/*.txt'"),
        (["--gin.MIXTURE_OR_TASK_NAME=c4_v220_span_corruption"], "C4 is not prepared under"),
        (["--gin.TASK_FEATURE_LENGTHS={'targets': 114}"], 'has no length for "inputs"'),
        (["--gin.TransformerConfig.dtype=float16"], "A network with dtype float16 cannot be trained"),
        (
            ["--gin.TASK_FEATURE_LENGTHS={'inputs': 512, 'targets': 64}", "--gin.BATCH_SIZE=8"],
            "make targets of up to 114 tokens, but TASK_FEATURE_LENGTHS has 64",
        ),
        (
            ["--gin.VOCABULARY=@SentencePieceVocabulary()", "--gin.SentencePieceVocabulary.path=/nope"],
            "The vocabulary /nope cannot be read",
        ),
        (
            ["--gin.VOCABULARY=@SentencePieceVocabulary()", "--gin.SentencePieceVocabulary.path=/"],
            "The vocabulary / cannot be read",
        ),
        (
            ["--gin.VOCABULARY=@SentencePieceVocabulary()", f"--gin.SentencePieceVocabulary.path={__file__}"],
            "test_mistakes.py is not a SentencePiece model. Set --gin.SentencePieceVocabulary.path=FILE",
        ),
        (["--gin.TransformerConfig.vocab_size=300"], "has 359 ids, but the model has 300"),
        (["--gin.INITIAL_CHECKPOINT_PATH=/nope"], "/nope does not exist. Use a run directory"),
        (
            ["--gin_bindings=import no_such_module"],
            "imports a module that cannot be imported: No module named 'no_such_module'",
        ),
        (["--gin_file=models/t5_1_1/smal.gin"], 'no gin file models/t5_1_1/smal.gin. Did you mean "models/t5_1_1/small.gin"'),
        (["--gin.TRAIN_STEPS"], "--gin.TRAIN_STEPS has no value"),
        (
            ["--gin.OPTIMIZER=@Adafactor"],
            "It must be an optimizer, with learning_rate and make. Bind an instance with parentheses: @Name()",
        ),
        (
            ["--gin.AdamW.learning_rate=3e-4", "--gin.OPTIMIZER=@AdamW()"],
            "AdamW.learning_rate is 0.0003. It must be a schedule.",
        ),
        (
            ["--gin.AdamW.learning_rate=@LearningRate", "--gin.OPTIMIZER=@AdamW()"],
            "It must be a schedule, which is callable. Bind an instance with parentheses: @Name()",
        ),
        (["--gin.MODEL=decoder"], "RunConfig.model is 'decoder'. It must be @ModelConfig()"),
        (["--gin.MESH=7"], 'MESH is 7. Write it as "data=2'),
        (["--gin.SEED=-1"], "RunConfig.seed is -1. It must be at least 0"),
        (["--gin.TRAIN_STEPS=%TRAIN_STEPS"], "RunConfig is circular. Look for a macro that is set to itself"),
        (["--gin.TransformerConfig.relpos_buckets=0"], "TransformerConfig.relpos_buckets is 0. It must be greater than zero"),
        (
            ["--gin.TASK_FEATURE_LENGTHS=64"],
            'DataConfig.task_feature_lengths is 64. It must be a dictionary such as {"inputs": 512',
        ),
        (["--trian"], "unrecognized arguments: --trian"),
        pytest.param(
            *(
                ["--gin.MODEL_DIR=/proc/run", "--gin.BATCH_SIZE=8"],
                "MODEL_DIR /proc/run cannot be written: No such file or directory",
            ),
            marks=pytest.mark.slow,  # found last: everything is built before
        ),
    ],
)
def test_training_refuses(flags, says, capfd):
    assert main([*TRAIN, *flags]) == 2
    error = capfd.readouterr().err.strip()
    assert says in error, error
    assert "Traceback" not in error and error.count("\n") == 0 and error.startswith("t5x_lab train: ")


def test_a_folder_named_like_a_module_that_is_not_there_is_told(capfd):
    pathlib.Path("my_runs").mkdir()
    pathlib.Path("own.gin").write_text("import my_runs\nNETWORK = @Spread()\n")
    assert main([*TRAIN, "--gin_file=own.gin"]) == 2
    error = capfd.readouterr().err.strip()
    assert "import its module in the gin file. `import my_runs` found no my_runs.py, but the folder " in error, error
    assert error.endswith("/my_runs.") and error.count("\n") == 0


@pytest.mark.parametrize(
    "argv, says",
    [
        (["train"], "MODEL is not set. Add a model file"),
        (["train", "--gin_file=models/t5_1_1/tiny.gin"], "MODEL_DIR is not set. It is the run directory"),
        ([*TRAIN[:3], "--gin.MODEL_DIR=run"], "TRAIN_STEPS is None and TRAIN_TOKENS is None. Set exactly one of them"),
        (["trian"], 'no command "trian". Did you mean "train"'),
        (["generate", "--model_dir=/nope", "--prompt=x"], "/nope does not exist. Use a run directory"),
        (["eval", "--model_dir=/nope"], "/nope does not exist"),
        (["eval"], "Pass --model_dir with a run directory or a checkpoint"),
        (["eval", "--model_dir=/nope", "--output=x"], "/nope does not exist"),
        (["inspect", "--gin_file=nope.gin"], "no gin file nope.gin"),
        (
            ["inspect", *TRAIN[1:], "--gin.TASK_FEATURE_LENGTHS=64"],
            "DataConfig.task_feature_lengths is 64. It must be a dictionary such as",
        ),
        (
            ["infer", "--model_dir=x", "--input=a", "--output=b", "--gin.SPLIT=c"],
            "x does not exist",
        ),
        (["infer", "--task=x"], "Pass --model_dir with a run directory or a checkpoint, and --output"),
        (["vocab", "--output=x"], "Pass either --input FILES or --task NAME"),
        (["report", "x", "--gin.X=3"], "This command has no gin configuration"),
    ],
)
def test_commands_refuse(argv, says, capfd):
    assert main(argv) == 2
    error = capfd.readouterr().err.strip()
    assert says in error and "Traceback" not in error and error.count("\n") == 0, error


@pytest.mark.parametrize(
    "message, says",
    [
        (
            "File system scheme 's3' not implemented (file: 's3://b/run/config.gin')",
            "TensorFlow does not know s3://. ",
        ),
        (
            "Error executing an HTTP request: Could not resolve host\n\t when reading gs://b/run",
            "Could not resolve host. Check",
        ),
    ],
)
def test_remote_storage_that_does_not_answer_is_a_sentence(message, says, monkeypatch, capfd):
    import tensorflow as tf

    def fail(*unused):
        raise tf.errors.UnimplementedError(None, None, message)

    monkeypatch.setattr("t5x_lab.cli.report.run", fail)
    assert main(["report", "gs://b/run"]) == 1
    error = capfd.readouterr().err.strip()
    assert says in error and "Traceback" not in error and error.count("\n") == 0, error


def test_a_required_macro_is_named(tmp_path):
    (tmp_path / "mine.gin").write_text(
        'include "models/t5_1_1/tiny.gin"\nTRAIN_STEPS = %gin.REQUIRED\nMODEL_DIR = "x"\nMIXTURE_OR_TASK_NAME = "y"\nTASK_FEATURE_LENGTHS = {"targets": 3}\n'
    )
    with pytest.raises(UserError, match="TRAIN_STEPS is not set"):
        GinConfig(["mine.gin"]).run()


def test_a_mistake_in_a_file_names_the_file_and_the_line(tmp_path):
    (tmp_path / "mine.gin").write_text('include "models/t5_1_1/tiny.gin"\n\nTransformerConfig.heads = 3\n')
    with pytest.raises(UserError, match=r"TransformerConfig has no parameter 'heads' \(mine.gin, line 3\)"):
        GinConfig(["mine.gin"])


def test_values_on_the_command_line_need_no_quotes():
    assert binding("MODEL_DIR=runs/x") == "MODEL_DIR = 'runs/x'"
    assert binding('MODEL_DIR="runs/x"') == 'MODEL_DIR = "runs/x"'
    assert binding("A.b=3e-4") == "A.b = 3e-4"
    assert binding("M=%N") == "M = %N" and binding("M=@N()") == "M = @N()"
    assert binding('L={"a": 1}') == 'L = {"a": 1}' and binding("X=None") == "X = None"
    assert (
        binding("Records.hub={hub}") == "Records.hub = '{hub}'"
        and binding("R.tfds={tfds}/{split}") == "R.tfds = '{tfds}/{split}'"
    )
    assert (
        binding("A.b={}") == "A.b = {}"
        and binding("A.b={1: @c()}") == "A.b = {1: @c()}"
        and binding("A.b={%C: 1}") == "A.b = {%C: 1}"
    )


def test_storage_that_fails_is_a_sentence(monkeypatch, capsys):
    def fail(args):
        raise OSError(errno.ENOSPC, "whatever", "there/file")

    monkeypatch.setattr("t5x_lab.cli.inspect.run", fail)
    assert main(["inspect"]) == 1
    assert capsys.readouterr().err.startswith(
        "t5x_lab inspect: there/file cannot be read or written: No space left on device. Fix the problem"
    )


def test_two_configurations_do_not_mix():
    small, large = GinConfig(["models/t5_1_1/small.gin"]), GinConfig(["models/t5_1_1/large.gin"], ["DROPOUT_RATE = 0.3"])
    assert small.model().network.emb_dim == 512 and small.model().network.dropout_rate == 0.0
    assert large.model().network.emb_dim == 1024 and large.model().network.dropout_rate == 0.3
    assert GinConfig([], [large.text]).model() == large.model()


OWN_TASKS = """
import seqio
import tensorflow as tf

def source(split, shuffle_files, seed=None):
    return tf.data.Dataset.from_tensor_slices({name: ["a b"] * 50 for name in ("inputs", "targets", "weather")})

def add(name, *features, splits=("train", "validation")):
    features = {feature: seqio.Feature(seqio.ByteVocabulary(extra_ids=100)) for feature in features}
    steps = [seqio.preprocessors.tokenize, seqio.preprocessors.append_eos_after_trim]
    seqio.TaskRegistry.add(name, seqio.FunctionDataSource(source, splits), preprocessors=steps, output_features=features)

add("own_pairs", "inputs", "targets")
add("own_weather", "inputs", "targets", "weather")
add("own_targets", "targets")
add("own_tests", "inputs", "targets", splits=("validation",))
"""


@pytest.fixture
def own(monkeypatch, tmp_path):
    """Flags of a run on a task of one's own."""
    (tmp_path / "own_tasks.py").write_text(OWN_TASKS)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield lambda task, *more: [
        "train", "--gin_file=models/t5_1_1/tiny.gin", "--gin_bindings=import own_tasks", "--gin.MODEL_DIR=run", "--gin.TRAIN_STEPS=1",
        f"--gin.MIXTURE_OR_TASK_NAME={task}", '--gin.TASK_FEATURE_LENGTHS={"inputs": 16, "targets": 8}', "--gin.BATCH_SIZE=8",
        "--gin.VOCABULARY=@ByteVocabulary()", *more,
    ]  # fmt: skip
    for name in [name for name in seqio.TaskRegistry.names() if name.startswith("own_")]:
        seqio.TaskRegistry.remove(name)
    sys.modules.pop("own_tasks", None)


@pytest.mark.parametrize(
    "task, says",
    [
        ("own_pair", 'no task or mixture "own_pair". Did you mean "own_pairs"'),
        ("own_targets", 'The task "own_targets" has no inputs for the encoder. Use a decoder, or'),
        ("own_tests", 'The task "own_tests" has no split "train" to train on; it has validation'),
    ],
)
def test_a_dry_run_refuses_the_tasks_that_training_refuses(own, task, says, capsys):
    for more in (["--dry_run"], []):
        assert main(own(task, *more)) == 2
        assert says in capsys.readouterr().err


def test_a_dry_run_says_which_data_are_not_here(own, capsys):
    assert main(own("own_pairs", "--dry_run")) == 0
    output = capsys.readouterr()
    assert "8 rows of 16 + 8 tokens" in output.out and not re.search("not read|not used|vocabulary", output.err)
    assert "Adafactor" in output.out and not re.search(
        "AdamW|Lstm|ProbeEvaluation", output.out
    )  # settings of what is used alone
    assert main([*TRAIN, "--gin.MIXTURE_OR_TASK_NAME=files", "--gin.TextFiles.train=none/*.txt", "--dry_run"]) == 0
    output = capsys.readouterr().out
    assert 'The data were not checked: No file matches TextFiles.train = "none/*.txt"' in output
    assert re.search("data        files_?\\w*, [0-9]+ rows of", output)


def test_what_nothing_reads_is_said(own, capsys):
    lengths = '--gin.TASK_FEATURE_LENGTHS={"inputs": 16, "targets": 8, "target": 9}'
    assert main(own("own_weather", lengths, "--gin.ByteVocabulary.extra_ids=50", "--dry_run")) == 0
    stderr = capsys.readouterr().err
    assert '"weather" of the task "own_weather" is not used' in stderr
    assert 'TASK_FEATURE_LENGTHS has a length for "target", which is not used. Did you mean "targets"?' in stderr
    assert "VOCABULARY, ByteVocabulary(extra_ids=50), replaces the vocabulary of own_weather." in stderr


@pytest.mark.parametrize("variable, is_kept", [("MALLOC_ARENA_MAX", True), ("GLIBC_TUNABLES", True), ("OTHER", False)])
def test_a_users_number_of_arenas_is_kept(variable, is_kept, monkeypatch):
    from t5x_lab.cli import process

    calls: list[tuple] = []
    monkeypatch.setenv(variable, "glibc.malloc.arena_max=8" if variable == "GLIBC_TUNABLES" else "8")
    monkeypatch.setattr(process.ctypes, "CDLL", lambda name: type("C", (), {"mallopt": lambda self, *a: calls.append(a)})())
    process._limit_malloc_arenas()
    assert bool(calls) != is_kept


@pytest.mark.parametrize("own_folder", [None, "", "mine"])
def test_programs_are_kept_in_the_users_cache_folder(own_folder, tmp_path, monkeypatch):
    """Checks the environment of a command, also with a folder of the user's and with a home that cannot be written to."""
    from t5x_lab.cli import process

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    if own_folder is not None:
        monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", own_folder)
        process._keep_compiled_programs()
        assert os.environ["JAX_COMPILATION_CACHE_DIR"] == own_folder and not (tmp_path / "cache").exists()
        return
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR")
    monkeypatch.setattr(process.os, "access", lambda path, mode: False)
    process._keep_compiled_programs()
    assert "JAX_COMPILATION_CACHE_DIR" not in os.environ
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR")
    process._keep_compiled_programs()
    folder = pathlib.Path(os.environ["JAX_COMPILATION_CACHE_DIR"])
    assert folder.is_dir() and folder.parent == tmp_path / "cache" / "t5x_lab"


STATEFUL = {
    "tf.py_function": 'seqio.TextLineDataSource({"train": "a.txt"}), lambda d: d.map(lambda x: tf.py_function(upper, [x], tf.string))',
    "a generator": 'seqio.FunctionDataSource(lambda split, shuffle_files, seed=None: tf.data.Dataset.from_generator('
    'lambda: iter(["a"] * 99), output_signature=tf.TensorSpec((), tf.string)), ["train"]), lambda d: d',
    "tf.numpy_function": 'seqio.TextLineDataSource({"train": "a.txt"}), lambda d: d.map(lambda x: tf.numpy_function(upper, [x], tf.string))',
}  # fmt: skip


@pytest.mark.parametrize("kind", STATEFUL)
def test_python_whose_position_cannot_be_saved_is_refused_before_training(kind, tmp_path, capsys):
    """TensorFlow saves no position of it: so it was found at the first checkpoint, and tried again for half an hour."""
    name = f"stateful_{list(STATEFUL).index(kind)}"
    pathlib.Path("a.txt").write_text("some words\n" * 99)
    code = f"""
import seqio, tensorflow as tf
def upper(x): return x.upper() if isinstance(x, bytes) else x.numpy().upper()
source, step = {STATEFUL[kind]}
bytes_ = seqio.ByteVocabulary(100)
shape = lambda d: d.map(lambda x: {{"targets": tf.ensure_shape(x, [])}})
features = {{"targets": seqio.Feature(bytes_)}}
steps = [step, shape, seqio.preprocessors.tokenize]
seqio.TaskRegistry.add("{name}", source, preprocessors=steps, output_features=features)
"""
    path = tmp_path / f"{name}.py"
    path.write_text(code)
    exec(compile(code, str(path), "exec"), {})
    flags = [
        "VOCABULARY=@ByteVocabulary()",
        "TransformerConfig.vocab_size=384",
        f"MIXTURE_OR_TASK_NAME={name}",
        "DATA_SHARDS=1",
    ]
    flags += ["TASK_FEATURE_LENGTHS={'targets': 16}", "BATCH_SIZE=8", "TRAIN_STEPS=5", "EVALS=()", "MODEL_DIR=run"]
    files = ["--gin_file=models/causal_decoder/tiny.gin", "--gin_file=objectives/full_lm.gin"]
    assert main(["train", *files, *(f"--gin.{flag}" for flag in flags)]) == 2
    stderr = capsys.readouterr().err
    assert re.search(
        rf"calls a stateful Python function \(.*{name}.py, line \d+\), so its position cannot be saved.*t5x_lab cache", stderr
    ), stderr
    assert not pathlib.Path("run").exists()
