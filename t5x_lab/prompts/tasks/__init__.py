"""SeqIO tasks of one data set: `prompted_task` builds a task, `data_set_tasks` names them, `registry` registers them."""
