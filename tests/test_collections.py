"""T0's and FLAN's collections: their counts, their rates, what they hold out, exemplars, and what is said of what is wrong."""

import collections
import dataclasses
import itertools
import json
import re
import statistics

import pytest
import seqio
import synthetic_flan  # noqa: F401  (adds its data sets)
import synthetic_records
from conftest import shared_data

from t5x_lab.config.errors import NotHere, UserError
from t5x_lab.papers.data_sets import T0_EVAL, T0_TRAIN
from t5x_lab.papers.flan import clusters as flan
from t5x_lab.papers.flan.collections import TEMPLATES
from t5x_lab.prompts.config import Collection, FewShot, Records
from t5x_lab.prompts.data_sets import DATA_SETS, USER_SOURCES
from t5x_lab.prompts.prompts import Prompts
from t5x_lab.prompts.tasks.registry import task_data_sets
from t5x_lab.prompts.templates.files import data_sets_in, read_templates
from t5x_lab.runs.config.gin_config import GinConfig

LENGTHS = {"inputs": 256, "targets": 64}
text_of = lambda ids: seqio.ByteVocabulary(100).decode(ids.tolist())


@pytest.fixture(scope="module")
def records(tmp_path_factory):
    """A rule for synthetic records of all data sets."""
    return Records(files=synthetic_records.write_all(tmp_path_factory.mktemp("records"), 40))


@pytest.fixture
def prompts(records):
    return Prompts(templates=(str(shared_data("prompts", "promptsource_templates")),), records=records)


@pytest.fixture
def own(records):
    """Prompts with t5x_lab's own templates alone."""
    return Prompts(records=records)


def mixture(name, prompts):
    assert prompts.register(name)
    return seqio.MixtureRegistry.get(name)


def rates(mixture_object):
    return {task.name: mixture_object.get_rate(task) for task in mixture_object.tasks}


def sets_in(mixture_object):
    return set(task_data_sets(task.name for task in mixture_object.tasks))


def slugs(names):
    return {DATA_SETS[name].slug for name in names}


def test_t0_train_has_its_data_sets_templates_and_rates(prompts):
    """Counts and sums of Wang et al.'s and T0's mixture, with the shares of its largest five."""
    t0_train = mixture("t0_train", prompts)
    assert len(T0_TRAIN) == len(sets_in(t0_train)) == 38 and len(t0_train.tasks) == 313
    result = rates(t0_train)
    assert sum(result.values()) == 17_277_798
    of_set = collections.Counter()
    for name, rate in result.items():
        of_set[task_data_sets([name])[0]] += rate
    shares = {name: round(100 * rate / 17_277_798, 1) for name, rate in of_set.most_common(5)}
    assert shares == {
        "cnn_dailymail_3.0.0": 15.0, "glue_qqp": 12.6, "xsum": 11.8, "app_reviews": 6.7, "ag_news": 4.9,
    }  # fmt: skip


def test_t0_eval_has_116_prompts_by_the_rule(prompts):
    t0_eval = mixture("t0_eval", prompts)
    per_set = {sub.name.removesuffix("_score_eval"): len(sub.tasks) for sub in t0_eval._sub_mixtures}
    assert sum(per_set.values()) == len(t0_eval.tasks) == 116
    assert per_set == {
        "super_glue_copa": 12, "hellaswag": 4, "story_cloze_2016": 5, "anli_r1": 15, "anli_r2": 15, "anli_r3": 15,
        "super_glue_cb": 15, "super_glue_rte": 10, "super_glue_wsc.fixed": 10, "winogrande_winogrande_xl": 5, "super_glue_wic": 10,
    }  # fmt: skip
    assert "anli_GPT_3_style_r1_score_eval" in {task.name for task in t0_eval.tasks}


