"""The output error of a GEMM, and its causes: the format, the quantizer or the kernel.

This package does not use Transformer Engine, a session, or global random state.

    left = factor_of(b_data, columnwise=False)             # C = left @ right^T, [n, m]
    right = factor_of(a_data, columnwise=False)
    x, y = probes(m, 16, seed, device), probes(n, 16, seed + 1, device)
    expected = product(left, right, x, y)                  # from codes and scales
    run = thin(factor_of(out, columnwise=False), x, y)     # from the result of the device
    kernel = check_kernel(run, expected, call)             # the kernel's error, and the bad rows and columns
    check = check_codes(stored, high, rules, 0, 0)         # the quantizer's errors

C x costs as much as a few columns of C. For a Gaussian x and any matrix E, the mean of |E x|^2 is |E|_F^2.
See docs/gemm-error.md for the formulas and their sources.
"""
