"""Other people's training scripts, run without the debugger and with it, and compared: ``make clients SRC=folder``."""
