"""From text to host batches, on SeqIO: vocabularies, sources, objectives, feature converters, the input pipeline.

`config` is free of TensorFlow; every other module here imports it.
"""
