"""``te-precision run``: unmodified GPU scripts."""

import json
import sys
from pathlib import Path
from textwrap import dedent

import pytest

from te_precision_callbacks.reference import compiled_extension, launch
from te_precision_callbacks.reference.launch import Backend, script_command
from tests.forked import executable
from tests.manual.test_command import ends
from tests.reference.processes import python, te_precision

SCRIPT = """
import json, logging, sys
import torch
import transformer_engine.pytorch as te
from transformer_engine.common.recipe import DelayedScaling

assert torch.cuda.is_available()
model = te.Linear(64, 64).cuda()
with te.autocast(enabled=True, recipe=DelayedScaling()):
    loss = model(torch.randn(32, 64, device="cuda")).square().mean()
loss.backward()
torch.cuda.synchronize()
print(json.dumps([__name__, sys.argv, sys.path[0], __file__, torch.cuda.get_device_capability()]))
if "--fail" in sys.argv:
    from te_precision_callbacks import InspectSession
    logging.basicConfig(level=logging.INFO)
    dumps = {"enabled": True, "tensors": ["activation"], "high_precision_tensor": True}
    section = {"enabled": True, "layers": {"layer_types": ["linear"]}, "transformer_engine": {"DumpTensors": dumps}}
    session = InspectSession({"dumps": section}, model=model, log_dir=sys.path[0]).start()
    model(torch.randn(32, 64, device="cuda")).sum().backward()
    raise ValueError("the script's own")
sys.exit(7)
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "scripts" / "train.py"
    path.parent.mkdir()
    path.write_text(SCRIPT)
    return path


@pytest.mark.processes
@pytest.mark.extended
def test_a_script_finds_what_it_finds_without_us(tmp_path: Path, script: Path) -> None:
    argv = ["scripts/train.py", "--help", "--backend", "x", "-c"]
    done = te_precision("run", *argv, cwd=tmp_path, fresh=True)
    assert done.returncode == 7, done.stderr
    assert json.loads(done.stdout) == ["__main__", argv, str(script.parent), str(script), [9, 0]]
    assert "reference backend: a GPU emulated on the CPU, compute capability 9.0" in done.stderr


@pytest.mark.processes
def test_a_traceback_is_the_scripts_own(script: Path) -> None:
    """Also where a session is running, which logs its end below."""
    done = te_precision(
        "run", "--backend", "reference", str(script), "--fail", TE_PRECISION_REFERENCE_CAPABILITY="10.0"
    )
    assert done.returncode == 1
    assert json.loads(done.stdout)[4] == [10, 0]
    shown, error, logged = done.stderr.partition("Traceback")[2].partition("\nValueError: the script's own\n")
    assert error
    assert "1 tensors were dumped" in logged
    traceback = shown.splitlines()
    assert f'File "{script}"' in traceback[1]
    assert len([line for line in traceback if line.startswith("  File")]) == 1


@pytest.mark.processes
def test_a_script_under_torchrun_trains_and_saves(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        dedent(
            """
            import os
            import time
            from datetime import timedelta
            import torch
            import torch.distributed as dist
            import torch.distributed.checkpoint as checkpoint
            import transformer_engine.pytorch as te
            from torch.distributed.device_mesh import init_device_mesh

            class LatePlanner(checkpoint.DefaultSavePlanner):
                def create_local_plan(self):
                    time.sleep(0.3 * rank)
                    return super().create_local_plan()

            rank = int(os.environ["LOCAL_RANK"])
            torch.cuda.set_device(rank)
            assert (torch.cuda.current_device(), torch.cuda.device_count()) == (rank, 2)
            dist.init_process_group("cpu:gloo,cuda:nccl", timeout=timedelta(seconds=30))
            model = torch.nn.parallel.DistributedDataParallel(te.Linear(32, 32).cuda(), device_ids=[rank])
            with te.autocast(enabled=True):
                model(torch.randn(32, 32, device="cuda")).sum().backward()
            with open(f"rank{rank}", "w") as file:
                file.write(str(model.module.weight.grad.double().sum().item()))

            # The thread that writes a checkpoint gathers objects; the training waits for it before it reduces tensors.
            # Here in a group of a mesh, as with FSDP2.
            weight = {"weight": torch.full((4,), 2.0, device="cuda")}
            group = init_device_mesh("cuda", (2,), mesh_dim_names=("dp",)).get_group("dp")
            options = {"planner": LatePlanner(), "process_group": group}
            future = checkpoint.async_save(weight, checkpoint_id="saved", **options)
            weight["weight"].fill_(3.0)
            for step in range(20):
                total = torch.full((4,), float(step), device="cuda")
                dist.all_reduce(total, group=group)
                assert total.tolist() == [2.0 * step] * 4
                time.sleep(0.01)
            future.result()
            checkpoint.load(weight, checkpoint_id="saved")
            assert weight["weight"].tolist() == [2.0] * 4
            dist.barrier()
            dist.destroy_process_group()
            """
        )
    )
    done = te_precision("run", "torchrun", "--standalone", "--nproc-per-node", "2", str(script), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "rank0").read_text() == (tmp_path / "rank1").read_text()


@pytest.mark.processes
@pytest.mark.extended
def test_torch_compile(tmp_path: Path) -> None:
    """Of the script's own functions, and of the pass over a tensor; Triton, which is installed, finds no GPU."""
    script = tmp_path / "train.py"
    script.write_text(
        dedent(
            """
            import json, sys
            import torch
            import transformer_engine.pytorch as te
            from te_precision_callbacks import InspectSession
            from te_precision_callbacks.engine.kernels.native import ONE_PASS

            def function(x, scale):
                return torch.nn.functional.gelu(x) * scale + torch.ones(256, device="cuda")

            def gradient(function):
                x = torch.linspace(-4, 4, 256 * 64).view(64, 256).cuda().requires_grad_()
                function(x, 2.0).square().sum().backward()
                return x.grad

            expected = gradient(function)
            torch.testing.assert_close(gradient(torch.compile(function, mode="reduce-overhead")), expected)

            features = {"LogTensorStats": {"enabled": True, "tensors": ["activation"], "stats": ["max"], "freq": 1}}
            section = {"enabled": True, "layers": {"layer_types": ["linear"]}, "transformer_engine": features}
            model = te.Linear(256, 256).cuda()
            with InspectSession({"all": section}, model=model, log_dir=sys.argv[1]) as session:
                model(torch.full((128, 256), 3.5, device="cuda")).sum().backward()
                session.step()
            print(json.dumps([*(row.value for row in session.last_statistics), *ONE_PASS.functions]))
            """
        )
    )
    # Graphs are made again. The compiler's results for the same code and options are there from other tests.
    anew = {"TORCHINDUCTOR_FX_GRAPH_CACHE": "0", "TORCHINDUCTOR_AUTOGRAD_CACHE": "0"}
    done = te_precision("run", str(script), str(tmp_path), **anew)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [3.5, "te_precision_one_pass", "te_precision_largest"]
    assert "the fast pass cannot be compiled" not in done.stderr


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    files = {
        "training/__init__.py": "",
        "training/sizes.py": "HIDDEN = 64",
        "training/__main__.py": """
            import json, sys
            from .sizes import HIDDEN
            print(json.dumps([__name__, __spec__.name, __package__, sys.argv, sys.path[0], HIDDEN]))
            sys.exit(7)
            """,
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(dedent(text))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.processes
def test_a_module_finds_what_it_finds_without_us(packages: Path) -> None:
    options = ["--epochs", "3", "--backend", "x", "-m", "y"]
    done = te_precision("run", "--backend", "reference", "-m", "training", *options, cwd=packages)
    assert done.returncode == 7, done.stderr
    file = str(packages / "training" / "__main__.py")
    assert json.loads(done.stdout) == [
        "__main__",
        "training.__main__",
        "training",
        [file, *options],
        str(packages),
        64,
    ]


@pytest.mark.usefixtures("packages")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["missing.py"], "program on the PATH named 'missing.py'"),
        (["scripts/torchrun"], "there is no file 'scripts/torchrun'"),
        (["training.sizes"], "named 'training.sizes'. To run the module, put -m before it: te-precision run -m"),
        (["--backend", "cuda", "x.py"], "'cuda' is not one of"),
        ([], "Missing argument"),
        (["-m"], "Missing argument"),
    ],
)
def test_wrong_use(
    arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert message in ends(monkeypatch, capsys, "run", *arguments)


@pytest.mark.processes
@pytest.mark.parametrize(
    ("content", "in_python"),
    [
        ("#!/somewhere/bin/python3.12\nimport sys", True),
        ("#!/usr/bin/env python3\nimport sys", True),
        ("#!/usr/bin/env -S python3 -u\nimport sys", True),
        ("#!/bin/sh\n'''exec' \"/a very long/bin/python\" \"$0\" \"$@\"\n' '''\n", True),
        ("#!/bin/bash\nexec python train.py", False),
        ("\x7fELF", False),
    ],
)
def test_a_program_is_looked_up_on_the_path(
    content: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, in_python: bool
) -> None:
    """Launchers run in this interpreter, which has this package; others, such as srun, as they are."""
    program = tmp_path / "launcher"
    program.write_text(content)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    command = script_command("launcher")
    assert command[-1] == str(program)
    assert command[0] == (sys.executable if in_python else str(program))
    monkeypatch.chdir(tmp_path)
    assert script_command("launcher")[-1] == "launcher"  # a file here comes first


@pytest.mark.processes
def test_what_a_program_starts_has_the_backend(script: Path) -> None:
    done = te_precision("run", "sh", "-c", f"exec {executable()} {script}")
    assert done.returncode == 7, done.stderr


@pytest.mark.processes
def test_without_transformer_engine(script: Path) -> None:
    code = """
        import importlib.util, sys
        real = importlib.util.find_spec
        importlib.util.find_spec = lambda name, *rest: None if name == "transformer_engine" else real(name, *rest)
        from te_precision_callbacks.cli import main
        sys.argv = ["te-precision", "run", {script!r}]
        main()
        """
    done = python(code.format(script=str(script)))
    assert done.returncode == 2
    assert "No Transformer Engine is installed" in done.stderr
    assert "pip install -e '.[reference]'" in done.stderr


@pytest.mark.parametrize(
    ("has_gpu", "backend", "why", "description"),
    [
        (True, Backend.AUTO, None, "the compiled Transformer Engine"),
        (True, Backend.AUTO, "ImportError: no", "reference backend: the real GPU"),
        (False, Backend.AUTO, "not to be asked", "reference backend: a GPU emulated on the CPU"),
        (False, Backend.TE, None, "the compiled Transformer Engine"),
    ],
)
def test_what_a_script_runs_on(
    monkeypatch: pytest.MonkeyPatch, has_gpu: bool, backend: Backend, why: str | None, description: str
) -> None:
    """As reference.install_where_needed() decides: on a login node the compiled one is imported, and nothing runs."""
    asked = []
    monkeypatch.setattr(launch, "_has_gpu", lambda: has_gpu)
    monkeypatch.setattr(compiled_extension, "why_unavailable", lambda: asked.append(1) or why)
    assert description in launch.plan_launch(backend).description
    assert bool(asked) == (has_gpu or backend is Backend.TE)
