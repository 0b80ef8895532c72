"""Input pipeline: from tasks to host batches.

batches.py             training batches, with a position that checkpoints save
evaluation_batches.py  evaluation batches
rows.py                rows with a model's features, from the examples of a mixture
rates.py               rates at which tasks are sampled
reading.py             examples of one shard of a task
source_shards.py       how a source is divided into shards
examples.py            common features of the examples of a mixture
graph.py               many tasks in one tf.data graph
patches.py             replaced functions of TensorFlow
checks.py              checks before anything is read
failures.py            which record an error comes from
file_changes.py        whether files changed since a checkpoint
stateful_functions.py  refusal of pipelines whose position cannot be saved
"""
