"""One page that shows a run, or several laid over each other: made of the files of run directories alone."""
