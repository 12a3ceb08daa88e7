"""Checks of a model's parameters: gradients, samples of weights, updates, and replicas on ranks."""
