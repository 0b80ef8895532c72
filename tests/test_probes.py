"""Probes of models before fine-tuning, compared with a computation from logits."""

import gzip
import json
import math
import zlib

import numpy as np
import pytest
from conftest import shared_data
from sklearn.metrics import matthews_corrcoef, roc_auc_score

import t5x_lab
from t5x_lab.cli.main import main
from t5x_lab.config.errors import UserError
from t5x_lab.data.vocabularies.config import SpecialTokens
from t5x_lab.evaluation.config import ProbeEvaluation
from t5x_lab.evaluation.probes.probing import best_threshold, encode_question
from t5x_lab.evaluation.questions import Question
from t5x_lab.papers.gpt1.probes import BLIMP, Acceptability, Answers, Blimp, Referents, Sentiment

MODEL = ["VOCABULARY = @ByteVocabulary()", "TransformerConfig.vocab_size = 384", 'TransformerConfig.dtype = "float32"']


def run_probe(probe, records, tmp_path, number=None, architecture="decoder"):
    """A fresh model, and what the probe finds in records, one file for all splits or by split."""
    files = records if isinstance(records, dict) else {probe.split: records}
    places = {}
    for split, lines in files.items():
        path = tmp_path / f"{probe.name}-{split}.jsonl"
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        places[split] = str(path)
    more = ["RECORDS = @Records()", f"Records.files = {places!r}"]
    run = t5x_lab.from_gin([f"models/{architecture}/tiny.gin"], [*MODEL, *more], seed=2)
    run.params = {name: _louder(tree) for name, tree in run.params.items()}
    measured = ProbeEvaluation(probes=(probe,), num_examples=number).prepare(run)(run)
    assert not measured.failures
    return run, measured


def _louder(tree):
    """Returns a model of a size at which texts differ."""
    return {name: _louder(x) if isinstance(x, dict) else 3.0 * x for name, x in tree.items()}


def log_probs(run, text):
    """Returns the log probabilities of a text's bytes after the start token, computed from the model's logits alone."""
    ids = [byte + 3 for byte in text.encode()]
    logits = run.logits(decoder_input_tokens=np.array([[0, *ids[:-1]]]))[0].astype(np.float64)
    logits -= logits.max(-1, keepdims=True)
    return (logits - np.log(np.exp(logits).sum(-1, keepdims=True)))[np.arange(len(ids)), ids]


