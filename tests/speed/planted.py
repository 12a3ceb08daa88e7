"""A trace of a GPU with a known truth: a model of two blocks of Transformer Engine and a head, one step of training."""

import gzip
import itertools
import json
from collections import namedtuple
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from te_precision_callbacks.base.vocabulary import GEMMS
from te_precision_callbacks.coverage.coverage import Product
from te_precision_callbacks.speed.trace.range_names import iteration_range, layer_range

TOKENS, HIDDEN, WORDS = 4096, 1024, 32000


Kernel = namedtuple("Kernel", "layer gemm of_pass kind us")


CAST = "void transformer_engine::detail::cast_transpose_general_kernel<8, 16, true>"
ATTENTION = "void pytorch_flash::flash_fwd_kernel<Traits>"
ATTENTION_BACKWARD = "void flash_bwd_dq_dk_dv_loop_kernel<Traits>"
KINDS = {CAST: "cast", ATTENTION: "attention", ATTENTION_BACKWARD: "attention"}

BLOCK: dict[str, tuple[str, dict[str, float], dict[str, float]]] = {
    "qkv": (
        "_LayerNormLinear",
        {"void ln_fwd_tuned_kernel<Kernel_traits>": 30, CAST: 20, "fprop": 200},
        {CAST: 20, "dgrad": 210, "wgrad": 215, "void ln_bwd_tuned_kernel<Traits>": 40},
    ),
    "attention": ("FusedAttnFunc", {ATTENTION: 150}, {ATTENTION_BACKWARD: 400}),
    "proj": ("_Linear", {CAST: 20, "fprop": 80}, {CAST: 20, "dgrad": 80, "wgrad": 85}),
    "mlp": (
        "_LayerNormMLP",
        {"void rmsnorm_fwd_tuned_kernel<Traits>": 30, ".fc1 fprop": 260, CAST: 20, ".fc2 fprop": 250},
        {CAST: 20, ".fc2 dgrad": 260, ".fc2 wgrad": 270, ".fc1 dgrad": 260, ".fc1 wgrad": 270},
    ),
}
"""A part of a block -> its node of autograd, and the microseconds of its kernels in the forward and in the backward."""


class Planted:
    """Writes a trace, and remembers its true values.

    Args:
        ranges: whether the session's ranges are in it.
        recompute: whether the blocks are run again in the backward.
        again: how many micro-batches there are.
        late: microseconds that the host takes for each launch; kernels take some 100.
        casts_behind: whether a node of autograd runs within the range of its layer, and the engine casts behind that.
    """

    def __init__(
        self,
        *,
        ranges: bool = True,
        recompute: bool = False,
        again: int = 1,
        late: float = 10.0,
        casts_behind: bool = False,
    ) -> None:
        self.events: list[dict[str, Any]] = [{"ph": "M", "name": "process_name", "pid": 1, "tid": 0, "args": {}}]
        self.truth: list[Kernel] = []
        self._ranges, self._recompute, self._late = ranges, recompute, late
        self._casts_behind = casts_behind
        self._now = self._free = 1000.0
        self._numbers = itertools.count(1)
        self._thread = 1
        self._pass = "forward"
        self._forwards: dict[str, list[tuple[int, float, int]]] = {}
        with self._range(iteration_range(7)):
            for _ in range(again):
                self._forward()
                self._backward()
            self._pass = "optimizer"
            with self._range("Optimizer.step#FusedAdam.step"), self._operator("aten::_fused_adamw_"):
                self._kernel("void multi_tensor_apply_kernel<AdamFunctor>", 300, "", "", "other")

    # ------------------------------------------------------------------ the model

    def _forward(self) -> None:
        self._pass = "forward"
        for block in ("layers.0", "layers.1"):
            self._block(block)
        with self._range(layer_range("head")), self._node("aten::linear", "head"):
            with self._operator("aten::addmm"):
                self._kernel("nvjet_sm90_tst_256x128_64x4_TNT", 900, "head", "", "gemm")
        with self._node("aten::_log_softmax", "loss"):
            self._kernel("void cunn_SoftMaxForward<4, float>", 50, "", "", "other")

    def _block(self, block: str) -> None:
        for part, (node, kernels, _) in BLOCK.items():
            layer = f"{block}.{part}"
            with self._range(layer_range(layer)), self._node(node, layer):
                self._kernels(layer, kernels)

    def _kernels(self, layer: str, kernels: dict[str, float]) -> None:
        for name, us in kernels.items():
            part, _, gemm = name.rpartition(" ")
            if gemm in GEMMS:
                self._gemm(layer + part, gemm, us)
            else:
                self._kernel(name, us, layer, "", KINDS.get(name, "other"))

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
                name = "CheckpointFunctionBackward"
                with self._operator(f"autograd::engine::evaluate_function: {name}"), self._operator(name):
                    self._pass = "recompute"
                    self._block(block)
                    self._pass = "backward"
                    self._backward_of_block(block)
            else:
                self._backward_of_block(block)
        self._thread = 1

    def _backward_of_block(self, block: str) -> None:
        for part, (node, _, kernels) in reversed(BLOCK.items()):
            layer = f"{block}.{part}"
            with self._backward_of(node, layer, f"{node}Backward", "" if part == "attention" else layer):
                self._kernels(layer, kernels)
        node = "autograd::engine::evaluate_function: torch::autograd::AccumulateGrad"
        with self._operator(node), self._operator("c10d::allreduce_"):
            name = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
            self._kernel(name, 60, "", "", "communication")

    # ------------------------------------------------------------------ its parts

    def _gemm(self, layer: str, gemm: str, us: float) -> None:
        with self._range(layer_range(layer, gemm, backward=gemm != "fprop")):
            self._kernel("nvjet_sm90_qqtst_128x256_128x4_2x1_v_bz_TNT", us, layer, gemm, "gemm")

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
        sequence = next(self._numbers)
        self._forwards.setdefault(f"{name} {key}", []).append((self._thread, self._now, sequence))
        with self._operator(name, sequence):
            yield

    @contextmanager
    def _backward_of(self, name: str, key: str, node: str, ranged: str = "") -> Iterator[None]:
        thread, begin, sequence = self._forwards[f"{name} {key}"].pop()
        facts = {"cat": "fwdbwd", "name": "fwdbwd", "pid": 1, "id": next(self._numbers)}
        named = layer_range(ranged, backward=True) if ranged else "(none)"
        with self._operator(f"autograd::engine::evaluate_function: {node}", sequence):
            self.events.append({"ph": "s", "tid": thread, "ts": begin, **facts})
            with self._range(named) if self._casts_behind else nullcontext():
                self.events.append({"ph": "f", "bp": "e", "tid": self._thread, "ts": self._now, **facts})
                with self._operator(node, sequence):
                    with nullcontext() if self._casts_behind else self._range(named):
                        yield
            if self._casts_behind and ranged:
                self._kernel(CAST, 20, ranged, "", "cast")

    @contextmanager
    def _operator(self, name: str, sequence: int = -1) -> Iterator[None]:
        begin = self._now
        self._now += 1
        yield
        self._now += 1
        self._event("cpu_op", name, begin, self._now - begin, {} if sequence < 0 else {"Sequence number": sequence})

    def _kernel(self, name: str, us: float, layer: str, gemm: str, kind: str) -> None:
        facts = {"correlation": next(self._numbers), "External id": 0}
        self._event("cuda_runtime", "cudaLaunchKernel", self._now, self._late - 0.5, facts)
        begin = max(self._free, self._now + 4)
        self._now += self._late
        self._free = begin + us
        self._event("kernel", name, begin, us, {"stream": 7, **facts}, pid=0, tid=7)
        self.truth.append(Kernel(layer, gemm, self._pass, kind, us))

    def _event(
        self, category: str, name: str, begin: float, us: float, facts: dict[str, Any] | None = None, **where: int
    ) -> None:
        event = {"ph": "X", "cat": category, "name": name, "ts": begin, "dur": us, "args": facts or {}}
        self.events.append({"pid": 1, "tid": self._thread, **event, **where})

    # ------------------------------------------------------------------ its file, and the products of its run

    def write(self, path: Path) -> Path:
        head = {
            "schemaVersion": 1,
            "deviceProperties": [{"id": 0, "name": "NVIDIA H100 80GB HBM3"}],
            "distributedInfo": {"backend": "nccl", "rank": 3, "world_size": 8},
        }
        text = json.dumps({**head, "traceEvents": self.events, "traceName": "planted"}, indent=1).encode()
        path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
        return path


