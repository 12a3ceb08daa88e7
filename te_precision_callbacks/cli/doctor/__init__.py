"""``te-precision doctor``: system information for bug reports, and known problems."""