# Held out: train and test, as the published code's own generator counts them.
SPLITS = {
    "summarization": (58, 11), "structure_to_text": (65, 4), "reading_comprehension": (61, 6), "open_domain_qa": (65, 4),
    "paraphrase": (55, 4), "sentiment": (65, 4), "text_formatting": (66, 3), "common_sense": (63, 4), "translation": (61, 8),
    "coreference": (66, 3), "entailment": (55, 10), "math": (68, 1), "conversational_qa": (67, 2), "word_disambiguation": (68, 1),
    "linguistic_acceptability": (68, 1), "question_classification": (68, 1), "read_comp_and_common_sense": (57, 2),
}  # fmt: skip


def test_flans_evaluations_have_all_data_sets_of_a_cluster(own):
    """Metrics of what is generated are those of the paper: BLEU, ROUGE, and exact match and F1 of question answering."""
    metrics = {}
    for cluster in flan.CLUSTERS:
        evaluation = mixture(f"flan_eval_{cluster}", own)
        assert sets_in(evaluation) == slugs(flan.cluster_data_sets(cluster)), cluster
        for task in evaluation.tasks:
            assert task.name.endswith("_generate_eval" if task.generates else "_score_eval")
            assert bool(task.metric_objs) == task.generates
        metrics[cluster] = {function.__name__ for task in evaluation.tasks for function in task.metric_fns}
    assert {cluster: names for cluster, names in metrics.items() if names} == {
        "summarization": {"rouge"}, "structure_to_text": {"rouge"}, "reading_comprehension": {"squad"},
        "open_domain_qa": {"trivia_qa"}, "text_formatting": {"accuracy"}, "translation": {"bleu"}, "math": {"accuracy"},
        "conversational_qa": {"squad"},
    }  # fmt: skip


@pytest.mark.parametrize("data_set", ["squad", "squad_v2", "nq_open", "trivia_qa_unfiltered", "xsum"])
def test_examples_for_generation_have_all_accepted_answers(data_set, own):
    for task in mixture(f"flan_{data_set}_generate_eval", own).tasks:
        examples = list(task.get_dataset(LENGTHS, "train", shuffle=False).as_numpy_iterator())
        assert len(examples) == 40
        for example in examples:
            references = task.postprocess_fn("unused", example=example, is_target=True)
            assert example["targets_pretokenized"].decode() in references and len(set(references)) == len(references)
            assert task.postprocess_fn("an answer", example=example) == "an answer"


def test_flan_holds_out_clusters(own):
    assert SPLITS.keys() == flan.CLUSTERS.keys()
    for cluster, (train, test) in SPLITS.items():
        flan_mixture = mixture(f"flan_without_{cluster}", own)
        assert (len(flan_mixture.tasks), len(flan.cluster_data_sets(cluster))) == (train, test), cluster
        assert not sets_in(flan_mixture) & slugs(flan.cluster_data_sets(cluster))
    assert [len(mixture(f"flan_{n}_clusters", own).tasks) for n in range(1, 8)] == [11, 19, 25, 29, 33, 36, 38]
    assert len(mixture("flan", own).tasks) == 69
    assert sets_in(mixture("flan_without_nli", own)) == sets_in(mixture("flan_without_entailment", own))
    assert len(flan.cluster_data_sets("misc")) == 3 + 1 + 2 + 1 + 1 + 1


def test_flans_relations_are_symmetric_and_each_set_is_held_out_by_its_clusters():
    for first, other in itertools.product(flan.CLUSTERS, repeat=2):
        without = {c for c in flan.CLUSTERS if not set(flan.CLUSTERS[c]) & set(flan.training_data_sets(first))}
        back = {c for c in flan.CLUSTERS if not set(flan.CLUSTERS[c]) & set(flan.training_data_sets(other))}
        assert (other in without) == (first in back)
    for name in {member for members in flan.CLUSTERS.values() for member in members}:
        own = {cluster for cluster, members in flan.CLUSTERS.items() if name in members}
        assert all(name not in flan.training_data_sets(cluster) for cluster in own)


def names_of(entry):
    """All that a data set is called: here, in TensorFlow Datasets and on the hub, with and without what it is a part of."""
    called = {entry.name, entry.source_name, entry.tfds, entry.hub.partition("/")[2].replace(":", "/")} - {""}
    parts = {name.split("/")[-1] for name in called if "/" in name and name.split("/")[0] in ("glue", "super_glue")}
    return {name.lower().replace(".fixed", "") for name in called | parts}


