"""T5's suite on TensorFlow Datasets' own directories and on files: words, postprocessors and metrics are the `t5` library's."""

import csv
import dataclasses
import gzip
import json
import pathlib
import re
import subprocess
import sys

import jax
import numpy as np
import pandas as pd
import pytest
import sacrebleu
import scipy.stats
import seqio
import sklearn.metrics
import tensorflow as tf
import tensorflow_datasets as tfds
from conftest import ROOT, shared_data
from helpers import exhaustive_except, set_max_separate_tasks
from synthetic_records import Words, pronoun
from t5.data import glue_utils, mixtures
from t5.evaluation import eval_utils

import t5x_lab
from t5x_lab.cli.main import main
from t5x_lab.config.errors import NotHere, UserError
from t5x_lab.data.config import DataConfig, Mixing
from t5x_lab.data.pipeline import batches as pipeline
from t5x_lab.data.tasks.mixture import resolve_mixture
from t5x_lab.data.vocabularies.config import ByteVocabulary
from t5x_lab.evaluation.metrics import benchmarks
from t5x_lab.models.model import Model
from t5x_lab.papers.t5 import metrics as t5_metrics
from t5x_lab.papers.t5 import suite as t5_suite
from t5x_lab.papers.t5.suite import MIXTURES, SUITE
from t5x_lab.prompts.config import Collection, Records
from t5x_lab.prompts.data_sets import DATA_SETS
from t5x_lab.prompts.prompts import Prompts
from t5x_lab.prompts.records.locations import RecordLocation
from t5x_lab.runs.config.gin_config import GinConfig

T5S = {  # what the `t5` library calls the same
    **{name: f"{name.removeprefix('t5_')}_v002" for name in SUITE if name.startswith("t5_glue_")},
    **{name: f"{name.removeprefix('t5_')}_v102" for name in SUITE if name.startswith("t5_super_glue_")},
    "t5_glue_wnli_simple_eval": "glue_wnli_v002_simple_eval",
    "t5_super_glue_wsc_simple_train": "super_glue_wsc_v102_simple_train",
    "t5_super_glue_wsc_simple_eval": "super_glue_wsc_v102_simple_eval",
    "t5_dpr_simple": "dpr_v001_simple",
    "t5_squad": "squad_v010_allanswers",
    "t5_cnn_dailymail": "cnn_dailymail_v002",
    "t5_wmt_t2t_ende": "wmt_t2t_ende_v003",
    **{f"t5_wmt{pair}": f"wmt{pair}_v003" for pair in ("14_ende", "14_enfr", "15_enfr", "16_enro")},
}


def value_of(r: Words, feature) -> object:
    """Something that a field may hold."""
    if isinstance(feature, tfds.features.FeaturesDict | tfds.features.Translation):
        return {key: value_of(r, each) for key, each in feature.items()}
    if isinstance(feature, tfds.features.Sequence):
        inner = getattr(feature, "feature", feature)
        if isinstance(inner, tfds.features.FeaturesDict):
            rows = [value_of(r, inner) for _ in range(2)]
            return {key: [row[key] for row in rows] for key in rows[0]}
        return [value_of(r, inner) for _ in range(2)]
    if isinstance(feature, tfds.features.ClassLabel):
        return r.number(0, feature.num_classes - 1)
    if feature.tf_dtype == tf.float32:
        return r.number(0, 500) / 100
    return r.number(0, 30) if feature.tf_dtype.is_integer else r.text(2)


def made_up(name: str, count: int = 10) -> list[dict]:
    """Records of a task of the suite, as TensorFlow Datasets has them."""
    entry, records = SUITE[name], []
    for number in range(count):
        r = Words(name, number)
        record = value_of(r, entry.features)
        if "wsc" in name:
            record |= pronoun(r)
        if entry.data_set == "glue/wnli":
            who, did, next_ = r.word().capitalize(), r.phrase(1, 2), r.phrase(2, 3)
            record |= {"sentence1": f"{who} {did} when it {next_}.", "sentence2": f"{who} {next_}."}
        if entry.data_set == "definite_pronoun_resolution":
            record |= {"sentence": f"{r.phrase()} he {r.phrase()}.", "pronoun": "he"}
        if entry.data_set == "super_glue/multirc":
            record |= {"paragraph": f"<b>Sent 1: </b>{r.sentence()}<br><b>Sent 2: </b>{r.sentence()}"}
        if entry.data_set == "super_glue/record":
            record |= {
                "passage": f"{r.sentence()}\n@highlight\n{r.phrase()}\n@highlight\n{r.sentence()}",
                "answers": ["a", "b"][: number % 3],
            }
        records.append(record)
    return records


