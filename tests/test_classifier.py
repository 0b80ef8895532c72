"""Classification heads (Radford et al. 2018, sections 3.2 and 3.3): losses, inputs, predictions, against NumPy and transformers."""

import dataclasses
import itertools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
import sklearn.metrics
from conftest import shared_data
from helpers import cases, exhaustive_except, random_params, tiny_config
from hypothesis import given
from hypothesis import strategies as st
from synthetic_records import Words

import t5x_lab
from t5x_lab.checkpoints.config import RestoreCheckpointConfig
from t5x_lab.checkpoints.formats.location import find
from t5x_lab.checkpoints.initial import load_params
from t5x_lab.cli.main import main
from t5x_lab.config.errors import UserError
from t5x_lab.data.pipeline.batches import SeqioBatches, resolve_tasks
from t5x_lab.evaluation.classification import compute_metrics
from t5x_lab.models.classifier import Classifier, make_model
from t5x_lab.models.config import ModelConfig
from t5x_lab.models.model import Model
from t5x_lab.networks.head import ClassificationHead
from t5x_lab.networks.peft import peft_names
from t5x_lab.optim.groups import flat_names
from t5x_lab.optim.schedules import WarmupLinear
from t5x_lab.prompts.classification.config import CLASSIFICATIONS, Classification, Texts
from t5x_lab.prompts.classification.sequences import Sequences, truncated_lengths
from t5x_lab.prompts.classification.task import count_training_records
from t5x_lab.runs.config.gin_config import GinConfig
from t5x_lab.runs.train.training_flops import training_flops
from t5x_lab.training.step import per_token

CLASSES = ("first", "second", "third")
DECODERS = ("causal_decoder", "prefix_decoder", "gpt1", "lstm")


def classifier(network: str, seed: int = 0, **head) -> tuple[Classifier, dict]:
    config = ModelConfig(tiny_config(network), head=ClassificationHead(CLASSES, **head), z_loss=0.0)
    model = make_model(config)
    return model, random_params(model, seed)


def batch_for(model: Classifier, rows: int = 3, length: int = 6, seed: int = 0) -> dict:
    k, draw = model.head.sequences, np.random.default_rng(seed)
    lengths = draw.integers(3, length + 1, (rows, k))
    ids = draw.integers(2, 60, (rows, k, length)) * (np.arange(length) < lengths[..., None])
    wanted = draw.dirichlet(np.ones(3), rows) if model.head.is_score else np.eye(3)[draw.integers(0, 3, rows)]
    return {
        "sequences": ids.astype(np.int32),
        "sequence_lengths": lengths.astype(np.int32),
        "class_probabilities": wanted.astype(np.float32),
    }


def log_softmax(x):
    x = np.asarray(x, np.float64)
    return x - np.log(np.exp(x - x.max(-1, keepdims=True)).sum(-1, keepdims=True)) - x.max(-1, keepdims=True)


def of_equations(model: Classifier, params: dict, batch: dict) -> dict[str, float]:
    """L2, L1 and L3 of equations 3 to 5, sequence by sequence, from a plain model's hidden states and logits."""
    head, plain = model.head, Model(dataclasses.replace(model.config, head=None, network=model.config.network.network))
    read = jax.jit(lambda params, features: (plain.network(params)(features), plain.logits(params, features)))
    base = {name: tree for name, tree in params.items() if name != "classifier"}
    kernel, bias = (np.asarray(params["classifier"][name], np.float64) for name in ("kernel", "bias"))
    class_losses, of_sequences, tokens, right = [], [], [], []
    for row, lengths, wanted in zip(*(batch[name] for name in batch), strict=True):
        states, losses = [], []
        for ids, length in zip(row, lengths, strict=True):
            features = {"decoder_input_tokens": ids[None, :length], "decoder_target_tokens": np.ones((1, length), np.int32)}
            if plain.config.network.architecture == "prefix_decoder":
                features["decoder_causal_attention"] = np.full((1, length), int(not head.lm_weight))
            hidden, logits = (np.asarray(x, np.float64)[0] for x in read(base, features))
            states.append(hidden[-1])
            log_probs = log_softmax(logits)
            losses.append([-log_probs[t, ids[t + 1]] for t in range(length - 1)])
        if head.combine == "choices":
            logits = np.array([state @ kernel[:, 0] + bias[0] for state in states])
        else:
            logits = sum(states) @ kernel + bias
        class_losses.append(-(wanted * log_softmax(logits)).sum())
        right.append(logits.argmax() == wanted.argmax())
        keep = [wanted.argmax()] if head.combine == "choices" and not head.lm_on_wrong else range(len(states))
        of_sequences += [np.mean(losses[k]) for k in keep]
        tokens += [loss for k in keep for loss in losses[k]]
    lm = np.mean(of_sequences if head.lm_mean_over == "sequences" else tokens) if head.lm_weight else 0.0
    return {
        "loss": np.mean(class_losses),
        "lm_loss": lm,
        "accuracy": np.mean(right),
        "objective": np.mean(class_losses) + head.lm_weight * lm,
    }


KINDS = [
    dict(combine=combine, lm_mean_over=over, lm_on_wrong=wrong, lm_weight=weight)
    for combine, over, wrong, weight in itertools.product(
        ("none", "sum", "choices"), ("sequences", "tokens"), (True, False), (0.5, 0.0)
    )
    if (wrong or combine == "choices") and (weight or (over, wrong) == ("sequences", True))
]


