"""Models of `transformers` with random weights and tokenizers of each kind: they write and score here what they do there.

Decoders with start tokens or none, padding ids that are tokens, SentencePiece, byte-level and byte vocabularies; see `MODELS`.
"""

import contextlib
import dataclasses
import json
import pathlib
import shutil

import numpy as np
import pytest
from helpers import exhaustive_except
from imported_models import MODELS, WORDS, bpe, save

import t5x_lab
from t5x_lab.checkpoints.formats.huggingface import directory as huggingface
from t5x_lab.checkpoints.formats.location import find
from t5x_lab.cli.main import main
from t5x_lab.config.errors import UserError
from t5x_lab.data.pipeline.batches import resolve_tasks
from t5x_lab.data.pipeline.rows import training_shard
from t5x_lab.data.vocabularies.build import build_vocabulary
from t5x_lab.data.vocabularies.config import SpecialTokens
from t5x_lab.decoding.beam_search import BeamConfig
from t5x_lab.observe.metrics import read_metrics
from t5x_lab.runs.convert.convert import convert

torch = pytest.importorskip("torch", reason="pip install -e '.[compare]' compares with transformers")

pytestmark = pytest.mark.slow

PROMPTS = [WORDS, "The Congress", "!"]
TARGETS = [" of the United States", " shall! have", " power"]
TEXTS = [WORDS, "!", "Straße  two  spaces", " begins with one", "line\nline", "東京 🙂", "say <answer> {now"]


IN_MAKE_TEST = ("t5_1_1", "byt5", "gpt1", "llama3", "qwen2_tied", "qwen3", "gemma2")


@pytest.fixture(scope="module", params=exhaustive_except(MODELS, IN_MAKE_TEST))
def imported(request, tmp_path_factory):
    """(folder, transformers' model, its tokenizer, ours)"""
    folder = tmp_path_factory.mktemp("imported") / request.param
    hf_model, tokenizer = save(request.param, folder)
    return folder, hf_model, tokenizer, t5x_lab.load(str(folder), dtype="float32")


def greedy(hf_model, tokenizer, prompt: str, length: int, most: int = 10_000) -> list[int]:
    """Returns the tokens that transformers generates after the last `most` tokens of a prompt, up to its end token."""
    ids = torch.tensor([tokenizer(prompt).input_ids[-most:]])
    with torch.no_grad():
        written = hf_model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=length, do_sample=False, num_beams=1
        )
    written = written[0, 1 if hf_model.config.is_encoder_decoder else ids.shape[1] :].tolist()
    return written[: written.index(tokenizer.eos_token_id)] if tokenizer.eos_token_id in written else written


def log_probability(hf_model, tokenizer, prompt: str, target: str) -> float:
    """Returns the log probability of the target's tokens after the prompt's tokens."""
    before, after = tokenizer(prompt).input_ids, tokenizer(target, add_special_tokens=False).input_ids
    with torch.no_grad():
        if hf_model.config.is_encoder_decoder:
            begun = torch.tensor([[hf_model.config.decoder_start_token_id, *after[:-1]]])
            logits = hf_model(input_ids=torch.tensor([before]), decoder_input_ids=begun).logits[0]
        else:
            logits = hf_model(input_ids=torch.tensor([before + after[:-1]])).logits[0, len(before) - 1 :]
    return logits.log_softmax(-1)[range(len(after)), after].sum().item()


def test_it_generates_and_scores_as_transformers_does(imported):
    _, hf_model, tokenizer, run = imported
    for text in TEXTS:
        assert list(run.vocabulary.encode(text)) == tokenizer(text, add_special_tokens=False).input_ids, text
    first = [] if hf_model.config.is_encoder_decoder else run._start_ids(True)
    before, after = run.input_affixes
    ids = [[*before, *run.vocabulary.encode(prompt), *after] for prompt in PROMPTS]
    assert [[*first, *row] for row in ids] == [tokenizer(prompt).input_ids for prompt in PROMPTS]
    tokens, _ = run.generate_tokens(ids, max_tokens=24)
    for prompt, row, (text,) in zip(PROMPTS, tokens, run.generate(PROMPTS, max_tokens=24), strict=True):
        written = greedy(hf_model, tokenizer, prompt, 24)
        assert row[: len(written)].tolist() == written
        if hf_model.config.is_encoder_decoder:
            assert text == tokenizer.decode(written, skip_special_tokens=True)
    best, _ = run.search_tokens(ids, max_tokens=8, beams=BeamConfig(2))
    beams = run.generate(PROMPTS, max_tokens=8, beam_size=2)
    assert beams == [[run._texts.completion(prompt, row[0])] for prompt, row in zip(ids, best, strict=True)]
    single_beam, _ = run.search_tokens(ids, max_tokens=8, beams=BeamConfig(1, 0.6))
    texts = [[run._texts.completion(prompt, row[0])] for prompt, row in zip(ids, single_beam, strict=True)]
    assert run.generate(PROMPTS, max_tokens=8, beam_alpha=0.6) == texts
    expected = [log_probability(hf_model, tokenizer, *pair) for pair in zip(PROMPTS, TARGETS, strict=True)]
    np.testing.assert_allclose(run.score(PROMPTS, TARGETS), expected, rtol=1e-4)


