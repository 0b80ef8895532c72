"""T5 text-to-text suite: GLUE, SuperGLUE, SQuAD, CNN/Daily Mail and WMT in the format of Raffel et al. (2020), appendix D.

    t5_glue_cola, t5_super_glue_boolq, t5_squad, …        tasks, see `SUITE`
    t5_glue, t5_super_glue, t5_supervised                 examples-proportional mixtures, see `MIXTURES`
    t5_supervised_without_t5_squad_and_t5_glue            a mixture without some tasks

Preprocessors, postprocessors and metrics are those of the `t5` library. Names are its names without versions. Names with
versions (glue_cola_v002, glue_v002_proportional) work too, unless the library's own tasks have been imported. Records are read
from TensorFlow Datasets, or from the locations that RECORDS and DATA_SETS set for "glue/cola", "super_glue/boolq" and so on.
"""

import collections
import dataclasses
import functools
import re
from collections.abc import Callable, Sequence
from typing import Any

import seqio

from t5x_lab.config.errors import UserError
from t5x_lab.data.tasks.text_tasks import BYTE_VOCABULARY
from t5x_lab.papers import data_sets as _registered  # noqa: F401  (registers the data sets)
from t5x_lab.papers.t5.typed_records import to_typed_tensors
from t5x_lab.prompts.config import PromptConfig, Records
from t5x_lab.prompts.data_sets import DATA_SETS
from t5x_lab.prompts.names import FAMILIES, TaskFamily
from t5x_lab.prompts.records.locations import RecordLocation
from t5x_lab.prompts.records.sources import open_records
from t5x_lab.prompts.records.subsets import OnlySplits
from t5x_lab.prompts.tasks.registry import register

PREFIX = "t5_"
_ALL, _NO_TRAIN, _TEST = ("train", "validation", "test"), ("validation", "test"), ("test",)


@dataclasses.dataclass(frozen=True)
class TextToText:
    """Text-to-text format of a data set.

    Attributes:
      preprocess: SeqIO preprocessor from the data set's fields to "inputs" and "targets".
      postprocess: f(text, example=, is_target=) -> input of the metrics. None = the text.
      metrics: f(targets, predictions) -> numbers by name.
    """

    preprocess: Callable
    postprocess: Callable | None = None
    metrics: Sequence[Callable] = ()


@dataclasses.dataclass(frozen=True)
class SuiteEntry:
    """Task of the suite.

    Attributes:
      data_set: name of a built-in data set.
      tfds: name in TensorFlow Datasets, with the version.
      text_to_text: f(entry) -> its format. The `t5` library is imported when it is called.
      splits: splits of the task.
      benchmark: benchmark whose average it counts in, "" for none.
      part: part of the benchmark. Tasks and metrics of a part are averaged first.
      counted: metrics that count in the average, () for all.
      train: number of training examples if it differs from that of records.
      names: paths of fields in the data set's own files or on Hugging Face's hub, see `Records`.
    """

    data_set: str
    tfds: str
    text_to_text: Callable[["SuiteEntry"], TextToText]
    splits: tuple[str, ...] = _ALL
    benchmark: str = ""
    part: str = ""
    counted: tuple[str, ...] = ()
    train: int | None = None
    names: dict[str, str] = dataclasses.field(default_factory=dict)

    @functools.cached_property
    def features(self) -> Any:
        """Features of the data set in TensorFlow Datasets. No data are prepared or read."""
        return self._builder.info.features

    @property
    def config(self) -> Any:
        """`BuilderConfig` of TensorFlow Datasets, which the `t5` library's functions take."""
        return self._builder.builder_config

    @functools.cached_property
    def _builder(self) -> Any:
        import tensorflow_datasets as tfds

        return tfds.builder(self.tfds, try_gcs=False)


class SuiteTask(seqio.Task):
    """SeqIO task with a known size and a place in a benchmark's average, see `t5x_lab.evaluation.metrics.benchmarks`."""

    def __init__(self, *args, entry: SuiteEntry, train: int | None, **options):
        super().__init__(*args, **options)
        self.data_set, self.prompt = entry.data_set, ""
        self.benchmark, self.part, self.counted, self.train = entry.benchmark, entry.part, entry.counted, train
        self.parts = collections.Counter(e.part for e in SUITE.values() if e.benchmark == entry.benchmark)

    def num_input_examples(self, split: str) -> int | None:
        return self.train if self.train and split == "train" else super().num_input_examples(split)


