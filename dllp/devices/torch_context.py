"""What a caller has set for PyTorch around a call, and what the call needs instead."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch


@contextmanager
def undisturbed() -> Iterator[None]:
    """Gradients, no autocast, and new tensors in float32 on the CPU, as where a program starts; as before at the end.

    A run says itself where gradients, half precision and devices belong. Within a caller's `no_grad` it could not
    learn, an `autocast` would round what must be exact, and a default device would part tensors from their generators.
    """
    with ExitStack() as held:
        held.enter_context(torch.inference_mode(False))
        held.enter_context(torch.enable_grad())
        for kind in ("cpu", "cuda"):
            if torch.is_autocast_enabled(kind):
                held.enter_context(torch.autocast(kind, enabled=False))
        if torch.get_default_device().type != "cpu":  # the context has a price: every call passes through it
            held.enter_context(torch.device("cpu"))
        held.callback(torch.set_default_dtype, torch.get_default_dtype())
        torch.set_default_dtype(torch.float32)
        yield
