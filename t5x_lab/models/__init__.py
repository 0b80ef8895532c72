"""Models: a network with its loss (`config`, `model`, `loss`), and with a classification head (`classifier`)."""
