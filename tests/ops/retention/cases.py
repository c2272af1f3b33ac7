"""Random problems for the retention op, and how to compare two answers to one."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from hypothesis import strategies as st
from torch import Tensor

from vort.ops.retention import NORMALIZERS, RetentionState, retention
from vort.ops.retention.chunk import layout
from vort.ops.retention.inputs import b_rows

# From no decay at all to decays that vanish within a step, past every factorisation.
DECAYS = (0.0, 1e-3, 0.03, 0.4, 2.0, 9.0, 50.0, 200.0)


# What runs a case in place of a backend: results by name from the case and its inputs.
Run = Callable[["Case", dict[str, Tensor]], dict[str, Tensor]]


@dataclass(frozen=True)
class Case:
    """A problem by its options; `inputs` draws its tensors."""

    seed: int = 0
    batch: int = 1
    length: int = 40
    heads: int = 2
    keys: int = 5
    values: int = 3
    num_scales: int = 4
    decays: tuple[float, ...] = DECAYS
    decay_per_head: bool = True
    read: bool = True
    normalizer: str = "decayed"
    include_self: bool = True
    state: bool = True
    lengths: tuple[int, ...] | None = None
    chunk_size: int = 16
    positive: bool = False
    eps: float = 0.3

    @property
    def cu_seqlens(self) -> Tensor | None:
        if self.lengths is None:
            return None
        return torch.tensor([0, *self.lengths]).cumsum(0)

    def inputs(self, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
        """Leaf tensors that need a gradient; G and b are the initial state."""
        generator = torch.Generator().manual_seed(self.seed)

        def draw(*shape: int) -> Tensor:
            x = torch.randn(*shape, generator=generator, dtype=torch.float64)
            return x.abs() if self.positive else x

        batch, length = self.batch, self.length
        if self.lengths is not None:
            batch, length = 1, sum(self.lengths)
        token = (batch, length, self.heads)
        rates = torch.tensor(self.decays, dtype=torch.float64)
        shape = (self.heads, self.num_scales) if self.decay_per_head else (self.num_scales,)
        pick = torch.randint(len(rates), shape, generator=generator)
        tensors = {
            "q": draw(*token, self.keys),
            "k": draw(*token, self.keys),
            "v": draw(*token, self.values),
            "write": draw(*token, self.num_scales).abs(),
            "log_decay": -rates[pick] * torch.rand(shape, generator=generator, dtype=rates.dtype),
        }
        if self.read:
            tensors["read"] = draw(*token, self.num_scales)
        if self.state:
            count = batch if self.lengths is None else len(self.lengths)
            tensors["G"] = draw(count, self.heads, self.num_scales, self.keys, self.values)
            rows = b_rows(self.normalizer, self.num_scales)
            if rows:
                tensors["b"] = draw(count, self.heads, rows, self.keys)
        return {name: x.to(dtype).requires_grad_() for name, x in tensors.items()}

    def run(self, backend: str, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        """Output and final state by name."""
        given = dict(inputs)
        G, b = given.pop("G", None), given.pop("b", None)
        output, state = retention(
            **given,
            normalizer=self.normalizer,
            include_self=self.include_self,
            initial_state=None if G is None else RetentionState(G, b),
            output_final_state=True,
            cu_seqlens=self.cu_seqlens,
            backend=backend,
            chunk_size=self.chunk_size if backend == "chunk" else None,
            eps=self.eps,
        )
        assert state is not None
        named = {"o": output, "final G": state.G, "final b": state.b}
        return {name: x for name, x in named.items() if x is not None}

    def run_with_gradients(
        self, backend: str | Run, inputs: dict[str, Tensor]
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Results, and the gradients of a fixed random combination of them, zero where unused."""
        results = backend(self, inputs) if callable(backend) else self.run(backend, inputs)
        generator = torch.Generator().manual_seed(self.seed + 1)
        loss = torch.zeros((), dtype=torch.float64)
        for x in results.values():
            weight = torch.randn(x.shape, generator=generator, dtype=torch.float64)
            loss = loss + (x.double() * weight).sum()
        # Nothing was computed from nothing: a sequence of no tokens and no state.
        found: tuple[Tensor | None, ...] = (None,) * len(inputs)
        if loss.requires_grad:
            found = torch.autograd.grad(loss, list(inputs.values()), allow_unused=True)
        gradients = {
            name: torch.zeros_like(x) if grad is None else grad
            for (name, x), grad in zip(inputs.items(), found, strict=True)
        }
        return results, gradients


@st.composite
def cases(draw: st.DrawFn, max_length: int = 70, max_scales: int = 24) -> Case:
    """Any problem the op accepts, small enough to check pair by pair."""
    lengths = None
    if draw(st.booleans()):
        lengths = tuple(draw(st.lists(st.integers(0, 25), min_size=1, max_size=6)))
    return Case(
        seed=draw(st.integers(0, 2**20)),
        batch=draw(st.integers(1, 2)),
        length=draw(st.integers(0, max_length)),
        heads=draw(st.integers(1, 3)),
        keys=draw(st.integers(1, 6)),
        values=draw(st.integers(1, 6)),
        num_scales=draw(st.integers(1, max_scales)),
        decay_per_head=draw(st.booleans()),
        read=draw(st.booleans()),
        normalizer=draw(st.sampled_from(NORMALIZERS)),
        include_self=draw(st.booleans()),
        state=draw(st.booleans()),
        lengths=lengths,
        chunk_size=draw(st.sampled_from([16, 32, 48, 64])),
    )


def relative_error(found: Tensor, expected: Tensor) -> float:
    """Norm of the difference over the norm of what was expected (at least a tiny one)."""
    if expected.numel() == 0:
        return 0.0
    found, expected = found.detach().double(), expected.detach().double()
    return float((found - expected).norm() / expected.norm().clamp_min(1e-30))


def assert_agrees(case: Case, backend: str | Run) -> None:
    """Outputs, final states and all gradients are those of the definition, in float64."""
    inputs = case.inputs()
    expected, expected_gradients = case.run_with_gradients("exact", inputs)
    found, gradients = case.run_with_gradients(backend, inputs)
    for name, x in expected.items():
        assert torch.allclose(found[name], x, rtol=1e-10, atol=1e-10), name
    for name, x in expected_gradients.items():
        scale = max(1.0, float(x.abs().max())) if x.numel() else 1.0
        assert torch.allclose(gradients[name], x, rtol=0, atol=1e-8 * scale), f"d{name}"


@contextmanager
def small_pieces(elements: int = 1) -> Iterator[None]:
    """Make the chunk form cut even short sequences into many pieces."""
    before = dict(layout.WORKSPACE)
    layout.WORKSPACE.update(dict.fromkeys(before, elements))
    # States inside a piece are then computed again.
    states, layout.FEW_STATES = layout.FEW_STATES, elements
    try:
        yield
    finally:
        layout.WORKSPACE.update(before)
        layout.FEW_STATES = states


def variant(case: Case, **changes: object) -> Case:
    """The same case with some options changed."""
    return replace(case, **changes)  # type: ignore[arg-type]
