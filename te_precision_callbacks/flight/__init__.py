"""What each GEMM read in each step, in few numbers: the ring on the device, and the last steps on the host."""
