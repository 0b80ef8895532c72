"""Pre-training objectives as SeqIO tasks over any source of {"text": document}, made of the `t5` library's preprocessors.

The names and definitions are those of Wang et al. (2022) and of `t5/data/tasks.py`:

  span_corruption     inputs with spans replaced by sentinels, targets with the spans; 15 % in spans of mean length 3
  full_lm             targets only, an end token at document ends, no barrier between documents
  prefix_lm_objective_decoder_architecture
                      one sequence, split at a uniform point; attention both ways up to it, loss after it
  prefix_lm_objective_encoder_decoder_architecture
                      two sequences A and B, split at i: A[:i] + B[:n-i] encoded, the rest decoded; no padding
"""

import functools

import seqio
import tensorflow as tf
from t5.data import preprocessors

PREPACKED = ("decoder_target_tokens", "decoder_input_tokens", "decoder_loss_weights")
PREPACKED_DECODER = (*PREPACKED, "decoder_causal_attention")
PREPACKED_ENCODER_DECODER = (
    *PREPACKED,
    "encoder_input_tokens",
    "encoder_segment_ids",
    "encoder_positions",
    "decoder_segment_ids",
    "decoder_positions",
)


def whole_pairs(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Drops the last of an odd number of examples, which `pack_prefix_lm_encoder_decoder` has no partner for."""
    return dataset.batch(2, drop_remainder=True).unbatch()


# objective: (preprocessors after tokenisation, features)
OBJECTIVES = {
    "span_corruption": (
        [preprocessors.span_corruption, seqio.preprocessors.append_eos_after_trim],
        ("inputs", "targets"),
    ),
    "full_lm": ([preprocessors.full_lm], ("targets",)),
    "prefix_lm_objective_decoder_architecture": (
        [preprocessors.targets_for_prefix_lm_objective, preprocessors.pack_prefix_lm_decoder_only],
        PREPACKED_DECODER,
    ),
    "prefix_lm_objective_encoder_decoder_architecture": (
        [preprocessors.targets_for_prefix_lm_objective, whole_pairs, preprocessors.pack_prefix_lm_encoder_decoder],
        PREPACKED_ENCODER_DECODER,
    ),
}


def objective_task(name: str, source: seqio.DataSource, objective: str, vocabulary: seqio.Vocabulary) -> seqio.Task:
    """A task that turns the documents of `source` into examples of an objective; not registered anywhere."""
    steps, features = OBJECTIVES[objective]
    if features[0] in PREPACKED:
        output_features = {feature: seqio.Feature(vocabulary, add_eos=False) for feature in features}
        # The steps before the last work on "targets", which the last one drops.
        output_features["targets"] = seqio.Feature(vocabulary, required=False)
    else:
        output_features = {feature: seqio.Feature(vocabulary, add_eos=True) for feature in features}
    return seqio.Task(
        name,
        source,
        output_features=output_features,
        preprocessors=[
            functools.partial(preprocessors.rekey, key_map={"inputs": None, "targets": "text"}),
            seqio.preprocessors.tokenize,
            seqio.CacheDatasetPlaceholder(),
            *steps,
        ],
        metric_fns=[],
    )


def placeholder_task(name: str, objective: str) -> seqio.Task:
    """A task with the features of an objective and no text, to declare mixtures over."""

    def no_text(split, shuffle_files, seed=None):
        raise NotImplementedError(f"{name} is a placeholder; t5x_lab.data.tasks.get_mixture_or_task gives the task.")

    source = seqio.FunctionDataSource(no_text, splits=("train", "validation"))
    return objective_task(name, source, objective, seqio.ByteVocabulary(extra_ids=100))
