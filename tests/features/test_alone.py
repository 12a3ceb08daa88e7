"""The features without a session: plain ``nvdlfw_inspect.api.initialize`` with this folder, in a separate process."""

from typing import Any

import pytest

from tests.features.plain import OURS, THEIRS
from tests.reference.processes import answers

pytestmark = pytest.mark.processes

SPELLINGS: dict[str, dict[str, Any]] = {
    "LogTensorStats": {"tensors": ["activation"], "stats": ["max"]},
    "LogFp8TensorStats": {"tensors": ["activation"], "stats": ["underflows%", "overflows%"]},
    "LogNvfp4TensorStats": {"tensors": ["activation"], "stats": ["underflows%"]},
    "DisableFp8Gemm": {"gemms": ["dgrad", "wgrad"]},
    "DisableFP8GEMM": {"gemms": ["fprop"]},
    "DisableQuantizationGEMM": {"gemms": ["fprop"]},
    "DisableFp8Layer": {},
    "DisableFP8Layer": {},
    "DisableQuantizationLayer": {},
    "PerTensorScaling": {"margin": 1, "gemms": ["dgrad"], "tensors": ["weight", "activation"]},
    "FakeQuant": {
        "quant_format": "FP8E5M2",
        "gemms_struct": [
            {"gemm": "fprop", "tensors": ["activation", "weight"]},
            {"gemm": "dgrad", "tensors": ["gradient"]},
        ],
    },
}
"""The names of references 000 and 001, and the newer ones."""

REFERENCE_CONFIG = """
example_fp8_tensor_stat_collection:
  enabled: True
  layers:
    layer_types: [linear]
  transformer_engine:
    LogFp8TensorStats:
        enabled: True
        tensors_struct:
        - tensor: activation
          stats: [underflows%, overflows%]
          freq: 1
        - tensor: gradient
          stats: [overflows%]
          freq: 2
        start_step: 1
        end_step: 4
"""
"""Reference 000, with other numbers: start_step and end_step of LogFp8TensorStats outside of the struct."""

SCRIPT = f"""
import json, os, sys
from te_precision_callbacks import reference
reference.install()
import torch, transformer_engine.pytorch as te
import nvdlfw_inspect.api as debug_api
OURS, THEIRS = {OURS!r}, {THEIRS!r}

STATISTICS = {{
    "LogTensorStats": {{"enabled": True, "tensors": ["activation"], "stats": ["max"], "freq": 1}},
    "LogFp8TensorStats": {{"enabled": True, "tensors": ["activation"], "stats": ["overflows%"], "freq": 2}},
}}

def run(features, log_dir, dirs=(OURS,), steps=2, config=None):
    layers = {{"layer_types": ["linear"]}}
    config = config or {{"s": {{"enabled": True, "layers": layers, "transformer_engine": features}}}}
    debug_api.initialize(config, feature_dirs=list(dirs), log_dir=log_dir, default_logging_enabled=True)
    api = debug_api.transformer_engine
    from te_precision_callbacks.features.registration import is_upstream
    theirs = [name for name, feature in api.namespace_features.items() if is_upstream(type(feature))]
    net = te.Linear(32, 32, name="linear")
    for step in range(steps):
        with te.autocast(enabled=True):
            out = net(torch.full((16, 32), 2.0 + step, requires_grad=True))
        out.sum().backward()
        debug_api.step()
    debug_api.end_debug()
    with open(os.path.join(log_dir, "nvdlfw_inspect_statistics_logs", "nvdlfw_inspect_globalrank-0.log")) as log:
        rows = [line.split()[-3:] for line in log]
    with open(os.path.join(log_dir, "nvdlfw_inspect_logs", "nvdlfw_inspect_globalrank-0.log")) as log:
        plans = sorted({{line.split("Tensor: ")[1].strip() for line in log if "Tensor: " in line}})
    return {{"own": getattr(api, "is_own", False), "theirs": sorted(theirs), "rows": rows, "plans": plans}}

def twice(dirs, reverse):
    as_listed = os.listdir
    os.listdir = lambda path: sorted(as_listed(path), reverse=reverse)
    prefix = f"{{dirs[0][-12:].replace('/', '-')}}{{len(dirs)}}{{reverse}}"
    return [run(STATISTICS, prefix + number, dirs) for number in "ab"]

def forked(call, *arguments):
    "A process of its own, without the time of the imports."
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            answer = call(*arguments)
        except BaseException as error:
            answer = f"{{type(error).__name__}}: {{error.__context__!r}}"
        os.write(write, json.dumps(answer).encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        answer = json.load(pipe)
    os.waitpid(child, 0)
    return answer

answer = {{}}
for listed, dirs in (("ours", [OURS]), ("ours, theirs", [OURS, THEIRS]), ("theirs, ours", [THEIRS, OURS])):
    answer[listed] = [forked(twice, dirs, reverse) for reverse in (False, True)]
import te_precision_callbacks.config  # the features import it: not in each process anew
for name, options in {SPELLINGS!r}.items():
    answer[name] = forked(run, {{name: {{"enabled": True, **options}}}}, name, [OURS], 1)
answer["yaml"] = forked(run, None, "yaml", [OURS], 7, "config.yaml")
answer["session"] = [name for name in sys.modules if name.startswith("te_precision_callbacks.session")]
"""

