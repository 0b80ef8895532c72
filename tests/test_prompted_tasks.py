"""Data sets in words are SeqIO tasks: rows as T5's ranking has them, templates drawn anew in each epoch."""

import collections
import dataclasses
import json
import re

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
import seqio
import t5.data.preprocessors
import tensorflow as tf
from conftest import shared_data
from helpers import exhaustive, set_max_separate_tasks
from synthetic_records import write_lines
from t5.evaluation import metrics as t5_metrics

import t5x_lab
from t5x_lab.checkpoints.layout import finished_steps
from t5x_lab.cli.main import main
from t5x_lab.config.errors import UserError
from t5x_lab.data.config import DataConfig
from t5x_lab.data.pipeline.batches import SeqioBatches, resolve_tasks
from t5x_lab.data.pipeline.reading import task_shard
from t5x_lab.data.tasks.mixture import Component
from t5x_lab.data.vocabularies.config import ByteVocabulary
from t5x_lab.evaluation.config import MetricsEvaluation, RankingEvaluation
from t5x_lab.prompts.config import Collection, Records
from t5x_lab.prompts.prompts import Prompts
from t5x_lab.prompts.records.sources import open_records
from t5x_lab.prompts.records.subsets import SampledRecords
from t5x_lab.prompts.tasks import generation_metrics
from t5x_lab.prompts.tasks.prompted_task import PromptedTaskBuilder
from t5x_lab.prompts.templates.files import read_templates, task_name
from t5x_lab.prompts.templates.template import Template

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

    def write(rows):
        (tmp_path / "train.jsonl").write_text("".join(json.dumps(record) + "\n" for record in rows))
        records = Records(files=str(tmp_path / "{split}.jsonl"))
        return open_records("set", records, ["train"]), records

    return write


RECORDS = [{"text": f"thing {number}", "label": number % 3} for number in range(400)]
text_of = lambda ids: seqio.ByteVocabulary(100).decode(ids.tolist())


def examples(task, **options):
    options = {"shuffle": False, "seed": 3, **options}
    return list(task.get_dataset(LENGTHS, "train", **options).as_numpy_iterator())


def test_a_task_renders_each_record_and_leaves_out_empty_ones(read):
    source, records = read(RECORDS)
    task = PromptedTaskBuilder((KIND,), source, records).build("set_which_kind_")
    assert task.name == "set_which_kind_"
    renderings = [(text_of(x["inputs"]), text_of(x["targets"])) for x in examples(task)]
    assert renderings == [(f"What is {r['text']}?", ["animal", "tree", "number"][r["label"]]) for r in RECORDS]
    assert all(x["targets"][-1] == 1 and x["inputs"][-1] != 1 for x in examples(task))
    assert all(
        x["inputs"][-1] == 1 for x in examples(PromptedTaskBuilder((KIND,), source, records, input_eos=True).build("set"))
    )
    assert len(examples(PromptedTaskBuilder((LONG,), source, records).build("set"))) == sum(r["label"] < 2 for r in RECORDS)


def test_choices_are_ranked_as_t5_ranks_them(read):
    source, records = read(RECORDS[:50])
    actual = examples(PromptedTaskBuilder((KIND,), source, records, ranked=True).build("set"))
    formatted = t5.data.preprocessors.rank_classification_formatter(
        tf.data.Dataset.from_generator(lambda: RECORDS[:50], output_signature={"text": tf.TensorSpec([], tf.string), "label": tf.TensorSpec([], tf.int32)}),
        inputs_formats="What is {text}?", targets_formats=["animal", "tree", "number"],
    )  # fmt: skip
    expected = list(formatted.as_numpy_iterator())
    assert len(actual) == len(expected) == 150
    for first, other in zip(actual, expected, strict=True):
        assert text_of(first["inputs"]) == other["inputs"].decode() and text_of(first["targets"]) == other["targets"].decode()
        assert first["idx"].tolist() == other["idx"].tolist() and first["is_correct"] == other["is_correct"]


