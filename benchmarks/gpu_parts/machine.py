"""The machine of a check and its usable Transformer Engine."""

from __future__ import annotations

import importlib.metadata
import platform
from typing import Any

import torch
from measuring import cores, processor

from gpu_parts.rows import Backend, brief

PACKAGES = (
    "torch",
    "triton",
    "transformer-engine",
    "te-precision-callbacks",
    "nvdlfw-inspect",
    "lightning",
    "accelerate",
    "transformers",
    "numpy",
)
_FP8_FROM = (8, 9)
"""The first compute capability with FP8."""


def facts(device: str) -> dict[str, Any]:
    """Return hardware and versions; ``gpu`` is None on a CPU."""
    backend, why = _backend(device)
    return {
        "device": device,
        "gpu": _gpu() if device == "cuda" else None,
        "processor": f"{processor()}, {torch.backends.cpu.get_cpu_capability()}",
        "cores": cores(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "system": platform.system(),
        "versions": {name: _version(name) for name in PACKAGES},
        "backend": backend,
        "why_this_backend": why,
        "layouts": "10.0" if device == "cuda" and torch.cuda.get_device_capability(0) >= (10, 0) else "9.0",
    }


def _gpu() -> dict[str, Any]:
    from te_precision_callbacks.base.environment import torch_facts

    properties = torch.cuda.get_device_properties(0)
    about = torch_facts()
    return {
        "name": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "memory_bytes": properties.total_memory,
        "processors": properties.multi_processor_count,
        "driver": about.driver,
        "cuda": about.cuda,
        "cudnn": about.cudnn,
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
    }


def _backend(device: str) -> tuple[Backend, str]:
    """Return the backend of the parts, and the reason if it is not the compiled one."""
    from te_precision_callbacks.reference import compiled_extension

    if device == "cpu":
        return "reference", "the device is the CPU"
    capability = torch.cuda.get_device_capability(0)
    if capability < _FP8_FROM:
        return "reference", "the GPU, of compute capability {}.{}, has no FP8".format(*capability)
    why = compiled_extension.why_unavailable()
    return ("compiled", "") if why is None else ("reference", brief(why))


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
