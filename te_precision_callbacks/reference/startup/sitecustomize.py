"""Runs at the start of every Python process whose PYTHONPATH holds this folder; see ``reference/children.py``.

Python imports one ``sitecustomize`` only. This one hides the next one on the path, so it takes its own folder off the
path and imports that one afterwards.
"""

import contextlib
import importlib
import os
import sys

_FOLDER = os.path.dirname(os.path.abspath(__file__))
sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry) != _FOLDER]

# The package may be out of reach here, in an environment of another Python for example: then nothing is to be done.
with contextlib.suppress(ImportError):
    from te_precision_callbacks.reference.children import install_when_needed

    install_when_needed()

_this = sys.modules.pop(__name__)
try:
    importlib.import_module(__name__)
except ModuleNotFoundError as error:
    if error.name != "sitecustomize":
        raise
    sys.modules[__name__] = _this
