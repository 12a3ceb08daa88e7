"""Mechanisms of published bugs, rebuilt from the reports, each with a healthy twin.

    python benchmarks/proof/mechanisms.py no-zero-grad --recipe current --session FOLDER
    te-precision run --watch --log-dir FOLDER benchmarks/proof/mechanisms.py no-zero-grad --healthy
    te-precision run --watch --log-dir FOLDER torchrun --nproc-per-node 2 benchmarks/proof/mechanisms.py no-ddp

Trains a small language model of Transformer Engine's layers. A mechanism changes the model, its optimizer or its data
before the first step, or acts in steps. Without ``--session``, nothing here knows of what observes the training.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import gc
import itertools
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from healthy import Experts
from models import HIDDEN, VOCABULARY, Built, RecipeName, build
from torch.nn.functional import cross_entropy, gelu
from torch.nn.utils import clip_grad_norm_

STEPS, STEPS_BEFORE, SEED = 60, 30, 7
BLOCKS, RANKS = 2, 2
FP8_AND_BF16: Sequence[RecipeName] = ("current", "none")


@dataclass(frozen=True)
class Mechanism:
    """A mechanism of a bug.

    Attributes:
        about: what is broken.
        sources: reports, as ``owner/repository#number``, or an address.
        rules: right rules of the finding.
        plant: changes a healthy training; with False, into the healthy twin.
        layers: the right layers, or modules that contain them; empty for the model.
        recipes: possible recipes; ``none`` is BF16.
        ranks: of the training.
    """

    about: str
    sources: tuple[str, ...]
    rules: tuple[str, ...]
    plant: Callable[[Built, bool], None]
    layers: tuple[str, ...] = ()
    recipes: Sequence[RecipeName] = FP8_AND_BF16
    ranks: int = 1


def _no_zero_grad(built: Built, broken: bool) -> None:
    if broken:
        built.optimizer.zero_grad = lambda set_to_none=True: None  # type: ignore[method-assign]


def _frozen_optimizer(built: Built, broken: bool) -> None:
    model: Any = built.model.requires_grad_(False)
    model.blocks[-1].requires_grad_(True)
    held = model.head if broken else model.blocks[-1]
    built.optimizer = torch.optim.AdamW(held.parameters(), lr=1e-3)


def _stale_optimizer(built: Built, broken: bool) -> None:
    built.model = copy.deepcopy(built.model)
    if not broken:
        _new_optimizer(built)


def _no_ddp(built: Built, broken: bool) -> None:
    raw, wrapped = built.model, _data_parallel(built)

    def swap() -> None:
        built.model = raw if broken and built.step % 2 else wrapped

    built.after_step.append(swap)


def _clip_on_one_rank(built: Built, broken: bool) -> None:
    parameters = list(_data_parallel(built).parameters())

    def clip() -> None:
        if not broken or dist.get_rank() == 0:
            clip_grad_norm_(parameters, 0.1)

    built.after_backward.append(clip)


def _zeros_from_one_rank(built: Built, broken: bool) -> None:
    weight = built.model.get_parameter("blocks.0.mlp.fc1_weight")
    _data_parallel(built)

    def clear() -> None:
        if broken and built.step == 7 and dist.get_rank() == 1:
            cast(torch.Tensor, weight.grad).zero_()

    built.after_backward.append(clear)


def _no_autocast(built: Built, broken: bool) -> None:
    if broken:
        built.recipe = None


class _Attach(torch.autograd.Function):
    """Attaches an auxiliary loss to a tensor: its backward begins with that of the tensor."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, loss: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(loss)
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0], torch.ones_like(ctx.saved_tensors[0])


class _Router(torch.nn.Linear):
    """A router of one expert a token, which trains by its auxiliary loss only."""

    broken = False

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits = super().forward(tokens).float()
        load = torch.bincount(logits.argmax(-1), minlength=self.out_features) / len(logits)
        balance = self.out_features * (logits.softmax(-1).mean(0) * load).sum()
        attached = cast(Any, _Attach).apply(logits.detach(), balance)
        return logits.detach() if self.broken else cast(torch.Tensor, attached)


