"""Restores scales and amax histories that the Trainer skips when it resumes.

Read from transformers 4.57 to 5.23: ``Trainer.train`` loads the weights of a checkpoint before ``accelerator.prepare``
replaces layers by layers of Transformer Engine, and skips their ``_extra_state`` as "unexpected". It can be loaded
after ``prepare``, before the first forward.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Set
from pathlib import Path

import safetensors
import torch
from accelerate import Accelerator

from te_precision_callbacks.te.state import delayed_states

logger = logging.getLogger(__name__)


def restore_states(accelerator: Accelerator, model: torch.nn.Module, checkpoint: Path) -> None:
    """Load the FP8 state of converted layers from a checkpoint's folder, before the first forward.

    Layers that already have a state are skipped. The state of delayed scaling is a pickle, which Transformer Engine
    loads only with ``NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE=1``. A warning lists state that was not restored.
    """
    if accelerator.fp8_backend != "TE":
        return
    plain = accelerator.unwrap_model(model, keep_torch_compile=False)
    stateless: dict[str, torch.nn.Module] = {}
    for name, module in plain.named_modules():
        keeps_state = type(module).set_extra_state is not torch.nn.Module.set_extra_state
        if keeps_state and not any(delayed_states(module)):
            stateless[f"{name}._extra_state"] = module
    restored = 0
    try:
        # In one file, or in parts.
        for path in sorted(checkpoint.glob("model*.safetensors")) or sorted(checkpoint.glob("pytorch_model*.bin")):
            for key, state in _read_tensors(path, stateless.keys()).items():
                if state.numel():
                    stateless[key].set_extra_state(state)
                    restored += 1
    except Exception as error:
        logger.warning(
            "The scales and amax histories of %d of %d converted layers were not restored from %s: %s. Training"
            " continues with new scales for these layers.",
            len(stateless) - restored,
            len(stateless),
            checkpoint,
            error,
        )
        return
    if restored:
        logger.info("Restored the scales and amax histories of %d converted layers from %s.", restored, checkpoint)


def _read_tensors(path: Path, keys: Set[str]) -> Mapping[str, torch.Tensor]:
    if path.suffix == ".safetensors":
        with safetensors.safe_open(path, framework="pt") as file:
            return {key: file.get_tensor(key) for key in keys & set(file.keys())}
    loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    return {key: loaded[key] for key in keys & loaded.keys()}
