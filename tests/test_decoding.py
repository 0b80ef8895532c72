"""Beam search against exhaustive search and a slow reference, over made-up and real step functions."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import sentencepiece
import seqio
from helpers import architecture_of, cases, compiled, exhaustive, random_batch, random_params, tiny_config, tiny_model
from hypothesis import given
from hypothesis import strategies as st

from t5x_lab.config.errors import UserError
from t5x_lab.data.vocabularies.build import build_vocabulary
from t5x_lab.data.vocabularies.config import ByteVocabulary, SentencePieceVocabulary, SpecialTokens
from t5x_lab.decoding.beam_search import BeamConfig, beam_search, search
from t5x_lab.decoding.generation import Generated, complete_all
from t5x_lab.decoding.sampling import SamplingConfig, apply_logits_fn, choose
from t5x_lab.models.config import ModelConfig
from t5x_lab.networks.network import has_encoder
from t5x_lab.partitioning.mesh import MeshShape
from t5x_lab.runs.config.gin_config import GinConfig
from t5x_lab.runs.model import inference
from t5x_lab.runs.model.inference import Inference
from t5x_lab.runs.model.padding import bucket, scoring_batch
from t5x_lab.runs.model.run import Run
from t5x_lab.runs.model.sharded_model import ShardedModel
from t5x_lab.runs.model.texts import Texts

EOS = 1


def table_model(seed, batch, vocab, max_tokens):
    """A step whose logits are a random function of the tokens written, told by a table over all prefixes."""
    rng = np.random.default_rng(seed)
    rows = sum(vocab**n for n in range(max_tokens + 1))
    return rng.normal(size=(batch, rows, vocab)).astype(np.float32) * 2


def prefix_index(tokens, vocab):
    index = 0
    for token in tokens:
        index = index * vocab + int(token) + 1
    return index


def log_softmax(x):
    x = x.astype(np.float64)
    return x - np.log(np.exp(x - x.max(-1, keepdims=True)).sum(-1, keepdims=True)) - x.max(-1, keepdims=True)


def sequences(vocab, max_tokens):
    """All texts that end, and those that are cut."""
    others = [token for token in range(vocab) if token != EOS]
    for n in range(max_tokens):
        yield from ((*start, EOS) for start in itertools.product(others, repeat=n))
    yield from itertools.product(others, repeat=max_tokens)


def best_of_all(table, vocab, max_tokens, config):
    """Finished texts with their scores, best first."""
    scored = []
    for tokens in sequences(vocab, max_tokens):
        total = sum(log_softmax(table[prefix_index(tokens[:i], vocab)])[token] for i, token in enumerate(tokens))
        if tokens[-1] == EOS:
            scored.append((total / config.penalty(len(tokens)), tokens))
    return sorted(scored, reverse=True)


def run_beams(tables, vocab, max_tokens, config, before=None):
    batch = len(tables)
    groups = jnp.repeat(jnp.arange(batch), config.size)

    def step(state, token):
        state = state * vocab + token + 1
        return jnp.asarray(tables)[groups, state], state

    first = jnp.asarray(tables)[:, 0]
    start = jnp.zeros((batch * config.size,), jnp.int32)
    options = dict(max_tokens=max_tokens, eos_id=EOS, config=config, tokens_before=before)
    return beam_search(step, first, start, lambda s, rows: s[rows], **options)


@pytest.mark.parametrize("alpha", [0.0, 0.6, 2.0])
def test_a_wide_beam_finds_what_exhaustive_search_finds(alpha):
    """A vocabulary of six and texts of up to four tokens: beams enough for every candidate."""
    vocab, max_tokens, batch = 6, 4, 3
    config = BeamConfig(size=3 * 5**3, alpha=alpha)
    tables = table_model(0, batch, vocab, max_tokens)
    tokens, scores = jax.jit(lambda: run_beams(tables, vocab, max_tokens, config))()
    for row in range(batch):
        best = best_of_all(tables[row], vocab, max_tokens, config)
        assert len(best) == 1 + 5 + 25 + 125
        np.testing.assert_allclose(scores[row][: len(best)], [score for score, _ in best], rtol=1e-4)
        results = [tuple(t[: list(t).index(EOS) + 1]) for t in np.asarray(tokens[row][: len(best)])]
        assert results == [text for _, text in best]


def slow_beams(table, vocab, max_tokens, config, before):
    """Beam search as a person would write it down."""
    live, done = [(0.0, ())], []
    for n in range(1, max_tokens + 1):
        candidates = [
            (score + log_softmax(table[prefix_index(text, vocab)])[token], (*text, token))
            for score, text in live
            for token in range(vocab)
        ]
        candidates = sorted(candidates, reverse=True)[: 2 * config.size]
        done += [(score / config.penalty(before + n), text) for score, text in candidates if text[-1] == EOS]
        done = sorted(done, reverse=True)[: config.size]
        live = [(score, text) for score, text in candidates if text[-1] != EOS][: config.size]
        if len(done) == config.size and live[0][0] / config.penalty(before + max_tokens) <= done[-1][0]:
            break
    return done + [(score / config.penalty(before + max_tokens), text) for score, text in live][: config.size - len(done)]


@pytest.mark.parametrize("size, alpha, seed", [(1, 0.6, 0), (2, 0.6, 1), (3, 0.0, 2), (4, 1.0, 3)])
def test_a_narrow_beam_equals_the_slow_reference(size, alpha, seed):
    vocab, max_tokens, batch = 6, 5, 4
    config = BeamConfig(size, alpha)
    tables = table_model(seed, batch, vocab, max_tokens)
    tables[-1, :, EOS] = -50.0  # one that never ends by itself
    before = jnp.array([0, 3, 10, 1])
    tokens, scores = jax.jit(lambda: run_beams(tables, vocab, max_tokens, config, before))()
    for row in range(batch):
        expected = slow_beams(tables[row], vocab, max_tokens, config, int(before[row]))[:size]
        np.testing.assert_allclose(scores[row][: len(expected)], [score for score, _ in expected], rtol=1e-4)
        for text, (_, wanted) in zip(np.asarray(tokens[row]), expected, strict=False):
            assert tuple(text[: len(wanted)]) == wanted and not text[len(wanted) :].any()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["encoder_decoder", "prefix_decoder", "causal_decoder", "lstm"])
def test_beams_of_a_model_score_what_the_model_gives_them(name):
    """Sums of teacher-forced log-probabilities, padded prompts in one batch; the caches follow their hypotheses."""
    model, architecture = tiny_model(name), architecture_of(name)
    params = random_params(model)
    rng = np.random.default_rng(0)
    lengths = np.array([5, 1, 8])
    prompts = np.where(np.arange(8) < lengths[:, None], rng.integers(2, 64, (3, 8)), 0).astype(np.int32)
    config = BeamConfig(size=3)
    tokens, scores = jax.jit(lambda p, x: search(model, p, x, 6, config, EOS))(params, prompts)
    logits_of = compiled(model.logits)
    for row, beam in itertools.product(range(3), range(3)):
        text = np.asarray(tokens[row, beam])
        text = list(text[: list(text).index(EOS) + 1]) if EOS in text else list(text)
        prompt = list(prompts[row, : lengths[row]])
        before = text if architecture == "encoder_decoder" else prompt + text
        batch = {"decoder_input_tokens": np.array([[0, *before[:-1]]], np.int32)}
        if architecture == "encoder_decoder":
            batch["encoder_input_tokens"] = np.array([prompt], np.int32)
        else:
            batch["decoder_causal_attention"] = (np.arange(len(before)) <= len(prompt)).astype(np.int32)[None]
        logits = np.asarray(logits_of(params, batch))[0][-len(text) :]
        total = log_softmax(logits)[np.arange(len(text)), text].sum()
        np.testing.assert_allclose(scores[row, beam], total / config.penalty(len(before)), rtol=1e-3, atol=1e-4)


def test_impossible_beams_are_sentences():
    for options in ({"size": 0}, {"alpha": -1.0}):
        with pytest.raises(UserError, match="beam_"):
            BeamConfig(**options)


# Texts of any number and length through `Inference`, against one uncached pass a token.


def slow_text(model, params, prompt, limit, config=SamplingConfig(), seed=0, stream=0, decoder_prefix=()):
    """Tokens and log-probabilities, each from the whole sequence run again; behind `decoder_prefix`."""
    architecture = model.config.network.architecture
    key = jax.random.fold_in(jax.random.key(seed), stream)
    written, log_probs = [], []
    for i in range(limit):
        before = [*decoder_prefix, *written] if architecture == "encoder_decoder" else [*prompt, *decoder_prefix, *written]
        at = len(before)
        tokens = np.zeros((1, 40), np.int32)  # one shape, one program; what stands to the right changes nothing
        tokens[0, 1 : at + 1] = before
        batch = {"decoder_input_tokens": tokens}
        if architecture == "encoder_decoder":
            batch["encoder_input_tokens"] = np.array([[*prompt, *[0] * (24 - len(prompt))]], np.int32)
        else:
            batch["decoder_causal_attention"] = (np.arange(40) <= len(prompt)).astype(np.int32)[None]
        logits = apply_logits_fn(compiled(model.logits)(params, batch)[:, at], config.logits_fn)
        token = int(choose(logits, config, jax.random.fold_in(key, i)[None])[0][0])
        written.append(token)
        log_probs.append(float(jax.nn.log_softmax(logits[0])[token]))
        if token == EOS:
            break
    return written, log_probs


def made_up_texts(number, seed=0, least=1):
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(2, 64, rng.integers(least, 22)).tolist() for _ in range(number)]
    return prompts, rng.integers(1, 14, number).tolist()


def begun(sharded, prompts):
    """Returns prompts in the form that `Inference` takes. A decoder's begin with its start token."""
    return [[0, *prompt] if not has_encoder(sharded.model.config.network) else prompt for prompt in prompts]


