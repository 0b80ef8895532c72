"""Evaluation of trained models: losses, SeqIO metrics, rank classification, probes, lm-eval, batch inference.

evaluation.py   the `Evaluation` protocol, its result, and the base classes of the library's evaluations
config.py       the evaluations that gin binds in EVALS, and early stopping
tasks.py        the SeqIO tasks that an evaluation reads
results.py      result files, evals/<name>/<step>.json
metrics/        teacher-forced loss, metrics of SeqIO tasks, benchmark averages
ranking/        rank classification: scores of answer choices, accuracies
probes/         zero-shot probes such as BLiMP
inference/      `t5x_lab infer`: predictions and scores as JSONL
harness/        the adapter for lm-eval

A `model` here is a `t5x_lab.runs.model.run.Run`. Ranking of questions needs only its method `scores`.
"""
