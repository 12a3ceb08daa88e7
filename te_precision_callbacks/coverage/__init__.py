"""Matrix products of a model: multiply-adds, the precision of each GEMM with its reason, and contracts."""
