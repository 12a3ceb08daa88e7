"""Calls the modules of Transformer Engine for the sizes of their matrix products alone.

    with stand_ins(model, modules, products) as seen:
        ...                    # the model's forward and backward
    seen.recipes               # layer -> the recipe in force when it was called; None outside of te.autocast

While they are replaced, the forwards of these classes report their GEMMs and attention, with their backward, and
quantize nothing. On the meta device a result has the right shape. On any other one it is computed by the module itself
in high precision, whose GEMMs take any shape.

Read from Transformer Engine 2.20.2: the forwards of ``pytorch/module/{linear,layernorm_linear,layernorm_mlp,
grouped_linear}.py``, of ``pytorch/ops/{op,sequential}.py``, and of ``DotProductAttention``, which are replaced; and
``dpa_utils.get_attention_backend``, which ``DotProductAttention.forward`` asks for the kernel once it has made its
quantizers.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from te_precision_callbacks.base.vocabulary import class_names
from te_precision_callbacks.coverage.gemm_precision import FROZEN
from te_precision_callbacks.coverage.masks import share_left
from te_precision_callbacks.coverage.planned_products import gemm_sizes
from te_precision_callbacks.coverage.precision_audit import LayerGemm, dtype_name, gemms_left_out
from te_precision_callbacks.coverage.seen_product import ANY_KERNEL, FUSED, OTHER_KERNEL, UNFUSED_KERNEL
from te_precision_callbacks.coverage.seen_products import ModelProducts, format_made_by
from te_precision_callbacks.coverage.shapes import layer_features
from te_precision_callbacks.layers.forwards import NO_BACKWARD, in_evaluation
from te_precision_callbacks.layers.gemm_events import AttentionSizes
from te_precision_callbacks.layers.naming import Model, NamedModule, named_operations
from te_precision_callbacks.reference import is_installed

_OF_MASK = ("attn_mask_type", "window_size")
_NAMED = ("Linear", "LayerNormLinear", "LayerNormMLP", "GroupedLinear")
_MLP_ACTIVATIONS_OF_HALF_THE_SIZE = "GLU"  # the end of their names, in modules and in te.ops
_KEEP_SHAPE = frozenset(
    {
        *("Bias", "ConstantScale", "Dropout", "Identity", "L2Normalization", "LayerNorm", "Quantize", "RMSNorm"),
        *("GELU", "QGELU", "ReLU", "SReLU", "SiLU"),
    }
)
"""Operations of ``te.ops`` whose result has the shape of their input."""


@dataclass
class SeenLayers:
    """What is known of the layers of Transformer Engine that were called.

    Attributes:
        recipes: layer -> the recipe in force in its first call; None for high precision.
        tokens: layer -> the rows of its input, of each call.
        left_out: the GEMMs that a backward leaves out, and why.
        without_kernel: attention that no kernel takes.
    """

    recipes: dict[str, Any] = field(default_factory=dict)
    tokens: dict[str, list[int]] = field(default_factory=dict)
    left_out: dict[LayerGemm, str] = field(default_factory=dict)
    without_kernel: list[str] = field(default_factory=list)


@contextlib.contextmanager
def stand_ins(model: Model, modules: Sequence[NamedModule], products: ModelProducts) -> Iterator[SeenLayers]:
    """Let the forwards of Transformer Engine's classes report to ``products`` what they multiply.

    Args:
        model: the model that is called.
        modules: its modules of Transformer Engine.
        products: watches the model.
    """
    import transformer_engine.pytorch as te
    from transformer_engine.pytorch.ops.op import BasicOperation, FusedOperation
    from transformer_engine.pytorch.quantization import FP8GlobalStateManager

    standing = _StandIns(model, modules, products)
    replaced: dict[Any, Callable[..., Any]] = {
        **{getattr(te, name): standing.module for name in _NAMED},
        te.DotProductAttention: standing.attention,
        BasicOperation: standing.operation,
        FusedOperation: standing.operations,
        te.ops.Sequential: standing.operations,
    }
    before = {owner: owner.forward for owner in replaced}
    state, FP8GlobalStateManager.quantization_state = (
        FP8GlobalStateManager.quantization_state,
        type(FP8GlobalStateManager.quantization_state)(),
    )
    try:
        for owner, stand_in in replaced.items():
            owner.forward = _method(owner.forward, stand_in)
        yield standing.seen
    finally:
        FP8GlobalStateManager.quantization_state = state
        for owner, own in before.items():
            owner.forward = own


def _method(own: Callable[..., Any], stand_in: Callable[..., Any]) -> Callable[..., Any]:
    """The forward of a class: ``stand_in`` gets the module, the class's own forward, and the arguments by name."""
    signature = inspect.signature(own)

    @functools.wraps(own)
    def forward(self: Any, *arguments: Any, **keywords: Any) -> Any:
        bound = signature.bind(self, *arguments, **keywords)
        bound.apply_defaults()
        given = {name: value for name, value in bound.arguments.items() if name != "self"}
        return stand_in(self, functools.partial(own, self, *arguments, **keywords), given)

    return forward


