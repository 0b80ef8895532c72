"""Objectives: against the `t5` library's functions on the same tokens and seeds, by brute force, and by their properties."""

import functools
import inspect

import hypothesis
import numpy as np
import pytest
import seqio
import tensorflow as tf
from helpers import cases
from hypothesis import given
from hypothesis import strategies as st
from t5.data import preprocessors as t5

from t5x_lab.config.errors import UserError
from t5x_lab.data.objectives.denoising import Denoising, _iid_fit, _iid_max_length
from t5x_lab.data.objectives.language_modeling import FullLm, MaskedLm, PrefixLm
from t5x_lab.data.objectives.named import OBJECTIVES, get_objective
from t5x_lab.data.objectives.objective import FEATURE_PREFIXES, row_lengths
from t5x_lab.data.packing.feature_converter import FeatureConverter
from t5x_lab.data.packing.rows import first_fit
from t5x_lab.data.vocabularies.build import build_vocabulary, sentinel_ids
from t5x_lab.data.vocabularies.config import HuggingFaceVocabulary
from t5x_lab.data.vocabularies.sentinels import num_sentinels

VOCABULARY = seqio.ByteVocabulary(extra_ids=100)
SENTINELS = range(259, 359)
MERGED = [name for name, o in OBJECTIVES.items() if isinstance(o, Denoising) and o.merge_documents]


def examples_of(objective, lengths, documents, architecture="encoder_decoder", seed=7, vocabulary=VOCABULARY):
    """Returns an objective's examples of token lists, before packing."""
    lengths = objective.complete(lengths, architecture, 100)
    features = {f: seqio.Feature(vocabulary, add_eos=f in objective.features_with_eos) for f in objective.features}
    return _run(objective.preprocessors(), lengths, features, documents, seed)


def _run(steps, lengths, features, documents, seed):
    dataset = tf.data.Dataset.from_tensor_slices({"targets": tf.ragged.constant(documents, tf.int32)})
    dataset = dataset.map(lambda x: {"targets": x["targets"] + 0})  # ragged rows are dense here
    with seqio.map_seed_manager(seed):
        for step in steps:
            names = inspect.signature(getattr(step, "__wrapped__", step)).parameters
            arguments = {"sequence_length": lengths, "output_features": features}
            dataset = step(dataset, **{name: value for name, value in arguments.items() if name in names})
    return list(dataset.as_numpy_iterator())


def text_of(rng, lengths):
    return [rng.integers(3, 259, n).tolist() for n in lengths]


# ---- the t5 library's own functions ----


def library(objective, lengths):
    """The `t5` library's chain for an objective, at the chunk length that we compute."""
    if isinstance(objective, FullLm):
        return [t5.full_lm]
    n = objective.text_tokens(lengths["inputs"], lengths["targets"], 100)
    inputs_fn = {
        "sentinel_per_span": t5.noise_span_to_unique_sentinel,
        "sentinel_per_token": t5.noise_token_to_sentinel,
        "random_or_sentinel": t5.noise_token_to_random_token_or_sentinel,
        "without_noise": t5.drop_noise_tokens,
        "permuted": t5.permute_noise_tokens,
    }[objective.inputs]
    targets_fn = {
        "whole": None,
        "noise_by_sentinel": t5.nonnoise_span_to_unique_sentinel,
        "noise_alone": t5.drop_nonnoise_tokens,
    }[objective.targets]
    mask = t5.iid_noise_mask
    if objective.mean_noise_span_length:
        mask = functools.partial(t5.random_spans_noise_mask, mean_noise_span_length=objective.mean_noise_span_length)
    merge = [functools.partial(t5.reduce_concat_tokens, batch_size=128)] if objective.merge_documents else []
    return [
        functools.partial(t5.select_random_chunk, max_length=65536),
        *merge,
        lambda dataset: t5.split_tokens(dataset, max_tokens_per_segment=n),
        lambda dataset, output_features: t5.denoise(
            dataset, output_features, objective.noise_density, mask, inputs_fn, targets_fn
        ),
        seqio.preprocessors.append_eos_after_trim,
    ]


