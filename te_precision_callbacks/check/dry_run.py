"""Dry run: calls a model's forward and backward once, only for the sizes of its matrix products.

A model on the meta device runs there, where tensors have shapes but no values. The model is not changed.

Stand-ins replace the forwards of Transformer Engine's modules. They report GEMMs and attention, with their backward,
and do not quantize. On the meta device, results only have the right shape. On other devices, modules compute in high
precision, which supports all shapes. Read from Transformer Engine 2.20.2: the forwards of
``pytorch/module/{linear,layernorm_linear,layernorm_mlp,grouped_linear}.py`` and of ``DotProductAttention``.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from te_precision_callbacks.base.errors import PrecisionDebugError
from te_precision_callbacks.base.replaced import Replacements
from te_precision_callbacks.check.factory import BatchError, format_failure, meta_device, require_batch
from te_precision_callbacks.check.findings import join_names
from te_precision_callbacks.coverage.matrix_products import attention_mask_share, causal_share
from te_precision_callbacks.coverage.micro_batches import leaves
from te_precision_callbacks.coverage.model_products import ModelProducts
from te_precision_callbacks.coverage.planned_products import Ran, gemm_sizes
from te_precision_callbacks.coverage.precision_audit import LayerGemm, dtype_name, gemms_left_out
from te_precision_callbacks.coverage.products import ANY_KERNEL, FUSED
from te_precision_callbacks.instrumentation.regions import AutocastRegions
from te_precision_callbacks.layers.forwards import is_evaluation_forward, is_in_backward
from te_precision_callbacks.layers.gemm_events import AttentionSizes
from te_precision_callbacks.layers.naming import (
    Model,
    NamedModule,
    module_names,
    modules_of,
    named_operations,
    parameters_of,
    roots_of,
)
from te_precision_callbacks.te import modules as te_modules
from te_precision_callbacks.te.state import current_recipe


class NotOnMetaError(BatchError):
    """A forward failed, possibly because it ran on the meta device."""


def dry_run(model: Model, modules: Sequence[NamedModule], batch: Any, recipe: Any) -> Ran:
    """Call a model with a batch, inside ``te.autocast`` with a recipe, and run the backward of its loss.

    If the model enters ``te.autocast`` itself, it is called again without a region around it. The loss is ``loss`` of
    the result, or the sum of all tensors in it that need a gradient.

    Raises:
        BatchError: the model is not a single module, the batch has the wrong type, or the forward or backward raises.
        NotOnMetaError: the forward or backward raises on the meta device.
    """
    require_batch(batch)
    regions = AutocastRegions()
    ran = _dry_run(model, modules, batch, recipe, regions)
    if recipe is not None and regions.has_enabled:
        ran = _dry_run(model, modules, batch, None, regions)
        ran.enters_region = True
    return ran


def _dry_run(model: Model, modules: Sequence[NamedModule], batch: Any, recipe: Any, regions: AutocastRegions) -> Ran:
    import transformer_engine.pytorch as te

    if not isinstance(model, torch.nn.Module):
        raise BatchError("A batch needs a single model. Plan several models one by one, or by tokens.")
    operations = list(itertools.chain.from_iterable(operation.names for operation in named_operations(model)))
    if operations:
        raise BatchError(
            f"A batch cannot size operations of te.ops ({join_names(operations)}), because they do not run in a plan."
            " Give --tokens (tokens= in Python) instead."
        )
    place = next((tensor.device for tensor in (*model.parameters(), *model.buffers())), torch.device("cpu"))
    context: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
    failed: type[BatchError] = BatchError
    if place.type == "meta":
        context = meta_device()
        failed = NotOnMetaError
    failures: list[Exception] = []
    products = ModelProducts(lambda doing, what, error: failures.append(error), lambda: False)
    arguments, keywords = _arguments(_move_to(batch, place))
    running = "forward"
    try:
        with _preserve_state(model), context:
            products.watch_model(model, module_names(model), ())
            with stand_ins(modules, products) as ran, _Masks(products):
                with te.autocast(enabled=recipe is not None, recipe=recipe), _watched(regions):
                    result = model(*arguments, **keywords)
                running = "backward"
                outputs = _outputs(result)
                if outputs:
                    torch.autograd.backward(outputs, list(map(torch.ones_like, outputs)))
            if failures:
                raise failures[0]
            counted = products.take_step()
    except PrecisionDebugError:
        raise
    except Exception as error:
        if isinstance(error, TypeError):
            failed = BatchError
        raise failed(
            format_failure(f"The model's {running} failed with the batch ({_describe(batch)})", error)
            + " Return the arguments of a training step, or give --tokens (tokens= in Python) instead of a batch."
        ) from error
    finally:
        products.close()
    if counted is not None:
        ran.products = counted.kinds.products(counted.parts)
    return ran


@contextlib.contextmanager
def _watched(regions: AutocastRegions) -> Iterator[None]:
    from transformer_engine.pytorch.quantization import FP8GlobalStateManager as manager

    replaced = Replacements()
    replaced.replace(manager, "autocast_enter", staticmethod(regions.wrap(manager.autocast_enter)))
    try:
        yield
    finally:
        replaced.restore()


def modules_with_regions(model: Model) -> list[str]:
    """Return the paths of modules with a ``forward`` that names Transformer Engine and ``autocast``."""
    names = module_names(model)
    entering = []
    for module in modules_of(model):
        name = names.get(id(module))
        if name is not None and _enters_autocast(type(module).forward):
            entering.append(name)
    return entering


@functools.cache
def _enters_autocast(forward: Any) -> bool:
    code = getattr(forward, "__code__", None)
    if code is None or forward.__module__.startswith("transformer_engine"):
        return False
    values = map(forward.__globals__.get, code.co_names)
    from_te = any("transformer_engine" in str(getattr(value, "__module__", value)) for value in values)
    return from_te and not {"autocast", "fp8_autocast"}.isdisjoint(code.co_names)


class _Masks(TorchFunctionMode):
    """Notes the masks of torch's attention, which is not a single operator on the meta device."""

    def __init__(self, products: ModelProducts) -> None:
        super().__init__()
        self._products = products

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        keywords = kwargs or {}
        if func is not torch.nn.functional.scaled_dot_product_attention:
            return func(*args, **keywords)
        arguments = {**dict(zip(_OF_ATTENTION, args, strict=False)), **keywords}
        share = None
        if arguments.get("is_causal"):
            share = causal_share(arguments["query"].shape[-2], arguments["key"].shape[-2])
        elif arguments.get("attn_mask") is None:
            share = 1.0
        with self._products.masked(share):
            return func(*args, **keywords)