def prepared(folder, name: str, records: list[dict], splits) -> None:
    """TensorFlow Datasets' directory of these records, by its own writer."""
    entry = SUITE[name]
    full, _, version = entry.tfds.partition(":")
    dataset_name, _, config = full.partition("/")
    tfds.dataset_builders.store_as_tfds_dataset(
        name=dataset_name, version=version, config=config or None, data_dir=folder, features=entry.features,
        split_datasets={key: list(enumerate(records)) for key in splits}, disable_shuffling=True,
    )  # fmt: skip


def task_of(name: str, prompts: Prompts = Prompts()) -> seqio.Task:
    assert prompts.register(name)
    return seqio.get_mixture_or_task(name)


def t5s_task(name: str, dataset: tf.data.Dataset, splits) -> seqio.Task:
    """Returns the task that the `t5` library registers, with these records and a byte vocabulary."""
    import t5.data.tasks  # noqa: F401

    task = seqio.TaskRegistry.get(T5S[name])
    source = seqio.FunctionDataSource(lambda split, shuffle_files, seed=None: dataset, splits=list(splits))
    feature = seqio.Feature(seqio.ByteVocabulary(100))
    return seqio.Task(
        f"theirs_{name}", source, output_features={"inputs": feature, "targets": feature}, preprocessors=task.preprocessors,
        postprocess_fn=task.postprocessor, metric_fns=task.metric_fns,
    )  # fmt: skip


def examples(task: seqio.Task, split: str) -> list[dict]:
    lengths = {"inputs": 2048, "targets": 512}
    return list(task.get_dataset(lengths, split, shuffle=False).as_numpy_iterator())


def assert_same(actual: list[dict], expected: list[dict]) -> None:
    assert len(actual) == len(expected) > 0
    for first, other in zip(actual, expected, strict=True):
        assert first.keys() == other.keys()
        for key in first:
            np.testing.assert_array_equal(first[key], other[key], err_msg=key)


@pytest.fixture
def tfds_dir(tmp_path, monkeypatch):
    monkeypatch.setattr(tfds.core.constants, "DATA_DIR", str(tmp_path))
    monkeypatch.setattr(seqio.utils, "_TFDS_DATA_DIR_OVERRIDE", str(tmp_path))
    return tmp_path