def sharp_model(name, mesh="data=1", devices=1):
    sharded = ShardedModel(ModelConfig(tiny_config(name)), MeshShape.parse(mesh), jax.devices()[:devices])
    params = jax.device_put(random_params(sharded.model), sharded.param_shardings)
    return sharded, params, tiny_model(name)


def even_ids_twice_as_sharp(logits):
    return jnp.where(jnp.arange(logits.shape[-1]) % 2 == 0, 2 * logits, -1e10)


@pytest.mark.slow
def test_a_function_on_logits_decides_what_may_be_written():
    """Sampled, as in the slow reference; and by beams, whose scores are those of what it leaves."""
    sharded, params, model = sharp_model("causal_decoder")
    prompts, limits = made_up_texts(5)
    sampling = SamplingConfig(1.0, logits_fn=even_ids_twice_as_sharp)
    for i, tokens, _ in Inference(sharded).generate(
        params, begun(sharded, prompts), limits=limits, eos_id=EOS, sampling=sampling, batch_size=4
    ):
        assert tokens.tolist() == slow_text(model, params, prompts[i], limits[i], sampling, stream=i)[0]
        assert all(token % 2 == 0 for token in tokens)
    beams = BeamConfig(2, 0.0, logits_fn=even_ids_twice_as_sharp)
    tokens, scores = Inference(sharded).search(params, begun(sharded, prompts[:1]), max_tokens=3, beams=beams, eos_id=EOS)
    assert (tokens % 2 == 0).all() and (np.diff(scores) <= 0).all()
    greedy, log_probs = slow_text(model, params, prompts[0], 3, SamplingConfig(logits_fn=even_ids_twice_as_sharp))
    assert sum(log_probs) <= scores[0, 0] + 1e-4 and all(token % 2 == 0 for token in greedy)
    with pytest.raises(UserError, match="It must keep the shape"):
        apply_logits_fn(jnp.zeros((2, 4)), lambda logits: logits[0])


