"""T5's text-to-text suite: GLUE, SuperGLUE, SQuAD, CNN/Daily Mail and WMT in the words of Raffel et al. (2020), appendix D.

    t5_glue_cola, t5_super_glue_boolq, t5_squad, …        a task each, see `SUITE`
    t5_glue, t5_super_glue, t5_supervised                 mixtures at rates of their sizes, see `MIXTURES`
    t5_supervised_without_t5_squad_and_t5_glue            without some of these

Steps before and behind a model, and metrics, are the `t5` library's own, and so are its names of them, without versions; with
these (glue_cola_v002, glue_v002_proportional) they stand for the same, unless the library's own have been imported.
Records are read from TensorFlow Datasets, in the version that its package makes, or from where RECORDS and DATA_SETS say that
those of "glue/cola", "super_glue/boolq" and so on lie.
"""

import collections
import dataclasses
import functools
import re
from collections.abc import Callable, Sequence
from typing import Any

import seqio

from t5x_lab.config.errors import UserError
from t5x_lab.prompts.catalogue import CATALOGUE
from t5x_lab.prompts.config import Prompts, Records
from t5x_lab.prompts.places import RecordsOfDataSet
from t5x_lab.prompts.records import OnlySplits, source_of
from t5x_lab.prompts.registry import register
from t5x_lab.prompts.typed import typed

START = "t5_"
_ALL, _NO_TRAIN, _TEST = ("train", "validation", "test"), ("validation", "test"), ("test",)


@dataclasses.dataclass(frozen=True)
class Words:
    """What T5 makes of records.

    Attributes:
      preprocess: step of a SeqIO task, from the data set's fields to "inputs" and "targets".
      postprocess: f(text, example=, is_target=) -> what metrics take; None = the text.
      metrics: f(targets, predictions) -> numbers by name.
    """

    preprocess: Callable
    postprocess: Callable | None = None
    metrics: Sequence[Callable] = ()


@dataclasses.dataclass(frozen=True)
class Entry:
    """A task of the suite.

    Attributes:
      data_set: in the catalogue, by name.
      tfds: its name in TensorFlow Datasets, with the version.
      words: makes its words; they are imported when it is asked for.
      splits: that it has.
      benchmark: whose average it counts in, "" for none.
      part: of the benchmark, whose tasks and metrics are averaged first.
      counted: the metrics of it that count; () for all.
      train: training examples, where these are another number than records.
      names: where fields are in the data set's own files or on Hugging Face's hub, see `Records`.
    """

    data_set: str
    tfds: str
    words: Callable[["Entry"], Words]
    splits: tuple[str, ...] = _ALL
    benchmark: str = ""
    part: str = ""
    counted: tuple[str, ...] = ()
    train: int | None = None
    names: dict[str, str] = dataclasses.field(default_factory=dict)

    @functools.cached_property
    def features(self) -> Any:
        """The data set's, as TensorFlow Datasets describes them; nothing is prepared or read for that."""
        return self._builder.info.features

    @property
    def config(self) -> Any:
        """What the `t5` library's functions take: TensorFlow Datasets' `BuilderConfig`."""
        return self._builder.builder_config

    @functools.cached_property
    def _builder(self) -> Any:
        import tensorflow_datasets as tfds

        return tfds.builder(self.tfds, try_gcs=False)


class SuiteTask(seqio.Task):
    """A SeqIO task that knows its size, and counts in the average of a benchmark, see `t5x_lab.evaluation.benchmarks`."""

    def __init__(self, *args, entry: Entry, train: int | None, **options):
        super().__init__(*args, **options)
        self.data_set, self.prompt = entry.data_set, ""
        self.benchmark, self.part, self.counted, self.train = entry.benchmark, entry.part, entry.counted, train
        self.parts = collections.Counter(other.part for other in SUITE.values() if other.benchmark == entry.benchmark)

    def num_input_examples(self, split: str) -> int | None:
        return self.train if self.train and split == "train" else super().num_input_examples(split)


def _of_glue(entry: Entry) -> Words:
    from t5.data import glue_utils

    from t5x_lab.prompts import t5_metrics

    name = entry.config.name
    metrics = glue_utils.GLUE_METRICS if entry.data_set.startswith("glue/") else glue_utils.SUPERGLUE_METRICS
    after = t5_metrics.similarity if name == "stsb" else glue_utils.get_glue_postprocess_fn(entry.config)
    return Words(glue_utils.get_glue_text_preprocessor(entry.config), after, metrics[name])


def _of_axb(entry: Entry) -> Words:
    """AX-b has the fields of GLUE's RTE, and is asked as SuperGLUE's."""
    from t5.data import preprocessors

    renamed = functools.partial(
        preprocessors.rekey,
        key_map={"premise": "sentence1", "hypothesis": "sentence2", "label": "label", "idx": "idx"},
    )
    words = _of_glue(entry)
    return dataclasses.replace(words, preprocess=lambda dataset: words.preprocess(renamed(dataset)))


