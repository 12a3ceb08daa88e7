"""Transformer Engine's modules with GEMMs, and their state."""
