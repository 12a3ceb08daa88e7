"""Feature classes with every call, in every way a user may write them, and a record of their calls."""

from textwrap import indent
from typing import Any

SEEN: list[tuple[str, dict[str, Any]]] = []
"""Call -> its arguments; a feature that is executed by path finds it here."""

REFERENCE = {
    "fp8_gemm_enabled": "config, layer_name, gemm, iteration",
    "modify_tensor_enabled": "config, layer_name, gemm, tensor_name, iteration",
    "modify_tensor": "config, layer_name, gemm, tensor_name, tensor, default_quantizer, iteration, out",
    "inspect_tensor_enabled": "config, layer_name, tensor_name, iteration",
    "inspect_tensor": "config, layer_name, tensor_name, tensor, iteration, tp_group",
    "inspect_tensor_postquantize_enabled": "config, layer_name, gemm, tensor_name, iteration",
    "inspect_tensor_postquantize": "config, layer_name, tensor_name, gemm, tensor, iteration, tp_group",
}
"""The signatures of Transformer Engine's page about the calls of its debug API."""

RECENT = {
    **REFERENCE,
    "inspect_tensor": (
        "config, layer_name, tensor_name, tensor, rowwise_quantized_tensor, columnwise_quantized_tensor, quantizer,"
        " iteration, tp_group"
    ),
    "inspect_tensor_postquantize": "config, layer_name, tensor_name, tensor, iteration, tp_group, rowwise",
}
"""Those of Transformer Engine 2.20."""

ANYTHING = dict.fromkeys(REFERENCE, "config, layer_name, **arguments")

SIGNATURES = {"reference": REFERENCE, "recent": RECENT, "anything": ANYTHING}

BODIES = {
    "fp8_gemm_enabled": "return seen['gemm'] != 'wgrad', seen['iteration'] + 1",
    "modify_tensor_enabled": (
        "return (seen['tensor_name'], seen['gemm']) in (('activation', 'fprop'), ('dgrad', 'dgrad')),"
        " seen['iteration'] + 1"
    ),
    "modify_tensor": """
if seen['tensor_name'] == 'dgrad':
    return 2 * seen['tensor']
quantizer = Float8CurrentScalingQuantizer(seen['default_quantizer'].dtype, device=seen['tensor'].device)
if seen['out'] is None:
    return quantizer(seen['tensor'])
quantizer.update_quantized(seen['tensor'], seen['out'])
""",
    "inspect_tensor_enabled": "return True, seen['iteration'] + 1",
    "inspect_tensor": "",
    "inspect_tensor_postquantize_enabled": "return True",
    "inspect_tensor_postquantize": "",
}

HEADER = """
from nvdlfw_inspect.registry import Registry, api_method
from transformer_engine.debug.features.api import TEConfigAPIMapper, TEDefaultFeatures
from transformer_engine.pytorch.tensor.float8_tensor import Float8CurrentScalingQuantizer
from tests.features.probes import SEEN

def saw(call, arguments):
    arguments.pop('self')
    arguments.update(arguments.pop('arguments', {}))
    SEEN.append((call, arguments))
    return arguments

"""


def source(signatures: str, base: str, *, api_method: bool, registered: bool) -> str:
    """The source of a class ``Probe``.

    Args:
        signatures: one of :data:`SIGNATURES`.
        base: its base class; empty for none.
        api_method: whether its methods have that decorator.
        registered: whether the class has the decorator that a file in a folder needs.
    """
    lines = ["@Registry.register_feature(namespace='transformer_engine')"] if registered else []
    lines.append(f"class Probe({base}):")
    for call, names in SIGNATURES[signatures].items():
        lines += ["    @api_method"] if api_method else []
        lines.append(f"    def {call}(self, {names}):")
        lines.append(f"        seen = saw('{call}', dict(locals()))")
        lines.append(indent(BODIES[call].strip(), " " * 8))
    return HEADER + "\n".join(lines) + "\n"


def made(signatures: str, base: str, *, api_method: bool) -> type:
    namespace: dict[str, Any] = {"__name__": "probe"}
    exec(source(signatures, base, api_method=api_method, registered=False), namespace)
    return namespace["Probe"]
