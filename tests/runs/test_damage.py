"""Damaged files of a run: each command reads the rest or reports one error, and none crashes or waits forever."""

import json
import os
import random
import shutil
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import chdir
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import transformer_engine.pytorch as te
from typer.testing import CliRunner, Result

from te_precision_callbacks import cli
from te_precision_callbacks.base.errors import PrecisionDebugError
from te_precision_callbacks.dumps import save
from te_precision_callbacks.runs.run_files import new_run_id
from te_precision_callbacks.session import InspectSession
from tests.training import train

COMMANDS = (
    ("diagnose", "run", "--json"),
    ("show", "run"),
    ("report", "run", "-o", "page.html"),
    ("compare", "run", "good"),
)
DRAWS = int(os.environ.get("DAMAGE_DRAWS", "1"))  # of each kind of damage, with other places and values


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("good")
    torch.manual_seed(0)
    net = torch.nn.Sequential(te.Linear(32, 32), te.Linear(32, 32))
    with InspectSession(model=net, log_dir=folder / "good") as session:
        train(session, net, 6)
    # An open stream, as of a process that was killed.
    rank = next(folder.glob("good/precision_records/*/seg-000/rank-00000"))
    table = pq.read_table(rank / "scalars-0001.parquet") if (rank / "scalars-0001.parquet").exists() else None
    events = pq.read_table(rank / "events-0001.parquet") if table is None else table
    name = "events" if table is None else "scalars"
    with pa.ipc.new_stream(rank / f"{name}-0002.arrow", events.schema) as stream:
        stream.write_table(events)
    return folder


def files_of(folder: Path) -> list[Path]:
    return sorted(path.relative_to(folder) for path in (folder / "good").rglob("*") if path.is_file())


def run_files(folder: Path) -> Iterator[Path]:
    yield from (path for path in files_of(folder) if path.suffix in (".json", ".parquet", ".arrow"))


# ---------------------------------------------------------------------- kinds of damage

Damage = Callable[[Path, random.Random], object]


def truncated(path: Path, draw: random.Random) -> None:
    os.truncate(path, draw.randrange(path.stat().st_size))


def flipped(path: Path, draw: random.Random) -> None:
    data = bytearray(path.read_bytes())
    for _ in range(draw.choice([1, 8, 64])):
        data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    path.write_bytes(data)


def random_bytes(path: Path, draw: random.Random) -> None:
    path.write_bytes(draw.randbytes(draw.choice([0, 7, 4096])))


def nested(path: Path, draw: random.Random) -> None:
    path.write_text(draw.choice(["[", '{"a":']) * 200_000)


def with_large_hole(path: Path, draw: random.Random) -> None:
    os.truncate(path, 1 << 40)


def a_pipe(path: Path, draw: random.Random) -> None:
    path.unlink()
    os.mkfifo(path)


def a_socket(path: Path, draw: random.Random) -> None:
    path.unlink()
    with chdir(path.parent), socket.socket(socket.AF_UNIX) as made:
        made.bind(path.name)


def a_folder(path: Path, draw: random.Random) -> None:
    path.unlink()
    path.mkdir()


def a_device(path: Path, draw: random.Random) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


def a_loop(path: Path, draw: random.Random) -> None:
    path.unlink()
    path.symlink_to(path.name)


STRANGE = (None, True, -1, 2**62, 2**80, 1e308, "text", "\ud800", "\x1b[31m", [], [[]], {}, {"a": []})


def strange_values(path: Path, draw: random.Random) -> None:
    """Valid JSON, or Arrow, with values of other types or sizes."""
    if path.suffix == ".json":
        facts = json.loads(path.read_bytes())
        for name in draw.sample([*facts], 3):
            facts[name] = draw.choice(STRANGE)
        path.write_text(json.dumps(facts))
        return
    table = read(path)
    for name in draw.sample(table.column_names, min(3, table.num_columns)):
        field = table.schema.field(name)
        kind = field.type.value_type if pa.types.is_dictionary(field.type) else field.type
        column = strange_column(kind, len(table), draw)
        if column is not None:
            table = table.set_column(table.column_names.index(name), pa.field(name, column.type), column)
    if draw.random() < 0.2:
        table = table.drop_columns([draw.choice(table.column_names)])
    write(table, path)


def strange_column(kind: pa.DataType, rows: int, draw: random.Random) -> pa.Array | None:
    if draw.random() < 0.2:
        return pa.array(["text"] * rows)
    if pa.types.is_integer(kind):
        bits = kind.bit_width - (not str(kind).startswith("uint"))
        return pa.array([draw.choice([None, 0, 1 << bits - 2, (1 << bits) - 1])] * rows, kind)
    if pa.types.is_floating(kind):
        return pa.array([draw.choice([None, float("nan"), float("inf"), 1e308, -0.0])] * rows, kind)
    if pa.types.is_string(kind):
        return pa.array([draw.choice([None, "", "x" * 10_000, "\x1b[31m", '{"a":' * 9999, "../" * 99])] * rows, kind)
    if pa.types.is_timestamp(kind):
        return pa.array([draw.choice([None, -(2**62), 2**62])] * rows, pa.int64()).cast(kind)
    return None


