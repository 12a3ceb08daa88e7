"""The random numbers of a pretended GPU, and the CPU's beside them."""

import json
from typing import Any

import pytest

from tests.reference.processes import answers

ON_THE_CPU = """
import json
import torch

def drawn_on_the_cpu():
    torch.manual_seed(3)
    torch.cuda.manual_seed(11)
    data = torch.utils.data
    return [
        torch.nn.Linear(3, 3).weight.tolist(),
        torch.nn.init.trunc_normal_(torch.zeros(4)).tolist(),
        [batch.tolist() for batch in data.DataLoader(torch.arange(8), shuffle=True, batch_size=4)],
        list(data.random_split(range(10), [5, 5])[0].indices),
        list(data.WeightedRandomSampler([1, 2, 3.0], 5)),
        torch.rand(2).tolist(), torch.randperm(5).tolist(), torch.randint(5, (3,), device="cpu").tolist(),
        torch.empty(2).normal_().tolist(), torch.normal(torch.zeros(2), torch.ones(2)).tolist(),
        torch.normal(0.0, 1.0, (2,)).tolist(), torch.bernoulli(torch.full((4,), 0.5)).tolist(),
        torch.randn_like(torch.ones(2)).tolist(), torch.multinomial(torch.ones(5), 3).tolist(),
        torch.initial_seed(), torch.rand(1).item(),
    ]
"""


@pytest.mark.processes
def test_the_cpu_draws_what_it_draws_without_a_gpu_whatever_the_seed_of_the_gpu() -> None:
    plain: dict[str, Any] = {}
    exec(ON_THE_CPU, plain)
    pretended = answers(
        "from te_precision_callbacks import reference; reference.install(pretend_cuda=True)"
        + ON_THE_CPU
        + "\nanswer = drawn_on_the_cpu()"
    )
    assert pretended == json.loads(json.dumps(plain["drawn_on_the_cpu"]()))


@pytest.mark.processes
def test_each_draws_from_its_own_generator_and_forks_and_checkpoints_keep_both() -> None:
    draws, gradients, between_ranks, compiled = answers(
        """
        from te_precision_callbacks import reference
        reference.install(pretend_cuda=True)
        import torch
        from torch.nn.functional import dropout
        from torch.utils.checkpoint import checkpoint
        from transformer_engine.pytorch.distributed import CudaRNGStatesTracker

        x = torch.ones(8, device="cuda")

        def in_context(device):
            with torch.device(device):
                torch.rand(2)

        def forked():
            with torch.random.fork_rng():
                torch.rand(2), torch.rand(2, device="cuda"), dropout(x)

        def restored():
            states = torch.cuda.get_rng_state_all(), torch.get_rng_state()
            torch.rand(2), dropout(x)
            torch.cuda.set_rng_state_all(states[0]), torch.set_rng_state(states[1])

        generator = torch.Generator("cuda")
        cases = {
            "cpu": [
                lambda: torch.rand(2), lambda: torch.rand(2, device="cpu"), lambda: torch.empty(2).uniform_(),
                lambda: torch.randn_like(x, device="cpu"), lambda: torch.nn.Linear(2, 2).to(0),
                lambda: in_context("cpu"),
            ],
            "cuda": [
                lambda: torch.rand(2, device="cuda"), lambda: torch.rand(2, device=0), lambda: in_context("cuda"),
                lambda: torch.nn.Linear(2, 2, device="cuda"), lambda: torch.empty(2).cuda().uniform_(),
                lambda: torch.empty(2, device="cuda").uniform_(), lambda: dropout(x), lambda: (x * 2).normal_(),
                lambda: torch.randn_like(x), lambda: torch.cuda.manual_seed(4),
                lambda: torch.rand(2, generator=torch.cuda.default_generators[0], device="cuda"),
            ],
            "both": [lambda: torch.manual_seed(5), lambda: torch.nn.Linear(2, 2).cuda().reset_parameters()],
            "neither": [forked, restored, lambda: torch.rand(2, generator=generator, device="cuda")],
        }

        def moved(draw):
            before = torch.get_rng_state(), torch.cuda.get_rng_state()
            draw()
            after = torch.get_rng_state(), torch.cuda.get_rng_state()
            cpu, cuda = [not torch.equal(*states) for states in zip(before, after)]
            return {(True, True): "both", (True, False): "cpu", (False, True): "cuda", (False, False): "neither"}[
                cpu, cuda]

        torch.manual_seed(1)
        draws = [[expected, moved(draw)] for expected, all_draws in cases.items() for draw in all_draws]

        linear = torch.nn.Linear(8, 8).cuda()
        def gradient(run):
            torch.manual_seed(7)
            y = torch.ones(4, 8, device="cuda", requires_grad=True)
            z = run(lambda y: dropout(linear(y), 0.5) * torch.rand(8), y)
            torch.rand(3), torch.rand(3, device="cuda")
            z.sum().backward()
            return y.grad.tolist()

        gradients = [gradient(lambda f, y: f(y))] + [
            gradient(lambda f, y: checkpoint(f, y, use_reentrant=reentrant)) for reentrant in (True, False)]

        def of_rank(rank):  # as megatron-core does for the ranks of tensor parallelism
            torch.manual_seed(1)
            tracker = CudaRNGStatesTracker()
            tracker.add("model-parallel-rng", 2718 + rank)
            before = torch.get_rng_state()
            with tracker.fork("model-parallel-rng"):
                inside = dropout(torch.ones(64, device="cuda"))
            assert torch.equal(before, torch.get_rng_state())
            return [inside.tolist(), dropout(torch.ones(64, device="cuda")).tolist()]

        compiled = torch.compile(
            lambda: dropout(x) + torch.rand(8, device="cuda") + torch.empty(8, device="cuda").normal_(),
            backend="aot_eager", fullgraph=True)
        torch.cuda.manual_seed(2)
        once = compiled()
        torch.cuda.manual_seed(2)
        same = torch.equal(once, compiled())
        answer = [draws, gradients, [of_rank(0), of_rank(1)], same]
        """
    )
    assert [item for _, item in draws] == [expected for expected, _ in draws]
    assert gradients[0] == gradients[1] == gradients[2]
    (inside, outside), (inside_of_another, outside_of_another) = between_ranks
    assert inside != inside_of_another
    assert outside == outside_of_another
    assert compiled
