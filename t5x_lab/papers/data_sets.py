"""Labelled data sets of T0, FLAN, the T5 suite, GPT-1 and EAI-Eval.

Names, fields and label numbers are those of Hugging Face's hub, which promptsource's templates use. Sizes set mixing rates.
"""

from t5x_lab.prompts.data_sets import ALL_SPLITS, DataSet, register_data_sets

_NLI: tuple[str, ...] = ("entailment", "neutral", "contradiction")
_WITH_NOT, _TRUTH, _OPINION = ("entailment", "not_entailment"), ("False", "True"), ("negative", "positive")


def _label(*names: str) -> dict[str, tuple[str, ...]]:
    return {"label": names}


def _anli_round(number: int, train: int) -> DataSet:
    splits = {"train": f"train_r{number}", "validation": f"dev_r{number}", "test": f"test_r{number}"}
    name, suffix = f"anli/r{number}", f"_r{number}"
    return DataSet(name, train, "facebook/anli", "anli", {"label": _NLI}, splits, parent="anli", suffix=suffix)


def _mnli_genres(genres: str) -> DataSet:
    splits = {"train": "train", "validation": f"validation_{genres}", "test": f"test_{genres}"}
    hub = "nyu-mll/glue:mnli"
    return DataSet(f"glue/mnli_{genres}", 392_702, hub, "", {"label": _NLI}, splits, parent="glue/mnli", suffix=f"_{genres}")


_NO_TEST, _NO_VALIDATION = ("train", "validation"), ("train", "test")

T0_TRAIN = (
    DataSet("glue/mrpc", 3_668, "nyu-mll/glue:mrpc"),
    DataSet("glue/qqp", 363_846, "nyu-mll/glue:qqp"),
    DataSet("paws/labeled_final", 49_401, "google-research-datasets/paws:labeled_final"),
    DataSet("kilt_tasks/hotpotqa", 88_869, "facebook/kilt_tasks:hotpotqa"),
    DataSet("wiki_qa", 20_360, "microsoft/wiki_qa"),
    DataSet("adversarial_qa/dbidaf", 10_000, "UCLNLP/adversarial_qa:dbidaf"),
    DataSet("adversarial_qa/dbert", 10_000, "UCLNLP/adversarial_qa:dbert"),
    DataSet("adversarial_qa/droberta", 10_000, "UCLNLP/adversarial_qa:droberta"),
    DataSet("duorc/SelfRC", 60_721, "ibm-research/duorc:SelfRC"),
    DataSet("duorc/ParaphraseRC", 69_524, "ibm-research/duorc:ParaphraseRC"),
    DataSet("ropes", 10_924, "allenai/ropes"),
    DataSet("quoref", 19_399, "allenai/quoref", splits=_NO_TEST),
    DataSet("cos_e/v1.11", 9_741, "Salesforce/cos_e:v1.11", splits=_NO_TEST),
    DataSet("cosmos_qa", 25_262, "allenai/cosmos_qa"),
    DataSet("dream", 6_116, "dataset-org/dream"),
    DataSet("qasc", 8_134, "allenai/qasc"),
    DataSet(
        "quail", 10_246, "textmachinelab/quail", splits={"train": "train", "validation": "validation", "test": "challenge"}
    ),
    DataSet("quarel", 1_941, "community-datasets/quarel"),
    DataSet("quartz", 2_696, "allenai/quartz"),
    DataSet("sciq", 11_679, "allenai/sciq"),
    DataSet("social_i_qa", 33_410, "allenai/social_i_qa", splits=_NO_TEST),
    DataSet("wiki_hop/original", 43_738, "MoE-UNC/wikihop:original", splits=_NO_TEST),
    DataSet("wiqa", 29_808, "allenai/wiqa"),
    DataSet("amazon_polarity", 3_600_000, "fancyzhx/amazon_polarity", splits=_NO_VALIDATION),
    DataSet("app_reviews", 288_065, "sealuzh/app_reviews", splits=("train",)),
    DataSet("imdb", 25_000, "stanfordnlp/imdb", "imdb_reviews", {"label": ("neg", "pos")}, _NO_VALIDATION),
    DataSet("rotten_tomatoes", 8_530, "cornell-movie-review-data/rotten_tomatoes"),
    DataSet("yelp_review_full", 650_000, "Yelp/yelp_review_full", splits=_NO_VALIDATION),
    DataSet("common_gen", 67_389, "allenai/common_gen"),
    DataSet("wiki_bio", 582_659, "michaelauli/wiki_bio", splits={**dict(zip(ALL_SPLITS, ALL_SPLITS)), "validation": "val"}),
    DataSet("cnn_dailymail/3.0.0", 287_113, "abisee/cnn_dailymail:3.0.0", "cnn_dailymail"),
    DataSet("gigaword", 3_803_957, "Harvard/gigaword"),
    DataSet("multi_news", 44_972, "alexfabbri/multi_news"),
    DataSet("samsum", 14_732, "Samsung/samsum"),
    DataSet("xsum", 204_045, "EdinburghNLP/xsum"),
    DataSet(
        "ag_news", 120_000, "fancyzhx/ag_news", labels=_label("World", "Sports", "Business", "Sci/Tech"), splits=_NO_VALIDATION
    ),
    DataSet("dbpedia_14", 560_000, "fancyzhx/dbpedia_14", splits=_NO_VALIDATION),
    DataSet("trec", 5_452, "CogComp/trec", splits=_NO_VALIDATION),
)

