"""Installing the reference backend: refusals, changes in the process, its children and pytest's tests."""

import json
import re
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from te_precision_callbacks import startup
from te_precision_callbacks.reference import InstallError, inherited
from tests.forked import executable
from tests.reference.processes import answers, python, run
from tests.runs.making import write_run

INSTALL = "from te_precision_callbacks import reference\nreference.install({})\n"


def refusal(code: str, **environment: str) -> str:
    done = python(code, **environment)
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("te_precision_callbacks.reference.errors."), done.stderr
    return last


@pytest.mark.processes
def test_it_says_so_in_one_line_of_the_log() -> None:
    done = python("import logging; logging.basicConfig(level=logging.INFO)\n" + INSTALL.format("") * 2)
    lines = [line for line in done.stderr.splitlines() if "te_precision_callbacks" in line]
    assert len(lines) == 1
    assert [part for part in ("INFO", "reference backend", "'cpu'", "9.0") if part not in lines[0]] == []


@pytest.mark.processes
def test_the_environment_chooses_the_capability() -> None:
    code = INSTALL.format("") + "answer = reference.installed().capability"
    assert answers(code, TE_PRECISION_REFERENCE_CAPABILITY="10.0") == [10, 0]


WITHOUT = """
from importlib import metadata
real = metadata.version
def version(name):
    if name == "transformer-engine":
        raise metadata.PackageNotFoundError(name)
    return real(name)
metadata.version = version
"""
ANOTHER = "from importlib import metadata\nmetadata.version = lambda name: {!r}\n"
COMPILED = "import sys, types; sys.modules['transformer_engine_torch'] = types.ModuleType('compiled')\n"
IMPORTED = "import os; os.environ['NVTE_PROJECT_BUILDING'] = '1'; import transformer_engine\n"
GPU = "import torch; torch.cuda.is_available = lambda: True; torch.cuda.get_device_name = lambda: 'H200'\n"
NO_ENGINE = "TransformerEngineVersionError: No Transformer Engine is installed"
OTHER_ENGINE = "TransformerEngineVersionError: Transformer Engine {} is installed"
AGAIN = INSTALL.format("") * 2


@pytest.mark.few
@pytest.mark.processes
@pytest.mark.parametrize(
    ("before", "options", "stated"),
    [
        (AGAIN, "capability=(10, 0)", ["InstallError: install(pretend_cuda=False, capability=(10, 0))", "(9, 0)"]),
        (AGAIN, "pretend_cuda=True", ["InstallError: install(pretend_cuda=True"]),
        (WITHOUT, "", [NO_ENGINE, "pip install -e '.[reference]'"]),
        (ANOTHER.format("2.21.0"), "", [OTHER_ENGINE.format("2.21.0"), '"transformer-engine>=2.20,<2.21"']),
        (COMPILED, "", ["InstallError: Transformer Engine's compiled extension"]),
        (IMPORTED, "", ["InstallError: transformer_engine is already imported", "before the first import"]),
        (GPU, "pretend_cuda=True", ["InstallError: install(pretend_cuda=True), but there is a real GPU (H200)"]),
    ],
    ids=["another capability", "another scope", "no TE", "newer TE", "compiled", "imported", "a GPU"],
)
def test_what_is_refused(before: str, options: str, stated: list[str]) -> None:
    message = refusal(before + INSTALL.format(options))
    assert [part for part in stated if part not in message] == []


@pytest.mark.processes
def test_an_unknown_capability_in_the_environment() -> None:
    message = refusal(INSTALL.format(""), TE_PRECISION_REFERENCE_CAPABILITY="8.9")
    assert re.search(r"TE_PRECISION_REFERENCE_CAPABILITY='8\.9'.*9\.0 or 10\.0", message)


# --- effects of the two scopes ----------------------------------------------------------------------------------------


TRAIN = """
import torch

def train(model, x, recipe=None):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(4):
        with te.autocast(enabled=True, recipe=recipe):
            loss = model(x).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses
"""