LIBRARY = ["full_lm", "span_corruption", "span_corruption_25_5", "span_corruption_50_10", "replace_spans", "replace_spans_25",
           "mass_style", "drop_tokens", "deshuffling", "bert_style"]  # fmt: skip


@pytest.mark.parametrize("name", [*LIBRARY[:1], *(pytest.param(name, marks=pytest.mark.slow) for name in LIBRARY[1:])])
def test_equal_to_the_t5_library_on_the_same_tokens_and_seeds(name):
    objective = OBJECTIVES[name]
    architecture = "causal_decoder" if name == "full_lm" else "encoder_decoder"
    lengths = objective.complete({"inputs": 64} if name != "full_lm" else {"targets": 64}, architecture, 100)
    documents = text_of(np.random.default_rng(0), [300, 17, 64, 1, 512])
    features = {f: seqio.Feature(VOCABULARY) for f in objective.features}
    actual = examples_of(objective, lengths, documents, architecture)
    expected = _run(library(objective, lengths), lengths, features, documents, 7)
    assert len(actual) == len(expected) > 5
    for a, b in zip(actual, expected, strict=True):
        np.testing.assert_array_equal(a["targets"], b["targets"])
        if name == "bert_style":  # theirs draws sentinels as random tokens, ours does not
            same = a["inputs"] == b["inputs"]
            replaced = (b["inputs"] != b["targets"]) & (b["inputs"] != 358)
            assert (same | replaced).all() and not np.isin(a["inputs"], SENTINELS[:-1]).any()
        elif "inputs" in b:
            np.testing.assert_array_equal(a["inputs"], b["inputs"])


@pytest.mark.slow
def test_prefix_lm_equal_to_the_t5_librarys_packing():
    """Theirs packs in the preprocessor, for even lengths; ours makes examples, and rows of any length come after."""
    documents = text_of(np.random.default_rng(1), [96 - 1] * 2)  # with end tokens six chunks of 32
    features = {f: seqio.Feature(VOCABULARY) for f in ("inputs", "targets")}
    for architecture, pack, lengths in (
        ("encoder_decoder", t5.pack_prefix_lm_encoder_decoder, {"inputs": 32, "targets": 32}),
        ("prefix_decoder", t5.pack_prefix_lm_decoder_only, {"targets": 32}),
    ):
        t5_rows = _run([t5.targets_for_prefix_lm_objective, pack], lengths, {"targets": features["targets"]}, documents, 7)
        steps = PrefixLm().preprocessors()
        actual = rows_from(_run(steps, lengths, features, documents, 7), architecture, row_lengths(architecture, lengths))
        assert len(actual) == len(t5_rows) == (3 if architecture == "encoder_decoder" else 6)
        for a, b in zip(actual, t5_rows, strict=True):
            for feature, expected in b.items():
                np.testing.assert_array_equal(a[feature], expected, err_msg=feature)


def test_text_lengths_equal_the_t5_librarys_helper():
    for inputs in (16, 64, 128, 512, 1024):
        for rate in (0.10, 0.15, 0.25, 0.5):
            for length in (2.0, 3.0, 5.0, 10.0):
                if inputs * rate < length:
                    continue
                objective = Denoising(rate, length)
                complete = objective.complete({"inputs": inputs}, "encoder_decoder", 10**6)
                n = objective.text_tokens(inputs, None, 10**6)
                assert (n, complete["targets"]) == t5.random_spans_helper(inputs, rate, length, 1, 1), (inputs, rate, length)


# ---- properties ----


def spans_by_sentinel(tokens, where):
    spans, current = {None: []}, None
    for token in tokens:
        if token in where:
            assert token not in spans, "a sentinel stands twice"
            current = token
            spans[current] = []
        else:
            spans[current].append(token)
    return spans


