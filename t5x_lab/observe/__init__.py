"""What a person sees of a run: metrics files, console, parameter table, plots. Nothing here changes a run."""
