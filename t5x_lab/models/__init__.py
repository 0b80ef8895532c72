"""Models: a network with its loss (`model`), with a classification head (`classifier`), and loss weights (`loss`)."""
