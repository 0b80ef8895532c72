"""Metrics of generated answers, by the names that promptsource's templates have in their metadata.

A prediction is compared with all accepted answers of its record, and the best match counts, as in SQuAD's and TriviaQA's
evaluation. FLAN's are exact match and F1 for reading comprehension and closed-book QA, BLEU for translation, and ROUGE for
summaries and structure to text (Wei et al. 2022).
"""

import json
from collections.abc import Callable, Iterable, Sequence

import numpy as np

References = Sequence[Sequence[str]]  # accepted answers, by example


def accuracy(targets: References, predictions: Sequence[str]) -> dict[str, float]:
    """Returns the share of predictions that equal an accepted answer, in percent."""
    return {"accuracy": 100.0 * float(np.mean([text in accepted for accepted, text in zip(targets, predictions, strict=True)]))}


def bleu(targets: References, predictions: Sequence[str]) -> dict[str, float]:
    """Returns BLEU of a corpus with sacreBLEU's international tokenization, as the `t5` library does (Papineni et al. 2002)."""
    import sacrebleu

    most = max(map(len, targets))
    columns = [[accepted[i] if i < len(accepted) else None for accepted in targets] for i in range(most)]
    score = sacrebleu.corpus_bleu(list(predictions), columns, tokenize="intl").score  # type: ignore[arg-type]  # None is left out
    return {"bleu": score}


def rouge(targets: References, predictions: Sequence[str]) -> dict[str, float]:
    """Returns the mean F1 of ROUGE-1, -2 and -Lsum in percent (Lin 2004)."""
    from rouge_score import rouge_scorer

    keys = ("rouge1", "rouge2", "rougeLsum")
    scorer = rouge_scorer.RougeScorer(keys)
    lines = lambda text: text.replace(" . ", " .\n")
    scores = [
        scorer.score_multi(list(map(lines, accepted)), lines(text)) for accepted, text in zip(targets, predictions, strict=True)
    ]
    return {key: 100.0 * float(np.mean([score[key].fmeasure for score in scores])) for key in keys}


def squad(targets: References, predictions: Sequence[str]) -> dict[str, float]:
    """Returns SQuAD's exact match `em` and `f1` over words in percent (Rajpurkar et al. 2016)."""
    from t5.evaluation import metrics

    return metrics.squad(targets, predictions)


def trivia_qa(targets: References, predictions: Sequence[str]) -> dict[str, float]:
    """Returns TriviaQA's exact match `em` and `f1` over words in percent (Joshi et al. 2017)."""
    from t5.evaluation import metrics

    return metrics.trivia_qa(targets, predictions)


METRICS: dict[str, Callable[[References, Sequence[str]], dict[str, float]]] = {
    "Accuracy": accuracy, "BLEU": bleu, "ROUGE": rouge, "Squad": squad, "Trivia QA": trivia_qa,
}  # fmt: skip


def metric_fns(names: Iterable[str]) -> list[Callable]:
    """Returns SeqIO metric functions of the names that are known. They take the JSON of `decode_references` as targets."""
    return [METRICS[name] for name in names if name in METRICS]


def decode_references(text: str, example: dict, is_target: bool = False, **unused: object) -> object:
    """Postprocesses predictions, and returns the accepted answers of an example as targets. See `seqio.Task`."""
    return json.loads(example["references"]) if is_target else text
