"""Record a client's GEMMs, losses, and parameters after each step.

The spy stands at the entries of the compiled extension (``transformer_engine_torch``, here the reference backend) and
at torch's global hooks, so that it sees the same with the debugger and without.

Usage::

    Spy(Path("record")).install()  # once torch is imported

``record/rank-0.jsonl`` then holds one JSON object a line: ``{"kind": "gemm" | "loss" | "step", ...}``.
"""

import atexit
import importlib
import json
import os
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from inside.tensors import (
    Summary,
    all_parts,
    codes,
    digest,
    is_quantized,
    kind_of,
    losses_of_quantization,
    read_by_gemm,
)
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook

LAYERS = ("Linear", "LayerNormLinear", "LayerNormMLP", "GroupedLinear")


def names_of(model: torch.nn.Module) -> Iterator[tuple[int, str]]:
    """The id and the path of each module, as Megatron numbers layers and experts, not as a rank's lists do."""
    numbers: dict[str, str] = {}
    several = torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1
    for path, module in model.named_modules():
        above, _, last = path.rpartition(".")
        experts = getattr(model.get_submodule(above), "local_expert_indices", None)
        if experts and last == "experts" and several:
            last += f"_{experts[0]}_{experts[-1]}"
        number = getattr(module, "layer_number", None)
        if last.isdigit() and isinstance(number, int):
            last = str(number - 1)
        numbers[path] = ".".join(filter(None, [numbers.get(above, ""), last]))
        yield id(module), numbers[path]


