"""Ensembles: logits that are the mean of their members'."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import exhaustive, random_batch, random_params, tiny_config
from runs_of_text import FULL_LM, PREFIX_LM_ED, flags

import t5x_lab
from t5x_lab.cli.main import main
from t5x_lab.config.errors import UserError
from t5x_lab.models.config import ModelConfig
from t5x_lab.models.model import Model
from t5x_lab.networks.ensemble import Ensemble, join_inputs_and_targets


def members_of(*networks):
    configs = [tiny_config(name) for name in networks]
    models = [Model(ModelConfig(config)) for config in configs]
    params = [random_params(model, seed) for seed, model in enumerate(models)]
    ensemble = Model(ModelConfig(Ensemble(tuple(configs))))
    assert ensemble.num_parameters == sum(model.num_parameters for model in models)
    return ensemble, {"members": {str(i): own for i, own in enumerate(params)}}, models, params


def assert_close(actual, expected):
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-4 * float(np.abs(expected).max()))


@pytest.mark.parametrize(
    "networks",
    [
        exhaustive(("causal_decoder", "causal_decoder")),
        ("encoder_decoder", "shared_stacks"),
        exhaustive(("lstm", "rotary", "gpt1")),
    ],
)
def test_logits_are_the_mean_of_the_members(networks):
    ensemble, params, models, own = members_of(*networks)
    batch = random_batch("prefix_decoder" if "rotary" in networks else networks[0])
    each = [model.logits(p, batch) for model, p in zip(models, own, strict=True)]
    assert_close(ensemble.logits(params, batch), np.mean(each, axis=0))
    prompt = jnp.asarray(np.random.default_rng(0).integers(1, 64, (3, 5)))
    logits, state = ensemble.prefill(params, prompt, 4)
    results = [model.prefill(p, prompt, 4) for model, p in zip(models, own, strict=True)]
    for _ in range(3):
        assert_close(logits, np.mean([x for x, _ in results], axis=0))
        token = jnp.argmax(logits, axis=-1)
        logits, state = ensemble.decode_step(params)(state, token)
        results = [m.decode_step(p)(s, token) for m, p, (_, s) in zip(models, own, results, strict=True)]


@pytest.mark.parametrize("decoder", [exhaustive("causal_decoder"), "prefix_decoder"])
def test_an_encoder_decoder_and_a_decoder_read_the_same(decoder):
    """The decoder's part is its own logits of inputs and targets in one row; of packed rows, example by example."""
    ensemble, params, models, own = members_of("encoder_decoder", decoder)
    rng = np.random.default_rng(1)
    examples = [(rng.integers(1, 64, n).tolist(), rng.integers(1, 64, m).tolist()) for n, m in ((3, 4), (5, 2), (2, 3))]
    expected = []
    for inputs, targets in examples:
        batch = {
            "encoder_input_tokens": jnp.asarray([inputs]),
            "decoder_input_tokens": jnp.asarray([[0, *targets[:-1]]]),
            "decoder_target_tokens": jnp.asarray([targets]),
        }
        row = [0, *inputs, *targets[:-1]]
        alone = {
            "decoder_input_tokens": jnp.asarray([row]),
            "decoder_causal_attention": jnp.asarray([[int(i <= len(inputs)) for i in range(len(row))]]),
        }
        decoder_logits = models[1].logits(own[1], alone)[:, len(inputs) :]
        mean = (models[0].logits(own[0], batch) + decoder_logits) / 2
        assert_close(ensemble.logits(params, batch), mean)
        expected.append(mean[0])

    padded = lambda tokens, length: np.pad(tokens, (0, length - len(tokens)))
    together = lambda to_tokens, length: jnp.asarray([padded([x for example in examples for x in to_tokens(example)], length)])
    number = iter((*range(1, 4), *range(1, 4)))
    packed = {
        "encoder_input_tokens": together(lambda e: e[0], 12),
        "encoder_segment_ids": together(lambda e, n=number: [next(n)] * len(e[0]), 12),
        "encoder_positions": together(lambda e: range(len(e[0])), 12),
        "decoder_input_tokens": together(lambda e: [0, *e[1][:-1]], 11),
        "decoder_target_tokens": together(lambda e: e[1], 11),
        "decoder_segment_ids": together(lambda e, n=number: [next(n)] * len(e[1]), 11),
        "decoder_positions": together(lambda e: range(len(e[1])), 11),
    }
    result = ensemble.logits(params, packed)[0]
    assert_close(result[:9], np.concatenate(expected))
    row, _ = join_inputs_and_targets(packed)
    assert jnp.max(row["decoder_positions"][row["decoder_segment_ids"] > 0]) == 6  # of 3 + 4 tokens