def in_files(folder, name: str, records: list[dict], **more) -> Prompts:
    """The same records in a file, for all splits."""
    folder.mkdir(exist_ok=True)
    (folder / "records.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    place = Records(files=dict.fromkeys(("train", "validation", "test"), str(folder / "*.jsonl")), **more)
    return Prompts(data_sets={SUITE[name].data_set: place})


@pytest.mark.parametrize("name", exhaustive_except(SUITE, [*SUITE][::2]))
def test_words_are_the_t5_librarys_of_records_in_tensorflow_datasets_and_in_files(name, tfds_dir):
    records, splits = made_up(name), SUITE[name].splits
    prepared(tfds_dir, name, records, splits)
    task = task_of(name)
    assert tuple(task.splits) == splits
    t5_task = t5s_task(name, tfds.builder(SUITE[name].tfds, data_dir=tfds_dir).as_dataset(splits[0]), splits)
    expected = examples(t5_task, splits[0])
    assert_same(examples(task, splits[0]), expected)
    if name not in ("t5_glue_stsb", "t5_cnn_dailymail"):  # see the tests of these
        assert [fn.__name__ for fn in task.metric_fns] == [fn.__name__ for fn in t5_task.metric_fns]
        assert getattr(task.postprocessor, "func", task.postprocessor) == getattr(
            t5_task.postprocessor, "func", t5_task.postprocessor
        )
    of_files = task_of(name, in_files(tfds_dir, name, records))
    assert tuple(of_files.splits) == splits
    assert_same(examples(of_files, splits[0]), expected)


def test_the_t5_librarys_names_stand_for_the_same(tmp_path):
    """The names resolve to the `t5` library's own tasks if it is imported, as it is in this test."""
    assert mixtures
    t5_names = set(T5S.values()) | {"glue_v002_proportional", "glue_mnli_and_dev_v002", "wsc_dpr_simple_proportional"}
    assert {t5_suite._normalize_name(name) for name in T5S.values()} == set(SUITE)
    assert t5_names <= {*seqio.TaskRegistry.names(), *seqio.MixtureRegistry.names()}
    assert not Prompts().register("glue_cola_v002")
    program = f"""
import seqio
import t5x_lab.tasks
from t5x_lab.prompts.prompts import Prompts
for name in {sorted(t5_names)}:
    assert Prompts().register(name), name
    print(name, len(getattr(seqio.get_mixture_or_task(name), "tasks", [0])))
assert not Prompts().register("glue_nothing_v002") and not Prompts().register("my_task_v001")
"""
    out = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert len(out.splitlines()) == len(t5_names) and "glue_v002_proportional 11" in out


def test_versions_are_those_that_tensorflow_datasets_makes():
    for entry in SUITE.values():
        name, _, version = entry.tfds.partition(":")
        assert str(tfds.builder(name, try_gcs=False).version) == version


REAL = {  # files as they are distributed, of ten of the suite's tasks; others come with a line of columns that is none of JSON
    "t5_glue_cola": ("cola/dev.tsv", dict(columns=("source", "label", "mark", "sentence"))),
    "t5_glue_mrpc": ("becel/mrpc/validation.tsv.gz", {}),
    "t5_super_glue_boolq": ("superglue/BoolQ/val.jsonl", {}),
    "t5_super_glue_cb": ("superglue/CB/val.jsonl", {}),
    "t5_super_glue_copa": ("superglue/COPA/val.jsonl", {}),
    "t5_super_glue_rte": ("superglue/RTE/val.jsonl", {}),
    "t5_super_glue_wic": ("superglue/WiC/val.jsonl", {}),
    "t5_super_glue_wsc_simple_train": ("superglue/WSC/train.jsonl", {}),
    "t5_super_glue_wsc_simple_eval": ("superglue/WSC/val.jsonl", {}),
    "t5_super_glue_axb": ("superglue/AX-b/AX-b.jsonl", {}),
}


def read_plainly(name: str, path) -> list[dict]:
    """The records of a distributed file, as TensorFlow Datasets has them."""
    opened = gzip.open(path, "rt") if path.suffix == ".gz" else open(path)
    with opened as file:
        if ".jsonl" in path.name:
            rows = [json.loads(line) for line in file]
        elif name == "t5_glue_cola":
            rows = [
                dict(zip(("source", "label", "mark", "sentence"), line.rstrip("\n").split("\t"), strict=True)) for line in file
            ]
        else:
            rows = list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))
    features, plain_records = SUITE[name].features, []
    for _number, row in enumerate(rows):
        row = {**row, **row.get("target", {}), "idx": row.get("idx", -1)}
        label = row["label"]
        row["label"] = (
            str(label) if isinstance(label, bool) else label if isinstance(label, str) and not label.isdigit() else int(label)
        )
        plain_records.append({key: row.get(key, -1) for key in features})
    return plain_records


@pytest.mark.parametrize("name", exhaustive_except(REAL, [*REAL][::3]))
def test_words_of_distributed_files_are_the_t5_librarys(name, tfds_dir):
    file, more = REAL[name]
    path, splits = shared_data("eval", *file.split("/")), SUITE[name].splits
    place = Records(files={splits[0]: str(path)}, **more)
    prepared(tfds_dir, name, read_plainly(name, path), splits[:1])
    t5_task = t5s_task(name, tfds.builder(SUITE[name].tfds, data_dir=tfds_dir).as_dataset(splits[0]), splits)
    task = task_of(name, Prompts(data_sets={SUITE[name].data_set: place}))
    assert_same(examples(task, splits[0]), examples(t5_task, splits[0]))


LENGTHS = {"inputs": 64, "targets": 16}
KS, TS = [2**power for power in range(16, 22)], [2.0, 4.0, 8.0]
GRID = [Mixing(maximum=k) for k in KS] + [Mixing(maximum=2**21, temperature=t) for t in TS] + [Mixing(equal=True)]
# Sizes that the `t5` library does not say, of TensorFlow Datasets' catalogue; that of WMT15 is above all K.
OTHERS = {
    "t5_squad": 87_599, "t5_cnn_dailymail": 287_113, "t5_wmt_t2t_ende": 4_592_289, "t5_wmt15_enfr": 2**30,
    "t5_wmt16_enro": 610_320, "c4_span_corruption": 2**30,
}  # fmt: skip


def sizes_of_t5() -> dict[str, float]:
    weights = {**glue_utils.GLUE_WEIGHT_MAPPING, **glue_utils.SUPER_GLUE_WEIGHT_MAPPING}
    sizes = {name: weights[t5_name] for name, t5_name in T5S.items() if weights.get(t5_name)}
    return {**sizes, "t5_glue_qqp": 363_846, **OTHERS}  # the library counts three of QQP's more than its version 2.0.0 has