@pytest.mark.processes
def test_by_default_only_transformer_engine_sees_a_gpu() -> None:
    losses, seen, names, environment = answers(
        """
        import os
        import torch

        def state():
            return [torch.cuda.is_available(), torch.version.cuda, torch.zeros(1).is_cuda, torch.compile.__module__]

        before = {name: id(value) for owner in (torch, torch.Tensor, torch.cuda) for name, value in vars(owner).items()}
        said, kept = state(), dict(os.environ)
        from te_precision_callbacks import reference
        reference.install()
        import transformer_engine.pytorch as te
        """
        + _indented(TRAIN)
        + """
        class MyLinear(te.Linear):
            def forward(self, inp):
                return super().forward(inp).relu()

        torch.manual_seed(0)
        x = torch.randn(32, 64)
        layer = te.TransformerLayer(64, 128, 4, params_dtype=torch.bfloat16)
        losses = [train(MyLinear(64, 64), x), train(layer, x.bfloat16().reshape(32, 1, 64))]
        after = {name: id(value) for owner in (torch, torch.Tensor, torch.cuda) for name, value in vars(owner).items()}
        changed = [name for name in before if before[name] != after[name]]
        changed = [name for name in changed if name not in ("_graph_pool_handle", "__doc__")]
        answer = [losses, [said, state()], changed, sorted(k for k in os.environ if os.environ[k] != kept.get(k))]
        """
    )
    assert all(of_model[-1] < of_model[0] for of_model in losses)
    assert seen[0] == seen[1]
    assert seen[1][0] is False
    assert names == []
    assert environment == ["PYTHONPATH", "TE_PRECISION_REFERENCE_INSTALL"]


