"""Variables that contradict each other, and variables that have no effect without another one.

Read from Transformer Engine 2.20.2, which reports none of these before it runs, and most not at all.

conflicts({"NVTE_FLASH_ATTN": "0", "NVTE_FUSED_ATTN": "0", "NVTE_UNFUSED_ATTN": "0"}, defaults)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from te_precision_callbacks.base.environment.transformer_engine import OVERRIDES


@dataclass(frozen=True)
class Problem:
    """Something wrong with the variables that are set.

    Attributes:
        names: the variables.
        what: what is wrong, and what the library makes of it.
        remedy: what to do.
        stops: whether a run ends with an exception; else a setting has no effect, or another one than it seems.
    """

    names: tuple[str, ...]
    what: str
    remedy: str
    stops: bool


def conflicts(given: Mapping[str, str], defaults: Mapping[str, str]) -> Iterator[Problem]:
    """What is wrong with the variables together.

    Args:
        given: those that are set.
        defaults: name -> default, of all variables.
    """
    in_force = {**defaults, **given}
    yield from (conflict.problem for conflict in _CONFLICTS if conflict.holds(in_force))
    for name, other, off in _NEEDED:
        if given.get(name, "0") not in _NOTHING_ASKED and in_force[other] in off:
            state = f"{other}={given[other]}" if other in given else f"{other} is not set"
            yield Problem(
                (name, other),
                f"{name}={given[name]} has no effect: {state}",
                f"Unset {name}, or change {other}.",
                stops=False,
            )


class _Conflict(NamedTuple):
    """Variables that contradict each other.

    Attributes:
        holds: whether they do so, by the values in force.
        problem: what follows.
    """

    holds: Callable[[Mapping[str, str]], bool]
    problem: Problem


_DPA = "NVTE_DPA_FP8_RECIPE"
_KERNELS = ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN")
_GROUPED_MLP = "NVTE_CUTEDSL_FUSED_GROUPED_MLP"

_CONFLICTS = (
    # dot_product_attention.py: forward.
    _Conflict(
        lambda value: all(value[name] == "0" for name in _KERNELS),
        Problem(
            _KERNELS,
            "NVTE_FLASH_ATTN, NVTE_FUSED_ATTN and NVTE_UNFUSED_ATTN are all 0, so no attention kernel is left:"
            " DotProductAttention raises ValueError",
            "Allow one of them.",
            stops=True,
        ),
    ),
    # quantization.py: NVFP4BlockScalingRecipeState.make_quantizers.
    _Conflict(
        lambda value: value["NVTE_NVFP4_4OVER6"] in ("activations", "all") and value["NVTE_NVFP4_DISABLE_RHT"] != "1",
        Problem(
            ("NVTE_NVFP4_4OVER6", "NVTE_NVFP4_DISABLE_RHT"),
            "NVTE_NVFP4_4OVER6 asks for 4over6 in activations, which excludes the random Hadamard transform that is on:"
            " with the defaults of NVFP4BlockScaling() the first forward raises ValueError",
            "Set NVTE_NVFP4_DISABLE_RHT=1, or NVTE_NVFP4_4OVER6=weights.",
            stops=True,
        ),
    ),
    # dot_product_attention.py: init_fp8_metadata; common/recipe: DelayedScaling.__post_init__.
    _Conflict(
        lambda value: (
            value["NVTE_BACKWARD_OVERRIDE"] in OVERRIDES and value[_DPA] in ("DelayedScaling", "Float8CurrentScaling")
        ),
        Problem(
            ("NVTE_BACKWARD_OVERRIDE", _DPA),
            f"with {_DPA}, DotProductAttention makes a DelayedScaling recipe, which raises ValidationError under"
            " NVTE_BACKWARD_OVERRIDE",
            f"Unset NVTE_BACKWARD_OVERRIDE, and give backward_override= to your own recipe; or unset {_DPA}.",
            stops=True,
        ),
    ),
    # dot_product_attention.py: init_fp8_metadata; multi_head_attention.py: forward.
    _Conflict(
        lambda value: (
            value[_DPA] == "F16" and "1" in (value["NVTE_DPA_FP8_RECIPE_DPA"], value["NVTE_DPA_FP8_RECIPE_MHA"])
        ),
        Problem(
            (_DPA, "NVTE_DPA_FP8_RECIPE_DPA", "NVTE_DPA_FP8_RECIPE_MHA"),
            f"{_DPA}=F16 turns FP8 attention off, while NVTE_DPA_FP8_RECIPE_DPA or NVTE_DPA_FP8_RECIPE_MHA tells"
            " MultiheadAttention that it is on",
            f"Unset NVTE_DPA_FP8_RECIPE_DPA and NVTE_DPA_FP8_RECIPE_MHA, or give {_DPA} an FP8 recipe.",
            stops=False,
        ),
    ),
    # utils.py: resolve_grouped_linear_single_param_flags.
    _Conflict(
        lambda value: (
            value["NVTE_ALLOW_NONDETERMINISTIC_ALGO"] == "0" and value["NVTE_GROUPED_LINEAR_SINGLE_PARAM"] == "1"
        ),
        Problem(
            ("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "NVTE_GROUPED_LINEAR_SINGLE_PARAM"),
            "with NVTE_GROUPED_LINEAR_SINGLE_PARAM=1 the results of GroupedLinear can differ between runs, which"
            " NVTE_ALLOW_NONDETERMINISTIC_ALGO=0 does not prevent",
            "Unset NVTE_GROUPED_LINEAR_SINGLE_PARAM.",
            stops=False,
        ),
    ),
    _Conflict(
        lambda value: value["NVIDIA_TF32_OVERRIDE"] == "0" and value["TORCH_ALLOW_TF32_CUBLAS_OVERRIDE"] == "1",
        Problem(
            ("NVIDIA_TF32_OVERRIDE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE"),
            "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE=1 asks for TF32, which NVIDIA_TF32_OVERRIDE=0 forbids: float32 matmuls"
            " are without TF32",
            "Unset one of them.",
            stops=False,
        ),
    ),
)

_NOTHING_ASKED = ("", "0", "none")
"""Values of the first variable of :data:`_NEEDED` that ask for nothing."""

_NEEDED = (
    ("NVTE_DPA_FP8_RECIPE_DPA", _DPA, ("",)),
    ("NVTE_DPA_FP8_RECIPE_MHA", _DPA, ("",)),
    ("NVTE_DPA_FP8_FORMAT", _DPA, ("", "F16")),
    *((f"NVTE_FLASH_ATTN_V{version}", "NVTE_FLASH_ATTN", ("0",)) for version in (2, 3, 4)),
    ("NVTE_UnfusedDPA_Emulate_FP8", "NVTE_UNFUSED_ATTN", ("0",)),
    ("NVTE_FUSED_ATTN_USE_FAv2_BWD", "NVTE_FUSED_ATTN", ("0",)),
    ("NVTE_NVFP4_4OVER6_E4M3_USE_256", "NVTE_NVFP4_4OVER6", ("none",)),
    ("NVTE_NVFP4_4OVER6_ERR_MODE", "NVTE_NVFP4_4OVER6", ("none",)),
    ("NVTE_NVFP4_4OVER6_ERR_USE_FAST_MATH", "NVTE_NVFP4_4OVER6", ("none",)),
    ("NVTE_CUDNN_MXFP8_NORM_OUTPUT_IN_INPUT_DTYPE", "NVTE_NORM_FWD_USE_CUDNN", ("", "0")),
    ("NVTE_CUTEDSL_FUSED_GROUPED_MLP_FC1_GLU_RHT_AMAX_TMEM", _GROUPED_MLP, ("0",)),
    ("NVTE_DISABLE_CUTEDSL_WGRAD_FUSED_GROUPED_MLP", _GROUPED_MLP, ("0",)),
)
"""A variable, the one without which it has no effect, and the values of that one with which it has none."""
