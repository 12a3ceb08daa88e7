"""The clients: folder, requirements, start, and integration of each.

A script is run as it is, with arguments that make it small. ``launcher`` and ``arguments`` follow its README,
with a smaller size.
"""

import shlex
import subprocess
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tests.clients import standins

SCRIPTS = Path(__file__).parent / "scripts"


@dataclass(frozen=True)
class Client:
    """A third-party training script.

    Attributes:
        name: name in the table.
        marker: the end of its path in a folder of sources; the client's folder is the marker's.
        what: its row of the table: integration that trains it, recipe, processes.
        environment: the name of its environment, which clients with the same packages share.
        packages: installed by pip for it in addition to this project's own requirements.
        arguments: the script and its arguments.
        launcher: the program that starts it, with its arguments; empty: Python.
        integration: how the debugger comes around it, see inside/watching.py.
        stand_ins: functions that prepare its data; each gets the folder that it runs in, and its Python.
        stands_in: the same in words.
        capability: compute capability that the reference backend stands for.
        variables: additional environment variables.
        said: packages, with their versions in the table.
        from_index: the client is a library of the package index; its script lies in this repository.
        up: how many folders above the marker's it runs in.
        differs: why losses and GEMMs differ when the debugger watches, where that is known.
        fails: why it fails without the debugger, where that is known.
    """

    name: str
    marker: str
    what: str
    environment: str
    packages: tuple[str, ...]
    arguments: tuple[str, ...]
    launcher: tuple[str, ...] = ()
    integration: str = "session"
    stand_ins: tuple[Callable[[Path, Path], None], ...] = ()
    stands_in: str = ""
    capability: str = "9.0"
    variables: Mapping[str, str] = field(default_factory=dict)
    said: tuple[str, ...] = ()
    from_index: bool = False
    up: int = 0
    differs: str = ""
    fails: str = ""

    def find(self, folder: Path) -> Path | None:
        """Its folder in a folder of sources; None if it is not there. Of several the first by name."""
        if self.from_index:
            return SCRIPTS / Path(self.marker).parent
        name = Path(self.marker).name
        results = sorted(path for path in folder.rglob(name) if path.as_posix().endswith("/" + self.marker))
        return results[0].parents[self.up] if results else None


def tree_of(folder: Path) -> str:
    """Git's hash of the folder's content (``git rev-parse COMMIT:folder``), its first 10 digits."""
    with tempfile.TemporaryDirectory() as place:
        git = ["git", f"--git-dir={place}", f"--work-tree={folder}"]
        subprocess.run([*git, "init", "--quiet"], check=True)
        subprocess.run([*git, "add", "--all", "--force", ".", ":!*__pycache__*"], check=True, cwd=folder)
        tree = subprocess.run([*git, "write-tree"], check=True, capture_output=True, text=True).stdout
    return tree[:10]


_BERT_STANDS_IN = "bert-base-cased, MRPC of GLUE, and its metric"
_GENOMES = "dataset.load_dataset_kwargs.data_files=test_genomic_sequences.parquet"
_SEQUENCE = "dataset.text_column=sequence"


def _accelerate(
    name: str, what: str, launcher: tuple[str, ...] = (), bert: Callable[[Path, Path], None] = standins.bert_base_cased
) -> Client:
    return Client(
        name=f"accelerate/{name}",
        marker=f"benchmarks/fp8/transformer_engine/{name}.py",
        what=what,
        environment="accelerate",
        packages=("datasets", "evaluate"),
        arguments=(f"{name}.py",),
        launcher=launcher,
        integration="accelerate",
        stand_ins=(bert, standins.mrpc, standins.glue_metric),
        stands_in=_BERT_STANDS_IN,
        said=("accelerate", "transformers"),
    )


