"""Prints the table of docs/diagnosis.md: ``python -m te_precision_callbacks.diagnosis.rules``."""

from __future__ import annotations

import sys

from te_precision_callbacks.diagnosis.rules import table

if __name__ == "__main__":
    sys.stdout.write(table() + "\n")