def test_a_template_is_drawn_for_each_example_and_epoch(read):
    source, records = read(RECORDS)
    task = PromptedTaskBuilder((KIND, LONG, TURNED), source, records).build("set")
    kinds = lambda dataset: [
        "What" if "What" in x else "Name" if "Name" in x else "long" for x in (text_of(e["inputs"]) for e in dataset)
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
        (KIND, {"text": "x", "label": 3}, "the label 3 is not one of the 3 choices"),
        (Template("set", "t", "{{text}} ||| {{answer_choices[label]}}", "a ||| a"), {"text": "x", "label": 0}, "has equal choices"),
        (Template("set", "t", "{{text}} ||| c", "a ||| b"), {"text": "x"}, 'has the target "c", which is not one of its choices'),
    ],
)  # fmt: skip
def test_a_record_that_does_not_fit_is_said(template, record, says, read):
    source, records = read([{"text": "y", "label": 0}, record])
    with pytest.raises(tf.errors.OpError, match=says.replace("?", r"\?")):
        examples(PromptedTaskBuilder((template,), source, records, ranked=True).build("set"))


def test_what_has_no_choices_is_not_ranked(read):
    with pytest.raises(UserError, match='Template "turned" of set has no answer_choices'):
        PromptedTaskBuilder((TURNED,), *read(RECORDS[:1]), ranked=True).build("set")


def read_config(name, prompts, **options):
    options = {"task_feature_lengths": LENGTHS, "batch_size": 8, "vocabulary": ByteVocabulary(), "shards": 2, **options}
    return DataConfig(name, prompts=prompts, **options)


def batches(config, seed=0):
    return SeqioBatches(resolve_tasks(config, "encoder_decoder", 384), config, seed=seed)


TEMPLATES = """
dataset: {name}
templates:
  one: !Template
    name: one
    jinja: "{{{{text}}}} is? ||| {{{{answer_choices[label]}}}}"
    answer_choices: animal ||| tree ||| number
    metadata: !TemplateMetadata {{original_task: true}}
  two: !Template
    name: two
    jinja: "What is {{{{text}}}}? ||| {{{{answer_choices[label]}}}}"
    answer_choices: beast ||| plant ||| sum
    metadata: !TemplateMetadata {{original_task: true}}
"""


def prompts_of(folder, kinds, templates=TEMPLATES, records=RECORDS):
    """Prompts of data sets "a", "b", … in files of these kinds."""
    places = {}
    for name, kind in zip("abcdefgh", kinds, strict=False):
        (folder / "templates" / name).mkdir(parents=True, exist_ok=True)
        (folder / "templates" / name / "templates.yaml").write_text(templates.format(name=name))
        file = folder / f"{name}.{kind}"
        if kind == "jsonl":
            file.write_text("".join(json.dumps(record) + "\n" for record in records))
        elif kind == "csv":
            file.write_text("text,label\n" + "".join(f"{r['text']},{r['label']}\n" for r in records))
        else:
            pyarrow.parquet.write_table(pa.Table.from_pylist(records), file, row_group_size=64)
        places[name] = Records(files={"train": str(file), "validation": str(file)})
    return Prompts(
        templates=(str(folder / "templates"),),
        data_sets=places,
        collections={"all": Collection(tuple(places)), "drawn": Collection(tuple(places), form="sampled")},
    )


@pytest.mark.parametrize("name", ["all", "drawn", "drawn_2_shot"])
def test_tables_are_read_in_the_graph_of_many_tasks(name, tmp_path, monkeypatch):
    """Whose functions are marked; that of a scan, which reads tables chunk by chunk, must not be."""
    set_max_separate_tasks(monkeypatch, 0)
    read = batches(read_config(name, prompts_of(tmp_path, ["jsonl", "csv", "parquet"])))
    counts = collections.Counter()
    for _ in range(12):
        features = next(read)
        for row in features["encoder_input_tokens"]:
            counts.update(text_of(row).split("thing")[1:])
    assert len(counts) > 100


