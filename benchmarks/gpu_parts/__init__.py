"""The parts of gpu_check.py, each of which runs in a process of its own."""