def instances_of(kind: str, *arguments) -> list:
    """Requests of lm-eval's."""
    from lm_eval.api.instance import Instance

    return [Instance(kind, {}, args, i) for i, args in enumerate(arguments)]


def test_lm_eval_finds_what_it_finds_with_its_own_model(imported, monkeypatch):
    """Log-likelihoods, of empty and blank contexts too, rolling ones over several windows, and texts with stops."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    pytest.importorskip("lm_eval", reason="pip install -e '.[harness]' compares with lm-eval")
    from lm_eval.models.huggingface import HFLM

    from t5x_lab.evaluation.harness.model import HarnessModel

    _, hf_model, tokenizer, run = imported
    has_encoder = hf_model.config.is_encoder_decoder
    backend = "seq2seq" if has_encoder else "causal"
    hf = HFLM(hf_model, tokenizer=tokenizer, backend=backend, max_length=64, device="cpu", batch_size=1)
    lab = HarnessModel(run, max_length=64)
    pairs = list(zip([*PROMPTS, ""], [*TARGETS, "The Congress"], strict=True))
    log_likelihoods = [model.loglikelihood(instances_of("loglikelihood", *pairs)) for model in (lab, hf)]
    for (ours_, flag), (theirs_, their_flag) in zip(*log_likelihoods, strict=True):
        assert ours_ == pytest.approx(theirs_, rel=1e-4) and flag == their_flag
    long = (" ".join([WORDS] * 3),)
    rolling = [model.loglikelihood_rolling(instances_of("loglikelihood_rolling", long, ("!",))) for model in (lab, hf)]
    np.testing.assert_allclose(*rolling, rtol=1e-4)
    wishes = [(prompt, {"until": [","], "max_gen_toks": 24}) for prompt in PROMPTS]
    ours_, theirs_ = (model.generate_until(instances_of("generate_until", *wishes)) for model in (lab, hf))
    if has_encoder:  # the decoder writes more than `max_gen_toks` there: as many tokens more as the encoder read
        written = [greedy(hf_model, tokenizer, prompt, 24, most=64) for prompt in PROMPTS]
        theirs_ = [tokenizer.decode(ids, skip_special_tokens=True).split(",")[0] for ids in written]
    else:
        most = HFLM(hf_model, tokenizer=tokenizer, backend=backend, device="cpu").max_length
        assert HarnessModel(run).max_length == min(most, run.max_positions or most)
    assert ours_ == theirs_ and any(ours_)


def test_a_run_keeps_it_whole_and_gives_it_back(imported, tmp_path, capsys):
    """Converted into a run and exported again: parameters, tokenizer, ids and answers are those of the first files."""
    import transformers

    folder, hf_model, tokenizer, imported_run = imported
    convert(find(str(folder)), str(tmp_path / "run"), "t5x_lab")
    run = t5x_lab.load(str(tmp_path / "run"), dtype="float32")
    assert run.special_tokens == imported_run.special_tokens and run.input_eos == imported_run.input_eos
    inspected = []
    for where in (folder, tmp_path / "run"):
        assert main(["inspect", str(where), "--json"]) == 0
        inspected.append(json.loads(capsys.readouterr().out)["text"])
        del inspected[-1]["vocabulary"]  # the files' names
    inside, whole = tokenizer("power", add_special_tokens=False).input_ids, tokenizer("power").input_ids
    before, after = whole[: whole.index(inside[0])], whole[whole.index(inside[0]) + len(inside) :]
    start = hf_model.config.decoder_start_token_id if hf_model.config.is_encoder_decoder else before.pop(0) if before else None
    sentinels = {name: i for name, i in tokenizer.get_vocab().items() if name.startswith("<extra_id_")}
    assert (
        inspected[0]
        == inspected[1]
        == {
            "dtype": "float32",
            "start": start,
            "end": tokenizer.eos_token_id,
            "padding": hf_model.config.pad_token_id or 0,
            "input_start": before,
            "input_eos": hf_model.config.is_encoder_decoder,
            "input_end": inspected[0]["input_end"] and after,  # said where it may be another than ends texts
            "sentinels": len(sentinels),
        }
    )
    np.testing.assert_allclose(run.score(PROMPTS, TARGETS), imported_run.score(PROMPTS, TARGETS), rtol=1e-6)
    (tmp_path / "prompts.txt").write_text("".join(f"{prompt}\n" for prompt in PROMPTS))
    files = [f"--input={tmp_path}/prompts.txt", f"--output={tmp_path}/out.jsonl", "--max_tokens=8"]
    assert main(["infer", f"--model_dir={tmp_path}/run", *files]) == 0
    written = [json.loads(line)["prediction"] for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [[text] for text in written] == imported_run.generate(PROMPTS, max_tokens=8)
    assert run.generate(PROMPTS, max_tokens=8) == imported_run.generate(PROMPTS, max_tokens=8)
    again = tmp_path / "again"
    convert(find(str(tmp_path / "run")), str(again), "hf")
    auto = transformers.AutoModelForSeq2SeqLM if hf_model.config.is_encoder_decoder else transformers.AutoModelForCausalLM
    model = auto.from_pretrained(again, attn_implementation="eager").eval()
    written = transformers.AutoTokenizer.from_pretrained(pathlib.Path(again))
    for text in [*TEXTS, *(f"a {token} b" for token in tokenizer.all_special_tokens)]:
        assert written(text).input_ids == tokenizer(text).input_ids, text
    assert [greedy(model, written, prompt, 12) for prompt in PROMPTS] == [greedy(hf_model, tokenizer, p, 12) for p in PROMPTS]
    for prompt, target in zip(PROMPTS, TARGETS, strict=True):
        expected = log_probability(hf_model, tokenizer, prompt, target)
        assert log_probability(model, written, prompt, target) == pytest.approx(expected, rel=1e-5)


@pytest.mark.exhaustive
def test_a_model_without_a_start_token_is_trained_on_and_resumed(tmp_path, capsys):
    """Each document follows the end token of the one before; `!`, whose id is 0, carries loss as any token does."""
    _, tokenizer = save("qwen2", tmp_path / "hf")
    convert(find(str(tmp_path / "hf")), str(tmp_path / "run"), "t5x_lab")
    (tmp_path / "text.txt").write_text("Stop! Go!\n" * 400)
    train = [
        "train", f"--gin_file={tmp_path}/run/config.gin", f"--gin.INITIAL_CHECKPOINT_PATH={tmp_path}/hf", "--gin.BATCH_SIZE=8",
        "--gin.MIXTURE_OR_TASK_NAME=files_full_lm", f"--gin.TextFiles.train={tmp_path}/text.txt", "--gin.DATA_SHARDS=1",
        '--gin.TASK_FEATURE_LENGTHS={"targets": 32}', "--gin.CHECKPOINT_PERIOD=2", "--gin.TextFiles.lines_per_document=1",
    ]  # fmt: skip
    for directory, steps in (("whole", 4), ("parts", 2), ("parts", 4)):
        assert main([*train, f"--gin.MODEL_DIR={tmp_path}/{directory}", f"--gin.TRAIN_STEPS={steps}"]) == 0
    whole, parts = (
        [line["loss"] for line in read_metrics(str(tmp_path / name)) if line["split"] == "train"] for name in ("whole", "parts")
    )
    assert len(whole) == 4 and whole == parts
    data = t5x_lab.load(str(tmp_path / "whole")).config.data()
    batch = next(
        training_shard(resolve_tasks(data, "causal_decoder", 512), data, seed=0, rates=[1.0], shard=0).as_numpy_iterator()
    )
    ids, vocabulary = tokenizer("Stop!").input_ids, build_vocabulary(data.vocabulary)
    assert 0 in ids and vocabulary.decode([*ids, tokenizer.eos_token_id, 0, 0]) == "Stop!"  # as rows of predictions are
    assert batch["decoder_input_tokens"][0, 0] == tokenizer.eos_token_id
    assert (batch["decoder_target_tokens"] == 0).any() and batch["decoder_loss_weights"].all()
    with pytest.raises(UserError, match="DataConfig.pack is False, but unpacked rows are padded with id 0, which is a token"):
        resolve_tasks(dataclasses.replace(data, pack=False), "causal_decoder", 512)
    resolve_tasks(dataclasses.replace(data, special_tokens=SpecialTokens(end=7)), "causal_decoder", 512)
    assert (
        f"Training texts end with the vocabulary's EOS token {tokenizer.eos_token_id}, but generation stops at"
        in capsys.readouterr().err
    )


def test_a_tokenizer_without_an_end_token_writes_all_that_was_asked_for(tmp_path, monkeypatch, capsys):
    """OpenAI's GPT-1 has none; a conversion makes none up."""
    monkeypatch.setitem(MODELS, "endless", dataclasses.replace(MODELS["gpt1"], tokenizer=bpe(eos=None)))
    hf_model, tokenizer = save("endless", tmp_path / "hf")
    imported_run = t5x_lab.load(str(tmp_path / "hf"), dtype="float32")
    ids = [tokenizer(prompt).input_ids for prompt in PROMPTS]
    prompt = torch.tensor(ids[:1])
    options = dict(attention_mask=torch.ones_like(prompt), max_new_tokens=24, do_sample=False, num_beams=1, pad_token_id=0)
    expected = hf_model.generate(prompt, **options)
    assert imported_run.generate_tokens(ids[:1], max_tokens=24)[0].tolist() == expected[:, len(ids[0]) :].tolist()
    with pytest.raises(UserError, match="The tokenizer has no EOS token"):
        imported_run.score(PROMPTS, TARGETS, eos=True)
    harness = pytest.importorskip("t5x_lab.evaluation.harness.model", reason="pip install -e '.[harness]' asks as lm-eval does")
    lab = harness.HarnessModel(imported_run, max_length=64)
    scored = lab.loglikelihood(instances_of("loglikelihood", ("", WORDS), (PROMPTS[0], TARGETS[0])))
    assert scored[0] == (-np.inf, False) and scored[1][0] == pytest.approx(imported_run.score(PROMPTS[:1], TARGETS[:1])[0])
    assert lab.loglikelihood_rolling(instances_of("loglikelihood_rolling", (WORDS,))) == [-np.inf]
    assert lab.generate_until(instances_of("generate_until", ("", {"until": [], "max_gen_toks": 8}))) == [""]
    assert capsys.readouterr().err.count("empty context, which a model without a start or EOS token cannot read.") == 3
    convert(find(str(tmp_path / "hf")), str(tmp_path / "run"), "t5x_lab")
    convert(find(str(tmp_path / "run")), str(tmp_path / "again"), "hf")
    assert json.loads((tmp_path / "again" / "config.json").read_text()).get("eos_token_id") is None
    assert t5x_lab.load(str(tmp_path / "again")).eos_id == -1
    train = ["train", f"--gin_file={tmp_path}/run/config.gin", "--gin.MODEL_DIR=new", "--gin.MIXTURE_OR_TASK_NAME=sotu_full_lm"]
    assert main([*train, "--gin.TRAIN_STEPS=1", '--gin.TASK_FEATURE_LENGTHS={"targets": 32}']) == 2


