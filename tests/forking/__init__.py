"""The program of :func:`tests.forked.executable`: a process that forks, and what is called in place of ``python``."""
