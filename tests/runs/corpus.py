"""Damaged recordings, made of a real one:

python -m tests.runs.corpus FOLDER      # writes them all

Each is a copy of a log folder in which one thing is damaged, as a failing disk, a crash or another program may do it.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet as pq

from te_precision_callbacks.runs.tables import EVENTS, FACTS, SCALARS, STEPS, VALUES, VECTORS

TABLES: Mapping[str, pa.Schema] = {
    "values": VALUES,
    "vectors": VECTORS,
    "steps": STEPS,
    "scalars": SCALARS,
    "events": EVENTS,
    **FACTS,
}
Damage = Callable[[Path], object]


def record(folder: Path) -> None:
    """A session's run in ``folder / "closed"``, and as it was before its end in ``folder / "running"``."""
    import torch

    from te_precision_callbacks import reference

    reference.install_where_needed()
    import transformer_engine.pytorch as te

    from te_precision_callbacks.session import InspectSession

    torch.manual_seed(0)
    model = torch.nn.Sequential(te.Linear(32, 64), te.Linear(64, 32))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session = InspectSession(CONFIG, log_dir=folder / "closed").start()
    session.attach(model)
    device = next(model.parameters()).device
    for _ in range(6):
        with te.autocast(enabled=True):
            loss = model(torch.randn(32, 32, device=device)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        session.log({"loss": float(loss.detach()), "lr": 0.1})
        session.step()
    session.stop()
    shutil.copytree(folder / "closed", folder / "running")
    reopen(folder / "running")


def reopen(log_dir: Path) -> None:
    """Make a run what it was before its end: its files are open, and a few rows were appended at a time."""
    for path in rank(log_dir).glob("*.parquet"):
        table = pq.read_table(path)
        with pa.ipc.new_stream(str(path.with_suffix(".arrow")), table.schema) as stream:
            stream.write_table(table.unify_dictionaries(), max_chunksize=5)
        path.unlink()
    fact("status", '"running"')(log_dir)


CONFIG = {
    "all": {
        "enabled": True,
        "layers": {"layer_name_regex_pattern": ".*"},
        "transformer_engine": {
            "LogTensorStats": {
                "enabled": True,
                "tensors": ["activation", "weight", "gradient"],
                "stats": ["cur_amax", "mean", "exponent_histogram"],
            },
            "LogFp8TensorStats": {"enabled": True, "tensors": ["activation"], "stats": ["underflows%", "mse"]},
        },
    }
}


# ---------------------------------------------------------------------- where things are


def segment(log_dir: Path) -> Path:
    (found,) = log_dir.glob("precision_records/*/seg-000")
    return found


def rank(log_dir: Path) -> Path:
    return segment(log_dir) / "rank-00000"


def file_of(log_dir: Path, table: str) -> Path:
    """The file of a table: a closed or an open file, or facts."""
    if table in FACTS:
        return segment(log_dir) / f"{table}.parquet"
    return next(path for path in rank(log_dir).iterdir() if path.name.startswith(f"{table}-0001."))


def read(path: Path) -> pa.Table:
    if path.suffix == ".parquet":
        return pq.read_table(path)
    return pa.ipc.open_stream(path.read_bytes()).read_all()


def write(path: Path, table: pa.Table) -> None:
    if path.suffix == ".parquet":
        return pq.write_table(table, path, compression="zstd")
    with pa.ipc.new_stream(str(path), table.schema) as stream:
        stream.write_table(table.combine_chunks().unify_dictionaries())
    return None


# ---------------------------------------------------------------------- damages


def bytes_of(name: str, change: Callable[[bytes], bytes]) -> Damage:
    """Changes the bytes of a file: ``run.json`` or a table."""

    def apply(log_dir: Path) -> None:
        path = segment(log_dir) / name if name == "run.json" else file_of(log_dir, name)
        path.write_bytes(change(path.read_bytes()))

    return apply


def fact(key: str, text: str) -> Damage:
    """A value of run.json, as text of JSON."""

    def apply(log_dir: Path) -> None:
        path = segment(log_dir) / "run.json"
        facts = json.loads(path.read_text()) | {key: "PLACE"}
        path.write_text(json.dumps(facts).replace('"PLACE"', text))

    return apply


def damage_page(path: Path, name: str) -> None:
    """Damage the first page of a column of a closed file."""
    with pq.ParquetFile(path) as file:
        found = file.metadata.row_group(0).column(file.schema_arrow.get_field_index(name))
    data = bytearray(path.read_bytes())
    data[found.data_page_offset : found.data_page_offset + 8] = b"\xff" * 8
    path.write_bytes(data)


def column(table: str, name: str, make: Callable[[pa.ChunkedArray], Any], every: bool = True) -> Damage:
    """A column of a table, in all rows or in the first one."""

    def apply(log_dir: Path) -> None:
        path = file_of(log_dir, table)
        whole = read(path)
        place = whole.schema.get_field_index(name)
        made = make(whole[name])
        if not every:
            values = whole[name].cast(made.type) if made.type != whole[name].type else whole[name]
            made = pa.chunked_array([*made.slice(0, 1).chunks, *values.slice(1).chunks])
        write(path, whole.set_column(place, pa.field(name, made.type), made))

    return apply


def filled(value: Any) -> Callable[[pa.ChunkedArray], pa.ChunkedArray]:
    def make(values: pa.ChunkedArray) -> pa.ChunkedArray:
        kind = values.type
        if pa.types.is_dictionary(kind):
            return pa.chunked_array([pa.array([value] * len(values), kind.value_type).dictionary_encode()])
        return pa.chunked_array([pa.array([value] * len(values), kind)])

    return make


def of_type(kind: pa.DataType, value: Any) -> Callable[[pa.ChunkedArray], pa.ChunkedArray]:
    return lambda values: pa.chunked_array([pa.array([value] * len(values), kind)])


def named(name: str, table: str) -> Damage:
    """A file of another name beside the others."""
    return lambda log_dir: shutil.copy(file_of(log_dir, table), rank(log_dir) / name)


def pipe(name: str) -> Damage:
    def apply(log_dir: Path) -> None:
        path = segment(log_dir) / name if name == "run.json" or name.split(".")[0] in FACTS else rank(log_dir) / name
        path.unlink(missing_ok=True)
        os.mkfifo(path)

    return apply


DEEP = "[" * 100_000 + "]" * 100_000
CLOSED: dict[str, Damage] = {
    "run.json cut": bytes_of("run.json", lambda data: data[: len(data) // 2]),
    "run.json empty": bytes_of("run.json", lambda data: b""),
    "run.json a list": bytes_of("run.json", lambda data: b"[1]"),
    "run.json no text": bytes_of("run.json", lambda data: b"\xff\xfe" + data),
    "run.json deep": fact("environment", DEEP),
    "run.json half as deep": fact("environment", "[" * 900 + "]" * 900),
    "run.json iteration 1e999": fact("first_iteration", "1e999"),
    "run.json iteration 10^23": fact("first_iteration", "1" + "0" * 23),
    "run.json iteration below 0": fact("first_iteration", "-5"),
    "run.json iteration true": fact("first_iteration", "true"),
    "run.json iteration of 5000 digits": fact("first_iteration", "9" * 5000),
    "run.json world of 10^30": fact("world", "1" + "0" * 30),
    "run.json half a pair": fact("config_text", r'"\ud800"'),
    "run.json half a pair in a list": fact("recipes", r'["\udfff", {"\ud800": "\ud800"}]'),
    **{
        f"run.json {key} {text}": fact(key, text)
        for keys, texts in (
            (("versions", "config"), ("null", '"x"', "[[]]")),
            (("status", "started_at"), ("null", "7", "[[]]")),
            (("pid", "writing_ranks"), ("null", '"x"', "NaN")),
            (("recipes", "started_at"), ('{"a": {"b": null}}', )),
        )
        for key in keys
        for text in texts
    },
    "events cut": bytes_of("events", lambda data: data[:-20]),
    "events no text": bytes_of("events", lambda data: b"\xff\xfe\n" + data),
    "events data no JSON": column("events", "data", filled("{")),
    **{f"events {name} null": column("events", name, filled(None)) for name in EVENTS.names},
    **{
        f"{table} {name} null": column(table, name, filled(None))
        for table, names in (("values", VALUES.names), ("vectors", ("bin",)), ("steps", ("iteration", "wall_time")))
        for name in names
    },
    **{
        f"{table} {name} {value}": column(table, name, of_type(pa.int64(), value), every=False)
        for table, names in (
            ("values", ("series", "iteration")),
            ("steps", ("iteration", "wall_time")),
            ("events", ("iteration", "wall_time")),
        )
        for name in names
        for value in (-(2**62), -1, 2**31 - 1, 2**62)
    },
    "values of nan": column("values", "value", filled(float("nan"))),
    "values of 1e308": column("values", "value", filled(1e308)),
    "steps of nan seconds": column("steps", "step_seconds", filled(float("nan"))),
    "scalars without a number": column("scalars", "value", filled(float("-inf"))),
    "values as texts": column("values", "value", of_type(pa.string(), "x")),
    "layers as numbers": column("values", "layer", of_type(pa.int64(), 3)),
    "layers as lists": column("layers", "layer", of_type(pa.list_(pa.string()), ["a"])),
    "bins as texts": column("vectors", "bin", of_type(pa.list_(pa.string()), ["a"])),
    "bins of no counts": column("vectors", "bin", of_type(pa.list_(pa.uint16()), list(range(40)))),
    "bins null within": column("vectors", "bin", of_type(pa.list_(pa.uint16()), [None])),
    "counts null within": column("vectors", "count", of_type(pa.list_(pa.float32()), [None])),
    "bins beyond all": column("vectors", "bin", lambda values: pa.chunked_array(
        [pa.array([[65535] * len(each) for each in values.to_pylist()], pa.list_(pa.uint16()))])),
    "plan of no JSON": column("plan", "options", of_type(pa.string(), "{")),
    "a name of a file": named("values-0002-999999999999-every2.parquet", "values"),
    "a number of a file": named("values-900000000000000000.parquet", "values"),
    "a file of two": named("values-0001-0002-every2.parquet", "values"),
    "a folder for a file": lambda log_dir: (rank(log_dir) / "values-0002.parquet").mkdir(),
    "a link to a device": lambda log_dir: (rank(log_dir) / "values-0002.arrow").symlink_to("/dev/zero"),
    "a number of a segment": lambda log_dir: (segment(log_dir).parent / "seg-999999999").mkdir(),
    "a number of a rank": lambda log_dir: (segment(log_dir) / "rank-999999999").mkdir(),
    **{f"a pipe {name}": pipe(name) for name in ("run.json", "values-0002.parquet", "events-0002.arrow",
                                                  "steps-0002.arrow", "layers.parquet")},
}  # fmt: skip
"""Name -> what it does to a log folder whose run has ended."""

RUNNING: dict[str, Damage] = {
    **{
        f"{table} {at}": bytes_of(table, functools.partial(lambda data, at: data[: int(len(data) * at)], at=at))
        for table in ("values", "vectors", "steps", "scalars")
        for at in (0.0, 0.5, 0.97)
    },
    **{
        f"{table} {name} null": column(table, name, filled(None))
        for table in ("scalars", "vectors")
        for name in TABLES[table].names
    },
    **{
        f"values {name} {value}": column("values", name, of_type(pa.int64(), value), every=False)
        for name in ("series", "iteration")
        for value in (-1, 2**30 + 1, 2**31 - 1, 2**62)
    },
    "a column that takes nothing": column("values", "value", lambda values: pa.chunked_array([pa.nulls(len(values))])),
}
"""The same for one whose run has not."""


def damaged(whole: Path, name: str, damage: Damage, folder: Path) -> Path:
    """A copy of a log folder that is damaged.

    Args:
        whole: the log folder.
        name: of the damage.
        damage: what is done to the copy.
        folder: where the copy lies.
    """
    copy = folder / "".join(each if each.isalnum() else "_" for each in name)[:60]
    shutil.copytree(whole, copy)
    damage(copy)
    return copy


if __name__ == "__main__":
    target = Path(sys.argv[1])
    record(target / "whole")
    for of_which, damages in (("closed", CLOSED), ("running", RUNNING)):
        for each, what in damages.items():
            print(damaged(target / "whole" / of_which, each, what, target / of_which))