@pytest.mark.slow
@pytest.mark.parametrize("config", [SamplingConfig(), SamplingConfig(1.0)], ids=["greedy", "sampled"])
def test_a_decoder_prefix_is_continued(config):
    """Tests an encoder-decoder. In a decoder the prefix is a part of the prompt."""
    sharded, params, model = sharp_model("encoder_decoder")
    prompts, limits = made_up_texts(6)
    options = dict(limits=limits, eos_id=EOS, sampling=config, batch_size=4, decoder_prefix=[7, 11])
    for i, tokens, log_probs in Inference(sharded).generate(params, prompts, **options):
        written, expected = slow_text(model, params, prompts[i], limits[i], config, stream=i, decoder_prefix=[7, 11])
        assert tokens.tolist() == written
        np.testing.assert_allclose(log_probs, expected, atol=1e-4)
    if config.temperature:
        return
    for alpha in (0.0, 0.6):  # the penalty counts what was forced, as it counts a decoder's prompt
        options = dict(max_tokens=4, beams=BeamConfig(1, alpha), eos_id=EOS, decoder_prefix=[7, 11])
        tokens, scores = Inference(sharded).search(params, prompts, **options)
        for prompt, tokens_found, score in zip(prompts, tokens[:, 0].tolist(), scores[:, 0]):
            written, expected = slow_text(model, params, prompt, 4, decoder_prefix=[7, 11])
            if alpha == 0.0 and EOS not in written:
                assert tokens_found == written
                assert score == pytest.approx(sum(expected), abs=1e-4)
            elif EOS not in written and EOS not in tokens_found:
                assert score == pytest.approx(sum(expected) / ((5 + 2 + 4) / 6) ** alpha, abs=1e-4)
    sharded, params, model = sharp_model("causal_decoder")
    run = Run(GinConfig(), sharded, params, 0)
    run.special_tokens, run.eos_id, run.stop_ids = SpecialTokens(), EOS, (EOS,)
    continuations, _ = run.generate_tokens(prompts, max_tokens=5, decoder_prefix=[7, 11])
    np.testing.assert_array_equal(continuations, run.generate_tokens([[*p, 7, 11] for p in prompts], max_tokens=5)[0])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["encoder_decoder", "prefix_decoder", "causal_decoder", "lstm"])
