"""Run a client's script under the spy, and optionally under the debugger.

Usage::

    te-precision run inside/run.py SCRIPT ARGS...
    te-precision run inside/run.py -m MODULE ARGS...

The environment gives the rest: ``CLIENTS_RECORD`` is the folder of the spy's notes; with ``CLIENTS_FRONT_DOOR`` the
debugger watches, with the config ``CLIENTS_CONFIG`` and logs in ``CLIENTS_LOGS``. The script's view of itself
(``__main__``, ``sys.argv``, ``sys.path[0]``) is the same as without the debugger.
Generators of random numbers have a seed, since some scripts set none.
"""

import os
import random
import runpy
import sys
from pathlib import Path

HERE = str(Path(__file__).parent)
SEED = 1234


def main() -> None:
    sys.path[0] = str(Path(HERE).parent)
    import numpy
    import torch  # the reference backend comes with it
    from inside.spying import Spy
    from inside.watching import WATCH

    del sys.path[0]
    random.seed(SEED)
    numpy.random.seed(SEED)
    torch.manual_seed(SEED)
    Spy(Path(os.environ["CLIENTS_RECORD"])).install()
    if integration := os.environ.get("CLIENTS_FRONT_DOOR"):
        WATCH[integration](Path(os.environ["CLIENTS_CONFIG"]), Path(os.environ["CLIENTS_LOGS"]))
    del sys.argv[0]
    if sys.argv[0] == "-m":
        del sys.argv[0]
        sys.path.insert(0, os.getcwd())
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, str(Path(sys.argv[0]).resolve().parent))
        runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