@pytest.mark.slow
@pytest.mark.parametrize("name, many", [exhaustive("all_without_c", False), ("drawn_2_shot", True)])
def test_a_cache_of_prompted_tasks_is_read_as_they_are(name, many, tmp_path, monkeypatch):
    """To the last bit, with templates and exemplars that are drawn after it."""
    from test_caching import cached

    if many:
        set_max_separate_tasks(monkeypatch, 0)
    prompts = prompts_of(tmp_path, ["jsonl", "csv", "parquet"], records=RECORDS)
    plain = read_config(name, prompts)
    tasks = resolve_tasks(plain, "encoder_decoder", 384)
    for part in tasks.components:
        cached(part.task, str(tmp_path / "caches"))
    of_cache = dataclasses.replace(plain, use_cached=True, cache_dirs=(str(tmp_path / "caches"),))
    actual, expected = batches(plain), batches(of_cache)
    for _ in range(6):
        first, other = next(actual), next(expected)
        assert first.keys() == other.keys() and all(np.array_equal(first[key], other[key]) for key in first)


def test_other_words_are_another_cache_another_evaluation_and_another_run(tmp_path):
    from test_caching import cached

    prompts = prompts_of(tmp_path, ["jsonl"])
    config = read_config("a_one", prompts)
    (part,) = resolve_tasks(config, "encoder_decoder", 384).components
    cached(part.task, str(tmp_path / "caches"))
    of_cache = dataclasses.replace(config, use_cached=True, cache_dirs=(str(tmp_path / "caches"),))
    assert next(batches(of_cache))
    prompts_of(tmp_path, ["jsonl"], TEMPLATES.replace("is?", "was?"))
    with pytest.raises(UserError, match=r"was made from the template \w+, but the run reads the template"):
        batches(of_cache)
    (other,) = resolve_tasks(config, "encoder_decoder", 384).components
    assert other.task.fingerprint != part.task.fingerprint
    moved = dataclasses.replace(config, prompts=dataclasses.replace(prompts, input_eos=True))
    assert moved.identity() != config.identity()


def test_a_file_of_templates_that_is_no_text_is_said(tmp_path):
    prompts = prompts_of(tmp_path, ["jsonl"])
    file = tmp_path / "templates" / "a" / "templates.yaml"
    file.write_bytes(TEMPLATES.format(name="a").replace("animal", "café").encode("latin-1"))
    with pytest.raises(UserError, match="is not a template file in promptsource's format"):
        prompts.register("a")
    file.write_text(TEMPLATES.format(name="a").replace("animal ||| tree ||| number", "[animal, tree]"))
    with pytest.raises(UserError, match="references and metrics must be texts"):
        prompts.register("a")


RARE = """
dataset: {name}
templates:
  rare: !Template
    name: rare
    jinja: "{{% if label == 7 %}}{{{{text}}}} is? ||| seven{{% endif %}}"
"""


@pytest.mark.parametrize("many", [exhaustive(False), True])
def test_a_template_with_little_to_say_is_read_by_all_shards(many, tmp_path, monkeypatch):
    """The template renders every fourth of 300 records, so three of four shards would be empty."""
    if many:
        set_max_separate_tasks(monkeypatch, 0)
    records = [{"text": f"thing {n}", "label": 0 if n % 4 else 7} for n in range(300)]
    prompts = prompts_of(tmp_path, ["jsonl"], RARE, records)
    options = dict(shards=4, pack=False, shuffle_buffer_size=4)
    read = batches(read_config("a_rare", prompts, **options))
    texts = [text_of(row) for _ in range(8) for row in next(read)["encoder_input_tokens"]]
    numbers = {int(number) for text in texts for number in re.findall(r"thing (\d+)", text)}
    assert len(numbers) > 40 and not any(number % 4 for number in numbers)
    none = prompts_of(tmp_path / "none", ["jsonl"], RARE, RECORDS[:8])
    with pytest.raises(UserError, match='shard 0 of the task "a_rare" is empty after preprocessing'):
        next(batches(read_config("a_rare", none, **options)))