@pytest.mark.parametrize("network", exhaustive_except(DECODERS, ("causal_decoder", "prefix_decoder")))
def test_losses_are_those_of_the_papers_equations(network):
    for kind in KINDS if network == "gpt1" else KINDS[:: len(KINDS) - 1]:
        model, params = classifier(network, **kind)
        batch = batch_for(model)
        expected = of_equations(model, params, batch)
        weights, normalizer = model.weights_and_normalizer(batch)
        sums = jax.jit(model.loss)(params, batch, weights)
        results = {"objective": sums.objective / normalizer, **per_token(sums)}
        for name in ("objective", "loss", "accuracy", *(["lm_loss"] if kind["lm_weight"] else [])):
            assert float(results[name]) == pytest.approx(expected[name], rel=2e-5), (kind, name)
        assert ("lm_loss" in results) == bool(kind["lm_weight"])


def test_a_batch_in_parts_has_the_same_loss_and_rows_of_padding_none():
    model, params = classifier("gpt1", combine="choices", lm_on_wrong=False)
    batch = batch_for(model, rows=6)
    batch["class_probabilities"][4:] = 0.0
    weights, normalizer = model.weights_and_normalizer(batch)
    parts = [model.loss(params, {n: x[i : i + 2] for n, x in batch.items()}, weights[i : i + 2]) for i in (0, 2, 4)]
    whole = model.loss(params, {name: x[:4] for name, x in batch.items()})
    assert float(normalizer) == 4.0
    assert float(sum(part.objective for part in parts)) == pytest.approx(float(whole.objective), rel=1e-5)
    assert [float(part.weights) for part in parts] == [2.0, 2.0, 0.0] and float(parts[2].objective) == 0.0


def test_labels_are_names_or_numbers_of_the_classes():
    """Also where classes are called by numbers, or in another order than the catalogue's."""
    classification = lambda classes, **more: Classification("x", ("a",), classes, **more)
    number = lambda classification, value: int(np.argmax(classification.probabilities({"label": value})))
    stars = classification(tuple("12345"))
    assert [number(stars, value) for value in (1, 5, "3", 2.0)] == [0, 4, 2, 1]
    assert [number(classification(("no", "yes")), value) for value in (0, 1, "yes", 1.0)] == [0, 1, 1, 1]
    assert [number(classification(("a", "b"), labels=("x", "y")), value) for value in "yx"] == [1, 0]
    assert classification(("a", "b"), left_out=(-1, "-")).probabilities({"label": "-"}) is None
    for value in (True, 2, -1, 0.5, "c", float("nan"), float("inf")):
        with pytest.raises(UserError, match="the label is"):
            classification(("a", "b")).probabilities({"label": value})


def test_a_score_between_two_classes_has_a_share_of_both():
    classification = Classification("x", ("a", "b"), tuple("012345"), is_score=True, metrics=("pearson",))
    for value, expected in {0: [1, 0], 5.0: [0] * 5 + [1], 3.25: [0, 0, 0, 0.75, 0.25], "4.5": [0] * 4 + [0.5, 0.5]}.items():
        probabilities = classification.probabilities({"label": value})
        assert probabilities == pytest.approx([*expected, *[0] * (6 - len(expected))])
        assert np.dot(probabilities, range(6)) == pytest.approx(float(value))
    model, params = classifier("gpt1", is_score=True, combine="sum")
    batch = batch_for(model)
    assert float(model.loss(params, batch).loss) == pytest.approx(3 * of_equations(model, params, batch)["loss"], rel=1e-5)


@pytest.mark.parametrize("network", [*DECODERS, "encoder_decoder", "encoder"])
def test_orders_padding_and_other_choices_change_nothing(network):
    kinds = dict(lm_weight=0.0) if network in ("encoder_decoder", "encoder") else {}
    model, params = classifier(network, combine="sum", **kinds)
    batch = batch_for(model)
    class_logits, loss = jax.jit(model.class_logits), jax.jit(model.loss)
    logits = class_logits(params, batch)
    turned = {**batch, "sequences": batch["sequences"][:, ::-1], "sequence_lengths": batch["sequence_lengths"][:, ::-1]}
    np.testing.assert_allclose(class_logits(params, turned), logits, atol=1e-5)
    is_padding = np.arange(6) >= batch["sequence_lengths"][..., None]
    other = {**batch, "sequences": np.where(is_padding, 7, batch["sequences"])}
    np.testing.assert_array_equal(class_logits(params, other), logits)
    longer = {**batch, "sequences": np.pad(batch["sequences"], [(0, 0), (0, 0), (0, 5)])}
    np.testing.assert_allclose(class_logits(params, longer), logits, atol=1e-5)
    if network not in ("encoder_decoder", "encoder"):
        np.testing.assert_array_equal(loss(params, other).objective, loss(params, batch).objective)

    model, params = classifier(network, combine="choices", **kinds)
    batch, class_logits = batch_for(model), jax.jit(model.class_logits)
    logits = class_logits(params, batch)
    changed = batch["sequences"].copy()
    changed[:, 1, 1:3] += 1
    result = class_logits(params, {**batch, "sequences": changed})
    np.testing.assert_array_equal(np.delete(result, 1, 1), np.delete(logits, 1, 1))
    assert (np.abs(result - logits)[:, 1] > 1e-6).all()
    same = {**batch, "sequences": np.repeat(batch["sequences"][:, :1], 3, 1)}
    same["sequence_lengths"] = np.repeat(batch["sequence_lengths"][:, :1], 3, 1)
    result = np.asarray(class_logits(params, same))
    np.testing.assert_allclose(result, np.repeat(result[:, :1], 3, 1), atol=1e-6)


