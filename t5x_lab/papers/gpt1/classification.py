"""Classification tasks of GPT-1 (Radford et al. 2018, Table 1)."""

import dataclasses

from t5x_lab.prompts.classification.config import Classification, register_classifications

_NLI, _WITH_NOT = ("entailment", "neutral", "contradiction"), ("entailment", "not_entailment")
_SENTENCES, _HYPOTHESIS = ("sentence1", "sentence2"), ("premise", "hypothesis")
_MNLI = Classification("glue/mnli_matched", _HYPOTHESIS, _NLI)
_IS_PARAPHRASE = ("not_equivalent", "equivalent")


def _race(part: str) -> Classification:
    letters = ("A", "B", "C", "D")
    return Classification(f"race/{part}", (("article", "question"),), letters, ("options",), "answer", letters)


# The data sets of Radford et al. (2018), Table 1, and COPA.
register_classifications(
    (
        Classification("snli", _HYPOTHESIS, _NLI, left_out=(-1, "-")),
        _MNLI,
        dataclasses.replace(_MNLI, data_set="glue/mnli_mismatched"),
        Classification("glue/qnli", ("question", "sentence"), _WITH_NOT),
        Classification("glue/rte", _SENTENCES, _WITH_NOT),
        Classification("scitail", _HYPOTHESIS, ("entails", "neutral")),
        *map(_race, ("all", "middle", "high")),
        Classification(
            "story_cloze/2016",
            (tuple(f"input_sentence_{i}" for i in range(1, 5)),),
            ("1", "2"),
            ("sentence_quiz1", "sentence_quiz2"),
            "answer_right_ending",
            (1, 2),
        ),
        Classification("super_glue/copa", (("premise", "question"),), ("choice1", "choice2"), ("choice1", "choice2")),
        Classification("glue/mrpc", _SENTENCES, _IS_PARAPHRASE, symmetric=True, metrics=("f1", "accuracy")),
        Classification(
            "glue/qqp", ("question1", "question2"), ("not_duplicate", "duplicate"), symmetric=True, metrics=("f1", "accuracy")
        ),
        Classification(
            "glue/stsb", _SENTENCES, tuple("012345"), symmetric=True, is_score=True, metrics=("pearson", "spearman")
        ),
        Classification("glue/sst2", ("sentence",), ("negative", "positive")),
        Classification("glue/cola", ("sentence",), ("unacceptable", "acceptable"), metrics=("matthews", "accuracy")),
    )
)
