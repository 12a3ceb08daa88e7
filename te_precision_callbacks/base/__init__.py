"""What every room uses: words, errors, notices, ranks, numerics, the terminal. It imports nothing above it."""
