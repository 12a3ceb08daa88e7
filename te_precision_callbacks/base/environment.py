"""Environment variables that change numbers, and values that libraries read differently than they seem.

    environment = read_environment(os.environ)
    environment.settings  # name -> value
    environment.problems  # bad values and contradictions

Most variables are read once, when a library is imported. Read from Transformer Engine 2.20.2, torch 2.13,
accelerate 1.15 and transformers 5.23.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple


class ValueEffect(NamedTuple):
    """The effect of an unexpected value, and whether it ends a run with an exception."""

    what: str
    stops: bool


@dataclass(frozen=True)
class VariableProblem:
    """A variable with an unexpected effect, or two that contradict each other.

    Attributes:
        what: the variables, their values and the effect.
        remedy: what to do.
        stops: whether a run ends with an exception.
    """

    what: str
    remedy: str
    stops: bool


@dataclass(frozen=True)
class Environment:
    """The variables of :data:`VARIABLES` that are set, and the problems with them."""

    settings: Mapping[str, str]
    problems: tuple[VariableProblem, ...]


def read_environment(environ: Mapping[str, str]) -> Environment:
    """Read the variables of :data:`VARIABLES`."""
    settings = {name: environ[name] for name in VARIABLES if name in environ}
    return Environment(settings, tuple(_problems(settings)))


def _problems(settings: Mapping[str, str]) -> Iterator[VariableProblem]:
    for name, value in settings.items():
        fault = VARIABLES[name](value)
        if fault is not None:
            yield VariableProblem(f"{name}={value!r}: {fault.what}", "Give another value, or unset it.", fault.stops)
    tf32 = settings.get("NVIDIA_TF32_OVERRIDE"), settings.get("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE")
    if tf32 == ("0", "1"):  # Project-MONAI/MONAI, issue 6754
        yield VariableProblem(
            "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE=1 asks for TF32, which NVIDIA_TF32_OVERRIDE=0 forbids: float32 matmuls"
            " run without TF32",
            "Unset one of them.",
            stops=False,
        )


def _anything(value: str) -> ValueEffect | None:
    return None


def _integer(value: str) -> ValueEffect | None:
    try:
        int(value)
    except ValueError:
        return ValueEffect("an integer is expected, and reading this value raises an exception", stops=True)
    return None


def _number_as_flag(value: str) -> ValueEffect | None:
    if value in ("0", "1"):
        return None
    return _integer(value) or ValueEffect("0 or 1 is expected, and another number may count as either", stops=False)


def _one_of(*words: str, otherwise: str, stops: bool) -> Callable[[str], ValueEffect | None]:
    """Expect one of these words; ``otherwise`` describes the effect of other values."""
    fault = ValueEffect(f"{', '.join(map(repr, words[:-1]))} or {words[-1]!r} is expected, and {otherwise}", stops)
    return lambda value: None if value in words else fault


_NVFP4_RAISES = "NVFP4BlockScaling() raises ValidationError"
_4over6 = _one_of("none", "weights", "activations", "all", otherwise=_NVFP4_RAISES, stops=True)

VARIABLES: Mapping[str, Callable[[str], ValueEffect | None]] = {
    **dict.fromkeys(
        (
            *("NVTE_FP8_CURRENT_SCALING_POWER_2_SCALES", "NVTE_FP8_BLOCK_SCALING_FP32_SCALES"),
            *("NVTE_NVFP4_DISABLE_RHT", "NVTE_NVFP4_DISABLE_STOCHASTIC_ROUNDING", "NVTE_NVFP4_DISABLE_2D_QUANTIZATION"),
            *("NVTE_NVFP4_ROW_SCALED_ACTIVATION", "NVTE_DPA_FP8_RECIPE_DPA", "NVTE_DPA_FP8_RECIPE_MHA"),
            *("TORCHINDUCTOR_USE_FAST_MATH", "TORCHINDUCTOR_EMULATE_PRECISION_CASTS", "FLASH_ATTENTION_DETERMINISTIC"),
        ),
        _one_of("", "0", "1", otherwise="only '1' turns it on", stops=False),
    ),
    **dict.fromkeys(
        (
            *("NVTE_UNFUSED_FP8_UPDATE", "NVTE_DPA_FP8DS_REDUCE_AMAX", "NVTE_UnfusedDPA_Emulate_FP8"),
            *("NVTE_DPA_FP8CS_O_in_F16", "NVTE_FP8_DPA_BWD", "NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN"),
            *("NVTE_UNFUSED_ATTN", "NVTE_APPLY_QK_LAYER_SCALING", "NVTE_ALLOW_NONDETERMINISTIC_ALGO"),
        ),
        _number_as_flag,
    ),
    # Transformer Engine's extension (common/util/system.h: getenv<bool>).
    **dict.fromkeys(
        (
            *("NVTE_NVFP4_4OVER6_ERR_USE_FAST_MATH", "NVTE_USE_FAST_MATH", "NVTE_NORM_FWD_USE_CUDNN"),
            *("NVTE_NORM_BWD_USE_CUDNN", "NVTE_CUDNN_MXFP8_NORM_OUTPUT_IN_INPUT_DTYPE"),
            "NVTE_ZERO_CENTERED_GAMMA_IN_WTYPE",
        ),
        _one_of("", "0", "1", otherwise="the extension raises RuntimeError for this value", stops=True),
    ),
    **dict.fromkeys(
        (
            *("NVTE_DPA_FP8DS_AMAX_HISTLEN", "ACCELERATE_FP8_MARGIN", "ACCELERATE_FP8_AMAX_HISTORY_LEN"),
            "TE_PRECISION_REFERENCE_CUBLASLT",
        ),
        _integer,
    ),
    **dict.fromkeys(
        (
            *("NVIDIA_TF32_OVERRIDE", "CUBLAS_WORKSPACE_CONFIG", "ACCELERATE_FP8_FORMAT"),
            *("ACCELERATE_FP8_AMAX_COMPUTE_ALGO", "ACCELERATE_FP8_USE_MXFP8_BLOCK_SCALING"),
            *("ACCELERATE_FP8_USE_AUTOCAST_DURING_EVAL", "ACCELERATE_FP8_OVERRIDE_FPROP"),
            *("ACCELERATE_FP8_OVERRIDE_DGRAD", "ACCELERATE_FP8_OVERRIDE_WGRAD"),
        ),
        _anything,
    ),
    "NVTE_BACKWARD_OVERRIDE": _one_of(
        "high_precision", "dequantized", otherwise="every recipe raises ValidationError", stops=True
    ),
    "NVTE_NVFP4_4OVER6": _4over6,
    "NVTE_NVFP4_4OVER6_E4M3_USE_256": _4over6,
    "NVTE_NVFP4_4OVER6_ERR_MODE": _one_of("MAE", "MSE", "mae", "mse", otherwise=_NVFP4_RAISES, stops=True),
    "NVTE_DPA_FP8_RECIPE": _one_of(
        *("", "F16", "DelayedScaling", "Float8CurrentScaling", "MXFP8BlockScaling"),
        otherwise="DotProductAttention ignores this value, but MultiheadAttention does not",
        stops=False,
    ),
    "NVTE_DPA_FP8_FORMAT": _one_of(
        "HYBRID", "E4M3", "E5M2", otherwise="importing transformer_engine.pytorch raises KeyError", stops=True
    ),
    "NVTE_DPA_FP8DS_AMAX_ALGO": _one_of(
        "most_recent", "max", otherwise="updating the scales raises an exception", stops=True
    ),
    # c10/util/env.cpp: check_env.
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": _one_of("0", "1", otherwise="torch ignores this value", stops=False),
    "ACCELERATE_MIXED_PRECISION": _one_of(
        "no", "fp16", "bf16", "fp8", otherwise="Accelerator() raises ValueError", stops=True
    ),
    "TE_PRECISION_REFERENCE_CAPABILITY": _one_of(
        "", "9.0", "10.0", otherwise="the reference backend raises InstallError", stops=True
    ),
}
"""Variable -> a function that returns the problem with a value, or None."""
