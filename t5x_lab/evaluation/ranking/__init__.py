"""Rank classification: `scoring` answers questions, `accuracy` counts right answers, `ranked_tasks` reads SeqIO tasks."""
