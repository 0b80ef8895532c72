"""Tokenizers that convert writes for transformers: equal to the vocabulary for every kind of SentencePiece model, or refused."""

import pytest
import sentencepiece
from conftest import shared_data
from helpers import exhaustive

from t5x_lab.data.vocabularies.build import build_vocabulary
from t5x_lab.data.vocabularies.config import ByteVocabulary, SentencePieceVocabulary, SpecialTokens
from t5x_lab.runs.convert.convert import _padding_id
from t5x_lab.runs.convert.export_tokenizer import write_tokenizer

pytestmark = pytest.mark.slow

TEXTS = [
    "Hello, world!", " leading and trailing ", "two  spaces and\ttabs", "Größe naïve ﬁne", "東京 🙂", "a <sep> b<sep>c", "",
    "line\nline", "The quick brown fox; 1,234.5 of 99%",
]  # fmt: skip
OPTIONS = {
    "plain": {},
    "identity": {"normalization_rule_name": "identity", "remove_extra_whitespaces": False},
    "suffix": {"treat_whitespace_as_suffix": True},
    "symbols": {"user_defined_symbols": ["<sep>", "ing"]},
    "bytes without prefix": {"byte_fallback": True, "add_dummy_prefix": False},
    "pairs": {"model_type": "bpe"},
}


def trained(path, **options):
    vocabulary = [
        "the",
        "of",
        "quick",
        "brown",
        "fox",
        "jumps",
        "over",
        "lazy",
        "dogs",
        "Hello",
        "world",
        "naïve",
        "spaces",
        "running",
    ]
    lines = [" ".join(vocabulary[(i * k) % len(vocabulary)] for k in range(1, 9)) + f" {i}." for i in range(300)]
    size = 400 if options.get("byte_fallback") else 120
    with open(path, "wb") as file:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(lines), model_writer=file, minloglevel=2, hard_vocab_limit=False,
            **{"vocab_size": size, "pad_id": 0, "eos_id": 1, "unk_id": 2, "bos_id": -1, **options},
        )  # fmt: skip


def check_equal(folder, vocabulary):
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    for text in TEXTS:
        ids = vocabulary.encode(text)
        assert tokenizer.encode(text, add_special_tokens=False) == ids, text
        read = tokenizer.decode(ids, skip_special_tokens=True)
        assert read.strip() == vocabulary.decode([i for i in ids if i != vocabulary.unk_id]).strip()


@pytest.mark.parametrize(
    "kind", ["bytes without prefix", "identity", "suffix", "symbols", exhaustive("plain"), exhaustive("pairs")]
)
@pytest.mark.parametrize("has_encoder", [True, False])
def test_every_kind_of_model_is_exported_equal_or_not_at_all(kind, has_encoder, tmp_path):
    trained(tmp_path / "a.model", **OPTIONS[kind])
    config, folder = SentencePieceVocabulary(path=str(tmp_path / "a.model"), extra_ids=100), tmp_path / "hf"
    folder.mkdir()
    note = write_tokenizer(folder, config, SpecialTokens(), has_encoder)
    if "No tokenizer was written" in note:
        assert not list(folder.iterdir()) and kind != "plain", note
        return
    check_equal(folder, build_vocabulary(config))


@pytest.mark.parametrize("name", ["bytes", "no_prefix", "gpt_like", "default_ids", "mt5_marked"])
def test_models_that_were_exported_wrongly_are_exported_equal(name, tmp_path):
    config = SentencePieceVocabulary(path=str(shared_data("bug_inputs", "sentencepiece") / f"{name}.model"), extra_ids=0)
    for has_encoder in (True, False):
        folder = tmp_path / str(has_encoder)
        folder.mkdir()
        assert "No tokenizer" not in write_tokenizer(folder, config, SpecialTokens(), has_encoder)
        check_equal(folder, build_vocabulary(config))


def test_a_decoder_without_padding_gets_none():
    """Without pad_token_id, transformers does not mask a token; id 0 of T5's and byte vocabularies is padding."""
    from helpers import tiny_config

    decoder, encoder = tiny_config("causal_decoder"), tiny_config("encoder_decoder")
    assert _padding_id(SpecialTokens(), None, decoder) is None and _padding_id(SpecialTokens(), None, encoder) == 0
    assert _padding_id(SpecialTokens(), ByteVocabulary(), decoder) == 0
    assert _padding_id(SpecialTokens(padding=5), None, decoder) == 5
