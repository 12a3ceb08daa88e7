"""Operations over lists of tensors, and optimizers, of the reference extension, against torch's."""

import pytest
import torch

from te_precision_callbacks.reference import extension as tex

LR, BETA1, BETA2, EPS, DECAY = 1e-2, 0.9, 0.99, 1e-8, 0.1
SHAPES = [(7,), (3, 5), (2, 3, 4)]
CHUNK = 2048


def _flag() -> torch.Tensor:
    return torch.zeros(1, dtype=torch.int32)


def _tensors(seed: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES]


def _zeros(dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    return [torch.zeros(shape, dtype=dtype) for shape in SHAPES]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scale(dtype: torch.dtype) -> None:
    source, target, flag = _tensors(0, dtype), _zeros(), _flag()
    tex.multi_tensor_scale(CHUNK, flag, [source, target], 0.3)
    for a, b in zip(source, target, strict=True):
        assert torch.equal(a.float() * 0.3, b)
    assert flag.item() == 0
    source[1][0, 0] = float("inf")
    tex.multi_tensor_scale(CHUNK, flag, [source, target], 0.3)
    assert flag.item() == 1
    assert target[1][0, 0] == float("inf")


def test_norms() -> None:
    tensors = _tensors(0)
    item = torch.stack([tensor.double().norm() for tensor in tensors])
    norm, norms = tex.multi_tensor_l2norm(CHUNK, _flag(), [tensors], True)
    torch.testing.assert_close(norm.double(), item.norm().reshape(1), rtol=1e-6, atol=0)
    torch.testing.assert_close(norms.double(), item, rtol=1e-6, atol=0)
    assert tex.multi_tensor_l2norm(CHUNK, _flag(), [tensors])[1].numel() == 0


@pytest.mark.parametrize("mode", [0, 1])
def test_adam(mode: int) -> None:
    params = _tensors(0)
    expected = [torch.nn.Parameter(param.clone()) for param in params]
    optimizer_class = torch.optim.Adam if mode == 0 else torch.optim.AdamW
    optimizer = optimizer_class(expected, LR, (BETA1, BETA2), EPS, DECAY)
    first, second = _zeros(), _zeros()
    for step in range(1, 6):
        grads = _tensors(step)
        for parameter, grad in zip(expected, grads, strict=True):
            parameter.grad = grad.clone()
        optimizer.step()
        tex.multi_tensor_adam(
            CHUNK, _flag(), [grads, params, first, second], LR, BETA1, BETA2, EPS, step, mode, 1, DECAY
        )
        for ours, theirs in zip(params, expected, strict=True):
            torch.testing.assert_close(ours, theirs.detach(), rtol=1e-6, atol=1e-6)


def test_adam_with_master_weights() -> None:
    master = _tensors(0)
    params, plain = [tensor.bfloat16() for tensor in master], [tensor.clone() for tensor in master]
    moments, plain_moments = (_zeros(), _zeros()), (_zeros(), _zeros())
    grads = _tensors(1)
    tex.multi_tensor_adam(CHUNK, _flag(), [grads, params, *moments, master], LR, BETA1, BETA2, EPS, 1, 1, 1, DECAY)
    tex.multi_tensor_adam(CHUNK, _flag(), [grads, plain, *plain_moments], LR, BETA1, BETA2, EPS, 1, 1, 1, DECAY)
    for param, weight, expected in zip(params, master, plain, strict=True):
        assert torch.equal(weight, expected)
        assert torch.equal(param, expected.bfloat16())


def test_adam_of_fp8_parameters() -> None:
    master, plain = _tensors(0), _tensors(0)
    codes = [torch.zeros(shape, dtype=torch.uint8) for shape in SHAPES]
    scales, amaxes, inverses = ([torch.full((1,), value) for _ in SHAPES] for value in (16.0, 0.0, 0.0))
    grads = _tensors(1)
    tex.multi_tensor_adam_fp8(
        CHUNK, _flag(), [grads, codes, _zeros(), _zeros(), master, scales, amaxes, inverses],
        LR, BETA1, BETA2, EPS, 1, 1, 1, DECAY, tex.DType.kFloat8E4M3,
    )  # fmt: skip
    tex.multi_tensor_adam(CHUNK, _flag(), [grads, plain, _zeros(), _zeros()], LR, BETA1, BETA2, EPS, 1, 1, 1, DECAY)
    for index, expected in enumerate(plain):
        assert torch.equal(master[index], expected)
        assert torch.equal(codes[index], (expected * 16).to(torch.float8_e4m3fn).view(torch.uint8))
        assert amaxes[index].item() == expected.abs().max().item()
        assert inverses[index].item() == 1 / 16


@pytest.mark.parametrize(("momentum", "nesterov"), [(0.0, False), (0.9, False), (0.9, True)])
def test_sgd(momentum: float, nesterov: bool) -> None:
    params, velocity = _tensors(0), _zeros()
    copies = _zeros(torch.float16)
    expected = [torch.nn.Parameter(param.clone()) for param in params]
    optimizer = torch.optim.SGD(expected, LR, momentum, weight_decay=DECAY, nesterov=nesterov)
    for step in range(4):
        grads = _tensors(step + 1)
        for parameter, grad in zip(expected, grads, strict=True):
            parameter.grad = grad.clone()
        optimizer.step()
        tex.multi_tensor_sgd(
            CHUNK, _flag(), [[g * 8 for g in grads], params, velocity, copies], DECAY, momentum, 0.0, LR, nesterov,
            step == 0, False, 0.125,
        )  # fmt: skip
        for ours, theirs, copy in zip(params, expected, copies, strict=True):
            torch.testing.assert_close(ours, theirs.detach(), rtol=1e-6, atol=1e-6)
            assert torch.equal(copy, ours.half())