def test_no_held_out_data_set_reaches_a_training_mixture(prompts, own):
    """Equal data sets share clusters: "rte" of GLUE is that of SuperGLUE. FLAN itself chose WNLI and WSC, and the three over ParaCrawl."""
    by_slug = {entry.slug: entry for entry in DATA_SETS.values()}
    shared = {"para_crawl/enda"}
    evaluated = set().union(*(names_of(entry) for entry in T0_EVAL))
    trained = [by_slug[slug] for slug in sets_in(mixture("t0_train", prompts))]
    assert not [entry.name for entry in trained if names_of(entry) & evaluated]
    for cluster in flan.CLUSTERS:
        held_out = set().union(*(names_of(DATA_SETS[name]) for name in flan.cluster_data_sets(cluster))) - shared
        trained = [by_slug[slug] for slug in sets_in(mixture(f"flan_without_{cluster}", own))]
        assert not [entry.name for entry in trained if names_of(entry) & held_out], cluster


def test_flans_rates_are_capped(own):
    result = rates(mixture("flan_without_word_disambiguation", own))
    assert max(result.values()) == 3_000
    assert result["flan_super_glue_cb"] == 250 and result["flan_super_glue_rte"] == 2_490
    assert result["flan_anli_r3"] == 3_000 and result["flan_math_dataset"] == 40  # counted: nobody knows


def test_our_own_templates_are_ten_a_data_set_and_one_that_is_plain():
    sets = {DATA_SETS[name].source_name for members in flan.CLUSTERS.values() for name in members}
    assert sets <= set(data_sets_in((TEMPLATES.folder,)))
    for name in data_sets_in((TEMPLATES.folder,)):
        templates = read_templates((TEMPLATES.folder,), name)
        asking = [t for t in templates if not t.no_instruction]
        assert len(asking) == 10 and len(templates) == 11, name
        assert sum(t.inverted for t in asking) <= 3 and len({t.jinja for t in templates}) == 11
        assert all(t.original_task != t.inverted for t in templates)
        forward = [t for t in asking if not t.inverted]
        if any(t.answer_choices for t in forward):
            assert all(t.answer_choices for t in forward) and sum(t.choices_in_prompt for t in forward) >= 5, name


@pytest.mark.slow
def test_our_own_templates_render_and_their_targets_are_among_the_choices_shown():
    for name in data_sets_in((TEMPLATES.folder,)):
        for template in read_templates((TEMPLATES.folder,), name):
            renderings = [rendered for r in synthetic_records.records(name, 12) if (rendered := template.render(r))]
            assert renderings, template
            for rendered in renderings:
                assert not rendered.choices or (
                    rendered.targets in rendered.choices and len(set(rendered.choices)) == len(rendered.choices)
                )
                if template.choices_in_prompt and not template.inverted:
                    assert all(choice in rendered.inputs for choice in rendered.choices), template


def test_promptsources_templates_render_synthetic_records(prompts):
    """All 313 of T0's training and 116 of its evaluation say something of some record."""
    for entry in (*T0_TRAIN, *T0_EVAL):
        for template in read_templates(prompts.templates, entry.source_name):
            renderings = [template.render(record) for record in synthetic_records.records(entry.source_name, 60)]
            assert any(renderings), template


def test_multi_news_articles_are_told_apart(prompts):
    """Promptsource replaces separators in records with those that its templates look for."""
    template = next(t for t in read_templates(prompts.templates, "multi_news") if t.name == "distill")
    rendered = template.render({"document": "One. ||||| Two.", "summary": "– Both."})
    assert rendered.inputs.count("Article:") == 2 and "|||" not in rendered.inputs