def rebuilt(inputs, targets):
    """Inputs with each sentinel replaced by what follows it in the targets."""
    spans = spans_by_sentinel(targets, SENTINELS)
    stood = [t for t in inputs if t in SENTINELS]
    assert stood == list(range(358, 358 - len(stood), -1)), "sentinels count down from the last"
    named = [t for t in targets if t in SENTINELS]
    assert named == list(range(358, 358 - len(named), -1)) and len(named) >= len(stood)
    return [t for token in inputs for t in (spans[token] if token in SENTINELS else [token])]


DOCUMENTS = st.lists(st.integers(1, 200), min_size=1, max_size=12)
SOME = cases(4, shrink=False)  # each case builds a pipeline


@SOME
@given(DOCUMENTS, st.integers(8, 80), st.integers(0, 10**6), st.sampled_from([n for n in MERGED if "span" in n]))
def test_spans_and_what_is_left_make_the_text(sizes, inputs, seed, name):
    objective, documents = OBJECTIVES[name], text_of(np.random.default_rng(seed), sizes)
    lengths = objective.complete({"inputs": inputs}, "encoder_decoder", 100)
    stream, flat = [], [t for document in documents for t in document]
    for example in examples_of(objective, lengths, documents, seed=seed):
        assert len(example["inputs"]) <= lengths["inputs"] and len(example["targets"]) <= lengths["targets"]
        cut = objective.mean_noise_span_length is None and len(example["targets"]) == lengths["targets"]
        assert example["inputs"][-1] == example["targets"][-1] == 1
        if not objective.mean_noise_span_length:
            # Text may begin with noise, whose sentinel in the inputs then has no partner in the library's targets.
            piece = flat[len(stream) : len(stream) + int(example["raw_tokens"])]
            noise = [t for span in spans_by_sentinel(example["targets"][:-1], SENTINELS).values() for t in span]
            remaining = [t for t in example["inputs"][:-1].tolist() if t not in SENTINELS]
            for part in (remaining, noise):
                rest = iter(piece)
                assert all(token in rest for token in part), "not in the order of the text"
            assert cut or sorted(remaining + noise) == sorted(piece)
            stream += piece
        elif example["raw_tokens"] > 1:
            piece = rebuilt(example["inputs"][:-1].tolist(), example["targets"][:-1].tolist())
            assert len(piece) == example["raw_tokens"]
            stream += piece
        else:
            stream += [0]  # one token alone is all noise or all text
    assert len(stream) == len(flat)
    assert all(a in (0, b) for a, b in zip(stream, flat, strict=True))


@SOME
@given(DOCUMENTS, st.integers(8, 80), st.integers(0, 10**6))
def test_dropped_tokens_and_what_is_left_are_the_text_in_order(sizes, inputs, seed):
    objective, documents = OBJECTIVES["drop_tokens"], text_of(np.random.default_rng(seed), sizes)
    flat = [t for document in documents for t in document]
    for example in examples_of(objective, {"inputs": inputs}, documents, seed=seed):
        piece, flat = flat[: example["raw_tokens"]], flat[example["raw_tokens"] :]
        remaining, dropped = example["inputs"][:-1].tolist(), example["targets"][:-1].tolist()
        if len(remaining) + len(dropped) < len(piece):  # cut, which is rare
            continue
        assert sorted(remaining + dropped) == sorted(piece)
        for part in (remaining, dropped):
            rest = iter(piece)
            assert all(token in rest for token in part), "not in the order of the text"
    assert not flat


@SOME
@given(DOCUMENTS, st.integers(8, 80), st.integers(0, 10**6), st.sampled_from(["bert_style", "mass_style", "deshuffling"]))
def test_whole_texts_are_written(sizes, inputs, seed, name):
    objective, documents = OBJECTIVES[name], text_of(np.random.default_rng(seed), sizes)
    flat = [t for document in documents for t in document]
    written = []
    for example in examples_of(objective, {"inputs": inputs}, documents, seed=seed):
        read, text = example["inputs"][:-1], example["targets"][:-1]
        assert len(read) == len(text) == example["raw_tokens"] <= inputs - 1
        if name == "deshuffling":
            assert sorted(read) == sorted(text)
        elif name == "mass_style":
            assert ((read == text) | (read == 358)).all()
        else:
            assert ((read == text) | (read == 358) | (read < 259)).all()
        written += text.tolist()
    assert written == flat


