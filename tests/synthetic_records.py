"""Records with the fields of the field's data sets, and words that mean nothing, for tests and benchmarks without the data.

`SETS[name](r)` makes one record of a data set; r is a `Words`.
"""

import gzip
import json
import pathlib
import random
import zlib

import t5x_lab.tasks  # noqa: F401  (registers the data sets)
from t5x_lab.prompts.data_sets import DATA_SETS

_SYLLABLES = [
    "ba",
    "co",
    "di",
    "fu",
    "ga",
    "hel",
    "in",
    "jo",
    "ka",
    "lu",
    "mer",
    "no",
    "or",
    "pi",
    "qua",
    "ro",
    "sa",
    "tu",
    "ven",
    "wi",
]


class Words:
    """Draws what records are made of: the same for the same name and number."""

    def __init__(self, name: str, number: int):
        self._random = random.Random(zlib.crc32(f"{name} {number}".encode()))

    def word(self) -> str:
        return "".join(self._random.choice(_SYLLABLES) for _ in range(self._random.randint(1, 3)))

    def phrase(self, least: int = 2, most: int = 5) -> str:
        return " ".join(self.word() for _ in range(self._random.randint(least, most)))

    def sentence(self) -> str:
        return self.phrase(5, 14).capitalize() + "."

    def text(self, sentences: int = 4) -> str:
        return " ".join(self.sentence() for _ in range(sentences))

    def number(self, least: int, most: int) -> int:
        """Returns a random integer from `least` to `most`, inclusive."""
        return self._random.randint(least, most)

    def one_of(self, choices):
        return self._random.choice(choices)

    def many(self, make, least: int, most: int) -> list:
        return [make() for _ in range(self._random.randint(least, most))]


def question(r):
    return r.phrase(5, 10).capitalize() + "?"


def option(r):
    """Long enough to be no other."""
    return r.phrase(3, 6)


def options(r, count):
    return r.many(lambda: option(r), count, count)


def labelled(r, classes):
    return {"text": r.text(3), "label": r.number(0, classes - 1)}


def entailment(r, classes):
    return {"premise": r.text(2), "hypothesis": r.sentence(), "label": r.number(0, classes - 1)}


def paraphrase(r):
    return {"sentence1": r.sentence(), "sentence2": r.sentence(), "label": r.number(0, 1)}


def summarized(r):
    return {"document": r.text(4), "summary": r.sentence()}


def answered(r):
    """A question whose answer stands in its passage."""
    before, answer = r.text(2), r.phrase(1, 4)
    context = f"{before} {r.phrase().capitalize()} {answer} {r.phrase()}. {r.text(2)}"
    answers = {"text": [answer], "answer_start": [context.index(answer, len(before))]}
    return {"title": r.phrase(1, 3).capitalize(), "context": context, "question": question(r), "answers": answers}


def adversarial(r):
    return {**answered(r), "metadata": {"split": "train"}}


def about_plot(r):
    """One question in four has no answer."""
    answers = r.many(r.phrase, 1, 3) if r.number(1, 4) > 1 else []
    title, plot = r.phrase(1, 4).capitalize(), r.text(5)
    return {"title": title, "plot": plot, "question": question(r), "answers": answers, "no_answer": not answers}


def turns(r):
    """Returns the turns of a dialogue of two speakers."""
    first, other = r.word().capitalize(), r.word().capitalize()
    return [f"{who}: {r.sentence()}" for who in [first, other, first, other][: r.number(2, 4)]]


def disturbed_process(r):
    """More (A), less (B), or no effect (C): the latter where the disturbance is none of the process."""
    kind = r.one_of(["INPARA_EFFECT", "EXOGENOUS_EFFECT", "OUTOFPARA_DISTRACTOR"])
    effect = 2 if kind == "OUTOFPARA_DISTRACTOR" else r.number(0, 1)
    return {
        "question_stem": f"suppose {r.phrase()} happens, how will it affect {r.phrase()}.",
        "question_para_step": r.many(r.sentence, 3, 5) + r.one_of([[], [""]]),
        "answer_label": ["more", "less", "no_effect"][effect],
        "answer_label_as_choice": "ABC"[effect],
        "choices": {"text": ["more", "less", "no effect"], "label": ["A", "B", "C"]},
        "metadata_question_type": kind,
    }


