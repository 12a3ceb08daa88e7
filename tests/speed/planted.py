"""A trace of a GPU with a known truth: a model of two blocks of Transformer Engine and a head, one step of training."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from te_precision_callbacks.coverage.coverage import Product
from te_precision_callbacks.speed.trace.range_names import iteration_range, layer_range

TOKENS, HIDDEN, WORDS = 4096, 1024, 32000

FP8 = {"activation": "FP8 E4M3", "weight": "FP8 E4M3"}
BF16 = {"activation": "BF16", "weight": "BF16"}


class Kernel(NamedTuple):
    """The truth of a kernel."""

    layer: str
    gemm: str
    of_pass: str
    kind: str
    us: float


class Planted:
    """Writes a trace, and remembers what is true of it.

    Args:
        ranges: whether the session's ranges are in it.
        recompute: whether the blocks are run again in the backward.
        again: how many micro-batches there are.
        late: microseconds that the host takes for each launch; kernels take some 100.
    """

    def __init__(
        self,
        *,
        ranges: bool = True,
        recompute: bool = False,
        again: int = 1,
        late: float = 10.0,
    ) -> None:
        self.events: list[dict[str, Any]] = [{"ph": "M", "name": "process_name", "pid": 1, "tid": 0, "args": {}}]
        self.truth: list[Kernel] = []
        self._ranges, self._recompute, self._late = ranges, recompute, late
        self._now = self._free = 1000.0
        self._count = self._sequence = 0
        self._thread = 1
        self._pass = "forward"
        self._forwards: dict[str, list[tuple[int, float, int]]] = {}
        self._arrows = 0
        with self._range(iteration_range(7)):
            for _ in range(again):
                self._forward()
                self._backward()
            self._pass = "optimizer"
            with self._range("Optimizer.step#FusedAdam.step"):
                with self._operator("aten::_fused_adamw_"):
                    self._kernel("void multi_tensor_apply_kernel<AdamFunctor>", 300, "", "", "other")

    # ------------------------------------------------------------------ the model

    def _forward(self) -> None:
        self._pass = "forward"
        for block in ("layers.0", "layers.1"):
            self._block(block)
        with self._module("head"), self._node("aten::linear", "head"):
            with self._operator("aten::addmm"):
                self._kernel("nvjet_sm90_tst_256x128_64x4_TNT", 900, "head", "", "gemm")
        with self._node("aten::_log_softmax", "loss"):
            self._kernel("void cunn_SoftMaxForward<4, float>", 50, "", "", "other")

    def _block(self, block: str) -> None:
        with (
            self._module(f"{block}.qkv"),
            self._node("_LayerNormLinear", f"{block}.qkv"),
        ):
            self._kernel("void ln_fwd_tuned_kernel<Kernel_traits>", 30, f"{block}.qkv", "", "other")
            self._cast(f"{block}.qkv")
            self._gemm(f"{block}.qkv", "fprop", 200)
        with self._module(f"{block}.attention"), self._node("FusedAttnFunc", f"{block}.attention"):
            self._kernel("void pytorch_flash::flash_fwd_kernel<Traits>", 150, f"{block}.attention", "", "attention")
        with (
            self._module(f"{block}.proj"),
            self._node("_Linear", f"{block}.proj"),
        ):
            self._cast(f"{block}.proj")
            self._gemm(f"{block}.proj", "fprop", 80)
        mlp = f"{block}.mlp"
        with (
            self._module(mlp),
            self._node("_LayerNormMLP", mlp),
        ):
            self._kernel("void rmsnorm_fwd_tuned_kernel<Traits>", 30, mlp, "", "other")
            self._gemm(f"{mlp}.fc1", "fprop", 260)
            self._cast(mlp)
            self._gemm(f"{mlp}.fc2", "fprop", 250)

    def _backward(self) -> None:
        self._pass, self._thread = "backward", 2
        with self._backward_of("aten::linear", "head", "AddmmBackward0"):
            with self._operator("aten::mm"):
                self._kernel("nvjet_sm90_tst_256x128_64x4_NNT", 900, "head", "", "gemm")
            with self._operator("aten::mm"):
                self._kernel("nvjet_sm90_tst_256x128_64x4_NTT", 900, "head", "", "gemm")
                self._kernel("void cublasLt::splitKreduce_kernel<32, __nv_bfloat16>", 9, "head", "", "gemm")
        for block in ("layers.1", "layers.0"):
            if self._recompute:
                with self._operator("autograd::engine::evaluate_function: CheckpointFunctionBackward"):
                    with self._operator("CheckpointFunctionBackward"):
                        self._pass = "recompute"
                        self._block(block)
                        self._pass = "backward"
                        self._backward_of_block(block)
            else:
                self._backward_of_block(block)
        self._thread = 1

    def _backward_of_block(self, block: str) -> None:
        mlp = f"{block}.mlp"
        with self._backward_of("_LayerNormMLP", mlp, "_LayerNormMLPBackward", mlp):
            self._cast(mlp)
            for layer in (f"{mlp}.fc2", f"{mlp}.fc1"):
                self._gemm(layer, "dgrad", 260)
                self._gemm(layer, "wgrad", 270)
        with self._backward_of("_Linear", f"{block}.proj", "_LinearBackward", f"{block}.proj"):
            self._cast(f"{block}.proj")
            self._gemm(f"{block}.proj", "dgrad", 80)
            self._gemm(f"{block}.proj", "wgrad", 85)
        with self._backward_of("FusedAttnFunc", f"{block}.attention", "FusedAttnFuncBackward"):
            self._kernel("void flash_bwd_dq_dk_dv_loop_kernel<Traits>", 400, f"{block}.attention", "", "attention")
        with self._backward_of("_LayerNormLinear", f"{block}.qkv", "_LayerNormLinearBackward", f"{block}.qkv"):
            self._cast(f"{block}.qkv")
            self._gemm(f"{block}.qkv", "dgrad", 210)
            self._gemm(f"{block}.qkv", "wgrad", 215)
            self._kernel("void ln_bwd_tuned_kernel<Traits>", 40, f"{block}.qkv", "", "other")
        node = "autograd::engine::evaluate_function: torch::autograd::AccumulateGrad"
        with self._operator(node), self._operator("c10d::allreduce_"):
            name = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
            self._kernel(name, 60, "", "", "communication")

    # ------------------------------------------------------------------ its parts

    def _cast(self, layer: str) -> None:
        name = "void transformer_engine::detail::cast_transpose_general_kernel<8, 16, true>"
        self._kernel(name, 20, layer, "", "cast")

    def _gemm(self, layer: str, gemm: str, us: float) -> None:
        with self._range(layer_range(layer, gemm, backward=gemm != "fprop")):
            self._kernel("nvjet_sm90_qqtst_128x256_128x4_2x1_v_bz_TNT", us, layer, gemm, "gemm")

    @contextmanager
    def _module(self, name: str) -> Iterator[None]:
        with self._range(layer_range(name)):
            yield

    @contextmanager
    def _range(self, name: str) -> Iterator[None]:
        if not self._ranges and name.startswith("te_precision|layer"):
            yield
            return
        begin = self._now
        self._now += 0.5
        yield
        self._now += 0.5
        self._event("user_annotation", name, begin, self._now - begin)

    @contextmanager
    def _node(self, name: str, key: str) -> Iterator[None]:
        self._sequence += 1
        self._forwards.setdefault(f"{name} {key}", []).append((self._thread, self._now, self._sequence))
        with self._operator(name, self._sequence):
            yield

    @contextmanager
    def _backward_of(self, name: str, key: str, node: str, ranged: str = "") -> Iterator[None]:
        thread, begin, sequence = self._forwards[f"{name} {key}"].pop()
        self._arrows += 1
        facts = {"cat": "fwdbwd", "name": "fwdbwd", "pid": 1, "id": self._arrows}
        with self._operator(f"autograd::engine::evaluate_function: {node}", sequence):
            self.events.append({"ph": "s", "tid": thread, "ts": begin, **facts})
            self.events.append({"ph": "f", "bp": "e", "tid": self._thread, "ts": self._now, **facts})
            with self._operator(node, sequence):
                with self._range(layer_range(ranged, backward=True) if ranged else "(none)"):
                    yield

    @contextmanager
    def _operator(self, name: str, sequence: int = -1) -> Iterator[None]:
        begin = self._now
        self._now += 1
        yield
        facts: dict[str, Any] = {} if sequence < 0 else {"Sequence number": sequence}
        self._now += 1
        self._event("cpu_op", name, begin, self._now - begin, facts)

    def _kernel(self, name: str, us: float, layer: str, gemm: str, kind: str, of_pass: str | None = None) -> None:
        self._count += 1
        facts = {"correlation": self._count, "External id": 0}
        self._event("cuda_runtime", "cudaLaunchKernel", self._now, self._late - 0.5, facts)
        begin = max(self._free, self._now + 4)
        self._now += self._late
        self._free = begin + us
        self._event("kernel", name, begin, us, {"stream": 7, **facts}, pid=0, tid=7)
        self.truth.append(Kernel(layer, gemm, self._pass if of_pass is None else of_pass, kind, us))

    def _event(
        self, category: str, name: str, begin: float, us: float, facts: dict[str, Any] | None = None, **where: int
    ) -> None:
        place = {"pid": 1, "tid": self._thread, **where}
        if category == "user_annotation" and "iteration" in name:
            place["tid"] = 1
        self.events.append(
            {"ph": "X", "cat": category, "name": name, "ts": begin, "dur": us, **place, "args": facts or {}}
        )

    # ------------------------------------------------------------------ its file, and the products of its run

    @property
    def text(self) -> str:
        """The file."""
        head = {"schemaVersion": 1, "deviceProperties": [{"id": 0, "name": "NVIDIA H100 80GB HBM3"}]}
        head["distributedInfo"] = {"backend": "nccl", "rank": 3, "world_size": 8}  # type: ignore[assignment]
        return json.dumps({**head, "traceEvents": self.events, "traceName": "planted"}, indent=1)

    def write(self, path: Path) -> Path:
        """Write the file; with gzip if its name says so."""
        text = self.text.encode()
        path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
        return path


def products(*, again: int = 1) -> list[Product]:
    """What a run of the model has counted."""
    sizes = {
        "qkv": (3 * HIDDEN, HIDDEN),
        "proj": (HIDDEN, HIDDEN),
        "mlp.fc1": (4 * HIDDEN, HIDDEN),
        "mlp.fc2": (HIDDEN, 4 * HIDDEN),
    }

    results: list[Product] = []

    def one(layer: str, family: Any, gemm: Any, n: int, m: int, k: int, operands: dict[str, str]) -> Product:
        backward = gemm in ("dgrad", "wgrad") or any(product.backward for product in results)
        return Product(layer, family, gemm, backward, n, m, k, 1, again, n * m * k * again, operands)

    for block in ("layers.0", "layers.1"):
        for part in ("qkv", "attention", "proj", "mlp.fc1", "mlp.fc2"):
            if part == "attention":
                results += [one(f"{block}.attention", "attention", gemm, 512, 512, 64, BF16) for gemm in ("qk", "pv")]
            else:
                rows, width = sizes[part]
                results.append(one(f"{block}.{part}", "te", "fprop", TOKENS, rows, width, FP8))
    results.append(one("head", "torch", "fprop", TOKENS, WORDS, HIDDEN, BF16))
    results.append(one("head", "torch", "dgrad", TOKENS, HIDDEN, WORDS, BF16))
    results.append(one("head", "torch", "wgrad", WORDS, HIDDEN, TOKENS, BF16))
    for block in ("layers.1", "layers.0"):
        for part in ("mlp.fc2", "mlp.fc1", "proj", "attention", "qkv"):
            if part == "attention":
                results += [one(f"{block}.attention", "attention", gemm, 512, 512, 64, BF16) for gemm in ("pv", "qk")]
                continue
            rows, width = sizes[part]
            results.append(one(f"{block}.{part}", "te", "dgrad", TOKENS, width, rows, FP8))
            results.append(one(f"{block}.{part}", "te", "wgrad", rows, width, TOKENS, FP8))
    return results