@pytest.mark.slow
@SOME
@given(DOCUMENTS, st.integers(2, 81), st.integers(0, 10**6))
def test_prefix_lm_loses_nothing_at_any_length(sizes, length, seed):
    documents = text_of(np.random.default_rng(seed), sizes)
    flat = [t for document in documents for t in [*document, 1]]
    for architecture in ("prefix_decoder", "encoder_decoder"):
        examples = examples_of(PrefixLm(), {"targets": length}, documents, architecture, seed)
        if architecture == "prefix_decoder":
            assert [t for e in examples for t in [*e["inputs"], *e["targets"]]] == flat
            continue
        read = []
        for e in examples:
            segment = lambda name, text, e=e: e[name][e[f"{name}_segment_ids"] == text]
            read += [token for text in (1, 2) for name in ("inputs", "targets") for token in segment(name, text)]
            assert len(e["inputs"]) <= length and len(e["targets"]) <= length
        assert read == flat
        rows = rows_from(examples, architecture, (length, length))
        assert sum(
            int((row["encoder_input_tokens"] > 0).sum() + (row["decoder_target_tokens"] > 0).sum()) for row in rows
        ) == len(flat)
        assert sum(int(row["raw_tokens"]) for row in rows) == sum(token != 1 for token in flat)  # without end tokens
        whole = len(flat) // length // 2  # pairs of whole chunks fill a row each
        assert sum(bool(row["encoder_segment_ids"].all() and row["decoder_segment_ids"].all()) for row in rows) >= whole


@SOME
@given(DOCUMENTS, st.integers(2, 80), st.integers(0, 10**6))
def test_masked_lm_keeps_the_text_and_marks_its_noise(sizes, length, seed):
    documents = text_of(np.random.default_rng(seed), sizes)
    examples = examples_of(MaskedLm(), {"inputs": length}, documents, "encoder", seed)
    assert [t for e in examples for t in e["targets"]] == [t for document in documents for t in document]
    for e in examples:
        assert len(e["inputs"]) == len(e["targets"]) == len(e["loss_weights"]) <= length
        assert (e["inputs"] == e["targets"])[e["loss_weights"] == 0].all()
        assert ((e["inputs"] < 259) | (e["inputs"] == 358)).all()


def test_masked_lm_in_its_shares():
    """15 % with loss, of these 80 % the first sentinel, 10 % random, 10 % kept; within four standard errors."""
    documents = text_of(np.random.default_rng(0), [40_000])
    examples = examples_of(MaskedLm(), {"inputs": 500}, documents, "encoder")
    inputs, targets, weights = (np.concatenate([e[f] for e in examples]) for f in ("inputs", "targets", "loss_weights"))
    noise = weights == 1
    error = lambda p, n: 4 * np.sqrt(p * (1 - p) / n)
    assert noise.mean() == pytest.approx(0.15, abs=error(0.15, noise.size))
    count = noise.sum()
    assert (inputs[noise] == 358).mean() == pytest.approx(0.8, abs=error(0.8, count))
    unchanged = (inputs[noise] == targets[noise]).mean()
    assert unchanged == pytest.approx(0.1 + 0.1 / 256, abs=error(0.1, count))
    assert set(inputs[noise & (inputs != targets) & (inputs != 358)]) <= set(range(3, 259))  # no padding, EOS or sentinel


def test_bert_style_in_its_shares():
    examples = examples_of(OBJECTIVES["bert_style"], {"inputs": 500}, text_of(np.random.default_rng(0), [40_000]))
    read, text = (np.concatenate([e[f][:-1] for e in examples]) for f in ("inputs", "targets"))
    assert (read == 358).mean() == pytest.approx(0.15 * 0.9, abs=0.007)
    assert ((read != text) & (read != 358)).mean() == pytest.approx(0.15 * 0.1 * 255 / 256, abs=0.003)