def test_each_epoch_draws_other_templates_and_the_same_seed_the_same(tmp_path):
    """A run's stream of one data set: every record comes back, in other words."""
    prompts = prompts_of(tmp_path, ["jsonl"], records=RECORDS[:24])
    config = read_config("drawn", prompts, shards=1, pack=False, batch_size=24)
    inputs = lambda read: [[text_of(row) for row in next(read)["encoder_input_tokens"]] for _ in range(40)]
    first, again, other = (inputs(batches(config, seed)) for seed in (1, 1, 2))
    assert first == again != other
    ways = collections.defaultdict(set)
    for text in sum(first, []):
        ways[text.split("thing ")[1].rstrip(" is?")].add(text.startswith("What"))
    assert len(ways) == 24 and all(len(way) == 2 for way in ways.values())


def ranking_run(folder, prompts_gin, architecture="decoder"):
    return t5x_lab.from_gin(
        [f"models/{architecture}/tiny.gin"],
        [
            "VOCABULARY = @ByteVocabulary()",
            "TransformerConfig.vocab_size = 384",
            'MIXTURE_OR_TASK_NAME = "sotu_full_lm"',
            'TASK_FEATURE_LENGTHS = {"inputs": 64, "targets": 64}',
            "TRAIN_STEPS = 1",
            f'MODEL_DIR = "{folder}"',
            *prompts_gin,
        ],
        seed=3,
    )


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["decoder", exhaustive("t5_1_1")])
def test_t0_evals_accuracy_equals_an_independent_computation(architecture, tmp_path):
    """RTE with all of promptsource's prompts: sums of log-probabilities from `run.logits`, end tokens in, argmax, median."""
    folder, templates = shared_data("eval", "superglue", "RTE"), shared_data("prompts", "promptsource_templates")
    lines = [json.loads(line) for line in (folder / "val.jsonl").read_text().splitlines()[:8]]
    (tmp_path / "validation.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    gin = [
        f'TEMPLATES = ("{templates}",)',
        'DATA_SETS = {"super_glue/rte": @Records()}',
        f'Records.files = {{"validation": "{tmp_path}/validation.jsonl"}}',
    ]
    run = ranking_run(tmp_path / "run", gin, architecture)
    evaluation = RankingEvaluation(
        name="t0", task="super_glue_rte_score_eval", split="validation", lengths={"inputs": 4_096, "targets": 64}
    )
    measured = evaluation.prepare(run)(run)
    eval_templates = [t for t in read_templates([str(templates)], "super_glue/rte") if t.original_task and t.answer_choices]
    renderings = [
        template.render({**line, "label": ["entailment", "not_entailment"].index(line["label"])}, 0)
        for template in eval_templates
        for line in lines
    ]
    rows = [(rendered.inputs, choice) for rendered in renderings for choice in rendered.choices]
    ids = [([b + 3 for b in inputs.encode()], [*(b + 3 for b in choice.encode()), 1]) for inputs, choice in rows]
    padded = lambda rows: np.array([row + [0] * (max(map(len, rows)) - len(row)) for row in rows])
    if architecture == "decoder":
        logits = run.logits(decoder_input_tokens=padded([[0, *inputs, *targets[:-1]] for inputs, targets in ids]))
        begins = [len(inputs) for inputs, _ in ids]
    else:
        features = {"encoder_input_tokens": padded([inputs for inputs, _ in ids])}
        logits = run.logits(**features, decoder_input_tokens=padded([[0, *targets[:-1]] for _, targets in ids]))
        begins = [0] * len(ids)
    scores = []
    for row, begin, (_, targets) in zip(logits, begins, ids, strict=True):
        of_targets = row[begin : begin + len(targets)]
        log_probs = of_targets - np.log(np.exp(of_targets).sum(-1, keepdims=True))
        scores.append(log_probs[np.arange(len(targets)), targets].sum())
    picked = np.reshape(scores, (len(eval_templates), len(lines), 2)).argmax(-1)
    right = (
        np.reshape([rendered.choices.index(rendered.targets) for rendered in renderings], (len(eval_templates), len(lines)))
        == picked
    )
    expected = {task_name("super_glue/rte", t.name): share for t, share in zip(eval_templates, right.mean(1), strict=True)}
    actual = {task.removesuffix("_score_eval"): rendered["sum"] for task, rendered in measured.metrics.items()}
    assert len(actual) == 10 and actual == pytest.approx(expected)
    assert measured.report["average(super_glue_rte)"]["sum"] == pytest.approx(np.median(list(expected.values())))