def test_any_of_several_end_tokens_ends_what_is_written(tmp_path):
    hf_model, tokenizer = save("llama3", tmp_path / "hf")
    before = greedy(hf_model, tokenizer, WORDS, 24)
    ends = [tokenizer.eos_token_id, before[9]]
    hf_model.config.eos_token_id = hf_model.generation_config.eos_token_id = ends
    hf_model.save_pretrained(tmp_path / "hf")
    expected = greedy(hf_model, tokenizer, WORDS, 24)
    assert expected == before[: before.index(ends[1]) + 1]
    convert(find(str(tmp_path / "hf")), str(tmp_path / "run"), "t5x_lab")
    for where in ("hf", "run"):
        run = t5x_lab.load(str(tmp_path / where), dtype="float32")
        tokens, _ = run.generate_tokens([run.vocabulary.encode(WORDS)], max_tokens=24)
        assert tokens[0].tolist() == [*expected, *[0] * (24 - len(expected))]
        assert run.stop_ids == tuple(ends) and run.eos_id == ends[0]
        best, _ = run.search_tokens([run.vocabulary.encode(WORDS)], max_tokens=12)
        assert all(not set(row[: len(row[row > 0]) - 1].tolist()) & set(ends) for row in best[0])
    convert(find(str(tmp_path / "run")), str(tmp_path / "again"), "hf")
    assert json.loads((tmp_path / "again" / "generation_config.json").read_text())["eos_token_id"] == ends