def test_what_is_no_ensemble_is_said():
    with pytest.raises(UserError, match=r"must have the same vocabulary size. These have \[64, 65\]"):
        Ensemble((tiny_config("causal_decoder"), tiny_config("causal_decoder", vocab_size=65)))
    with pytest.raises(UserError, match="An encoder-only network has no next-token logits"):
        Ensemble((tiny_config("causal_decoder"), tiny_config("encoder")))


def test_padding_of_an_encoder_decoders_batch_counts_for_nothing():
    """Real tokens have the logits that they have without padding, which has finite ones, so that losses are numbers."""
    ensemble, params, _, _ = members_of("encoder_decoder", "causal_decoder")
    draw = np.random.default_rng(0)
    inputs, targets = draw.integers(1, 64, (2, 6)), draw.integers(1, 64, (2, 5))
    bare = {
        "encoder_input_tokens": inputs,
        "decoder_input_tokens": np.pad(targets, [(0, 0), (1, 0)])[:, :-1],
        "decoder_target_tokens": targets,
    }
    padded = {name: np.pad(x, [(0, 0), (0, 9 if name.startswith("encoder") else 3)]) for name, x in bare.items()}
    padded["decoder_loss_weights"] = (padded["decoder_target_tokens"] > 0).astype(np.int32)
    result = ensemble.logits(params, padded)
    assert np.isfinite(result).all()
    assert_close(result[:, :5], ensemble.logits(params, bare))
    assert_close(ensemble.loss(params, padded).loss, ensemble.loss(params, bare).loss)


@pytest.mark.exhaustive
def test_run_directories_are_asked_together(tmp_path, capsys):
    """Text for text as from the mean of the members' logits; of an encoder-decoder and a decoder, and on two devices."""
    directories = []
    for name, objective in (("encoder_decoder", PREFIX_LM_ED), ("causal_decoder", FULL_LM), ("causal_decoder", FULL_LM)):
        directories.append(str(tmp_path / f"{len(directories)}"))
        assert main(flags(name, objective, directories[-1], 2, f"--gin.SEED={len(directories)}")) == 0
    members = [t5x_lab.load(directory) for directory in directories]
    for mesh in (None, "fsdp=2"):
        run = t5x_lab.load(directories, mesh=mesh)
        tokens = np.asarray([[0, 70, 80, 90]])
        inputs = np.asarray([[50, 60]])
        logits = run.logits(encoder_input_tokens=inputs, decoder_input_tokens=tokens)
        of_decoders = [m.logits(decoder_input_tokens=np.asarray([[0, 50, 60, 70, 80, 90]]))[:, 2:] for m in members[1:]]
        first = members[0].logits(encoder_input_tokens=inputs, decoder_input_tokens=tokens)
        expected = np.mean([first, *of_decoders], axis=0)
        np.testing.assert_allclose(logits, expected, rtol=1e-3, atol=1e-3 * np.abs(expected).max())
        log_probs = jax.nn.log_softmax(jnp.asarray(expected))[0]
        score = sum(float(log_probs[i, token]) for i, token in enumerate([70, 80, 90]))
        np.testing.assert_allclose(run.score([[50, 60]], [[70, 80, 90]]), [score], rtol=1e-3)
        assert len(run.generate(["a"], max_tokens=3)) == 1 and len(run.generate(["a"], max_tokens=3, beam_size=2)) == 1
    (tmp_path / "in.jsonl").write_text(json.dumps({"inputs": "a", "targets": "of words"}) + "\n")
    flag = f"--model_dir={','.join(directories)}"
    assert main(["infer", flag, f"--input={tmp_path}/in.jsonl", f"--output={tmp_path}/out.jsonl", "--mode=score"]) == 0
    scored = json.loads((tmp_path / "out.jsonl").read_text())["score"]
    np.testing.assert_allclose(scored, run.score(["a"], ["of words"]), rtol=1e-3)
    losses = {}
    for flag in (directories[0], f"{directories[0]},{directories[0]}", ",".join(directories)):
        capsys.readouterr()
        assert main(["eval", f"--model_dir={flag}", "--json"]) == 0
        ((split, metrics),) = json.loads(capsys.readouterr().out)["2"].items()
        losses[flag] = metrics["loss"]
        assert split.startswith("eval_ensemble/" if "," in flag else "eval/")
    alone, twice, of_three = losses.values()
    assert twice == pytest.approx(alone, rel=1e-5) and abs(of_three - alone) > 1e-4
    settings = json.loads((tmp_path / "0/evals/eval_ensemble_2/settings.json").read_text())
    assert settings["members"] == directories
    for function in ("save", "save_added", "with_added", "save_peft", "with_peft"):
        with pytest.raises(UserError, match="ensemble"):
            getattr(run, function)(str(tmp_path / "saved"))
    with pytest.raises(UserError, match="merged needs a single model, and this is an ensemble"):
        run.merged()
    with pytest.raises(UserError, match="An ensemble needs at least one run directory"):
        t5x_lab.load([])
