"""The seams between Transformer Engine's Python and the reference backend: rewritten modules, and the extension."""

import ast
import itertools
import os
import sys
from importlib import metadata
from pathlib import Path
from textwrap import dedent
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformer_engine
from transformer_engine.pytorch import constants
from transformer_engine.pytorch.cpp_extensions import fused_attn
from transformer_engine.pytorch.triton.pad import pad_columnwise_scale_inv

from te_precision_callbacks.reference import cuda_on_cpu, cuda_on_cuda, importer, no_triton
from te_precision_callbacks.reference import extension as tex
from te_precision_callbacks.reference.errors import MissingFunctionError
from te_precision_callbacks.reference.extension import missing
from te_precision_callbacks.reference.importer import RewritingLoader
from te_precision_callbacks.reference.rewrite import ALIAS, rewrite
from tests.reference.processes import answers
from tests.reference.seams import READ_FROM, SEAMS

on_cpu = cuda_on_cpu


def execute(source: str, *, cuda_on_cpu: bool = True) -> dict[str, Any]:
    names: dict[str, Any] = {"__name__": "rewritten", ALIAS: on_cpu if cuda_on_cpu else cuda_on_cuda}
    exec(compile(rewrite(ast.parse(dedent(source)), cuda_on_cpu=cuda_on_cpu), "rewritten", "exec"), names)
    return names


def test_what_the_table_says_stands_upstream() -> None:
    for seam in SEAMS:
        packages = Path(transformer_engine.__path__[0]).parent
        assert seam.text in (packages / seam.upstream).read_text(encoding="utf-8")


def test_the_versions_are_the_installed_ones() -> None:
    for name, version in READ_FROM.items():
        assert metadata.version(name).split(".")[:2] == version.split(".")[:2]


def test_a_file_that_is_executed_again_is_rewritten_again_only_where_it_has_changed(tmp_path: Path) -> None:
    """As feature files are: nvidia-dlfw-inspect executes all of them whenever it is initialized."""
    file = tmp_path / "mine.py"
    loader = RewritingLoader("mine", str(file), cuda_on_cpu=True)
    file.write_text("DEVICE = 'cuda'\n")
    assert loader.get_code("mine") == loader.get_code("mine")
    file.write_text("DEVICE = 'cuda', 'cuda'\n")
    names: dict[str, Any] = {}
    exec(loader.get_code("mine"), names)
    assert names["DEVICE"] == ("cpu", "cpu")


def test_on_a_cpu_cuda_is_the_cpu() -> None:
    names = execute(
        '''
        """A docstring."""
        from __future__ import annotations
        import torch
        made = torch.ones(1, device="cuda")
        moved = torch.ones(1).cuda().to(device="cuda")
        device = torch.device("cuda", torch.cuda.current_device())
        current = torch.empty(1, device=torch.cuda.current_device())
        on_cuda = made.is_cuda and made.device.type == "cuda"
        on_meta = torch.ones(1, device="meta").is_cuda
        class Mine:
            @property
            def is_cuda(self):
                return made.is_cuda
        own = Mine.__dict__["is_cuda"].fget(None)
        '''
    )
    assert names["__doc__"] == "A docstring."
    assert {names[name].device for name in ("made", "moved", "current")} == {torch.device("cpu")}
    assert names["device"] == torch.device("cpu")
    assert names["on_cuda"] is True
    assert names["on_meta"] is False
    assert names["own"] is torch.ones(1).is_cuda


def test_what_holds_on_every_device() -> None:
    source = """
        import torch
        from torch.cuda import _lazy_call, get_device_capability
        capability = get_device_capability(), torch.cuda.get_device_capability("cuda"), torch.cuda.Stream
        version = torch.version.cuda
        @torch.compile
        def plain(x): return x
        @torch.compile(fullgraph=True)
        def with_options(x): return x
        plain_type = type(plain)
        text = "cuda"
        """
    on_cpu, on_cuda = execute(source), execute(source, cuda_on_cpu=False)
    for names in (on_cpu, on_cuda):
        assert names["capability"][:2] == ((9, 0), (9, 0))
        assert float(names["version"]) >= 12.9
        assert names["plain_type"] is type(execute)
        assert names["with_options"](3) == 3
    assert on_cpu["capability"][2] is cuda_on_cpu.Stream
    assert on_cuda["capability"][2] is torch.cuda.Stream
    assert (on_cpu["text"], on_cuda["text"]) == ("cpu", "cuda")


