"""CUDA streams, graph capture and unrecoverable GPU errors.

No function here initializes CUDA.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable

import torch


def is_capturing() -> bool:
    """Return whether the current stream captures a CUDA graph; synchronizing would then raise an error."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return False
    try:
        return torch.cuda.is_current_stream_capturing()
    except RuntimeError:  # the GPU is lost; the next CUDA call raises again
        return False


def current_stream(device: torch.device) -> torch.cuda.Stream | None:
    if device.type == "cuda":
        return torch.cuda.current_stream(device)
    return None


@functools.cache
def raw_stream_of(device: torch.device) -> Callable[[], int]:
    """Return a function that returns the handle of the current stream, as Triton's launches read it, without a call of
    Python; 0 for a device without streams.
    """
    if device.type != "cuda":
        return int
    return functools.partial(torch._C._cuda_getCurrentRawStream, device.index)


def follow(stream: torch.cuda.Stream | None, tensors: Iterable[torch.Tensor]) -> None:
    """Make the current stream wait for the stream that wrote tensors, and keep their memory until then."""
    if stream is None:
        return
    reading = torch.cuda.current_stream(stream.device)
    if stream != reading:
        reading.wait_stream(stream)
        for tensor in tensors:
            tensor.record_stream(reading)


def is_lost(error: BaseException) -> bool:
    """Return whether an exception means that the GPU is unusable in this process.

    An illegal address or a failed assertion in any kernel is raised by the next CUDA call, and by every call after it.
    Querying the stream detects this without synchronizing.
    """
    if not isinstance(error, RuntimeError) or isinstance(error, torch.OutOfMemoryError):
        return False
    # A query would end the stream's capture.
    if not torch.cuda.is_initialized() or is_capturing():  # type: ignore[no-untyped-call]
        return False
    try:
        torch.cuda.current_stream().query()
    except RuntimeError:
        return True
    return False


def lost_message(error: BaseException, what: str) -> str:
    reason = str(error).strip().partition("\n")[0]
    return (
        f"The GPU is unusable in this process ({type(error).__name__}: {reason}). An earlier kernel caused this, and"
        f" the next training operation will raise the same error. {what} ends. Run again with CUDA_LAUNCH_BLOCKING=1"
        " to find the call."
    )
