"""The model as a tree of modules: names of layers, scopes, kinds of forwards, and events of GEMMs."""
