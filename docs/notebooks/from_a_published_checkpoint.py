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
# # Fine-tune a Hugging Face checkpoint with LoRA
#
# This notebook loads a model in Hugging Face's format, fine-tunes it on labelled records with LoRA, evaluates it, and exports it
# in the same format. `huggingface-cli download google/t5-v1_1-small --local-dir published` downloads a real model. To run
# offline, the notebook trains a tiny one instead. The commands are the same.

# %%
import os
import tempfile

os.chdir(tempfile.mkdtemp())

# %%
# %%writefile tiny.gin
include "models/t5_1_1/tiny.gin"
SentencePieceVocabulary.path = "my.model"
TransformerConfig.vocab_size = 2112
TransformerConfig.emb_dim = 64
TransformerConfig.head_dim = 16
TransformerConfig.mlp_dim = 128

# %% language="bash"
# set -e
# t5x_lab vocab --task=sotu --size=2000 --output=my.model
# t5x_lab train --gin_file=tiny.gin --gin_file=objectives/span_corruption.gin \
#   --gin.MIXTURE_OR_TASK_NAME=sotu --gin.TASK_FEATURE_LENGTHS='{"inputs": 64}' \
#   --gin.BATCH_SIZE=16 --gin.TRAIN_STEPS=60 --gin.DataConfig.eval_steps=4 \
#   --gin.MODEL_DIR=runs/tiny
# t5x_lab convert --source=runs/tiny --to=hf --target=published
# ls published

# %% [markdown]
# ## Load the model
#
# `t5x_lab.load` accepts a Hugging Face directory like a run directory, with its configuration, tokenizer and weights.

# %%
import t5x_lab

base = t5x_lab.load("published")
print(f"{base.network.architecture}, {base.num_parameters:,} parameters")
base.generate(["The <extra_id_0> of the United States"], max_tokens=8, skip_special_tokens=False)

# %% [markdown]
# ## Records
#
# Each line has a message, a tab, and whether the message is urgent. A SeqIO task renders the lines as inputs and targets.
# (Labelled data sets with promptsource templates need no Python: see *Prompted datasets*.)

# %%
import pathlib
import random

random.seed(0)
URGENT = ["is on fire", "does not answer", "lost my data", "smells of smoke"]
CALM = ["is green", "has a nice case", "works well", "came yesterday"]
for split, number in (("train", 400), ("validation", 40)):
    lines = []
    for _ in range(number):
        answer = random.choice(["yes", "no"])
        thing = random.choice(["The printer", "My screen", "This phone", "The server"])
        lines.append(f"{thing} {random.choice(URGENT if answer == 'yes' else CALM)}.\t{answer}\n")
    pathlib.Path(f"tickets-{split}.tsv").write_text("".join(lines))

# %%
# %%writefile tickets.py
import seqio
import tensorflow as tf


@seqio.map_over_dataset
def words(line):
    """A record as a question and its answer."""
    message, answer = tf.unstack(tf.strings.split(line, "\t"), 2)
    return {"inputs": message + " Urgent?", "targets": answer}


def accuracy(targets, predictions):
    return {"accuracy": sum(t == p for t, p in zip(targets, predictions)) / len(targets)}


FEATURE = seqio.Feature(seqio.ByteVocabulary(), add_eos=True)
seqio.TaskRegistry.add(
    "tickets",
    source=seqio.TextLineDataSource({split: f"tickets-{split}.tsv" for split in ("train", "validation")}),
    preprocessors=[words, seqio.preprocessors.tokenize, seqio.preprocessors.append_eos],
    output_features={"inputs": FEATURE, "targets": FEATURE},
    metric_fns=[accuracy],
)

# %% [markdown]
# ## Fine-tune with LoRA
#
# `peft/lora.gin` selects LoRA. Without it, all parameters are trained.

# %% language="bash"
# t5x_lab train --gin_file=tiny.gin --gin_file=runs/finetune.gin --gin_file=peft/lora.gin \
#   --gin_bindings='import tickets' --gin.MIXTURE_OR_TASK_NAME=tickets \
#   --gin.TASK_FEATURE_LENGTHS='{"inputs": 32, "targets": 4}' \
#   --gin.INITIAL_CHECKPOINT_PATH=published --gin.BATCH_SIZE=16 --gin.TRAIN_STEPS=150 \
#   --gin.EVAL_PERIOD=150 --gin.LearningRate.base_learning_rate=0.03 \
#   --gin.MODEL_DIR=runs/tickets

# %%
tuned = t5x_lab.load("runs/tickets")
tuned.generate(["The server smells of smoke. Urgent?", "My screen has a nice case. Urgent?"], max_tokens=3)

# %% [markdown]
# ## Merge and export
#
# Merge LoRA into the kernels, and convert the result to Hugging Face's format:

# %%
tuned.merged().save("runs/merged")

# %% language="bash"
# set -e
# t5x_lab convert --source=runs/merged --to=hf --target=tuned_hf
# ls tuned_hf