@pytest.mark.slow
def test_generated_answers_are_measured_with_the_metrics_of_their_templates(tmp_path, monkeypatch):
    """Four questions are answered by the first accepted answer, by another one, in part, and wrongly."""
    records = [{"question": f"item {n}", "answer": [f"the number {n}", f"N-{n}!"]} for n in range(4)]
    answers = ["number 0", "n-1", "number two", "x"]
    write_lines(tmp_path / "validation.jsonl", records)
    run = ranking_run(
        tmp_path / "run",
        ['DATA_SETS = {"nq_open": @Records()}', f'Records.files = {{"validation": "{tmp_path}/validation.jsonl"}}'],
        "t5_1_1",
    )

    def generate(self, prompts, max_tokens, **options):
        numbers = [int(re.search(r"(?i)item (\d)", self.vocabulary.decode(ids))[1]) for ids in prompts]
        rows = [self.vocabulary.encode(answers[number]) for number in numbers]
        return np.array([row + [1] * (max_tokens - len(row)) for row in rows]), np.zeros((len(rows), max_tokens))

    monkeypatch.setattr(type(run), "generate_tokens", generate)
    lengths = {"inputs": 256, "targets": 16}
    evaluation = MetricsEvaluation(
        name="g", task="flan_nq_open_generate_eval", split="validation", lengths=lengths, period=None
    )
    measured = evaluation.prepare(run)(run).metrics
    # "number two" shares one of its two words with "number 2": precision and recall of a half.
    expected = {"em": 50.0, "f1": pytest.approx(100 * (1 + 1 + 0.5 + 0) / 4)}
    assert len(measured) == 9 and all(values == expected for values in measured.values())
    assert measured["flan_nq_open"] == expected  # the mean over templates
    ranking = RankingEvaluation(name="r", task="flan_nq_open_generate_eval", split="validation", lengths=lengths)
    with pytest.raises(UserError, match=r"has no choices to rank. MetricsEvaluation measures it"):
        ranking.prepare(run)


def test_the_best_of_several_references_counts():
    first, other, text = "a cat sat on the mat", "the dog ran in the big park", "the dog ran in a park"
    alone = [generation_metrics.rouge([[reference]], [text]) for reference in (first, other)]
    assert generation_metrics.rouge([[first, other]], [text]) == {key: max(r[key] for r in alone) for key in alone[0]}
    bleu = lambda *references: generation_metrics.bleu([*references], [text, first])["bleu"]
    assert bleu([other], [first]) == t5_metrics.bleu([other, first], [text, first])["bleu"] < bleu([other, text], [first])
    assert bleu([other, text], [first]) == pytest.approx(100)
    assert generation_metrics.accuracy([["a", "b"], ["c"]], ["b", "d"]) == {"accuracy": 50.0}