@pytest.mark.slow
def test_ul2_draws_its_seven_denoisers_alike_and_names_their_modes():
    documents = text_of(np.random.default_rng(0), [60_000] * 4)
    examples = examples_of(OBJECTIVES["ul2"], {"inputs": 128}, documents)
    modes = np.array([e["inputs"][0] - 259 for e in examples])
    for mode, share in enumerate((2 / 7, 1 / 7, 4 / 7)):
        assert (modes == mode).mean() == pytest.approx(share, abs=4 * np.sqrt(share * (1 - share) / len(modes)))
    for example in examples:
        assert not np.isin(example["inputs"][1:], [259, 260, 261]).any()
        if example["raw_tokens"] > 1:
            rebuilt(example["inputs"][1:-1].tolist(), example["targets"][:-1].tolist())
    last_quarter = [e for e in examples if e["inputs"][0] == 260 and e["raw_tokens"] > 8]
    for e in last_quarter:
        assert e["inputs"][-2] == 358 and len(e["targets"]) - 2 == round(e["raw_tokens"] / 4)


def test_iid_noise_rarely_outgrows_the_lengths_computed_for_it():
    """The chain of chances against 20,000 drawn masks."""
    rng = np.random.default_rng(0)
    for density, costs, limit in ((0.15, (1, 0, 1), 127), (0.5, (1, 0, 1), 127), (0.25, (0, 0, 1), 40), (0.15, (1, 0, 0), 99)):
        n = _iid_fit(density, costs, limit, 10**6)
        noise = rng.random((20_000, n)) < density
        spans = (noise & ~np.pad(noise[:, :-1], ((0, 0), (1, 0)))).sum(1)
        lengths = costs[0] * (~noise).sum(1) + costs[1] * noise.sum(1) + costs[2] * (1 + spans)
        assert (lengths > limit).mean() < 2e-3
        most = _iid_max_length(density, costs, n)
        assert (lengths > most).mean() < 2e-3 and (lengths > most - 3).mean() > 1e-4


# ---- rows ----


def rows_from(examples, architecture, lengths, pack=True):
    """Model features of examples that share one row a batch."""
    features = ("inputs", "targets", "loss_weights", "inputs_segment_ids", "targets_segment_ids")
    names = [name for name in features if name in examples[0]]
    ragged = {name: tf.ragged.constant([e[name].tolist() for e in examples], tf.int32, ragged_rank=1) for name in names}
    dataset = tf.data.Dataset.from_tensor_slices({**ragged, "raw_tokens": [int(e["raw_tokens"]) for e in examples]})
    dataset = dataset.map(lambda e: {**{k: v + 0 for k, v in e.items()}, "task": 0})
    batches = FeatureConverter(architecture, pack).batches(dataset, dict(zip(FEATURE_PREFIXES, lengths, strict=True)), 1)
    return [{name: x[0] for name, x in batch.items()} for batch in batches.as_numpy_iterator()]


@cases(100)
@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 5)), min_size=1, max_size=40))
@hypothesis.example([(4, 2), (4, 4), (4, 4), *[(6, 0)] * 7, (4, 5), (0, 0)])  # a row leaves the ten when it is filled
@hypothesis.example([*[(5, 0)] * 11, (4, 0)])  # it would fit the first, which the eleventh has closed
def test_first_fit_is_first_fit(sizes):
    used, expected, closed = [], [], set()
    for a, b in sizes:
        row = next((i for i, u in enumerate(used) if i not in closed and u[0] + a <= 9 and u[1] + b <= 5), len(used))
        if row == len(used):
            used.append([0, 0, 0])
        expected.append([row, used[row][2] + 1])
        used[row] = [used[row][0] + a, used[row][1] + b, used[row][2] + 1]
        closed |= {i for i, u in enumerate(used) if u[0] == 9 or u[1] == 5}
        closed |= set([i for i in range(len(used)) if i not in closed][:-10])
    np.testing.assert_array_equal(first_fit(np.array(sizes), [9, 5]), expected)