def test_a_real_gpu_keeps_its_properties_and_stands_for_another_capability(monkeypatch: pytest.MonkeyPatch) -> None:
    real = SimpleNamespace(major=8, minor=0, multi_processor_count=108)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: real)
    properties = cuda_on_cuda.get_device_properties(0)
    assert (properties.major, properties.minor, properties.multi_processor_count) == (9, 0, 108)


def test_a_scaled_product_multiplies_the_sums_by_the_scales() -> None:
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(16, 32, generator=generator).to(torch.float8_e4m3fn)
    b = torch.randn(48, 32, generator=generator).to(torch.float8_e4m3fn)
    scales, bias = (torch.tensor([0.0123]), torch.tensor([0.0377])), torch.randn(48, generator=generator).bfloat16()
    assert execute("import torch\nscaled_mm = torch._scaled_mm\n")["scaled_mm"] is cuda_on_cpu.scaled_mm
    # Sums of so few FP8 products are exact.
    exact = (a.double() @ b.double().t()).float() * scales[1] * scales[0]
    out = cuda_on_cpu.scaled_mm(a, b.t(), *scales, out_dtype=torch.float32, use_fast_accum=True)
    assert torch.equal(out, exact)
    out = cuda_on_cpu.scaled_mm(a, b.t(), scale_a=scales[0], scale_b=scales[1], bias=bias, out_dtype=torch.bfloat16)
    assert torch.equal(out, (exact + bias.float()).bfloat16())


def test_a_triton_kernel_can_be_defined_and_not_launched() -> None:
    names = execute(
        """
        import triton
        import triton.language as tl
        from triton.language.standard import _log2
        @triton.autotune(configs=[triton.Config({"BLOCK": 2})], key=[])
        @triton.jit
        def kernel(x, BLOCK: tl.constexpr):
            tl.store(x, 1)
        """
    )
    assert names["triton"] is no_triton
    with pytest.raises(MissingFunctionError, match="the triton kernel kernel"):
        names["kernel"][(1,)](None)


def test_scale_padding_is_what_the_kernel_gives() -> None:
    x = torch.arange(3 * 130, dtype=torch.uint8).reshape(130, 3)
    padded = pad_columnwise_scale_inv(x)
    assert padded.shape == (256, 4)
    assert torch.equal(padded[:130, :3], x)
    assert padded.sum(dtype=torch.int64) == x.sum(dtype=torch.int64)


FEATURE = """
import torch
from nvdlfw_inspect.registry import Registry, api_method
from transformer_engine.debug.features.api import TEConfigAPIMapper

@Registry.register_feature(namespace="transformer_engine")
class {name}(TEConfigAPIMapper):
    @api_method
    def inspect_tensor_enabled(self, config, layer_name, tensor_name, iteration, **_):
        return True, iteration + 1

    @api_method
    def inspect_tensor(self, config, layer_name, tensor_name, iteration, tp_group, tensor, **_):
        assert tensor.is_cuda and isinstance(tensor, torch.Tensor)
        torch.add(tensor, torch.zeros(1, device="cuda")).cuda()
        seen.append(tensor_name)

seen = torch.{name}_seen = []
"""


@pytest.mark.processes
def test_feature_files_are_treated_like_transformer_engines_own(tmp_path: Path) -> None:
    """Also where nvidia-dlfw-inspect was imported before the backend was installed."""
    (tmp_path / "my_feature.py").write_text(FEATURE.format(name="MyFeature"))
    assert answers(
        f"""
        import nvdlfw_inspect.api as debug_api
        from te_precision_callbacks import reference
        reference.install()
        import torch
        import transformer_engine.pytorch as te
        import transformer_engine.debug.features as features

        layers = {{"layer_types": ["layer"]}}
        fake_quant = {{"enabled": True, "gemms": ["fprop"], "tensors": ["weight"], "quant_format": "FP8E4M3"}}
        config = {{"mine": {{"enabled": True, "layers": layers, "transformer_engine": {{
            "MyFeature": {{"enabled": True, "tensors": ["activation"]}}, "FakeQuant": fake_quant}}}}}}
        debug_api.initialize(config_file=config, log_dir={str(tmp_path)!r}, default_logging_enabled=False,
                             feature_dirs=[features.__path__[0], {str(tmp_path)!r}])
        te.Linear(32, 32, name="layer")(torch.randn(32, 32))
        answer = torch.MyFeature_seen
        """
    ) == ["activation"]


# --- code of rewritten modules is kept for the next process -----------------------------------------------------------


MOMENT = 1_700_000_000


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    return written(tmp_path / "mine.py", 'DEVICE = "cuda"\n')


