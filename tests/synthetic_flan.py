"""Records of the data sets that FLAN has beside T0's; see `synthetic_records`."""

from synthetic_records import SETS, entailment


def _pair(first, second):
    return lambda r: {"translation": {first: r.sentence(), second: r.sentence()}}


def _named(r):
    """A sentence with capitals and marks, as the sets of text formatting take apart."""
    name = r.word().capitalize()
    return f'{r.phrase().capitalize()}, "{r.phrase()}" {name}; {r.phrase()}: {r.phrase()}{r.one_of([".", "?", "!"])}'


def _fact(r):
    return [r.phrase(1, 3).capitalize(), r.word().upper(), r.phrase(1, 3)]


def _quotation(r):
    return {"key": str(r.number(1, 999)), "value": r.sentence()}


def _answers(r, least=1, most=3):
    texts = r.many(lambda: r.phrase(1, 4), least, most)
    return {"text": texts, "answer_start": [r.number(0, 200) for _ in texts]}


def _choices(r, count=4, letters="ABCDE"):
    return {"text": [f"{r.phrase()} {number}" for number in range(count)], "label": list(letters[:count])}


def _multiple_choice(r, field, letters="ABCDE", count=4):
    return {
        "id": r.word(),
        field: r.sentence(),
        "choices": _choices(r, count, letters),
        "answerKey": r.one_of(letters[:count]),
    }


def _quac(r):
    questions = r.many(lambda: r.phrase(3, 8) + "?", 1, 6)
    texts = [["CANNOTANSWER"] if r.number(0, 3) == 0 else r.many(r.sentence, 1, 3) for _ in questions]
    return {
        "dialogue_id": r.word(), "wikipedia_page_title": r.phrase(), "background": r.text(2), "section_title": r.phrase(),
        "context": r.text(8) + " CANNOTANSWER", "questions": questions,
        "answers": {"texts": texts, "answer_starts": [[0 for _ in answer_texts] for answer_texts in texts]},
        "orig_answers": {"texts": [answer_texts[0] for answer_texts in texts], "answer_starts": [0 for _ in texts]},
    }  # fmt: skip


def _coqa(r):
    questions = r.many(lambda: r.phrase(3, 8) + "?", 1, 6)
    return {
        "source": r.word(), "story": r.text(8), "questions": questions,
        "answers": {
            "input_text": [r.phrase(1, 4) for _ in questions],
            "answer_start": [0 for _ in questions], "answer_end": [5 for _ in questions],
        },
    }  # fmt: skip


def _record(r):
    entities = sorted({r.phrase(1, 2).title() for _ in range(r.number(3, 8))})
    return {
        "passage": f"{r.text(6)}\n@highlight\n{r.sentence()}\n@highlight\n{r.sentence()}",
        "query": f"{r.phrase(2, 4).capitalize()} @placeholder {r.phrase(2, 5)}.",
        "entities": [*entities, r.one_of(entities)],  # one comes twice
        "answers": [r.one_of(entities)],
    }  # fmt: skip


def _dpr(r):
    first, second = "the " + r.word() + "s", "a " + r.word() + "m"
    pronoun = r.one_of(["it", "he", "she", "they"])
    return {
        "sentence": f"{first.capitalize()} {r.word()} {second} because {pronoun} {r.phrase()}.",
        "pronoun": pronoun, "candidates": [first, second], "label": r.number(0, 1),
    }  # fmt: skip


