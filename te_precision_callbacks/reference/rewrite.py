"""Rewrites Transformer Engine's syntax trees during import.

A proxy for the module-global name ``torch`` would not suffice: attributes of a tensor (``tensor.is_cuda``, ``.cuda()``,
``tensor.device.type == "cuda"``) bypass that name, and changing ``torch.Tensor`` would affect the whole process. A
rewritten module uses the real ``torch``, and nothing outside Transformer Engine changes.

Each rule is a row of the table in ``tests/reference/seams.py``, which has the reasons.
"""

from __future__ import annotations

import ast
from typing import ClassVar

ON_CPU = "te_precision_callbacks.reference.cuda_on_cpu"
ON_CUDA = "te_precision_callbacks.reference.cuda_on_cuda"
NO_TRITON = "te_precision_callbacks.reference.no_triton"

ALIAS = "_te_reference_cuda"
"""The name in a rewritten module of the first or the second of these modules."""

_NO_ATTENTION = "No dot product attention backend is available"
_BUILDING = "NVTE_PROJECT_BUILDING"
_EMULATE = "NVTE_UnfusedDPA_Emulate_FP8"


def rewrite(tree: ast.Module, *, cuda_on_cpu: bool) -> ast.Module:
    """Change ``tree``, a module of Transformer Engine or a debug feature, in place to use the backend instead of CUDA.

    With ``cuda_on_cpu=False``, for a real GPU, only ``torch.compile``, attention and the compute capability change.
    """
    rules = _OnCpu() if cuda_on_cpu else _OnCuda()
    rules.visit(tree)
    return ast.fix_missing_locations(tree)


class _OnCuda(ast.NodeTransformer):
    module = ON_CUDA

    answers: ClassVar = {"torch.version.cuda": "cuda_version", "torch.compile": "run_eagerly"}

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        dotted = _dotted(node)
        if dotted == "torch.cuda":
            return ast.copy_location(ast.Name(ALIAS, ast.Load()), node)
        if dotted in self.answers:
            return ast.copy_location(_backend(self.answers[dotted]), node)
        return self.generic_visit(node)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> ast.AST:
        if node.module == "torch.cuda" and node.level == 0:
            node.module = self.module
        return node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        match node.args:
            case [ast.Constant(value=name), ast.Constant() as default] if name == _EMULATE:
                default.value = "1"
        return self.generic_visit(node)

    def visit_If(self, node: ast.If) -> ast.AST:
        match node.test:
            case ast.BoolOp(values=[ast.Compare(left=ast.Constant(value=name)), *_]) if name == _BUILDING:
                return ast.copy_location(ast.Pass(), node)
        return self.generic_visit(node)

    def visit_Raise(self, node: ast.Raise) -> ast.AST:
        match node.exc:
            case ast.Call(args=[ast.Constant(str(text))]) if text.startswith(_NO_ATTENTION):
                context_parallel = ast.Name("context_parallel", ast.Load())  # a local variable there
                node.exc = ast.Call(_backend("no_attention"), [node.exc, context_parallel], [])
        return self.generic_visit(node)


class _OnCpu(_OnCuda):
    """The rules if the CPU replaces the GPU."""

    module = ON_CPU
    answers: ClassVar = _OnCuda.answers | {
        "torch.cuda.current_device": "current_torch_device",
        "torch.distributed._coalescing_manager": "one_by_one",
        "torch.norm": "exact_norm",
        "torch._scaled_mm": "scaled_mm",
    }

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        if node.value == "cuda":
            return ast.copy_location(ast.Constant("cpu"), node)
        return node

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        if node.attr not in ("is_cuda", "is_cpu") or not isinstance(node.ctx, ast.Load):
            return super().visit_Attribute(node)
        self.generic_visit(node)
        on_device = ast.Call(_backend("is_on_device"), [node.value], [])
        return ast.copy_location(on_device if node.attr == "is_cuda" else ast.UnaryOp(ast.Not(), on_device), node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        called = node.func
        if isinstance(called, ast.Attribute) and called.attr == "cuda" and not node.args and not node.keywords:
            called.attr = "cpu"
        dotted = _dotted(called)
        if dotted == "torch.device" and len(node.args) == 2:
            del node.args[1]  # an index belongs to a GPU
        if dotted == "torch.is_autocast_enabled" and not node.args:
            node.args.append(ast.Constant("cpu"))
        return super().visit_Call(node)

    def visit_Import(self, node: ast.Import) -> ast.AST:
        # `import triton` and `import triton.language as tl`
        if node.names[0].name == "triton":
            node.names = [ast.alias(NO_TRITON, "triton")]
        elif node.names[0].name.startswith("triton."):
            _, submodule = node.names[0].name.split(".")
            return ast.copy_location(ast.ImportFrom(NO_TRITON, [ast.alias(submodule, node.names[0].asname)], 0), node)
        return node

    def visit_ImportFrom(self, node: ast.ImportFrom) -> ast.AST:
        if node.module is not None and node.module.split(".")[0] == "triton" and node.level == 0:
            node.module = NO_TRITON
        return super().visit_ImportFrom(node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        # Users read these properties of the tensor classes, so they are not changed.
        if node.name in ("is_cuda", "is_cpu"):
            return node
        return self.generic_visit(node)


def _dotted(node: ast.expr) -> str:
    """Return ``"torch.cuda.x"`` for that expression; empty if it is not a plain chain of names."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (prefix := _dotted(node.value)):
        return f"{prefix}.{node.attr}"
    return ""


def _backend(name: str) -> ast.Attribute:
    return ast.Attribute(ast.Name(ALIAS, ast.Load()), name, ast.Load())
