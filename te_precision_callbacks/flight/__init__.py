"""The watch of every step: one number for each tensor of a GEMM, on the device and for the last steps on the host."""
