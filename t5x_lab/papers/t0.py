"""Collections of T0 (Sanh et al. 2022): t0_train and t0_eval. Both need promptsource's templates in TEMPLATES."""

from t5x_lab.papers.data_sets import T0_EVAL, T0_TRAIN
from t5x_lab.prompts.collections import COLLECTION_NAMES, COLLECTIONS, BuiltInCollection


def _make_collection(split: str) -> BuiltInCollection:
    if split == "train":
        return BuiltInCollection(tuple(data_set.name for data_set in T0_TRAIN), needs_user_templates=True)
    return BuiltInCollection(tuple(data_set.name for data_set in T0_EVAL), form="ranked", needs_user_templates=True)


COLLECTIONS["t0_(train|eval)"] = _make_collection
COLLECTION_NAMES += ["t0_train", "t0_eval"]
