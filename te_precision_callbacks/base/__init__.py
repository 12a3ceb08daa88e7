"""Shared basics: vocabulary, errors, notices, ranks, numerics, the terminal. Imports no other package."""
