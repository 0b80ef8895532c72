"""GPT-1 (Radford et al. 2018): its pre-training."""

import json
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import sentencepiece

from t5x_lab.cli.main import main
from t5x_lab.data.pipeline.batches import SeqioBatches, resolve_tasks
from t5x_lab.data.vocabularies.build import build_vocabulary
from t5x_lab.data.vocabularies.config import HuggingFaceVocabulary
from t5x_lab.evaluation.probes.probing import _clean_question
from t5x_lab.evaluation.questions import Question
from t5x_lab.models.model import Model
from t5x_lab.optim.groups import flat_names
from t5x_lab.papers.gpt1.standardize import standardize
from t5x_lab.runs.config.gin_config import GinConfig

STEPS = 100_000


@pytest.fixture(scope="module")
def recipe():
    more = [f"TRAIN_STEPS = {STEPS}", "MODEL_DIR = 'x'", "books/TextFiles.train = 'books/*.txt'"]
    return GinConfig(["models/gpt1/base.gin", "recipes/gpt1_pretraining.gin"], more).run()


def test_the_learning_rate_is_the_papers(recipe):
    rate = recipe.optimizer.learning_rate
    expected = {0: 0.0, 1_000: 1.25e-4, 2_000: 2.5e-4, 2_000 + 49_000: 1.25e-4, STEPS: 0.0}
    for step, value in expected.items():
        assert float(rate(jnp.int32(step))) == pytest.approx(value, abs=1e-10), step


def test_matrices_decay_and_nothing_else(recipe):
    """Weight decay applies to tensors of rank 2 and more, seen in a step whose gradient is zero. Stacked layers count apart."""
    abstract, axes = (getattr(Model(recipe.model), name) for name in ("abstract_params", "axes"))
    params = jax.tree.map(lambda x: jnp.ones((1,) * x.ndim), abstract)
    optimizer = recipe.optimizer.make(axes)
    state = optimizer.init(params)
    zeros = jax.tree.map(jnp.zeros_like, params)
    _, state = optimizer.update(zeros, state, params)  # the first step's rate is 0
    updates, _ = optimizer.update(zeros, state, params)
    decayed, all_of_them = 0, 0
    layers = recipe.model.network.num_decoder_layers
    for name, x in flat_names(updates).items():
        count = (
            3 if name.endswith(("query/kernel", "key/kernel", "value/kernel", "query/bias", "key/bias", "value/bias")) else 1
        )
        tensors = (layers if "/layers/" in f"/{name}" else 1) / count  # GPT-1's are one
        all_of_them += tensors
        decayed += tensors * bool(np.any(np.asarray(x)))
    assert (round(decayed), round(all_of_them)) == (50, 146)
    assert sum(x.size for x in jax.tree.leaves(abstract)) == 116_534_784


TEXTS = {  # by the rules of their code, by hand
    "It cost — he said – 3…  or more;;  “really”?!": "It cost - he said - 3... or more ;; “really” ? !",
    "a\n\n  b\t c (d) [e]/f*g  ": "a \n b c ( d ) [ e ] / f * g",
    'He´s "here", is_he? ~~~ yes--no \\ {x|y} +1': 'He\'s " here " , is _ he ? ~~~ yes -- no \\ { x | y } + 1',
    "Nothing to do here": "Nothing to do here",
}


@pytest.mark.parametrize("text", TEXTS)
def test_text_is_standardized_as_their_code_does(text):
    assert standardize(text) == TEXTS[text]


@pytest.mark.exhaustive
def test_books_are_cleaned_before_they_are_tokens(tmp_path):
    for number, text in enumerate(TEXTS):
        (tmp_path / f"{number}.txt").write_text(text)
    more = [
        "VOCABULARY = @ByteVocabulary()",
        "TransformerConfig.vocab_size = 384",
        f"books/TextFiles.train = '{tmp_path}/*.txt'",
    ]
    config = GinConfig(
        ["models/gpt1/tiny.gin", "recipes/gpt1_pretraining.gin"],
        [*more, "TRAIN_STEPS = 5000", "MODEL_DIR = 'x'", "BATCH_SIZE = 2", "DATA_SHARDS = 1", "DataConfig.shuffle = False"],
    )
    data = config.run().data
    batches = SeqioBatches(resolve_tasks(data, "causal_decoder", 384), data, seed=0)
    ids = next(batches)["decoder_target_tokens"].ravel().tolist()
    decoded = bytes(i - 3 if i > 1 else 10 for i in ids).decode()
    for file in sorted(tmp_path.glob("*.txt")):
        lines = [line for line in pathlib.Path(file).read_text().splitlines() if line.strip()]
        assert standardize("\n".join(lines)) in decoded


