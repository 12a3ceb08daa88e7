"""Safe opening of files in a log folder that others can write to."""

from __future__ import annotations

import errno
import os
import stat


def own_file(path: str, flags: int) -> int:
    """Open a file for writing, as ``opener=`` of :func:`open`.

    Raises:
        OSError: it is a symbolic link, a pipe or a device.
    """
    try:
        descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError(errno.ELOOP, "it is a symbolic link, which is not followed", path) from None
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is no regular file", path)
    return descriptor
