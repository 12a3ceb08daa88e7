"""Classes that replace ``torch.device`` and ``torch.Generator`` if "cuda" means the CPU.

``torch.device`` cannot be subclassed, and reads a bare number as the accelerator that torch was built for. The
replacements create objects of the real class and compare equal to it, so calls, ``isinstance`` and look-ups in tables
work. Read from torch 2.13.
"""

from __future__ import annotations

from typing import Any

import torch

_RealDevice = torch.device
_RealGenerator = torch.Generator


class _Standing(type):
    stands_for: type

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, cls.stands_for)

    def __subclasscheck__(cls, subclass: type) -> bool:
        return issubclass(subclass, cls.stands_for) or type.__subclasscheck__(cls, subclass)

    def __eq__(cls, other: object) -> bool:
        return other is cls or other is cls.stands_for

    def __hash__(cls) -> int:
        return hash(cls.stands_for)

    def __getattr__(cls, name: str) -> Any:
        return getattr(type.__getattribute__(cls, "stands_for"), name)


class _DeviceType(_Standing):
    stands_for = _RealDevice

    def __call__(cls, *arguments: Any, **options: Any) -> Any:
        if len(arguments) == 1 and is_device_number(arguments[0]) and not options:
            return _RealDevice("cuda", arguments[0])
        return _RealDevice(*arguments, **options)


class _GeneratorType(_Standing):
    stands_for = _RealGenerator

    def __call__(cls, device: Any = "cpu") -> Any:
        return _RealGenerator(cpu_for_cuda(device))


class Device(metaclass=_DeviceType):
    """Replaces ``torch.device``: a bare number is a GPU."""


class Generator(metaclass=_GeneratorType):
    """Replaces ``torch.Generator``: a GPU's generator becomes a CPU's."""


for _class in (Device, Generator):  # pickle finds a class by its name
    _class.__module__, _class.__name__, _class.__qualname__ = "torch", *[_class.stands_for.__name__] * 2

_CPU = _RealDevice("cpu")


def is_device_number(device: Any) -> bool:
    return isinstance(device, int) and not isinstance(device, bool)


def is_cuda(device: Any) -> bool:
    """Return whether ``device`` means CUDA in any of torch's forms: ``"cuda:0"``, ``torch.device("cuda")``, ``0``."""
    if isinstance(device, _RealDevice):
        return bool(device.type == "cuda")
    if isinstance(device, str):
        return device == "cuda" or device.startswith("cuda:")
    return is_device_number(device)


def cpu_for_cuda(device: Any) -> Any:
    if is_cuda(device):
        return _CPU
    return device
