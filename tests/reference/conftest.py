"""The backend is installed before these tests import Transformer Engine, also where there is a GPU."""

from te_precision_callbacks import reference

reference.install()
