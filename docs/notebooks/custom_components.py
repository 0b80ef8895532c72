# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Custom task, objective and network
#
# A SeqIO task, a network and an objective in Python modules, bound in gin files. No file of the library is edited.

# %%
import os
import tempfile

os.chdir(tempfile.mkdtemp())

# %% [markdown]
# ## Task
#
# Any SeqIO task can be trained on. In this one `inputs` are words and `targets` the reversed words:

# %%
# %%writefile my_tasks.py
import seqio
import tensorflow as tf

WORDS = "time people year way day thing man world life hand part child eye woman place work week case point company".split()


def words(split, shuffle_files, seed=None):
    del shuffle_files, seed
    numbers = tf.data.Dataset.range(4000 if split == "train" else 100).map(lambda i: i if split == "train" else i + 10_000)

    def example(i):
        picks = tf.random.stateless_uniform([3], [i, 0], 0, len(WORDS), tf.int32)
        found = tf.gather(tf.constant(WORDS), picks)
        together = lambda several: tf.strings.reduce_join(several, separator=" ")
        return {"inputs": together(found), "targets": together(found[::-1])}

    return numbers.map(example)


def exact_match(targets, predictions):
    return {"exact_match": sum(t == p for t, p in zip(targets, predictions)) / len(targets)}


FEATURE = seqio.Feature(seqio.ByteVocabulary(), add_eos=True)
seqio.TaskRegistry.add(
    "turn_around",
    source=seqio.FunctionDataSource(words, splits=["train", "validation"]),
    preprocessors=[seqio.preprocessors.tokenize, seqio.preprocessors.append_eos],
    output_features={"inputs": FEATURE, "targets": FEATURE},
    metric_fns=[exact_match],
)

# %%
import sys

sys.path.insert(0, os.getcwd())
import my_tasks
import seqio

decode = my_tasks.FEATURE.vocabulary.decode
task = seqio.get_mixture_or_task("turn_around")
for example in task.get_dataset({"inputs": 64, "targets": 64}, "validation").take(2):
    print(decode(example["inputs"].numpy()), "->", decode(example["targets"].numpy()))

# %% [markdown]
# ## Network
#
# A network is a Flax NNX module with `architecture`, `vocab_size` and `logits`. This decoder reads only the last tokens:

# %%
# %%writefile my_network.py
import gin
from flax import nnx


@gin.configurable
class Convolutions(nnx.Module):
    architecture = "causal_decoder"

    def __init__(self, vocab_size, emb_dim=64, layers=2, width=8, *, rngs):
        self.vocab_size = vocab_size
        self.embed = nnx.Embed(vocab_size, emb_dim, rngs=rngs)
        self.layers = nnx.List([nnx.Conv(emb_dim, emb_dim, width, padding="CAUSAL", rngs=rngs) for _ in range(layers)])

    def __call__(self, batch):
        x = self.embed(batch["decoder_input_tokens"])
        for layer in self.layers:
            x = x + nnx.gelu(layer(x))
        return x

    def logits(self, x):
        return self.embed.attend(x)

# %% [markdown]
# ## Objective
#
# A denoising objective in which half of the noise tokens, selected by `noise_mask`, become the next id of the vocabulary:

# %%
# %%writefile my_objective.py
import gin
import tensorflow as tf

from t5x_lab.data.objectives.denoising import Denoising


def shift_noise(tokens, noise_mask, vocabulary, seeds):
    return tf.where(noise_mask, tf.minimum(tokens + 1, vocabulary.vocab_size - 1), tokens)


@gin.configurable
def shifted_tokens(rate=0.15):
    return Denoising(noise_density=rate, inputs=shift_noise, targets="whole")

# %% [markdown]
# ## Train with each of them
#
# The task with a network of the library:

# %%
# %%writefile task.gin
import my_tasks
include "models/t5_1_1/tiny.gin"

VOCABULARY = @ByteVocabulary()
TransformerConfig.vocab_size = 384
TransformerConfig.emb_dim = 64
TransformerConfig.head_dim = 16
TransformerConfig.mlp_dim = 128
MIXTURE_OR_TASK_NAME = "turn_around"
TASK_FEATURE_LENGTHS = {"inputs": 64, "targets": 64}
BATCH_SIZE = 16
TRAIN_STEPS = 200
EVAL_PERIOD = 200
EVALS = (@LossEvaluation(), @MetricsEvaluation())
LearningRate.factors = "constant"
LearningRate.base_learning_rate = 0.01

# %% language="bash"
# t5x_lab train --gin_file=task.gin --gin.MODEL_DIR=runs/task

# %% [markdown]
# The objective on the included corpus:

# %% language="bash"
# t5x_lab train --gin_file=models/t5_1_1/tiny.gin --gin_bindings='import my_objective' \
#   --gin.OBJECTIVE='@shifted_tokens()' --gin.MIXTURE_OR_TASK_NAME=sotu \
#   --gin.TASK_FEATURE_LENGTHS='{"inputs": 64}' --gin.VOCABULARY='@ByteVocabulary()' \
#   --gin.TransformerConfig.vocab_size=384 --gin.BATCH_SIZE=16 --gin.TRAIN_STEPS=50 \
#   --gin.DataConfig.eval_steps=4 --gin.MODEL_DIR=runs/objective

# %% [markdown]
# The network with full language modeling:

# %%
# %%writefile network.gin
import my_network
include "objectives/full_lm.gin"

MODEL = @ModelConfig()
ModelConfig.network = @Convolutions
Convolutions.vocab_size = 384
VOCABULARY = @ByteVocabulary()
OPTIMIZER = @AdamW()
AdamW.learning_rate = @LearningRate()
LearningRate.factors = "constant"
LearningRate.base_learning_rate = 0.003
MIXTURE_OR_TASK_NAME = "sotu"
TASK_FEATURE_LENGTHS = {"targets": 64}
BATCH_SIZE = 16
TRAIN_STEPS = 100
DataConfig.eval_steps = 4

# %% language="bash"
# t5x_lab train --gin_file=network.gin --gin.MODEL_DIR=runs/network

# %%
import t5x_lab

run = t5x_lab.load("runs/network")
run.score(["the Unite", "the Unite"], ["d States", "xyzzyqqq"])

# %% [markdown]
# Losses, optimizers, hooks, evaluations and sharding rules are bound in the same way. There is a page for each of them.
