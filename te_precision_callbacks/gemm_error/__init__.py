"""The error of a GEMM at its output, and its causes: the format, the quantizer or the kernel.

Only arithmetic on tensors: no Transformer Engine, no session, no global random state.

    left = factor_of(b_data, columnwise=False)             # C = left @ right^T, [n, m]
    right = factor_of(a_data, columnwise=False)
    x, y = probes(m, 16, seed, device), probes(n, 16, seed + 1, device)
    expected = product(left, right, x, y)                  # what the codes and scales give
    run = thin(out, x, y)                                  # what the device gave
    found = judged(run, expected, call)                    # the kernel's error, and the rows and columns beyond it
    check = check_codes(stored, high, rules, 0, 0)         # the quantizer's

C x costs as much as a few columns of C. For a Gaussian x and any matrix E, the mean of |E x|^2 is |E|_F^2.
docs/gemm-error.md has the formulas and their sources.
"""
