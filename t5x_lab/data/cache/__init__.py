"""SeqIO caches of preprocessed tasks: `writing` creates them, `reading` uses them in place of a task's source."""