def mixed(name: str, mixing: Mixing | None, prompts: Prompts = Prompts()) -> dict[str, float]:
    config = DataConfig(name, LENGTHS, 8, ByteVocabulary(), mixing=mixing, prompts=prompts, shards=1)
    tasks = resolve_mixture(config, "encoder_decoder")
    return dict(zip([part.task.name for part in tasks.train_components], tasks.rates(), strict=True))


@pytest.mark.parametrize("mixing", GRID, ids=str)
def test_rates_are_the_papers_formula_of_true_sizes(mixing):
    unsaid = {name: OTHERS[name] for name in ("t5_wmt15_enfr", "c4_span_corruption")}
    collection = Collection(("t5_supervised", "c4_span_corruption"))
    mixing_rates = mixed(
        "t5_all", dataclasses.replace(mixing, num_examples=unsaid), Prompts(collections={"t5_all": collection})
    )
    sizes = sizes_of_t5()
    assert mixing_rates.keys() == sizes.keys()  # 16 of GLUE and SuperGLUE with training examples, DPR, and six more
    capped = {name: 1 if mixing.equal else min(size, mixing.maximum) for name, size in sizes.items()}
    powers = {name: (size / sum(capped.values())) ** (1 / mixing.temperature) for name, size in capped.items()}
    for name, rate in mixing_rates.items():
        assert rate / sum(mixing_rates.values()) == pytest.approx(powers[name] / sum(powers.values()), rel=1e-12)


def test_a_mixtures_own_rates_are_sizes_and_some_may_be_left_out():
    mixing_rates = mixed("t5_glue", None)
    assert mixing_rates == {name: size for name, size in sizes_of_t5().items() if name.startswith("t5_glue")}
    assert sum(mixed("t5_super_glue", None).values()) == sum(glue_utils.SUPER_GLUE_WEIGHT_MAPPING.values())
    less = mixed("t5_supervised_without_t5_glue_and_t5_squad", Mixing(equal=True))
    for name in (
        "t5_supervised_without_squad_v010_allanswers_and_glue_v002_proportional",
        "t5_supervised_without_squad_and_glue",
    ):
        assert mixed(name, Mixing(equal=True)) == less
    assert (
        mixed("glue_v002_proportional_without_glue_mnli_and_dev_and_glue_cola_v002", None).keys()
        == mixed("t5_glue_without_t5_glue_cola_and_t5_glue_mnli_and_dev", None).keys()
    )
    assert less.keys() == sizes_of_t5().keys() - mixing_rates.keys() - {"t5_squad", "c4_span_corruption"}
    with pytest.raises(UserError, match='"t5_glue" has no task "t5_squad" to exclude'):
        mixed("t5_glue_without_t5_squad", None)
    with pytest.raises(
        UserError, match='"t5_wsc_dpr_without_t5_dpr_simple_and_t5_super_glue_wsc_simple_train" has no training task left'
    ):
        mixed("t5_wsc_dpr_without_t5_dpr_simple_and_t5_super_glue_wsc_simple_train", None)
    assert not any("wnli" in task for tasks in MIXTURES.values() for task in tasks)


@pytest.mark.parametrize("file", sorted(path.name for path in (ROOT / "gin" / "mixtures").glob("*.gin")))
def test_each_mixture_file_is_read(file):
    more = ["MODEL_DIR = 'x'", "TRAIN_STEPS = 1", "VOCABULARY = @ByteVocabulary()"]
    data = GinConfig(["models/t5_1_1/tiny.gin", f"mixtures/{file}"], more).run().data
    unsaid = {name: OTHERS[name] for name in ("t5_wmt15_enfr", "c4_span_corruption")}
    mixing = dataclasses.replace(data.mixing, num_examples={**unsaid, **(data.mixing.num_examples or {})})
    if "supervised" in file:
        del mixing.num_examples["c4_span_corruption"]
    mixing_rates = resolve_mixture(dataclasses.replace(data, mixing=mixing), "encoder_decoder").rates()
    assert len(mixing_rates) >= 21 and all(rate > 0 for rate in mixing_rates)


@pytest.mark.parametrize("size, layers, parameters", [("compute/size_2x.gin", 16, 2), ("compute/size_4x.gin", 32, 4)])
def test_sizes_are_twice_and_four_times_the_baseline(size, layers, parameters):
    build_model = lambda *files: Model(GinConfig(["models/t5_1_0/base.gin", *files]).model())
    baseline, larger = build_model(), build_model(size)
    assert larger.config.network.num_encoder_layers == larger.config.network.num_decoder_layers == layers
    assert larger.num_parameters / baseline.num_parameters == pytest.approx(parameters, rel=0.2)