@pytest.mark.extended
@pytest.mark.processes
def test_pretended_cuda_for_code_that_was_written_for_a_gpu() -> None:
    (losses,) = answers(
        """
        import io, pickle, warnings
        from te_precision_callbacks import reference
        reference.install(pretend_cuda=True)
        import transformer_engine.pytorch as te
        from torch.distributed.checkpoint.staging import DefaultStager
        """
        + _indented(TRAIN)
        + """
        assert torch.cuda.is_available() and torch.cuda.device_count() == 1
        assert torch.cuda.get_device_capability() == (9, 0) == (
            torch.cuda.get_device_properties(0).major, torch.cuda.get_device_properties("cuda").minor)
        torch.cuda.manual_seed(0)
        losses = train(te.Linear(64, 64).cuda(), torch.randn(32, 64, device="cuda"))

        for device in ("cuda", "cuda:0", 0, torch.device("cuda"), torch.device("cuda", 0)):
            for tensor in (torch.zeros(2, device=device), torch.tensor([1], device=device), torch.ones(2).to(device),
                           torch.ones(2).cuda(device), torch.ones(2).new_zeros(2, device=device),
                           torch.zeros_like(torch.ones(2), device=device), torch.rand(2, device=device)):
                assert tensor.is_cuda and tensor.device.type == "cpu"
        assert not torch.empty(2, device="meta").is_cuda
        with torch.device("cuda"):
            assert torch.zeros(2).is_cuda
        for module in (torch.nn.Linear(2, 2).to(0), torch.nn.Linear(2, 2).to(device=0, dtype=torch.float16),
                       torch.nn.Linear(2, 2).cuda(0), torch.nn.Linear(2, 2, device=0)):
            assert module.weight.is_cuda
        current = torch.device(torch.cuda.current_device())
        assert current == torch.device(0) == torch.device("cuda", 0) and isinstance(current, torch.device)
        assert type(current) == torch.device and pickle.loads(pickle.dumps(current)) == current
        assert pickle.loads(pickle.dumps(torch.device)) is torch.device
        assert te.LayerNorm(32, device=torch.cuda.current_device()).weight.is_cuda
        torch.cuda.set_device(1)  # as a process does that was spawned without a launcher
        with torch.cuda.device(0):
            assert torch.cuda.current_device() == 0
        assert torch.cuda.current_device() == 1
        torch.cuda.set_device("cuda:0")
        assert torch.cuda.current_device() == 0
        torch.set_default_device("cuda")
        assert torch.nn.Linear(2, 2).weight.is_cuda
        torch.set_default_device(None)

        generator = torch.Generator(device="cuda").manual_seed(1)
        assert isinstance(generator, torch.Generator) and isinstance(torch.default_generator, torch.Generator)
        torch.randn(2, generator=generator, device="cuda")
        kept = torch.cuda.get_rng_state()
        drawn = torch.rand(2, device="cuda")
        torch.cuda.set_rng_state(kept)
        assert torch.equal(drawn, torch.rand(2, device="cuda"))

        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        with torch.cuda.stream(torch.cuda.Stream()):
            torch.ones(2, device="cuda").record_stream(torch.cuda.current_stream())
        end.record()
        torch.cuda.synchronize()
        assert start.elapsed_time(end) >= 0

        for event, stream in ((torch.Event("cuda", enable_timing=True), torch.Stream("cuda")),
                              (torch.cuda.Event(), torch.cuda.Stream())):
            assert isinstance(event, torch.Event) and isinstance(stream, torch.Stream)
            stream.record_event(event).wait()
            assert event.query() and stream.query()
        assert torch.ones(2, device="cuda").type() == "torch.cuda.FloatTensor"
        assert torch.ones(2).type("torch.cuda.HalfTensor").dtype == torch.float16
        assert torch.empty(2, device="meta").type() != torch.ones(2).type()
        assert torch.cuda.memory_stats()["allocated_bytes.all.peak"] == 0
        ordinary = torch.zeros(2)
        pinned = ordinary.pin_memory()
        pinned += 1
        assert ordinary.tolist() == [0, 0] and torch.zeros(2, pin_memory=True).tolist() == [0, 0]
        with torch.cuda.profiler.profile(), torch.autograd.profiler.emit_nvtx():
            torch.cuda.nvtx.range_end(torch.cuda.nvtx.range_start("step"))
        assert torch.cuda.cudart().cudaProfilerStart() == 0 and torch.cuda.nccl.version() >= (2, 20)
        from transformer_engine.pytorch.tensor.identity_tensor import IdentityQuantizer
        copied = IdentityQuantizer().make_empty((2,), dtype=torch.float32, device="cuda")
        copied.copy_(IdentityQuantizer()(torch.ones(2, device="cuda")))
        assert copied.dequantize().tolist() == [1, 1]
        quantized = te.Float8CurrentScalingQuantizer(te.DType.kFloat8E4M3, device="cuda")(torch.ones(16, 16))
        assert torch.equal(quantized.pin_memory().dequantize(), quantized.dequantize())
        with warnings.catch_warnings(record=True) as caught:
            for options in ({"pin_memory": True}, {"pin_memory": True, "num_workers": 1}):
                loader = torch.utils.data.DataLoader(torch.arange(4), batch_size=2, **options)
                assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3]]
        assert not caught
        weight = torch.ones(2, device="cuda")
        stager = DefaultStager()
        for value in (1, 2):
            staged = stager.stage({"weight": weight.fill_(value)}).result()["weight"]
            weight.zero_()
            assert staged.tolist() == [value, value]
        stager.close()
        activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=activities) as profiler:
            torch.ones(4, 4, device="cuda") @ torch.ones(4, 4, device="cuda")
        assert "aten::mm" in profiler.key_averages().table()
        with torch.autograd.profiler.profile(use_device="cuda"):
            torch.ones(2)

        linear = torch.nn.Linear(2, 2, device="cuda")
        def in_autocast(x):
            with torch.autocast("cuda"):
                y = linear(x)
                torch._dynamo.graph_break()
                return linear(y) * torch.ones(2, dtype=torch.get_autocast_dtype("cuda"))
        for gradients in (True, False):
            with torch.set_grad_enabled(gradients):
                y = torch.compile(in_autocast, backend="aot_eager")(torch.ones(1, 2, device="cuda"))
            assert y.dtype == torch.float16 and y.requires_grad == gradients
        with torch.autocast("cuda"):
            assert linear(torch.ones(1, 2, device="cuda")).dtype == torch.float16
            assert torch.is_autocast_enabled() and torch.get_autocast_dtype("cuda") == torch.float16
        assert not torch.is_autocast_enabled()
        scaler = torch.amp.GradScaler("cuda")
        scaler.scale(linear(torch.ones(1, 2, device="cuda")).sum()).backward()
        scaler.step(torch.optim.AdamW(linear.parameters(), fused=True))
        scaler.update()

        file = io.BytesIO()
        torch.save(linear.state_dict(), file)
        for location in (None, "cuda", "cuda:0", torch.device("cuda")):
            file.seek(0)
            linear.load_state_dict(torch.load(file, map_location=location))
        compiled = torch.compile(lambda x: x + torch.zeros(2, device=torch.device(0)), backend="eager", fullgraph=True)
        assert compiled(torch.ones(2, device="cuda")).tolist() == [1, 1]
        try:
            torch.cuda.CUDAGraph()
        except reference.MissingFunctionError as error:
            assert "CUDA graphs" in str(error)
        else:
            raise AssertionError("a CUDA graph was made")
        answer = [losses]
        """
    )
    assert losses[-1] < losses[0]