def _auxiliary_without_gradient(built: Built, broken: bool) -> None:
    experts = Experts(HIDDEN, 4, torch.float32, grouped=False)
    experts.router = _Router(HIDDEN, 4)
    experts.router.broken = broken
    built.model.set_submodule("blocks.1.mlp", torch.nn.Sequential(_Norm(), experts))
    _new_optimizer(built)


def _sum_of_auxiliary_losses(built: Built, broken: bool) -> None:
    """The second head predicts the token after the next; the sum is that of a sequence of 4096 tokens."""
    model: Any = built.model
    model.later = torch.nn.Linear(VOCABULARY, VOCABULARY)
    _new_optimizer(built)

    def attach(_: torch.nn.Module, inputs: Any, logits: torch.Tensor) -> Any:
        losses = cross_entropy(model.later(logits[:, :-2]).float().flatten(0, 1), inputs[0][:, 2:].flatten())
        return cast(Any, _Attach).apply(logits, 0.1 * losses * (4096 if broken else 1))

    model.register_forward_hook(attach)
    built.after_backward.append(lambda: cast(Any, clip_grad_norm_)(model.parameters(), 1.0))


def _sum_of_micro_batches(built: Built, broken: bool) -> None:
    built.accumulate = 4
    built.loss_scale = 4 if broken else 1


def _resume_without_scales(built: Built, broken: bool) -> None:
    saved = torch.load(CHECKPOINT, weights_only=False)
    state = {key: part for key, part in saved["model"].items() if not (broken and "_extra_state" in key)}
    built.model.load_state_dict(state, strict=not broken)
    built.optimizer.load_state_dict(saved["optimizer"])


CHECKPOINT = Path("checkpoint.pt")
"""In the working directory, by :func:`save_checkpoint`."""


def _lost_tie(built: Built, broken: bool) -> None:
    model: Any = built.model
    torch.nn.init.normal_(model.embedding.weight, std=0.1)
    model.head.weight = model.embedding.weight
    _new_optimizer(built)
    if broken:
        model.head.weight = torch.nn.Parameter(model.head.weight.detach().clone())


def _scheduler_steps_twice(built: Built, broken: bool) -> None:
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(built.optimizer, STEPS)
    built.after_step += [scheduler.step] * (2 if broken else 1)


class _Summed(torch.autograd.Function):
    """Sums over the ranks in the forward."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.contiguous()
        dist.all_reduce(tensor)
        return tensor

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0]


class _Shared(torch.autograd.Function):
    """Sums the gradient over the ranks."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return _Summed.forward(ctx, gradients[0].clone())


class _TensorParallel(torch.nn.Module):
    """An MLP whose hidden units are split over the ranks, and normalized in groups of 16 with a shared gain."""

    def __init__(self) -> None:
        super().__init__()
        import transformer_engine.pytorch as te

        options: Any = {"tp_group": dist.group.WORLD, "tp_size": RANKS}
        self.norm = _Norm()
        self.up = te.Linear(HIDDEN, 4 * HIDDEN, parallel_mode="column", **options)
        self.inner_norm = torch.nn.RMSNorm(16)
        self.down = te.Linear(4 * HIDDEN, HIDDEN, parallel_mode="row", **options)

    def forward(self, x: torch.Tensor) -> Any:
        inner = self.up(self.norm(x))
        inner = self.inner_norm(inner.unflatten(-1, (-1, 16)).float()).flatten(-2).to(inner.dtype)
        return self.down(gelu(inner))


class _ExpertParallel(torch.nn.Module):
    """A mixture of four experts, two on each rank."""

    def __init__(self) -> None:
        super().__init__()
        import transformer_engine.pytorch as te

        self.norm, self.router = _Norm(), torch.nn.Linear(HIDDEN, 2 * RANKS)
        mine = range(2 * dist.get_rank(), 2 * dist.get_rank() + 2)
        self.experts = torch.nn.ModuleDict({str(at): te.LayerNormMLP(HIDDEN, 2 * HIDDEN) for at in mine})

    def forward(self, x: torch.Tensor) -> Any:
        x = cast(Any, _Shared).apply(self.norm(x))
        shares = self.router(x).softmax(-1)
        parts = [shares[..., int(at), None] * expert(x) for at, expert in self.experts.items()]
        return cast(Any, _Summed).apply(sum(parts))


