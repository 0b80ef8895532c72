"""Python functions for the EAI-Eval task files. A document is a record of a task's data set."""

import ast
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from datasets import Dataset
from lm_eval.utils import general_detokenize

Doc = Mapping[str, Any]
Results = Iterable[tuple[float, bool]]  # log-probability of each choice, and whether the model would write it


def _label(*names: str) -> Callable[[Doc], int]:
    """Numbers of labels that may be numbers, true or false, or names, which may be abbreviated."""

    def number(doc: Doc) -> int:
        label = doc["label"]
        named = isinstance(label, str) and not label.isdigit()
        return [name.startswith(label) for name in names].index(True) if named else int(label)

    return number


anli_label = _label("entailment", "neutral", "contradiction")
cb_label = _label("entailment", "contradiction", "neutral")
entailment_label = _label("entailment", "not_entailment")
sst_label = _label("negative", "positive")


def any_greedy(doc: Doc, results: Results) -> dict[str, float]:
    """Returns accuracy 1 if any choice is the greedy continuation."""
    return {"acc": float(any(is_greedy for _, is_greedy in results))}


def _unique_prefixes(names: Iterable[str]) -> list[str]:
    """Returns the sorted names without those that have another name as a prefix, which would be generated first."""
    prefixes: list[str] = []
    for name in sorted(names):
        if not prefixes or not name.startswith(prefixes[-1]):
            prefixes.append(name)
    return prefixes


def triviaqa_names(doc: Doc) -> list[str]:
    """Returns the names of the answer."""
    return _unique_prefixes(doc["answer"]["aliases"])


def webqs_names(doc: Doc) -> list[str]:
    """Returns the answers."""
    return _unique_prefixes(doc["answers"])


def _without_markup(text: str) -> str:
    """Removes remains of WikiHow headings from HellaSwag texts."""
    text = re.sub(r"\[.*?\]", "", text.strip().replace(" [title]", ". "))
    return text.replace("  ", " ")


def hellaswag_text(doc: Doc) -> str:
    """Returns the activity and the beginning of its description."""
    return _without_markup(f"{doc['activity_label']}: {doc['ctx_a']} {doc['ctx_b'].capitalize()}")


def hellaswag_choices(doc: Doc) -> list[str]:
    """Returns the possible endings."""
    return [_without_markup(ending) for ending in doc["endings"]]


def mathqa_choices(doc: Doc) -> list[str]:
    """Returns the options in "a ) 38 , b ) 27.675 , ... , e ) none of these"."""
    return [option[4:].rstrip(" ,") for option in re.findall(r"[abcd] \) .*?, |e \) .*?$", doc["options"])]


def mrpc_text(doc: Doc) -> str:
    """Both sentences as people write them, and the question."""
    first, second = general_detokenize(doc["sentence1"]), general_detokenize(doc["sentence2"])
    return f"Sentence 1: {first}\nSentence 2: {second}\nQuestion: Do both sentences mean the same thing?\nAnswer:"


def sst_text(doc: Doc) -> str:
    """The sentence as people write it, and the question."""
    return f"{general_detokenize(doc['sentence'])}\nQuestion: Is this sentence positive or negative?\nAnswer:"


def wsc_text(doc: Doc) -> str:
    """The passage with its pronoun between asterisks; spans count words, and SuperGLUE's own files nest them in "target"."""
    doc = {**doc, **doc.get("target", {})}
    text, pronoun = doc["text"], doc["span2_text"]
    before = " ".join(text.split()[: doc["span2_index"]])
    after = text[len(before) + len(pronoun) + 1 :]
    passage = general_detokenize(f"{before} *{pronoun}*{after}")
    question = f'In the passage above, does the pronoun "*{pronoun}*" refer to "*{doc["span1_text"]}*"?'
    return f"Passage: {passage}\nQuestion: {question}\nAnswer:"


def multirc_answers(dataset: Dataset) -> Dataset:
    """One record an answer, also of SuperGLUE's own files, which have one a passage."""
    if "passage" not in dataset.features:
        return dataset
    answers = [
        {
            "paragraph": record["passage"]["text"],
            "question": question["question"],
            "answer": answer["text"],
            "label": int(answer["label"]),
            "idx": {"paragraph": record["idx"], "question": question["idx"], "answer": answer["idx"]},
        }
        for record in dataset
        for question in record["passage"]["questions"]
        for answer in question["answers"]
    ]
    return Dataset.from_list(answers)


def multirc_results(doc: Doc, results: Results) -> dict[str, tuple[bool, dict]]:
    """Whether the model calls the answer right, and what lm-eval's `acc_all` reads of a document."""
    (no, _), (yes, _) = results
    return {"acc": (yes > no, {"idx": doc["idx"], "label": int(doc["label"])})}


def race_passages(dataset: Dataset) -> Dataset:
    """One record a passage, of records that hold its questions, as a text or a list, or a single one."""
    passages: dict[str, list] = {}
    for record in dataset:
        problems = record.get("problems", [record])
        problems = ast.literal_eval(problems) if isinstance(problems, str) else problems
        passages.setdefault(record["article"], []).extend(problems)
    return Dataset.from_list([_race_question(article, problems) for article, problems in passages.items()])


def _race_question(article: str, problems: list[Doc]) -> dict[str, Any]:
    """The last question, behind the others; of one that ends in a blank to fill, lm-eval of 2022 kept only the blank."""
    text = f"Article: {article}\n\n"
    for problem in problems[:-1]:
        question, answer = problem["question"], problem["options"]["ABCD".index(problem["answer"])]
        text += f" _  .{answer}\n" if question.endswith("  _  .") else f"Question: {question}\nAnswer: {answer}\n"
    last = problems[-1]
    return {"text": text + last["question"], "choices": last["options"][:4], "label": "ABCD".index(last["answer"])}
