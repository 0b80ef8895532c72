"""What a language model knows before it is fine-tuned, by the probabilities of texts (Radford et al. 2018, section 5).

A probe turns a record of a labelled data set into texts to compare. The probabilities of whichever text is right should be
higher; nothing is learned, but for one threshold.
"""

import dataclasses
import re
from collections.abc import Mapping
from typing import Any, ClassVar

from t5x_lab.config.checks import check_types
from t5x_lab.config.errors import UserError
from t5x_lab.evaluation.rank import Question
from t5x_lab.prompts.catalogue import CATALOGUE, WITHOUT_TEMPLATES, DataSet

_BLIMP = """
adjunct_island anaphor_gender_agreement anaphor_number_agreement animate_subject_passive
animate_subject_trans causative complex_NP_island coordinate_structure_constraint_complex_left_branch
coordinate_structure_constraint_object_extraction determiner_noun_agreement_1 determiner_noun_agreement_2
determiner_noun_agreement_irregular_1 determiner_noun_agreement_irregular_2 determiner_noun_agreement_with_adj_2
determiner_noun_agreement_with_adj_irregular_1 determiner_noun_agreement_with_adj_irregular_2
determiner_noun_agreement_with_adjective_1 distractor_agreement_relational_noun distractor_agreement_relative_clause
drop_argument ellipsis_n_bar_1 ellipsis_n_bar_2 existential_there_object_raising existential_there_quantifiers_1
existential_there_quantifiers_2 existential_there_subject_raising expletive_it_object_raising inchoative intransitive
irregular_past_participle_adjectives irregular_past_participle_verbs irregular_plural_subject_verb_agreement_1
irregular_plural_subject_verb_agreement_2 left_branch_island_echo_question left_branch_island_simple_question
matrix_question_npi_licensor_present npi_present_1 npi_present_2 only_npi_licensor_present only_npi_scope
passive_1 passive_2 principle_A_c_command principle_A_case_1 principle_A_case_2 principle_A_domain_1
principle_A_domain_2 principle_A_domain_3 principle_A_reconstruction regular_plural_subject_verb_agreement_1
regular_plural_subject_verb_agreement_2 sentential_negation_npi_licensor_present sentential_negation_npi_scope
sentential_subject_island superlative_quantifiers_1 superlative_quantifiers_2 tough_vs_raising_1 tough_vs_raising_2
transitive wh_island wh_questions_object_gap wh_questions_subject_gap wh_questions_subject_gap_long_distance
wh_vs_that_no_gap wh_vs_that_no_gap_long_distance wh_vs_that_with_gap wh_vs_that_with_gap_long_distance
"""
BLIMP: tuple[str, ...] = tuple(_BLIMP.split())  # the names of its sets


@dataclasses.dataclass(frozen=True, kw_only=True)
class Probe:
    """Compares texts that go on from the same or from several contexts; a user's probe inherits.

    Attributes:
      name: of its numbers.
      data_sets: of the catalogue or of DATA_SETS, by name.
      split: of them.
      best: the score that counts as 1 where scores are relative, as that of the best model known.
      threshold_split: where one text is judged alone, the split on which the value that parts them is chosen; None = texts are
        compared with each other.
    """

    name: str
    data_sets: tuple[str, ...]
    split: str = "validation"
    best: float = 1.0
    threshold_split: str | None = None

    by: ClassVar[str] = "token_mean"  # what texts are compared by, see `rank.NORMALIZATIONS`

    def __post_init__(self):
        check_types(self)

    def question(self, record: Mapping[str, Any]) -> Question:
        """The contexts, as `inputs`, and the texts behind them, as `choices`. Raises KeyError for a field that is missing."""
        raise NotImplementedError

    def data_set(self, name: str) -> DataSet:
        return CATALOGUE.get(name) or DataSet(name)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Blimp(Probe):
    """Minimal pairs: the grammatical sentence of two should be likelier, as a whole (Warstadt et al. 2020)."""

    name: str = "blimp"
    data_sets: tuple[str, ...] = tuple(f"blimp/{name}" for name in BLIMP)
    split: str = "train"

    by = "sum"

    def question(self, record):
        return Question("", (record["sentence_good"], record["sentence_bad"]), 0)

    def data_set(self, name):
        return CATALOGUE.get(name) or DataSet(name, hub=name.replace("blimp/", "nyu-mll/blimp:"), splits=("train",))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sentiment(Probe):
    """SST-2: the text and the word "very" are gone on from by one word or the other.

    Attributes:
      behind: what stands behind the text.
      words: of the labels 0 and 1.
    """

    name: str = "sst2"
    data_sets: tuple[str, ...] = ("glue/sst2",)
    behind: str = " very"
    words: tuple[str, ...] = (" negative", " positive")

    by = "sum"

    def question(self, record):
        return Question(record["sentence"].strip() + self.behind, self.words, record["label"])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Acceptability(Probe):
    """CoLA: mean log-probabilities of the sentences' tokens, and a threshold between them; Matthews correlation and AUC."""

    name: str = "cola"
    data_sets: tuple[str, ...] = ("glue/cola",)
    threshold_split: str | None = "train"

    def question(self, record):
        return Question("", (record["sentence"],), record["label"])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Answers(Probe):
    """RACE: the answer behind document and question with the highest mean log-probability of its tokens."""

    name: str = "race"
    data_sets: tuple[str, ...] = ("race/middle", "race/high")

    def question(self, record):
        choices = tuple(f" {text}" for text in record["options"])
        return Question(f"{record['article']} {record['question']}", choices, tuple("ABCDEFGH").index(record["answer"]))

    def data_set(self, name):
        return WITHOUT_TEMPLATES.get(name) or super().data_set(name)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Referents(Probe):
    """Winograd schemas: either referent stands for the pronoun, and the mean log-probability of what follows is compared."""

    name: str = "winograd"
    data_sets: tuple[str, ...] = ("definite_pronoun_resolution",)
    split: str = "test"

    def question(self, record):
        sentence, pronoun, names = record["sentence"], record["pronoun"], record["candidates"]
        behind = max(sentence.find(name) + len(name) for name in names)  # both referents come before it
        word = re.compile(rf"\b{re.escape(pronoun)}\b")
        found = word.search(sentence, behind) or word.search(sentence)
        if found is None:
            raise UserError(f'the sentence has no "{pronoun}"')
        before, after = sentence[: found.start()], sentence[found.end() :]
        return Question(tuple(before + name for name in names), (after,) * len(names), record["label"])