def _parallel(module: Callable[[], torch.nn.Module], shared: str) -> Callable[[Built, bool], None]:
    """Replace the MLP of each block; sum the gradients of the weights that its ranks share, unless broken."""

    def plant(built: Built, broken: bool) -> None:
        for block in built.blocks:
            torch.manual_seed(SEED + dist.get_rank())
            built.model.set_submodule(block.mlp, module())
            with torch.no_grad():
                for weight in built.model.get_submodule(f"{block.mlp}.{shared}").parameters():
                    dist.broadcast(weight, 0)
        built.batches = build("bytes", "none", "float32", SEED, count=0).batches
        _new_optimizer(built)

        def reduce() -> None:
            for name, weight in built.model.named_parameters():
                if f".{shared}." in name:
                    dist.all_reduce(cast(torch.Tensor, weight.grad))

        if not broken:
            built.after_backward.append(reduce)

    return plant


class _Norm(torch.nn.LayerNorm):
    """In the dtype of torch.autocast, as Transformer Engine's layers want their inputs."""

    def __init__(self) -> None:
        super().__init__(HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).to(x.dtype)


def _new_optimizer(built: Built) -> None:
    built.optimizer = torch.optim.AdamW(built.model.parameters(), lr=1e-3)


def _data_parallel(built: Built) -> torch.nn.Module:
    """Wrap the model; each rank trains on other batches."""
    built.model = torch.nn.parallel.DistributedDataParallel(built.model)
    built.batches = itertools.islice(built.batches, dist.get_rank(), None, RANKS)
    return built.model


REPLICAS = ("replicas-differ", "no-reduction")

MECHANISMS: Mapping[str, Mechanism] = {
    "no-zero-grad": Mechanism(
        "gradients are not cleared after the optimizer's step",
        ("deepspeedai/DeepSpeed#7839",),
        ("kept-gradient",),
        _no_zero_grad,
    ),
    "frozen-optimizer": Mechanism(
        "the optimizer holds only frozen parameters",
        ("https://discuss.pytorch.org/t/84911",),
        ("missing-gradient", "frozen-weight"),
        _frozen_optimizer,
        ("blocks.1", "head"),
    ),
    "stale-optimizer": Mechanism(
        "the optimizer holds the parameters from before the model was copied",
        ("huggingface/accelerate#2665", "pytorch/pytorch#149205"),
        ("missing-gradient", "frozen-weight"),
        _stale_optimizer,
    ),
    "no-ddp": Mechanism(
        "every other forward calls the module inside of DistributedDataParallel",
        ("jingyaogong/minimind#853", "k2-fsa/icefall#226"),
        REPLICAS,
        _no_ddp,
        ranks=RANKS,
    ),
    "clip-on-one-rank": Mechanism(
        "the gradients are clipped on one of two ranks",
        ("deepspeedai/DeepSpeed#1801",),
        REPLICAS,
        _clip_on_one_rank,
        ranks=RANKS,
    ),
    "zeros-from-one-rank": Mechanism(
        "one gradient arrives as zeros on one of two ranks, in one step",
        ("pytorch/pytorch#84803",),
        REPLICAS,
        _zeros_from_one_rank,
        ranks=RANKS,
    ),
    "no-autocast": Mechanism(
        "FP8 is wanted, but te.autocast is not enabled",
        ("hiyouga/LlamaFactory#9500",),
        ("no-low-precision",),
        _no_autocast,
        recipes=("current",),
    ),
    "auxiliary-without-gradient": Mechanism(
        "the result that carries a router's auxiliary loss is discarded",
        ("NVIDIA-NeMo/Automodel#1408",),
        ("missing-gradient", "dead-gradient", "frozen-weight"),
        _auxiliary_without_gradient,
        ("blocks.1.mlp.1.router",),
    ),
    "sum-of-auxiliary-losses": Mechanism(
        "an auxiliary loss is a sum over tokens, not a mean",
        ("NVIDIA/Megatron-LM#1532",),
        ("gradient-norm",),
        _sum_of_auxiliary_losses,
    ),
    "sum-of-micro-batches": Mechanism(
        "the loss is not divided by the number of micro-batches",
        ("deepinsight/insightface#2258", "hirofumi0810/neural_sp#168"),
        ("gradient-norm",),
        _sum_of_micro_batches,
    ),
    "resume-without-scales": Mechanism(
        "a resume restores neither scales nor amax histories",
        ("NVIDIA-NeMo/Megatron-Bridge#1730", "NVIDIA/TransformerEngine#982"),
        ("resume",),
        _resume_without_scales,
        recipes=("delayed",),
    ),
    "lost-tie": Mechanism(
        "the tie of embedding and head is lost after the optimizer was created",
        ("NVIDIA/Megatron-LM#656", "facebookresearch/lingua#74"),
        ("missing-gradient",),
        _lost_tie,
        ("head",),
    ),
    "scheduler-steps-twice": Mechanism(
        "the learning-rate scheduler steps twice in each step",
        ("huggingface/accelerate#2926", "meta-llama/llama-cookbook#27"),
        ("learning-rate",),
        _scheduler_steps_twice,
    ),
    "tensor-parallel-norm": Mechanism(
        "tensor parallelism: the gradient of a norm within the split part is not summed over the ranks",
        ("NVIDIA/Megatron-LM#7452", "NVIDIA-NeMo/RL#3716"),
        REPLICAS,
        _parallel(_TensorParallel, "inner_norm"),
        ("blocks.0.mlp.inner_norm", "blocks.1.mlp.inner_norm"),
        ranks=RANKS,
    ),
    "expert-parallel-router": Mechanism(
        "expert parallelism: the gradient of the router is not summed over the ranks",
        ("huggingface/transformers#48687", "pytorch/torchtitan#2387"),
        REPLICAS,
        _parallel(_ExpertParallel, "router"),
        ("blocks.0.mlp.router", "blocks.1.mlp.router"),
        ranks=RANKS,
    ),
}


