"""Shows a recorded run on a terminal: the verdict, worst layers, curves, coverage and last events."""