@pytest.mark.parametrize("config", [SamplingConfig(), SamplingConfig(1.0, top_k=20, top_p=0.9)], ids=["greedy", "sampled"])
def test_refilled_rows_write_what_each_text_alone_would(name, config):
    """Eleven texts through four rows, refilled as they finish: tokens and log-probabilities of the slow reference."""
    sharded, params, model = sharp_model(name)
    prompts, limits = made_up_texts(11)
    results = {
        i: (tokens.tolist(), log_probs)
        for i, tokens, log_probs in Inference(sharded).generate(
            params, begun(sharded, prompts), limits=limits, eos_id=EOS, sampling=config, seed=5, batch_size=4
        )
    }
    assert sorted(results) == list(range(11))
    for i in range(11):
        tokens, log_probs = slow_text(model, params, prompts[i], limits[i], config, seed=5, stream=i)
        assert results[i][0] == tokens, i
        np.testing.assert_allclose(results[i][1], log_probs, atol=1e-3)


def test_rows_are_refilled_as_they_finish_and_stopped_texts_too():
    """Refilling takes far fewer steps than batches that wait for their longest text if lengths are very unequal."""
    steps = []

    class CountingPrograms:
        """Row r of a text with limit n is done after n steps."""

        def start(self, prompts, limits, streams):
            self.remaining = np.array(limits + [0] * (4 - len(limits)))
            return None

        def refill(self, slots, rows, prompts, limits, streams):
            self.remaining[rows] = limits

        def generate(self, slots, stopped, max_steps, until):
            self.remaining[stopped] = 0
            n = 0
            while n < max_steps and (self.remaining <= 0).sum() < until:
                self.remaining = np.maximum(self.remaining - 1, 0)
                n += 1
            steps.append(n)
            rows = np.zeros((4, 100))
            return None, Generated(rows, rows, np.full((4,), 3), self.remaining <= 0)

    limits = [100 if i % 4 == 0 else 5 for i in range(16)]
    args = ([[1]] * 16, limits, range(16))
    written = list(complete_all(CountingPrograms(), *args, rows=4, group=1))
    assert sorted(i for i, _, _ in written) == list(range(16))
    assert sum(steps) < 200  # 400 where each batch of four waits for its 100
    steps.clear()
    list(complete_all(CountingPrograms(), *args, rows=4, group=1, is_stopped=lambda i, tokens: True))
    assert max(steps) <= 16 and sum(steps) <= 16 * 16