def _of_wsc(entry: Entry) -> Words:
    """The noun that a pronoun stands for is written; trained only where the one in question is right (section 2.4)."""
    from t5.data import postprocessors, preprocessors
    from t5.evaluation import metrics

    if "train" in entry.splits:
        return Words(functools.partial(preprocessors.wsc_simple, correct_referent_only=True))
    of = preprocessors.wnli_simple if entry.data_set == "glue/wnli" else preprocessors.wsc_simple
    return Words(of, postprocessors.wsc_simple, [metrics.accuracy])


def _of_dpr(entry: Entry) -> Words:
    from t5.data import preprocessors
    from t5.evaluation import metrics

    return Words(preprocessors.definite_pronoun_resolution_simple, None, [metrics.accuracy])


def _of_squad(entry: Entry) -> Words:
    from t5.data import postprocessors, preprocessors
    from t5.evaluation import metrics

    return Words(preprocessors.squad, postprocessors.qa, [metrics.squad])


def _of_cnn_dailymail(entry: Entry) -> Words:
    from t5.data import preprocessors

    from t5x_lab.prompts import t5_metrics

    fields = {"article_key": "article", "summary_key": "highlights"}
    return Words(functools.partial(preprocessors.summarize, **fields), None, [t5_metrics.rouge])


def _of_wmt(entry: Entry) -> Words:
    from t5.data import preprocessors
    from t5.evaluation import metrics

    other = entry.data_set.rpartition("/")[2].removesuffix("-en")
    languages = {"source_language": "en", "target_language": other}
    return Words(functools.partial(preprocessors.translate, **languages), None, [metrics.bleu])


def _glue(name: str, part: str = "", splits: tuple[str, ...] = _ALL, of: str = "") -> Entry:
    return Entry(f"glue/{of or name}", f"glue/{name}:2.0.0", _of_glue, splits, "glue" if part else "", part)


def _super_glue(name: str, part: str = "", splits: tuple[str, ...] = _ALL, words: Callable = _of_glue, **more: Any) -> Entry:
    benchmark = "super_glue" if part else ""
    return Entry(f"super_glue/{name}", f"super_glue/{name}:1.0.2", words, splits, benchmark, part, **more)


def _wmt(year: str, other: str) -> Entry:
    names, title = {language: f"translation.{language}" for language in ("en", other)}, f"wmt{year}_en{other}"
    data_set, tfds = f"wmt{year}/{other}-en", f"wmt{year}_translate/{other}-en:1.0.0"
    return Entry(data_set, tfds, _of_wmt, benchmark=title, part=f"En-{other.capitalize()}", names=names)


_SPANS = {name: f"target.{name}" for name in ("span1_text", "span1_index", "span2_text", "span2_index")}