@pytest.mark.parametrize(
    "files, expected",
    [
        (["recipes/t5_pretraining.gin"], (2048, 1_000_000, "t5_all")),
        (["recipes/t5_finetuning.gin", "recipes/t5_beams.gin"], (8, 262_144, "t5_glue_cola")),
        (["mixtures/equal.gin", "compute/steps_4x.gin", "compute/batch_4x.gin"], (512, 2_097_152, "t5_all")),
    ],
)
def test_the_papers_runs_are_read(files, expected):
    name = ["MIXTURE_OR_TASK_NAME = 't5_glue_cola'"] if "t5_finetuning" in files[0] else []
    run = GinConfig(["models/t5_1_0/small.gin", *files], ["MODEL_DIR = 'x'", *name]).run()
    assert (run.data.batch_size, run.train_steps, run.data.mixture_or_task_name) == expected
    if name:
        (decoding,) = [each.decoding for each in run.evals if hasattr(each, "decoding")]
        assert (decoding.size, decoding.alpha) == (4, 0.6)


def test_what_is_not_prepared_is_said_with_what_to_do(tfds_dir):
    with pytest.raises(
        NotHere, match=r'data set "glue/cola" is not available: TensorFlow Datasets has no prepared glue/cola:2.0.0'
    ):
        task_of("t5_glue_cola").source.list_shards("train")


def test_a_mixture_of_which_only_some_splits_are_given_is_read_as_far_as_they_go(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"premise": "a", "hypothesis": "b", "label": 1}\n')
    prompts = Prompts(data_sets={"glue/mnli": Records(files={"train": str(tmp_path / "a.jsonl")})})
    assert mixed("t5_glue_mnli_and_dev", None, prompts) == {"t5_glue_mnli": 392_702.0}
    with pytest.raises(
        NotHere, match='of the data set "glue/mnli_matched" have no split "validation". They have train. Add its'
    ):
        task_of("t5_glue_mnli_matched", prompts).source.list_shards("validation")


def test_tasks_of_one_data_set_have_each_their_own_splits(tmp_path):
    """One rule applies to all data sets, in any order, and to templates too."""
    for split in ("train", "validation", "test"):
        (tmp_path / f"{split}.jsonl").write_text(json.dumps(made_up("t5_super_glue_wsc_simple_eval", 1)[0]) + "\n")
    for names in (
        ("t5_super_glue_wsc_simple_train", "t5_super_glue_wsc_simple_eval"),
        ("t5_glue_wnli_simple_eval", "t5_glue_wnli"),
    ):
        for number, order in enumerate((names, names[::-1])):
            prompts = Prompts(records=Records(files=f"{tmp_path}/{'.' * number}/{{split}}.jsonl"))
            for name in order:
                assert tuple(task_of(name, prompts).splits) == SUITE[name].splits
            whole = RecordLocation(DATA_SETS[SUITE[names[0]].data_set], prompts).source()
            assert tuple(whole.splits) == ("train", "validation", "test")


def test_a_record_that_does_not_fit_is_said(tmp_path):
    def first(name, record, split=None):
        return examples(task_of(name, in_files(tmp_path, name, [record])), split or SUITE[name].splits[0])[0]

    assert first("t5_glue_cola", {"sentence": "a", "label": "acceptable"})["targets_pretokenized"] == b"acceptable"
    assert first("t5_glue_cola", {"sentence": "a"}, "test")["targets_pretokenized"] == b"<unk>"
    assert first("t5_wmt16_enro", {"translation": {"en": "a", "ro": "b"}})["targets_pretokenized"] == b"b"  # as on the hub
    for name, record, says in (
        (
            "t5_glue_cola",
            {"text": "a", "label": 1},
            'it has no field "sentence"; it has text, label. The record of glue/cola: {"text"',
        ),
        (
            "t5_glue_cola",
            {"sentence": "a", "label": "maybe"},
            'the label "maybe" is not a number nor one of unacceptable, acceptable',
        ),
        ("t5_glue_cola", {"sentence": "a", "Label": 1}, 'it has no field "label"; it has sentence, Label.'),
        ("t5_glue_stsb", {"sentence1": "a", "sentence2": "b"}, 'it has no field "label"; it has sentence1, sentence2.'),
        (
            "t5_glue_cola",
            {"sentence": "a", "label": 2},
            "the label is 2; it must be 0 to 1, or one of unacceptable, acceptable",
        ),
        ("t5_glue_cola", {"sentence": "a", "label": -1}, "the label is -1, a hidden label; train and evaluate on other splits"),
        ("t5_glue_cola", {"sentence": "a", "label": 0.5}, 'the field "label" is 0.5; it must be a whole number of type int64'),
        (
            "t5_glue_cola",
            {"sentence": "a", "label": float("nan")},
            'the field "label" is nan; it must be a whole number of type int64',
        ),
        (
            "t5_glue_cola",
            {"sentence": "a", "label": 1, "idx": 1 << 40},
            'the field "idx" is 1099511627776; it must be a whole number of type int32',
        ),
        (
            "t5_glue_stsb",
            {"sentence1": "a", "sentence2": "b", "label": float("inf")},
            "is inf; it must be a number of type float32",
        ),
        (
            "t5_super_glue_multirc",
            {"paragraph": "", "question": "", "answer": "", "label": 1},
            'the field "idx" is missing; it must have paragraph, question, answer',
        ),
        (
            "t5_squad",
            {"id": "", "title": "", "context": "", "question": "", "answers": {"text": "x"}},
            "the field \"text\" is 'x'; it must be a list",
        ),
    ):
        with pytest.raises(Exception, match=re.escape(says)):
            first(name, record)


