"""Templates mean what promptsource makes of them: its own renderings of real records, character by character."""

import gzip
import json
import os
import re

import pytest
from conftest import shared_data

from t5x_lab.config.errors import NotHere, UserError
from t5x_lab.prompts.templates.files import read_templates, task_name
from t5x_lab.prompts.templates.template import NO_LABEL, Rendered, Template

# Inputs and targets that are words and fields alone can be read backwards, which gives promptsource's records.
FIELD = re.compile(r"\{\{\s*(?:\"(?P<words>[^\"]*)\"|(?P<field>\w+)|answer_choices\s*\[\s*(?P<label>[a-z]\w*)\s*\])\s*\}\}")


def backwards(template, rows):
    """The fields that each (input, target) was made of; None where the template is more than words and fields."""
    if "{%" in template.jinja or "{{" in FIELD.sub("", template.jinja) or "{{" in (template.answer_choices or ""):
        return None
    choices = [choice.strip() for choice in (template.answer_choices or "").split("|||")]
    named = set()

    def as_pattern(text):
        pattern, end = "", 0
        for field in FIELD.finditer(text):
            pattern += re.escape(text[end : field.start()])
            end = field.end()
            name = field["field"] or field["label"]
            group = f"(?P={name})" if name in named else f"(?P<{name}>.*?)"
            pattern += re.escape(field["words"]) if name is None else group
            named.add(name)
        return pattern + re.escape(text[end:])

    pattern = re.compile("\0".join(as_pattern(part.strip()) for part in template.jinja.split("|||")), re.DOTALL)
    labels = {match["label"] for match in FIELD.finditer(template.jinja)} - {None}
    records = []
    for inputs, targets in rows:
        match = pattern.fullmatch(f"{inputs}\0{targets}")
        fields = match.groupdict() if match else {}
        fields = {name: text for name, text in fields.items() if name not in labels or text in choices}
        records.append({name: choices.index(text) if name in labels else text for name, text in fields.items()})
    return records


def rendered_by_promptsource(folder, template):
    path = folder / f"{task_name(template.dataset, template.name).replace('.', '_')}.jsonl.gz"
    if not path.exists():
        return []
    with gzip.open(path, "rt", encoding="utf-8") as file:
        lines = [json.loads(line) for line in file]
    return [(line["prompt"].removesuffix("\n"), line["completion"].removesuffix("<|endoftext|>")) for line in lines]


def test_rendering_equals_promptsources():
    """Each template is given the records that the other templates of its data set were made of."""
    folder, renderings = shared_data("prompts", "promptsource_templates"), shared_data("prompts", "t0_train_50k")
    compared = differ = 0
    sets = [os.path.relpath(path.parent, folder) for path in sorted(folder.rglob("templates.yaml"))]
    for dataset in sets:
        templates = read_templates([str(folder)], dataset)
        rows = {
            t: renderings_of_template for t in templates if (renderings_of_template := rendered_by_promptsource(renderings, t))
        }
        records = {t: renderings_of_template for t in rows if (renderings_of_template := backwards(t, rows[t])) is not None}
        for template, promptsource_rows in rows.items():
            others = [
                renderings_of_template
                for t, renderings_of_template in records.items()
                if t is not template and len(renderings_of_template) == len(promptsource_rows)
            ]
            for number, expected in enumerate(promptsource_rows):
                record = {
                    name: value for renderings_of_template in others for name, value in renderings_of_template[number].items()
                }
                if not template._fields <= record.keys() or dataset in ON_NUMBERS:
                    continue
                actual = template.render(record)
                compared += 1
                # White space at a field's ends is lost where it is read backwards.
                without_spaces = [
                    tuple("".join(text.split()) for text in both) for both in ((actual.inputs, actual.targets), expected)
                ]
                assert without_spaces[0] == without_spaces[1]
                differ += (actual.inputs, actual.targets) != expected
    assert compared > 24_000 and differ < compared / 100


ON_NUMBERS = {"app_reviews"}  # templates compute with a field that is read as text here


def test_mrpc_is_rendered_from_its_records():
    """All of the rendered examples, of all seven templates, among them those that render nothing of some records."""
    folder, renderings = shared_data("prompts", "promptsource_templates"), shared_data("prompts", "t0_train_50k")
    import csv

    records = []
    for split in ("train", "validation", "test"):
        with gzip.open(shared_data("eval", "becel", "mrpc") / f"{split}.tsv.gz", "rt", newline="") as file:
            records += [{**record, "label": int(record["label"])} for record in csv.DictReader(file, delimiter="\t")]
    num_found = 0
    for template in read_templates([str(folder)], "glue/mrpc"):
        actual = {(rendering.inputs, rendering.targets) for record in records if (rendering := template.render(record))}
        expected = rendered_by_promptsource(renderings, template)
        assert set(expected) <= actual
        num_found += len(expected)
    assert num_found == 1284


