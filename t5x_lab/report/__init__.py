"""HTML report of a run, or comparison of several, made from the files in run directories (`page`)."""
