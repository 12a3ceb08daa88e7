"""``python -m te_precision_callbacks`` is ``te-precision``."""

from te_precision_callbacks.cli import main

if __name__ == "__main__":
    main()