T0_EVAL = (
    DataSet("super_glue/copa", 400, "aps/super_glue:copa"),
    DataSet("hellaswag", 39_905, "Rowan/hellaswag"),
    DataSet("story_cloze/2016", None, "LSDSem/story_cloze:2016", splits=("validation", "test")),
    _anli_round(1, 16_946),
    _anli_round(2, 45_460),
    _anli_round(3, 100_459),
    DataSet("super_glue/cb", 250, "aps/super_glue:cb", labels=_label("entailment", "contradiction", "neutral")),
    DataSet("super_glue/rte", 2_490, "aps/super_glue:rte", labels={"label": _WITH_NOT}),
    DataSet("super_glue/wsc.fixed", 554, "aps/super_glue:wsc.fixed", labels={"label": _TRUTH}),
    DataSet("winogrande/winogrande_xl", 40_398, "allenai/winogrande:winogrande_xl", "winogrande"),
    DataSet("super_glue/wic", 5_428, "aps/super_glue:wic", labels={"label": _TRUTH}),
)

OTHERS = (
    DataSet("aeslc", 14_436, "Yale-LILY/aeslc"),
    DataSet("newsroom", 995_041, "lil-lab/newsroom"),
    DataSet("ag_news_subset", 120_000),
    DataSet("opinion_abstracts/rotten_tomatoes", 3_731, splits=("train",)),
    DataSet("opinion_abstracts/idebate", 2_259, splits=("train",)),
    DataSet("gem/wiki_lingua_english_en", 99_020, "GEM/wiki_lingua:en"),
    DataSet("gem/web_nlg_en", 35_426, "GEM/web_nlg:en"),
    DataSet("gem/e2e_nlg", 33_525, "GEM/e2e_nlg"),
    DataSet("gem/dart", 62_659, "GEM/dart"),
    DataSet("squad", 87_599, "rajpurkar/squad", splits=_NO_TEST),
    DataSet("squad_v2", 130_319, "rajpurkar/squad_v2", splits=_NO_TEST),
    DataSet("drop", 77_409, "ucinlp/drop", splits=_NO_TEST),
    DataSet("super_glue/multirc", 27_243, "aps/super_glue:multirc", labels={"label": _TRUTH}),
    DataSet("openbookqa/main", 4_957, "allenai/openbookqa:main"),
    DataSet("super_glue/boolq", 9_427, "aps/super_glue:boolq", labels={"label": _TRUTH}),
    DataSet("trivia_qa/unfiltered", 87_622, "mandarjoshi/trivia_qa:unfiltered"),
    DataSet("nq_open", 87_925, "google-research-datasets/nq_open", splits=_NO_TEST),
    DataSet("ai2_arc/ARC-Challenge", 1_119, "allenai/ai2_arc:ARC-Challenge"),
    DataSet("ai2_arc/ARC-Easy", 2_251, "allenai/ai2_arc:ARC-Easy"),
    DataSet("glue/stsb", 5_749, "nyu-mll/glue:stsb"),
    DataSet("sentiment140", 1_600_000, "stanfordnlp/sentiment140", splits=_NO_VALIDATION),
    DataSet("yelp_polarity", 560_000, "fancyzhx/yelp_polarity", "yelp_polarity_reviews", splits=_NO_VALIDATION),
    DataSet("glue/sst2", 67_349, "nyu-mll/glue:sst2", labels={"label": _OPINION}),
    DataSet("true_case", None, "para_crawl:enda", "para_crawl/enda", splits=("train",)),
    DataSet("fix_punct", None, "para_crawl:enda", "para_crawl/enda", splits=("train",)),
    DataSet("word_segment", None, "para_crawl:enda", "para_crawl/enda", splits=("train",)),
    DataSet("piqa", 16_113, "ybisk/piqa"),
    DataSet("para_crawl/enes", 38_971_348, splits=("train",)),
    DataSet("wmt_t2t/de-en", 4_592_289, "wmt/wmt_t2t:de-en", "wmt_t2t_translate/de-en"),
    DataSet("wmt15/fr-en", None, "wmt/wmt15:fr-en", "wmt15_translate/fr-en"),
    DataSet("wmt14/de-en", 4_508_785, "wmt/wmt14:de-en", "wmt14_translate/de-en"),
    DataSet("wmt14/fr-en", 40_836_715, "wmt/wmt14:fr-en", "wmt14_translate/fr-en"),
    DataSet("wmt16/de-en", 4_548_885, "wmt/wmt16:de-en", "wmt16_translate/de-en"),
    DataSet("wmt16/tr-en", 205_756, "wmt/wmt16:tr-en", "wmt16_translate/tr-en"),
    DataSet("wmt16/cs-en", 997_240, "wmt/wmt16:cs-en", "wmt16_translate/cs-en"),
    DataSet("wmt16/fi-en", 2_073_394, "wmt/wmt16:fi-en", "wmt16_translate/fi-en"),
    DataSet("wmt16/ro-en", 610_320, "wmt/wmt16:ro-en", "wmt16_translate/ro-en"),
    DataSet("wmt16/ru-en", 1_516_162, "wmt/wmt16:ru-en", "wmt16_translate/ru-en"),
    DataSet("definite_pronoun_resolution", 1_322, "rahman/definite_pronoun_resolution", splits=_NO_VALIDATION),
    _mnli_genres("matched"),
    _mnli_genres("mismatched"),
    DataSet("glue/qnli", 104_743, "nyu-mll/glue:qnli", labels={"label": _WITH_NOT}),
    DataSet("glue/rte", 2_490, "nyu-mll/glue:rte", labels={"label": _WITH_NOT}),
    DataSet("glue/wnli", 635, "nyu-mll/glue:wnli"),
    DataSet("snli", 550_152, "stanfordnlp/snli", labels={"label": _NLI}),
    DataSet("math_dataset", None),
    DataSet("quac", 11_567, "allenai/quac", splits=_NO_TEST),
    DataSet("coqa", 7_199, "stanfordnlp/coqa", splits=_NO_TEST),
    DataSet("glue/cola", 8_551, "nyu-mll/glue:cola"),
    DataSet("super_glue/record", 100_730, "aps/super_glue:record"),
    DataSet("glue/ax", None, "nyu-mll/glue:ax", labels={"label": _NLI}, splits=("test",)),
    DataSet("super_glue/axb", None, "aps/super_glue:axb", labels={"label": _WITH_NOT}, splits=("test",)),
    DataSet("super_glue/axg", None, "aps/super_glue:axg", labels={"label": _WITH_NOT}, splits=("test",)),
)

WITHOUT_TEMPLATES = (
    DataSet("scitail", hub="allenai/scitail:tsv_format", tfds="sci_tail", has_templates=False),
    *(DataSet(f"race/{part}", hub=f"ehovy/race:{part}", has_templates=False) for part in ("all", "middle", "high")),
)
register_data_sets((*T0_TRAIN, *T0_EVAL, *OTHERS, *WITHOUT_TEMPLATES))