@pytest.mark.slow
@pytest.mark.parametrize("name", ["encoder_decoder", "prefix_decoder", "causal_decoder", "gpt1", "lstm"])
def test_scores_with_shared_inputs_equal_those_of_the_whole_sequence(name):
    """Sums of log-probabilities and the greedy flag; four targets of each input, one of them what greedy decoding writes."""
    sharded, params, model = sharp_model(name)
    inference, rng = Inference(sharded), np.random.default_rng(1)
    prompts, _ = made_up_texts(5, seed=1)
    prompts = begun(sharded, prompts)
    inputs = [prompt for prompt in prompts for _ in range(4)]
    targets = [rng.integers(2, 64, rng.integers(1, 8)).tolist() for _ in inputs]
    greedy = {i: t.tolist() for i, t, _ in inference.generate(params, prompts, limits=[6] * 5, eos_id=EOS)}
    targets[::4] = [greedy[i] for i in range(5)]
    shared = inference.score(params, inputs, targets, batch_size=8)
    order = rng.permutation(20)
    for i in order[:4].tolist():
        alone = inference.score(params, [inputs[i]], [targets[i]])
        np.testing.assert_allclose(shared[0][i], alone[0][0], rtol=1e-4, atol=1e-4)
        assert shared[1][i] == alone[1][0]
    with_encoder = has_encoder(model.config.network)
    for i in range(20):
        batch = scoring_batch([inputs[i]], [targets[i]], 0 if with_encoder else None)
        logits = np.asarray(compiled(model.logits)(params, batch))[0]
        first = 0 if with_encoder else len(inputs[i]) - 1
        logits = logits[first : first + len(targets[i])]
        np.testing.assert_allclose(
            shared[0][i], log_softmax(logits)[np.arange(len(targets[i])), targets[i]].sum(), rtol=1e-4, atol=1e-4
        )
        assert shared[1][i] == (logits.argmax(-1) == targets[i]).all() and (shared[1][i] or i % 4)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["encoder_decoder", "prefix_decoder", *map(exhaustive, ("local", "merged"))])
def test_a_mesh_of_devices_writes_and_scores_the_same(name):
    prompts, limits = made_up_texts(11, seed=2)
    results = []
    for mesh, devices in (("data=1", 1), ("data=2,fsdp=2,tensor=2", 8)):
        sharded, params, _ = sharp_model(name, mesh, devices)
        inference, begins = Inference(sharded), begun(sharded, prompts)
        texts = inference.generate(params, begins, limits=limits, eos_id=EOS, batch_size=4)
        scores, _ = inference.score(params, begins + begins, prompts + prompts[::-1], batch_size=8)
        results.append((sorted((i, tokens.tolist()) for i, tokens, _ in texts), scores))
    assert results[0][0] == results[1][0]
    np.testing.assert_allclose(results[0][1], results[1][1], rtol=1e-4)


