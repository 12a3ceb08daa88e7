"""The model as a tree of modules: names of layers, their scopes, forwards, GEMM events, and what they keep."""
