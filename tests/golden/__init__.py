"""The text of each output that users read, as it was when somebody last looked at it: ``outputs.py`` makes it.

``python -m tests.golden`` rewrites the files, tests/test_commands.py compares them.
"""
