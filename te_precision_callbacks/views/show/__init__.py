"""Shows a recorded run on a terminal: its worst layers, curves, coverage and last events."""