def _glue_format(entry: SuiteEntry) -> TextToText:
    from t5.data import glue_utils

    from t5x_lab.papers.t5 import metrics as t5_metrics

    name = entry.config.name
    metrics = glue_utils.GLUE_METRICS if entry.data_set.startswith("glue/") else glue_utils.SUPERGLUE_METRICS
    postprocess = t5_metrics.similarity if name == "stsb" else glue_utils.get_glue_postprocess_fn(entry.config)
    return TextToText(glue_utils.get_glue_text_preprocessor(entry.config), postprocess, metrics[name])


def _axb_format(entry: SuiteEntry) -> TextToText:
    """AX-b has the fields of GLUE's RTE and the format of SuperGLUE's."""
    from t5.data import preprocessors

    rename = functools.partial(
        preprocessors.rekey,
        key_map={"premise": "sentence1", "hypothesis": "sentence2", "label": "label", "idx": "idx"},
    )
    rte = _glue_format(entry)
    return dataclasses.replace(rte, preprocess=lambda dataset: rte.preprocess(rename(dataset)))


def _wsc_format(entry: SuiteEntry) -> TextToText:
    """The target is the noun that a pronoun refers to. Training uses only examples with the right noun (section 2.4)."""
    from t5.data import postprocessors, preprocessors
    from t5.evaluation import metrics

    if "train" in entry.splits:
        return TextToText(functools.partial(preprocessors.wsc_simple, correct_referent_only=True))
    preprocess = preprocessors.wnli_simple if entry.data_set == "glue/wnli" else preprocessors.wsc_simple
    return TextToText(preprocess, postprocessors.wsc_simple, [metrics.accuracy])


def _dpr_format(entry: SuiteEntry) -> TextToText:
    from t5.data import preprocessors
    from t5.evaluation import metrics

    return TextToText(preprocessors.definite_pronoun_resolution_simple, None, [metrics.accuracy])


def _squad_format(entry: SuiteEntry) -> TextToText:
    from t5.data import postprocessors, preprocessors
    from t5.evaluation import metrics

    return TextToText(preprocessors.squad, postprocessors.qa, [metrics.squad])


def _cnn_dailymail_format(entry: SuiteEntry) -> TextToText:
    from t5.data import preprocessors

    from t5x_lab.papers.t5 import metrics as t5_metrics

    fields = {"article_key": "article", "summary_key": "highlights"}
    return TextToText(functools.partial(preprocessors.summarize, **fields), None, [t5_metrics.rouge])


def _wmt_format(entry: SuiteEntry) -> TextToText:
    from t5.data import preprocessors
    from t5.evaluation import metrics

    language = entry.data_set.rpartition("/")[2].removesuffix("-en")
    languages = {"source_language": "en", "target_language": language}
    return TextToText(functools.partial(preprocessors.translate, **languages), None, [metrics.bleu])


def _glue(name: str, part: str = "", splits: tuple[str, ...] = _ALL, data_set: str = "") -> SuiteEntry:
    return SuiteEntry(f"glue/{data_set or name}", f"glue/{name}:2.0.0", _glue_format, splits, "glue" if part else "", part)


def _super_glue(
    name: str, part: str = "", splits: tuple[str, ...] = _ALL, text_to_text: Callable = _glue_format, **options: Any
) -> SuiteEntry:
    benchmark = "super_glue" if part else ""
    return SuiteEntry(f"super_glue/{name}", f"super_glue/{name}:1.0.2", text_to_text, splits, benchmark, part, **options)


def _wmt(year: str, language: str) -> SuiteEntry:
    names = {code: f"translation.{code}" for code in ("en", language)}
    data_set, tfds = f"wmt{year}/{language}-en", f"wmt{year}_translate/{language}-en:1.0.0"
    benchmark, part = f"wmt{year}_en{language}", f"En-{language.capitalize()}"
    return SuiteEntry(data_set, tfds, _wmt_format, benchmark=benchmark, part=part, names=names)


_SPANS = {name: f"target.{name}" for name in ("span1_text", "span1_index", "span2_text", "span2_index")}


