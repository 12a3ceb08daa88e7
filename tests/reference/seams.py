"""Every place where Transformer Engine's Python, or what loads its features, meets the reference backend.

If a text occurs many times, the place is an example. The replacements are in
:mod:`~te_precision_callbacks.reference.rewrite`, :mod:`~te_precision_callbacks.reference.importer` and
:mod:`~te_precision_callbacks.reference.cuda_on_cpu`.
"""

from dataclasses import dataclass

# The versions that the seams were read from.
READ_FROM = {"transformer-engine": "2.20.2", "nvdlfw-inspect": "0.2.2"}


@dataclass(frozen=True)
class Seam:
    """One place, or one kind of place.

    Attributes:
        upstream, text: the file, as it is imported, and the source text there.
        answer, reason: the backend's replacement, and why.
        everywhere: whether this also holds with a real GPU; otherwise only where the CPU replaces the GPU.
    """

    upstream: str
    text: str
    answer: str
    reason: str
    everywhere: bool = False


SEAMS = (
    Seam(
        "transformer_engine/common/__init__.py",
        "def load_framework_extension(",
        "does nothing for torch",
        "It looks for the compiled extension; the finder gives the backend's as `transformer_engine_torch`.",
        everywhere=True,
    ),
    Seam(
        "transformer_engine/common/__init__.py",
        '"NVTE_PROJECT_BUILDING" not in os.environ',
        "this block is left out",
        "Otherwise it checks the compiled packages, and loads CUDA's and its own libraries.",
        everywhere=True,
    ),
    Seam(
        "nvdlfw_inspect/utils.py",
        "importlib.util.spec_from_file_location(",
        "the file is rewritten as Transformer Engine's modules are",
        "Debug features, Transformer Engine's and others, are executed by file path, past import hooks.",
        everywhere=True,
    ),
    Seam(
        "transformer_engine/pytorch/utils.py",
        "torch.cuda.get_device_properties(",
        "`torch.cuda` is the module `cuda_on_cpu`, or `cuda_on_cuda` where there is a GPU",
        "The compute capability decides what is allowed, what is the default, and how Float8 data lie in memory: it "
        "is the one that the backend emulates. On a CPU torch's own functions raise.",
        everywhere=True,
    ),
    Seam(
        "transformer_engine/pytorch/distributed.py",
        "from torch.cuda import _lazy_call, _lazy_init",
        "the same, for names that are imported one by one",
        "The random number state of a GPU is asked for through them.",
        everywhere=True,
    ),
    Seam(
        "transformer_engine/pytorch/quantization.py",
        "torch.version.cuda",
        "`13.0`",
        "FP8 block scaling asks for CUDA 12.9, which the backend has no use for. None on a torch without CUDA.",
        everywhere=True,
    ),
    Seam(
        "transformer_engine/debug/features/utils/stats_computation.py",
        "@torch.compile",
        "the function as it is; `torch.compile(function)` of those in `pytorch/jit.py` computes in float32 and rounds "
        "once",
        "Compiling costs minutes and changes the order of summation; a compiled kernel rounds once, at the end. "
        "`torch.compile` of your own code is untouched.",
        everywhere=True,
    ),
    Seam(
        "transformer_engine/pytorch/jit.py",
        "return x * 0.5 * (1.0 + torch.tanh(0.79788456 * x * (1 + 0.044715 * x * x)))",
        "the function, and its gradients, with some rows at a time",
        "A compiler makes one kernel of it. A dozen passes over the largest activation took a third of a step.",
        everywhere=True,
    ),
    Seam(
        "transformer_engine/pytorch/attention/dot_product_attention/dot_product_attention.py",
        "No dot product attention backend is available for the provided inputs.",
        "`MissingFunctionError`, which says what to use instead",
        "There is unfused attention alone. It does not support context parallelism, and the message is of variables "
        "that log why a fused one is not used.",
        everywhere=True,
    ),
    Seam(
        "transformer_engine/pytorch/attention/dot_product_attention/utils.py",
        'os.environ.get("NVTE_UnfusedDPA_Emulate_FP8", "0")',
        'the default is `"1"`',
        "Unfused attention then emulates FP8 attention, for which there is no fused kernel.",
        everywhere=True,
    ),
    Seam(
        "transformer_engine/pytorch/module/base.py",
        'device="cuda"',
        'the text `"cuda"` is `"cpu"`, in factories, defaults of arguments, comparisons, operators and map locations',
        "Tensors live on the CPU; MXFP8 and NVFP4 move data there before they are dequantized.",
    ),
    Seam(
        "transformer_engine/pytorch/utils.py",
        'torch.device("cuda", torch.cuda.current_device())',
        'without the second argument, and `torch.cuda.current_device()` alone is `torch.device("cpu")`',
        "Its number is given to torch as a device, which then is a GPU.",
    ),
    Seam(
        "transformer_engine/pytorch/module/base.py",
        ".is_cuda",
        'true of what is on the CPU, false on "meta"; the tensor classes\' own properties of this name are left alone',
        "Modules, attention and debug features refuse inputs that are not on a GPU.",
    ),
    Seam(
        "transformer_engine/pytorch/tensor/storage/float8_tensor_storage.py",
        ".is_cpu",
        "the opposite of `.is_cuda`",
        "Float8 data on a CPU is dequantized in a way of its own, which gives a 0-d tensor the shape [1].",
    ),
    Seam(
        "transformer_engine/pytorch/utils.py",
        ".cuda()",
        "`.cpu()`",
        "Scratch tensors are made on the CPU and moved.",
    ),
    Seam(
        "transformer_engine/pytorch/ops/basic/activation.py",
        "torch.is_autocast_enabled()",
        'asks for the CPU\'s autocast, as `torch.get_autocast_dtype("cuda")` does by the change of "cuda"',
        "Without an argument it asks for the GPU's.",
    ),
    Seam(
        "transformer_engine/debug/features/utils/stats_computation.py",
        "torch.norm(x, p=1)",
        "accumulated in float64",
        "On a CPU it is off by up to 3e-4, relative, in float32.",
    ),
    Seam(
        "transformer_engine/pytorch/custom_recipes/reference_current_scaling.py",
        "torch._scaled_mm(",
        "the sums are multiplied by the scales",
        "On a CPU torch multiplies the matrices by their scales, which rounds before the sums; a GPU, and the "
        "backend's GEMM, multiplies the sums.",
    ),
    Seam(
        "transformer_engine/pytorch/distributed.py",
        "torch.distributed._coalescing_manager(",
        "the collectives in it run one after the other",
        "Data and scales of block-scaled tensors are gathered together under it; gloo refuses it, or garbles types.",
    ),
    Seam(
        "transformer_engine/common/triton/permutation.py",
        "import triton",
        "the module `no_triton`, whose kernels raise when they are launched",
        "Triton may not be installed without a GPU, and cannot run there; modules import it when they are imported.",
    ),
    Seam(
        "transformer_engine/pytorch/triton/pad.py",
        "def pad_columnwise_scale_inv(",
        "a function in torch",
        "A triton kernel that is launched in training without being asked for: gathering MXFP8 data.",
        everywhere=True,
    ),
)