@pytest.mark.slow
@cases(3, shrink=False)
@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 6)), min_size=1, max_size=30), st.integers(0, 99))
def test_packed_rows_hold_every_example_once_as_seqio_would_alone(sizes, seed):
    """Each segment equals the row that SeqIO's converter makes of its example alone."""
    rng = np.random.default_rng(seed)
    examples = [
        {"inputs": rng.integers(2, 99, a), "targets": rng.integers(2, 99, b), "raw_tokens": np.int32(a + b)} for a, b in sizes
    ]
    for architecture, converter, lengths in (
        ("encoder_decoder", seqio.EncDecFeatureConverter(pack=False), (9, 6)),
        ("prefix_decoder", seqio.PrefixLMFeatureConverter(pack=False), (0, 15)),
    ):
        dataset = tf.data.Dataset.from_generator(
            lambda: iter([{"inputs": e["inputs"], "targets": e["targets"]} for e in examples]),
            output_signature={name: tf.TensorSpec([None], tf.int32) for name in ("inputs", "targets")},
        )
        alone = list(converter(dataset, {"inputs": 9, "targets": 6}).as_numpy_iterator())
        unpacked = rows_from(examples, architecture, lengths, pack=False)
        for row_alone, seqio_row in zip(unpacked, alone, strict=True):
            for feature, x in seqio_row.items():
                np.testing.assert_array_equal(row_alone[feature], x, err_msg=feature)
        results = []
        for row in rows_from(examples, architecture, lengths):
            for segment in range(1, int(row["decoder_segment_ids"].max()) + 1):
                features = [f for f in alone[0] if f"{f.split('_')[0]}_segment_ids" in row]
                results.append({f: row[f][row[f"{f.split('_')[0]}_segment_ids"] == segment].tolist() for f in features})
                positions = row["decoder_positions"][row["decoder_segment_ids"] == segment]
                assert positions.tolist() == list(range(len(positions)))
        expected = []
        for row in alone:
            real = {"encoder": row.get("encoder_input_tokens"), "decoder": row["decoder_target_tokens"]}
            expected.append({f: x[real[f.split("_")[0]] > 0].tolist() for f, x in row.items()})
        key = lambda segment: str(sorted(segment.items()))
        assert sorted(map(key, results)) == sorted(map(key, expected))


# ---- sentences ----


@pytest.mark.parametrize(
    "name, architecture, lengths, says",
    [
        ("full_lm", "causal_decoder", {"inputs": 8}, 'has no length for "targets"'),
        ("prefix_lm", "encoder_decoder", {"inputs": 8, "targets": 9}, "inputs and targets of equal length"),
        ("prefix_lm", "causal_decoder", {"targets": 1}, "at least 2 tokens"),
        ("span_corruption", "encoder_decoder", {"inputs": 512, "targets": 113}, "make targets of up to 114 tokens"),
        ("span_corruption", "encoder_decoder", {"inputs": 2}, "have no room for 15% noise"),
    ],
)
def test_lengths_that_do_not_fit_are_sentences(name, architecture, lengths, says):
    with pytest.raises(UserError, match=says):
        get_objective(name).complete(lengths, architecture, 100)


@pytest.mark.parametrize(
    "settings, says",
    [
        (dict(noise_density=0.8, mean_noise_span_length=1.0), "has less than one token of text per span"),
        (dict(noise_density=0.15, mean_noise_span_length=0.5), "has less than one token of text per span"),
        (dict(noise_density=1.0, mean_noise_span_length=3.0), "has less than one token of text per span"),
        (dict(noise_density=0.0), "must be above 0"),
        (dict(mode=7), "Denoising.mode is 7. It must be at least 0 and below 3"),
        (dict(inputs="dropped"), "Denoising.inputs is 'dropped'"),
    ],
)
def test_noise_that_makes_no_sense_is_a_sentence(settings, says):
    with pytest.raises(UserError, match=says):
        Denoising(**settings)