def test_ablations_of_instructions(own):
    for end, start in (("plain", ""), ("named", "[super glue rte] ")):
        assert own.register(f"flan_super_glue_rte_{end}")
        task = seqio.TaskRegistry.get(f"flan_super_glue_rte_{end}")
        record = synthetic_records.records("super_glue/rte", 1)[0]
        example = next(task.get_dataset(LENGTHS, "train", shuffle=False, seed=0).as_numpy_iterator())
        assert text_of(example["inputs"]) == f"{start}{record['premise']}\n{record['hypothesis']}"[:256]
    own.register("flan_super_glue_rte_2templates")
    task = seqio.TaskRegistry.get("flan_super_glue_rte_2templates")
    two = read_templates((TEMPLATES.folder,), "super_glue/rte")[:2]
    both = {template.render(record).targets for record in synthetic_records.records("super_glue/rte", 40) for template in two}
    drawn = [text_of(x["targets"]) for x in task.get_dataset(LENGTHS, "train", shuffle=False, seed=0).as_numpy_iterator()]
    assert set(drawn) == both
    with pytest.raises(UserError, match='"super_glue/rte" has 10 templates, not 11'):
        own.register("flan_super_glue_rte_11templates")


def few_shot(prompts, name, seed=0, split="train", lengths=LENGTHS, **options):
    assert prompts.register(name)
    task = seqio.TaskRegistry.get(name)
    dataset = task.get_dataset(lengths, split, shuffle=False, seed=seed, **options)
    return [text_of(x["inputs"]) for x in dataset.as_numpy_iterator()]


BETWEEN = "\n<next>\n"


def with_few_shot(records, **options):
    return Prompts(records=records, few_shot=FewShot(before_input="Q: ", before_target="\nA: ", between=BETWEEN, **options))


@pytest.fixture
def questions(tmp_path):
    """150 records, of which every third is there twice, under another number; fields hold what separates exemplars."""
    results = [
        {
            "idx": n,
            "premise": f"premise {n % 100}{BETWEEN}and A: ||| more",
            "hypothesis": f"hypothesis {n % 100}.",
            "label": n % 2,
        }
        for n in range(150)
    ]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(record) + "\n" for record in results))
    return Records(files=str(tmp_path / "{split}.jsonl"))


@pytest.mark.parametrize("shots", [1, 2, 3, 5, 10])
def test_no_exemplar_is_the_question(shots, questions):
    """Brute force over all questions and three seeds; what separates exemplars may stand in fields."""
    lengths = {"inputs": 8_192, "targets": 64}
    prompts = with_few_shot(questions)
    template = read_templates((TEMPLATES.folder,), "super_glue/rte")[0]
    name = f"flan_super_glue_rte_{template.name}_{shots}_shot"
    questions_seen = set()
    for seed in range(3):
        for number, text in enumerate(few_shot(prompts, name, seed=seed, lengths=lengths)):
            numbers = [int(n) for n in re.findall(rf"premise (\d+){BETWEEN}", text)]
            assert len(numbers) == shots + 1 and numbers.count(number % 100) == 1 and numbers[-1] == number % 100
            assert text.count("Q: ") == shots + 1 and text.endswith("\nA: ") and "A: ||| more" in text
            questions_seen.add(tuple(numbers))
    assert len(questions_seen) > 350  # anew for each question and seed
    again = few_shot(prompts, name, seed=2, lengths=lengths)
    assert again == few_shot(prompts, name, seed=2, lengths=lengths)


def test_as_many_exemplars_as_fit_a_budget(records):
    budget = 1_500
    prompts = with_few_shot(records, budget=budget, most=16)
    counts = []
    for text in few_shot(prompts, "super_glue_rte_many_shot", split="validation", lengths={"inputs": 4_096, "targets": 64}):
        assert len(text.encode()) <= budget or text.count("Q: ") == 1
        counts.append(text.count("Q: ") - 1)
    assert 2 <= statistics.mean(counts) <= 16
    # Without a budget of its own, what inputs may hold, less one for an end token.
    texts = few_shot(
        with_few_shot(records), "super_glue_rte_10_shot", split="validation", lengths={"inputs": 512, "targets": 8}
    )
    assert all(len(text.encode()) <= 511 for text in texts) and any(text.count("Q: ") > 1 for text in texts)