def test_dropout_has_one_mask_for_all_sequences_of_an_example():
    model, params = classifier("gpt1", combine="choices", dropout_rate=0.5)
    batch = batch_for(model)
    batch["sequences"], batch["sequence_lengths"] = batch["sequences"][:, [0, 0, 0]], batch["sequence_lengths"][:, [0, 0, 0]]
    result = np.asarray(model.class_logits(params, batch, jax.random.key(1)))
    np.testing.assert_allclose(result, np.repeat(result[:, :1], 3, 1), atol=1e-6)
    assert np.abs(result[:, 0] - np.asarray(model.class_logits(params, batch))[:, 0]).min() > 1e-6


@cases(200)
@given(
    sizes=st.lists(st.lists(st.integers(1, 40), min_size=1, max_size=3), min_size=1, max_size=3),
    more=st.integers(0, 60),
    symmetric=st.booleans(),
)
def test_segments_are_cut_and_the_extract_token_never(sizes, more, symmetric):
    """Whatever the length: start first, extract last, every text begins as it is and has a token, nothing is cut needlessly."""
    parts = sum(map(len, sizes))
    length = parts + len(sizes) + 1 + more
    counter = itertools.count(10)
    texts = Texts(tuple(tuple(" ".join(str(next(counter)) for _ in range(n)) for n in segment) for segment in sizes))
    make = Sequences(lambda text: list(map(int, text.split())), (1, 2, 3), length, symmetric and len(sizes) == 2)
    result = make(texts)
    assert len(result) == 1 + (symmetric and len(sizes) == 2)
    whole = sum(map(sum, sizes)) + len(sizes) + 1
    for number, ids in enumerate(result):
        assert ids[0] == 1 and ids[-1] == 3 and ids.count(2) == len(sizes) - 1 and ids.count(3) == ids.count(1) == 1
        assert len(ids) == min(length, whole)
        segments = [list(group) for is_text, group in itertools.groupby(ids, lambda i: i >= 10) if is_text]
        for segment, expected in zip(segments, texts.segments[::-1] if number else texts.segments, strict=True):
            remaining = [[i for i in segment if i in set(map(int, text.split()))] for text in expected]
            assert [i for part in remaining for i in part] == segment
            assert all(
                part and part == list(map(int, text.split()))[: len(part)]
                for part, text in zip(remaining, expected, strict=True)
            )
    with pytest.raises(UserError, match="has no room for one token of each of"):
        dataclasses.replace(make, length=parts + len(sizes))(texts)


def test_the_longest_are_cut_first():
    assert truncated_lengths([100, 3, 50], 60) == [29, 3, 28] or truncated_lengths([100, 3, 50], 60) == [28, 3, 29]
    assert truncated_lengths([100, 3, 50], 153) == [100, 3, 50] and truncated_lengths([1, 1], 2) == [1, 1]
    context_and_ending = truncated_lengths([600, 300], 512 - 3)  # as their code has them: each at most half
    assert sorted(context_and_ending) == [254, 255]


@pytest.mark.parametrize("double", (True, False))
def test_class_logits_are_those_of_transformers(double, tmp_path):
    import torch
    import transformers

    sizes = dict(vocab_size=99, n_embd=32, n_head=4, n_layer=3, n_positions=48, pad_token_id=0, initializer_range=0.3)
    config = transformers.OpenAIGPTConfig(**sizes, num_labels=3, summary_type="cls_index", summary_proj_to_labels=True)
    torch.manual_seed(0)
    if double:
        config.num_labels = 1
        hf_model = transformers.OpenAIGPTDoubleHeadsModel(config).eval()
        linear = hf_model.multiple_choice_head.summary
    else:
        hf_model = transformers.OpenAIGPTForSequenceClassification(config).eval()
        linear = hf_model.score
    hf_model.transformer.save_pretrained(tmp_path / "body")
    language_model = transformers.OpenAIGPTLMHeadModel(config).eval()
    language_model.transformer.load_state_dict(hf_model.transformer.state_dict())
    language_model.save_pretrained(tmp_path / "hf")
    base = t5x_lab.load(str(tmp_path / "hf"), dtype="float32")
    head = ClassificationHead(CLASSES, combine="choices" if double else "none")
    model = make_model(ModelConfig(base.network, head=head, z_loss=0.0))
    params = {**base.params, "classifier": {"kernel": jnp.asarray(linear.weight.detach().numpy().T)}}
    params["classifier"]["bias"] = jnp.zeros(head.outputs) if linear.bias is None else jnp.asarray(linear.bias.detach().numpy())
    batch = batch_for(model, rows=5, length=20)
    ids, lengths = (torch.tensor(batch[name], dtype=torch.long) for name in ("sequences", "sequence_lengths"))
    with torch.no_grad():
        if double:
            outputs = hf_model(ids, mc_token_ids=lengths - 1)
            result = outputs.mc_logits
        else:
            result = hf_model(ids[:, 0]).logits  # of the last token that is no padding
        hidden = hf_model.transformer(ids[:, 0]).last_hidden_state
    np.testing.assert_allclose(model.class_logits(params, batch), result, atol=2e-5)
    if double:
        read = {"decoder_input_tokens": np.asarray(ids[:, 0]), "decoder_target_tokens": np.ones((5, 20), np.int32)}
        np.testing.assert_allclose(base._model.network(base.params)(read), hidden, atol=5e-5)
        np.testing.assert_allclose(base._model.logits(base.params, read), outputs.logits[:, 0], atol=1e-4)


