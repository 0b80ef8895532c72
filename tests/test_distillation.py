"""Knowledge distillation: one text of inputs and targets, the loss against NumPy, teachers on meshes, and runs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from commands import run
from helpers import compiled, pack_rows, random_batch, random_params, tiny_model
from runs_of_text import FULL_LM, PREFIX_LM_ED, flags

import t5x_lab
from t5x_lab.config.errors import UserError
from t5x_lab.models import distillation as distillation_module
from t5x_lab.models.distillation import IDS, LOGITS, as_one_text, distillation, teacher_features
from t5x_lab.observe.metrics import read_metrics
from t5x_lab.runs.config.gin_config import GinConfig
from t5x_lab.runs.model.sharded_model import ShardedModel
from t5x_lab.runs.train.teacher import load_teacher

RECIPE = ("--gin_file=recipes/distillation.gin", "--gin.Teacher.path=teacher")


def packed_batch() -> dict:
    """Returns a packed row of two examples, and one of two others."""
    batch = random_batch("encoder_decoder")
    rows = [pack_rows(batch, *pair, "encoder_decoder") for pair in ((0, 1), (2, 3))]
    return {name: np.concatenate([row[name] for row in rows]) for name in rows[0]}


def texts_of(batch: dict) -> list[tuple[int, np.ndarray, list[int], list[int]]]:
    """Returns row, places of the targets, inputs and targets of each example."""
    texts = []
    for row in range(len(batch["decoder_target_tokens"])):
        for segment in range(1, int(batch["decoder_segment_ids"][row].max()) + 1):
            places = np.flatnonzero(batch["decoder_segment_ids"][row] == segment)
            inputs = batch["encoder_input_tokens"][row][batch["encoder_segment_ids"][row] == segment]
            texts.append((row, places, inputs.tolist(), batch["decoder_target_tokens"][row][places].tolist()))
    return texts


def test_inputs_and_targets_are_one_text():
    batch = packed_batch()
    text, places = jax.tree.map(np.asarray, as_one_text(batch, start=63))
    examples = texts_of(batch)
    assert len(examples) == 4
    for row, targets_at, inputs, targets in examples:
        at = places[row, targets_at]
        whole = slice(at[0] - len(inputs), at[-1] + 1)
        assert text["decoder_target_tokens"][row, whole].tolist() == inputs + targets
        assert text["decoder_input_tokens"][row, whole].tolist() == [63, *inputs, *targets][:-1]
        assert text["decoder_positions"][row, whole].tolist() == list(range(len(inputs + targets)))
        assert len(set(text["decoder_segment_ids"][row, whole])) == 1
    tokens = sum(len(inputs + targets) for _, _, inputs, targets in examples)
    assert (text["decoder_segment_ids"] > 0).sum() == tokens
    alone = random_batch("causal_decoder")
    assert as_one_text(alone)[0] is alone


@pytest.mark.parametrize("top", [None, 3])
def test_the_teachers_logits_are_those_of_each_text_alone(top, monkeypatch):
    monkeypatch.setattr(distillation_module, "_CHUNK", 5)
    teacher = tiny_model("causal_decoder")
    params, batch = random_params(teacher), packed_batch()
    features = teacher_features(teacher.network(params), False, batch, top)
    for row, targets_at, inputs, targets in texts_of(batch):
        alone = np.zeros((4, 40), np.int32)
        alone[0, : len(inputs + targets)] = [0, *inputs, *targets][:-1]
        expected = compiled(teacher.logits)(params, {"decoder_input_tokens": alone})[0, len(inputs) : len(inputs + targets)]
        logits = features[LOGITS][row, targets_at]
        if top is None:
            np.testing.assert_allclose(logits, expected, rtol=1e-4, atol=1e-4)
        else:
            np.testing.assert_allclose(logits, -np.sort(-np.asarray(expected))[:, :top], rtol=1e-4, atol=1e-4)
            np.testing.assert_array_equal(features[IDS][row, targets_at], np.argsort(-expected, axis=-1)[:, :top])


@pytest.mark.parametrize("top, temperature", [(None, 1.0), (None, 2.5), (4, 1.0), (4, 0.5)])
def test_the_loss_is_the_divergence_of_two_distributions(top, temperature, monkeypatch):
    """Against NumPy in float64, and its gradient against the difference of the distributions."""
    monkeypatch.setattr(distillation_module, "_CHUNK", 4)
    rng = np.random.default_rng(0)
    student, teacher, weights = rng.normal(size=(2, 7, 9)), rng.normal(size=(2, 7, 9)), rng.uniform(size=(2, 7))
    ids = np.broadcast_to(np.arange(9), teacher.shape) if top is None else np.argsort(-teacher, axis=-1)[..., :top]
    batch = {LOGITS: jnp.asarray(np.take_along_axis(teacher, ids, -1), jnp.float32)}
    batch |= {} if top is None else {IDS: jnp.asarray(ids)}

    class Network:
        def logits(self, hidden):
            return hidden

    loss = lambda x: distillation(Network(), x, batch, jnp.asarray(weights, jnp.float32), temperature)
    value, gradient = jax.jit(jax.value_and_grad(loss))(jnp.asarray(student, jnp.float32))
    softmax = lambda x: np.exp(x) / np.exp(x).sum(-1, keepdims=True)
    p, q = softmax(np.take_along_axis(teacher, ids, -1) / temperature), softmax(student / temperature)
    divergence = (p * (np.log(p) - np.log(np.take_along_axis(q, ids, -1)))).sum(-1)
    np.testing.assert_allclose(value, temperature**2 * (weights * divergence).sum(), rtol=1e-5)
    whole_p = np.zeros_like(q)
    np.put_along_axis(whole_p, ids, p, axis=-1)
    np.testing.assert_allclose(gradient, temperature * weights[..., None] * (q - whole_p), rtol=1e-4, atol=1e-6)
    assert distillation(Network(), jnp.ones((1, 2, 3)), {}, jnp.ones((1, 2))) == 0.0


def student_run(*bindings: str):
    files = ["models/t5_1_1/tiny.gin", "objectives/prefix_lm.gin", "runs/pretrain.gin", "recipes/distillation.gin"]
    common = ["TRAIN_STEPS = 1", "MODEL_DIR = 'student'", "MIXTURE_OR_TASK_NAME = 'sotu'", "TransformerConfig.vocab_size = 64"]
    return GinConfig(files, [*common, "Teacher.path = 'teacher'", *bindings]).run()


def save_teacher(model: str = "decoder", **settings) -> None:
    bindings = [f"TransformerConfig.{name} = {value!r}" for name, value in ({"vocab_size": 64} | settings).items()]
    t5x_lab.from_gin([f"models/{model}/tiny.gin"], bindings).save("teacher")


@pytest.mark.slow
def test_a_teacher_is_sharded_like_the_student():
    save_teacher(num_heads=8, dtype="float32")
    results = []
    for mesh in ("data=1", "data=2,tensor=4"):
        config = student_run(f"MESH = '{mesh}'")
        sharded = ShardedModel(config.model, config.mesh_shape, jax.devices()[: 1 if mesh == "data=1" else 8])
        batch = {name: np.concatenate([x, x]) for name, x in packed_batch().items()}
        if mesh != "data=1":
            results.append(np.asarray(load_teacher(config)(sharded.shard_batch(batch))[LOGITS]))
        else:
            teacher = t5x_lab.load("teacher")
            features = teacher_features(teacher.sharded.model.network(teacher.params), False, batch, None)
            results.append(np.asarray(features[LOGITS]))
    is_target = batch["decoder_target_tokens"] > 0
    np.testing.assert_allclose(results[1][is_target], results[0][is_target], rtol=1e-4, atol=1e-5)


def test_mistakes_with_teachers_are_sentences():
    save_teacher(vocab_size=128)
    with pytest.raises(UserError, match="has vocab_size 128 and the student 64. Distillation compares"):
        load_teacher(student_run())
    with pytest.raises(UserError, match="TEACHER is set, but ModelConfig.losses is empty"):
        student_run("ModelConfig.losses = {}", "ModelConfig.cross_entropy_weight = 1.0")


@pytest.mark.exhaustive
def test_a_student_learns_from_its_teacher_and_continues_to_the_last_bit():
    assert run(*flags("causal_decoder", FULL_LM, "teacher", 30, "--gin.EVALS=()")).returncode == 0
    numbers = lambda model_dir: [
        (line["step"], line["distillation"], line["loss"], line["grad_norm"])
        for line in read_metrics(model_dir)
        if line["split"] == "train"
    ]
    common = (*RECIPE, "--gin.EVALS=()", "--gin.SaveCheckpointConfig.period=4", "--gin.LearningRate.warmup_steps=10")
    for model_dir, steps in (("whole", 8), ("parts", 4), ("parts", 8)):
        done = run(*flags("encoder_decoder", PREFIX_LM_ED, model_dir, steps, *common))
        assert done.returncode == 0, done.stderr
    assert numbers("whole") == numbers("parts") and len(numbers("whole")) == 8
    assert numbers("whole")[-1][1] < numbers("whole")[0][1]