_OF_ATTENTION = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")


def _arguments(batch: Any) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    if isinstance(batch, Mapping):
        return (), {str(name): value for name, value in batch.items()}
    if isinstance(batch, tuple):
        return batch, {}
    return (batch,), {}


def _move_to(value: Any, place: torch.device) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().to(place).requires_grad_(value.requires_grad)
    if isinstance(value, Mapping):
        return {name: _move_to(part, place) for name, part in value.items()}
    if isinstance(value, (list, tuple)):
        parts = [_move_to(part, place) for part in value]
        if hasattr(value, "_fields"):
            return type(value)(*parts)
        return type(value)(parts)
    return value


def _outputs(result: Any) -> list[torch.Tensor]:
    loss = getattr(result, "loss", None)
    if isinstance(result, Mapping):
        loss = result.get("loss")
    if isinstance(loss, torch.Tensor) and loss.requires_grad:
        return [loss]
    return [tensor for tensor in leaves(result) if tensor.requires_grad]


def _describe(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    if isinstance(value, Mapping):
        return ", ".join(f"{name}={_describe(part)}" for name, part in value.items())
    if isinstance(value, (list, tuple)):
        return ", ".join(map(_describe, value))
    return type(value).__name__


@contextlib.contextmanager
def _preserve_state(model: Model) -> Iterator[None]:
    gradients = []
    gpus = set()
    for parameter in parameters_of(model):
        gradients.append((parameter, parameter.grad))
        if parameter.device.type == "cuda":
            gpus.add(parameter.device.index)
    buffers = []
    for root in roots_of(model):
        buffers += [(buffer, buffer.clone()) for buffer in root.buffers() if not buffer.is_meta]
    try:
        with torch.random.fork_rng(sorted(gpus)):
            yield
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)


# ---------------------------------------------------------------------- stand-ins


@contextlib.contextmanager
def stand_ins(modules: Sequence[NamedModule], products: ModelProducts) -> Iterator[Ran]:
    import transformer_engine.pytorch as te
    from transformer_engine.pytorch.quantization import FP8GlobalStateManager

    standing = _StandIns(modules, products)
    replaced: dict[Any, Callable[..., Any]] = {
        **{getattr(te, name): standing.module for name in te_modules.MODULES},
        te.DotProductAttention: standing.attention,
        **dict.fromkeys((te.LayerNorm, te.RMSNorm), standing.norm),
    }
    before = {owner: owner.forward for owner in replaced}
    state = FP8GlobalStateManager.quantization_state
    FP8GlobalStateManager.quantization_state = type(FP8GlobalStateManager.quantization_state)()
    try:
        for owner, stand_in in replaced.items():
            owner.forward = _method(owner.forward, stand_in)
        yield standing.ran
    finally:
        FP8GlobalStateManager.quantization_state = state
        for owner, own in before.items():
            owner.forward = own


