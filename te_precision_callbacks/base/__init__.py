"""Shared basics: vocabulary, errors, notices, ranks, numerics, the terminal. Imports nothing above it."""
