"""All that imports Transformer Engine: its modules with GEMMs, their state, recipes, quantizers and the debug path.

Two modules know it without an import: ``gemm_shapes.py`` and ``environment.py``.
"""
