"""Readers of recorded runs: on the terminal (``show``), as a page (``report``), and of several runs (``compare``)."""