TWELVE = ["models/gpt1/tiny.gin"]
SMALL = ["VOCABULARY = @ByteVocabulary()", "TransformerConfig.num_decoder_layers = 12", 'TransformerConfig.dtype = "float32"']


@pytest.mark.parametrize("n, expected", {-1: 0, 0: 2, 1: 14, 6: 74, 12: 146}.items())
def test_a_number_of_layers_is_transferred_by_the_rules_that_exist(n, expected, tmp_path):
    """OpenAI's checkpoint has 146 tensors, each layer's counted apart and queries, keys and values as one; the three new
    tokens' rows and the head stay fresh."""
    old = [*SMALL, "TransformerConfig.vocab_size = 384"]
    source = t5x_lab.from_gin(TWELVE, old, seed=1)
    source.save(str(tmp_path / "old"))
    new = GinConfig(TWELVE, [*SMALL, "TransformerConfig.vocab_size = 387", "HEAD = @ClassificationHead()",
                             'ClassificationHead.classes = ("a", "b")']).model()  # fmt: skip
    model = make_model(new)
    fresh = model.init(jax.random.key(7))
    layers = {"decoder": max(n, 0)}
    rules = (("(token_embedder|position_embedder|.*embed).*", None),) if n < 0 else ()
    config = RestoreCheckpointConfig(layers=layers, extend=("vocab",), assignment_map=rules)
    abstract = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=jax.sharding.SingleDeviceSharding(jax.devices()[0])), fresh
    )
    added = peft_names(model.abstract_params, new.network)
    location = find(str(tmp_path / "old"))
    params = load_params(location, abstract, model.axes, config, fresh=lambda: jax.tree.map(jnp.copy, fresh), fresh_names=added)
    changed = 0.0
    for name, x in flat_names(params).items():
        old_x, fresh_x = flat_names(source.params).get(name), flat_names(fresh)[name]
        share = 3 if any(f"/{part}/" in name for part in ("query", "key", "value")) else 1
        for i in range(12) if "/layers/" in name else [slice(None)]:
            is_old = old_x is not None and np.array_equal(x[i][: len(old_x[i])], old_x[i])
            is_fresh = np.array_equal(x[i], fresh_x[i])
            if name.endswith(("bias", "scale")) and is_old and is_fresh:  # 0 and 1 in both
                is_old = "/layers/" in name and i < n
            changed += is_old / share
            assert is_old or is_fresh
    assert round(changed, 6) == expected
    embedding = np.asarray(params["token_embedder"]["embedding"])
    np.testing.assert_array_equal(embedding[384:], np.asarray(fresh["token_embedder"]["embedding"])[384:])


def test_the_schedule_is_that_of_their_code():
    """x / w below w, else 1, times 1 - x (facts of opt.py)."""
    rate = WarmupLinear(peak=2.0, total_steps=10_000)
    for x, expected in {0.0: 0.0, 0.001: 0.999, 0.002: 0.998 * 2, 0.5: 1.0, 1.0: 0.0, 1.5: 0.0}.items():
        assert float(rate(jnp.int32(round(x * 10_000)))) == pytest.approx(expected, abs=1e-6)
    for total in (1, 100, 530):  # warm-ups of less than a step, and of about one
        rates = [float(WarmupLinear(1.0, total)(jnp.int32(step))) for step in range(total + 1)]
        assert rates[0] == 0.0 and rates[-1] == 0.0 and (total < 530 or 0.9 < rates[1] < 1.0)


def test_metrics_are_those_of_scikit_learn_and_scipy():
    draw = np.random.default_rng(0)
    logits, labels = draw.normal(size=(50, 2)), draw.integers(0, 2, 50)
    result = compute_metrics(logits, np.eye(2)[labels], ("accuracy", "f1", "matthews"))
    predictions = logits.argmax(-1)
    assert result["accuracy"] == pytest.approx(sklearn.metrics.accuracy_score(labels, predictions))
    assert result["f1"] == pytest.approx(sklearn.metrics.f1_score(labels, predictions))
    assert result["matthews"] == pytest.approx(sklearn.metrics.matthews_corrcoef(labels, predictions))
    assert result["loss"] == pytest.approx(sklearn.metrics.log_loss(labels, np.exp(log_softmax(logits))))
    logits, scores = draw.normal(size=(50, 6)), draw.uniform(0, 5, 50)
    stsb = CLASSIFICATIONS["glue/stsb"]
    wanted = np.array([stsb.probabilities({"label": score}) for score in scores])
    result = compute_metrics(logits, wanted, ("pearson", "spearman"))
    predicted = np.exp(log_softmax(logits)) @ np.arange(6)
    assert result["pearson"] == pytest.approx(scipy.stats.pearsonr(scores, predicted)[0])
    assert result["spearman"] == pytest.approx(scipy.stats.spearmanr(scores, predicted)[0])


