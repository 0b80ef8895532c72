"""Training of a run.

train.py           `t5x_lab train`, from a configuration to a trained run directory
starting_point.py  what a run starts from
assemble.py        training step and state on a sharded model
batch.py           features of a training batch, without its data
recording.py       metrics of steps and evaluations
ownership.py       one training per run directory
summary.py         banner, dry run, files that describe the run
training_flops.py  FLOPs with frozen or added parameters
"""
