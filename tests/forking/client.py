"""Stands for a process that is forked elsewhere: hands over how it was called, passes signals on, ends as that ends.

    python -IS client.py PROGRAM ARGUMENTS...

PROGRAM is what this was called by; the socket of tests/forking/server.py is next to it.
"""

import json
import os
import signal
import socket
import sys

PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True


def main() -> None:
    address, *arguments = f"{sys.argv[1]}.socket", *sys.argv[2:]
    # All that is open is meant to be inherited.
    descriptors = [fd for fd in map(int, os.listdir("/proc/self/fd")) if is_open(fd)]
    request = json.dumps(
        {"arguments": arguments, "environment": dict(os.environ), "folder": os.getcwd(), "descriptors": descriptors}
    ).encode()
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(address)
    socket.send_fds(connection, [len(request).to_bytes(8, "big")], descriptors)
    connection.sendall(request)
    for number in PASSED_ON:
        signal.signal(number, lambda got, _: connection.sendall(bytes([got])))
    answer = connection.recv(4)
    if not answer:
        with open(f"{sys.argv[1]}.log") as log:
            sys.exit(f"The process from which this one was to be forked has ended: {log.read()}")
    status = int.from_bytes(answer, "big")
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        if number != signal.SIGKILL:
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    os._exit(os.WEXITSTATUS(status))


if __name__ == "__main__":
    main()