PARTS = {
    "qkv": (3 * HIDDEN, HIDDEN),
    "attention": None,
    "proj": (HIDDEN, HIDDEN),
    "mlp.fc1": (4 * HIDDEN, HIDDEN),
    "mlp.fc2": (HIDDEN, 4 * HIDDEN),
}
"""A part of a block -> the rows and the width of its weight."""


def products() -> list[Product]:
    results: list[Product] = []

    def add(layer: str, family: Any, gemm: Any, n: int, m: int, k: int) -> None:
        backward = gemm in ("dgrad", "wgrad") or any(product.backward for product in results)
        operands = dict.fromkeys(("activation", "weight"), "FP8 E4M3" if family == "te" else "BF16")
        results.append(Product(layer, family, gemm, backward, n, m, k, 1, 1, n * m * k, operands))

    for block in ("layers.0", "layers.1"):
        for part, sizes in PARTS.items():
            if sizes is None:
                add(f"{block}.{part}", "attention", "qk", 512, 512, 64)
                add(f"{block}.{part}", "attention", "pv", 512, 512, 64)
            else:
                add(f"{block}.{part}", "te", "fprop", TOKENS, *sizes)
    add("head", "torch", "fprop", TOKENS, WORDS, HIDDEN)
    add("head", "torch", "dgrad", TOKENS, HIDDEN, WORDS)
    add("head", "torch", "wgrad", WORDS, HIDDEN, TOKENS)
    for block in ("layers.1", "layers.0"):
        for part, sizes in reversed(PARTS.items()):
            if sizes is None:
                add(f"{block}.{part}", "attention", "pv", 512, 512, 64)
                add(f"{block}.{part}", "attention", "qk", 512, 512, 64)
            else:
                rows, width = sizes
                add(f"{block}.{part}", "te", "dgrad", TOKENS, width, rows)
                add(f"{block}.{part}", "te", "wgrad", rows, width, TOKENS)
    return results


def tables(counted: Sequence[Product], **facts: Any) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    gemms, operands = [], []
    names = ("layer", "gemm", "family", "backward", "n", "m", "k", "batch", "calls", "macs", "precision", "runs")
    for number, product in enumerate(counted):
        own = {name: getattr(product, name) for name in names}
        recipe = "fp8_current_scaling" if product.is_low else ""
        gemms.append({"gemm_id": number, "scope": "", "recipe": recipe, "since": 0, **own, **facts})
        place = {"gemm_id": number, "layer": product.layer, "gemm": product.gemm, "since": 0, **facts}
        operands += [{**place, "tensor": tensor, "format": text} for tensor, text in product.operands.items()]
    return gemms, operands