SUITE: dict[str, SuiteEntry] = {
    "t5_glue_cola": _glue("cola", "CoLA"),
    "t5_glue_sst2": _glue("sst2", "SST-2"),
    "t5_glue_mrpc": _glue("mrpc", "MRPC"),
    "t5_glue_stsb": _glue("stsb", "STS-B"),
    "t5_glue_qqp": _glue("qqp", "QQP"),
    "t5_glue_mnli": _glue("mnli", splits=("train",), data_set="mnli_matched"),
    "t5_glue_mnli_matched": _glue("mnli_matched", "MNLI", _NO_TRAIN),
    "t5_glue_mnli_mismatched": _glue("mnli_mismatched", "MNLI", _NO_TRAIN),
    "t5_glue_qnli": _glue("qnli", "QNLI"),
    "t5_glue_rte": _glue("rte", "RTE"),
    "t5_glue_wnli": _glue("wnli"),  # in no average (section 2.3)
    "t5_glue_wnli_simple_eval": SuiteEntry("glue/wnli", "glue/wnli:2.0.0", _wsc_format, _NO_TRAIN),
    "t5_glue_ax": _glue("ax", splits=_TEST),
    "t5_super_glue_boolq": _super_glue("boolq", "BoolQ"),
    "t5_super_glue_cb": _super_glue("cb", "CB"),
    "t5_super_glue_copa": _super_glue("copa", "COPA"),
    "t5_super_glue_multirc": _super_glue("multirc", "MultiRC"),
    "t5_super_glue_record": _super_glue("record", "ReCoRD", train=138_854),  # one example per right answer
    "t5_super_glue_rte": _super_glue("rte", "RTE"),
    "t5_super_glue_wic": _super_glue("wic", "WiC"),
    "t5_super_glue_wsc_simple_train": _super_glue(
        "wsc.fixed", splits=("train",), text_to_text=_wsc_format, train=259, names=_SPANS
    ),
    "t5_super_glue_wsc_simple_eval": _super_glue("wsc.fixed", "WSC", _NO_TRAIN, _wsc_format, names=_SPANS),
    "t5_super_glue_axb": _super_glue("axb", splits=_TEST, text_to_text=_axb_format),
    "t5_super_glue_axg": _super_glue("axg", splits=_TEST),
    "t5_dpr_simple": SuiteEntry(
        "definite_pronoun_resolution", "definite_pronoun_resolution:1.1.0", _dpr_format, ("train", "test")
    ),
    "t5_squad": SuiteEntry("squad", "squad/v1.1:3.0.0", _squad_format, ("train", "validation"), "squad", "SQuAD", ("em",)),
    "t5_cnn_dailymail": SuiteEntry(
        "cnn_dailymail/3.0.0", "cnn_dailymail:3.4.0", _cnn_dailymail_format, _ALL, "cnn_dailymail", "CNN/DM", ("rouge2",)
    ),
    "t5_wmt_t2t_ende": _wmt("_t2t", "de"),
    "t5_wmt14_ende": _wmt("14", "de"),
    "t5_wmt14_enfr": _wmt("14", "fr"),
    "t5_wmt15_enfr": _wmt("15", "fr"),
    "t5_wmt16_enro": _wmt("16", "ro"),
}

_MNLI = ("t5_glue_mnli", "t5_glue_mnli_matched", "t5_glue_mnli_mismatched")
_WSC = ("t5_dpr_simple", "t5_super_glue_wsc_simple_train", "t5_super_glue_wsc_simple_eval")
_ALONE = ("t5_squad", "t5_cnn_dailymail", "t5_wmt_t2t_ende", "t5_wmt15_enfr", "t5_wmt16_enro")

# Tasks that are only evaluated have no training split. WNLI is never trained on (appendix B).
MIXTURES: dict[str, tuple[str, ...]] = {
    "t5_glue_mnli_and_dev": _MNLI,
    "t5_wsc_dpr": _WSC,
    "t5_glue": (*(f"t5_glue_{name}" for name in ("cola", "sst2", "mrpc", "stsb", "qqp", "qnli", "rte")), *_MNLI, "t5_glue_ax"),
    "t5_super_glue": (
        *(f"t5_super_glue_{name}" for name in ("boolq", "cb", "copa", "multirc", "record", "rte", "wic", "axb", "axg")),
        *_WSC,
    ),
}
MIXTURES["t5_super_glue_wsc"] = _WSC[1:]
MIXTURES["t5_supervised"] = (*MIXTURES["t5_glue"], *MIXTURES["t5_super_glue"], *_ALONE)


_LIBRARY_NAMES = {  # names of the `t5` library that do not follow the rule
    "glue_v002_proportional": "t5_glue",
    "super_glue_v102_proportional": "t5_super_glue",
    "wsc_dpr_simple_proportional": "t5_wsc_dpr",
    "squad_v010_allanswers": "t5_squad",
}