def _method(own: Callable[..., Any], stand_in: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(own)

    @functools.wraps(own)
    def forward(self: Any, *arguments: Any, **keywords: Any) -> Any:
        bound = signature.bind(self, *arguments, **keywords)
        bound.apply_defaults()
        given = dict(bound.arguments)
        given.pop("self", None)
        return stand_in(self, functools.partial(own, self, *arguments, **keywords), given)

    return forward


class _StandIns:
    """Replacements of calls of TE's modules in a dry run: they report products, and compute shapes only.

    Attributes:
        ran: what ran.
    """

    def __init__(self, modules: Sequence[NamedModule], products: ModelProducts) -> None:
        self.ran = Ran()
        self._products = products
        self._named = {id(named.module): named.names for named in modules}

    # ------------------------------------------------------------------ layers

    def module(self, module: Any, call_own: functools.partial[Any], given: Mapping[str, Any]) -> Any:
        inp = given["inp"]
        row = te_modules.of(module)
        features = row.features(module)
        layers = self._named.get(id(module), ())
        if module.sequence_parallel:
            raise NotImplementedError(
                f"{type(module).__name__} with sequence_parallel=True cannot be planned with a batch"
            )
        columns = features[0][0]
        if not inp.dim() or inp.shape[-1] != columns:  # the meta device would accept it
            name = next(iter(layers), type(module).__name__)
            raise TypeError(
                f"{name!r} takes an input with last dimension {columns}, not an input of shape {list(inp.shape)}"
            )
        result = self._own(inp, call_own, lambda: _results(module, inp))
        tokens = row.tokens(module, inp.numel() // max(1, inp.shape[-1]), given.get("m_splits"))
        left_out = gemms_left_out(module, layers, input_needs_gradient=inp.requires_grad)
        sizes = dict(zip(layers, features, strict=bool(layers)))
        of_layer = dict(zip(layers, tokens, strict=bool(layers)))
        back = self._report(of_layer, sizes, left_out, backwards=row.is_mlp)
        parameters = module.parameters(recurse=False)
        if isinstance(result, tuple):
            return (_with_backward(result[0], back, inp, *parameters), *result[1:])
        return _with_backward(result, back, inp, *parameters)

    def norm(self, module: Any, call_own: functools.partial[Any], given: Mapping[str, Any]) -> Any:
        inp = given["input"]
        result = self._own(inp, call_own, lambda: torch.empty_like(inp))
        return _with_backward(result, lambda: None, inp, *module.parameters())

    def _report(
        self,
        tokens: Mapping[str, int],
        sizes: Mapping[str, tuple[int, int]],
        left_out: Mapping[LayerGemm, str],
        *,
        backwards: bool,
    ) -> Callable[[], None]:
        """Report the forward of layers, and return a function that reports their backward.

        Args:
            tokens: layer -> the rows of its input.
            sizes: layer -> in_features and out_features.
            left_out: the GEMMs that the backward skips.
            backwards: whether the backward starts with the last layer.
        """
        of_layer = {layer: gemm_sizes(rows, *sizes[layer]) for layer, rows in tokens.items()}
        backward_order = list(of_layer)
        if backwards:
            backward_order.reverse()
        if _counts():
            self.ran.left_out.update(left_out)
            for layer, gemms in of_layer.items():
                self.ran.recipes.setdefault(layer, current_recipe())
                self.ran.tokens.setdefault(layer, []).append(tokens[layer])
                self._products.see_gemm(layer, "fprop", gemms["fprop"])

        def back() -> None:
            for layer in backward_order:
                for gemm in ("dgrad", "wgrad"):
                    if LayerGemm(layer, gemm) not in left_out:
                        self._products.see_gemm(layer, gemm, of_layer[layer][gemm])

        return back

    def _own(self, inp: torch.Tensor, call_own: Callable[[], Any], shaped: Callable[[], Any]) -> Any:
        """Return the module's result without gradients and without reporting products; on meta, only its shape."""
        if inp.is_meta:
            return shaped()
        import transformer_engine.pytorch as te

        with self._products.muted(), torch.no_grad(), te.autocast(enabled=False):
            return call_own()

    # ------------------------------------------------------------------ attention

    def attention(self, module: Any, call_own: functools.partial[Any], given: Mapping[str, Any]) -> Any:
        form = given["qkv_format"] or module.qkv_format
        query, key, value = _operands(given)
        layer = self._products.attentions.get(id(module), "")
        kernel, forward, backward = _attention_formats(query.dtype, in_high=bool(given["bf16_backward"]))
        heads = query.shape[-2]
        size = value.shape[-1]
        result = self._own(query, call_own, lambda: query.new_empty(*query.shape[:-2], heads * size))
        sizes = AttentionSizes.of(query, key, value, form)
        masks = {"qkv_format": form}
        for name in ("attn_mask_type", "window_size"):
            masks[name] = given[name]
            if given[name] is None:
                masks[name] = getattr(module, name)
        share = attention_mask_share(masks, sizes.rows, sizes.columns)
        if _counts():
            self._products.see_attention(layer, sizes, *forward, kernel, mask_share=share)

        def back() -> None:
            self._products.see_attention(layer, sizes, *backward, kernel, backward=True, mask_share=share)

        return _with_backward(result, back, query, key, value)


def _counts() -> bool:
    """Return whether a forward belongs to training, and is not recomputed by an activation checkpoint."""
    return not is_in_backward() and not is_evaluation_forward()


# ---------------------------------------------------------------------- results on the meta device


def _results(module: Any, inp: torch.Tensor) -> Any:
    features = te_modules.of(module).features(module)[-1][1]
    dtype = inp.dtype
    for device in ("cpu", "cuda"):
        if torch.is_autocast_enabled(device):
            dtype = torch.get_autocast_dtype(device)
    out = inp.new_empty(*inp.shape[:-1], features, dtype=dtype)
    results = [out]
    if module.return_bias:
        bias = inp.new_empty(features, dtype=dtype)
        for name, parameter in module.named_parameters(recurse=False):
            if name.endswith("bias"):
                bias = parameter.detach()
        results.append(bias)
    if getattr(module, "return_layernorm_output", False):
        results.append(torch.empty_like(inp, dtype=dtype))
    if len(results) == 1:
        return out
    return tuple(results)


def _with_backward(result: torch.Tensor, back: Callable[[], None], *sources: Any) -> torch.Tensor:
    tensor: torch.Tensor = _WithBackward.apply(result, back, *sources)  # type: ignore[no-untyped-call]
    return tensor


class _WithBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, result: torch.Tensor, back: Callable[[], None], *sources: Any) -> torch.Tensor:
        ctx.back = back
        ctx.like = [(source.shape, source.dtype, source.device) for source in sources]
        return result.detach().clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        ctx.back()
        results: list[torch.Tensor | None] = [None, None]
        for (shape, dtype, device), is_needed in zip(ctx.like, ctx.needs_input_grad[2:], strict=True):
            results.append(None)
            if is_needed:
                results[-1] = torch.zeros(shape, dtype=dtype, device=device)
        return tuple(results)


# ---------------------------------------------------------------------- recipes and attention


_Formats = tuple[tuple[str, str], tuple[str, str]]


def _operands(given: Mapping[str, Any]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    query = given["query_layer"]
    key = given["key_layer"]
    value = given["value_layer"]
    if given["qkv_layer"] is not None:
        query, key, value = given["qkv_layer"].unbind(given["qkv_interleave_dim"])
    elif given["kv_layer"] is not None:
        key, value = given["kv_layer"].unbind(given["qkv_interleave_dim"])
    return query, key, value


def _attention_formats(dtype: torch.dtype, *, in_high: bool) -> tuple[str, _Formats, _Formats]:
    """Return the kernel of attention, and the formats of the operands of ``qk`` and ``pv`` in forward and backward."""
    recipe = current_recipe()
    high = dtype_name(dtype)
    same: _Formats = (high, high), (high, high)
    if recipe is None or not recipe.fp8_dpa:
        return ANY_KERNEL, same, same
    value = recipe.fp8_format.name
    gradient = value
    if value == "HYBRID":
        value = "E4M3"
        gradient = "E5M2"
    scaling = "FP8"
    if recipe.mxfp8():
        scaling = "MXFP8"
    value = f"{scaling} {value}"
    gradient = f"{scaling} {gradient}"
    forward: _Formats = (value, value), (value, value)
    if in_high or not int(os.environ.get("NVTE_FP8_DPA_BWD", "1")):
        return FUSED, forward, same
    return FUSED, forward, ((gradient, value), (gradient, value))