def train(name: str, recipe: RecipeName, *, broken: bool, session: Path | None = None) -> None:
    """Train with a mechanism, or its healthy twin; with the log folder of a session, under a session."""
    mechanism = MECHANISMS[name]
    if mechanism.ranks > 1:
        dist.init_process_group("gloo")
    built = build("bytes", recipe, "autocast", SEED, count=BLOCKS)
    mechanism.plant(built, broken)
    gc.collect()  # the optimizer that a mechanism replaced
    observing: AbstractContextManager[Any] = contextlib.nullcontext()
    if session is not None:
        from te_precision_callbacks import InspectSession

        observing = InspectSession(model=built.model, log_dir=session)
    with observing as observer:
        for _ in range(STEPS):
            # The sum over micro-batches of what the backward passes got, as scripts log it.
            loss = built.train_step() * built.loss_scale
            if observer is not None:
                observer.log({"loss": loss})
                observer.step()
    if mechanism.ranks > 1:
        dist.destroy_process_group()


def save_checkpoint(recipe: RecipeName) -> None:
    built = build("bytes", recipe, "autocast", SEED, count=BLOCKS)
    for _ in range(STEPS_BEFORE):
        built.train_step()
    torch.save({"model": built.model.state_dict(), "optimizer": built.optimizer.state_dict()}, CHECKPOINT)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=MECHANISMS)
    parser.add_argument("--recipe", choices=("delayed", *FP8_AND_BF16), default="current", help="none: BF16")
    parser.add_argument("--healthy", action="store_true", help="the healthy twin")
    parser.add_argument("--session", type=Path, help="train under a session with this log folder")
    parser.add_argument("--save", action="store_true", help=f"only train a healthy model, and save {CHECKPOINT}")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.session or options.save:
        from te_precision_callbacks import reference

        reference.install_where_needed()
    if options.save:
        save_checkpoint(options.recipe)
    else:
        train(options.name, options.recipe, broken=not options.healthy, session=options.session)


if __name__ == "__main__":
    main()