@pytest.mark.processes
def test_distributed_code_for_gpus_on_one_pretended_gpu(tmp_path: Path) -> None:
    assert answers(
        f"""
        from te_precision_callbacks import reference
        reference.install(pretend_cuda=True)
        import torch
        import torch.distributed as dist
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

        from torch.distributed import ProcessGroupNCCL
        nccl = ProcessGroupNCCL.Options(is_high_priority_stream=True)
        nccl.config.max_ctas = 8
        dist.init_process_group("nccl", pg_options=nccl, init_method="file://{tmp_path}/store", rank=0, world_size=1,
                                device_id=torch.device("cuda:0"))
        answer = [dist.get_backend()]
        assert not isinstance(dist.group.WORLD, ProcessGroupNCCL)
        x = torch.ones(2, 4, device="cuda")
        wrapped = torch.nn.Linear(4, 4).cuda()
        wrapped = torch.nn.parallel.DistributedDataParallel(wrapped, device_ids=[0], output_device=0)
        sharded = torch.nn.Linear(4, 4, device="cuda")
        fully_shard(sharded, mesh=init_device_mesh("cuda", (1,)))
        for model in (wrapped, sharded, FullyShardedDataParallel(torch.nn.Linear(4, 4).cuda(), device_id=0)):
            model(x).sum().backward()
        dist.barrier(device_ids=[0])
        dist.all_reduce(x)
        dist.destroy_process_group()
        """
    ) == ["gloo"]


@pytest.mark.processes
def test_models_train_as_on_blackwell() -> None:
    default, transposed, losses = answers(
        """
        from te_precision_callbacks import reference
        reference.install(capability=(10, 0))
        import transformer_engine.pytorch as te
        """
        + _indented(TRAIN)
        + """
        from transformer_engine.common.recipe import DelayedScaling
        from transformer_engine.pytorch.tensor import Float8CurrentScalingQuantizer

        quantizer = Float8CurrentScalingQuantizer(te.DType.kFloat8E4M3, device="cpu")
        transposed = quantizer(torch.randn(32, 32))._transpose is not None
        torch.manual_seed(0)
        losses = [train(te.Linear(64, 64), torch.randn(32, 64), recipe) for recipe in (DelayedScaling(), None)]
        answer = [type(te.get_default_recipe()).__name__, transposed, losses]
        """
    )
    assert default == "MXFP8BlockScaling"
    assert not transposed
    assert all(of_recipe[-1] < of_recipe[0] for of_recipe in losses)


@pytest.mark.processes
def test_blackwell_s_recipe_is_refused_on_hopper_and_fp8_blocks_are_not() -> None:
    done = python(
        """
        from te_precision_callbacks import reference
        reference.install()
        import torch
        import transformer_engine.pytorch as te
        from transformer_engine.common.recipe import Float8BlockScaling, MXFP8BlockScaling

        for recipe in (Float8BlockScaling(), MXFP8BlockScaling()):
            with te.autocast(enabled=True, recipe=recipe):
                te.Linear(128, 128)(torch.randn(128, 128)).sum().backward()
            print("trained in", type(recipe).__name__)
        """
    )
    assert done.stdout.split("\n") == ["trained in Float8BlockScaling", ""], done.stderr
    assert "Device compute capability 10.0 or higher required for MXFP8" in done.stderr


def _indented(code: str) -> str:
    return "".join(f"        {line}" if line.strip() else line for line in code.splitlines(keepends=True))


# --- random numbers of a pretended GPU, and the CPU's -----------------------------------------------------------------


ON_THE_CPU = """
import json
import torch

def drawn_on_the_cpu():
    torch.manual_seed(3)
    torch.cuda.manual_seed(11)
    data = torch.utils.data
    return [
        torch.nn.Linear(3, 3).weight.tolist(),
        torch.nn.init.trunc_normal_(torch.zeros(4)).tolist(),
        [batch.tolist() for batch in data.DataLoader(torch.arange(8), shuffle=True, batch_size=4)],
        list(data.random_split(range(10), [5, 5])[0].indices),
        list(data.WeightedRandomSampler([1, 2, 3.0], 5)),
        torch.rand(2).tolist(), torch.randperm(5).tolist(), torch.randint(5, (3,), device="cpu").tolist(),
        torch.empty(2).normal_().tolist(), torch.normal(torch.zeros(2), torch.ones(2)).tolist(),
        torch.normal(0.0, 1.0, (2,)).tolist(), torch.bernoulli(torch.full((4,), 0.5)).tolist(),
        torch.randn_like(torch.ones(2)).tolist(), torch.multinomial(torch.ones(5), 3).tolist(),
        torch.initial_seed(), torch.rand(1).item(),
    ]
"""


