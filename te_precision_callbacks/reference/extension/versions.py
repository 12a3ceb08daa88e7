"""The versions and constants that Transformer Engine asks the extension for.

Usage::

    get_cublasLt_version()  # 120905

cuBLAS is reported as 12.9.5: new enough for FP8 on every GPU that the backend emulates, and older than what
Transformer Engine needs for its grouped-tensor GEMM (13.3), which the reference backend does not have. cuDNN is
reported as 9.21.0, the first with attention in MXFP8.
"""

from __future__ import annotations


def get_cublasLt_version() -> int:
    """12.9.5: major * 10000 + minor * 100 + patch."""
    return 120905


def get_cudnn_version() -> int:
    """9.21.0: major * 10000 + minor * 100 + patch. Transformer Engine reads it when it looks for a fused attention."""
    return 92100


def get_num_cublas_streams() -> int:
    """Streams of a grouped GEMM; each has a workspace of its own, which the reference backend does not use."""
    return 4


def device_supports_multicast(device_id: int = -1) -> bool:
    """No multicast: userbuffers are not in the reference backend."""
    return False


def get_stream_priority_range(device_id: int = -1) -> tuple[int, int]:
    """Lowest and highest priority of a stream: there is one."""
    return (0, 0)


def ubuf_built_with_mpi() -> bool:
    """No MPI: userbuffers are not in the reference backend."""
    return False


def nvte_built_with_cublasmp() -> bool:
    """No cuBLASMp: it is not in the reference backend."""
    return False
