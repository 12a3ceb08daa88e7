"""Layers of a model: their names and scopes, kinds of forwards, and GEMM events."""
