"""The model as a tree of modules: names of layers, their scopes, forwards, and what they keep."""
