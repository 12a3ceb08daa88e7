"""GPUs, and torch's settings that change precision."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_DRIVER = Path("/proc/driver/nvidia/version")


@dataclass(frozen=True)
class Gpu:
    name: str
    capability: str
    memory_bytes: int


@dataclass(frozen=True)
class Torch:
    """The state of torch in this process; versions are None where a library is not installed.

    Attributes:
        visible_devices: CUDA_VISIBLE_DEVICES, if set.
        warnings: torch's warnings during the detection of GPUs and cuDNN.
        settings: settings that change precision; scripts can change them.
    """

    gpus: tuple[Gpu, ...]
    visible_devices: str | None
    driver: str | None
    cuda: str | None
    cudnn: str | None
    warnings: tuple[str, ...]
    settings: Mapping[str, str]


def torch_facts() -> Torch:
    import torch

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    gpus = []
    for number in range(count):
        properties = torch.cuda.get_device_properties(number)
        capability = "{}.{}".format(*torch.cuda.get_device_capability(number))
        gpus.append(Gpu(torch.cuda.get_device_name(number), capability, properties.total_memory))
    messages = [str(warning.message) for warning in caught]
    try:
        encoded = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
    except RuntimeError as error:  # torch was built with another cuDNN than the loaded one, which it says once
        encoded = torch._C._cudnn.getVersionInt()
        messages.append(str(error))
    return Torch(
        gpus=tuple(gpus),
        visible_devices=os.environ.get("CUDA_VISIBLE_DEVICES"),
        driver=_driver(_DRIVER.read_text()) if _DRIVER.is_file() else None,
        cuda=torch.version.cuda,
        cudnn=None if encoded is None else _cudnn(encoded),
        warnings=tuple(messages),
        settings={name: str(value) for name, value in _settings(torch).items()},
    )


def _settings(torch: Any) -> dict[str, object]:
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    return {
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
        "cuda.matmul.allow_tf32": matmul.allow_tf32,
        "cudnn.allow_tf32": cudnn.allow_tf32,
        "cuda.matmul.allow_fp16_reduced_precision_reduction": matmul.allow_fp16_reduced_precision_reduction,
        "cuda.matmul.allow_bf16_reduced_precision_reduction": matmul.allow_bf16_reduced_precision_reduction,
        "deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
        "cudnn.deterministic": cudnn.deterministic,
        "cudnn.benchmark": cudnn.benchmark,
        "default_dtype": torch.get_default_dtype(),
        "autocast_dtype cuda": torch.get_autocast_dtype("cuda"),
        "autocast_dtype cpu": torch.get_autocast_dtype("cpu"),
    }


def _driver(text: str) -> str | None:
    version = re.search(r"Kernel Module.*?\s(\d+\.[\d.]+)", text)
    return None if version is None else version[1]


def _cudnn(encoded: int) -> str:
    """Decode a version: 90100 is 9.1.0; before version 9, 8902 is 8.9.2 (cudnn_version.h)."""
    major, rest = divmod(encoded, 10_000 if encoded >= 90_000 else 1_000)
    return f"{major}.{rest // 100}.{rest % 100}"