_FUSED_NORM = (
    "under delayed scaling Transformer Engine's norm writes FP8 directly, but in a watched layer the norm writes BF16, "
    "which is then quantized; see [observing.md](../../docs/observing.md)"
)
_ESM_SMALL = (
    "num_train_steps=3",
    "+config_kwargs.num_hidden_layers=2",
    "+config_kwargs.hidden_size=64",
    "+config_kwargs.intermediate_size=128",
    "+config_kwargs.num_attention_heads=4",
    "dataset.max_seq_length=64",
    "dataset.num_workers=0",
    "use_torch_compile=false",
    "fp8_config.enabled=true",
)
# Under which watching changes no bit of a TransformerLayer, whatever its activation: docs/observing.md.
_BLOCKS = ("fp8_config.fp8_recipe=transformer_engine.common.recipe.Float8BlockScaling", "fp8_config.fp8_format=E4M3")
_LLAMA_SMALL = (
    "num_train_steps=3",
    "config_kwargs.hidden_size=64",
    "config_kwargs.intermediate_size=128",
    "config_kwargs.num_attention_heads=4",
    "config_kwargs.num_key_value_heads=4",
    "+config_kwargs.head_dim=16",
    "+config_kwargs.vocab_size=256",
    "dataset.tokenizer_name_or_path=./tokenizers/nucleotide_fast_tokenizer",
    "dataset.max_seq_length=64",
    "dataset.stride=8",
    "dataset.pad_sequences_to_be_divisible_by=16",
    "dataset.num_workers=0",
    "dataset.buffer_size=100",
    "use_torch_compile=false",
    "fp8_config.enabled=true",
)
_CODONS_SMALL = tuple(
    shlex.split(
        "-m src.runner pretrain --exp_name tiny --model_name encodon_200k --data_path standin_codons "
        "--process_item mlm_memmap --dataset_name CodonMemmapDataset --lr 1e-3 --num_gpus 1 --max_steps 3 "
        "--train_batch_size 2 --val_batch_size 2 --num_workers 0 --context_length 64 --bf16 --warmup_iterations 1 "
        "--train_val_test_ratio 0.8 0.1 0.1 --limit_val_batches 1 --val_check_interval 3 --log_every_n_steps 1 "
        "--out_dir results --checkpoints_dir results/checkpoints --use_transformer_engine"
    )
)
# The recipes require transformers 5, and call functions that later versions lack.
_RECIPE_PACKAGES = ("datasets", "hydra-core", "nvtx", "torchdata", "zstandard", "transformers==5.5.0")
# The model code of these two recipes needs transformers 4; pinned, since pip searches long for what goes with it.
_TRANSFORMERS_4 = (
    "transformers==4.57.1",
    "huggingface-hub==0.36.0",
    "tokenizers==0.22.2",
    "datasets==4.4.1",
    "hydra-core==1.3.8",
    "peft==0.21.2",
    "torchdata==0.11.0",
    "nvtx==0.2.17",
)
_ESM_CHECKPOINT = "example_8m_checkpoint with 2 layers of hidden size 64"


def _recipe(
    folder: str,
    script: str,
    what: str,
    processes: int,
    arguments: tuple[str, ...],
    *,
    stands_in: str = "",
    name: str = "",
    differs: str = "",
) -> Client:
    return Client(
        name=name or folder,
        marker=f"{folder}/{script}",
        what=what,
        environment="bionemo_recipes",
        packages=_RECIPE_PACKAGES,
        arguments=(script, *arguments),
        launcher=("torchrun", "--nproc-per-node", str(processes)),
        stands_in=stands_in,
        said=("transformers", "datasets"),
        differs=differs,
    )


def _megatron(name: str, what: str, processes: int, *arguments: str, capability: str = "9.0") -> Client:
    return Client(
        name=f"megatron-core/{name}",
        marker="megatron/train_gpt.py",
        what=what,
        environment="megatron_core",
        packages=("megatron-core==0.16.1",),
        arguments=("train_gpt.py", *arguments),
        launcher=("torchrun", "--nproc-per-node", str(processes)),
        integration="megatron",
        from_index=True,
        capability=capability,
        stands_in="the script itself, tests/clients/scripts/megatron/train_gpt.py; random tokens",
        said=("megatron-core",),
    )


