"""Zero-shot probes of GPT-1 (Radford et al. 2018, section 5), and BLiMP."""

import dataclasses
import re

from t5x_lab.config.errors import UserError
from t5x_lab.evaluation.probes.probe import Probe
from t5x_lab.evaluation.questions import Question
from t5x_lab.prompts.data_sets import DATA_SETS, DataSet

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
BLIMP: tuple[str, ...] = tuple(_BLIMP.split())  # names of its data sets


@dataclasses.dataclass(frozen=True, kw_only=True)
class Blimp(Probe):
    """BLiMP: of a minimal pair, the grammatical sentence should have the higher probability (Warstadt et al. 2020)."""

    name: str = "blimp"
    data_sets: tuple[str, ...] = tuple(f"blimp/{name}" for name in BLIMP)
    split: str = "train"

    normalization = "sum"

    def question(self, record):
        return Question("", (record["sentence_good"], record["sentence_bad"]), 0)

    def data_set(self, name):
        return DATA_SETS.get(name) or DataSet(name, hub=name.replace("blimp/", "nyu-mll/blimp:"), splits=("train",))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sentiment(Probe):
    """SST-2: after the text and the word "very", the more probable of two words is the prediction.

    Attributes:
      suffix: text after the sentence.
      words: words for the labels 0 and 1.
    """

    name: str = "sst2"
    data_sets: tuple[str, ...] = ("glue/sst2",)
    suffix: str = " very"
    words: tuple[str, ...] = (" negative", " positive")

    normalization = "sum"

    def question(self, record):
        return Question(record["sentence"].strip() + self.suffix, self.words, record["label"])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Acceptability(Probe):
    """CoLA: a threshold on the mean log-probability of a sentence's tokens. Matthews correlation and AUC."""

    name: str = "cola"
    data_sets: tuple[str, ...] = ("glue/cola",)
    threshold_split: str | None = "train"

    def question(self, record):
        return Question("", (record["sentence"],), record["label"])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Answers(Probe):
    """RACE: after document and question, the answer with the highest mean log-probability per token is the prediction."""

    name: str = "race"
    data_sets: tuple[str, ...] = ("race/middle", "race/high")

    def question(self, record):
        choices = tuple(f" {text}" for text in record["options"])
        return Question(f"{record['article']} {record['question']}", choices, tuple("ABCDEFGH").index(record["answer"]))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Referents(Probe):
    """Winograd schemas: each referent replaces the pronoun, and the mean log-probability of the rest is compared."""

    name: str = "winograd"
    data_sets: tuple[str, ...] = ("definite_pronoun_resolution",)
    split: str = "test"

    def question(self, record):
        sentence, pronoun, names = record["sentence"], record["pronoun"], record["candidates"]
        start = max(sentence.find(name) + len(name) for name in names)  # both referents come before the pronoun
        word = re.compile(rf"\b{re.escape(pronoun)}\b")
        match = word.search(sentence, start) or word.search(sentence)
        if match is None:
            raise UserError(f'the sentence has no "{pronoun}"')
        before, after = sentence[: match.start()], sentence[match.end() :]
        return Question(tuple(before + name for name in names), (after,) * len(names), record["label"])
