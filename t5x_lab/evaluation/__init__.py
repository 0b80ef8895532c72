"""What a trained model says about examples, and how good it is.

A `model` here is anything with the functions `generate`, `generate_tokens` and `scores` of `t5x_lab.runs.run.Run`.
"""
