"""Run other people's scripts without the debugger and with it, and compare.

Usage::

    python -m tests.clients --src FOLDER [--cache FOLDER] [--table tests/clients/README.md] [NAME ...]

Each client gets its own environment in the cache, outside of this repository, and runs in a copy of its folder.
Rows of clients that this call does not run stay as they are.

Exits with 0 if every client has the results in the table, 1 if not, 2 on wrong use.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tests.clients.known import CLIENTS, Client
from tests.clients.table import not_a_page, write_table
from tests.clients.trial import Trial, hold, runs_of


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.clients", description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--src", type=_named, required=True, metavar="FOLDER", help="the folder of sources")
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
    clients = chosen(parser, options.names)
    if options.table is not None and (wrong := not_a_page(options.table)):
        parser.error(f"--table {options.table}: {wrong}")
    results = [(client, folder) for client in clients if (folder := client.find(options.src)) is not None]
    if not options.src.is_dir():
        parser.error(f"--src {options.src}: there is no such folder")
    if all(client.from_index for client, _ in results) and not options.names:
        parser.error(
            f"--src {options.src}: nothing that is known lies in it. Looked for, at any depth: "
            + ", ".join(sorted({client.marker for client in clients if not client.from_index}))
            + ". Clients from the package index run without sources when they are named."
        )
    there = {client.name for client, _ in results}
    missing = [client for client in clients if client.name not in there]
    if options.names and missing:
        markers = ", ".join(f"{client.name} is {client.marker}" for client in missing)
        parser.error(f"--src {options.src}: what was named does not lie in it, at any depth: {markers}")
    trials: list[Trial] = []
    for client, folder in results:
        print(f"{client.name}: runs", flush=True)
        trial = hold(client, folder, options.src.resolve(), options.cache.resolve())
        print(f"{client.name}: {trial.verdict}", flush=True)
        if not trial.good:
            print(f"{client.name}: its output is in {runs_of(client, options.cache.resolve())}", flush=True)
        trials.append(trial)
        if options.table is not None and trial.versions:  # without any it was not run
            write_table(options.table, [trial])
    return 0 if all(trial.good for trial in trials) else 1


def _named(text: str) -> Path:
    if not text:
        raise argparse.ArgumentTypeError("a folder is needed: make clients SRC=FOLDER")
    return Path(text)


def chosen(parser: argparse.ArgumentParser, names: list[str]) -> list[Client]:
    """The clients of these names; all if there are none."""
    by_name = {client.name: client for client in CLIENTS}
    for name in names:
        if name not in by_name:
            parser.error(f"{name}: not a client; known are {', '.join(by_name)}")
    return [by_name[name] for name in names] or list(CLIENTS)


if __name__ == "__main__":
    sys.exit(main())