def test_gemmas_unused_tokens_are_sentinels(tmp_path):
    """Its tokenizer has `<unused0>` and so on near the start, after the special tokens, which are never drawn."""
    transformers, tokenizers = pytest.importorskip("transformers"), pytest.importorskip("tokenizers")
    pieces = [
        "<pad>",
        "<eos>",
        "<bos>",
        "<unk>",
        "<mask>",
        *(f"<unused{i}>" for i in range(20)),
        *(f"word{i}" for i in range(40)),
    ]
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel({piece: i for i, piece in enumerate(pieces)}, unk_token="<unk>"))
    special = {f"{name}_token": f"<{name}>" for name in ("pad", "eos", "bos", "unk", "mask")}
    transformers.PreTrainedTokenizerFast(tokenizer_object=model, **special).save_pretrained(tmp_path)
    config = HuggingFaceVocabulary(str(tmp_path))
    vocabulary, unused = build_vocabulary(config), list(range(5, 25))
    assert list(sentinel_ids(vocabulary)) == unused and num_sentinels(config) == 20
    document = [int(i) for i in np.arange(400) % 40 + 25]
    example = examples_of(OBJECTIVES["ul2"], {"inputs": 64, "targets": 64}, [document], vocabulary=vocabulary)[0]
    inputs, targets = ([i for i in example[feature].tolist() if i in unused] for feature in ("inputs", "targets"))
    assert inputs.pop(0) in unused[-3:]
    assert len(inputs) > 1 and inputs == unused[: len(inputs)]
    assert len(targets) > 1 and targets == unused[: len(targets)]
    repeated = [[30] * 400] * 20
    masked = examples_of(OBJECTIVES["masked_lm"], {"inputs": 64}, repeated, "encoder", vocabulary=vocabulary)
    drawn = set(np.concatenate([example["inputs"] for example in masked]).tolist())
    assert drawn <= {1, unused[0], *range(25, 65)} and {25, 64} <= drawn


