"""What ran in which precision, and why: products, their multiply-adds, the precision of each GEMM, contracts."""
