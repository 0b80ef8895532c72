"""FLAN's collections and templates: flan, flan_3_clusters, flan_without_<cluster>, flan_eval_<cluster> (Wei et al. 2022)."""

import pathlib
from collections.abc import Sequence

from t5x_lab.papers.flan import clusters
from t5x_lab.prompts.collections import COLLECTION_NAMES, COLLECTIONS, BuiltInCollection
from t5x_lab.prompts.templates.files import TEMPLATE_SETS, TemplateSet

MAX_RECORDS = 30_000  # training records of a data set (section 2.4)
MAX_RATE = 3_000  # maximum mixing rate of a data set (section 2.4)
TEMPLATES = TemplateSet("flan_", str(pathlib.Path(__file__).parent / "templates"), MAX_RECORDS)


def _make_training(members: Sequence[str]) -> BuiltInCollection | None:
    if not members:
        return None
    return BuiltInCollection(tuple(members), form="sampled", cap=None, maximum=MAX_RATE, template_set=TEMPLATES)


def _make_evaluation(cluster: str) -> BuiltInCollection | None:
    members = clusters.cluster_data_sets(cluster)
    return BuiltInCollection(members, form="ranked", template_set=TEMPLATES) if members else None


TEMPLATE_SETS.append(TEMPLATES)
COLLECTIONS.update(
    {
        "flan": lambda: _make_training([member for members in clusters.CLUSTERS.values() for member in members]),
        r"flan_([1-7])_clusters": lambda number: _make_training(clusters.first_clusters(int(number))),
        r"flan_without_(\w+)": lambda cluster: _make_training(clusters.training_data_sets(cluster)),
        r"flan_eval_(\w+)": _make_evaluation,
    }
)
_CLUSTER_NAMES = (*clusters.CLUSTERS, *clusters.PAPER_NAMES)
COLLECTION_NAMES += [
    "flan",
    *(f"flan_{n}_clusters" for n in range(1, len(clusters.ABLATION_ORDER) + 1)),
    *(f"flan_{kind}_{cluster}" for kind in ("without", "eval") for cluster in _CLUSTER_NAMES),
]