@cases(100)
@given(st.integers(1, 5000), st.sampled_from([4, 16]))
def test_buckets_hold_their_lengths_are_few_and_waste_little(length, least):
    assert length <= bucket(length, least) < max(1.25 * length + 1, length + least)
    assert bucket(bucket(length, least), least) == bucket(length, least)


def test_scores_count_a_token_once_whatever_its_weight():
    model, batch = tiny_model("causal_decoder"), random_batch("causal_decoder")
    score = lambda weight: compiled(model.score)(
        random_params(model), {**batch, "decoder_loss_weights": np.float32(weight) * batch["decoder_loss_weights"]}
    )
    np.testing.assert_array_equal(score(1.0).log_prob, score(0.5).log_prob)


def test_buckets_are_few():
    assert len({bucket(length) for length in range(1, 4097)}) < 32


def test_of_long_texts_a_batch_has_fewer(monkeypatch):
    monkeypatch.setattr(inference, "MAX_BATCH_TOKENS", 256)
    lengths = [300, 100, 60, 60, 40, *[16] * 40]
    results = list(Inference(sharp_model("gpt1")[0])._batches(list(range(45)), lambda i: lengths[i], batch_size=12))
    assert [i for batch, _ in results for i in batch] == list(range(45))
    for batch, rows in results:
        assert len(batch) <= rows <= 12 and rows * bucket(lengths[batch[0]]) <= max(256, bucket(lengths[batch[0]]))
    assert [rows for _, rows in results][:2] == [1, 2] and results[-2][1] == 12
    # Targets of one input, and inputs whose targets differ, do not come in the order of their lengths.
    for batch, rows in Inference(sharp_model("gpt1")[0])._batches(list(range(45)), lambda i: lengths[-i - 1], batch_size=12):
        longest = bucket(max(lengths[-i - 1] for i in batch))
        assert len(batch) <= rows and rows * longest <= max(256, longest)


@pytest.mark.slow
def test_learned_positions_limit_each_text_by_itself():
    """GPT-1's 32 positions: a long prompt with few tokens to write beside a short one with many; one too many is a sentence."""
    sharded, params, _ = sharp_model("gpt1")
    prompts, limits = begun(sharded, [[5] * 28, [6, 7], [8] * 20]), [4, 30, 12]
    results = {
        i: t.tolist() for i, t, _ in Inference(sharded).generate(params, prompts, limits=limits, eos_id=63, batch_size=2)
    }
    for i in range(3):
        assert len(results[i]) == limits[i] or results[i][-1] == 63
    alone = {i: t.tolist() for i, t, _ in Inference(sharded).generate(params, prompts[:1], limits=[4], eos_id=63)}
    assert alone[0] == results[0]
    fit = Inference(sharded).length_limits.truncate_prompts
    for limits, max_length, says in (
        ([5, 5], None, "b has 28 tokens, more than the 27"),
        ([33, 1], None, "a: 33 new tokens exceed the model's maximum of 32"),
        ([8, 8], 8, "a: with 8 new tokens there is no room for a prompt in 8 tokens"),
    ):
        with pytest.raises(UserError, match=says):
            fit([[0, 1], [0, *[5] * 28]], limits, max_length, ["a", "b"], [[0]])
    assert fit([[0, 1], [0, 5, *[6] * 27]], [5, 5], 32, ["a", "b"], [[0]]) == [[0, 1], [0, *[6] * 27]]
    assert fit([[5, *[6] * 28]], [5], 32, ["a"]) == [[6] * 28]  # without a start token there is room for one more
    with pytest.raises(UserError, match="a contains the id 64. The model's ids are 0 to 63"):
        fit([[64]], [1], None, ["a"])


