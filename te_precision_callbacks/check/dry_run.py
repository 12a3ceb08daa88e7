"""Calls a model's forward and backward once, only for the sizes of its matrix products.

A model on the meta device runs there, where tensors have shapes and no values. Nothing of the model changes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from te_precision_callbacks.base.errors import PrecisionDebugError
from te_precision_callbacks.check.factory import BatchError, failed, meta_device, require_batch
from te_precision_callbacks.check.findings import listed
from te_precision_callbacks.check.stand_ins import stand_ins
from te_precision_callbacks.coverage.matrix_products import causal_share
from te_precision_callbacks.coverage.micro_batches import leaves
from te_precision_callbacks.coverage.planned_products import Ran
from te_precision_callbacks.coverage.seen_products import ModelProducts
from te_precision_callbacks.layers.naming import Model, NamedModule, module_names, named_operations, named_roots


class NotOnMetaError(BatchError):
    """A forward failed on the meta device, which may be the device's fault."""


def dry_run(model: Model, modules: Sequence[NamedModule], batch: Any, recipe: Any) -> Ran:
    """Call a model with a batch, inside of ``te.autocast`` with a recipe, and run the backward of its loss.

    The loss is the ``loss`` of the result, or the sum of everything in it that needs a gradient.

    Raises:
        BatchError: the model is not one module, the batch has another type, or the forward or backward raises.
        NotOnMetaError: the same on the meta device.
    """
    import transformer_engine.pytorch as te

    require_batch(batch)
    if not isinstance(model, torch.nn.Module):
        raise BatchError("A batch needs one model to be called with it; plan several models one by one, or by tokens.")
    if operations := [layer for operation in named_operations(model) for layer in operation.layers]:
        raise BatchError(
            f"A batch cannot size operations of te.ops ({listed(operations)}), which have to run for that. Give"
            " --tokens (tokens= in Python) in place of a batch."
        )
    place = next((tensor.device for tensor in (*model.parameters(), *model.buffers())), torch.device("cpu"))
    on_meta = place.type == "meta"
    failures: list[Exception] = []
    products = ModelProducts(lambda doing, what, error: failures.append(error), lambda: False, lambda: False)
    arguments, keywords = _arguments(_moved(batch, place))
    in_backward = False
    try:
        with _left_as_it_is(model), meta_device() if on_meta else contextlib.nullcontext():
            products.watch_model(model, module_names(model), ())
            with stand_ins(modules, products) as ran, _Masks(products):
                with te.autocast(enabled=recipe is not None, recipe=recipe):
                    result = model(*arguments, **keywords)
                in_backward = True
                outputs = _outputs(result)
                if outputs:
                    torch.autograd.backward(outputs, [torch.ones_like(output) for output in outputs])
            if failures:
                raise failures[0]
            counted = products.take_step()
    except PrecisionDebugError:
        raise
    except Exception as error:
        of = "backward" if in_backward else "forward"
        kind = NotOnMetaError if on_meta and not isinstance(error, TypeError) else BatchError
        given = _described(batch)
        raise kind(
            failed(f"The model's {of} failed with the batch ({given})", error)
            + " Give what a step of training calls the model with; or give --tokens (tokens= in Python) in place of"
            " a batch."
        ) from error
    finally:
        products.close()
    if counted is not None:
        ran.products = counted.kinds.products(counted.parts)
    return ran


class _Masks(TorchFunctionMode):
    """Notes the masks of torch's attention, which has no operator on the meta device."""

    def __init__(self, products: ModelProducts) -> None:
        super().__init__()
        self._products = products

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        keywords = kwargs or {}
        if func is not torch.nn.functional.scaled_dot_product_attention:
            return func(*args, **keywords)
        given = {**dict(zip(_OF_ATTENTION, args, strict=False)), **keywords}
        share = 1.0 if given.get("attn_mask") is None else None
        if given.get("is_causal"):
            share = causal_share(given["query"].shape[-2], given["key"].shape[-2])
        with self._products.masked(share):
            return func(*args, **keywords)


_OF_ATTENTION = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")


def _arguments(batch: Any) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    if isinstance(batch, Mapping):
        return (), {str(name): value for name, value in batch.items()}
    return (batch if isinstance(batch, tuple) else (batch,)), {}


def _moved(value: Any, place: torch.device) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().to(place).requires_grad_(value.requires_grad)
    if isinstance(value, Mapping):
        return {name: _moved(part, place) for name, part in value.items()}
    if isinstance(value, (list, tuple)):
        parts = [_moved(part, place) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    return value


def _outputs(result: Any) -> list[torch.Tensor]:
    loss = result.get("loss") if isinstance(result, Mapping) else getattr(result, "loss", None)
    if isinstance(loss, torch.Tensor) and loss.requires_grad:
        return [loss]
    return [tensor for tensor in leaves(result) if tensor.requires_grad]


def _described(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    if isinstance(value, Mapping):
        return ", ".join(f"{name}={_described(part)}" for name, part in value.items())
    if isinstance(value, (list, tuple)):
        return ", ".join(map(_described, value))
    return type(value).__name__


@contextlib.contextmanager
def _left_as_it_is(model: Model) -> Iterator[None]:
    roots = [root for _, root in named_roots(model) or ()]
    gradients = [(parameter, parameter.grad) for root in roots for parameter in root.parameters()]
    buffers = [(buffer, buffer.clone()) for root in roots for buffer in root.buffers() if not buffer.is_meta]
    devices = sorted({p.device for p, _ in gradients if p.device.type == "cuda"}, key=str)
    try:
        with torch.random.fork_rng([device.index for device in devices]):
            yield
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)
