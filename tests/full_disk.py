"""A disk that is full, for the tests of what writes."""

import contextlib
import resource
import signal
from collections.abc import Iterator


@contextlib.contextmanager
def files_up_to(nbytes: int) -> Iterator[None]:
    """No file can grow above a size, as if the disk were full."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)