def test_similarity_counts_what_is_none_as_wrong():
    valid = {"0.0": 0.0, "2.6": 2.6, "5.0": 5.0, "5": 5.0, " 3.2 ": 3.2}
    assert {text: t5_metrics.similarity(text) for text in valid} == valid
    assert {t5_metrics.similarity(text) for text in ("", "nan", "inf", "-inf", "5.2", "-0.2", "7", "three", "2,6")} == {-1.0}


def test_rouge_is_the_mean_and_the_same_each_time():
    from t5.evaluation import metrics

    random = np.random.default_rng(0)
    text = lambda: " ".join(random.choice(["a", "b", "c", ".", "dog", "cat"], 12))
    targets, predictions = [text() for _ in range(200)], [text() for _ in range(200)]
    scores = t5_metrics.rouge(targets, predictions)
    assert scores == t5_metrics.rouge(targets, predictions)
    t5_scores = metrics.rouge(targets, predictions)  # the median of samples' means
    assert scores.keys() == t5_scores.keys() and all(abs(scores[key] - t5_scores[key]) < 0.3 for key in scores)
    (score,) = {round(value) for value in t5_metrics.rouge(["a b . c d"], ["a b . c d"]).values()}
    assert score == 100


def outputs(task: seqio.Task, texts: list[str], answers: list[dict]) -> dict[str, float]:
    """The task's metrics of these predictions, its targets being those of `answers`."""
    after = task.postprocess_fn
    targets = [after(each["targets_pretokenized"].decode(), example=each, is_target=True) for each in answers]
    processed = [after(text, example=each, is_target=False) for text, each in zip(texts, answers, strict=True)]
    results = {}
    for metric in task.metric_fns:
        results |= metric(targets, processed)
    return {key: float(value) for key, value in results.items()}


def test_metrics_are_those_of_scikit_learn_scipy_and_sacrebleu_with_what_is_invalid_wrong():
    random = np.random.default_rng(0)
    for name, labels, expected in (
        ("t5_glue_cola", ["unacceptable", "acceptable"], {"matthews_corrcoef": sklearn.metrics.matthews_corrcoef}),
        ("t5_glue_mrpc", ["not_equivalent", "equivalent"], {"accuracy": sklearn.metrics.accuracy_score}),
        (
            "t5_super_glue_cb",
            ["entailment", "contradiction", "neutral"],
            {
                "accuracy": sklearn.metrics.accuracy_score,
                "mean_3class_f1": lambda a, b: sklearn.metrics.f1_score(a, b, labels=range(3), average="macro"),
            },
        ),
    ):
        numbers = random.integers(0, len(labels), 300)
        written = [labels[n] if random.random() < 0.7 else random.choice([*labels, "something"]) for n in numbers]
        answers = [{"targets_pretokenized": labels[n].encode()} for n in numbers]
        result = outputs(task_of(name), written, answers)
        guessed = [labels.index(text) if text in labels else -1 for text in written]
        for key, metric in expected.items():
            assert result[key] == pytest.approx(100 * metric(numbers, guessed), abs=1e-9)
    # F1 with what is invalid as the wrong class
    wrong = outputs(
        task_of("t5_glue_mrpc"), ["x", "x"], [{"targets_pretokenized": t} for t in (b"equivalent", b"not_equivalent")]
    )
    assert wrong == {"f1": 0.0, "accuracy": 0.0}
    similar = [f"{x:.1f}" for x in random.integers(0, 26, 100) / 5]
    guesses = [text if random.random() < 0.8 else random.choice(["nan", "0.4", "9.9"]) for text in similar]
    result = outputs(task_of("t5_glue_stsb"), guesses, [{"targets_pretokenized": text.encode()} for text in similar])
    numbers = [float(text) if text not in ("nan", "9.9") else -1.0 for text in guesses]
    assert result["pearson_corrcoef"] == pytest.approx(100 * scipy.stats.pearsonr([float(x) for x in similar], numbers)[0])
    texts = ["ein Haus , ein Hund", "das ist gut .", "nein !"]
    result = outputs(
        task_of("t5_wmt_t2t_ende"), texts, [{"targets_pretokenized": t.encode()} for t in (texts[0], "das ist es .", "nein !")]
    )
    bleu = sacrebleu.corpus_bleu(texts, [[texts[0], "das ist es .", "nein !"]], tokenize="intl", smooth_method="exp")
    assert result["bleu"] == pytest.approx(bleu.score)


