"""Every format and direction, as training lays it out: read back from its dump where there is no Transformer Engine."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

from tests.capability import any_capability
from tests.dumps.producing import BLACKWELL, HOPPER, OPERANDS, QUANTIZERS, RECIPES, produced
from tests.reference.processes import python

pytestmark = pytest.mark.processes

DIRECT = [(capability, name) for capability, names in QUANTIZERS.items() for name in names]
TRAINED = [
    (capability, f"{name}.{operand}") for capability, names in RECIPES.items() for name in names for operand in OPERANDS
]
Facts = dict[str, dict[str, Any]]

READER = """
    import json, sys
    from pathlib import Path

    class NoTransformerEngine:
        def find_spec(self, name, path=None, target=None):
            if name.split(".")[0] in ("transformer_engine", "transformer_engine_torch", "nvdlfw_inspect"):
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    sys.meta_path.insert(0, NoTransformerEngine())
    try:
        import transformer_engine
        sys.exit("there is a Transformer Engine")
    except ModuleNotFoundError:
        pass

    import numpy as np
    import torch
    from te_precision_callbacks import dumps

    def bits(array):
        # NaN in any spelling is NaN.
        array = np.ascontiguousarray(array, np.float32)
        return np.where(np.isnan(array), np.int32(0x7FC00000), array.view(np.int32))

    found = {}
    for path in sorted(Path(sys.argv[1]).glob("*/*.safetensors")):
        name, dump = path.name.removesuffix(".safetensors"), dumps.load(path)
        facts = {"header": json.loads(dump.header.to_json()), "equal": {}, "elements": {}}
        for side in ("rowwise", "columnwise"):
            expected = path.with_name(f"{name}.{side}.npy")
            if expected.exists():
                numbers = dumps.dequantize(dump, side == "columnwise", dtype=torch.float32).numpy()
                expected = np.load(expected)
                same = numbers.size == expected.size and bits(numbers.reshape(expected.shape)) == bits(expected)
                facts["equal"][side] = bool(np.all(same))
                facts["elements"][side] = [numbers.size, int((numbers != 0).sum())]
        facts["shapes"] = {name: list(tensor.shape) for name, tensor in dump.tensors.items()}
        facts["dtypes"] = {name: str(tensor.dtype) for name, tensor in dump.tensors.items()}
        found.setdefault(path.parent.name, {})[name] = facts
    print(json.dumps([found, [name for name in sys.modules if name.startswith("transformer_engine")]]))
"""


def read_all(folder: Path) -> dict[str, Facts]:
    read = python(READER.replace("sys.argv[1]", repr(str(folder))))
    assert read.returncode == 0, read.stderr
    result, of_transformer_engine = json.loads(read.stdout)
    assert of_transformer_engine == []
    return result


@pytest.fixture(scope="session")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Facts, Facts]]:
    """By capability; made once, also where several processes share the tests."""
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    made = shared / "dumps_of_every_format.json"
    with FileLock(f"{made}.lock"):
        if not made.exists():
            folder = tmp_path_factory.mktemp("dumps")
            facts = {}
            with any_capability():
                for capability in (HOPPER, BLACKWELL):
                    (folder / capability).mkdir()
                    facts[capability] = produced(capability, folder / capability)
            read = read_all(folder)
            made.write_text(json.dumps({capability: (facts[capability], read[capability]) for capability in facts}))
    return {capability: tuple(pair) for capability, pair in json.loads(made.read_text()).items()}


def is_swizzled(name: str) -> bool:
    """Return whether Transformer Engine writes this tensor's scales in the order of a GEMM."""
    if name.startswith(("nvfp4", "NVFP4")):
        # Of the quantizers the kernels for a random Hadamard transform and for 2D blocks, in shapes that they take.
        return "aligned" in name or not name.endswith(("_weight", "_gradient"))
    return name.startswith(("mxfp8", "MXFP8"))