def test_windows_are_contiguous_and_batches_are_the_papers(recipe):
    data = recipe.data
    assert (data.batch_size, data.task_feature_lengths, recipe.model.z_loss) == (64, {"targets": 512}, 0.0)
    assert recipe.model.network.dropout_rate == 0.1 and recipe.optimizer.clip_global_norm is None
    assert data.texts["books"].lines_per_document >= 1_000_000


def pairs_merged(word: str, ranks: dict[tuple[str, str], int]) -> list[str]:
    """Byte-pair encoding of Sennrich et al. (2016) by hand: the pair that was merged first, over and over."""
    parts = [*word[:-1], f"{word[-1]}</w>"]
    while True:
        candidates = [(ranks[pair], i) for i in range(len(parts) - 1) if (pair := (parts[i], parts[i + 1])) in ranks]
        if not candidates:
            return parts
        _, i = min(candidates)
        parts[i : i + 2] = [parts[i] + parts[i + 1]]


def test_openais_own_vocabulary_files_are_read(tmp_path):
    """encoder_bpe_40000.json and vocab_40000.bpe, in their format; ids by hand. And one tokenizer.json alone."""
    merges = ["l o", "o w</w>", "lo w</w>", "n e", "ne w", "e r</w>", "new er</w>", "w e", "s t</w>", "we st</w>", ". .</w>"]
    letters = "abcdefghijklmnopqrstuvwxyz.,"
    tokens = ["<unk>", *letters, *(f"{letter}</w>" for letter in letters), *(pair.replace(" ", "") for pair in merges)]
    (tmp_path / "encoder_bpe_40000.json").write_text(json.dumps({token: i for i, token in enumerate(tokens)}))
    (tmp_path / "vocab_40000.bpe").write_text("\n".join(["#version: 0.2", *merges, ""]))
    vocabulary = build_vocabulary(HuggingFaceVocabulary(str(tmp_path)))
    ranks = {tuple(pair.split()): i for i, pair in enumerate(merges)}
    text = "Low lower, newest NEWER west. 5 low"
    expected = [tokens.index(part) if part in tokens else 0 for word in re.findall(r"\w+|[.,]", text.lower())
                for part in pairs_merged(word, ranks)]  # fmt: skip
    assert vocabulary.encode(text) == expected and vocabulary.vocab_size == len(tokens)
    assert vocabulary.decode(vocabulary.encode("low newer west")) == "low newer west"
    vocabulary.save(str(tmp_path / "saved"))
    alone = build_vocabulary(HuggingFaceVocabulary(str(tmp_path / "saved" / "tokenizer.json")))
    assert alone.encode(text) == expected


def test_a_vocabulary_is_trained_on_standardized_text(tmp_path):
    (tmp_path / "book.txt").write_text("\n".join(f'He said — "well, {i}" – and left…' for i in range(40)))
    command = ["vocab", f"--input={tmp_path}/*.txt", "--model_type=bpe", "--size=80"]
    for flag in (["--standardize"], []):
        assert main([*command, *flag, f"--output={tmp_path}/v.model"]) == 0
        pieces = sentencepiece.SentencePieceProcessor(model_file=f"{tmp_path}/v.model")
        assert ("▁," in [pieces.id_to_piece(i) for i in range(len(pieces))]) == bool(flag)  # a comma behind a space
        (tmp_path / "v.model").unlink()


def test_probes_texts_are_cleaned_and_keep_the_spaces_between_them():
    question = Question("He said—“No”  very", (" bad…", " good"), 1)
    cleaned = _clean_question(question, standardize)
    assert (cleaned.inputs, cleaned.choices) == (standardize(question.inputs), (" bad...", " good"))
    several = _clean_question(Question(("a—b ", "c"), ("  x", "y"), 0), standardize)
    assert (several.inputs, several.choices) == (("a - b ", "c"), (" x", "y"))
    assert _clean_question(question, None) is question