def test_zero_shots_are_no_shots(records):
    assert few_shot(with_few_shot(records), "super_glue_rte_0_shot") == few_shot(Prompts(records=records), "super_glue_rte")


def test_a_collection_of_the_users_own(prompts, tmp_path):
    """Data sets of the user's own beside T0's, at a rate of their own."""
    (tmp_path / "templates" / "mine").mkdir(parents=True)
    (tmp_path / "templates" / "mine" / "templates.yaml").write_text(
        "dataset: mine\ntemplates:\n  one:\n    name: one\n    jinja: '{{text}} is? ||| {{answer_choices[label]}}'\n    answer_choices: a ||| b\n"
        "  two:\n    name: two\n    jinja: 'What is {{text}}? ||| {{answer_choices[label]}}'\n    answer_choices: a ||| b\n"
    )
    (tmp_path / "mine.jsonl").write_text("".join(json.dumps({"text": f"t{n}", "label": n % 2}) + "\n" for n in range(77)))
    own_prompts = Prompts(
        templates=(str(tmp_path / "templates"), *prompts.templates),
        records=prompts.records,
        data_sets={"mine": Records(files={"train": str(tmp_path / "mine.jsonl")})},
        collections={
            "both": Collection(("t0_train_without_quail", "mine")),
            "at_rate": Collection(("t0_train", "mine"), rates={"mine": 10_000.0}),
            "drawn": Collection(("mine", "super_glue/rte"), form="sampled", cap=None, maximum=50),
        },
    )
    result = rates(mixture("both", own_prompts))
    assert len(result) == 300 + 2 and result["mine_one"] == result["mine_two"] == 77
    assert result["glue_mrpc_equivalent"] == 3_668
    assert {n: r for n, r in rates(mixture("at_rate", own_prompts)).items() if n.startswith("mine")} == {
        "mine_one": 5e3,
        "mine_two": 5e3,
    }
    assert rates(mixture("drawn", own_prompts)) == {"mine": 50, "super_glue_rte": 50}
    assert len(mixture("both_5_shot", own_prompts).tasks) == 302


def test_a_data_set_that_a_module_registers(tmp_path):
    import t5x_lab.data_sets

    lines = [json.dumps(record) for record in synthetic_records.records("glue/cola", 5)]
    source = seqio.TextLineDataSource({"train": str(tmp_path / "a.txt")})
    (tmp_path / "a.txt").write_text("\n".join(lines))
    t5x_lab.data_sets.register("glue/cola", source)
    try:
        prompts = Prompts()
        assert prompts.register("glue_cola_plain")
        task = seqio.TaskRegistry.get("glue_cola_plain")
        assert [text_of(x["inputs"]) for x in task.get_dataset(LENGTHS, "train", shuffle=False).as_numpy_iterator()] == [
            json.loads(line)["sentence"] for line in lines
        ]
    finally:
        del USER_SOURCES["glue/cola"]
    with pytest.raises(UserError, match="must be Records or a seqio.DataSource"):
        t5x_lab.data_sets.register("mine", "a.txt")