OF_FLAN = {
    "aeslc": lambda r: {"email_body": r.text(5), "subject_line": r.phrase()},
    "newsroom": lambda r: {"title": r.phrase(4, 8).capitalize(), "text": r.text(15), "summary": r.text(1)},
    "ag_news_subset": lambda r: {
        "title": r.phrase(4, 8).capitalize(), "description": r.text(2), "label": r.number(0, 3),
    },
    "opinion_abstracts/rotten_tomatoes": lambda r: {
        "movie_name": r.phrase(1, 3).title(), "movie_id": r.word(),
        "critics": r.many(lambda: _quotation(r), 3, 15), "critic_consensus": r.sentence(),
    },
    "opinion_abstracts/idebate": lambda r: {
        "debate_name": "This house would " + r.phrase(), "debate_id": str(r.number(1, 999)),
        "argument_sentences": r.many(lambda: _quotation(r), 2, 6),
        "claim": r.sentence(), "claim_id": str(r.number(1, 9)),
    },
    "gem/wiki_lingua_english_en": lambda r: {
        "source": r.text(12), "target": r.text(3), "references": [r.text(3)],
    },
    "gem/web_nlg_en": lambda r: {
        "input": [" | ".join(fact) for fact in r.many(lambda: _fact(r), 1, 5)],
        "target": r.text(2), "references": [r.text(2)],
    },
    "gem/e2e_nlg": lambda r: {
        "meaning_representation": ", ".join(
            f"{name}[{r.phrase(1, 3)}]" for name in ["name", "eatType", "food", "area"][: r.number(2, 4)]
        ),
        "target": r.text(2), "references": [r.text(2)],
    },
    "gem/dart": lambda r: {
        "tripleset": r.many(lambda: _fact(r), 1, 5), "target": r.sentence(), "references": [r.sentence()],
    },
    "true_case": lambda r: {"translation": {"en": _named(r), "de": r.sentence()}},
    "fix_punct": lambda r: {"translation": {"en": _named(r), "de": r.sentence()}},
    "word_segment": lambda r: {"translation": {"en": _named(r), "de": r.sentence()}},
    "para_crawl/enes": _pair("en", "es"),
    "wmt14/fr-en": _pair("fr", "en"),
    "wmt15/fr-en": _pair("fr", "en"),
    "wmt14/de-en": _pair("de", "en"),
    "wmt_t2t/de-en": _pair("de", "en"),
    "wmt16/de-en": _pair("de", "en"),
    "wmt16/tr-en": _pair("tr", "en"),
    "wmt16/cs-en": _pair("cs", "en"),
    "wmt16/fi-en": _pair("fi", "en"),
    "wmt16/ro-en": _pair("ro", "en"),
    "wmt16/ru-en": _pair("ru", "en"),
    "squad": lambda r: {
        "id": r.word(), "title": r.phrase().replace(" ", "_"), "context": r.text(6), "question": r.phrase(4, 9) + "?",
        "answers": _answers(r),
    },
    "squad_v2": lambda r: {
        "id": r.word(), "title": r.phrase().replace(" ", "_"), "context": r.text(6), "question": r.phrase(4, 9) + "?",
        "answers": _answers(r) if r.number(0, 1) else {"text": [], "answer_start": []},
    },
    "drop": lambda r: {
        "section_id": r.word(), "query_id": r.word(), "passage": r.text(6), "question": r.phrase(4, 9) + "?",
        "answers_spans": {"spans": r.many(lambda: r.one_of([r.phrase(1, 3), str(r.number(0, 99))]), 1, 3)},
    },
    "super_glue/multirc": lambda r: {
        "paragraph": r.text(6), "question": r.phrase(4, 9) + "?", "answer": r.phrase(1, 5), "label": r.number(0, 1),
    },
    "openbookqa/main": lambda r: _multiple_choice(r, "question_stem", "ABCD"),
    "super_glue/boolq": lambda r: {"question": r.phrase(4, 9), "passage": r.text(5), "label": r.number(0, 1)},
    "trivia_qa/unfiltered": lambda r: {
        "question": r.phrase(4, 9) + "?", "question_id": r.word(),
        "answer": {"value": r.phrase(1, 3), "aliases": r.many(r.phrase, 0, 4), "type": "FreeForm"},
    },
    "nq_open": lambda r: {"question": r.phrase(4, 9), "answer": r.many(lambda: r.phrase(1, 3), 1, 3)},
    "ai2_arc/ARC-Challenge": lambda r: _multiple_choice(r, "question", r.one_of(["ABCDE", "12345"]), r.number(3, 5)),
    "ai2_arc/ARC-Easy": lambda r: _multiple_choice(r, "question", r.one_of(["ABCDE", "12345"]), r.number(3, 5)),
    "quac": _quac,
    "coqa": _coqa,
    "super_glue/record": _record,
    "piqa": lambda r: {"goal": r.sentence(), "sol1": r.sentence(), "sol2": r.sentence(), "label": r.number(0, 1)},
    "math_dataset": lambda r: {
        "question": f"Solve {r.number(2, 99)}*{r.word()[0]} = {r.number(2, 99)} for it.", "answer": str(r.number(-99, 99)),
    },
    "glue/cola": lambda r: {"sentence": r.sentence(), "label": r.number(0, 1)},
    "glue/mnli": lambda r: {"premise": r.text(2), "hypothesis": r.sentence(), "label": r.number(0, 2)},
    "glue/qnli": lambda r: {
        "question": r.phrase(4, 9).capitalize() + "?", "sentence": r.sentence(), "label": r.number(0, 1),
    },
    "super_glue/axg": lambda r: entailment(r, 2),
    **{
        name: lambda r: {"sentence1": r.text(2), "sentence2": r.sentence(), "label": r.number(0, 1)}
        for name in ("glue/rte", "super_glue/axb")
    },
    "glue/ax": lambda r: entailment(r, 3),
    "glue/wnli": lambda r: {"sentence1": r.text(2), "sentence2": r.sentence(), "label": r.number(0, 1)},
    "snli": lambda r: {"premise": r.sentence(), "hypothesis": r.sentence(), "label": r.number(-1, 2)},
    "glue/stsb": lambda r: {
        "sentence1": r.sentence(), "sentence2": r.sentence(), "label": r.number(0, 5000) / 1000,
    },
    "sentiment140": lambda r: {
        "text": r.phrase(3, 16), "date": r.phrase(3, 3), "user": r.word(), "sentiment": r.one_of([0, 2, 4]),
        "query": "NO_QUERY",
    },
    "yelp_polarity": lambda r: {"text": r.text(7), "label": r.number(0, 1)},
    "glue/sst2": lambda r: {"sentence": r.phrase(2, 14), "label": r.number(0, 1)},
    "definite_pronoun_resolution": _dpr,
}  # fmt: skip

SETS |= OF_FLAN
