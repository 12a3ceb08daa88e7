"""Models that overflow at a known place, and what plain hooks see of them."""

import copy
import re
from collections import namedtuple
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import T5Config, T5ForConditionalGeneration

WO = "encoder.block.2.layer.1.DenseReluDense.wo"


def mini_t5(*, dtype: torch.dtype = torch.float16) -> torch.nn.Module:
    torch.manual_seed(0)
    config = T5Config(
        vocab_size=64,
        d_model=32,
        d_kv=8,
        d_ff=64,
        num_layers=3,
        num_decoder_layers=1,
        num_heads=4,
        feed_forward_proj="gated-gelu",
        dropout_rate=0.0,
        decoder_start_token_id=0,  # type: ignore[call-arg]
        pad_token_id=0,
        use_cache=False,
    )
    return T5ForConditionalGeneration(config).to(dtype).train()


def tokens(seed: int = 0) -> torch.Tensor:
    return torch.randint(1, 64, (2, 8), generator=torch.Generator().manual_seed(seed))


Line = namedtuple("Line", "abs_max sign batch path class_name role")

_LINE = re.compile(r"abs_max=(.{9}) ([<>=]) \[(\d+)\] (?:(?:(\S+): )?(\w+): )?(.+)")


def lines_of(report: str) -> list[Line]:
    count, *frames = report.partition("\n\n\n")[2].splitlines()
    assert count == f"last {len(frames)} frames:"
    results = []
    for frame in frames:
        abs_max, sign, batch, path, class_name, role = _LINE.fullmatch(frame).groups()  # type: ignore[union-attr]
        results.append(Line(abs_max, sign, int(batch), path or "", class_name or "", role))
    assert frames[-1].endswith(report.partition("\n")[0].rpartition(" has ")[0])
    return results


def seen_by_plain_hooks(model: torch.nn.Module, run: Callable[[], object]) -> list[Line]:
    results: list[Line] = []
    entered: list[list[tuple[str, str]]] = []
    handles = []

    def watch(path: str, module: torch.nn.Module) -> None:
        def before(module: torch.nn.Module, inputs: tuple[Any, ...], keywords: dict[str, Any]) -> None:
            entered.append(_amaxes(dict(enumerate(inputs)) | keywords, "input"))

        def after(module: torch.nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
            seen = [(">", entered.pop()), ("<", _amaxes(output, "output"))]
            name = type(module).__name__
            results.extend(Line(amax, sign, 0, path, name, role) for sign, amaxes in seen for role, amax in amaxes)

        handles.extend(
            [module.register_forward_pre_hook(before, with_kwargs=True), module.register_forward_hook(after)]
        )

    for path, module in model.named_modules():
        watch(path, module)
    run()
    for handle in handles:
        handle.remove()
    return results


def _amaxes(value: Any, role: str) -> list[tuple[str, str]]:
    if isinstance(value, torch.Tensor):
        return [(role, f"{value.detach().double().abs().max().item():9.2e}")]
    items = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, tuple) else ()
    return [amax for key, item in items for amax in _amaxes(item, f"{role}[{key}]")]


def hooks_on(model: torch.nn.Module) -> int:
    count = 0
    for module in model.modules():
        count += (
            len(module._forward_hooks)
            + len(module._forward_pre_hooks)
            + len(module._forward_hooks_always_called)
            + len(module._forward_pre_hooks_with_kwargs)
        )
    for parameter in model.parameters():
        count += len(parameter._post_accumulate_grad_hooks or ()) + len(parameter._backward_hooks or ())
    return count


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, value: float = 1.0) -> None:
    model(torch.full((2, 4), value)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


class HostReads(TorchDispatchMode):  # type: ignore[no-untyped-call]
    count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += function in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default)
        return function(*args, **(kwargs or {}))


@contextmanager
def weights_stay(model: torch.nn.Module) -> Iterator[None]:
    before = copy.deepcopy(model.state_dict())
    yield
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
