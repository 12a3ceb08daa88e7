"""Runs at the start of every Python process with this folder in PYTHONPATH; see ``__init__.py``.

Python imports only one ``sitecustomize``: this one removes its own folder from the path and imports the next one.
"""

import contextlib
import importlib
import os
import sys

_FOLDER = os.path.dirname(os.path.abspath(__file__))
sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry) != _FOLDER]

# The package may be missing, for example in the environment of another Python.
with contextlib.suppress(ImportError):
    from te_precision_callbacks.startup import install_when_needed

    install_when_needed()

_this = sys.modules.pop(__name__)
try:
    importlib.import_module(__name__)
except ModuleNotFoundError as error:
    if error.name != "sitecustomize":
        raise
    sys.modules[__name__] = _this