class Spy:
    """Writes what one process computes, as it computes it.

    Args:
        folder: made if it is not there; each rank has its own file in it.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._file = (folder / f"rank-{os.environ.get('RANK', '0')}.jsonl").open("w", encoding="utf-8")
        self.step = 0
        self._running: list[tuple[torch.nn.Module, bool]] = []
        self._names: dict[int, str] = {}
        self._sources: dict[int, tuple[weakref.ref[torch.Tensor], Summary]] = {}
        self._experts: Counter[int] = Counter()
        self._primary: dict[int, weakref.ref[torch.Tensor]] = {}
        atexit.register(self._file.close)

    def install(self) -> None:
        extension: Any = importlib.import_module("transformer_engine_torch")  # the reference backend's
        extension.quantize = self._quantizing(extension.quantize)
        extension.bgrad_quantize = self._quantizing(extension.bgrad_quantize)
        extension.generic_gemm = self._gemm(extension.generic_gemm)
        extension.te_general_grouped_gemm = self._grouped_gemm(extension.te_general_grouped_gemm)
        register_module_forward_pre_hook(self._enter)
        register_module_forward_hook(self._leave, always_call=True)
        register_optimizer_step_post_hook(self._stepped)
        torch.autograd.backward = self._backward(torch.autograd.backward)

    def note(self, kind: str, **values: Any) -> None:
        self._file.write(json.dumps({"kind": kind, "step": self.step, **values}) + "\n")
        self._file.flush()

    # ------------------------------------------------------------------------------------ torch's hooks

    def _enter(self, module: torch.nn.Module, arguments: tuple[Any, ...]) -> None:
        if not self._running:
            self._names.update(names_of(module))
        for parameter in module.parameters(recurse=False):
            if is_quantized(parameter):
                self._primary.update((part.data_ptr(), weakref.ref(part)) for part in codes(parameter))
        self._running.append((module, module.training and torch.is_grad_enabled()))

    def _leave(self, module: torch.nn.Module, arguments: tuple[Any, ...], output: Any) -> None:
        while self._running and self._running.pop()[0] is not module:
            pass

    def _stepped(self, optimizer: torch.optim.Optimizer, arguments: Any, keywords: Any) -> None:
        parameters = [parameter.detach() for group in optimizer.param_groups for parameter in group["params"]]
        self.note("step", parameters=digest(part for parameter in parameters for part in all_parts(parameter)))
        self.step += 1

    def _backward(self, backward: Any) -> Any:
        def spied(tensors: Any, *arguments: Any, **keywords: Any) -> Any:
            for tensor in tensors if isinstance(tensors, Sequence) else [tensors]:
                if isinstance(tensor, torch.Tensor) and tensor.numel() == 1:
                    self.note("loss", value=float(tensor.detach()).hex())
            return backward(tensors, *arguments, **keywords)

        return spied

    # ------------------------------------------------------------------------------------ the extension's entries

    def _quantizing(self, quantize: Any) -> Any:
        def spied(tensor: Any, *arguments: Any, **keywords: Any) -> Any:
            source = None if is_quantized(tensor) else Summary.of(tensor)
            results = quantize(tensor, *arguments, **keywords)
            for result in results if isinstance(results, (list, tuple)) else [results]:
                if source is not None and is_quantized(result):
                    self._link(result, source)
            return results

        return spied

    def _link(self, result: Any, source: Summary) -> None:
        """Remember the source of a quantized tensor. As long as its codes live, nothing else has their address."""
        for part in codes(result):
            self._sources[part.data_ptr()] = (weakref.ref(part), source)

    def _source(self, quantized: Any) -> Summary | None:
        """The remembered source; None if a fused kernel has quantized it."""
        for part in codes(quantized):
            alive, source = self._sources.get(part.data_ptr(), (None, None))
            if alive is not None and alive() is not None:
                return source
        return None

    def _is_primary(self, quantized: Any) -> bool:
        """Return whether this is a weight kept in FP8 only: its source is no tensor of training."""
        results = (self._primary.get(part.data_ptr()) for part in codes(quantized))
        return any(alive is not None and alive() is not None for alive in results)

    def _gemm(self, gemm: Any) -> Any:
        def spied(A: Any, transA: bool, B: Any, transB: bool, D: Any, *arguments: Any, **keywords: Any) -> Any:
            operands = self._operands(A, transA, B, transB)
            results = gemm(A, transA, B, transB, D, *arguments, **keywords)
            self._note_gemm(transA, transB, operands, results[0], accumulate=bool(arguments[9]), expert=None)
            return results

        return spied

    def _grouped_gemm(self, gemm: Any) -> Any:
        def spied(A: Any, transA: bool, B: Any, transB: bool, D: Any, *arguments: Any, **keywords: Any) -> Any:
            pairs = [self._operands(a, transA, b, transB) for a, b in zip(A, B, strict=True)]
            results = gemm(A, transA, B, transB, D, *arguments, **keywords)
            rows, single = list(arguments[1]), bool(arguments[4])
            outs = D[0].view(-1, D[0].shape[-1]).split(rows) if single else D
            for expert, (operands, out) in enumerate(zip(pairs, outs, strict=True)):
                self._note_gemm(transA, transB, operands, out, accumulate=bool(arguments[9]), expert=expert)
            return results

        return spied

    def _operands(self, A: Any, transA: bool, B: Any, transB: bool) -> dict[str, Any]:
        return {"A": self._operand(A, rowwise=transA), "B": self._operand(B, rowwise=not transB)}

    def _operand(self, tensor: Any, *, rowwise: bool) -> dict[str, Any]:
        read = digest(read_by_gemm(tensor, rowwise=rowwise))
        if not is_quantized(tensor):
            return {"kind": kind_of(tensor), "read": read, "source": Summary.of(tensor).figures(), "quantized": None}
        if self._is_primary(tensor):
            source = Summary.of_quantized(tensor)
            figures = None if source is None else source.figures()
            return {"kind": kind_of(tensor), "read": read, "source": figures, "quantized": None}
        source = self._source(tensor)
        return {
            "kind": kind_of(tensor),
            "read": read,
            "source": None if source is None else source.figures(),
            "quantized": None if source is None else losses_of_quantization(source.array, tensor),
        }

    def _note_gemm(
        self, transA: bool, transB: bool, operands: dict[str, Any], out: Any, *, accumulate: bool, expert: int | None
    ) -> None:
        layer, trains, kind = self._layer()
        if layer is not None:
            self._uncast(operands["A"])
        if kind == "GroupedLinear" and expert is None:  # watched, its experts have a GEMM each, one after the other
            expert = self._next_expert()
        plain = not is_quantized(out)
        self.note(
            "gemm",
            layout=("T" if transA else "N") + ("T" if transB else "N"),
            layer=layer,
            trains=trains,
            of=kind,
            accumulate=accumulate,
            expert=expert,
            **operands,
            D={"read": digest(all_parts(out)), "source": Summary.of(out).figures() if plain else None},
        )

    def _uncast(self, weight: dict[str, Any]) -> None:
        """Give a weight that autocast has rounded for the GEMM the figures of the parameter that it was."""
        for parameter in self._running[-1][0].parameters(recurse=False) if weight["kind"] == "bfloat16" else ():
            cast = parameter.dtype == torch.float32 and digest([parameter.detach().to(torch.bfloat16)])
            if cast == weight["read"]:
                weight["source"] = Summary.of(parameter).figures() | {"hash": weight["source"]["hash"]}

    def _next_expert(self) -> int:
        module: Any = next(module for module, _ in reversed(self._running) if hasattr(module, "num_gemms"))
        self._experts[id(module)] += 1
        return (self._experts[id(module)] - 1) % int(module.num_gemms)

    def _layer(self) -> tuple[str | None, bool | None, str | None]:
        """The name of the Transformer Engine layer that runs its forward, whether it trains, and its class."""
        for module, trains in reversed(self._running):
            for base in type(module).__mro__:
                if base.__module__.startswith("transformer_engine") and base.__name__ in LAYERS:
                    return self._names.get(id(module), "?"), trains, base.__name__
        return None, None, None
