"""A folder for PYTHONPATH; see ``te_precision_callbacks/reference/children.py``."""
