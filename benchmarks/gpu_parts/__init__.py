"""Parts of gpu_check.py. Each runs in its own process."""