def check(name: str, facts: dict[str, Any], found: dict[str, Any]) -> None:
    assert facts["swizzled"] == is_swizzled(name)
    assert found["equal"], "nothing was read"
    assert all(found["equal"].values()), found["equal"]
    for elements, above_zero in found["elements"].values():
        assert above_zero > elements / 4
    header = found["header"]["quantized"]
    for side, stored in zip(("rowwise", "columnwise"), facts["stored_scales"], strict=True):
        if header[side] is not None:
            assert header[side]["swizzled"] == facts["swizzled"]
            assert stored in (None, header[side]["stored_scale_shape"])


def test_quantized_for_a_gemm(seen: dict[str, tuple[Facts, Facts]]) -> None:
    for capability, name in DIRECT:
        facts, results = seen[capability][0][name], seen[capability][1][name]
        check(name, facts, results)
        # Blackwell's Float8 data are never stored transposed.
        only_rowwise = name.startswith("float8") and capability == BLACKWELL
        assert set(results["equal"]) == ({"rowwise"} if only_rowwise else {"rowwise", "columnwise"})
        if name.startswith("float8"):
            continue
        for side, stored in zip(("rowwise", "columnwise"), facts["stored_scales"], strict=True):
            compact = results["shapes"][f"{side}_block_scale_inv"]
            assert stored[0] * stored[1] > compact[0] * compact[1], "these scales have no padding"


def test_an_operand_of_training(seen: dict[str, tuple[Facts, Facts]]) -> None:
    for capability, name in TRAINED:
        facts, results = seen[capability][0][name], seen[capability][1][name]
        check(name, facts, results)
        # The direction that the GEMM reads; of Blackwell's Float8 data there is only one.
        side = "columnwise" if facts["columnwise"] else "rowwise"
        if name.startswith("Float8CurrentScaling") and capability == BLACKWELL:
            side = "rowwise"
        assert side in results["equal"]


def test_the_internals_have_their_names_and_dtypes(seen: dict[str, tuple[Facts, Facts]]) -> None:
    assert seen[HOPPER][1]["float8_delayed"]["dtypes"] == {
        "data": "torch.float8_e4m3fn",
        "transpose": "torch.float8_e4m3fn",
        "scale_inv": "torch.float32",
    }
    both = ("rowwise", "columnwise")
    assert seen[HOPPER][1]["block_2d"]["dtypes"] == {
        **{f"{side}_data": "torch.float8_e4m3fn" for side in both},
        **{f"{side}_block_scale_inv": "torch.float32" for side in both},
    }
    assert seen[BLACKWELL][1]["mxfp8_e5m2"]["dtypes"] == {
        **{f"{side}_data": "torch.float8_e5m2" for side in both},
        **{f"{side}_block_scale_inv": "torch.float8_e8m0fnu" for side in both},
        **{f"{side}_block_scale_inv_values": "torch.float32" for side in both},
    }
    assert seen[BLACKWELL][1]["nvfp4"]["dtypes"] == {
        **{f"{side}_data": "torch.uint8" for side in both},
        **{f"{side}_data_unpacked_values": "torch.float32" for side in both},
        **{f"{side}_block_scale_inv": "torch.float8_e4m3fn" for side in both},
        **{f"{side}_block_scale_inv_values": "torch.float32" for side in both},
        **{f"{side}_block_factors": "torch.float32" for side in both},
        **{f"amax_{side}": "torch.float32" for side in both},
    }


def test_the_header_tells_which_data_are_transformed(seen: dict[str, tuple[Facts, Facts]]) -> None:
    result = seen[BLACKWELL][1]
    stated = {
        name: (header["rowwise"]["hadamard"], header["columnwise"]["hadamard"])
        for name in ("nvfp4", "nvfp4_rht", "nvfp4_2d")
        for header in (result[name]["header"]["quantized"],)
    }
    assert stated == {"nvfp4": (False, False), "nvfp4_rht": (False, True), "nvfp4_2d": (False, False)}