def test_special_tokens_are_left_out_of_answers(tmp_path):
    """`generate` and the harness leave them out, as transformers and lm-eval do. The first token of this model is a sentinel."""
    pytest.importorskip("lm_eval", reason="pip install -e '.[harness]' compares with lm-eval")
    from t5x_lab.evaluation.harness.model import HarnessModel

    hf_model, tokenizer = save("t5_1_1", tmp_path / "hf")
    sentinel, best = tokenizer.convert_tokens_to_ids("<extra_id_7>"), greedy(hf_model, tokenizer, WORDS, 1)[0]
    with torch.no_grad():
        hf_model.lm_head.weight[sentinel] = 1.01 * hf_model.lm_head.weight[best]
    hf_model.save_pretrained(tmp_path / "hf")
    ids = greedy(hf_model, tokenizer, WORDS, 12)
    assert ids[0] == sentinel and "<extra_id_7>" in tokenizer.decode(ids)
    run, expected = t5x_lab.load(str(tmp_path / "hf"), dtype="float32"), tokenizer.decode(ids, skip_special_tokens=True)
    request = instances_of("generate_until", (WORDS, {"until": [], "max_gen_toks": 12}))
    assert HarnessModel(run).generate_until(request) == [run.generate([WORDS], max_tokens=12)[0][0]] == [expected]


