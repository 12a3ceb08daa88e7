"""Ways a run can end."""

from typing import NamedTuple


class Way(NamedTuple):
    """A row of the table.

    Attributes:
        mode, code: of tests/endings/script.py.
        resumed: whether a second process resumes the run, and ends normally.
        ranks: number of processes that train together.
    """

    name: str
    mode: str
    code: str
    resumed: bool = False
    ranks: int = 1


_BLOCKED = "lock = (ctypes.c_char * 64)(); c = ctypes.CDLL(None); c.pthread_mutex_lock(lock);"
_KILL_SOON = "threading.Timer(0.2, kill, [15]).start();"

_COLLECTIVE = f"""
if rank == 0: {_KILL_SOON}
try: torch.distributed.recv(torch.ones(1), 1 - rank)
except RuntimeError: pass  # on rank 1, since rank 0 is gone
"""

_SAVE = "torch.save([part.state_dict() for part in (session, model, optimizer)], Path(folder, 'state'));"

_FIRST_STEP = """
model, optimizer = build()
with InspectSession(model=model, log_dir=folder):
    backward(model)
    raise ValueError('bad batch')
"""

USUAL = (
    "a block ends",
    "stop() is not called",
    "exception in a block",
    "exception in a watched script",
    "exception in the first step",
    "SIGTERM, then resumed",
    "exception on rank 1",
)
"""Those that ``make test`` runs, beside the signals of tests/session/test_interrupts.py and the scripts of
tests/test_watch.py; ``make test-all`` runs all."""

WAYS = (
    Way("a block ends", "with", ""),
    Way("stop() is not called", "session", ""),
    Way("a watched script ends", "watch", ""),
    Way("exception in a block", "with", "raise ValueError('bad batch')"),
    Way("exception without stop()", "session", "raise ValueError('bad batch')"),
    Way("exception in a watched script", "watch", "raise ValueError('bad batch')"),
    Way("exception that the script handles", "watch", "try: 1 / 0\nexcept ZeroDivisionError: pass"),
    Way("Ctrl-C in a block", "with", "kill(2)"),
    Way("Ctrl-C in a watched script", "watch", "kill(2)"),
    Way("SIGTERM in a block", "with", "kill(15); time.sleep(60)"),
    Way("SIGTERM in a watched script", "watch", "kill(15); time.sleep(60)"),
    Way("SIGTERM while blocked in a call", "watch", f"{_BLOCKED} {_KILL_SOON} c.pthread_mutex_lock(lock)"),
    Way("SIGTERM, handled by sys.exit(0)", "watch", "signal.signal(15, lambda *_: sys.exit(0)); kill(15)"),
    Way("SIGTERM, handled by sys.exit(3)", "watch", "signal.signal(15, lambda *_: sys.exit(3)); kill(15)"),
    Way("SIGKILL", "session", "kill(9)"),
    Way("sys.exit() in a block", "with", "sys.exit()"),
    Way("sys.exit(3) in a block", "with", "sys.exit(3)"),
    Way("sys.exit(0)", "session", "sys.exit(0)"),
    Way("sys.exit(text)", "session", "sys.exit('no data')"),
    Way("sys.exit(3), watched", "watch", "sys.exit(3)"),
    Way("a script of torchrun ends, watched", "watched child", ""),
    Way("sys.exit(3) in a script of torchrun, watched", "watched child", "sys.exit(3)"),
    Way("exit(1)", "watch", "import builtins, _sitebuiltins; _sitebuiltins.Quitter('exit', '')(1)"),
    Way("raise SystemExit", "watch", "raise SystemExit"),
    Way("os._exit(0)", "watch", "os._exit(0)"),
    Way("os._exit(3)", "watch", "os._exit(3)"),
    Way("no step", "plain", "InspectSession(model=build()[0], log_dir=folder).start().stop()"),
    Way("no model", "plain", "InspectSession(log_dir=folder).start().stop()"),
    Way("exception in the first step", "plain", _FIRST_STEP),
    Way("a watched script without a backward", "watched plain", "build()[0](torch.randn(32, 32))"),
    Way("two trainings in a process", "watched plain", "train(*build()); train(*build())"),
    Way("two trainings, the second fails", "watched plain", "train(*build()); train(*build()); f(1)"),
    Way("two trainings, the first diverges", "watched plain", "train(*build(), factor=math.nan); train(*build())"),
    Way("exception, then resumed", "session", f"{_SAVE} raise ValueError('bad batch')", resumed=True),
    Way("SIGTERM, then resumed", "session", f"{_SAVE} kill(15); time.sleep(60)", resumed=True),
    Way("SIGKILL, then resumed", "session", f"{_SAVE} kill(9)", resumed=True),
    Way("two ranks", "with", "", ranks=2),
    Way("exception on rank 1", "with", "if rank == 1: raise ValueError('bad batch')", ranks=2),
    Way("SIGKILL of rank 1", "with", "if rank == 1: kill(9)", ranks=2),
    Way("SIGTERM of rank 0, blocked in a collective", "with", _COLLECTIVE, ranks=2),
)
