"""Processes that are started by one with the reference backend have it too."""

from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from te_precision_callbacks.reference import InstallError, children, inherited
from tests.forked import executable
from tests.reference.processes import answers, run
from tests.runs.making import write_run

WORKER = """
def forward(queue):
    import torch
    import transformer_engine.pytorch as te
    from te_precision_callbacks import reference

    with te.autocast(enabled=True):
        te.Linear(32, 32, device="cuda" if torch.cuda.is_available() else "cpu")(torch.ones(32, 32)).sum().backward()
    how = reference.installed()
    queue.put([how.capability, how.pretend_cuda])
"""

# The backend is installed where only the first process comes by, and Transformer Engine is imported after that.
LIGHTNING = """
import sys
import lightning as L
import torch
from te_precision_callbacks import reference

class Model(L.LightningModule):
    def configure_model(self):
        import transformer_engine.pytorch as te
        self.layer = te.Linear(32, 32)  # Transformer Engine's layers cannot be pickled, so each process makes its own

    def training_step(self, batch, index):
        import transformer_engine.pytorch as te
        with te.autocast(enabled=True):
            return self.layer(batch[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def on_train_end(self):
        total = sum(parameter.double().sum().item() for parameter in self.parameters())
        sys.stdout.write(f"rank {self.global_rank} of {self.trainer.world_size}: {total}\\n")
        sys.stdout.flush()

if __name__ == "__main__":
    reference.install()
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.ones(64, 32)), batch_size=16)
    L.Trainer(accelerator="cpu", devices=2, strategy=sys.argv[1], max_steps=2, logger=False, enable_checkpointing=False,
              enable_progress_bar=False, enable_model_summary=False, default_root_dir=sys.argv[2]).fit(Model(), data)
"""


@pytest.mark.processes
def test_a_spawned_worker(tmp_path: Path) -> None:
    (tmp_path / "worker.py").write_text(WORKER)
    script = tmp_path / "script.py"
    script.write_text(
        dedent(
            """
            import multiprocessing
            import worker

            if __name__ == "__main__":
                from te_precision_callbacks import reference
                reference.install(pretend_cuda=True)
                context = multiprocessing.get_context("spawn")
                queue = context.Queue()
                process = context.Process(target=worker.forward, args=(queue,))
                process.start()
                print(queue.get(timeout=100))
                process.join()
            """
        )
    )
    done = run([executable(), "-W", "ignore", str(script)], cwd=tmp_path)
    assert done.stdout.strip() == "[(9, 0), True]", done.stderr


@pytest.mark.processes
def test_lightning_spawns_two_processes(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(LIGHTNING)
    done = run([executable(), "-W", "ignore", str(script), "ddp_spawn", str(tmp_path)], cwd=tmp_path)
    results = dict(line.split(": ") for line in done.stdout.splitlines() if line.startswith("rank"))
    assert sorted(results) == ["rank 0 of 2", "rank 1 of 2"], done.stdout + done.stderr
    assert len(set(results.values())) == 1


READS = """
import sys
from te_precision_callbacks.cli import main

for command in ({commands}):
    sys.argv = ["te-precision", *command.split()]
    try:
        main()
    except SystemExit as ended:
        assert not ended.code, command
installed = ("torch", "transformer_engine", "te_precision_callbacks.reference.importer")
answer = [name for name in installed if name in sys.modules]
"""


@pytest.mark.processes
def test_readers_of_a_run_install_nothing(tmp_path: Path) -> None:
    """In a child, an import of torch would install the backend."""
    write_run(tmp_path / "a", range(3))
    write_run(tmp_path / "b", range(3))
    commands = ["report a -o a.html", "compare a b --report b.html", "show a", "features", "statistics"]
    code = READS.format(commands=", ".join(map(repr, commands)))
    assert not answers(code, cwd=tmp_path, fresh=True, **inherited.environment(**TOLD._asdict()))
    assert (tmp_path / "a.html").stat().st_size > 100_000
    assert (tmp_path / "b.html").stat().st_size > 100_000


@pytest.mark.processes
def test_a_module_that_the_backend_needs_may_import_torch_first(tmp_path: Path) -> None:
    """The backend is installed while the module is half imported, and not where torch is only looked for."""
    assert answers(
        """
        import importlib.util, sys
        importlib.util.find_spec("torch"), importlib.util.find_spec("transformer_engine")
        assert "torch" not in sys.modules
        from te_precision_callbacks.base.numerics import formats, scaling
        from te_precision_callbacks.reference import installed

        answer = [installed().pretend_cuda, "te_precision_callbacks.reference.extension" in sys.modules]
        import transformer_engine.pytorch as te
        import transformer_engine_torch as tex
        answer += [tex.__name__]
        """,
        cwd=tmp_path,
        fresh=True,
        **inherited.environment(**TOLD._asdict()),
    ) == [True, False, "te_precision_callbacks.reference.extension"]


# ---------------------------------------------------------------------- what a child makes of what it is told


TOLD = inherited.Inherited(pretend_cuda=True, capability=(10, 0), always=False)


@pytest.fixture
def compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "transformer_engine").mkdir()
    for name in ("__init__", "pytorch"):
        (tmp_path / "transformer_engine" / f"{name}.py").touch()
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))


@pytest.mark.slow
@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize(
    ("always", "expected", "stated"),
    [
        (False, None, ["uses the compiled Transformer Engine", "always_in_children=True"]),
        (
            True,
            {"pretend_cuda": False, "capability": (10, 0), "always_in_children": True},
            ["reference backend, which is slow, although there is a GPU"],
        ),
    ],
)
def test_a_child_with_a_gpu_and_a_compiled_build_uses_them_unless_told_otherwise(
    always: bool, expected: dict[str, Any] | None, stated: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    assert children.arguments_here(TOLD._replace(always=always), has_gpu=True) == expected
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    for part in stated:
        assert part in record.message


@pytest.mark.slow
@pytest.mark.parametrize("has_gpu", [True, False])
def test_a_child_without_a_compiled_build_has_the_backend(has_gpu: bool, caplog: pytest.LogCaptureFixture) -> None:
    """On a real GPU, CUDA is not pretended."""
    arguments = children.arguments_here(TOLD, has_gpu=has_gpu)
    assert arguments == {"pretend_cuda": not has_gpu, "capability": (10, 0), "always_in_children": False}
    assert len(caplog.records) == has_gpu


@pytest.mark.parametrize("text", ["1", "true", "{}", "[", '{"pretend_cuda": true, "capability": [9]}'])
def test_a_variable_that_this_package_did_not_set_is_named(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(inherited.ENVIRONMENT_VARIABLE, text)
    with pytest.raises(InstallError, match=r"TE_PRECISION_REFERENCE_INSTALL=.*Unset it"):
        inherited.inherited()
