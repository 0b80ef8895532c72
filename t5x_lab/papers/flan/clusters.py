"""FLAN's clusters of data sets, and the training data sets if one cluster is held out (Wei et al. 2022, sections 2.1 and 2.2).

The table is that of the published code: 69 data sets in 17 clusters, with rounds of ANLI and the like counted separately. The
paper's figure has 62 in 12. Its cluster "misc." is split here, and two text-formatting tasks are added.
"""

CLUSTERS: dict[str, tuple[str, ...]] = {
    "summarization": (
        "aeslc", "cnn_dailymail/3.0.0", "gigaword", "multi_news", "newsroom", "samsum", "xsum", "ag_news_subset",
        "opinion_abstracts/rotten_tomatoes", "opinion_abstracts/idebate", "gem/wiki_lingua_english_en",
    ),
    "structure_to_text": ("gem/web_nlg_en", "common_gen", "gem/e2e_nlg", "gem/dart"),
    "reading_comprehension": ("squad", "squad_v2", "drop", "super_glue/multirc", "openbookqa/main", "super_glue/boolq"),
    "open_domain_qa": ("trivia_qa/unfiltered", "nq_open", "ai2_arc/ARC-Challenge", "ai2_arc/ARC-Easy"),
    "paraphrase": ("glue/mrpc", "glue/qqp", "paws/labeled_final", "glue/stsb"),
    "sentiment": ("imdb", "sentiment140", "yelp_polarity", "glue/sst2"),
    "text_formatting": ("true_case", "fix_punct", "word_segment"),
    "common_sense": ("super_glue/copa", "hellaswag", "story_cloze/2016", "piqa"),
    "translation": (
        "para_crawl/enes", "wmt14/fr-en", "wmt16/de-en", "wmt16/tr-en", "wmt16/cs-en", "wmt16/fi-en", "wmt16/ro-en",
        "wmt16/ru-en",
    ),
    "coreference": ("definite_pronoun_resolution", "winogrande/winogrande_xl", "super_glue/wsc.fixed"),
    "entailment": (
        "anli/r1", "anli/r2", "anli/r3", "super_glue/cb", "super_glue/rte", "glue/mnli_matched", "glue/mnli_mismatched",
        "glue/qnli", "glue/wnli", "snli",
    ),
    "math": ("math_dataset",),
    "conversational_qa": ("quac", "coqa"),
    "word_disambiguation": ("super_glue/wic",),
    "linguistic_acceptability": ("glue/cola",),
    "question_classification": ("trec",),
    "read_comp_and_common_sense": ("super_glue/record", "cosmos_qa"),
}  # fmt: skip

# Related clusters: if one of a pair is held out, the other is not trained on.
_BOTH = "read_comp_and_common_sense"
_RELATED = (("paraphrase", "entailment"), ("reading_comprehension", _BOTH), ("common_sense", _BOTH))

# Names in the paper that differ.
PAPER_NAMES: dict[str, tuple[str, ...]] = {
    "nli": ("entailment",),
    "commonsense": ("common_sense",),
    "closed_book_qa": ("open_domain_qa",),
    "struct_to_text": ("structure_to_text",),
    "misc": (
        "text_formatting", "math", "conversational_qa", "word_disambiguation", "linguistic_acceptability",
        "question_classification",
    ),
}  # fmt: skip

# Clusters in the order in which the ablation adds them (figure 6). It holds out NLI, closed-book QA and common sense.
ABLATION_ORDER = (
    "summarization", "translation", "reading_comprehension", "sentiment", "structure_to_text", "coreference",
    "conversational_qa",
)  # fmt: skip


def resolve_cluster(name: str) -> tuple[str, ...]:
    """Returns the clusters with a name of the code or the paper, empty for any other name."""
    return (name,) if name in CLUSTERS else PAPER_NAMES.get(name, ())


def cluster_data_sets(name: str) -> tuple[str, ...]:
    """Returns the data sets of a cluster."""
    return tuple(member for cluster in resolve_cluster(name) for member in CLUSTERS[cluster])


def training_data_sets(name: str) -> tuple[str, ...]:
    """Returns the training data sets if a cluster is held out: those of all unrelated clusters."""
    own = set(resolve_cluster(name))
    if not own:
        return ()
    related = {other for pair in _RELATED if own & set(pair) for other in pair}
    members = [member for cluster in CLUSTERS if cluster not in own | related for member in CLUSTERS[cluster]]
    return tuple(member for member in members if member not in cluster_data_sets(name))


def first_clusters(number: int) -> tuple[str, ...]:
    """Returns the data sets of the first clusters of the ablation."""
    return tuple(member for cluster in ABLATION_ORDER[:number] for member in CLUSTERS[cluster])
