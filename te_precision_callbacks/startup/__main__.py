"""Runs the script, or with ``-m`` the module, of ``te-precision run --watch``, and records a SystemExit that ends it.

Python puts any other uncaught exception into ``sys.last_value``, which the end of a session reads.
"""

import os
import runpy
import sys

is_module = sys.argv[1] == "-m"
del sys.argv[: 1 + is_module]
sys.last_value = None
try:
    if is_module:
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = os.path.dirname(os.path.realpath(sys.argv[0]))
        runpy.run_path(sys.argv[0], run_name="__main__")
except SystemExit as error:
    sys.last_value = error
    raise
