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
# # Quick start: train, load and compare models
#
# This notebook trains a small decoder on the State of the Union addresses, which are included in the package. It takes one or two
# minutes on a laptop's CPU. All files are written to a new folder.

# %%
import os
import tempfile

os.chdir(tempfile.mkdtemp())

# %% [markdown]
# ## Train a vocabulary
#
# A SentencePiece vocabulary of 2,000 pieces, trained on the corpus:

# %% language="bash"
# t5x_lab vocab --task=sotu --size=2000 --output=my.model

# %% [markdown]
# ## Train a model
#
# The gin file includes a model and an objective, and overrides some settings. All files of a run are in its directory. The same
# command resumes from the last checkpoint.

# %%
# %%writefile small.gin
include "models/decoder/tiny.gin"
include "objectives/full_lm.gin"

SentencePieceVocabulary.path = "my.model"
TransformerConfig.vocab_size = 2112
TransformerConfig.emb_dim = 64
TransformerConfig.head_dim = 16
TransformerConfig.mlp_dim = 256
MIXTURE_OR_TASK_NAME = "sotu"
TASK_FEATURE_LENGTHS = {"targets": 64}
BATCH_SIZE = 16
TRAIN_STEPS = 200
EVAL_PERIOD = 50
DataConfig.eval_steps = 8
LearningRate.factors = "constant * linear_warmup"
LearningRate.base_learning_rate = 0.02
LearningRate.warmup_steps = 50
EVALS = (@LossEvaluation(), @SamplesEvaluation())
SamplesEvaluation.prompts = ("The people of the United States", "We must")

# %% language="bash"
# t5x_lab train --gin_file=small.gin --gin.MODEL_DIR=runs/first

# %% [markdown]
# ## Metrics
#
# Every step and every evaluation is a line of `metrics.jsonl`. As a table:

# %%
from t5x_lab.observe.curves import read_columns

columns = read_columns("runs/first")
for split, found in columns.items():
    print(f"{split}: {len(found.steps)} lines, the last loss {found['loss'][-1]:.3f} nats per token")

# %%
from IPython.display import Image

Image("runs/first/plots/loss.png")

# %% [markdown]
# ## Generate and score
#
# A loaded run generates and scores texts, and computes logits:

# %%
import t5x_lab

run = t5x_lab.load("runs/first")
print(f"{run.num_parameters:,} parameters, step {run.step}")
prompts = ["The people", "Our army"]
for prompt, (text,) in zip(prompts, run.generate(prompts, max_tokens=24, temperature=0.7)):
    print(f"{prompt}{text}")

# %%
run.score(["The Congress of the United"] * 2, [" States", " cheese"])

# %%
import numpy as np

ids = [0, *run.vocabulary.encode("The people of the United")]
logits = run.logits(decoder_input_tokens=[ids])[0, -1]
for piece in np.argsort(-logits)[:5]:
    print(f"{logits[piece]:7.3f}  {run.vocabulary.decode([int(piece)])!r}")

# %% [markdown]
# ## Compare two runs
#
# A second run differs in one setting. `t5x_lab report` plots both in one self-contained HTML page:

# %% language="bash"
# set -e
# t5x_lab train --gin_file=small.gin --gin.MODEL_DIR=runs/slow \
#   --gin.LearningRate.base_learning_rate=0.002
# t5x_lab report runs/first runs/slow --output=both.html

# %%
from t5x_lab.report.differences import differences
from t5x_lab.report.run_directory import read_run

for name, values in differences([read_run("runs/first"), read_run("runs/slow")]).items():
    print(f"{name}: {values}")

# %%
for name in ("first", "slow"):
    losses = read_columns(f"runs/{name}")["eval/sotu_full_lm"]["loss"]
    print(f"{name}: held-out loss {losses[-1]:.3f}")