def _normalize_name(name: str) -> str:
    """Converts a name of the `t5` library to ours. Returns any other name unchanged."""
    if name in _LIBRARY_NAMES:
        return _LIBRARY_NAMES[name]
    has_version = re.search(r"_v\d{3}(_|$)", name)
    return re.sub(r"_v\d{3}(?=_|$)", "", f"{PREFIX}{name}") if has_version else name


def names() -> list[str]:
    """Returns the names of all tasks and mixtures."""
    return [*SUITE, *MIXTURES]


def register_suite_task(name: str, prompts: PromptConfig) -> bool:
    """Registers a task or mixture of the suite with SeqIO. Returns False for any other name.

    Args:
      name: see above.
      prompts: settings of the run, which may set record locations.
    """
    normalized = _normalize_name(name)
    if normalized in SUITE:
        register(_make_task(name, SUITE[normalized], prompts))
        return True
    members = _mixture_members(name)
    for member in members:
        register(_make_task(member, SUITE[member], prompts))
    if members:
        register(seqio.Mixture(name, [(member, _num_training_examples) for member in members]))
    return bool(members)


def exclude(name: str, tasks: Sequence[str]) -> str:
    """Returns the name of the mixture without these tasks, "" if it is not a mixture of the suite."""
    joint = "_and_" if "_without_" in name else "_without_"
    return f"{name}{joint}{'_and_'.join(tasks)}" if tasks and _mixture_members(name) else ""


def _mixture_members(name: str) -> tuple[str, ...]:
    whole, separator, excluded_names = name.partition("_without_")
    base = _normalize_name(whole)
    if not separator or base not in MIXTURES:
        return MIXTURES.get(base, ()) if not separator else ()
    excluded = _parse_excluded(excluded_names, base)
    tasks = tuple(task for task in MIXTURES[base] if task not in excluded)
    if not any("train" in SUITE[task].splits for task in tasks):
        raise UserError(f'The mixture "{name}" has no training task left. Exclude fewer tasks.')
    return tasks


def _parse_excluded(names: str, base: str) -> set[str]:
    """Returns the tasks of a mixture that are named in "a_and_b". Names may contain "_and_" themselves."""
    excluded: set[str] = set()
    parts = names.split("_and_")
    while parts:
        for number in range(len(parts), 0, -1):
            name = _normalize_name("_and_".join(parts[:number]))
            name = name if name.startswith(PREFIX) else f"{PREFIX}{name}"
            tasks = [task for task in MIXTURES.get(name, (name,)) if task in MIXTURES[base]]
            if tasks:
                break
        else:
            nested = [other for other, tasks in MIXTURES.items() if other != base and set(tasks) & set(MIXTURES[base])]
            raise UserError(
                f'"{base}" has no task "{name}" to exclude. It has {", ".join(MIXTURES[base])}, and the mixtures '
                f"{', '.join(nested)}."
            )
        excluded.update(tasks)
        del parts[:number]
    return excluded


def _num_training_examples(task: seqio.Task) -> float:
    """Returns the mixing rate of a task: its number of training examples, 0 if it is only evaluated."""
    return float(task.num_input_examples("train") or 0) if "train" in task.splits else 0.0


def _make_task(name: str, entry: SuiteEntry, prompts: PromptConfig) -> SuiteTask:
    data_set = DATA_SETS[entry.data_set]
    location, text_to_text = RecordLocation(data_set, prompts), entry.text_to_text(entry)
    if location.configured is None:
        source, steps = open_records(entry.data_set, Records(tfds=entry.tfds), entry.splits), []
    else:
        records = dataclasses.replace(location.fields, names={**entry.names, **location.fields.names})
        steps = [functools.partial(to_typed_tensors, records=records, features=entry.features, name=entry.data_set)]
        source = OnlySplits(location.source(), entry.splits, entry.data_set)
    num_examples = isinstance(location.configured, Records) and location.configured.num_examples
    return SuiteTask(
        name,
        source,
        entry=entry,
        train=num_examples or entry.train or data_set.train or None,
        preprocessors=[
            *steps,
            text_to_text.preprocess,
            seqio.preprocessors.tokenize,
            seqio.CacheDatasetPlaceholder(),
            seqio.preprocessors.append_eos_after_trim,
        ],
        postprocess_fn=text_to_text.postprocess,
        metric_fns=list(text_to_text.metrics),
        output_features={"inputs": seqio.Feature(BYTE_VOCABULARY, required=False), "targets": seqio.Feature(BYTE_VOCABULARY)},
    )


FAMILIES.append(TaskFamily(register_suite_task, exclude, names))