SUITE: dict[str, Entry] = {
    "t5_glue_cola": _glue("cola", "CoLA"),
    "t5_glue_sst2": _glue("sst2", "SST-2"),
    "t5_glue_mrpc": _glue("mrpc", "MRPC"),
    "t5_glue_stsb": _glue("stsb", "STS-B"),
    "t5_glue_qqp": _glue("qqp", "QQP"),
    "t5_glue_mnli": _glue("mnli", splits=("train",), of="mnli_matched"),
    "t5_glue_mnli_matched": _glue("mnli_matched", "MNLI", _NO_TRAIN),
    "t5_glue_mnli_mismatched": _glue("mnli_mismatched", "MNLI", _NO_TRAIN),
    "t5_glue_qnli": _glue("qnli", "QNLI"),
    "t5_glue_rte": _glue("rte", "RTE"),
    "t5_glue_wnli": _glue("wnli"),  # in no average (section 2.3)
    "t5_glue_wnli_simple_eval": Entry("glue/wnli", "glue/wnli:2.0.0", _of_wsc, _NO_TRAIN),
    "t5_glue_ax": _glue("ax", splits=_TEST),
    "t5_super_glue_boolq": _super_glue("boolq", "BoolQ"),
    "t5_super_glue_cb": _super_glue("cb", "CB"),
    "t5_super_glue_copa": _super_glue("copa", "COPA"),
    "t5_super_glue_multirc": _super_glue("multirc", "MultiRC"),
    "t5_super_glue_record": _super_glue("record", "ReCoRD", train=138_854),  # an example for each right answer
    "t5_super_glue_rte": _super_glue("rte", "RTE"),
    "t5_super_glue_wic": _super_glue("wic", "WiC"),
    "t5_super_glue_wsc_simple_train": _super_glue("wsc.fixed", splits=("train",), words=_of_wsc, train=259, names=_SPANS),
    "t5_super_glue_wsc_simple_eval": _super_glue("wsc.fixed", "WSC", _NO_TRAIN, _of_wsc, names=_SPANS),
    "t5_super_glue_axb": _super_glue("axb", splits=_TEST, words=_of_axb),
    "t5_super_glue_axg": _super_glue("axg", splits=_TEST),
    "t5_dpr_simple": Entry("definite_pronoun_resolution", "definite_pronoun_resolution:1.1.0", _of_dpr, ("train", "test")),
    "t5_squad": Entry("squad", "squad/v1.1:3.0.0", _of_squad, ("train", "validation"), "squad", "SQuAD", ("em",)),
    "t5_cnn_dailymail": Entry(
        "cnn_dailymail/3.0.0", "cnn_dailymail:3.4.0", _of_cnn_dailymail, _ALL, "cnn_dailymail", "CNN/DM", ("rouge2",)
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

# Those that are only evaluated have no training split. WNLI is never trained on (appendix B).
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


_T5S = {
    "glue_v002_proportional": "t5_glue",
    "super_glue_v102_proportional": "t5_super_glue",
    "wsc_dpr_simple_proportional": "t5_wsc_dpr",
    "squad_v010_allanswers": "t5_squad",
}


def _here(name: str) -> str:
    """What the `t5` library calls so, by its name here; another name is what it is."""
    return _T5S.get(name) or (re.sub(r"_v\d{3}(?=_|$)", "", f"{START}{name}") if re.search(r"_v\d{3}(_|$)", name) else name)


def names() -> list[str]:
    return [*SUITE, *MIXTURES]


def declare(name: str, prompts: Prompts) -> bool:
    """Makes a task or mixture of the suite known to SeqIO; False where the name is none of these.

    Args:
      name: see above.
      prompts: of the run, which may say where records lie.
    """
    here = _here(name)
    if here in SUITE:
        register(_task(name, SUITE[here], prompts))
        return True
    found = _members(name)
    for member in found:
        register(_task(member, SUITE[member], prompts))
    if found:
        register(seqio.Mixture(name, [(member, _size) for member in found]))
    return bool(found)


def without(name: str, tasks: Sequence[str]) -> str:
    """The name of the mixture without these of its tasks; "" where it is none of the suite's."""
    joint = "_and_" if "_without_" in name else "_without_"
    return f"{name}{joint}{'_and_'.join(tasks)}" if tasks and _members(name) else ""


def _members(name: str) -> tuple[str, ...]:
    whole, is_less, rest = name.partition("_without_")
    base = _here(whole)
    if not is_less or base not in MIXTURES:
        return MIXTURES.get(base, ()) if not is_less else ()
    left_out = _left_out(rest, base)
    kept = tuple(task for task in MIXTURES[base] if task not in left_out)
    if not any("train" in SUITE[task].splits for task in kept):
        raise UserError(f'Nothing to train on is left of the mixture "{name}". Leave out less.')
    return kept


def _left_out(names: str, base: str) -> set[str]:
    """The tasks that names, joined by "_and_", stand for in a mixture; a name may have an "_and_" of its own."""
    found: set[str] = set()
    parts = names.split("_and_")
    while parts:
        for number in range(len(parts), 0, -1):
            name = _here("_and_".join(parts[:number]))
            name = name if name.startswith(START) else f"{START}{name}"
            tasks = [task for task in MIXTURES.get(name, (name,)) if task in MIXTURES[base]]
            if tasks:
                break
        else:
            within = [other for other, tasks in MIXTURES.items() if other != base and set(tasks) & set(MIXTURES[base])]
            raise UserError(
                f'"{base}" has no "{name}" to leave out; it has {", ".join(MIXTURES[base])}, and those of {", ".join(within)}.'
            )
        found.update(tasks)
        del parts[:number]
    return found


def _size(task: seqio.Task) -> float:
    """Training examples, of which mixtures make rates; none of what is only evaluated."""
    return float(task.num_input_examples("train") or 0) if "train" in task.splits else 0.0


def _task(name: str, entry: Entry, prompts: Prompts) -> SuiteTask:
    from t5x_lab.data.texts import VOCABULARY

    data_set = CATALOGUE[entry.data_set]
    records, words = RecordsOfDataSet(data_set, prompts), entry.words(entry)
    if records.said is None:
        source, steps = source_of(entry.data_set, Records(tfds=entry.tfds), entry.splits), []
    else:
        fields = dataclasses.replace(records.fields, names={**entry.names, **records.fields.names})
        steps = [functools.partial(typed, records=fields, features=entry.features, name=entry.data_set)]
        source = OnlySplits(records.source(), entry.splits, entry.data_set)
    said = isinstance(records.said, Records) and records.said.num_examples
    return SuiteTask(
        name,
        source,
        entry=entry,
        train=said or entry.train or data_set.train or None,
        preprocessors=[
            *steps,
            words.preprocess,
            seqio.preprocessors.tokenize,
            seqio.CacheDatasetPlaceholder(),
            seqio.preprocessors.append_eos_after_trim,
        ],
        postprocess_fn=words.postprocess,
        metric_fns=list(words.metrics),
        output_features={"inputs": seqio.Feature(VOCABULARY, required=False), "targets": seqio.Feature(VOCABULARY)},
    )
