"""All that imports Transformer Engine: its modules with GEMMs, their state, recipes, quantizers and the debug path."""
