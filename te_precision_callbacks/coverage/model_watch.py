"""The matrix products of a model's steps: Transformer Engine's from the step's table, torch's from its operators.

The calls of the model and their backwards are watched. In counted calls a dispatch mode sees torch's operators.

One call of each kind is counted, and represents the others, also in later steps. The mode does not change results, runs
each operator exactly once, and propagates exceptions.

Read from torch 2.13: ``Module._compiled_call_impl``, which replaces a module's call; ``torch.autograd.
_engine_run_backward``, which uses the modes of the calling thread in its own threads; ``TorchDispatchMode.
ignore_compile_internals``, which lets ``torch.compile`` compile under the mode; ``supports_higher_order_operators``;
``_get_current_dispatch_mode_stack``, ``_get_current_dispatch_mode``, ``_pop_mode_temporarily`` and
``torch._C._len_torch_dispatch_stack``.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, TypeVar

import torch
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _get_current_dispatch_mode,
    _get_current_dispatch_mode_stack,
    _pop_mode_temporarily,
)

from te_precision_callbacks.base.failures import Report
from te_precision_callbacks.base.replaced import AnyFunction, Replacements
from te_precision_callbacks.base.vocabulary import class_names
from te_precision_callbacks.coverage.formats import format_of
from te_precision_callbacks.coverage.history import CountedStep
from te_precision_callbacks.coverage.marks import made_in_thread
from te_precision_callbacks.coverage.micro_batches import NOT_CALLED, Kind, ModelCall, ModelCalls, Parts, leaves
from te_precision_callbacks.coverage.operator_products import REDUCING, KeptState, OperatorProducts
from te_precision_callbacks.coverage.products import OTHER_KERNEL, CountedKinds, SeenProduct
from te_precision_callbacks.coverage.step_table import AttentionCall, StepTable, Unseen, attention_sizes
from te_precision_callbacks.layers.forwards import (
    CallOfOneModule,
    ForwardKind,
    compiled_in_callers_only,
    is_in_backward,
    outside_of_dynamo,
)
from te_precision_callbacks.layers.naming import (
    SURROUNDS,
    Model,
    NamedTorchModule,
    modules_of,
    named_attention,
    roots_of,
)
from te_precision_callbacks.te import modules as te_modules
from te_precision_callbacks.te.state import has_state

ResultT = TypeVar("ResultT")

_SHAPE = operator.attrgetter("shape")


@functools.lru_cache(1024)
def _kinds_of(classes: tuple[type, ...]) -> tuple[Sequence[bool], Sequence[bool]]:
    """Return which arguments of these classes are tensors, and which are bools or strings."""
    return [issubclass(kind, torch.Tensor) for kind in classes], [issubclass(kind, (bool, str)) for kind in classes]


class UnobservedForwards:
    """Forwards in the training that were not observed: in evaluation mode with gradients, or without gradients.

    A forward without gradients belongs to the training in a call of the model, and outside of it if it runs in each
    step.

    Attributes:
        reasons: id of a module of Transformer Engine -> why its forwards were not observed.
        with_backward: ids of modules with a forward in evaluation mode and a backward of it that added to gradients.
    """

    def __init__(self) -> None:
        self.reasons: dict[int, str] = {}
        self.with_backward: set[int] = set()
        self._outside: dict[int, str] = {}
        self._in_each_step: dict[int, str] | None = None

    def note(self, module: torch.nn.Module, *, in_call: bool) -> None:
        if torch.is_grad_enabled():
            self.reasons[id(module)] = "evaluation mode"
            return
        why = "torch.inference_mode()" if torch.is_inference_mode_enabled() else "torch.no_grad()"
        reasons = self.reasons if in_call else self._outside
        reasons.setdefault(id(module), why)

    def end_step(self) -> None:
        if self._in_each_step is None:
            self._in_each_step = self._outside
        else:
            both = self._in_each_step.keys() & self._outside.keys()
            self._in_each_step = {key: self._outside[key] for key in both}
            self.reasons = {**self._in_each_step, **self.reasons}
        self._outside = {}


class ModelProducts:
    """The matrix products of a model's steps, from the calls of the model, until :meth:`close`.

    Args:
        is_paused: returns whether the integration evaluates.
        table: of the step, which gets the layers without a visible GEMM.
        count: called before the first counted call of a step, to enable the tap.

    Attributes:
        failure: the reason why counting stopped; empty without a failure.
        unobserved: Transformer Engine's forwards in the training that were not observed.
        around_backward: contexts to enter around each backward that adds to gradients.
        begin_call: called with the id of the model before each call of it, until counting has failed.
        on_failure: called when counting has failed.
        has_double_backward: whether a backward of the model had ``create_graph=True``.
        backwards: the number of backwards that added to gradients.
        is_tapped: whether the forwards of Transformer Engine's modules with known GEMMs are noted in every step, by
            :meth:`note_forward`.
        is_evaluation_mode: returns whether forwards of modules in evaluation mode are evaluations.
        attentions: id of a module of Transformer Engine's attention -> its path.
    """

    def __init__(
        self,
        report: Report,
        is_paused: Callable[[], bool],
        table: StepTable,
        count: Callable[[], None] = lambda: None,
    ) -> None:
        self.table = table
        self.state = KeptState(report, lambda: self.operators.current_call())
        self.around_backward: Sequence[Callable[[], AbstractContextManager[None]]] = ()
        self.begin_call: Callable[[int], object] = lambda _: None
        self.on_failure: Callable[[], object] = lambda: None
        self.is_evaluation_mode: Callable[[], bool] = lambda: True
        self.is_tapped = False
        self._adds_to_gradients = False
        self.backwards = 0
        self._report = report
        self._is_paused = is_paused
        self._count = count
        self._replaced = Replacements(keeps_later=True)
        self.close()

    def watch_model(self, model: Model, names: Mapping[int, str]) -> None:
        """Count the products of a model from the next step on, and stop counting any other model.

        ``names`` maps ids of modules to paths.
        """
        self.close()
        modules: dict[int, NamedTorchModule] = {}
        for module in modules_of(model):
            if id(module) in names:
                modules[id(module)] = names[id(module)], module
        self.attentions = named_attention(model, names)
        for key, path in self.attentions.items():
            for part in modules[key][1].modules():
                modules[id(part)] = path, part
        self._modules = modules
        self.operators = self._new_operators()
        self.state.watch(model)
        self.active = True
        self.counting = True
        roots = roots_of(model)
        self._kinds = CountedKinds(next((modules[id(root)][0] for root in roots if id(root) in modules), ""))
        whole = set(map(id, roots))
        for root in roots:
            for number, module in enumerate(root.modules()):
                if id(module) not in whole and self._may_multiply(module):
                    self._wrap_module(number, module)
            self._wrap_root(root)
        engine: Any = torch.autograd
        self._replaced.replace(engine, "_engine_run_backward", self._wrap_backward(engine._engine_run_backward))

    def take_step(self) -> CountedStep | None:
        """End a step; None if it had no products."""
        if not self.active:
            return None
        try:
            gemms = self.table.step_gemms()
            is_first = self.calls.is_first
            step_calls = self.calls.end_step()
            parts: Parts = Counter() if self.failure else self._keep_products(step_calls)
            has_gemms = gemms.calls or gemms.attention or gemms.unseen
            if not parts and not has_gemms and not self.failure:
                return None
            why_not = self.failure or ("" if parts else NOT_CALLED)
            return CountedStep(gemms, parts, self._kinds, self.state.rows() if is_first else None, why_not)
        finally:
            self._end_step()

    def _end_step(self) -> None:
        if self.counting:
            self.operators = self._new_operators()
        if self.counting and not self.calls.is_first:
            self.state.close()
        self.counting = self.active and not self.failure and self.calls.should_count

    def _keep_products(self, step_calls: Sequence[ModelCall]) -> Parts:
        parts: Parts = Counter()
        counted: dict[Kind, list[ModelCall]] = {}
        for call in step_calls:
            parts[call.kind, False] += 1
            if call.may_have_backward:
                parts[call.kind, True] += 1
            if call.is_counted:
                counted.setdefault(call.kind, []).append(call)
        for kind, calls in counted.items():
            self._kinds.put(kind, calls, self.calls)
        return parts

    def note_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        if self.counting and self.calls.is_first:
            self.state.note_step(optimizer)

    def close(self) -> None:
        self.active = False
        self.counting = False
        self.has_double_backward = False
        self.unobserved = UnobservedForwards()
        self.state.close()
        self._replaced.restore()
        self.failure = ""
        self.calls = ModelCalls()
        self._modules = {}
        self.attentions = {}
        self._kinds = CountedKinds("")
        self.operators = self._new_operators()

    def _new_operators(self) -> OperatorProducts:
        return OperatorProducts(self._modules, self.state, self.calls, self.table)

    def _wrap_module(self, number: int, module: Any) -> None:
        compiled_call = module._compiled_call_impl
        upstream = compiled_call or module._call_impl
        here = self.calls.thread_call
        is_te = has_state(module)
        is_unknown = is_te and te_modules.is_unknown(type(module))

        def part(*arguments: Any, **keywords: Any) -> Any:
            call = here.call
            if is_unknown and module.training and self.is_watching() and torch.is_grad_enabled():
                self.note_unknown(module)
            if call is None:
                return upstream(*arguments, **keywords)
            try:
                values = (*arguments, *keywords.values())
                are_tensors, are_options = _kinds_of(tuple(map(type, values)))
                shapes = map(_SHAPE, itertools.compress(values, are_tensors))
                call.path = hash((call.path, number, *shapes, *itertools.compress(values, are_options)))
            except Exception as error:
                self.fail(error)
            if not is_te:
                return upstream(*arguments, **keywords)
            call.nodes += made_in_thread()
            result = upstream(*arguments, **keywords)
            call.nodes -= made_in_thread()
            return result

        compiled_in_callers_only(part)  # after a graph break its module is compiled, without it
        setattr(part, SURROUNDS, compiled_call)
        self._replaced.replace(module, "_compiled_call_impl", part)

    def _may_multiply(self, module: torch.nn.Module) -> bool:
        """Return whether a module may affect products by itself.

        Not torch's own without parameters and children; and where forwards are noted, of Transformer Engine's own only
        attention, operations, modules with unknown GEMMs, and those in graphs of ``torch.compile``.
        """
        kind = type(module)
        if kind.__module__.startswith("torch.nn.modules."):
            return bool(module._parameters or module._modules)
        row = te_modules.find(kind)
        if not self.is_tapped:
            return True
        if row is not None:
            return row.is_operation or te_modules.is_compiled_operator(module)
        is_composed = kind.__module__.startswith("transformer_engine.") and ".ops." not in kind.__module__
        return not is_composed or te_modules.is_attention(module) or te_modules.is_unknown(kind)

    def note_forward(self, module: Any, kind: ForwardKind) -> ModelCall | None:
        """Note a forward of a module of Transformer Engine with known GEMMs; return its call."""
        call = self.calls.thread_call.call
        if kind is ForwardKind.EVALUATION or kind is ForwardKind.UNTOUCHED:
            if self.is_watching():
                self.unobserved.note(module, in_call=call is not None)
            return None
        return call if self.is_tapped else None

    def note_unknown(self, module: torch.nn.Module) -> None:
        """Note the forward, and the backward, of a module of Transformer Engine with unknown GEMMs."""
        path, _ = self._modules[id(module)]
        why = f"GEMMs of {type(module).__name__}, an unknown module of Transformer Engine"
        self.table.unseen |= {Unseen(path, backward, why) for backward in (False, True)}

    def note_backward_in_evaluation(self, module: int) -> None:
        """Note a backward of a module's forward in evaluation mode, given the module's id."""
        if self._adds_to_gradients and self.is_evaluation_mode():
            self.unobserved.with_backward.add(module)

    def _wrap_root(self, root: Any) -> None:
        original = root._compiled_call_impl
        around = CallOfOneModule(self._wrap_call(root, original or root._call_impl, is_forward=True), type(None))
        setattr(around, SURROUNDS, original)
        self._replaced.replace(root, "_compiled_call_impl", around)
        if "LightningModule" in class_names(root):
            original = root.training_step
            step = self._wrap_call(root, original, is_forward=False)
            around = CallOfOneModule(step, functools.partial, type(root).training_step, root)
            # Lightning unwraps once, and passes batch_idx to a function that takes it, or any arguments.
            around.__wrapped__ = getattr(original, "__wrapped__", original)
            self._replaced.replace(root, "training_step", around)

    def _wrap_call(self, root: Any, upstream: AnyFunction, *, is_forward: bool) -> AnyFunction:

        @functools.wraps(upstream)
        def around(*arguments: Any, **keywords: Any) -> Any:
            if not self.is_watching() or not torch.is_grad_enabled() or is_in_backward():
                return upstream(*arguments, **keywords)
            calls = self.calls
            outer = calls.current
            call = None
            if outer is None:
                self.begin_call(id(root))
                call = self.run_guarded(lambda: calls.begin(root, arguments, keywords, integers_count=is_forward))
            if call is not None and call.is_counted and not self.counting:
                self.counting = True
                self.run_guarded(self._count)
            try:
                with self._counting_operators() if call is not None and call.is_counted else nullcontext():
                    result = upstream(*arguments, **keywords)
                self.run_guarded(lambda: self._end_call(call, result))
            finally:
                if outer is None:
                    calls.leave()
            return result

        not_compiled: AnyFunction = torch.compiler.disable(around, recursive=False)  # type: ignore[no-untyped-call]
        return not_compiled

    def _end_call(self, call: ModelCall | None, result: Any) -> None:
        if call is not None:
            if call.is_counted:
                self.operators.nodes.bind(leaves(result))
            self.calls.end(call, result)

    def _wrap_backward(self, upstream: AnyFunction) -> AnyFunction:

        @functools.wraps(upstream)
        def around(roots: Any, *arguments: Any, **keywords: Any) -> Any:
            if not self.is_watching():
                return upstream(roots, *arguments, **keywords)
            if is_in_backward():  # a nested backward: the outer one decides whether it is counted
                self.run_guarded(lambda: self.operators.nodes.bind(roots))
                return upstream(roots, *arguments, **keywords)
            with ExitStack() as stack:
                if keywords.get("accumulate_grad"):  # not in torch.autograd.grad()
                    self._adds_to_gradients = True
                    self.backwards += 1
                    stack.callback(setattr, self, "_adds_to_gradients", False)
                    for context in self.around_backward:
                        stack.enter_context(context())
                watched = self.run_guarded(lambda: self._watch_backward(roots, *arguments))
                stack.enter_context(watched or nullcontext())
                return upstream(roots, *arguments, **keywords)

        return around

    def _watch_backward(
        self, roots: Iterable[Any], gradients: Any = None, keeps: bool = False, creates: bool = False, *_: Any
    ) -> AbstractContextManager[Any]:
        """Watch a backward, with the arguments of ``_engine_run_backward``; ``creates``: a graph of the backward."""
        self.operators.nodes.bind(roots)
        call = self.calls.begin_backward(roots)
        self.has_double_backward |= creates and call is not None
        if call is not None and call.is_counted:
            if self.sees_operators():
                return nullcontext()
            return self._counting_operators(call)
        distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
        if self.calls.is_first and distributed and not self.state.reduced:
            return SeeingMode(self, only_reducing=True)
        if self.counting:
            return self.operators.in_backward_of(call)
        return nullcontext()

    @contextmanager
    def _counting_operators(self, backward_of: ModelCall | None = None) -> Iterator[None]:
        self.run_guarded(lambda: self.operators.weights.read(self._modules.values()))
        with self.operators.in_backward_of(backward_of), SeeingMode(self):
            yield

    def sees_operators(self) -> bool:
        modes = _get_current_dispatch_mode_stack()
        return any(isinstance(mode, SeeingMode) and mode.watcher is self and not mode.only_reducing for mode in modes)

    def is_watching(self) -> bool:
        return self.active and not self.failure and not self._is_paused()

    @outside_of_dynamo
    def run_guarded(self, do: Callable[[], ResultT]) -> ResultT | None:
        """Run a function and keep its failure from training; skipped after a failure."""
        try:
            if self.failure:
                return None
            return do()
        except Exception as error:
            self.fail(error)
            return None

    def fail(self, error: Exception) -> None:
        first = not self.failure
        self.failure = f"all products of torch: {type(error).__name__}: {error}"
        if first:
            self.on_failure()
            self._report("counting the matrix products of", "a step", error)

    def before_operator(self, arguments: Sequence[Any], *, sharded: bool, by_values: bool) -> None:
        """Note that an operator starts.

        ``sharded``: an operator of a DTensor, which runs others on its shards. ``by_values``: the sizes of its result
        depend on the values of its operands.
        """
        if by_values:
            self.operators.note_data_dependent_sizes()
        self.operators.nodes.bind(arguments)
        if sharded:
            self.operators.nodes.enter_outer(arguments)

    # ------------------------------------------------------------------ attention

    def leave_attention(self, layer: str, kind: ForwardKind, arguments: Mapping[str, Any]) -> None:
        """Count the products of an attention with an unknown kernel, by the arguments of its forward."""
        if not self.counting or not self.sees_operators():
            return
        call = self.operators.forward_call()
        if kind is ForwardKind.SILENT and not is_in_backward():  # a checkpoint recomputes it in the backward
            self.operators.nodes.note_running(SeenProduct(layer, "attention", call=call))
        if kind is not ForwardKind.OBSERVED or call is None:
            return
        if any(seen.layer == layer and seen.kind != OTHER_KERNEL for seen in call.seen):
            return
        tensors = arguments["query_layer"], arguments["key_layer"], arguments["value_layer"]
        sizes = attention_sizes(*tensors, arguments["qkv_format"])
        query, key, value = (format_of(tensor, columnwise=False) for tensor in tensors)
        has_backward = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
        # In a backward, a gradient for each operand, with equal multiply-adds.
        for backward in (False, True, True) if has_backward else (False,):
            for seen in AttentionCall(layer, backward, (query, key), (query, value), *sizes).products(OTHER_KERNEL):
                seen.call = call
                self.operators.see(seen)


class SeeingMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A dispatch mode that reports the operators of matrix products to a watcher.

    Attributes:
        watcher: receives the operators.
        only_reducing: whether it receives only operators of :data:`REDUCING`.
    """

    supports_higher_order_operators = True

    def __init__(self, watcher: ModelProducts, *, only_reducing: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.watcher = watcher
        self.only_reducing = only_reducing

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(
        self, operator: Any, types: Iterable[type], arguments: Sequence[Any] = (), keywords: Any = None
    ) -> Any:
        name = self._enter(operator, types, arguments)
        if name is NotImplemented:
            return NotImplemented  # DTensor then runs the operator on its shards, which are reported
        keywords = keywords or {}
        result = operator(*arguments, **keywords)
        if name is not None:
            self.watcher.run_guarded(lambda: self.watcher.operators.note(name, arguments, keywords, result))
        return result

    def _enter(self, operator: Any, types: Iterable[type], arguments: Sequence[Any]) -> Any:
        """The name of an operator to report; None to run it unreported, NotImplemented to leave it to a subclass."""
        if not self.watcher.is_watching():
            return None
        try:
            kinds = [kind.__name__ for kind in types] if types else ()
            sharded = "DTensor" in kinds
            name, has_dynamic_shape = _name_of(operator)
            name = NotImplemented if sharded else name
            if "FakeTensor" in kinds or (self.only_reducing and name not in REDUCING):
                return NotImplemented if sharded else None  # DTensor infers shapes with a FakeTensor
            if not self.only_reducing:
                by_values = has_dynamic_shape and _depends_on_data(operator, arguments)
                self.watcher.before_operator(arguments, sharded=sharded, by_values=by_values)
        except Exception as error:
            self.watcher.fail(error)
            return None
        return name


modes_are_active: Callable[[], int] = torch._C._len_torch_dispatch_stack
"""The number of dispatch modes of this thread. Not a Python function, since it is called before each GEMM."""


@contextmanager
def hide_operators() -> Iterator[None]:
    """Report no operator of this thread, unless the script has entered a mode later."""
    if isinstance(_get_current_dispatch_mode(), SeeingMode):
        with _pop_mode_temporarily():
            yield
    else:
        yield


def _depends_on_data(operator: Any, arguments: Sequence[Any]) -> bool:
    if operator is not torch.ops.aten.index.Tensor:
        return True
    return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in arguments[1])


@functools.cache
def _name_of(operator: Any) -> tuple[Any, bool]:
    """Return the name of an operator, and whether the shape of its result may depend on data."""
    if isinstance(operator, torch._ops.HigherOrderOperator):
        return f"higher_order::{operator._name}", False
    return operator._schema.name, torch.Tag.dynamic_output_shape in operator.tags
