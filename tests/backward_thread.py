"""Run each backward in a second thread, as torch does on a GPU."""

import functools
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch


@contextmanager
def in_a_second_thread() -> Iterator[None]:
    """A backward inside another one, such as a reentrant checkpoint's, stays in the second thread.

    Autograd numbers nodes by thread. The second thread continues the first one's numbers, so that recomputed nodes
    get the same numbers as in the forward.
    """
    with ThreadPoolExecutor(1) as pool:
        pool.submit(_count_up_to, torch._C._autograd._get_sequence_nr()).result()
        inside = pool.submit(threading.get_ident).result()

        def moved(upstream: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(upstream)
            def run(*arguments: Any, **keywords: Any) -> Any:
                if threading.get_ident() == inside:
                    return upstream(*arguments, **keywords)
                return pool.submit(upstream, *arguments, **keywords).result()

            return run

        with (
            mock.patch.object(torch.autograd, "backward", moved(torch.autograd.backward)),
            mock.patch.object(torch.autograd, "grad", moved(torch.autograd.grad)),
        ):
            yield


def _count_up_to(number: int) -> None:
    leaf = torch.zeros(1, requires_grad=True)
    while torch._C._autograd._get_sequence_nr() < number:
        leaf.view(1)
