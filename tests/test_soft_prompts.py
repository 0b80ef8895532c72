"""Soft prompts: embeddings of ids that no vocabulary has, before every input."""

import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import seqio
from helpers import random_batch, tiny_config
from runs_of_text import TINY

import t5x_lab
import t5x_lab.tasks
from t5x_lab.cli.main import main
from t5x_lab.config.errors import UserError
from t5x_lab.data.config import DataConfig
from t5x_lab.data.pipeline.batches import SeqioBatches, resolve_tasks
from t5x_lab.data.vocabularies.config import ByteVocabulary, SpecialTokens
from t5x_lab.models.config import ModelConfig
from t5x_lab.models.model import Model
from t5x_lab.networks.soft_prompt import FIRST_ID, SoftPrompt, soft_prompt_ids
from t5x_lab.optim.groups import flat_names
from t5x_lab.prompts.config import Records
from t5x_lab.prompts.prompts import Prompts

LENGTH = 3


@pytest.mark.parametrize("network", ["encoder_decoder", "causal_decoder", "prefix_decoder", "rotary", "unbalanced"])
def test_a_soft_prompt_is_so_many_rows_more_of_the_embedding(network):
    """Loss and gradient of the vectors are those of a larger table, whose last rows are the prompt."""
    config = tiny_config(network)
    model = Model(ModelConfig(config, {"prompt": SoftPrompt(LENGTH)}))
    larger = Model(ModelConfig(tiny_config(network, vocab_size=config.vocab_size + LENGTH)))
    params = model.init(jax.random.key(0))
    tables = [name for name in params if name.endswith("token_embedder")]  # two if the encoder has one of its own
    widths = [params[name]["embedding"].shape[1] for name in tables]
    assert model.num_parameters - Model(ModelConfig(config)).num_parameters == LENGTH * sum(widths)
    of_larger = jax.tree.map(lambda x: x, {k: v for k, v in params.items() if k not in tables})
    for name in tables:
        prompt = params[name]["prompt"]["embedding"]
        assert float(jnp.abs(prompt).max()) <= 0.5 < 100 * float(jnp.abs(prompt).std())
        of_larger[name] = {"embedding": jnp.concatenate([params[name]["embedding"], prompt])}
    logits_of = params.get("logits")
    if logits_of is not None:  # no token of the prompt is ever predicted
        kernel = logits_of["kernel"]
        of_larger["logits"] = {"kernel": jnp.pad(kernel, ((0, 0), (0, LENGTH)), constant_values=0)}

    batch = random_batch(network)
    side = "encoder_input_tokens" if config.has_encoder else "decoder_input_tokens"
    prompted_batch, larger_batch = ({**batch, side: batch[side].copy()} for _ in range(2))
    first = 0 if config.has_encoder else 1
    prompted_batch[side][:, first : first + LENGTH] = FIRST_ID + np.arange(LENGTH)
    larger_batch[side][:, first : first + LENGTH] = config.vocab_size + np.arange(LENGTH)
    result, expected = model.logits(params, prompted_batch), larger.logits(of_larger, larger_batch)[..., : config.vocab_size]
    np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-5)
    total = lambda model, batch: lambda params: jnp.square(model.logits(params, batch)[..., : config.vocab_size]).sum()
    gradients = jax.grad(total(model, prompted_batch))(params)
    of_tables = jax.grad(total(larger, larger_batch))(of_larger)
    for name in tables:
        gradient, of_table = gradients[name], of_tables[name]["embedding"]
        np.testing.assert_allclose(gradient["prompt"]["embedding"], of_table[config.vocab_size :], rtol=2e-4, atol=1e-5)
    name = next(name for name in ("encoder_token_embedder", "token_embedder") if name in tables)
    assert float(jnp.abs(gradients[name]["prompt"]["embedding"]).max()) > 0
    without = {**params, **{name: {"embedding": params[name]["embedding"]} for name in tables}}
    np.testing.assert_array_equal(model.logits(params, batch), Model(ModelConfig(config)).logits(without, batch))


