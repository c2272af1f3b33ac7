"""What the cases of all kernels share: names of what is unusual about them, and comparisons."""

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor


class NamedCase:
    """Base of frozen dataclasses whose fields all have defaults."""

    __dataclass_fields__: ClassVar[dict[str, Any]]
    # Fields that are told elsewhere.
    unnamed: ClassVar[tuple[str, ...]] = ()

    @property
    def name(self) -> str:
        """What differs from the default, for test ids."""
        default = type(self)()
        parts = [
            f"{field}={getattr(self, field)}"
            for field in self.__dataclass_fields__
            if field not in self.unnamed and getattr(self, field) != getattr(default, field)
        ]
        return ",".join(parts).replace(" ", "") or "default"


def compared(
    run: Callable[[], dict[str, Tensor]],
    truth: dict[str, Tensor],
    device: str,
    error: Callable[[str, Tensor, Tensor], float],
) -> tuple[dict[str, Tensor], dict[str, float]]:
    """What kernels computed, and its errors; a second run must give the same bits.

    Args:
        run: outputs and gradients of the kernels, by name.
        truth: the same in float64.
        device: where they run.
        error: of a name, what was computed in float64, and the truth.
    """
    got = run()
    # Programs of the interpreter run one after another, always alike: a second run says nothing.
    again = got if device == "cpu" else run()
    errors = {name: error(name, got[name].double(), x) for name, x in truth.items()}
    for name, x in got.items():
        if not torch.equal(x, again[name]):
            errors[f"{name} differs between two runs"] = float("nan")
    return got, errors


def relative(name: str, got: Tensor, truth: Tensor) -> float:
    """`|got - truth| / |truth|`; where the truth is 0, what is there."""
    wrong, size = (got - truth).norm(), truth.norm()
    return (wrong / size if size > 0 else wrong).item()


def relative_or_of_ones(name: str, got: Tensor, truth: Tensor) -> float:
    """`|got - truth| / |truth|`; where that is all but 0, against numbers of size one."""
    size = truth.numel() ** 0.5 if truth.norm() < 1e-6 else truth.norm()
    return ((got - truth).norm() / size).item() if truth.numel() else 0.0


def difference_if_compiled(loss: Callable[..., Tensor], leaves: Sequence[Tensor]) -> float:
    """Relative difference of gradients with and without `torch.compile(fullgraph=True)`."""
    results = []
    for function in (loss, torch.compile(loss, fullgraph=True, backend="aot_eager")):
        given = [x.clone().requires_grad_() for x in leaves]
        grads = torch.autograd.grad(function(*given), given)
        results.append(torch.cat([g.flatten() for g in grads]))
    return ((results[0] - results[1]).norm() / results[0].norm()).item()