@pytest.mark.parametrize(
    "name, options, says",
    [
        ("super_glue_rte", {"records": None}, 'The location of the records of the data set "super_glue/rte" is not set'),
        ("t0_train", {"templates": ()}, 'There are no templates for the data set "glue/mrpc"'),
        ("t0_train", {"templates": ("/nowhere",)}, "TEMPLATES contains the folder /nowhere, which has no <data set>/templates.yaml"),
        ("super_glue_rte_score_eval", {"templates": ("/nowhere",)}, "TEMPLATES contains the folder /nowhere, which has no <data set>/templates.yaml"),
        ("super_glue_rte", {"records": Records(files="x/{a,b}.jsonl")}, '"x/{a,b}.jsonl" contains unknown names in braces'),
        ("super_glue_rte", {"records": Records(hub="{hub")}, '"{hub" contains unknown names in braces'),
        ("one_without_quail", {"collections": {"one": Collection(("quail",))}}, 'The collection "one_without_quail" has no members left'),
        ("t0_train_without_quale", {}, 't0_train has no data set "quale". Did you mean "quail"'),
        ("c", {"collections": {"c": Collection(("jfleg",), form="ranked")}}, '"c" has no data set to evaluate: no template has choices to rank'),
        ("xsum_score_eval", {}, 'No template of the data set "xsum" has choices'),
        ("banking77_plain", {}, 'has no template with "no_instruction: true" in its metadata'),
        ("c", {"collections": {"c": Collection(("c",))}}, 'The collection "c" contains itself, directly or through a member'),
        ("c", {"collections": {"c": Collection(("d",)), "d": Collection(("c",))}}, 'The collection "c" contains itself, directly or through a member'),
        ("c", {"collections": {"c": Collection(("glue/mrcp",))}}, 'has the member "glue/mrcp", which is not a data set, collection, task or mixture. Did you mean "glue/mrpc"'),
    ],
)  # fmt: skip
def test_what_cannot_be_made_is_said(name, options, says, prompts):
    with pytest.raises(UserError, match=says.replace("(", r"\(") if "(" in says else says):
        dataclasses.replace(prompts, **options).register(name)


def test_names_that_are_nobodys(prompts):
    for name in ("nonsense", "t0_trian", "flan_without_nothing_at_all", "super_glue_rte_no_such_template", "0_shot"):
        try:
            assert not prompts.register(name), name
        except UserError as error:
            assert "has no data set" in error.sentence
    assert "t0_train" in prompts.names() and "super_glue_rte" in prompts.names()


def test_a_collection_goes_on_without_what_is_missing(prompts, tmp_path):
    from t5x_lab.data.config import DataConfig
    from t5x_lab.data.pipeline.batches import resolve_tasks
    from t5x_lab.data.pipeline.checks import check_data_available
    from t5x_lab.data.vocabularies.config import ByteVocabulary

    nowhere = Records(files=str(tmp_path / "{dataset}-{split}.jsonl"))
    some = dataclasses.replace(prompts, data_sets={"quail": nowhere, "cos_e/v1.11": nowhere})
    config = DataConfig("t0_train", {"inputs": 64, "targets": 16}, 8, ByteVocabulary(), prompts=some)
    tasks = resolve_tasks(config, "encoder_decoder", 512)
    with pytest.raises(NotHere) as raised:
        check_data_available(tasks.train_components, "train", tasks.name, config)
    assert "cos_e/v1.11" in raised.value.sentence and "1 more data sets are missing" in raised.value.sentence
    assert "MIXTURE_OR_TASK_NAME=t0_train_without_cos_e_v1.11_and_quail" in raised.value.sentence
    assert len(mixture("t0_train_without_cos_e_v1.11_and_quail", some).tasks) == 313 - 11 - 13


def test_files_may_have_splits_that_the_catalogue_does_not_know(tmp_path):
    """AG News has no validation split there; whoever has one says so."""
    lines = "".join(json.dumps(record) + "\n" for record in synthetic_records.records("ag_news", 4))
    (tmp_path / "dev.jsonl").write_text(lines)
    prompts = Prompts(data_sets={"ag_news": Records(files={"validation": str(tmp_path / "dev.jsonl")})})
    assert prompts.register("flan_ag_news_score_eval")
    flan_mixture = seqio.MixtureRegistry.get("flan_ag_news_score_eval")
    assert len(flan_mixture.tasks) == 8 and all(list(task.splits) == ["validation"] for task in flan_mixture.tasks)


def test_splits_that_are_called_otherwise_are_added_to_the_catalogues(records):
    story = dataclasses.replace(records, splits={"train": "validation"})
    shot = "flan_story_cloze_2016_plain_2_shot"
    assert len(few_shot(Prompts(data_sets={"story_cloze/2016": story}), shot, split="validation")) == 40
    with pytest.raises(NotHere, match='"story_cloze/2016" has no training split, from which exemplars are sampled'):
        few_shot(Prompts(records=records), shot, split="validation")


