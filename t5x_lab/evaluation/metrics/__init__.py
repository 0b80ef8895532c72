"""Metrics on SeqIO tasks: teacher-forced loss (`loss`), the tasks' own metrics (`task_metrics`), averages (`benchmarks`)."""
