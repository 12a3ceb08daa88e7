"""Run other people's scripts without the debugger and with it, and compare.

Usage::

    python -m tests.clients --src FOLDER [--cache FOLDER] [--table tests/clients/README.md] [NAME ...]

Each client gets its own environment in the cache, outside of this repository, and runs in a copy of its folder.
Rows of clients that this call does not run stay as they are.

Exits with 0 if every client has the results in the table, 1 if not, 2 on wrong use.
"""

import argparse
import os
import sys
from pathlib import Path

from tests.clients.known import CLIENTS
from tests.clients.table import write_table
from tests.clients.trial import Trial, hold, runs_of


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.clients", description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--src", required=True, metavar="FOLDER", help="the folder of sources")
    parser.add_argument(
        "--cache",
        type=Path,
        default=Path.home() / ".cache" / "te-precision-clients",
        metavar="FOLDER",
        help="for environments and runs; %(default)s",
    )
    parser.add_argument("--table", type=Path, metavar="FILE", help="the page to write the table into")
    parser.add_argument("names", nargs="*", metavar="NAME", help="clients to run; all that are found if none is given")
    options = parser.parse_args(arguments)
    if unknown := set(options.names) - {client.name for client in CLIENTS}:
        parser.error(f"{min(unknown)}: not a client; known are {', '.join(client.name for client in CLIENTS)}")
    if not os.path.isdir(options.src):  # also where make got no SRC
        parser.error(f"--src {options.src}: there is no such folder")
    sources, cache = Path(options.src).resolve(), options.cache.resolve()
    if options.table is not None:
        try:
            write_table(options.table, [])
        except (OSError, ValueError) as error:
            parser.error(f"--table {options.table}: {error}")
    clients = [client for client in CLIENTS if client.name in options.names or not options.names]
    results = [(client, folder) for client in clients if (folder := client.find(sources)) is not None]
    there = [client for client, _ in results]
    enough = len(there) == len(clients) if options.names else any(not client.from_index for client in there)
    if not enough:
        missing = ", ".join(f"{client.name} is {client.marker}" for client in clients if client not in there)
        parser.error(
            f"--src {options.src}: not in it, at any depth: {missing}. Clients from the package index run without"
            " sources when they are named."
        )
    trials: list[Trial] = []
    for client, folder in results:
        print(f"{client.name}: runs", flush=True)
        trial = hold(client, folder, sources, cache)
        print(f"{client.name}: {trial.verdict}", flush=True)
        if not trial.good:
            print(f"{client.name}: its output is in {runs_of(client, cache)}", flush=True)
        trials.append(trial)
        if options.table is not None and trial.versions:  # without any it was not run
            write_table(options.table, [trial])
    return 0 if all(trial.good for trial in trials) else 1


if __name__ == "__main__":
    sys.exit(main())