def test_a_member_at_a_rate_keeps_the_shares_of_its_own(prompts):
    """0.15 of T0's mixture are CNN / Daily Mail, also where all of it has another rate."""
    both = Collection(("t0_train", "super_glue/rte"), rates={"t0_train": 1_000.0})
    result = rates(mixture("both", dataclasses.replace(prompts, collections={"both": both})))
    of_news = sum(rate for name, rate in result.items() if name.startswith("cnn_dailymail"))
    assert of_news == pytest.approx(1_000 * 2_584_017 / 17_277_798)
    assert sum(result.values()) == pytest.approx(1_000 + 10 * 2_490)


def test_every_way_to_go_on_without_can_be_gone(prompts):
    """Covers T0's, FLAN's and the user's collections, other forms, exemplars, and members of members."""
    own_collections = {
        "t0_mine": Collection(("glue/mrpc", "quail")),
        "deep": Collection(("t0_mine", "flan_3_clusters", "imdb")),
    }
    some = dataclasses.replace(prompts, collections=own_collections)
    for name, missing in {
        "t0_train": ("quail", "dream"), "flan_4templates": ("imdb",), "flan_without_nli_5_shot": ("imdb", "glue_cola"),
        "t0_eval": ("story_cloze_2016",), "t0_mine": ("quail",), "deep": ("quail", "xsum"), "deep_2_shot": ("glue_mrpc", "quail"),
    }.items():  # fmt: skip
        mixture_object = mixture(name, some)
        tasks = [task.name for task in mixture_object.tasks if task_data_sets([task.name])[0] in missing]
        assert tasks
        without = some.without(name, tasks)
        assert sets_in(mixture(without, some)) == sets_in(mixture_object) - set(missing), without
    some.register("super_glue_rte_score_eval")
    assert not some.without("super_glue_rte_score_eval", ["super_glue_rte_does_it_follow_that_score_eval"])


def test_a_question_that_is_there_with_another_answer_is_no_exemplar(tmp_path):
    """Several sentences are right for a set of concepts; a review that is asked for is told by its target."""
    same = [{"concepts": ["dog", "run"], "target": f"The dog runs {n}."} for n in range(6)]
    other = [{"concepts": ["cat", "sit"], "target": f"The cat sits {n}."} for n in range(2)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(record) + "\n" for record in same + other))
    prompts = Prompts(records=Records(files=str(tmp_path / "{split}.jsonl")))
    texts = few_shot(prompts, "flan_common_gen_plain_5_shot", lengths={"inputs": 2_048, "targets": 64})
    assert all(text.count("dog") == 1 for text in texts[:6]) and all("The cat" in text for text in texts[:6])


@pytest.mark.parametrize("model", ["models/decoder/tiny.gin", "models/prefix_decoder/tiny.gin", "models/t5_1_1/tiny.gin"])
@pytest.mark.parametrize(
    "recipe, rows, rate, input_eos, evaluated",
    [("mt_f", 1_024, 1e-3, False, "t0_eval"), ("flan", 8, 3e-5, True, "flan_eval_entailment")],
)
def test_recipes_are_the_papers_for_every_architecture(model, recipe, rows, rate, input_eos, evaluated):
    """1,310,720 and 8,192 tokens of rows of 1,024 + 256, dropout 0.1, a constant rate, packed, with their evaluations."""
    bindings = [
        "VOCABULARY = @ByteVocabulary()",
        "TransformerConfig.vocab_size = 384",
        'MODEL_DIR = "x"',
        "TRAIN_STEPS = 141072",
    ]
    run = GinConfig([model, f"recipes/{recipe}.gin"], bindings).run()
    assert run.data.batch_size == rows and run.data.pack and run.data.task_feature_lengths == {"inputs": 1_024, "targets": 256}
    assert run.model.network.dropout_rate == 0.1 and run.data.prompts.input_eos == input_eos
    assert all(float(run.optimizer.learning_rate(step)) == pytest.approx(rate) for step in (0, 10_000, 141_000))
    assert [evaluation.task for evaluation in run.evals] == [evaluated] and run.evals[0].truncate_inputs == "right"
