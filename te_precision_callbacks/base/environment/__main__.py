"""``python -m te_precision_callbacks.base.environment`` prints the table of docs/doctor.md."""

import sys

from te_precision_callbacks.base.environment import markdown

if __name__ == "__main__":
    sys.stdout.write(markdown() + "\n")