@pytest.mark.processes
def test_the_cpu_draws_what_it_draws_without_a_gpu_whatever_the_seed_of_the_gpu() -> None:
    plain: dict[str, Any] = {}
    exec(ON_THE_CPU, plain)
    pretended = answers(
        "from te_precision_callbacks import reference; reference.install(pretend_cuda=True)"
        + ON_THE_CPU
        + "\nanswer = drawn_on_the_cpu()"
    )
    assert pretended == json.loads(json.dumps(plain["drawn_on_the_cpu"]()))


@pytest.mark.processes
def test_each_draws_from_its_own_generator_and_forks_and_checkpoints_keep_both() -> None:
    draws, gradients, between_ranks, compiled = answers(
        """
        from te_precision_callbacks import reference
        reference.install(pretend_cuda=True)
        import torch
        from torch.nn.functional import dropout
        from torch.utils.checkpoint import checkpoint
        from transformer_engine.pytorch.distributed import CudaRNGStatesTracker

        x = torch.ones(8, device="cuda")

        def in_context(device):
            with torch.device(device):
                torch.rand(2)

        def forked():
            with torch.random.fork_rng():
                torch.rand(2), torch.rand(2, device="cuda"), dropout(x)

        def restored():
            states = torch.cuda.get_rng_state_all(), torch.get_rng_state()
            torch.rand(2), dropout(x)
            torch.cuda.set_rng_state_all(states[0]), torch.set_rng_state(states[1])

        generator = torch.Generator("cuda")
        cases = {
            "cpu": [
                lambda: torch.rand(2), lambda: torch.rand(2, device="cpu"), lambda: torch.empty(2).uniform_(),
                lambda: torch.randn_like(x, device="cpu"), lambda: torch.nn.Linear(2, 2).to(0),
                lambda: in_context("cpu"),
            ],
            "cuda": [
                lambda: torch.rand(2, device="cuda"), lambda: torch.rand(2, device=0), lambda: in_context("cuda"),
                lambda: torch.nn.Linear(2, 2, device="cuda"), lambda: torch.empty(2).cuda().uniform_(),
                lambda: torch.empty(2, device="cuda").uniform_(), lambda: dropout(x), lambda: (x * 2).normal_(),
                lambda: torch.randn_like(x), lambda: torch.cuda.manual_seed(4),
                lambda: torch.rand(2, generator=torch.cuda.default_generators[0], device="cuda"),
            ],
            "both": [lambda: torch.manual_seed(5), lambda: torch.nn.Linear(2, 2).cuda().reset_parameters()],
            "neither": [forked, restored, lambda: torch.rand(2, generator=generator, device="cuda")],
        }

        def moved(draw):
            before = torch.get_rng_state(), torch.cuda.get_rng_state()
            draw()
            after = torch.get_rng_state(), torch.cuda.get_rng_state()
            cpu, cuda = [not torch.equal(*states) for states in zip(before, after)]
            return {(True, True): "both", (True, False): "cpu", (False, True): "cuda", (False, False): "neither"}[
                cpu, cuda]

        torch.manual_seed(1)
        draws = [[expected, moved(draw)] for expected, all_draws in cases.items() for draw in all_draws]

        linear = torch.nn.Linear(8, 8).cuda()
        def gradient(run):
            torch.manual_seed(7)
            y = torch.ones(4, 8, device="cuda", requires_grad=True)
            z = run(lambda y: dropout(linear(y), 0.5) * torch.rand(8), y)
            torch.rand(3), torch.rand(3, device="cuda")
            z.sum().backward()
            return y.grad.tolist()

        gradients = [gradient(lambda f, y: f(y))] + [
            gradient(lambda f, y: checkpoint(f, y, use_reentrant=reentrant)) for reentrant in (True, False)]

        def of_rank(rank):  # as megatron-core does for the ranks of tensor parallelism
            torch.manual_seed(1)
            tracker = CudaRNGStatesTracker()
            tracker.add("model-parallel-rng", 2718 + rank)
            before = torch.get_rng_state()
            with tracker.fork("model-parallel-rng"):
                inside = dropout(torch.ones(64, device="cuda"))
            assert torch.equal(before, torch.get_rng_state())
            return [inside.tolist(), dropout(torch.ones(64, device="cuda")).tolist()]

        compiled = torch.compile(
            lambda: dropout(x) + torch.rand(8, device="cuda") + torch.empty(8, device="cuda").normal_(),
            backend="aot_eager", fullgraph=True)
        torch.cuda.manual_seed(2)
        once = compiled()
        torch.cuda.manual_seed(2)
        same = torch.equal(once, compiled())
        answer = [draws, gradients, [of_rank(0), of_rank(1)], same]
        """
    )
    assert [item for _, item in draws] == [expected for expected, _ in draws]
    assert gradients[0] == gradients[1] == gradients[2]
    (inside, outside), (inside_of_another, outside_of_another) = between_ranks
    assert inside != inside_of_another
    assert outside == outside_of_another
    assert compiled