@pytest.fixture
def tickets(tmp_path):
    """A task of the suite on twenty records."""
    for split in ("train", "validation"):
        records = [
            {"premise": f"This is premise {n}.", "hypothesis": f"It is {n}.", "label": n % 3, "idx": n} for n in range(20)
        ]
        (tmp_path / f"{split}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(tmp_path / "{split}.jsonl")


@pytest.mark.parametrize("architecture", ["encoder_decoder", "causal_decoder"])
@pytest.mark.parametrize("inputs", [128, 40])
def test_training_reads_the_prompt_before_each_of_packed_inputs(architecture, inputs, tickets):
    prompts = Prompts(data_sets={"super_glue/cb": Records(files=tickets)})
    lengths = {"inputs": inputs, "targets": 32}

    def examples(before):
        tokens = SpecialTokens(input_start=before)
        config = DataConfig("t5_super_glue_cb", lengths, 4, ByteVocabulary(), special_tokens=tokens, prompts=prompts, shards=1)
        batches = SeqioBatches(resolve_tasks(config, architecture, 384), config, seed=0)
        side = "encoder" if architecture == "encoder_decoder" else "decoder"
        name = "encoder_input_tokens" if side == "encoder" else "decoder_target_tokens"
        for _ in range(50):
            batch = next(batches)
            for row, segments in zip(batch[name], batch[f"{side}_segment_ids"], strict=True):
                for segment in range(1, segments.max() + 1):
                    yield row[segments == segment].tolist()

    before = soft_prompt_ids(LENGTH)
    results, vocabulary = {}, seqio.ByteVocabulary(100)
    for row in examples(before):
        assert tuple(row[:LENGTH]) == before and FIRST_ID not in row[LENGTH:]
        results[vocabulary.decode(row[LENGTH:])] = row
    assert len(results) == 20
    for row in results.values():
        ends = [n for n, token in enumerate(row) if token == 1]
        assert len(row[: ends[0] + 1]) <= inputs  # cut before the end token, the prompt among the inputs' length
    if inputs == 128:
        assert {tuple(row[LENGTH:]) for row in results.values()} == {tuple(row) for row in examples(())}


@pytest.fixture(scope="module", params=["models/t5_1_1/tiny.gin", "models/decoder/tiny.gin"])
def prompted(request):
    """A fresh model with a soft prompt of three vectors, of a size that matters."""
    run = t5x_lab.from_gin(
        [request.param, "peft/soft_prompt.gin"],
        ["VOCABULARY = @ByteVocabulary()", "TransformerConfig.vocab_size = 384", "SOFT_PROMPT_LENGTH = 3",
         "SpecialTokens.input_eos = True"],
        seed=4,
    )  # fmt: skip
    run.params["token_embedder"]["prompt"]["embedding"] *= 20
    return run


def test_what_is_cut_from_the_left_is_not_the_prompt(prompted):
    ids, before = [*range(10, 40), 1], list(soft_prompt_ids(3))
    first = 0 if prompted.has_encoder else 1  # the start token counts as read
    result = prompted.scores([[*before, *ids]], [[7, 1]], max_length=12 + first)
    room = 12 - 3 - (0 if prompted.has_encoder else 1)  # the last target is not read
    expected = prompted.scores([[*before, *ids[-room:]]], [[7, 1]])
    assert result.cut[0] == len(ids) - room
    np.testing.assert_array_equal(result.log_prob, expected.log_prob)
    text = "".join(map(chr, range(65, 65 + 26)))
    written = prompted.generate([text], max_tokens=4, max_length=12 + first)
    room -= 0 if prompted.has_encoder else 2
    assert written == prompted.generate([text[len(text) - room + 1 :]], max_tokens=4)


def test_lm_eval_scores_a_text_behind_the_prompt_in_every_window(prompted):
    from lm_eval.api.instance import Instance

    from t5x_lab.evaluation.harness.model import HarnessModel

    text, before = "abcdefghijklmnopqrstuvwx", list(soft_prompt_ids(3))
    model = HarnessModel(prompted, batch_size=4, max_length=14, max_gen_toks=4)
    request = Instance(request_type="loglikelihood_rolling", doc={}, arguments=(text,), idx=0)
    result = model.loglikelihood_rolling([request])[0]
    ids = [*prompted.vocabulary.encode(text), *([1] if prompted.has_encoder else [])]
    most = 14 - 3 - (0 if prompted.has_encoder else 1)
    windows = [(i, ids[i : i + most]) for i in range(0, len(ids), most)]
    blank = [1] if prompted.has_encoder else []
    # The last window is as long as the others, as lm-eval has it: its context is what it does not predict.
    contexts = [[*before, *(ids[i + len(window) - most - 1 : i] if i else blank)] for i, window in windows]
    expected = prompted.scores(contexts, [window for _, window in windows]).log_prob.sum()
    assert len(windows) > 1 and result == pytest.approx(float(expected), rel=1e-5)


def test_members_of_an_ensemble_read_each_their_own_prompt(prompted, tmp_path):
    prompted.save(str(tmp_path / "one"))
    embedding = prompted.params["token_embedder"]["prompt"]["embedding"]
    prompted.params["token_embedder"]["prompt"]["embedding"] = -embedding
    prompted.save(str(tmp_path / "other"))
    prompted.params["token_embedder"]["prompt"]["embedding"] = embedding
    both = [t5x_lab.load(str(tmp_path / name)) for name in ("one", "other")]
    ids = np.array([[0, *soft_prompt_ids(3), 20, 21, 22]])
    features = {"decoder_input_tokens": ids}
    if prompted.has_encoder:
        features = {"encoder_input_tokens": ids, "decoder_input_tokens": np.array([[0, 5, 6]])}
    members = [run.logits(**features) for run in both]
    assert not np.allclose(*members, atol=1e-2)
    together = t5x_lab.load([str(tmp_path / "one"), str(tmp_path / "other")])
    np.testing.assert_allclose(together.logits(**features), np.mean(members, 0), atol=1e-4)
    assert np.isfinite(together.score(["a text"], [" of two prompts"])).all()


@pytest.mark.parametrize("objective", ["prefix_lm", "span_corruption"])
def test_a_prompt_that_nothing_is_read_behind_is_refused(objective, tmp_path, capsys):
    command = [
        "train", "--gin_file=models/t5_1_1/tiny.gin", f"--gin_file=objectives/{objective}.gin",
        "--gin_file=peft/soft_prompt.gin", *TINY, f"--gin.MODEL_DIR={tmp_path}/run", "--gin.TRAIN_STEPS=1",
    ]  # fmt: skip
    assert main(command) == 2
    assert "so it would not be trained. Use tasks with inputs, and" in capsys.readouterr().err


def test_a_prompt_longer_than_inputs_is_said(tickets):
    prompts = Prompts(data_sets={"super_glue/cb": Records(files=tickets)})
    tokens = SpecialTokens(input_start=soft_prompt_ids(100))
    config = DataConfig(
        "t5_super_glue_cb", {"inputs": 64, "targets": 8}, 4, ByteVocabulary(), special_tokens=tokens, prompts=prompts
    )
    with pytest.raises(
        UserError, match='100 ids before the inputs of "t5_super_glue_cb", but TASK_FEATURE_LENGTHS has only 64 tokens for'
    ):
        resolve_tasks(config, "encoder_decoder", 384)


@pytest.mark.exhaustive
@pytest.mark.parametrize("model", ["models/t5_1_1/tiny.gin", "models/decoder/tiny.gin"])
def test_a_soft_prompt_is_trained_kept_and_asked_alone(model, tickets, tmp_path, capsys):
    """Nothing else moves; metrics, scores of a task and of texts agree; on top of its base it is the same model."""
    needed = [
        "train", f"--gin_file={model}", *TINY, "--gin.MIXTURE_OR_TASK_NAME=t5_super_glue_cb",
        '--gin.TASK_FEATURE_LENGTHS={"inputs": 64, "targets": 16}', '--gin.DATA_SETS={"super_glue/cb": @cb/Records()}',
        f"--gin.cb/Records.files={tickets}", "--gin.TRAIN_STEPS=2", "--gin.EVAL_PERIOD=2", "--gin.DataConfig.eval_steps=20",
    ]  # fmt: skip
    assert main([*needed, "--gin.MODEL_DIR=base"]) == 0
    more = [
        "--gin_file=runs/finetune.gin", "--gin_file=peft/soft_prompt.gin", "--gin.SOFT_PROMPT_LENGTH=5",
        "--gin.INITIAL_CHECKPOINT_PATH=base", "--gin.LearningRate.base_learning_rate=0.3",
    ]  # fmt: skip
    assert main([*needed, *more, "--gin.MODEL_DIR=tuned"]) == 0
    base, tuned = t5x_lab.load("base"), t5x_lab.load("tuned")
    before, after = flat_names(base.params), flat_names(tuned.params)
    assert after.keys() - before.keys() == {"token_embedder/prompt/embedding"}
    for name, x in before.items():
        np.testing.assert_array_equal(after[name], x)
    for shorter in ("--gin.SoftPrompt.length=3", "--gin.SOFT_PROMPT_LENGTH=3"):
        assert main([*needed, *more, shorter, "--gin.MODEL_DIR=new", "--gin.INITIAL_CHECKPOINT_PATH=tuned"]) == 2
    if model == "models/t5_1_1/tiny.gin":
        fresh = '--gin.RestoreCheckpointConfig.assignment_map=[("token_embedder/prompt/embedding", None)]'
        again = [*needed, *more, "--gin.SOFT_PROMPT_LENGTH=3", "--gin.MODEL_DIR=new", "--gin.INITIAL_CHECKPOINT_PATH=tuned"]
        assert main([*again, fresh]) == 0
    results = json.loads(pathlib.Path("tuned/evals/eval/2.json").read_text())["results"]["t5_super_glue_cb"]
    assert np.isfinite(results["loss"])
    texts = [f"cb hypothesis: It is {n}. premise: This is premise {n}." for n in range(20)]
    targets = [("entailment", "contradiction", "neutral")[n % 3] for n in range(20)]
    scores = tuned.score(texts, targets, eos=True)
    tokens = sum(len(target) + 1 for target in targets)
    assert -sum(scores) / tokens == pytest.approx(results["loss"], rel=1e-4)
    command = ["infer", "--model_dir=tuned", "--task=t5_super_glue_cb", "--mode=score", "--output=scored.jsonl"]
    assert main(command) == 0
    of_task = [json.loads(line)["score"] for line in pathlib.Path("scored.jsonl").read_text().splitlines()]
    np.testing.assert_allclose(of_task, scores, rtol=1e-4)
    assert not np.allclose(scores, base.score(texts, targets, eos=True), rtol=1e-3)
    tuned.save_adapter("alone")
    for directory in ("tuned", "alone"):
        np.testing.assert_array_equal(base.with_adapter(directory).score(texts, targets, eos=True), scores)
    report = json.loads(pathlib.Path("tuned/evals/infer/2.json").read_text())
    assert "t5_super_glue_cb" in report["results"]