@pytest.mark.slow
def test_scores_of_texts_that_fit_one_by_one_only():
    """A long input with a short target beside a short one with a long target: together they would not fit 32 positions."""
    sharded, params, _ = sharp_model("gpt1")
    inputs = begun(sharded, [[5] * 28] * 3 + [[6, 7]] * 3)
    targets = [[3], [4], [5, 6], [8] * 20, [9] * 30, [3] * 10]
    together = Inference(sharded).score(params, inputs, targets)[0]
    alone = [Inference(sharded).score(params, [i], [t])[0][0] for i, t in zip(inputs, targets, strict=True)]
    np.testing.assert_allclose(together, alone, rtol=1e-4)


@pytest.fixture(scope="module", params=["bytes", "pieces"])
def vocabulary(request, tmp_path_factory):
    """SentencePiece leaves out the space before a text's first word, also where that follows a prompt."""
    if request.param == "bytes":
        return build_vocabulary(ByteVocabulary())
    prefix = tmp_path_factory.mktemp("vocabulary") / "pieces"
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["one two three"] * 20), model_prefix=str(prefix), vocab_size=24, pad_id=0, eos_id=1, unk_id=2,
        bos_id=-1, hard_vocab_limit=False, minloglevel=2,
    )  # fmt: skip
    return build_vocabulary(SentencePieceVocabulary(f"{prefix}.model"))


@pytest.mark.parametrize("ends", [False, True])
def test_a_decoders_text_is_what_follows_its_prompt(vocabulary, ends):
    """Also where the prompt ends with an end token, at which SeqIO's decode stops."""
    texts = Texts(vocabulary, vocabulary, has_encoder=False, stop_ids=(1,), eos_id=1, input_affixes=lambda: ([], []))
    tokens = np.array([*texts.encode(" three"), 1, 0, 0])
    spaced = vocabulary.decode(texts.encode(" three")) == " three"
    assert spaced == isinstance(vocabulary, seqio.ByteVocabulary)
    if spaced or not ends:
        assert texts.completion(texts.encode("one two", eos=ends), tokens) == " three"
        assert texts.completion(texts.encode("one two", eos=ends), tokens, stop=["ee", "r"]) == " th"
    else:
        assert texts.completion(texts.encode("one two", eos=True), tokens) == "three"


def test_a_search_goes_on_while_a_longer_text_may_still_win():
    """The text that ends at once is likelier; the one of five tokens has the better score, which only its length forgives."""

    def step(state, token):
        state = state + 1
        return jnp.where(state[:, None] < 4, jax.nn.one_hot(token, 4), jax.nn.one_hot(jnp.full_like(token, EOS), 4)) * 50, state

    config = BeamConfig(size=1, alpha=1.0)
    first = jnp.log(jnp.array([[0.1, 0.4, 0.35, 0.15]]))
    options = dict(max_tokens=6, eos_id=EOS, config=config)
    tokens, scores = beam_search(step, first, jnp.zeros((1,), jnp.int32), lambda state, rows: state[rows], **options)
    assert tokens[0, 0].tolist() == [2, 2, 2, 2, EOS, 0]
    assert float(scores[0, 0]) == pytest.approx(np.log(0.35) / (10 / 6), rel=1e-5)


def test_ends_of_several_kinds_leave_room_for_a_text_that_goes_on():
    """Three end ids are more likely than the token that goes on, after which the best text ends."""
    first, later = jnp.log(jnp.array([[1e-9, 0.3, 0.28, 0.22, 0.2]])), jnp.log(jnp.array([[1e-9, 0.97, 0.01, 0.01, 0.01]]))
    step = lambda state, token: (later, state)
    config = BeamConfig(size=1, alpha=3.0)
    tokens, scores = beam_search(step, first, None, lambda state, rows: state, max_tokens=4, eos_id=(1, 2, 3), config=config)
    assert tokens[0, 0].tolist() == [4, 1, 0, 0]
    np.testing.assert_allclose(scores[0, 0], np.log(0.2 * 0.97) / (7 / 6) ** 3, rtol=1e-5)