@pytest.mark.slow
def test_sentinels_are_those_of_the_vocabulary_in_their_order(tmp_path):
    """ByT5's pre-training took the last bytes (Xue et al. 2022); its tokenizer's `<extra_id_0>` counts up from 259."""
    transformers = pytest.importorskip("transformers", reason="pip install -e '.[compare]' compares with transformers")
    transformers.ByT5Tokenizer().save_pretrained(tmp_path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    document = [int(i) for i in np.arange(300) % 26 + 100]
    extra_ids = tokenizer.convert_tokens_to_ids([f"<extra_id_{i}>" for i in range(125)])
    own, imported = seqio.ByteVocabulary(), build_vocabulary(HuggingFaceVocabulary(str(tmp_path)))
    for vocabulary, ids, name in (
        (own, list(range(258, 158, -1)), "span_corruption"),
        (imported, extra_ids, "span_corruption"),
        (imported, extra_ids, "ul2"),
    ):
        assert list(sentinel_ids(vocabulary)) == ids
        example = examples_of(OBJECTIVES[name], {"inputs": 64, "targets": 64}, [document], vocabulary=vocabulary)[0]
        inputs, targets = ([i for i in example[feature].tolist() if i in ids] for feature in ("inputs", "targets"))
        if name == "ul2":
            assert inputs.pop(0) in ids[-3:]
        assert len(inputs) > 1 and inputs == ids[: len(inputs)]
        assert len(targets) > 1 and targets == ids[: len(targets)]
    masked = examples_of(OBJECTIVES["masked_lm"], {"inputs": 64}, [document], "encoder", vocabulary=vocabulary)
    assert {i for i in np.concatenate([example["inputs"] for example in masked]).tolist() if i > 258} == {ids[0]}
    assert imported.decode([*tokenizer.encode("words", add_special_tokens=False), 400]) == "words"  # of a larger network


def test_masking_needs_a_sentinel():
    for name, architecture in (("bert_style", "encoder_decoder"), ("mass_style", "encoder_decoder"), ("masked_lm", "encoder")):
        with pytest.raises(UserError, match="sentinel"):
            OBJECTIVES[name].complete({"inputs": 64}, architecture, 0)


def test_a_function_of_ones_own_may_have_an_if_over_tensors():
    def first_or_all(tokens, noise_mask, vocabulary, seeds):
        if tf.size(tokens) > 10:
            tokens = tokens[:10]
        return tokens

    objective = Denoising(inputs=first_or_all, targets="whole")
    (example,) = examples_of(objective, {"inputs": 64}, [list(range(3, 33))])
    assert example["inputs"].tolist() == [*range(3, 13), 1] and example["targets"].tolist() == [*range(3, 33), 1]


def test_few_sentinels_make_shorter_examples_and_none_is_used_twice():
    objective = OBJECTIVES["span_corruption_50_2"]
    n = objective.text_tokens(512, None, 100)
    assert objective.noise(n)[1] == 100 and objective.noise(n + 2)[1] > 100
    assert objective.share_of_inputs({"inputs": 512, "targets": 512}, 100) < 0.7
    with pytest.raises(UserError, match="0 sentinels"):
        objective.complete({"inputs": 512}, "encoder_decoder", 0)


def test_what_is_too_long_for_its_row_is_cut_before_its_end_token(capsys):
    long, short, endless = [*range(3, 43), 1], [5, 6, 1], list(range(3, 43))
    pairs = [(long, long), (short, endless), (short, short)]
    examples = {name: tf.ragged.constant([pair[i] for pair in pairs], tf.int32) for i, name in enumerate(("inputs", "targets"))}
    dataset = tf.data.Dataset.from_tensor_slices({**examples, "raw_tokens": tf.zeros(3, tf.int32)})
    fit = lambda ids, n: ids if len(ids) <= n else [*ids[: n - 1], 1] if ids[-1] == 1 else ids[:n]
    padded = lambda ids, n: [*ids, *[0] * (n - len(ids))]
    batch = next(
        FeatureConverter("encoder_decoder", pack=False).batches(dataset, {"inputs": 16, "targets": 12}, 3).as_numpy_iterator()
    )
    for (inputs, targets), inputs_row, targets_row in zip(
        pairs, batch["encoder_input_tokens"], batch["decoder_target_tokens"], strict=True
    ):
        assert inputs_row.tolist() == padded(fit(inputs, 16), 16) and targets_row.tolist() == padded(fit(targets, 12), 12)
    assert (
        capsys.readouterr().err.count(
            "Some examples have 41 tokens or more, but a row has 16. They are truncated before their EOS token"
        )
        == 1
    )
    batch = next(FeatureConverter("prefix_decoder").batches(dataset, {"targets": 48}, 3).as_numpy_iterator())
    assert batch["decoder_target_tokens"][0].tolist() == fit([*long, *long], 48)
    assert batch["decoder_loss_weights"][0].tolist() == [0] * 41 + [1] * 7
    converter = FeatureConverter("encoder_decoder", pack=False, eos=1, input_eos=42)  # a vocabulary of inputs of its own
    batch = next(converter.batches(dataset, {"inputs": 16, "targets": 12}, 3).as_numpy_iterator())
    assert batch["encoder_input_tokens"][0].tolist() == list(range(3, 19)) and batch["decoder_target_tokens"][0, -1] == 1
    converter = FeatureConverter("encoder_decoder", pack=False, eos=42, input_eos=1)
    batch = next(converter.batches(dataset, {"inputs": 16, "targets": 12}, 3).as_numpy_iterator())
    assert batch["encoder_input_tokens"][0, -1] == 1 and batch["decoder_target_tokens"][0, -1] == 14
