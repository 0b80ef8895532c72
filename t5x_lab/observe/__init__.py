"""What a person sees of a run: metrics files, console, parameter table, plots, profiles, what chips can do,
and what a compiled program sends. Nothing here changes a run."""