def test_answers_to_a_question_count_together():
    task = task_of("t5_super_glue_multirc")
    rows = [(0, "True", "True"), (0, "False", "False"), (1, "True", "False"), (1, "False", "nothing")]
    answers = [
        {"targets_pretokenized": t.encode(), "idx/paragraph": 7, "idx/question": q, "idx/answer": n}
        for n, (q, t, _) in enumerate(rows)
    ]
    result = outputs(task, [text for _, _, text in rows], answers)
    # "nothing" counts as the wrong one of the two, "True": one right, one too many, one missing
    assert result["exact_match"] == 50.0 and result["f1"] == pytest.approx(
        100 * sklearn.metrics.f1_score([1, 0, 1, 0], [1, 0, 0, 1])
    )


def test_averages_are_the_t5_librarys():
    random = np.random.default_rng(0)
    tasks = [task_of(name) for name in MIXTURES["t5_supervised"]]
    names = {T5S[name]: name for name in T5S}
    metrics: dict[str, dict[str, float]] = {}
    for tag in eval_utils.METRIC_NAMES:
        name, _, metric = tag.partition("/")
        if name in names and metric and names[name] in MIXTURES["t5_supervised"]:
            metrics.setdefault(names[name], {})[metric] = float(random.uniform(0, 100))
    frame = pd.DataFrame(
        [
            {
                eval_utils.METRIC_NAMES[f"{T5S[n]}/{m}"].name: v
                for n, task_metrics in metrics.items()
                for m, v in task_metrics.items()
            }
        ]
    )
    t5_averages = eval_utils.compute_avg_glue(frame)
    result = benchmarks.report(tasks, metrics)
    assert result["glue"]["average"] == pytest.approx(t5_averages["Average GLUE Score"][0])
    assert result["super_glue"]["average"] == pytest.approx(t5_averages["Average SuperGLUE Score"][0])
    assert result["squad"]["average"] == metrics["t5_squad"]["em"]
    assert result["cnn_dailymail"]["average"] == metrics["t5_cnn_dailymail"]["rouge2"]
    del metrics["t5_glue_qnli"], metrics["t5_glue_mnli_mismatched"]
    assert benchmarks.report(tasks, metrics)["glue"]["missing"] == ["MNLI", "QNLI"]  # half of MNLI is none
    assert "glue" not in benchmarks.averages(benchmarks.report(tasks, metrics))


def test_the_best_step_is_chosen_for_each_part():
    tasks = [task_of(name) for name in ("t5_glue_mrpc", "t5_glue_stsb")]
    step_metrics = lambda f1, accuracy, pearson: {
        "t5_glue_mrpc": {"f1": f1, "accuracy": accuracy}, "t5_glue_stsb": {"pearson_corrcoef": pearson, "spearman_corrcoef": pearson}
    }  # fmt: skip
    result = benchmarks.best({
        10: benchmarks.report(tasks, step_metrics(80.0, 60.0, float("nan"))),
        20: benchmarks.report(tasks, step_metrics(70.0, 75.0, 3.0)),
        30: benchmarks.report(tasks, step_metrics(71.0, 72.0, 2.0)),
    })  # fmt: skip
    parts = result["glue"]["parts"]
    assert [(part, parts[part]["step"], parts[part]["score"]) for part in parts] == [("MRPC", 20, 72.5), ("STS-B", 20, 3.0)]
    assert result["glue"]["average"] is None and "CoLA" in result["glue"]["missing"]


def from_t5x(pieces: pathlib.Path) -> tuple[str, list[str]]:
    """T5X's own small test model, and the flags that say what it is."""
    folder = shared_data("t5x_checkpoints", "from_t5x_repository") / "test_t5_tiny.checkpoint_0"
    return str(folder), ["--gin_file=models/t5_1_1/tiny.gin", f"--gin.SentencePieceVocabulary.path={pieces}"]


