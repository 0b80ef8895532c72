"""SeqIO tasks of a run: `text_tasks` (plain text, objectives), `names` (from names to tasks), `mixture` (lengths and rates)."""


def __getattr__(name: str):
    if name == "register_text":  # public path of this function
        from t5x_lab.data.tasks.names import register_text  # needs TensorFlow

        return register_text
    raise AttributeError(f"module 't5x_lab.data.tasks' has no attribute {name!r}")