LOGGED = [
    ["linear_activation_max", "iteration=000000", "value=2.0000"],
    ["linear_activation_overflows%", "iteration=000000", "value=0.0000"],
    ["linear_activation_max", "iteration=000001", "value=3.0000"],
]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("alone")
    (folder / "config.yaml").write_text(REFERENCE_CONFIG)
    return answers(SCRIPT, cwd=folder)


@pytest.mark.parametrize("listed", ["ours", "ours, theirs", "theirs, ours"])
def test_twice_in_a_process_in_any_order_of_folders_and_files(alone: dict[str, Any], listed: str) -> None:
    """The second time, modules that were imported are not executed again and the registry is empty."""
    for runs in alone[listed]:
        for item in runs:
            assert item["own"]
            assert item["rows"] == LOGGED
            assert item["theirs"] == (["TestDummyFeature"] if "theirs" in listed else [])
    assert alone["session"] == []  # the session was not needed for it


def test_every_spelling_loads_and_does_what_its_name_says(alone: dict[str, Any]) -> None:
    plans = {
        name: {plan.removesuffix(" - High Precision") for plan in alone[name]["plans"] if "Quantize" not in plan}
        for name in SPELLINGS
    }
    pairs = {(t, g) for g, two in (("fprop", "aw"), ("dgrad", "gw"), ("wgrad", "ag")) for t in two}
    long = {"a": "activation", "w": "weight", "g": "gradient"}

    def reading(*gemms: str) -> set[str]:
        return {f"{long[tensor]}, gemm {gemm}" for tensor, gemm in pairs if gemm in gemms}

    assert plans["DisableFp8Gemm"] == reading("dgrad", "wgrad")
    assert plans["DisableFP8GEMM"] == plans["DisableQuantizationGEMM"] == reading("fprop")
    for name in ("DisableFp8Layer", "DisableFP8Layer", "DisableQuantizationLayer"):
        assert plans[name] == reading("fprop", "dgrad", "wgrad")
    assert plans["PerTensorScaling"] == {"weight, gemm dgrad - modify_tensor()"}
    assert plans["FakeQuant"] == {
        "activation, gemm fprop - modify_tensor()",
        "weight, gemm fprop - modify_tensor()",
        "weight, gemm dgrad",
        "gradient, gemm dgrad - modify_tensor()",
    }
    assert [row[0] for row in alone["LogTensorStats"]["rows"]] == ["linear_activation_max"]
    assert [row[0] for row in alone["LogNvfp4TensorStats"]["rows"]] == ["linear_activation_nvfp4_underflows%"]
    for name in ("LogTensorStats", "LogFp8TensorStats", "LogNvfp4TensorStats"):
        assert plans[name] == set()


def test_the_config_of_the_reference_from_a_file(alone: dict[str, Any]) -> None:
    seen: dict[str, list[int]] = {}
    for name, iteration, _ in alone["yaml"]["rows"]:
        seen.setdefault(name, []).append(int(iteration.removeprefix("iteration=")))
    assert seen == {
        "linear_activation_underflows%": [1, 2, 3, 4],
        "linear_activation_overflows%": [1, 2, 3, 4],
        "linear_gradient_overflows%": [2, 4],
    }