def from_hugging_face(pieces: pathlib.Path) -> tuple[str, list[str]]:
    """A random T5 that transformers saved."""
    transformers = pytest.importorskip("transformers")
    sizes = dict(vocab_size=32128, d_model=16, d_kv=4, d_ff=24, num_layers=2, num_heads=2, feed_forward_proj="gated-gelu")
    hf_model = transformers.T5ForConditionalGeneration(
        transformers.T5Config(**sizes, tie_word_embeddings=False, decoder_start_token_id=0)
    )
    hf_model.save_pretrained("theirs")
    names = {"emb_dim": 16, "head_dim": 4, "mlp_dim": 24, "num_encoder_layers": 2, "num_decoder_layers": 2, "num_heads": 2}
    flags = [f"--gin.TransformerConfig.{name}={value}" for name, value in names.items()]
    return "theirs", ["--gin_file=models/t5_1_1/tiny.gin", f"--gin.SentencePieceVocabulary.path={pieces}", *flags]


@pytest.mark.exhaustive
@pytest.mark.parametrize("write_checkpoint", [from_t5x, from_hugging_face])
def test_a_published_kind_of_checkpoint_is_fine_tuned_as_with_t5x(write_checkpoint, tmp_path, capsys):
    """INITIAL_CHECKPOINT_PATH, runs/finetune.gin and a task of the suite; nothing else but where records lie."""
    path, flags = write_checkpoint(shared_data("t5_vocabulary") / "sentencepiece.model")
    cb = shared_data("eval", "superglue", "CB")
    command = [
        "train", *flags, "--gin_file=runs/finetune.gin", "--gin.MIXTURE_OR_TASK_NAME=t5_super_glue_cb",
        '--gin.TASK_FEATURE_LENGTHS={"inputs": 64, "targets": 8}', f"--gin.INITIAL_CHECKPOINT_PATH={path}",
        "--gin.DATA_SETS={'super_glue/cb': @cb/Records()}",
        f"--gin.cb/Records.files={{'train': '{cb}/train.jsonl', 'validation': '{cb}/val.jsonl'}}",
        "--gin.MODEL_DIR=tuned", "--gin.TRAIN_STEPS=2", "--gin.EVAL_PERIOD=1", "--gin.CHECKPOINT_PERIOD=1", "--gin.BATCH_SIZE=8",
        "--gin.MetricsEvaluation.num_examples=8", "--gin.DataConfig.eval_steps=1", '--gin.TransformerConfig.dtype="float32"',
        "--gin.LearningRate.base_learning_rate=1e-9",
    ]  # fmt: skip
    assert main(command) == 0
    report = json.loads((tmp_path / "tuned/evals/infer/2.json").read_text())
    assert report["results"]["t5_super_glue_cb"].keys() == {"mean_3class_f1", "accuracy"}
    best = json.loads((tmp_path / "tuned/evals/infer/best.json").read_text())
    assert best["super_glue"]["parts"]["CB"]["step"] == 1 and "BoolQ" in best["super_glue"]["missing"]
    capsys.readouterr()
    # At this rate nothing is learned: what was fine-tuned is what was loaded.
    assert main(["convert", f"--source={path}", "--to=t5x_lab", "--target=base", *flags]) == 0
    result, expected = jax.tree.leaves(t5x_lab.load("tuned").params), jax.tree.leaves(t5x_lab.load("base").params)
    for first, other in zip(result, expected, strict=True):
        np.testing.assert_allclose(first, other, atol=1e-6)


def test_steps_that_branch_on_tensors_are_read_among_many_tasks_too(tmp_path, monkeypatch):
    """Tasks such as WSC have functions that TensorFlow converts. More than 16 tasks are read within one function."""
    set_max_separate_tasks(monkeypatch, 1)
    prompts = Prompts(
        data_sets={
            **in_files(tmp_path, "t5_super_glue_wsc_simple_train", made_up("t5_super_glue_wsc_simple_train")).data_sets,
            **in_files(tmp_path / "dpr", "t5_dpr_simple", made_up("t5_dpr_simple")).data_sets,
        }
    )
    config = DataConfig("t5_wsc_dpr", {"inputs": 128, "targets": 32}, 4, ByteVocabulary(), prompts=prompts, shards=2)
    batch = next(pipeline.SeqioBatches(resolve_mixture(config, "encoder_decoder"), config, seed=0))
    assert seqio.ByteVocabulary(100).decode(batch["encoder_input_tokens"][0].tolist()).startswith("wsc: ")