def written(file: Path, text: str) -> Path:
    file.write_text(text)
    os.utime(file, (MOMENT, MOMENT))
    return file


def device(source: Path, *, cuda_on_cpu: bool = True) -> str:
    names: dict[str, Any] = {}
    exec(RewritingLoader("mine", str(source), cuda_on_cpu).get_code("mine"), names)
    return str(names["DEVICE"])


def kept(source: Path) -> list[Path]:
    folder = source.parent / "__pycache__"
    return sorted(folder.iterdir()) if folder.exists() else []


def test_what_was_kept_is_read(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert device(source) == "cpu"
    (file,) = kept(source)
    with monkeypatch.context() as patch:
        patch.setattr(RewritingLoader, "source_to_code", None)
        assert device(source) == "cpu"
    assert device(source, cuda_on_cpu=False) == "cuda"
    assert device(source) == "cpu"
    monkeypatch.setattr(importer, "_rewriter", lambda: "another")
    assert device(source) == "cpu"
    assert len(kept(source)) == 3
    assert file in kept(source)


def test_a_changed_source_is_rewritten_again(source: Path) -> None:
    assert device(source) == "cpu"
    written(source, 'DEVICE = "meta" or "cuda"\n')
    assert device(source) == "meta"


@pytest.mark.parametrize("damage", [b"", b"\x00", b"N", b"no code at all"])
def test_a_damaged_entry_is_written_again(source: Path, damage: bytes) -> None:
    assert device(source) == "cpu"
    (file,) = kept(source)
    whole = file.read_bytes()
    file.write_bytes(damage)
    assert device(source) == "cpu"
    assert file.read_bytes() == whole


def test_a_folder_that_cannot_be_written_is_no_error(source: Path) -> None:
    (source.parent / "__pycache__").write_text("a file")
    assert device(source) == "cpu"


def test_pythons_own_bytecode_stays(source: Path) -> None:
    importer.SourceFileLoader("mine", str(source)).get_code("mine")
    (own,) = kept(source)
    before = own.read_bytes()
    assert device(source) == "cpu"
    assert own.read_bytes() == before
    assert len(kept(source)) == 2


# --- names that Transformer Engine looks up in its compiled module ----------------------------------------------------


EXTENSION = "transformer_engine_torch"
# onnx_extensions.py reads it in a function that is never called; the compiled module does not have it.
SLIPS = {"LayerNorm"}


def _names_looked_up() -> dict[str, set[str]]:
    results: dict[str, set[str]] = {}
    root = Path(transformer_engine.__path__[0])
    for file in [*root.glob("pytorch/**/*.py"), *root.glob("debug/**/*.py")]:
        tree = ast.parse(file.read_text())
        aliases = set()
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                aliases |= {alias.asname or alias.name for alias in node.names if alias.name == EXTENSION}
            elif isinstance(node, ast.ImportFrom):
                # cpp_extensions passes all of the extension on.
                aliases |= {alias.asname or alias.name for alias in node.names if alias.name == "cpp_extensions"}
                if node.module == EXTENSION:
                    for alias in node.names:
                        results.setdefault(alias.name, set()).add(str(file.relative_to(root)))
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in aliases:
                results.setdefault(node.attr, set()).add(str(file.relative_to(root)))
    return {name: files for name, files in results.items() if name != "*" and name not in SLIPS}


@pytest.mark.slow
def test_every_name_is_there() -> None:
    names = _names_looked_up()
    assert len(names) > 150
    assert {name: files for name, files in names.items() if not hasattr(tex, name)} == {}
    assert set(names) <= set(tex.__all__)


def test_what_is_missing_says_so() -> None:
    for name in itertools.chain(*missing.MISSING.values()):
        with pytest.raises(MissingFunctionError, match=rf"^{name} is not in the reference backend"):
            getattr(tex, name)(1, 2, three=4)


def test_enumerations_agree_with_transformer_engines_own() -> None:
    assert {member.name: int(member) for member in constants.DType} == {m.name: int(m) for m in tex.DType}
    assert {f"NVTE_{name}": int(member) for name, member in fused_attn.FusedAttnBackend.__members__.items()} == {
        member.name: int(member) for member in tex.NVTE_Fused_Attn_Backend
    }
    assert constants.DType.kFloat8E5M2 == tex.DType.kFloat8E5M2


@pytest.mark.processes
def test_importing_it_imports_nothing_of_transformer_engine() -> None:
    code = """
    import sys, te_precision_callbacks.reference.extension
    answer = [name for name in sys.modules if name.startswith("transformer_engine")]
    """
    assert answers(code) == []
