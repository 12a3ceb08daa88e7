"""The program of :func:`tests.forked.executable`: a server that forks, and a client called in place of ``python``."""