def test_special_tokens_of_a_directory_without_a_tokenizer(tmp_path):
    config = {"model_type": "llama", "bos_token_id": 5, "eos_token_id": [7, 8], "pad_token_id": -1}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert huggingface.special_tokens(tmp_path, 100) == {"start": 5, "end": (7, 8), "padding": 0}


def test_an_exported_decoders_special_tokens_are_pieces_of_its_model(tmp_path):
    """Tests a SentencePiece model with special names and ids, and without a padding piece."""
    import sentencepiece
    import transformers

    with open(tmp_path / "own.model", "wb") as file:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(WORDS.split() * 50), model_writer=file, vocab_size=60, unk_id=0, bos_id=2, eos_id=1, pad_id=-1,
            eos_piece="<eos>", minloglevel=2, hard_vocab_limit=False,
        )  # fmt: skip
    bindings = [f"SentencePieceVocabulary.path = '{tmp_path}/own.model'", "SentencePieceVocabulary.extra_ids = 0"]
    sizes = ["TransformerConfig.vocab_size = 128", "SpecialTokens.start = 2"]
    run = t5x_lab.from_gin(["models/rotary_decoder/tiny.gin"], [*bindings, *sizes])
    run.save(str(tmp_path / "run"))
    convert(find(str(tmp_path / "run")), str(tmp_path / "hf"), "hf")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    assert len(tokenizer) == run.vocabulary.vocab_size
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.eos_token) == (2, 1, "<eos>")
    for text in (WORDS, "power  to lay"):
        assert tokenizer(text).input_ids == [2, *run.vocabulary.encode(text)]


def test_code_beside_a_model_is_never_run(tmp_path, monkeypatch):
    """Nor is it asked for: whoever says yes to everything is asked nothing."""
    save("qwen2", tmp_path / "hf")
    described = json.loads((tmp_path / "hf/tokenizer_config.json").read_text())
    described = {**described, "tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.Own", None]}}
    (tmp_path / "hf/tokenizer_config.json").write_text(json.dumps(described))
    (tmp_path / "hf/own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Own: pass\n")
    monkeypatch.setattr("builtins.input", lambda *unused: "y")
    with contextlib.suppress(UserError):
        t5x_lab.load(str(tmp_path / "hf"))
    assert not (tmp_path / "ran").exists()


def test_what_greedy_decoding_does_not_heed_is_said(tmp_path, capsys):
    save("qwen2", tmp_path / "hf")
    settings = tmp_path / "hf/generation_config.json"
    t5x_lab.load(str(tmp_path / "hf"))
    assert "generation_config.json sets" not in capsys.readouterr().err
    generation = {"repetition_penalty": 1.3, "do_sample": True, "num_beams": 1, "min_length": 0, "temperature": 0.7}
    settings.write_text(json.dumps({**json.loads(settings.read_text()), **generation}))
    t5x_lab.load(str(tmp_path / "hf"))
    assert "sets do_sample, repetition_penalty, which is ignored" in capsys.readouterr().err