def wrong(text):
    return f"dataset: {{name}}\ntemplates:\n  t: !Template\n    name: t\n{text}    metadata: !TemplateMetadata {{{{original_task: true}}}}\n"


PLAIN = '    jinja: "{{{{text}}}}? ||| {{{{answer_choices[label]}}}}"\n    answer_choices: "a ||| b"\n'


@pytest.mark.slow
@pytest.mark.parametrize(
    "template, record, says",
    [
        ('    jinja: "{{% if %}} ||| x"\n', {"text": "x"}, 'Template "t" of a does not compile'),
        exhaustive(PLAIN.replace("text", "txet"), {"text": "x", "label": 0}, 'Template "t" of a needs the field "txet". The record has text, label'),
        (PLAIN, {"text": "x", "label": 7}, 'Template "t" of a.*: the label 7 is not one of the 2 choices'),
        exhaustive(PLAIN, {"text": None, "label": 0}, 'Template "t" of a: it prints a null field.*The record of a: .*null'),
        exhaustive(PLAIN.replace("a ||| b", "a ||| a"), {"text": "x", "label": 0}, "has equal choices: a, a"),
        exhaustive("", {"text": "x"}, "is not a template file in promptsource's format: KeyError: 'jinja'"),
    ],
)  # fmt: skip
def test_hostile_templates_and_records_end_in_a_sentence(template, record, says, tmp_path, monkeypatch, capsys):
    """On the command line, in training and in evaluation: status 2, and no checkpoint."""
    monkeypatch.chdir(tmp_path)
    prompts_of(tmp_path, ["jsonl"], templates=wrong(template), records=[{"text": "fine", "label": 0}] * 3 + [record])
    command = [
        "train", "--gin_file=models/t5_1_1/tiny.gin", "--gin.VOCABULARY=@ByteVocabulary()", "--gin.TransformerConfig.vocab_size=384",
        "--gin.TRAIN_STEPS=2", "--gin.MODEL_DIR=run", "--gin.BATCH_SIZE=8", '--gin.TASK_FEATURE_LENGTHS={"inputs": 64, "targets": 16}',
        '--gin.TEMPLATES=("templates",)', '--gin.DATA_SETS={"a": @Records()}', '--gin.Records.files={"train": "a.jsonl", "validation": "a.jsonl"}',
        "--gin.EVALS=()", "--gin.HOOKS=()",
    ]  # fmt: skip
    ranked = "equal" in says
    more = ["--gin.MIXTURE_OR_TASK_NAME=a_t"]
    if ranked:
        more = [
            "--gin.MIXTURE_OR_TASK_NAME=sotu_span_corruption", "--gin.EVALS=(@RankingEvaluation(),)", "--gin.RankingEvaluation.task=a_score_eval",
            "--gin.RankingEvaluation.at_start=True", '--gin.RankingEvaluation.lengths={"inputs": 64, "targets": 16}', '--gin.TASK_FEATURE_LENGTHS={"inputs": 64}',
        ]  # fmt: skip
        command.remove("--gin.EVALS=()")
        assert main([*command, *more]) == 0  # a training goes on without the evaluation
    else:
        assert main([*command, *more]) == 2
    stderr = " ".join(capsys.readouterr().err.split())
    assert re.search(says, stderr), stderr
    assert ranked or not finished_steps("run")


