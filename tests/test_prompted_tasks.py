"""Data sets in words are SeqIO tasks: rows as T5's ranking has them, templates drawn anew in each epoch."""

import collections
import json

import pytest
import seqio
import t5.data.preprocessors
import tensorflow as tf

from t5x_lab.config.errors import UserError
from t5x_lab.prompts.config import Records
from t5x_lab.prompts.records import source_of
from t5x_lab.prompts.tasks import InWords
from t5x_lab.prompts.templates import Template

LENGTHS = {"inputs": 256, "targets": 64}
KIND = Template("set", "which kind?", "What is {{text}}? ||| {{answer_choices[label]}}", "animal ||| tree ||| number")
LONG = Template(
    "set",
    "at length",
    "{% if label < 2 %}{{text}} is a kind of ||| {{answer_choices[label]}}{% endif %}",
    "beast ||| plant ||| sum",
)
TURNED = Template("set", "turned", "Name one: {{['animal', 'tree', 'number'][label]}}. ||| {{text}}")


@pytest.fixture
def read(tmp_path):
    """f(records) -> (their source, how they lie)."""

    def write(found):
        (tmp_path / "train.jsonl").write_text("".join(json.dumps(record) + "\n" for record in found))
        records = Records(files=str(tmp_path / "{split}.jsonl"))
        return source_of("set", records, ["train"]), records

    return write


RECORDS = [{"text": f"thing {number}", "label": number % 3} for number in range(400)]
text_of = lambda ids: seqio.ByteVocabulary(100).decode(ids.tolist())


def examples(task, **options):
    options = {"shuffle": False, "seed": 3, **options}
    return list(task.get_dataset(LENGTHS, "train", **options).as_numpy_iterator())


def test_a_task_renders_each_record_and_leaves_out_empty_ones(read):
    source, records = read(RECORDS)
    task = InWords((KIND,), source, records).task("set_which_kind_")
    assert task.name == "set_which_kind_"
    found = [(text_of(x["inputs"]), text_of(x["targets"])) for x in examples(task)]
    assert found == [(f"What is {r['text']}?", ["animal", "tree", "number"][r["label"]]) for r in RECORDS]
    assert all(x["targets"][-1] == 1 and x["inputs"][-1] != 1 for x in examples(task))
    assert all(x["inputs"][-1] == 1 for x in examples(InWords((KIND,), source, records, input_eos=True).task("set")))
    assert len(examples(InWords((LONG,), source, records).task("set"))) == sum(r["label"] < 2 for r in RECORDS)


def test_choices_are_ranked_as_t5_ranks_them(read):
    source, records = read(RECORDS[:50])
    ours = examples(InWords((KIND,), source, records, ranked=True).task("set"))
    formatted = t5.data.preprocessors.rank_classification_formatter(
        tf.data.Dataset.from_generator(lambda: RECORDS[:50], output_signature={"text": tf.TensorSpec([], tf.string), "label": tf.TensorSpec([], tf.int32)}),
        inputs_formats="What is {text}?", targets_formats=["animal", "tree", "number"],
    )  # fmt: skip
    theirs = list(formatted.as_numpy_iterator())
    assert len(ours) == len(theirs) == 150
    for one, other in zip(ours, theirs, strict=True):
        assert text_of(one["inputs"]) == other["inputs"].decode() and text_of(one["targets"]) == other["targets"].decode()
        assert one["idx"].tolist() == other["idx"].tolist() and one["is_correct"] == other["is_correct"]


def test_a_template_is_drawn_for_each_example_and_epoch(read):
    source, records = read(RECORDS)
    task = InWords((KIND, LONG, TURNED), source, records).task("set")
    kinds = lambda found: [
        "What" if "What" in x else "Name" if "Name" in x else "long" for x in (text_of(e["inputs"]) for e in found)
    ]
    first, again, other = (kinds(examples(task, seed=seed)) for seed in (3, 3, 4))
    assert first == again != other
    counts = collections.Counter(first)
    # A third each, but that LONG says nothing of a third of the records: within four standard deviations.
    assert all(abs(counts[kind] - expected) < 4 * 9.4 for kind, expected in (("What", 133), ("Name", 133), ("long", 89)))
    two = kinds(examples(task, num_epochs=2))
    assert two[: len(first)] == first and two[len(first) :] != first[: len(two) - len(first)]


@pytest.mark.parametrize(
    "template, record, says",
    [
        (KIND, {"label": 0}, 'Template "which kind?" of set needs the field "text"'),
        (KIND, {"text": "x", "label": 3}, "the label 3 is none of the 3 choices"),
        (Template("set", "t", "{{text}} ||| {{answer_choices[label]}}", "a ||| a"), {"text": "x", "label": 0}, "has equal choices"),
        (Template("set", "t", "{{text}} ||| c", "a ||| b"), {"text": "x"}, 'has the target "c", which is none of its choices'),
    ],
)  # fmt: skip
def test_a_record_that_does_not_fit_is_said(template, record, says, read):
    source, records = read([{"text": "y", "label": 0}, record])
    with pytest.raises(tf.errors.OpError, match=says.replace("?", r"\?")):
        examples(InWords((template,), source, records, ranked=True).task("set"))


def test_what_has_no_choices_is_not_ranked(read):
    with pytest.raises(UserError, match='Template "turned" of set has no answer_choices'):
        InWords((TURNED,), *read(RECORDS[:1]), ranked=True).task("set")
