"""What a trained model says about examples, and how good it is.

A `model` here is anything with the functions `generate`, `generate_tokens`, `search_tokens`, `scores` and `fit_prompts` of
`t5x_lab.runs.run.Run`, and its attributes `vocabulary`, `has_encoder`, `special_tokens`, `around_inputs`, `soft_prompt`,
`eos_id`, `end_ids`, `max_positions` and `trained_length`.
"""
