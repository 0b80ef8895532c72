"""FLAN's clusters of data sets, and what is trained on where one of them is held out (Wei et al. 2022, sections 2.1 and 2.2).

The table is that of the published code: 69 data sets in 17 clusters, rounds of ANLI and the like counted apart. The paper's
figure has 62 in 12: its "misc." is divided here, and two tasks of formatting text are added.
"""

MOST_RECORDS = 30_000  # of a data set (section 2.4)
MOST_RATE = 3_000

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

# Clusters that know too much of each other: none is trained on where another of the same line is held out.
_BOTH = "read_comp_and_common_sense"
_RELATED = (("paraphrase", "entailment"), ("reading_comprehension", _BOTH), ("common_sense", _BOTH))

# What the paper calls some of them.
PAPERS_NAMES: dict[str, tuple[str, ...]] = {
    "nli": ("entailment",),
    "commonsense": ("common_sense",),
    "closed_book_qa": ("open_domain_qa",),
    "struct_to_text": ("structure_to_text",),
    "misc": (
        "text_formatting", "math", "conversational_qa", "word_disambiguation", "linguistic_acceptability",
        "question_classification",
    ),
}  # fmt: skip

# Clusters in the order in which the paper's ablation adds them (figure 6); it holds out NLI, closed-book QA and common sense.
IN_ORDER = (
    "summarization", "translation", "reading_comprehension", "sentiment", "structure_to_text", "coreference",
    "conversational_qa",
)  # fmt: skip


def clusters_of(name: str) -> tuple[str, ...]:
    """The clusters that a name stands for; none where it is no cluster's."""
    return (name,) if name in CLUSTERS else PAPERS_NAMES.get(name, ())


def held_out(name: str) -> tuple[str, ...]:
    """The data sets of a cluster."""
    return tuple(member for cluster in clusters_of(name) for member in CLUSTERS[cluster])


def trained_without(name: str) -> tuple[str, ...]:
    """The data sets to train on where a cluster is held out: those of all others but related ones, without its own."""
    own = set(clusters_of(name))
    if not own:
        return ()
    related = {other for pair in _RELATED if own & set(pair) for other in pair}
    members = [member for cluster in CLUSTERS if cluster not in own | related for member in CLUSTERS[cluster]]
    return tuple(member for member in members if member not in held_out(name))


def first_clusters(number: int) -> tuple[str, ...]:
    """The data sets of the first clusters of the paper's ablation."""
    return tuple(member for cluster in IN_ORDER[:number] for member in CLUSTERS[cluster])
