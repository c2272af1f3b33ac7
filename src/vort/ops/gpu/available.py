"""Whether GPU kernels can take some tensors, asked without importing Triton."""

import importlib.util

import torch
from torch import Tensor

__all__ = ["has_triton", "kernels_take", "require_kernels"]


# Asked once: torch.compile does not trace a search for packages.
_FOUND = importlib.util.find_spec("triton") is not None


def has_triton() -> bool:
    """Whether the triton package is installed."""
    return _FOUND


def kernels_take(*tensors: Tensor) -> bool:
    """Whether these tensors are on a GPU, of one dtype that kernels know, and Triton is there.

    >>> kernels_take(torch.zeros(3))
    False
    """
    dtype = tensors[0].dtype
    for x in tensors:
        if x.device.type != "cuda" or x.dtype != dtype:
            return False
    return dtype in (torch.bfloat16, torch.float32) and has_triton()


def require_kernels(device: torch.device, instead: str) -> None:
    """Refuse backend 'triton' where it cannot run, naming the backend that can."""
    if not has_triton():
        raise RuntimeError(f"backend 'triton' needs the triton package; use '{instead}' without it")
    if device.type == "cuda" or torch.compiler.is_compiling():
        return  # reading Triton's settings would break the graph
    from triton import knobs

    # the interpreter (TRITON_INTERPRET=1) runs kernels in Python, which needs no GPU
    if not knobs.runtime.interpret:
        raise RuntimeError(
            f"backend 'triton' needs CUDA tensors, got {device.type}; use '{instead}' there"
        )
