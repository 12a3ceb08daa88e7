"""Import a module, and fork a process for each request of tests/forking/client.py.

    python -m tests.forking.server OWNER PROGRAM LISTENER MODULE

LISTENER is the descriptor of a socket. It ends when the process with the id OWNER has ended.
"""

import atexit
import contextlib
import fcntl
import gc
import importlib
import json
import multiprocessing
import os
import runpy
import selectors
import signal
import socket
import sys
import threading
import types
import warnings
import weakref
from pathlib import Path
from typing import Any, NoReturn

Request = dict[str, Any]


def serve(owner: int, listener: socket.socket, module: str) -> Request:
    """Fork a process for each request. Returns in that process alone."""
    gc.disable()  # what imports make stays
    importlib.import_module(module)
    assert threading.active_count() == 1, "a thread is not there after a fork"
    for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        finalizer.atexit = False  # such as torch's, which takes its operators out of the dispatcher, one after another
    gc.collect()
    gc.freeze()
    gc.enable()

    selector = selectors.DefaultSelector()
    selector.register(listener, selectors.EVENT_READ)
    own = os.pidfd_open(owner)
    selector.register(own, selectors.EVENT_READ)
    processes: dict[socket.socket, int] = {}  # the process that runs for a client
    clients: dict[int, socket.socket] = {}  # by the process's descriptor
    while True:
        for key, _ in selector.select():
            if key.fileobj == own:
                os._exit(0)
            elif key.fileobj is listener:
                client, _ = listener.accept()
                request = received(client)
                process = os.fork()
                if not process:
                    selector.close()
                    for descriptor in (own, *clients):
                        os.close(descriptor)
                    for opened in (listener, client, *processes):
                        opened.close()
                    return request
                for descriptor in request["received"]:
                    os.close(descriptor)
                processes[client] = process
                descriptor = os.pidfd_open(process)
                clients[descriptor] = client
                selector.register(client, selectors.EVENT_READ)
                selector.register(descriptor, selectors.EVENT_READ)
            elif isinstance(key.fileobj, int):  # a process has ended
                selector.unregister(key.fileobj)
                client = clients.pop(key.fileobj)
                os.close(key.fileobj)
                _, status = os.waitpid(processes.pop(client), 0)
                selector.unregister(client)
                with contextlib.suppress(OSError):  # it may have been killed
                    client.sendall(status.to_bytes(4, "big"))
                client.close()
            elif key.fileobj in processes:
                assert isinstance(key.fileobj, socket.socket)
                numbers = key.fileobj.recv(64)
                for number in numbers or [signal.SIGKILL]:  # the client was killed
                    os.kill(processes[key.fileobj], number)
                if not numbers:
                    selector.modify(key.fileobj, selectors.EVENT_WRITE)


def received(client: socket.socket) -> Request:
    length, descriptors, _, _ = socket.recv_fds(client, 8, 250)
    with client.makefile("rb", buffering=0) as file:
        body = b""
        while len(body) < int.from_bytes(length, "big"):
            body += file.read(int.from_bytes(length, "big") - len(body))
    return {**json.loads(body), "received": descriptors}


def become(request: Request, program: str) -> None:
    """Take over the client's files, folder and environment."""
    moved = [fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 300) for descriptor in request["received"]]
    for descriptor in request["received"]:
        os.close(descriptor)
    for descriptor, target in zip(moved, request["descriptors"], strict=True):
        os.dup2(descriptor, target)
        os.close(descriptor)
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    sys.executable = program
    multiprocessing.set_executable(program)
    if os.environ.get("TORCHDYNAMO_DISABLE") == "1":  # which is read when it is imported
        sys.modules["torch._dynamo.config"].disable = True  # type: ignore[attr-defined]
    if os.environ.get("PYTHONUNBUFFERED"):
        unbuffered()


def unbuffered() -> None:
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(write_through=True)  # type: ignore[union-attr]


def run(arguments: list[str]) -> None:
    """As ``python`` with these arguments does it."""
    at = 0
    while arguments[at] not in ("-c", "-m") and arguments[at].startswith("-"):
        option = arguments[at]
        at += 1
        if option == "-u":
            unbuffered()
        elif option == "-B":
            sys.dont_write_bytecode = True
        elif option.startswith("-W"):
            filtered = option[2:] or arguments[at]
            at += option == "-W"
            sys.warnoptions.append(filtered)
            warnings._setoption(filtered)  # type: ignore[attr-defined]
        else:
            sys.exit(f"tests/forking/server.py does not know the option {option}.")
    kind = arguments[at]
    main = types.ModuleType("__main__")
    main.__dict__["__builtins__"] = __builtins__
    if kind in ("-c", "-m"):
        what, first = arguments[at + 1], "" if kind == "-c" else os.getcwd()
        sys.argv = [kind, *arguments[at + 2 :]]
    else:
        what, first = kind, str(Path(kind).resolve().parent)
        sys.argv = arguments[at:]
    others = os.environ.get("PYTHONPATH", "")
    sys.path[:] = [first, *(others.split(os.pathsep) if others else []), *sys.path]
    importlib.invalidate_caches()
    sys.modules.pop("sitecustomize", None)
    try:
        importlib.import_module("sitecustomize")
    except ModuleNotFoundError as error:
        if error.name != "sitecustomize":
            raise
    installed_on_import_of_torch()
    sys.modules["__main__"] = main
    if kind == "-m":
        runpy._run_module_as_main(what)  # type: ignore[attr-defined]
    elif kind == "-c":
        exec(compile(what, "<string>", "exec"), main.__dict__)
    else:
        main.__file__ = os.path.abspath(what)
        exec(compile(Path(what).read_bytes(), main.__file__, "exec"), main.__dict__)


def installed_on_import_of_torch() -> None:
    """Torch is imported already: what waits for that has its turn."""
    inherited = sys.modules.get("te_precision_callbacks.reference.inherited")
    if inherited is not None:
        inherited.install_if_pending()


def end(error: BaseException | None) -> NoReturn:
    """As Python ends a process, with the exception that nobody has caught."""
    code: Any = 0
    if isinstance(error, SystemExit):
        code = error.code
        if not (code is None or isinstance(code, int)):
            print(code, file=sys.stderr)
            code = 1
    elif error is not None:
        traceback = error.__traceback__
        while traceback is not None and traceback.tb_frame.f_code.co_filename == __file__:
            traceback = traceback.tb_next
        sys.last_type, sys.last_value, sys.last_traceback = type(error), error, traceback
        sys.excepthook(type(error), error.with_traceback(traceback), traceback)
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        if not stream.closed:  # as in the tracker of multiprocessing's resources
            stream.flush()
    if isinstance(error, KeyboardInterrupt):
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit((code or 0) & 0xFF)


def main() -> NoReturn:
    owner, program, listener, module = sys.argv[1:]
    libraries = [entry for entry in sys.path if entry not in ("", os.getcwd(), os.environ["PYTHONPATH"])]
    request = serve(int(owner), socket.socket(fileno=int(listener)), module)
    sys.path[:] = libraries
    become(request, program)
    ended: BaseException | None = None
    try:
        run(request["arguments"])
    except BaseException as error:
        ended = error
    end(ended)


if __name__ == "__main__":
    main()