def record_of(classification: Classification, generator: Words, number: int) -> dict:
    """One with all that it reads."""
    names = [name for segment in classification.segments for name in ((segment,) if isinstance(segment, str) else segment)]
    record = {name: generator.sentence() for name in names}
    record |= (
        {classification.choices[0]: [generator.sentence() for _ in classification.classes]}
        if len(classification.choices) == 1
        else {}
    )
    record |= {name: generator.sentence() for name in classification.choices} if len(classification.choices) > 1 else {}
    label = (
        round(5 * number / 3, 2)
        if classification.is_score
        else (classification.labels or range(len(classification.classes)))[number % len(classification.classes)]
    )
    return {**record, classification.label: label}


@pytest.mark.parametrize("name", CLASSIFICATIONS)
def test_every_data_set_is_read_as_the_paper_has_it(name, tmp_path):
    """The batch that a model is given, against sequences put together here from the record's fields."""
    classification, generator = CLASSIFICATIONS[name], Words(name, 0)
    records = [record_of(classification, generator, number) for number in range(4)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    task = f"classify_{name.replace('/', '_')}"
    more = [
        *SMALL, "TransformerConfig.vocab_size = 387", f'MIXTURE_OR_TASK_NAME = "{task}"', "MODEL_DIR = 'x'",
        "BATCH_SIZE = 4", "DATA_SHARDS = 1", "TRAIN_STEPS = 1", "EVAL_PERIOD = 1", "DataConfig.shuffle = False",
        f'DATA_SETS = {{"{name}": @Records()}}', f'Records.files = {{"train": "{tmp_path}/train.jsonl"}}',
        "Prompts.clean = None", 'TASK_FEATURE_LENGTHS = {"inputs": 900}',
    ]  # fmt: skip
    run = GinConfig([*TWELVE, "recipes/gpt1_finetuning.gin"], more).run()
    assert run.model.head.classes == classification.classes
    batches = SeqioBatches(resolve_tasks(run.data, "causal_decoder", 387), run.data, seed=0)
    batch = next(batches)
    encode = lambda text: [byte + 3 for byte in text.encode()]
    for row, lengths, wanted in zip(
        *(batch[key] for key in ("sequences", "sequence_lengths", "class_probabilities")), strict=True
    ):
        results = [ids[:length].tolist() for ids, length in zip(row, lengths, strict=True)]
        possible = []
        for record in records:
            segments = [
                encode(" ".join(record[field] for field in ((segment,) if isinstance(segment, str) else segment)))
                for segment in classification.segments
            ]
            choices = (
                record[classification.choices[0]]
                if len(classification.choices) == 1
                else [record[field] for field in classification.choices]
            )
            rows = [[*segments, encode(choice)] for choice in choices] or [
                segments,
                *([segments[::-1]] * classification.symmetric),
            ]
            joined = [[359, *sum(([360, *s] for s in parts), [])[1:], 361] for parts in rows]
            possible.append((joined, classification.probabilities(record)))
        match = next(label for joined, label in possible if joined == results)
        np.testing.assert_allclose(wanted, match, atol=1e-6)


def run_of(tmp_path, records: dict[str, list[dict]], classification: str, *more: str) -> list[str]:
    """Arguments of a training on records of one's own."""
    for split, lines in records.items():
        (tmp_path / f"{split}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "mine.gin").write_text(
        f"""
include "models/gpt1/tiny.gin"
include "recipes/gpt1_finetuning.gin"
VOCABULARY = @ByteVocabulary()
TransformerConfig.vocab_size = 387
TransformerConfig.dtype = "float32"
TransformerConfig.emb_dim = 32
TransformerConfig.head_dim = 8
MIXTURE_OR_TASK_NAME = "classify_mine"
CLASSIFICATIONS = {{"mine": @Classification()}}
Classification.data_set = "mine"
{classification}
DATA_SETS = {{"mine": @Records()}}
Records.files = "{tmp_path}/{{split}}.jsonl"
TASK_FEATURE_LENGTHS = {{"inputs": 48}}
DATA_SHARDS = 1
BATCH_SIZE = 8
WarmupLinear.peak = 0.01
AdamW.b2 = 0.98
DROPOUT_RATE = 0.0
"""
    )
    return ["train", f"--gin_file={tmp_path}/mine.gin", f"--gin.MODEL_DIR={tmp_path}/run", *more]


SENTENCES = 'Classification.segments = ("text",)\nClassification.classes = ("bad", "good")'


def sentences(count: int, seed: int) -> list[dict]:
    draw = np.random.default_rng(seed)
    labels = draw.integers(0, 2, count)
    return [
        {"text": f"{'xyz'[i % 3]} {'great' if y else 'awful'} {i}", "label": ("bad", "good")[y]} for i, y in enumerate(labels)
    ]


def test_ones_own_data_are_learned_evaluated_and_classified(tmp_path, capsys):
    """Through the commands: epochs, the best checkpoint, eval, infer of files and tasks, run.classify."""
    records = {"train": sentences(192, 0), "validation": sentences(30, 1), "test": [{"text": "y great 7", "label": -1}]}
    assert main(run_of(tmp_path, records, SENTENCES)) == 0
    lines = list(map(json.loads, (tmp_path / "run/metrics.jsonl").read_text().splitlines()))
    steps = [line["step"] for line in lines if line["split"] == "classify/classify_mine"]
    assert steps == [24, 48, 72]  # three epochs of 192 records, eight at a time
    first = next(line for line in lines if line["split"] == "train")
    assert {"loss", "lm_loss", "accuracy"} <= set(first) and first["loss"] == pytest.approx(np.log(2), abs=0.3)
    accuracies = {line["step"]: line["accuracy"] for line in lines if line["split"] == "classify/classify_mine"}
    best = max(accuracies, key=lambda step: (accuracies[step], -step))
    saved_steps = {int(path.name) for path in (tmp_path / "run/checkpoints").iterdir() if path.name.isdigit()}
    assert (
        72 in saved_steps
        and len(saved_steps) <= 2
        and accuracies[max(saved_steps, key=accuracies.__getitem__)] == accuracies[best] == 1.0
    )

    (tmp_path / "train.jsonl").unlink()  # what was counted is known
    assert main(["eval", f"--model_dir={tmp_path}/run"]) == 0
    run = t5x_lab.load(str(tmp_path / "run"))
    answers = run.classify(["x great 1", ("z awful 3",), {"text": "y awful 3"}])
    assert [answer.label for answer in answers] == ["good", "bad", "bad"]
    assert all(sum(answer.probabilities.values()) == pytest.approx(1.0, abs=1e-5) for answer in answers)
    (tmp_path / "in.txt").write_text("x great 1\nz awful 3\n")
    infer = ["infer", f"--model_dir={tmp_path}/run", "--mode=classify"]
    assert main([*infer, f"--input={tmp_path}/in.txt", f"--output={tmp_path}/out.jsonl"]) == 0
    written = list(map(json.loads, (tmp_path / "out.jsonl").read_text().splitlines()))
    assert [line["prediction"] for line in written] == ["good", "bad"]
    assert written[0]["probabilities"]["good"] == pytest.approx(answers[0].probabilities["good"], abs=1e-5)
    assert main([*infer, "--task=classify_mine", "--split=test", f"--output={tmp_path}/of_task.jsonl"]) == 0
    others = ["--task=classify_other", "--gin.CLASSIFICATIONS={'mine': @Classification(), 'other': @other/Classification()}",
              "--gin.other/Classification.data_set=mine", "--gin.other/Classification.segments=('text',)",
              "--gin.other/Classification.classes=('a', 'bad', 'good')"]  # fmt: skip
    assert main([*infer, *others, "--split=test", f"--output={tmp_path}/other.jsonl"]) == 2
    assert main([infer[0], infer[1], "--task=classify_mine", f"--output={tmp_path}/predicted.jsonl"]) == 2
    assert main(["eval", f"--model_dir={tmp_path}/run", "--gin.MIXTURE_OR_TASK_NAME=classify_other", *others[1:]]) == 2
    stderr = capsys.readouterr().err
    assert (
        stderr.count('The task "classify_other" has the classes a, bad, good (none), but the model\'s head has bad, good') == 2
    )
    assert "is a classification task. Use --mode=classify" in stderr and "Traceback" not in stderr
    for wrong in ({"inputs": 3}, {"inputs": None}, {"inputs": ["a", 3]}, {"text": 1}):
        (tmp_path / "wrong.jsonl").write_text(json.dumps(wrong) + "\n")
        assert main([*infer, f"--input={tmp_path}/wrong.jsonl", f"--output={tmp_path}/wrong_out.jsonl"]) == 2
    (line,) = map(json.loads, (tmp_path / "of_task.jsonl").read_text().splitlines())
    assert (line["inputs"], line["label"], line["prediction"]) == (["y great 7"], None, "good")
    assert run.generate(["x "], max_tokens=3)  # what it was before it has a head


BAD = {
    "a label outside of the classes": (
        SENTENCES, [{"text": "a", "label": 2}], "the label is 2; it must be 0 to 1, or one of bad, good. The record of mine"),
    "a label that is secret": (SENTENCES, [{"text": "a", "label": -1}], "the label is -1 (a hidden label); it must be 0 to 1"),
    "no label": (SENTENCES, [{"text": "a"}], 'it has no field "label"; it has text'),
    "a field that is missing": (SENTENCES, [{"word": "a", "label": 0}], 'the field "text" is missing; it must be a text'),
    "a text that is empty once it is cleaned": (
        SENTENCES, [{"text": " \n ", "label": 0}], "is empty; remove the record"),
    "choices of another number": (
        'Classification.segments = ("text",)\nClassification.classes = ("a", "b")\nClassification.choices = ("ends",)',
        [{"text": "a", "ends": ["x", "y"], "label": 0}, {"text": "a", "ends": ["x", "y", "z"], "label": 1}],
        'the field "ends" has 3 choices; every record must have 2'),
    "a label that is no number": (SENTENCES, [{"text": "a", "label": float("nan")}], "the label is nan; it must be 0 to 1"),
    "a score outside of its range": (
        'Classification.segments = ("text", "text")\nClassification.classes = ("0", "1")\nClassification.is_score = True',
        [{"text": "a", "label": 1.5}], "the label is 1.5; it must be a number from 0 to 1"),
}  # fmt: skip


@pytest.mark.parametrize("case", exhaustive_except(BAD, [*BAD][::3]))
def test_bad_records_are_said_in_sentences(case, tmp_path, capsys):
    classification, records, sentence = BAD[case]
    train = run_of(tmp_path, {"train": records * 8, "validation": records}, classification)
    assert main(train) == 2
    error = capsys.readouterr().err
    assert sentence in error and "Traceback" not in error


MISTAKES = {
    "no room for new tokens": (
        ["TransformerConfig.vocab_size=361"],
        "uses the special ids 359, 360, 361, but the model has 361 ids",
    ),
    "an unknown task": (["MIXTURE_OR_TASK_NAME=classify_glue_colla"], 'Did you mean "classify_glue_cola"'),
    "a task without classes": (["MIXTURE_OR_TASK_NAME=sotu_full_lm"], "which is not a classification task"),
    "a length that is too short": (
        ['TASK_FEATURE_LENGTHS={"inputs": 2}'],
        "which has no room for one token of each of 1 texts",
    ),
    "two classes of one name": (['Classification.classes=("a", "a")'], "give at least two names, all different"),
    "a metric that is none": (['Classification.metrics=("acuracy",)'], "accuracy"),
    "lm_weight below 0": (["task_head.lm_weight=-1.0"], "must be at least 0"),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_mistakes_are_said_before_training(case, tmp_path, capsys):
    bindings, sentence = MISTAKES[case]
    more = [f"--gin.{binding}" for binding in bindings]
    assert main(run_of(tmp_path, {"train": sentences(8, 0), "validation": sentences(8, 0)}, SENTENCES, *more)) == 2
    error = capsys.readouterr().err
    assert sentence in error and "Traceback" not in error


def test_an_encoder_decoder_with_a_language_models_loss_is_refused():
    with pytest.raises(UserError, match='lm_weight is 0.5, but architecture "encoder_decoder" has no language-modeling loss'):
        classifier("encoder_decoder")


def first_batch(tmp_path, task: str, records: list[dict], *more: str) -> dict:
    (tmp_path / "records.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    lines = [
        *SMALL, "TransformerConfig.vocab_size = 387", f'MIXTURE_OR_TASK_NAME = "{task}"', "MODEL_DIR = 'x'", "DATA_SHARDS = 1",
        "RECORDS = @Records()", f'Records.files = {{"train": "{tmp_path}/records.jsonl"}}', "BATCH_SIZE = 4",
        "Prompts.clean = None", 'TASK_FEATURE_LENGTHS = {"inputs": 64}', *more,
    ]  # fmt: skip
    run = GinConfig([*TWELVE, "recipes/gpt1_finetuning.gin"], lines).run()
    assert run.train_steps == run.eval_period * 3
    return next(SeqioBatches(resolve_tasks(run.data, "causal_decoder", 387), run.data, seed=0))


def test_labels_names_and_what_has_none_as_files_have_them(tmp_path):
    """Classes in another order than the catalogue's; SNLI's own field names, and its records without a gold label."""
    records = [{"sentence1": "a", "sentence2": "b", "label": name} for name in ("entailment", "not_entailment")] * 4
    own = ['CLASSIFICATIONS = {"mine": @Classification()}', 'Classification.data_set = "glue/rte"',
           'Classification.segments = ("sentence1", "sentence2")', 'Classification.classes = ["not_entailment", "entailment"]']  # fmt: skip
    batch = first_batch(tmp_path, "classify_mine", records[:1] * 8, *own)
    assert (batch["class_probabilities"] == [0, 1]).all()
    (tmp_path / "snli").mkdir()
    records = [{"sentence1": "a", "sentence2": "b", "gold_label": name} for name in ("contradiction", "-")] * 8
    names = 'Records.names = {"label": "gold_label", "premise": "sentence1", "hypothesis": "sentence2"}'
    batch = first_batch(tmp_path / "snli", "classify_snli", records, names)
    assert (batch["class_probabilities"] == [0, 0, 1]).all()


def test_epochs_are_counted_in_records_that_are_read(tmp_path):
    """A line stands for several records with Records.each. A configured number takes precedence."""
    records = [{"sentence": "a", "label": 0}] * 8
    first_batch(tmp_path, "classify_glue_cola", records)
    files = {"RECORDS": "@Records()", "Records.files": f'{{"train": "{tmp_path}/records.jsonl"}}'}
    prompts = lambda *more: GinConfig([], [*(f"{k} = {v}" for k, v in files.items()), *more]).prompts()
    cola = CLASSIFICATIONS["glue/cola"]
    assert (
        count_training_records(cola, prompts()) == 8 and count_training_records(cola, prompts("Records.num_examples = 5")) == 5
    )
    several = dataclasses.replace(prompts(), records=dataclasses.replace(prompts().records, each=lambda record: [record] * 3))
    assert count_training_records(cola, several) == 24
    cloze = GinConfig([], ["RECORDS = @Records()", 'Records.files = {"validation": "v.jsonl", "test": "t.jsonl"}']).prompts()
    with pytest.raises(
        UserError, match="have no training split. They have validation, test. Choose the training records: Records.splits ="
    ):
        count_training_records(CLASSIFICATIONS["story_cloze/2016"], cloze)


def test_lora_and_a_head_learn_together(tmp_path):
    """The checkpoint's vocabulary has no room for the new tokens. All other parameters stay."""
    base = t5x_lab.from_gin(TWELVE, ["VOCABULARY = @ByteVocabulary()", "TransformerConfig.vocab_size = 359",
                                     "TransformerConfig.emb_dim = 32", "TransformerConfig.head_dim = 8"])  # fmt: skip
    base.save(str(tmp_path / "base"))
    train = run_of(tmp_path, {"train": sentences(16, 0), "validation": sentences(8, 1)}, SENTENCES)
    more = ["--gin_file=peft/lora.gin", f"--gin.INITIAL_CHECKPOINT_PATH={tmp_path}/base", "--gin.EPOCHS=2"]
    assert main([*train, *more]) == 0
    before, run = flat_names(base.params), t5x_lab.load(str(tmp_path / "run"))
    for name, x in flat_names(run.params).items():
        if "/lora/" in name or name.startswith("classifier/"):
            assert np.abs(np.asarray(x)).max() > 0
        else:
            whole = slice(None, len(before[name]))
            np.testing.assert_array_equal(np.asarray(x)[whole], before[name])
    run.save_adapter(str(tmp_path / "alone"))
    with pytest.raises(UserError, match=r"belongs to a base model with .* This model (has shape|does not have it)"):
        base.with_adapter(str(tmp_path / "alone"))  # its vocabulary is smaller
    assert main(["convert", f"--source={tmp_path}/run", f"--output={tmp_path}/hf", "--to=hf"]) == 2


@pytest.mark.parametrize("name", ("glue/cola", "glue/stsb", "super_glue/copa", "snli"))
def test_real_records_are_read(name, tmp_path):
    files = {
        "glue/cola": ("cola", "dev.tsv", 'Records.columns = ("source", "label", "mark", "sentence")'),
        "glue/stsb": ("stsb", "sts-dev.csv", None),
        "super_glue/copa": ("superglue", "COPA/val.jsonl", ""),
        "snli": ("becel", "snli/validation.tsv.gz", ""),
    }
    folder, file, columns = files[name]
    path = shared_data("eval", folder) / file
    if columns is None:
        columns = 'Records.columns = ("genre", "file", "year", "number", "label", "sentence1", "sentence2")'
        (tmp_path / "stsb.tsv").write_text(path.read_text())  # its columns are parted by tabs
        path = tmp_path / "stsb.tsv"
    more = [
        *SMALL, "TransformerConfig.vocab_size = 387", f'MIXTURE_OR_TASK_NAME = "classify_{name.replace("/", "_")}"',
        "MODEL_DIR = 'x'", "DATA_SHARDS = 1", f'DATA_SETS = {{"{name}": @Records()}}', columns,
        f'Records.files = {{"train": "{path}"}}', "TRAIN_STEPS = 1", "EVAL_PERIOD = 1",
    ]  # fmt: skip
    run = GinConfig([*TWELVE, "recipes/gpt1_finetuning.gin"], more).run()
    batch = next(SeqioBatches(resolve_tasks(run.data, "causal_decoder", 387), run.data, seed=0))
    assert batch["sequences"].shape == (32, run.model.head.sequences, 512)
    np.testing.assert_allclose(batch["class_probabilities"].sum(-1), 1.0, atol=1e-6)
    ends = np.take_along_axis(batch["sequences"], batch["sequence_lengths"][..., None] - 1, -1)
    assert (ends == 361).all() and (batch["sequences"][..., 0] == 359).all()


def test_flops_of_training_count_sequences_heads_and_what_is_frozen():
    """FLOPs count K sequences, and no logits over the vocabulary without a language modeling loss. LoRA works beside a head."""
    lines = ["HEAD = @ClassificationHead()", 'ClassificationHead.classes = ("a", "b", "c")', "MODEL_DIR = 'x'", "TRAIN_STEPS = 1",
             'MIXTURE_OR_TASK_NAME = "classify_snli"', 'TASK_FEATURE_LENGTHS = {"inputs": 16}', *SMALL,
             "TransformerConfig.vocab_size = 4000"]  # fmt: skip

    def flops(*more):
        run = GinConfig(TWELVE, [*lines, *more]).run()
        return training_flops(run, make_model(run.model), 0, 16)

    plain = GinConfig(TWELVE, [*lines, "HEAD = None"]).run().model.network.flops(0, 16)
    single, three = flops(), flops('ClassificationHead.combine = "choices"')
    assert single == pytest.approx(plain, rel=0.02) and three == pytest.approx(3 * single, rel=0.02)
    assert flops("ClassificationHead.lm_weight = 0.0") < 0.5 * single  # the table of 4,000 words is most of this network
    lora = ['PEFT = {"lora": @Lora()}', 'TRAINABLE = ".*/lora/.*|classifier/.*"']
    assert 0.3 * single < flops(*lora) < 0.8 * single