def read(path: Path) -> pa.Table:
    if path.suffix == ".parquet":
        return pq.read_table(path, partitioning=None)
    with pa.ipc.open_stream(path.read_bytes()) as stream:
        return stream.read_all()


def write(table: pa.Table, path: Path) -> None:
    if path.suffix == ".parquet":
        pq.write_table(table, path)
    else:
        with pa.ipc.new_stream(path, table.schema) as stream:
            stream.write_table(table)


KINDS: Mapping[str, Damage] = {
    damage.__name__.replace("_", " "): damage
    for damage in (
        truncated,
        flipped,
        random_bytes,
        nested,
        with_large_hole,
        a_pipe,
        a_socket,
        a_folder,
        a_device,
        a_loop,
        strange_values,
    )
}


USUAL = ("truncated", "random bytes", "strange values")


def of_kind(kind: str) -> Any:
    return pytest.param(kind, marks=() if kind in USUAL else pytest.mark.extended)


def invoke(*arguments: str) -> Result:
    result = CliRunner().invoke(cli.app, arguments)
    error = result.exception
    if error is not None and not isinstance(error, (SystemExit, PrecisionDebugError)):
        raise AssertionError(f"{' '.join(arguments)}: {error!r}") from error
    return result


@pytest.mark.slow
@pytest.mark.parametrize("kind", [of_kind(kind) for kind in KINDS])
def test_each_command_reads_a_run_with_a_damaged_file(tmp_path: Path, good: Path, kind: str) -> None:
    draw = random.Random(kind)
    shutil.copytree(good / "good", tmp_path / "good")
    with chdir(tmp_path):
        files = list(run_files(good))
        for file in draw.sample(files, len(files) // 2):
            for _ in range(DRAWS):
                shutil.rmtree("run", ignore_errors=True)
                shutil.copytree("good", "run", symlinks=True)
                KINDS[kind](Path("run", *file.parts[1:]), draw)
                command = draw.choice(COMMANDS)
                result = invoke(*command)
                if command[0] == "diagnose" and result.exit_code == 1 and result.exception is None:
                    assert json.loads(result.stdout)["state"] == "problems found", file


@pytest.mark.parametrize("kind", [of_kind(kind) for kind in KINDS if kind != "strange values"])
def test_dumps_with_a_damaged_file(tmp_path: Path, kind: str) -> None:
    draw = random.Random(kind)
    with chdir(tmp_path):
        for number in range(DRAWS):
            path = Path(f"dumps{number}", "dump.safetensors")
            save(torch.ones(4, 4), path)
            KINDS[kind](path, draw)
            for command in (
                ("dumps", "list", path.parent),
                ("dumps", "show", path),
            ):
                invoke(*map(str, command))


def test_the_error_of_a_damaged_run_is_one_sentence_with_exit_code_2(tmp_path: Path, good: Path) -> None:
    shutil.copytree(good / "good", tmp_path / "run")
    (run_json,) = (tmp_path / "run").rglob("run.json")
    nested(run_json, random.Random(0))
    for command in ("diagnose", "show"):
        result = CliRunner().invoke(cli.app, [command, str(tmp_path / "run")])
        assert isinstance(result.exception, PrecisionDebugError), command
        assert "is damaged" in str(result.exception)


def test_a_step_number_beyond_all_runs_is_damage(tmp_path: Path, good: Path) -> None:
    shutil.copytree(good / "good", tmp_path / "run")
    values = next((tmp_path / "run").rglob("values-0001.parquet"))
    table = pq.read_table(values, partitioning=None)
    place = table.column_names.index("iteration")
    large: Any = pa.array([2**62] * len(table), pa.int64())
    pq.write_table(table.set_column(place, table.schema.field("iteration"), large), values)
    result = CliRunner().invoke(cli.app, ["show", str(tmp_path / "run")])
    assert f"iteration from {2**62} to {2**62}" in str(result.exception)


def test_an_error_that_no_code_expects_ends_a_command_with_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 1 would mean that a problem was found in the run."""
    monkeypatch.setattr("sys.argv", ["te-precision", "diagnose", str(tmp_path / new_run_id())])
    monkeypatch.setattr("te_precision_callbacks.runs.reading.chosen_run", lambda *_: {}["nothing"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 2
    assert "KeyError: 'nothing'" in capsys.readouterr().err
