"""Tasks for a classification head, classify_<data set>: `config` settings, `sequences` token ids, `task` SeqIO tasks."""