class _StandIns:
    """Arguments are those of :func:`stand_ins`."""

    def __init__(self, model: Model, modules: Sequence[NamedModule], products: ModelProducts) -> None:
        self.seen = SeenLayers()
        self._products = products
        self._named = {id(named.module): tuple(layer.name for layer in named.layers) for named in modules}
        self._operations = {id(found.module): found.layers for found in named_operations(model)}

    # ------------------------------------------------------------------ layers

    def module(self, module: Any, call_own: functools.partial[Any], given: Mapping[str, Any]) -> Any:
        """In place of the forward of a module with GEMMs."""
        inp, layers = given["inp"], self._named.get(id(module), ())
        _require_columns(inp, layer_features(module)[0][0], layers[0] if layers else type(module).__name__)
        own = self._own(inp, call_own, lambda: _results(module, inp))
        groups = len(layers) if hasattr(module, "num_gemms") else 1
        rows = [_rows(module, inp)] if groups == 1 else [int(split) for split in given["m_splits"]]
        left_out = gemms_left_out(module, layers, input_needs_gradient=inp.requires_grad)
        sizes = dict(zip(layers, layer_features(module), strict=bool(layers)))
        of_layer = dict(zip(layers, rows if groups > 1 else rows * len(layers), strict=True))
        back = self._tell(of_layer, sizes, left_out, backwards=hasattr(module, "fc1_weight"))
        results = own if isinstance(own, tuple) else (own,)
        told = _told(results[0], back, inp, *module.parameters(recurse=False))
        return (told, *results[1:]) if isinstance(own, tuple) else told

    def operation(self, module: Any, call_own: functools.partial[Any], given: Mapping[str, Any]) -> Any:
        """In place of the forward of one operation of ``te.ops``."""
        inp = given["input"]
        if given.get("extra_inputs"):
            raise NotImplementedError(f"te.ops.{type(module).__name__} with several inputs cannot be planned")
        layers = self._operations.get(id(module), ())
        if layers:
            _require_columns(inp, module.local_in_features, layers[0])
        result = self._own(inp, call_own, lambda: _result_of_operation(module, inp))
        weights = [p for name, p in module.named_parameters(recurse=False) if name.startswith("weight")]
        frozen = not any(weight.requires_grad for weight in weights)
        left_out = {LayerGemm(layer, "wgrad"): FROZEN for layer in layers} if frozen else {}  # there is always a dgrad
        of_layer = dict.fromkeys(layers, inp.numel() // max(1, inp.shape[-1]))
        sizes = dict.fromkeys(layers, (module.in_features, module.out_features)) if layers else {}
        back = self._tell(of_layer, sizes, left_out)
        return _told(result, back, inp, *module.parameters(recurse=False))

    def operations(self, module: Any, call_own: functools.partial[Any], given: Mapping[str, Any]) -> Any:
        """In place of the forward of a ``te.ops.Sequential``, or of an operation that consists of several."""
        if given.get("extra_inputs"):
            raise NotImplementedError(f"te.ops.{type(module).__name__} with several inputs cannot be planned")
        x = given["input"]
        for part in module.basic_ops if hasattr(module, "basic_ops") else module:
            x = part(x)
        return x

    def _tell(
        self,
        tokens: Mapping[str, int],
        sizes: Mapping[str, tuple[int, int]],
        left_out: Mapping[LayerGemm, str],
        *,
        backwards: bool = False,
    ) -> Callable[[], None]:
        """Report the forward of layers; returns a function that reports their backward.

        Args:
            tokens: layer -> the rows of its input.
            sizes: layer -> in_features and out_features.
            left_out: the GEMMs that the backward leaves out.
            backwards: whether the last layer's backward is the first.
        """
        of_layer = {layer: gemm_sizes(rows, *sizes[layer]) for layer, rows in tokens.items()}
        if _counts():
            self.seen.left_out.update(left_out)
            for layer, gemms in of_layer.items():
                self.seen.recipes.setdefault(layer, recipe_now())
                self.seen.tokens.setdefault(layer, []).append(tokens[layer])
                self._products.see_gemm(layer, "fprop", gemms["fprop"])

        def back() -> None:
            for layer in reversed(of_layer) if backwards else of_layer:
                for gemm in ("dgrad", "wgrad"):
                    if LayerGemm(layer, gemm) not in left_out:
                        self._products.see_gemm(layer, gemm, of_layer[layer][gemm])

        return back

    def _own(self, inp: torch.Tensor, call_own: Callable[[], Any], shaped: Callable[[], Any]) -> Any:
        """A module's own result without gradients, and without reporting its products; on meta its shape alone."""
        if inp.is_meta:
            return shaped()
        import transformer_engine.pytorch as te

        with self._products.muted(), torch.no_grad(), te.autocast(enabled=False):
            return call_own()

    # ------------------------------------------------------------------ attention

    def attention(self, module: Any, call_own: functools.partial[Any], given: Mapping[str, Any]) -> Any:
        """In place of the forward of ``DotProductAttention``."""
        form = given["qkv_format"] or module.qkv_format
        query, key, value = tensors = _operands(given)
        layer = self._products.attentions.get(id(module), "")
        kernel, forward, backward = _attention_formats(module, call_own, given, tensors)
        if not kernel and layer not in self.seen.without_kernel:
            self.seen.without_kernel.append(layer)
        heads, size = query.shape[-2], value.shape[-1]
        result = self._own(query, call_own, lambda: query.new_empty(*query.shape[:-2], heads * size))
        sizes = AttentionSizes.of(query, key, value, form)
        masked = {name: getattr(module, name) if given[name] is None else given[name] for name in _OF_MASK}
        share = share_left({**masked, "qkv_format": form}, sizes.rows, sizes.columns)
        if _counts():
            self._products.see_attention(layer, sizes, *forward, kernel, mask_share=share)

        def back() -> None:
            self._products.see_attention(layer, sizes, *backward, kernel, backward=True, mask_share=share)

        return _told(result, back, query, key, value)


def _counts() -> bool:
    """Whether a forward is one of training, and not computed again by an activation checkpoint."""
    return torch._C._current_graph_task_id() == NO_BACKWARD and not in_evaluation()


# ---------------------------------------------------------------------- results on the meta device


def _require_columns(inp: torch.Tensor, columns: int, layer: str) -> None:
    """Refuse an input that the first GEMM of a layer cannot multiply: on the meta device nothing else would.

    Raises:
        TypeError: the last dimension is not ``columns``.
    """
    if not inp.dim() or inp.shape[-1] != columns:
        raise TypeError(
            f"{layer!r} takes an input whose last dimension is {columns}, not one of shape {list(inp.shape)}"
        )


def _rows(module: Any, inp: torch.Tensor) -> int:
    """The rows that a module's first GEMM multiplies."""
    rows = inp.numel() // max(1, inp.shape[-1])
    gathers = hasattr(module, "fc1_weight") or module.parallel_mode == "column"
    return rows * module.tp_size if module.sequence_parallel and gathers else rows


def _results(module: Any, inp: torch.Tensor) -> Any:
    """What the forward of a module returns, by shape."""
    is_mlp, lengths = hasattr(module, "fc1_weight"), list(inp.shape[:-1])
    if module.sequence_parallel and not is_mlp:
        gathers = module.parallel_mode == "column"
        lengths[0] = lengths[0] * module.tp_size if gathers else lengths[0] // module.tp_size
    features = layer_features(module)[-1][1]
    dtype = _activation_dtype(inp)
    out = inp.new_empty(*lengths, features, dtype=dtype)
    results = [out]
    if module.return_bias:
        biases = [p for name, p in module.named_parameters(recurse=False) if name.endswith("bias")]
        results.append(inp.new_empty(features, dtype=dtype) if not biases else biases[-1].detach())
    if getattr(module, "return_layernorm_output", False):
        gathered = module.return_layernorm_output_gathered and module.sequence_parallel
        first = inp.shape[0] * (module.tp_size if gathered else 1)
        results.append(inp.new_empty(first, *inp.shape[1:], dtype=dtype))
    return out if len(results) == 1 else tuple(results)


def _activation_dtype(inp: torch.Tensor) -> torch.dtype:
    for device in ("cuda", "cpu"):
        if torch.is_autocast_enabled(device):
            return torch.get_autocast_dtype(device)
    return inp.dtype


def _result_of_operation(module: Any, inp: torch.Tensor) -> torch.Tensor:
    name = type(module).__name__
    if name == "BasicLinear":
        return inp.new_empty(*inp.shape[:-1], module.local_out_features)
    if name == "Reshape":
        return inp.reshape(module._shape)
    if name.endswith(_MLP_ACTIVATIONS_OF_HALF_THE_SIZE):
        return inp.new_empty(*inp.shape[:-1], inp.shape[-1] // 2)
    if _KEEP_SHAPE.isdisjoint(class_names(module)):
        raise NotImplementedError(f"the shape of the result of te.ops.{name} is not known")
    return torch.empty_like(inp)


def _told(result: torch.Tensor, back: Callable[[], None], *sources: Any) -> torch.Tensor:
    """A result whose backward calls ``back``, with gradients for its sources."""
    told: torch.Tensor = _Told.apply(result, back, *sources)  # type: ignore[no-untyped-call]
    return told


class _Told(torch.autograd.Function):
    """Returns a tensor, and calls a function in its backward; all gradients are zero."""

    @staticmethod
    def forward(ctx: Any, result: torch.Tensor, back: Callable[[], None], *sources: Any) -> torch.Tensor:
        ctx.back = back
        ctx.like = [(source.shape, source.dtype, source.device) for source in sources]
        return result.detach().clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        ctx.back()
        needed = ctx.needs_input_grad[2:]
        made = [
            torch.zeros(shape, dtype=dtype, device=device) if needs else None
            for (shape, dtype, device), needs in zip(ctx.like, needed, strict=True)
        ]
        return None, None, *made


# ---------------------------------------------------------------------- recipes, and the kernel of attention


def recipe_now() -> Any:
    """The recipe in force; None outside of ``te.autocast(enabled=True)``."""
    from transformer_engine.pytorch.quantization import FP8GlobalStateManager

    return FP8GlobalStateManager.get_fp8_recipe() if FP8GlobalStateManager.is_fp8_enabled() else None


_Formats = tuple[tuple[str, str], tuple[str, str]]
"""Of the operands of ``qk``, and of ``pv``."""


class _ChosenError(Exception):
    """Ends a forward of attention that has chosen its kernel."""


def _operands(given: Mapping[str, Any]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries, keys and values of attention, which may be packed in one tensor or two."""
    query, key, value = (given[f"{name}_layer"] for name in ("query", "key", "value"))
    if given["qkv_layer"] is not None:
        query, key, value = given["qkv_layer"].unbind(given["qkv_interleave_dim"])
    elif given["kv_layer"] is not None:
        key, value = given["kv_layer"].unbind(given["qkv_interleave_dim"])
    return query, key, value


def _attention_formats(
    module: Any, own: functools.partial[Any], given: Mapping[str, Any], tensors: Sequence[torch.Tensor]
) -> tuple[str, _Formats, _Formats]:
    """The kernel that Transformer Engine takes for attention, empty if there is none, and the formats of operands,
    forward and backward."""
    from transformer_engine.pytorch.attention.dot_product_attention import utils

    high = dtype_name(tensors[0].dtype)
    same: _Formats = (high, high), (high, high)
    asked, chosen = _ask_for_kernel(module, own)
    flash, _, fused, _, unfused, *_ = chosen
    if unfused or not (flash or fused):
        return _without_fp8() if unfused else "", same, same
    kernel = FUSED if fused else OTHER_KERNEL
    if not (asked.fp8 and asked.fp8_meta["recipe"].fp8_dpa):
        return kernel, same, same
    quantizers = utils.get_attention_quantizers(True, asked.quantizers)
    qkv, _, probabilities, _, gradient, scores = quantizers
    operand = format_made_by(qkv, high)
    forward = (operand, operand), (format_made_by(probabilities, operand), operand)
    if not int(os.environ.get("NVTE_FP8_DPA_BWD", "1")) or given["bf16_backward"]:
        return kernel, forward, same
    of_gradient = format_made_by(gradient, high)
    return kernel, forward, ((format_made_by(scores, of_gradient), operand), (of_gradient, operand))


def _without_fp8() -> str:
    """The kernel of attention in high precision: the reference backend has one, and a GPU in its place has others."""
    return ANY_KERNEL if is_installed() else UNFUSED_KERNEL


def _ask_for_kernel(module: Any, own: functools.partial[Any]) -> tuple[Any, Sequence[Any]]:
    """Run a copy of a module up to the choice of its kernel.

    Returns:
        The copy, with the quantizers that it has made; and what ``get_attention_backend`` has returned.
    """
    from transformer_engine.pytorch.attention.dot_product_attention import dot_product_attention as attention
    from transformer_engine.pytorch.attention.dot_product_attention import utils

    asked = copy.copy(module)
    asked.__dict__["fp8_meta"] = {"fp8_checkpoint": False, "fp8_group": module.fp8_meta.get("fp8_group")}
    asked.__dict__["quantizers"] = {"scaling_fwd": [], "scaling_bwd": []}
    asked.__dict__["fp8_initialized"] = asked.__dict__["fp8_meta_tensors_initialized"] = False
    memory: dict[int, torch.Tensor] = {}
    upstream, kept = utils.get_attention_backend, dict(attention._attention_backends)

    def choose(parameters: Any) -> Any:
        raise _ChosenError(upstream(parameters))

    utils.get_attention_backend = choose
    attention._attention_backends["attention_params"] = None
    try:
        with torch.no_grad(), torch._C.DisableTorchFunction():  # so that new tensors are not on the meta device
            arguments = [_with_memory(value, memory) for value in own.args[1:]]
            keywords = {name: _with_memory(value, memory) for name, value in own.keywords.items()}
            own.func(asked, *arguments, **keywords)
    except _ChosenError as chosen:
        return asked, chosen.args[0]
    finally:
        utils.get_attention_backend = upstream
        attention._attention_backends.clear()
        attention._attention_backends.update(kept)
    raise NotImplementedError("this forward of Transformer Engine's attention chooses no kernel")


def _with_memory(value: Any, memory: dict[int, torch.Tensor]) -> Any:
    """For a tensor on the meta device one on the real device, whose values are undefined: views share memory again."""
    if not isinstance(value, torch.Tensor) or not value.is_meta:
        return value
    storage = value.untyped_storage()
    if storage._cdata not in memory:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        memory[storage._cdata] = torch.empty(storage.nbytes(), dtype=torch.uint8, device=device)
    made = memory[storage._cdata].view(value.dtype)
    return made.as_strided(value.shape, value.stride(), value.storage_offset())