def test_all_of_promptsources_templates_compile():
    folder = shared_data("prompts", "promptsource_templates")
    paths = sorted(folder.rglob("templates.yaml"))
    results = [t for path in paths for t in read_templates([str(folder)], os.path.relpath(path.parent, folder))]
    assert (len(paths), len(results)) == (279, 2085)
    for template in results:
        assert template._template and template._fields is not None
        assert template.answer_choices is None or template._choices


def test_what_a_template_draws_repeats_with_the_seed():
    template = Template(
        "words", "any", "{{ ['one', 'two', 'three'] | choice }} {{ text }} ||| {{ answer_choices | choice }}", "a ||| b"
    )
    drawn = lambda seed, text: template.render({"text": text}, seed)
    assert all(drawn(1, str(i)) == drawn(1, str(i)) for i in range(9))
    assert len({drawn(seed, "same").inputs for seed in range(30)}) == 3
    assert len({drawn(0, str(i)).inputs.split()[0] for i in range(30)}) == 3


@pytest.mark.parametrize(
    "jinja, record, expected",
    [
        ("{{a}} ||| {{b}}", {"a": "x ||| y", "b": "|||"}, ("x ||| y", "|||")),
        ("{{a}} ||| {{b}}", {"a": "x", "b": " "}, ("x", NO_LABEL)),
        ("{% if b %}{{a}} ||| {{b}}{% endif %}", {"a": "x", "b": ""}, None),
        ("{{a}}", {"a": "x"}, None),
        ("{{a}} ||| {{b.c[0]}}", {"a": "word " * 1000, "b": {"c": []}}, (("word " * 409).strip() + "...", NO_LABEL)),
        ("{{ long_name }} ||| {{ [1, 1, 2] | most_frequent }}", {"long-name": 7}, ("7", "[1]")),
        ("{% if c is defined %}{{c}}{% endif %}{{a}} ||| no", {"a": "x"}, ("x", "no")),
        ("{{a}} ||| x", {"a": " "}, None),
    ],
)  # fmt: skip
def test_separators_cuts_and_what_is_empty(jinja, record, expected):
    assert Template("set", "t", jinja).render(record) == (Rendered(*expected) if expected else None)


@pytest.mark.parametrize(
    "jinja, choices, record, says",
    [
        ("{{ a ||| b", None, {"a": 1}, 'Template "t" of set does not compile'),
        ("{{ a }} ||| b", None, {"b": "x"}, 'Template "t" of set needs the field "a". The record has b.'),
        ("{{ a }} ||| b", None, {"a": None}, "it prints a null field"),
        ("{{ a }} ||| {{ answer_choices[label] }}", "no ||| yes", {"a": "x", "label": -1}, "the label -1 is not one of the 2 choices (no, yes)"),
        ("{{ a }} ||| {{ answer_choices[label] }}", "no ||| yes", {"a": "x", "label": 2}, "the label 2 is not one of the 2 choices"),
        ("{{ a - 1 }} ||| b", None, {"a": "x"}, "fails: TypeError"),
        ("{{ a }} ||| b", None, {"a": "x", "answer_choices": []}, 'a field "answer_choices"'),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_template_or_a_record_is_said(jinja, choices, record, says):
    with pytest.raises(UserError, match=re.escape(says)):
        Template("set", "t", jinja, choices).render(record)
    assert Template("set", "t", "{{answer_choices[-1]}} ||| x", "no ||| yes").render({}).inputs == "yes"


def test_what_is_wrong_with_a_file_of_templates_is_said(tmp_path):
    with pytest.raises(
        NotHere, match='There are no templates for the data set "a/b": no template folder .* has a file a/b/templates.yaml'
    ):
        read_templates([str(tmp_path)], "a/b")
    (tmp_path / "a").mkdir()
    file = tmp_path / "a" / "templates.yaml"
    entry = "  {}: {{name: {}, jinja: 'x ||| y'}}\n"
    for text, says in (
        ("templates:\n", "is not a template file in promptsource's format"),
        ("- one\n", "is not a template file in promptsource's format"),
        ("{", "is not a template file in promptsource's format"),
        ("templates: {}\n", "has no templates"),
        ("templates:\n  1: {name: x}\n", "is not a template file in promptsource's format"),
        ("templates:\n" + entry.format(1, "a b") + entry.format(2, "a-b"), 'would both be called "a_a_b"'),
    ):
        file.write_text(text)
        os.utime(file, ns=(0, hash(text) % 10**9))
        with pytest.raises(UserError, match=says):
            read_templates([str(tmp_path)], "a")


def test_tasks_are_called_as_t0s():
    """Names that T0 gives its tasks."""
    assert task_name("super_glue/rte", "does it follow that") == "super_glue_rte_does_it_follow_that"
    assert task_name("cnn_dailymail/3.0.0", "2_or_3_sentences") == "cnn_dailymail_3.0.0_2_or_3_sentences"
    assert task_name("imdb", "Sentiment with choices ") == "imdb_Sentiment_with_choices_"
