"""``te-precision doctor``: what a bug report needs to know of a machine, and what is wrong with it.

Usage::

    te-precision doctor --log-dir logs
    te-precision doctor --json > doctor.json

Each module collects one part as dataclasses; :mod:`~te_precision_callbacks.cli.doctor.advice` judges them, and
:mod:`~te_precision_callbacks.cli.doctor.command` prints them.
"""
