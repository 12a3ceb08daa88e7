"""Print, as JSON, the machine of a check and its usable Transformer Engine.

    python -m gpu_parts.machine --device cuda

It runs in its own process, since some GPUs allow a single process at a time.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import platform
import sys
from typing import Any

import torch
from measuring import _processor, _usable_processors

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
    """Return hardware and versions; ``gpu`` is None on a CPU, ``error`` is the reason for a missing GPU."""
    backend, why = _backend(device)
    results: dict[str, Any] = {
        "device": device,
        "gpu": None,
        "processor": f"{_processor()}, {torch.backends.cpu.get_cpu_capability()}",
        "cores": len(_usable_processors()),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "system": platform.system(),
        "versions": {name: _version(name) for name in PACKAGES},
        "backend": backend,
        "why_this_backend": why,
        "layouts": "10.0" if device == "cuda" and torch.cuda.get_device_capability(0) >= (10, 0) else "9.0",
    }
    if device == "cuda":
        results["gpu"] = _gpu()
    return results


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

    if _version("transformer-engine") is None:
        return "none", "Transformer Engine is not installed: pip install 'te-precision-callbacks[reference]'"
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


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m gpu_parts.machine")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        build = f"torch {torch.__version__}" + ("" if torch.version.cuda else ", which was built without CUDA")
        print(json.dumps({"error": f"torch sees no GPU here ({build})"}))
        return
    sys.stdout.write(json.dumps(facts(options.device)) + "\n")


if __name__ == "__main__":
    main()