# --- processes that are started by one with the backend ---------------------------------------------------------------


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


@pytest.mark.extended
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
    assert not answers(code, cwd=tmp_path, fresh=True, **inherited.environment(TOLD))
    assert (tmp_path / "a.html").stat().st_size > 100_000
    assert (tmp_path / "b.html").stat().st_size > 100_000


@pytest.mark.extended
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
        **inherited.environment(TOLD),
    ) == [True, False, "te_precision_callbacks.reference.extension"]


# ---------------------------------------------------------------------- a child's use of inherited settings


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
            ["slow reference backend despite the GPU"],
        ),
    ],
)
def test_a_child_with_a_gpu_and_a_compiled_build_uses_them_unless_told_otherwise(
    always: bool, expected: dict[str, Any] | None, stated: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    assert startup.child_arguments(TOLD._replace(always=always), has_gpu=True) == expected
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert [part for part in stated if part not in record.message] == []


@pytest.mark.slow
@pytest.mark.parametrize("has_gpu", [True, False])
def test_a_child_without_a_compiled_build_has_the_backend(has_gpu: bool, caplog: pytest.LogCaptureFixture) -> None:
    """On a real GPU, CUDA is not pretended."""
    arguments = startup.child_arguments(TOLD, has_gpu=has_gpu)
    assert arguments == {"pretend_cuda": not has_gpu, "capability": (10, 0), "always_in_children": False}
    assert len(caplog.records) == has_gpu


@pytest.mark.parametrize("text", ["1", "true", "{}", "[", '{"pretend_cuda": true, "capability": [9]}'])
def test_a_variable_that_this_package_did_not_set_is_named(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(inherited.ENVIRONMENT_VARIABLE, text)
    with pytest.raises(
        InstallError, match=r"^TE_PRECISION_REFERENCE_INSTALL=.* in the environment is invalid: .*Unset it"
    ):
        inherited.read_inherited()


# --- the pytest plugin: unmodified GPU tests --------------------------------------------------------------------------


PLUGIN = ["-p", "te_precision_callbacks.reference.pytest_plugin"]

GPU_TESTS = """
import pytest
import torch
import transformer_engine.pytorch as te

@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("fp8", [False, True])
def test_linear(fp8):
    torch.cuda.manual_seed(0)
    model = te.Linear(32, 32, params_dtype=torch.bfloat16, device="cuda")
    with te.autocast(enabled=fp8):
        y = model(torch.randn(32, 32, dtype=torch.bfloat16, device="cuda"))
    y.sum().backward()
    assert y.is_cuda and model.weight.grad is not None

@pytest.mark.skipif(not te.is_mxfp8_available(), reason="needs Blackwell")
def test_blackwell():
    pass

def test_that_fails():
    assert torch.ones(1).cuda().item() == 2
"""


@pytest.mark.processes
def test_gpu_tests_run(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text("import transformer_engine.pytorch\n")
    (tmp_path / "test_gpu.py").write_text(GPU_TESTS)
    command = [executable(), "-m", "pytest", *PLUGIN, "-p", "no:cacheprovider", "-W", "ignore", "test_gpu.py"]
    done = run(command, cwd=tmp_path)
    assert done.returncode == 1
    assert "reference backend on a GPU emulated on the CPU, compute capability 9.0" in done.stdout
    assert "1 failed, 2 passed, 1 skipped" in done.stdout, done.stdout + done.stderr


@pytest.mark.processes
def test_wrong_use_is_a_usage_error(tmp_path: Path) -> None:
    command = [executable(), "-m", "pytest", *PLUGIN, "--collect-only"]
    done = run(command, cwd=tmp_path, TE_PRECISION_REFERENCE_CAPABILITY="11")
    assert done.returncode == 4
    assert "TE_PRECISION_REFERENCE_CAPABILITY='11'" in done.stderr
