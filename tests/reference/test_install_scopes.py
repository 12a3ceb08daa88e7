"""What the two scopes change in a process, and that Transformer Engine trains in both."""

from pathlib import Path

import pytest

from tests.reference.processes import answers, python

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
    for run in losses:
        assert run[-1] < run[0]
    assert seen[0] == seen[1]
    assert seen[1][0] is False
    assert names == []
    assert environment == ["PYTHONPATH", "TE_PRECISION_REFERENCE_INSTALL"]


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
def test_blackwell() -> None:
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
