"""What a GPU does behind Python's back: it has several streams, records CUDA graphs, and can be lost for good.

On a machine without CUDA, and before anything has used it, none of this exists, and every question has its answer
without asking the driver.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch


def is_capturing() -> bool:
    """Whether the current stream records a CUDA graph: an operation is then not run but recorded, a replay would run it
    again, and whatever waits for the device ends the recording with an error."""
    if not _in_use():
        return False
    try:
        return torch.cuda.is_current_stream_capturing()
    except RuntimeError:  # the GPU is lost, and whatever is done next raises again
        return False


def _in_use() -> bool:
    in_use: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return in_use


def current_stream(device: torch.device) -> torch.cuda.Stream | None:
    """The stream on which this thread queues operations of a device; None for a device without streams."""
    return torch.cuda.current_stream(device) if device.type == "cuda" else None


def follow(stream: torch.cuda.Stream | None, tensors: Iterable[torch.Tensor]) -> None:
    """Let what is queued on the current stream from now on see tensors that another stream has written.

    The host does not wait. The memory of the tensors is not given to others before the current stream has read it.

    Args:
        stream: the stream on which the last write was queued; None for a device without streams.
        tensors: what was written, all on the device of the stream.
    """
    if stream is None:
        return
    reading = torch.cuda.current_stream(stream.device)
    if stream != reading:
        reading.wait_stream(stream)
        for tensor in tensors:
            tensor.record_stream(reading)


def is_lost(error: BaseException) -> bool:
    """Whether an exception comes from a GPU that can run nothing any more in this process.

    An illegal address or an assertion in a kernel, in whatever kernel, is raised by the next call that looks, which may
    be one of ours, and by each call after it. The stream reports it without waiting, whatever library has raised.
    """
    if not isinstance(error, RuntimeError) or isinstance(error, torch.OutOfMemoryError):
        return False
    if not _in_use() or is_capturing():  # asking a stream would end its capture
        return False
    try:
        torch.cuda.current_stream().query()
    except RuntimeError:
        return True
    return False


def lost_in_words(error: BaseException, what: str) -> str:
    """A message about a lost GPU.

    Args:
        error: an exception that :func:`is_lost`.
        what: what ends.
    """
    reason = str(error).strip().partition("\n")[0]
    return (
        f"The GPU can run nothing any more in this process ({type(error).__name__}: {reason}). A kernel that ran before"
        f" has caused this, and the next operation of training raises the same error. {what} ends. Run again with"
        " CUDA_LAUNCH_BLOCKING=1 to see in which call."
    )
