"""Classification of texts by a model with a classification head."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from t5x_lab.config.errors import UserError
from t5x_lab.models.classifier import IDS, LENGTHS
from t5x_lab.networks.head import require_head
from t5x_lab.runs.model.padding import Ids, bucket, pad, round_up


def class_logits(model: Any, examples: Sequence[Sequence[Ids]], batch_size: int) -> np.ndarray:
    """Returns the logits of the classes, float32 [N, C]. Examples of similar length are batched.

    Args:
      model: a `t5x_lab.runs.model.run.Run`.
      examples: token ids of K sequences per example.
      batch_size: examples per batch.
    """
    head = require_head(model.network)
    logits = np.zeros((len(examples), len(head.classes)), np.float32)
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
        logits[numbers] = np.asarray(model.sharded.class_logits(model.params, batch))[: len(numbers)]
    return logits


def encode_segments(model: Any, entries: Sequence[Any], names: Sequence[str]) -> list[list[Ids]]:
    """Returns the token ids of texts in the format of the head's task.

    Args:
      model: a `t5x_lab.runs.model.run.Run`.
      entries: see `Run.classify`.
      names: names of the entries in messages.

    Raises:
      UserError: for a wrong number of texts, or one without tokens. The message has the name.
    """
    # These modules need TensorFlow.
    from t5x_lab.evaluation.classification import EncodedExample, parse_texts
    from t5x_lab.prompts.classification.sequences import Sequences
    from t5x_lab.prompts.classification.task import check_head, special_token_ids

    if all(isinstance(entry, EncodedExample) for entry in entries):
        for task in {id(entry.task): entry.task for entry in entries}.values():
            check_head(task, require_head(model.network))
        return [entry.ids for entry in entries]
    classification, data, vocabulary = model.config.classification(), model.config.data(), model.input_vocabulary
    encode = Sequences(
        vocabulary.encode,
        special_token_ids(classification, vocabulary),
        data.task_feature_lengths["inputs"],
        classification.symmetric,
        model.config.prompts().clean,
    )
    encoded = []
    for name, entry in zip(names, entries, strict=True):
        try:
            encoded.append(encode(parse_texts(entry, classification)))
        except UserError as error:
            raise UserError(f"{name} cannot be classified: {error.sentence.rstrip('.')}.") from error
    return encoded
