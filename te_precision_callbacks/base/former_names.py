"""Replacements for names of earlier development versions; to be removed at the first release.

Commands and their options are written as on the command line, modules and Python names in full, and everything else as
users write it: keywords, keys and features of a config, statistics, rules.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from importlib.abc import MetaPathFinder
from types import ModuleType

_DIFFERENCE = "Subtract the tensors with numpy: docs/gemm-error.md has an example."

_DUMPED_STEPS = "Choose the steps of DumpTensors with start_step, end_step and freq."

_LOGPROBS = "Use your RL trainer's metrics of the log-probabilities of trainer and rollout."

FORMER_NAMES: Mapping[str, str] = {
    "amax-reduction": "Use stale-scale.",
    "dump": "To dump tensors, resume before the finding, with DumpTensors in the config.",
    "early_steps": "Choose the steps in the config, with freq, start_step and end_step.",
    "gemm-excess": "Compare gemm_format_error of the GEMM with sqnr_db of its operands.",
    "gemm-gain": "Use wrong-gemm.",
    "gemm-kernel": "Use wrong-gemm.",
    "gemm-one-rank": "Use wrong-gemm.",
    "gemm-quantizer": "Use wrong-codes.",
    "gemm_error": "Use gemm_format_error and gemm_kernel_error.",
    "gemm_excess": "Use gemm_format_error, or mse of the operands.",
    "gemm_format_error_a": "Use gemm_format_error, or mse of the operands.",
    "gemm_format_error_b": "Use gemm_format_error, or mse of the operands.",
    "gemm_kernel_column_first": "Dump the GEMM with DumpTensors, and multiply its operands with torch.",
    "gemm_kernel_column_last": "Dump the GEMM with DumpTensors, and multiply its operands with torch.",
    "gemm_kernel_columns": "Dump the GEMM with DumpTensors, and multiply its operands with torch.",
    "gemm_kernel_rank_first": "Use gemm_wrong_rank.",
    "gemm_kernel_rank_last": "Use gemm_wrong_rank.",
    "gemm_kernel_ratio_rank": "Use gemm_wrong_rank.",
    "gemm_kernel_row_first": "Dump the GEMM with DumpTensors, and multiply its operands with torch.",
    "gemm_kernel_row_last": "Dump the GEMM with DumpTensors, and multiply its operands with torch.",
    "gemm_kernel_rows": "Dump the GEMM with DumpTensors, and multiply its operands with torch.",
    "gemm_rounding_bias_a": "Use mse and sqnr_db of LogFp8TensorStats, which the rule wrong-codes reads.",
    "gemm_rounding_bias_b": "Use mse and sqnr_db of LogFp8TensorStats, which the rule wrong-codes reads.",
    "gemm_unchecked%": "GEMMs with inf or nan in all rows have a gemm_kernel_error of 0.",
    "gemm_wrong_codes_a%": "Use mse and sqnr_db of LogFp8TensorStats, which the rule wrong-codes reads.",
    "gemm_wrong_codes_b%": "Use mse and sqnr_db of LogFp8TensorStats, which the rule wrong-codes reads.",
    "gemm_wrong_scales_a%": "Use mse and sqnr_db of LogFp8TensorStats, which the rule wrong-codes reads.",
    "gemm_wrong_scales_b%": "Use mse and sqnr_db of LogFp8TensorStats, which the rule wrong-codes reads.",
    "gemm_zeros_excess_a%": "Use mse and sqnr_db of LogFp8TensorStats, which the rule wrong-codes reads.",
    "gemm_zeros_excess_b%": "Use mse and sqnr_db of LogFp8TensorStats, which the rule wrong-codes reads.",
    "gradient-jump": "Use gradient-norm.",
    "gradient-size": "Use gradient-norm.",
    "high precision": "DisableQuantizationLayer in the config runs layers in high precision.",
    "layer_names": "Write layer_names: upstream, or path, above the sections of the config.",
    "lost-scales": "Use stale-scale.",
    "max_bytes": f"{_DUMPED_STEPS} It stops before less than 1 GiB of the disk is free.",
    "max_files": f"{_DUMPED_STEPS} It stops before less than 1 GiB of the disk is free.",
    "nonfinite-gradient-norm": "Use nonfinite.",
    "nonfinite-loss": "Use nonfinite.",
    "on_broken": "Write on_broken: warn into the contract of require=.",
    "precision-gap": "Use hole.",
    "profile": "Use torch.profiler or Nsight Systems.",
    "protect checkpoint": "Use 'stop', which ends the run before it replaces good checkpoints.",
    "recomputed": "Use hole.",
    "report": "Run te-precision report RUN after the training.",
    "require_same": "Write same_as: rollout.json into the contract of require=.",
    "scale-never-updated": "Use stale-scale.",
    "scales-differ": "Use stale-scale.",
    "spike": "Use growth.",
    "te-precision check --batch": "Give --tokens, and run one step of the script with te-precision run.",
    "te-precision check --calibrate": "Measure with torch.profiler or Nsight Systems.",
    "te-precision check --convert": (
        "Return te_precision_callbacks.accelerate.convert_to_te(model) from the function of --model."
    ),
    "te-precision check --device": "Pass the device to --speed, such as --speed h200.",
    "te-precision check --memory": "Measure with torch.cuda.max_memory_allocated().",
    "te-precision check --table": "Measure with torch.profiler or Nsight Systems.",
    "te-precision dumps diff": _DIFFERENCE,
    "te-precision logprobs": _LOGPROBS,
    "te-precision replay": "Use te_precision_callbacks.dumps.gemm_errors(path) for each dumped GEMM.",
    "te-precision report --device": "Use te-precision check CONFIG --model MODEL --tokens N --speed DEVICE.",
    "te-precision report --logprobs": _LOGPROBS,
    "te-precision speed": (
        "Use te-precision check CONFIG --model MODEL --tokens N --speed DEVICE; for traces, torch.profiler, Nsight"
        " Systems, HolisticTraceAnalysis or TraceLens."
    ),
    "te_precision_callbacks.check.BatchError": "A plan takes tokens=, not a batch.",
    "te_precision_callbacks.check.ConversionError": (
        "Convert the model with te_precision_callbacks.accelerate.convert_to_te before the check."
    ),
    "te_precision_callbacks.dumps.Difference": _DIFFERENCE,
    "te_precision_callbacks.dumps.DifferentShapesError": _DIFFERENCE,
    "te_precision_callbacks.dumps.DumpComparison": _DIFFERENCE,
    "te_precision_callbacks.dumps.NothingToCompareError": _DIFFERENCE,
    "te_precision_callbacks.dumps.compare": _DIFFERENCE,
    "te_precision_callbacks.lightning.HealthyCheckpoint": (
        "Use ModelCheckpoint with save_top_k, and on_finding='stop', so that good checkpoints stay."
    ),
    "te_precision_callbacks.maps.LogProbs": _LOGPROBS,
    "te_precision_callbacks.maps.LogProbsError": _LOGPROBS,
    "te_precision_callbacks.maps.read_logprobs": _LOGPROBS,
    "te_precision_callbacks.replay": "Use te_precision_callbacks.dumps.gemm_errors(path) for each dumped GEMM.",
    "te_precision_callbacks.runs.traces_of": "Use torch.profiler or Nsight Systems.",
    "te_precision_callbacks.search.MeasuredPrior": "Compare with other rules by trainings of your own.",
    "te_precision_callbacks.search.SearchBudget": "Give low_share=, extra_ms= or cosine= to search().",
    "te_precision_callbacks.search.lightning": (
        "Call te_precision_callbacks.search.SearchAtStep from a callback, as docs/search.md shows."
    ),
    "te_precision_callbacks.search.transformers": (
        "Call te_precision_callbacks.search.SearchAtStep from training_step, as docs/search.md shows."
    ),
    "te_precision_callbacks.speed.memory": "Measure with torch.cuda.max_memory_allocated().",
    "te_precision_callbacks.speed.step_of_run": (
        "Pass the coverage of a session to te_precision_callbacks.speed.estimate_step."
    ),
    "te_precision_callbacks.speed.trace": "Read traces with HolisticTraceAnalysis or TraceLens.",
    "when": f"{_DUMPED_STEPS} It writes every tensor in these steps.",
}
"""A name -> the sentence that says what to use instead."""


def former_command(words: Sequence[str]) -> str | None:
    """Return a message about a command or an option that no longer exists; None without one."""
    command = words[0] if words else ""
    options = [f"{command} {word.partition('=')[0]}" for word in words if word.startswith("-")]
    for name in (command, " ".join(words[:2]), *options):
        sentence = FORMER_NAMES.get(f"te-precision {name}")
        if sentence is not None:
            return f"te-precision {name} no longer exists. {sentence}"
    return None


def check_import(name: str) -> None:
    """Raise an ImportError for a module, or a name of a module, that no longer exists."""
    if name in FORMER_NAMES:
        raise ImportError(f"{name} no longer exists. {FORMER_NAMES[name]}", name=name)


class _FormerModules(MetaPathFinder):
    """Python calls this finder last, for modules that do not exist."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> None:
        check_import(fullname)


sys.meta_path.append(_FormerModules())
