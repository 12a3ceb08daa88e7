"""Versions and constants that Transformer Engine reads from the extension.

cuBLAS is reported as 12.9.5: new enough for FP8 on every emulated GPU, and too old for Transformer Engine's GEMM of
grouped tensors (13.3 to 13.6), which the backend does not support. cuDNN is reported as 9.21.0.
"""

from __future__ import annotations

from te_precision_callbacks.reference.extension.exports import export


@export
def get_cublasLt_version() -> int:
    return 120905


@export
def get_cudnn_version() -> int:
    return 92100


@export
def get_num_cublas_streams() -> int:
    """Streams of a grouped GEMM; each has its own workspace, which the reference backend does not use."""
    return 4
