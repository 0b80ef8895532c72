"""Texts through a model with a classification head."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from t5x_lab.config.errors import UserError
from t5x_lab.models.classifier import IDS, LENGTHS
from t5x_lab.networks.head import checked_head
from t5x_lab.runs.padding import Ids, bucket, pad, round_up


def class_logits(model: Any, examples: Sequence[Sequence[Ids]], batch_size: int) -> np.ndarray:
    """Logits of the classes, float32 [N, C], of examples of K sequences each; of like lengths together.

    Args:
      model: a `t5x_lab.runs.run.Run`.
      examples: token ids.
      batch_size: examples at a time.
    """
    head = checked_head(model.network)
    found = np.zeros((len(examples), len(head.classes)), np.float32)
    longest = [max(map(len, sequences)) for sequences in examples]
    order = np.argsort(longest, kind="stable")
    rows = round_up(min(batch_size, len(examples)), model.sharded.row_multiple) if len(examples) else 0
    for first in range(0, len(examples), max(rows, 1)):
        numbers = order[first : first + rows]
        length = bucket(max(longest[i] for i in numbers))
        length = min(length, model.max_positions or length)
        batch = {
            IDS: np.zeros((rows, head.sequences, length), np.int32),
            LENGTHS: np.ones((rows, head.sequences), np.int32),
        }
        for row, i in enumerate(numbers):
            batch[IDS][row] = pad(examples[i], length)
            batch[LENGTHS][row] = [len(ids) for ids in examples[i]]
        found[numbers] = np.asarray(model.sharded.class_logits(model.params, batch))[: len(numbers)]
    return found


def sequences_for(model: Any, entries: Sequence[Any], names: Sequence[str]) -> list[list[Ids]]:
    """Token ids of texts to classify, as the task that the head was trained on has them.

    Raises:
      UserError: that names an entry, for texts of another number or without a token.
    """
    from t5x_lab.evaluation.classification import Sequenced, texts_of
    from t5x_lab.prompts.classified import check_head, token_ids
    from t5x_lab.prompts.sequences import Sequences

    if all(isinstance(entry, Sequenced) for entry in entries):
        for task in {id(entry.task): entry.task for entry in entries}.values():
            check_head(task, checked_head(model.network))
        return [entry.ids for entry in entries]
    classification, data, vocabulary = model.config.classification(), model.config.data(), model.vocabulary
    make = Sequences(
        vocabulary.encode,
        token_ids(classification, vocabulary),
        data.task_feature_lengths["inputs"],
        classification.symmetric,
        model.config.prompts().clean,
    )
    found = []
    for name, entry in zip(names, entries, strict=True):
        try:
            found.append(make(texts_of(entry, classification)))
        except UserError as error:
            raise UserError(f"{name} cannot be classified: {error.sentence.rstrip('.')}.") from error
    return found