def test_the_likelier_sentence_of_a_pair(tmp_path):
    folder = shared_data("eval", "blimp")
    for name in BLIMP:
        (tmp_path / "blimp").mkdir(exist_ok=True)
        lines = gzip.open(folder / f"{name}.jsonl.gz", "rt").read().splitlines()[:3]
        (tmp_path / "blimp" / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    run = t5x_lab.from_gin(
        ["models/decoder/tiny.gin"],
        [*MODEL, "TRAIN_STEPS = 1", f'MODEL_DIR = "{tmp_path}/run"', 'MIXTURE_OR_TASK_NAME = "sotu_full_lm"',
         'TASK_FEATURE_LENGTHS = {"targets": 64}'],
        seed=2,
    )  # fmt: skip
    run.save(str(tmp_path / "run"))
    command = ["eval", f"--model_dir={tmp_path}/run", "--gin_file=recipes/blimp.gin", "--gin.RECORDS=@Records()"]
    assert main([*command, f"--gin.Records.files={tmp_path}/{{dataset}}.jsonl"]) == 0
    report = json.loads((tmp_path / "run/evals/probes/0.json").read_text())
    expected = {}
    for name in BLIMP[::6]:
        pairs = [json.loads(line) for line in (tmp_path / "blimp" / f"{name}.jsonl").read_text().splitlines()]
        sums = [[log_probs(run, pair[key]).sum() for key in ("sentence_good", "sentence_bad")] for pair in pairs]
        expected[f"blimp/{name}"] = np.mean([good > bad for good, bad in sums])
    scores = {name: part["score"] for name, part in report["report"]["probes"]["blimp"].items()}
    assert len(scores) == 67 and {name: scores[name] for name in expected} == pytest.approx(expected)
    metrics = report["results"]["blimp"]
    assert metrics["score"] == pytest.approx(np.mean(list(scores.values()))) and metrics["examples"] == 3 * 67
    assert metrics["relative"] == pytest.approx(2 * metrics["score"] - 1)


TEXTS = [f"A film of {n} {'good' if n % 3 else 'bad'} scenes" for n in range(12)]


def test_a_word_behind_a_text(tmp_path):
    records = [{"sentence": f"{text} ", "label": n % 2} for n, text in enumerate(TEXTS)]
    run, result = run_probe(Sentiment(), records, tmp_path)
    sums = [[log_probs(run, f"{text} very{word}")[-9:].sum() for word in (" negative", " positive")] for text in TEXTS]
    assert result.metrics["sst2"]["score"] == np.mean([np.argmax(pair) == n % 2 for n, pair in enumerate(sums)])
    assert result.metrics["sst2"]["chance"] == 0.5


def test_a_threshold_between_sentences(tmp_path):
    records = lambda texts, k: [{"sentence": text, "label": int(n % k > 0)} for n, text in enumerate(texts)]
    run, result = run_probe(Acceptability(), {"train": records(TEXTS, 3), "validation": records(TEXTS[::-1], 2)}, tmp_path)
    means = np.array([log_probs(run, text).mean() for text in TEXTS])
    labels = np.array([n % 3 > 0 for n in range(12)])
    best = max(matthews_corrcoef(labels, means > threshold) for threshold in [-1e9, *means])
    of_data_set = result.report["probes"]["cola"]["glue/cola"]
    assert matthews_corrcoef(labels, means > of_data_set["threshold"]) == pytest.approx(best)
    values, truth = means[::-1], np.array([n % 2 for n in range(12)])
    assert of_data_set["score"] == pytest.approx(matthews_corrcoef(truth, values > of_data_set["threshold"]))
    assert result.metrics["cola"]["auc"] == pytest.approx(roc_auc_score(truth, values))


@pytest.mark.parametrize("seed", range(20))
def test_thresholds_are_the_best_of_all(seed):
    random = np.random.default_rng(seed)
    values = random.integers(0, 6, 15) / 7 - (seed % 2) * random.random(15)
    labels = random.integers(0, 2, 15)
    best = best_threshold(values.tolist(), labels.tolist())
    every = [float(matthews_corrcoef(labels, values > threshold)) for threshold in [-math.inf, *values]]
    assert matthews_corrcoef(labels, values > best) == pytest.approx(max(every))


def test_answers_and_referents_are_compared_by_the_mean_of_their_tokens(tmp_path):
    records = [
        {
            "article": text,
            "question": "What is it?",
            "options": ["a film", "nothing at all", "two", "scenes"],
            "answer": "ABCD"[n % 4],
        }
        for n, text in enumerate(TEXTS)
    ]
    run, result = run_probe(Answers(data_sets=("race/high",)), records, tmp_path)
    right = []
    for n, record in enumerate(records):
        rows = [f"{record['article']} What is it? {option}" for option in record["options"]]
        means = [log_probs(run, row)[-len(option) - 1 :].mean() for row, option in zip(rows, record["options"], strict=True)]
        right.append(np.argmax(means) == n % 4)
    assert result.metrics["race"]["score"] == np.mean(right) and result.metrics["race"]["chance"] == 0.25
    records = [
        {"sentence": "The bee was it, near the flower, because it had pollen.", "pronoun": "it", "candidates": ["The bee", "the flower"],
         "label": n % 2} for n in range(4)
    ]  # fmt: skip
    run, result = run_probe(Referents(), {"test": records}, tmp_path)
    start = "The bee was it, near the flower, because "
    means = [log_probs(run, f"{start}{name} had pollen.")[-12:].mean() for name in ("The bee", "the flower")]
    assert result.metrics["winograd"]["score"] == 0.5 and means[0] != means[1]
    questions = [{**record, "label": int(np.argmax(means))} for record in records]
    (tmp_path / "again").mkdir()
    assert run_probe(Referents(), {"test": questions}, tmp_path / "again")[1].metrics["winograd"]["score"] == 1.0


def test_equal_texts_are_half_right_and_probes_of_one_data_set_are_two(tmp_path):
    records = [{"sentence": text, "label": 1} for text in TEXTS]
    run, result = run_probe(Sentiment(words=(" so", " so")), records, tmp_path)
    assert result.metrics["sst2"]["score"] == 0.5
    probes = (Sentiment(), Sentiment(name="other", words=(" positive", " negative")))
    both = ProbeEvaluation(probes=probes).prepare(run)(run).metrics
    assert both["sst2"]["score"] + both["other"]["score"] == pytest.approx(1.0)


def test_a_decoder_without_a_start_token_reads_what_it_does_in_training(tmp_path):
    run, _ = run_probe(Sentiment(), [{"sentence": "a", "label": 1}], tmp_path)
    run.special_tokens = SpecialTokens(start=None, end=1)
    question = encode_question(Question("", ("ab", "cd"), 0), run)
    assert question.inputs == ([1], [1]) and question.choices == ([100, 101], [102, 103])


def test_an_encoder_decoder_is_asked_too(tmp_path):
    records = [{"sentence_good": text, "sentence_bad": text[::-1]} for text in TEXTS]
    run, result = run_probe(Blimp(data_sets=("blimp/intransitive",)), records, tmp_path, architecture="t5_1_1")
    is_right = []
    for text in TEXTS:
        question = encode_question(Question("", (text, text[::-1]), 0), run)
        good, bad = run.score([list(ids) for ids in question.inputs], [list(ids) for ids in question.choices])
        is_right.append(1.0 if good > bad else 0.5 if good == bad else 0.0)
    assert result.metrics["blimp"]["score"] == pytest.approx(np.mean(is_right))


def test_what_cannot_be_asked_is_a_sentence(tmp_path):
    def failure(probe, record):
        path = tmp_path / f"{zlib.crc32(json.dumps(record).encode())}.jsonl"  # what was read is kept by its file
        path.write_text(json.dumps(record) + "\n")
        places = dict.fromkeys(("train", "validation", "test"), str(path))
        run = t5x_lab.from_gin(["models/decoder/tiny.gin"], [*MODEL, "RECORDS = @Records()", f"Records.files = {places!r}"])
        return ProbeEvaluation(probes=(probe,)).prepare(run)(run).failures[probe.name]

    assert "reads the field 'sentence', which is missing" in failure(Sentiment(), {"text": "a", "label": 1})
    assert "has the label 5 of 2 choices" in failure(Sentiment(), {"sentence": "a", "label": 5})
    assert 'has no "he"' in failure(Referents(), {"sentence": "a b", "pronoun": "he", "candidates": ["a", "b"], "label": 0})
    places = dict.fromkeys(("train", "validation"), str(tmp_path / "one.jsonl"))
    (tmp_path / "one.jsonl").write_text("{}\n")
    for files, says in (
        (places, "would choose its threshold on the examples it evaluates"),
        ({"validation": places["train"]}, 'the split "train"'),
    ):
        run = t5x_lab.from_gin(["models/decoder/tiny.gin"], [*MODEL, "RECORDS = @Records()", f"Records.files = {files!r}"])
        with pytest.raises(UserError, match=says):
            ProbeEvaluation(probes=(Acceptability(),)).prepare(run)
    run = t5x_lab.from_gin(["models/decoder/tiny.gin"], MODEL)
    with pytest.raises(
        UserError, match='Evaluation "probes": The location of the records of the data set "glue/sst2" is not set'
    ):
        ProbeEvaluation(probes=(Sentiment(),)).prepare(run)
    with pytest.raises(UserError, match="Set probes with different names"):
        ProbeEvaluation(probes=(Sentiment(), Sentiment())).prepare(run)