@pytest.mark.parametrize(
    "change, says",
    [
        (lambda folder: (folder / "a.jsonl").write_text(""), "There are no records in .*a.jsonl, the split train"),
        (lambda folder: (folder / "a.jsonl").unlink(), 'The data set "a" is not available: no file matches .*a.jsonl'),
        (
            lambda folder: (folder / "templates" / "a" / "templates.yaml").unlink(),
            "TEMPLATES contains the folder templates, which has no <data set>/templates.yaml",
        ),
    ],
)
def test_what_is_missing_is_a_sentence(change, says, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    prompts_of(tmp_path, ["jsonl"])
    change(tmp_path)
    command = [
        "train", "--gin_file=models/t5_1_1/tiny.gin", "--gin.VOCABULARY=@ByteVocabulary()", "--gin.TransformerConfig.vocab_size=384",
        "--gin.TRAIN_STEPS=2", "--gin.MODEL_DIR=run", "--gin.BATCH_SIZE=8", '--gin.TASK_FEATURE_LENGTHS={"inputs": 64, "targets": 16}',
        '--gin.TEMPLATES=("templates",)', '--gin.DATA_SETS={"a": @Records()}', '--gin.Records.files={"train": "a.jsonl"}',
        "--gin.EVALS=()", "--gin.HOOKS=()", "--gin.MIXTURE_OR_TASK_NAME=a",
    ]  # fmt: skip
    assert main(command) == 2
    assert re.search(says, " ".join(capsys.readouterr().err.split()))


def test_a_sample_of_records_does_not_depend_on_their_order(read):
    """A file sorted by class: the sample has both classes in its first records; in another order it is the same."""
    rows = [{"text": f"thing {number}", "label": number // 200} for number in range(400)]
    lines = []
    for order in (rows, rows[::-1]):
        source, _ = read(order)
        sample = SampledRecords(source, 100)
        lines.append([record.decode() for record in sample.get_dataset("train", shuffle=False).as_numpy_iterator()])
        assert sample.num_input_examples("train") == 100
        shards = [sample.get_dataset("train", shard_info=seqio.ShardInfo(i, 3)).as_numpy_iterator() for i in range(3)]
        assert sorted(line.decode() for shard in shards for line in shard) == sorted(lines[-1])
    assert lines[0] == lines[1][::-1] and len(set(lines[0])) == 100
    first = list(sample.get_dataset("train", shuffle=True, seed=1).take(40).as_numpy_iterator())
    for chosen in (lines[0], first):
        assert 0.3 < np.mean([json.loads(line)["label"] for line in chosen]) < 0.7
    source, _ = read(rows)
    assert len(list(SampledRecords(source, 1_000).get_dataset("train"))) == 400


def test_near_duplicates_of_the_question_are_no_exemplars(read, capsys):
    """Records that differ by case, spaces or a full stop; with no other record there are none, which is logged."""
    rows = [{"text": text, "label": 0} for text in ("a Thing", "a thing.", "A  thing", " a thing")]
    source, records = read(rows)
    template = Template("set", "t", "Say: {{text}} Now. ||| {{ answer_choices[label] }}", answer_choices="x ||| y")
    task = PromptedTaskBuilder((template,), source, records, shots=2).build("set")
    assert all(text_of(x["inputs"]).count("Say:") == 1 for x in examples(task))
    assert "A question of set has 0 exemplars, not 2" in capsys.readouterr().err
    source, records = read([*rows, {"text": "an other", "label": 1}])
    task = PromptedTaskBuilder((template,), source, records, shots=1).build("set")
    assert sum("an other" in text_of(x["inputs"]) for x in examples(task)) >= 4


def test_records_of_many_tasks_are_shuffled_inside_each(read):
    """Seventeen tasks over a sorted file: the first records of a task are not its first lines."""
    rows = [{"text": f"{number:03d}", "label": 0} for number in range(600)]
    source, records = read(rows)
    template = Template("set", "t", "{{text}} ||| {{ answer_choices[label] }}", answer_choices="x ||| y")
    task = PromptedTaskBuilder((template,), source, records).build("set")
    component = Component(task, LENGTHS, lambda: 1.0, True, LENGTHS)
    config = DataConfig("set", LENGTHS, 4, ByteVocabulary(), shards=1)
    numbers = [int(text_of(x["inputs"])) for x in task_shard(component, config, 0, 0, 17).take(100).as_numpy_iterator()]
    assert max(numbers) > 600 / 2 and numbers != sorted(numbers)