def biography(r):
    name = r.phrase(2, 3)
    headers, content = ["name", "birth_date", f"{r.word()}_{r.word()}", "article_title"], [name, r.phrase(), r.phrase(), name]
    table = {"column_header": headers, "row_number": [1] * 4, "content": content}
    return {"input_text": {"table": table, "context": name}, "target_text": r.text(3)}


def activity(r):
    before, start = r.sentence(), r.phrase(1, 3)
    whole = {"ctx_a": before, "ctx_b": start, "ctx": f"{before} {start}"}
    return {"activity_label": r.phrase(1, 3).capitalize(), **whole, "endings": options(r, 4), "label": str(r.number(0, 3))}


def pronoun(r):
    name, it = r.phrase(1, 2).capitalize(), r.one_of(["he", "she", "it", "they", "them"])
    before = f"{name} {r.phrase(3, 8)}"
    spans = {"span1_index": 0, "span1_text": name, "span2_index": len(before.split()), "span2_text": it}
    return {"text": f"{before} {it} {r.phrase(3, 8)}.", **spans, "label": r.number(0, 1)}


TREC = [(0, 1), (2, 23), (24, 27), (28, 31), (32, 36), (37, 49)]  # the fine labels, first and last, of each coarse one

SETS = {
    "glue/mrpc": paraphrase,
    "glue/qqp": lambda r: {"question1": question(r), "question2": question(r), "label": r.number(0, 1)},
    "paws/labeled_final": paraphrase,
    "kilt_tasks/hotpotqa": lambda r: {"input": question(r), "output": r.many(lambda: {"answer": r.phrase(1, 4)}, 1, 2)},
    "wiki_qa": lambda r: {
        "question": r.phrase(5, 10), "document_title": r.phrase(1, 3).capitalize(), "answer": r.sentence(),
        "label": r.number(0, 1),
    },
    "adversarial_qa/dbidaf": adversarial,
    "adversarial_qa/dbert": adversarial,
    "adversarial_qa/droberta": adversarial,
    "duorc/SelfRC": about_plot,
    "duorc/ParaphraseRC": about_plot,
    "ropes": lambda r: {
        "background": r.text(4), "situation": r.text(3), "question": question(r), "answers": {"text": [r.phrase(1, 3)]},
    },
    "quoref": answered,
    "cos_e/v1.11": lambda r: {
        "question": question(r), "choices": (choices := options(r, 5)), "answer": r.one_of(choices),
        "abstractive_explanation": r.sentence(),
    },
    "cosmos_qa": lambda r: {
        "context": r.text(4), "question": question(r), **{f"answer{i}": option(r) for i in range(4)}, "label": r.number(0, 3),
    },
    "dream": lambda r: {
        "dialogue": turns(r), "question": question(r), "choice": (choices := options(r, 3)), "answer": r.one_of(choices),
    },
    "qasc": lambda r: {
        "question": question(r), "choices": {"text": options(r, 8), "label": list("ABCDEFGH")},
        "answerKey": r.one_of("ABCDEFGH"), "fact1": r.sentence(), "fact2": r.sentence(), "combinedfact": r.sentence(),
    },
    "quail": lambda r: {
        "context": r.text(5), "question": question(r), "answers": options(r, 4), "correct_answer_id": r.number(0, 3),
    },
    "quarel": lambda r: {
        "question": f"{r.text(2)} (A) {(a := option(r))} (B) {(b := option(r))}", "answer_index": r.number(0, 1),
        "world_literals": {"world1": [a], "world2": [b]},
    },
    "quartz": lambda r: {
        "para": r.text(2), "question": r.one_of([question(r), f"{r.sentence()[:-1]} _____."]),
        "choices": {"text": options(r, 2), "label": ["A", "B"]}, "answerKey": r.one_of("AB"),
    },
    "sciq": lambda r: {
        "question": question(r), **{f"distractor{i}": option(r) for i in (1, 2, 3)}, "correct_answer": option(r),
        "support": r.text(3),
    },
    "social_i_qa": lambda r: {
        "context": r.sentence(), "question": question(r), **{f"answer{x}": option(r) for x in "ABC"}, "label": r.one_of("123"),
    },
    "wiki_hop/original": lambda r: {
        "question": f"{r.word()}_{r.word()} {r.phrase(1, 3)}", "candidates": (choices := options(r, r.number(2, 8))),
        "answer": r.one_of(choices), "supports": r.many(lambda: r.text(2), 2, 4),
    },
    "wiqa": disturbed_process,
    "amazon_polarity": lambda r: {"title": r.phrase(), "content": r.text(3), "label": r.number(0, 1)},
    "app_reviews": lambda r: {"package_name": f"com.{r.word()}.{r.word()}", "review": r.text(2), "star": r.number(1, 5)},
    "imdb": lambda r: labelled(r, 2),
    "rotten_tomatoes": lambda r: labelled(r, 2),
    "yelp_review_full": lambda r: labelled(r, 5),
    "common_gen": lambda r: {
        "concepts": (concepts := r.many(r.word, 3, 5)), "target": f"{r.phrase().capitalize()} {' '.join(concepts)} {r.phrase()}.",
    },
    "wiki_bio": biography,
    "cnn_dailymail/3.0.0": lambda r: {"article": r.text(6), "highlights": "\n".join(r.many(r.sentence, 2, 3))},
    "gigaword": summarized,
    "multi_news": lambda r: {
        "document": " ||||| ".join(r.many(lambda: r.text(3), 2, 3)), "summary": f"\N{EN DASH} {r.text(2)}",
    },
    "samsum": lambda r: {"dialogue": "\r\n".join(turns(r)), "summary": r.sentence()},
    "xsum": summarized,
    "ag_news": lambda r: labelled(r, 4),
    "dbpedia_14": lambda r: {"label": r.number(0, 13), "title": r.phrase(1, 3).capitalize(), "content": r.text(2)},
    "trec": lambda r: {
        "coarse_label": (coarse := r.number(0, 5)), "fine_label": r.number(*TREC[coarse]), "text": question(r),
    },
    "super_glue/copa": lambda r: {
        "premise": r.sentence(), "choice1": r.sentence(), "choice2": r.sentence(),
        "question": r.one_of(["cause", "effect"]), "label": r.number(0, 1),
    },
    "hellaswag": activity,
    "story_cloze/2016": lambda r: {
        **{f"input_sentence_{i}": r.sentence() for i in (1, 2, 3, 4)}, **{f"sentence_quiz{i}": r.sentence() for i in (1, 2)},
        "answer_right_ending": r.number(1, 2),
    },
    "anli": lambda r: entailment(r, 3),
    "super_glue/cb": lambda r: entailment(r, 3),
    "super_glue/rte": lambda r: entailment(r, 2),
    "super_glue/wsc.fixed": pronoun,
    "winogrande/winogrande_xl": lambda r: {
        "sentence": f"{r.phrase(4, 8).capitalize()} _ {r.phrase(2, 5)}.", "option1": option(r), "option2": option(r),
        "answer": r.one_of("12"),
    },
    "super_glue/wic": lambda r: {
        "word": (word := r.word()), **{f"sentence{i}": f"{r.phrase().capitalize()} {word} {r.phrase()}." for i in (1, 2)},
        "label": r.number(0, 1),
    },
}  # fmt: skip


def records(name: str, count: int, first: int = 0) -> list[dict]:
    """`count` records of a data set, the same whenever they are asked for."""
    return [{"idx": number, **SETS[name](Words(name, number))} for number in range(first, first + count)]


def write_all(folder: pathlib.Path, count: int) -> str:
    """Writes so many records of every split of all data sets, and gives the rule by which `Records.files` finds them.

    Those of FLAN are known where `synthetic_flan` is imported.
    """
    for entry in filter(lambda data_set: data_set.has_templates, DATA_SETS.values()):
        for split in entry.splits if isinstance(entry.splits, tuple) else entry.splits.values():
            rows = records(entry.source_name, count, first=0 if split.startswith("train") else 1_000)
            write_lines(folder / entry.source_name / f"{split}.jsonl", rows)
    return str(folder / "{dataset}" / "{split}.jsonl")


def write_lines(file: pathlib.Path, rows: list[dict]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    with gzip.open(file, "wt") if file.suffix == ".gz" else open(file, "w") as out:
        out.writelines(json.dumps(record) + "\n" for record in rows)