def test_a_model_without_a_head_is_told_from_one_that_lost_it(tmp_path, capsys):
    from safetensors.numpy import load_file, save_file

    hf_model, _ = save("llama_grouped", tmp_path / "hf")
    whole = load_file(tmp_path / "hf/model.safetensors")
    hf_model.model.save_pretrained(tmp_path / "hf")  # as `LlamaModel`
    headless = t5x_lab.load(str(tmp_path / "hf"))
    assert "has no language-modeling head" in capsys.readouterr().err
    np.testing.assert_array_equal(headless.params["logits_dense"]["kernel"], whole["model.embed_tokens.weight"].T)
    save_file({name: x for name, x in whole.items() if name != "lm_head.weight"}, tmp_path / "hf/model.safetensors")
    with pytest.raises(UserError, match="is incomplete: lm_head.weight, which its config.json requires, is missing"):
        t5x_lab.load(str(tmp_path / "hf"))


def test_a_tensor_of_t5s_that_no_model_reads_is_left_out(tmp_path):
    """The published T5 1.0 have it."""
    from safetensors.numpy import load_file, save_file

    save("t5_1_0", tmp_path / "hf")
    file = tmp_path / "hf/model.safetensors"
    extra = {"decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight": np.zeros((32, 4), np.float32)}
    save_file({**load_file(file), **extra}, file)
    assert t5x_lab.load(str(tmp_path / "hf")).num_parameters > 0


def test_a_directory_that_was_replaced_is_read_anew(tmp_path):
    save("qwen2", tmp_path / "hf")
    before = t5x_lab.load(str(tmp_path / "hf")).vocabulary.encode(WORDS)
    shutil.rmtree(tmp_path / "hf")
    _, tokenizer = save("llama", tmp_path / "hf")
    after = t5x_lab.load(str(tmp_path / "hf")).vocabulary.encode(WORDS)
    assert list(after) == tokenizer(WORDS, add_special_tokens=False).input_ids != list(before)


def test_ids_that_the_model_does_not_have(tmp_path):
    save("t5_1_0", tmp_path / "hf")
    config = json.loads((tmp_path / "hf/config.json").read_text())
    (tmp_path / "hf/generation_config.json").unlink()
    (tmp_path / "hf/config.json").write_text(json.dumps({**config, "eos_token_id": 10**12}))
    assert t5x_lab.load(str(tmp_path / "hf")).stop_ids == (1,)  # the tokenizer's
    (tmp_path / "hf/config.json").write_text(json.dumps({**config, "decoder_start_token_id": 7000}))
    with pytest.raises(UserError, match="has decoder_start_token_id 7000"):
        t5x_lab.load(str(tmp_path / "hf"))


def test_a_model_without_a_tokenizer_reads_and_writes_ids(tmp_path):
    hf_model, tokenizer = save("llama_grouped", tmp_path / "hf")
    for file in (tmp_path / "hf").glob("tokenizer*"):
        file.unlink()
    run, ids = t5x_lab.load(str(tmp_path / "hf"), dtype="float32"), tokenizer(WORDS).input_ids
    tokens, _ = run.generate_tokens([ids[1:]], max_tokens=8)
    written = greedy(hf_model, tokenizer, WORDS, 8)
    assert tokens[0, : len(written)].tolist() == written
    for wrong in (None, 2.5, [[3]], [[1], [2, 3]]):
        with pytest.raises(UserError, match="max_tokens is"):
            run.generate_tokens([ids], max_tokens=wrong)
    with pytest.raises(UserError, match="is neither a text nor a list of token ids"):
        run.generate_tokens([None], max_tokens=1)


def test_an_encoders_inputs_without_an_end_token_are_exported_as_such(tmp_path):
    import transformers

    sizes = ["TransformerConfig.vocab_size = 384", "VOCABULARY = @ByteVocabulary()", "SpecialTokens.input_eos = False"]
    t5x_lab.from_gin(["models/byt5/tiny.gin"], sizes).save(str(tmp_path / "run"))
    convert(find(str(tmp_path / "run")), str(tmp_path / "hf"), "hf")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    run, again = (t5x_lab.load(str(tmp_path / name)) for name in ("run", "hf"))
    assert tokenizer("power").input_ids == run._texts.encode_input("power") == again._texts.encode_input("power")
    assert not again.input_eos
