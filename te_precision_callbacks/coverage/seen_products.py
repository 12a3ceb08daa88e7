"""Sees every matrix product of a model's step: the GEMMs of Transformer Engine through the tap, all others in torch."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any

import torch

from te_precision_callbacks.base.vocabulary import GemmName
from te_precision_callbacks.coverage.coverage import Family, Product, StateRow
from te_precision_callbacks.coverage.gemm_events import AttentionEvent, AttentionSizes, GemmEvent
from te_precision_callbacks.coverage.masks import share_left
from te_precision_callbacks.coverage.matrix_products import Role
from te_precision_callbacks.coverage.model_watch import ModelWatch
from te_precision_callbacks.coverage.precision_audit import format_of, quantizer_format
from te_precision_callbacks.coverage.seeing import is_seen_by
from te_precision_callbacks.coverage.seen_product import FUSED, OTHER_KERNEL, SeenProduct, summed
from te_precision_callbacks.layers.forwards import ForwardKind, in_backward
from te_precision_callbacks.layers.naming import Model, named_attention, named_roots


class ModelProducts:
    """The matrix products of the first step of a model.

    Args:
        report: receives failures.
        is_paused: whether the front door evaluates.
        in_gemm_layer: whether a layer of Transformer Engine runs its GEMMs, of which there are events.

    Attributes:
        attentions: id of a module of Transformer Engine's attention -> its path.
        recomputed_outside: the layers that a reentrant checkpoint has computed again without a recipe, though their
            first forward had one. Such a checkpoint of torch keeps no autocast of Transformer Engine. If the autocast
            is around the checkpointed part, as in Accelerate, the backward belongs to a forward in high precision.
    """

    def __init__(
        self,
        report: Callable[[str, str, Exception], None],
        is_paused: Callable[[], bool],
        in_gemm_layer: Callable[[], bool],
    ) -> None:
        self.attentions: Mapping[int, str] = {}
        self.recomputed_outside: set[str] = set()
        self._first_in_recipe: set[str] = set()
        self._report = report
        self._watch = ModelWatch(report, is_paused, in_gemm_layer)
        self._operations: frozenset[str] = frozenset()
        self._root = ""

    @property
    def counting(self) -> bool:
        """Whether products are counted: from :meth:`watch` until the end of the first step that has any."""
        return self._watch.active

    @property
    def misses_backwards(self) -> bool:
        """As :attr:`Calls.misses_backwards`."""
        return self._watch.operators.calls.misses_backwards

    # ------------------------------------------------------------------ its life

    def watch(self, model: Model, names: Mapping[int, str], operations: Iterable[str]) -> None:
        """Count the products of the next step, instead of those of another model.

        Args:
            model: the model.
            names: id of a module -> its path.
            operations: the layers of ``te.ops``.
        """
        self.close()
        roots = [root for _, root in named_roots(model) or ()]
        modules = {id(module): module for root in roots for module in root.modules()}
        paths = {key: names[key] for key in modules if key in names}
        attentions = {id(named.module): named.name for named in named_attention(model, names)}
        for key, path in attentions.items():
            paths |= {id(part): path for part in modules[key].modules()}
        self._operations, self.attentions = frozenset(operations), attentions
        self._root = next((paths[id(root)] for root in roots if id(root) in paths), "")
        self._watch.watch(model, {key: (path, modules[key]) for key, path in paths.items()})

    def end_step(self) -> tuple[tuple[Product, ...], tuple[StateRow, ...]] | None:
        """End a step: its products and what is kept in which type, after which no more are counted; None where the step
        had no products."""
        if not self._seen and not self._watch.failure:
            return None
        try:
            return tuple(self._products()), self._watch.state.rows()
        finally:
            self.close()

    def note_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Look at what an optimizer keeps, after one of its steps."""
        if self.counting:
            self._watch.state.note_step(optimizer)

    def close(self) -> None:
        """Count no longer, and leave torch as it was."""
        self._watch.close()
        self.attentions, self.recomputed_outside, self._first_in_recipe = {}, set(), set()
        self._operations, self._root = frozenset(), ""

    @property
    def _seen(self) -> list[SeenProduct]:
        return self._watch.operators.seen

    def muted(self) -> AbstractContextManager[None]:
        """Look at no operator of torch."""
        return self._watch.muted()

    def _of_each_sequence(self, found: Iterable[SeenProduct]) -> Iterator[SeenProduct]:
        """Products that were seen, those of attention of several sequences for each of them."""
        numbers: Mapping[int, Sequence[int]] = {}
        try:
            numbers = self._watch.operators.lengths.read()
        except Exception as error:
            self._report("reading the lengths of sequences in", "a step", error)
        for seen in found:
            bounds = seen.bounds
            if bounds is None or id(bounds.queries) not in numbers:
                yield seen
                continue
            for sizes in bounds.sizes(seen.sizes, numbers[id(bounds.queries)], numbers[id(bounds.keys)]):
                yield replace(seen, sizes=sizes, bounds=None)

    def _products(self) -> Iterator[Product]:
        """The products of the step, each once, followed by what is not counted."""
        failure = self._watch.failure
        seen = [one for one in self._seen if one.call is None] if failure else self._seen
        yield from summed(self._of_each_sequence(one for one in seen if not one.not_counted))
        left: dict[tuple[str, str, bool], SeenProduct] = {}
        for one in seen:
            if one.not_counted:
                left.setdefault((one.layer, one.not_counted, one.backward), one)
        for (layer, what, backward), one in left.items():
            yield Product.uncounted(layer, one.family, what, backward=backward)
        for what in [failure] if failure else self._watch.operators.calls.left_out():
            yield Product.uncounted(self._root, "functional", what)

    # ------------------------------------------------------------------ what runs

    def note(self, event: GemmEvent) -> None:
        """Count a GEMM of a layer of Transformer Engine; a listener of the tap."""
        if not self.counting:
            return
        if event.gemm == "fprop":
            self._note_recomputed(event)
        if event.kind is not ForwardKind.OBSERVED:
            return
        b, a = (format_of(operand.data, columnwise=operand.columnwise) for operand in (event.b, event.a))
        self.see_gemm(event.layer, event.gemm, event.sizes, (b, a))

    def _note_recomputed(self, event: GemmEvent) -> None:
        """Compare the two forwards of reentrant checkpoints."""
        if event.kind is ForwardKind.SILENT and event.recipe and not in_backward():
            self._first_in_recipe.add(event.layer)
        again = event.kind is ForwardKind.OBSERVED and not event.recipe and in_backward()
        if again and event.layer in self._first_in_recipe:
            self.recomputed_outside.add(event.layer)

    def see_gemm(
        self, layer: str, gemm: GemmName, sizes: tuple[int, int, int], formats: tuple[str, str] = ("", "")
    ) -> None:
        """Count a GEMM of a layer of Transformer Engine: its n, m and k, and the formats of its operands."""
        family: Family = "te_ops" if layer in self._operations else "te"
        self._seen.append(SeenProduct(layer, family, gemm, formats, (*sizes, 1)))

    @contextmanager
    def masked(self, share: float | None) -> Iterator[None]:
        """Surrounds operators that compute attention with a mask, of which ``share`` is left."""
        begun = len(self._seen)
        yield
        for seen in self._seen[begun:]:
            if seen.family == "attention" and not seen.backward:
                seen.mask_share = share

    def enter_attention(self, layer: str, kind: ForwardKind) -> None:
        """Note that a forward of Transformer Engine's attention begins."""
        self._watch.operators.told.discard(layer)

    def note_attention(self, event: AttentionEvent) -> None:
        """Count the products of fused attention."""
        self._watch.operators.told.add(event.layer)
        if not self.counting or event.kind is not ForwardKind.OBSERVED:
            return
        query, key, value = (format_of(tensor, columnwise=False) for tensor in (event.query, event.key, event.value))
        if event.backward:
            gradient = format_of(event.gradient, columnwise=False)
            scores = format_made_by(event.scores, gradient)
            share = share_left(event.arguments, event.sizes.rows, event.sizes.columns)
            self.see_attention(
                event.layer, event.sizes, (scores, key), (gradient, value), FUSED, backward=True, mask_share=share
            )
        else:
            probabilities = format_made_by(event.probabilities, query)
            self.see_attention(event.layer, event.sizes, (query, key), (probabilities, value), FUSED)

    def leave_attention(self, layer: str, kind: ForwardKind, given: Mapping[str, Any]) -> None:
        """Count the products of attention that no operator and no event has shown, by their sizes."""
        if not self.counting or not is_seen_by(self._watch):
            return
        call = self._watch.operators.call_of_forward()
        if kind is ForwardKind.SILENT and not in_backward():  # computed again in the backward of a checkpoint
            self._watch.operators.nodes.note_running(
                SeenProduct(layer, "attention", "", ("", ""), (0, 0, 0, 0), call=call)
            )
        if kind is not ForwardKind.OBSERVED or (call is None and in_backward()):
            return
        tensors = given["query_layer"], given["key_layer"], given["value_layer"]
        sizes = AttentionSizes.of(*tensors, given["qkv_format"])
        share = share_left(given, sizes.rows, sizes.columns)
        if layer in self._watch.operators.told:
            for seen in itertools.takewhile(lambda seen: seen.layer == layer, reversed(self._seen)):
                seen.mask_share = share
            return
        query, key, value = (format_of(tensor, columnwise=False) for tensor in tensors)
        begun = len(self._seen)
        self.see_attention(layer, sizes, (query, key), (query, value), OTHER_KERNEL, mask_share=share)
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
            self.see_attention(
                layer, sizes, (query, key), (query, value), OTHER_KERNEL, backward=True, mask_share=share
            )
        for seen in self._seen[begun:]:
            seen.call = call

    def see_attention(
        self,
        layer: str,
        sizes: AttentionSizes,
        qk: tuple[str, str],
        pv: tuple[str, str],
        kind: str,
        *,
        backward: bool = False,
        mask_share: float | None = None,
    ) -> None:
        """Count the products of attention.

        Args:
            layer: its name.
            sizes: their sizes.
            qk, pv: the formats of the operands of each.
            kind: what computes them: :data:`FUSED`, :data:`UNFUSED_KERNEL` or :data:`OTHER_KERNEL`.
            backward: whether they are those of the backward, two of each.
            mask_share: as ``Product.mask_share``.
        """
        batch, rows, columns, size, size_v = sizes
        products: tuple[tuple[Role, tuple[str, str], tuple[int, int, int, int]], ...] = (
            ("qk", qk, (rows, columns, size, batch)),
            ("pv", pv, (rows, size_v, columns, batch)),
        )
        for role, formats, of_forward in products:
            for _ in range(2 if backward else 1):  # a gradient for each of two operands, with as many multiply-adds
                seen = SeenProduct(layer, "attention", role, formats, of_forward, kind, backward=backward)
                seen.mask_share = mask_share
                self._seen.append(seen)

    def note_silent(self, layers: Iterable[str], what: str, backward: bool) -> None:
        """Note that layers of Transformer Engine have run without an event of a GEMM.

        Args:
            layers: the layers.
            what: what has run, and why.
            backward: whether it was its backward.
        """
        if self.counting:
            for layer in layers:
                family: Family = "te_ops" if layer in self._operations else "te"
                self._seen.append(
                    SeenProduct(layer, family, "", ("", ""), (0, 0, 0, 0), backward=backward, not_counted=what)
                )


def format_made_by(quantizer: Any, otherwise: str) -> str:
    """The format that attention rounds an inner tensor to; without a quantizer, as in MXFP8, that of an operand."""
    return otherwise if quantizer is None else quantizer_format(quantizer, torch.float32, columnwise=False)
