"""Assembly of runs from their configuration. The only layer that knows all others. TensorFlow is imported when data are needed.

data_layer.py  import of the TensorFlow-based layers
config/        `RunConfig`, `GinConfig`, everything that gin may bind, the configuration in a checkpoint
model/         a model on a mesh, and `Run`: generate, score, classify, PEFT
evaluate/      evaluations of a run and of its checkpoints
train/         training: start, step, recording, the run directory
convert/       conversion between checkpoint formats
compile.py     `t5x_lab compile`
cache.py       `t5x_lab cache`
demo.py        `t5x_lab demo`
harness.py     lm-eval's own command line
"""