CLIENTS = (
    _accelerate("non_distributed", "own loop, then Accelerator(mixed_precision=fp8); delayed scaling; 1 process"),
    _accelerate(
        "ddp", "the same under DDP; 2 processes", ("accelerate", "launch", "--num_processes", "2", "--multi_gpu")
    ),
    _accelerate(
        "fsdp",
        "the same under FSDP; 2 processes",
        ("accelerate", "launch", "--num_processes", "2", "--multi_gpu"),
        standins.bert_of_two_sides,
    ),
    _recipe(
        "esm2_native_te",
        "train_ddp.py",
        "own loop, DDP, delayed scaling; 1 process",
        1,
        _ESM_SMALL,
        differs=_FUSED_NORM,
    ),
    _recipe(
        "esm2_native_te",
        "train_fsdp2.py",
        "own loop, FSDP2, block scaling; 2 processes",
        2,
        (*_ESM_SMALL, *_BLOCKS),
        name="esm2_native_te/fsdp2",
    ),
    _recipe(
        "llama3_native_te",
        "train_ddp.py",
        "own loop, DDP, block scaling; 1 process",
        1,
        (*_LLAMA_SMALL, *_BLOCKS, _GENOMES, _SEQUENCE),
    ),
    _recipe(
        "llama3_native_te",
        "train_fsdp2.py",
        "own loop, FSDP2, block scaling; 2 processes",
        2,
        (*_LLAMA_SMALL, *_BLOCKS, _GENOMES, _SEQUENCE),
        name="llama3_native_te/fsdp2",
    ),
    _recipe(
        "opengenome2_llama_native_te",
        "train_fsdp2.py",
        "own loop, FSDP2, block scaling; 1 process",
        1,
        (*_LLAMA_SMALL, *_BLOCKS),
    ),
    Client(
        name="codonfm_ptl_te",
        marker="codonfm_ptl_te/src/runner.py",
        up=1,
        what="Lightning, DDP, BF16; 1 process",
        environment="codonfm",
        packages=("fiddle", "python-dotenv", "peft", "polars", "pandas", "pyarrow"),
        arguments=_CODONS_SMALL,
        integration="lightning",
        stand_ins=(standins.codons,),
        stands_in="a memory-mapped dataset of random codons",
        said=("lightning",),
    ),
    Client(
        name="esm2_accelerate_te",
        marker="esm2_accelerate_te/train.py",
        what="Hugging Face Trainer under accelerate launch; delayed scaling; 1 process",
        environment="transformers_4",
        packages=_TRANSFORMERS_4,
        arguments=(
            "train.py",
            "--config-name",
            "L0_sanity",
            "stop_after_n_steps=3",
            "dataset.max_seq_length=64",
            "trainer.dataloader_num_workers=0",
        ),
        launcher=("accelerate", "launch", "--config_file", "accelerate_config/fp8.yaml"),
        integration="transformers",
        stand_ins=(standins.small_esm2,),
        stands_in=_ESM_CHECKPOINT,
        said=("accelerate", "transformers"),
        differs=_FUSED_NORM,
    ),
    Client(
        name="esm2_peft_te",
        marker="esm2_peft_te/train_lora_ddp.py",
        what="own loop, DDP, LoRA on LayerNormLinear, BF16; 1 process",
        environment="transformers_4",
        packages=_TRANSFORMERS_4,
        arguments=(
            "train_lora_ddp.py",
            "num_train_steps=3",
            "validation_interval=2",
            "use_torch_compile=false",
            "dataset.micro_batch_size=2",
            "dataset.val_micro_batch_size=2",
            "dataset.max_seq_length=64",
            "dataset.num_workers=0",
        ),
        launcher=("torchrun", "--nproc-per-node", "1"),
        stand_ins=(standins.small_esm2,),
        stands_in=_ESM_CHECKPOINT,
        said=("peft", "transformers"),
        fails=(
            "the script needs a branch of PEFT that no index has; the wrapper of the released PEFT 0.21.2 lacks the "
            "attribute `name`, which the attention of Transformer Engine 2.20.2 reads from its layers "
            "(multi_head_attention.py:562); `peft/accelerate` replaces the script"
        ),
    ),
    Client(
        name="peft/accelerate",
        marker="peft/train_lora.py",
        what="LoRA, converted by Accelerator(mixed_precision=fp8); delayed scaling; 1 process",
        environment="transformers_4",
        packages=_TRANSFORMERS_4,
        arguments=("train_lora.py",),
        integration="accelerate",
        from_index=True,
        stands_in="the script itself, tests/clients/scripts/peft/train_lora.py; random tokens",
        said=("peft", "accelerate", "transformers"),
    ),
    Client(
        name="trl/sft",
        marker="trl/train_sft.py",
        what="SFTTrainer of TRL, converted by Accelerate in FP8; delayed scaling; 1 process",
        environment="trl",
        packages=("trl==1.16.0", "datasets"),
        arguments=("train_sft.py",),
        integration="transformers",
        variables={"ACCELERATE_MIXED_PRECISION": "fp8", "ACCELERATE_FP8_BACKEND": "TE"},
        from_index=True,
        stands_in="the script itself, tests/clients/scripts/trl/train_sft.py; random tokens",
        said=("trl", "accelerate", "transformers"),
    ),
    _megatron("one", "own loop, Megatron DDP, delayed scaling; 1 process", 1),
    _megatron(
        "tp2",
        "tensor parallel 2 with sequence parallelism, current scaling; 2 processes",
        2,
        "--tp",
        "2",
        "--recipe",
        "tensorwise",
    ),
    _megatron("pp2", "pipeline parallel 2, current scaling; 2 processes", 2, "--pp", "2", "--recipe", "tensorwise"),
    _megatron(
        "ep2",
        "expert parallel 2 with grouped GEMMs, current scaling; 2 processes",
        2,
        "--ep",
        "2",
        "--recipe",
        "tensorwise",
    ),
    _megatron("fp8-weights", "FP8 primary weights, delayed scaling; 1 process", 1, "--fp8-param"),
    _megatron("mxfp8", "MXFP8; 1 process", 1, "--recipe", "mxfp8", capability="10.0"),
)
