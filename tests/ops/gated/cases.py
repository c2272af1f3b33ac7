"""Shapes and places to check, and the relative error of the output and every gradient.

The truth is the definition of gated linear attention in float64, every pair of positions, on the
very inputs the kernels get (rounded to bfloat16 first where they are bfloat16). Errors are
`|x - truth| / |truth|`, NaN never passes.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from tests.ops.case import NamedCase, compared, relative
from vort.ops.asked import Asked
from vort.ops.gated import GatedInputs, gated_of_asked

LEAVES = ("q", "k", "v", "r", "weight", "bias")
POWER = 16.0
# Tokens up to which the truth is summed pair by pair; beyond, in chunks.
LONGEST = 300


@dataclass(frozen=True)
class GatedCase(NamedCase):
    """One call of the op.

    asked: of each sequence so many, in no order; or by name: its first two tokens and its last two
    ("ends"), some of the last sequence alone ("one row"), some that come again ("twice"), "none".
    """

    batch: int = 2
    length: int = 150
    heads: int = 2
    states: int = 3
    features: int = 16
    values: int = 16
    rank: int = 16
    asked: int | str = 5
    ones: bool = False
    strength: float = 0.0  # of decays: logits lie around its negative


def places_of(case: GatedCase, generator: torch.Generator) -> Tensor:
    """Flat places in no order."""
    starts = torch.arange(case.batch) * case.length
    if case.asked == "none":
        return starts[:0]
    if case.asked == "ends":
        ends = torch.tensor([case.length - 1, 0, case.length - 2, 1])
        return (starts[:, None] + ends).flatten()
    count = case.asked if isinstance(case.asked, int) else 5
    drawn = [torch.randperm(case.length, generator=generator)[:count] for _ in starts]
    places = (starts[:, None] + torch.stack(drawn)).flatten()
    if case.asked == "one row":
        return places[-count:]
    if case.asked == "twice":
        return torch.cat([places, places[:3]])
    return places[torch.randperm(len(places), generator=generator)]


def make_inputs(
    case: GatedCase, dtype: torch.dtype, device: str, seed: int
) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """Leaves, places, and the gradient that comes back."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    places = places_of(case, generator)
    rows = Asked(places, case.batch, case.length).rows
    tokens, gates = (case.batch, case.length), case.heads * case.states * case.features
    columns = case.values + case.ones
    leaves = {
        "q": normal(rows, case.heads, case.states, case.features),
        "k": normal(*tokens, case.heads, case.features).to(dtype),
        "v": normal(*tokens, case.heads, case.values).to(dtype),
        "r": normal(*tokens, case.rank).to(dtype),
        # of one state gates of all speeds, as they begin in a model
        "weight": normal(gates, case.rank).to(dtype).float() / 4,
        "bias": 3 * normal(gates) - case.strength,
    }
    back = normal(rows, case.heads, columns)
    moved = {name: x.to(device) for name, x in leaves.items()}
    return moved, places.to(device), back.to(device)


def exact(leaves: dict[str, Tensor], places: Tensor, ones: bool) -> Tensor:
    """Every state as a head of its own, summed; picked, and filled up with zeros."""
    from vort.memories.gla import gla_chunk, gla_exact

    q, k, v, r, weight, bias = (leaves[name] for name in LEAVES)
    batch, length, heads, features = k.shape
    states = q.shape[2]
    v = F.pad(v, (0, 1), value=1.0) if ones else v
    log_gate = F.logsigmoid(F.linear(r, weight, bias)) / POWER
    log_gate = log_gate.unflatten(-1, (heads * states, features))
    k, v = (x.repeat_interleave(states, 2) for x in (k, v))
    found = q.new_zeros(*q.shape[:2], v.shape[3])
    whole = q.new_zeros(batch * length, *q.shape[1:])
    for rows in _each_once(places):
        queries = whole.index_copy(0, places[rows], q[rows]).view(batch, length, -1, features)
        given = (queries, k, v, log_gate)
        o = gla_exact(*given) if length <= LONGEST else gla_chunk(*given)[0]
        o = o.unflatten(2, (heads, states)).sum(3)
        found = found.index_copy(0, rows, o.flatten(0, 1)[places[rows]])
    return found


def _each_once(places: Tensor) -> list[Tensor]:
    """Indices of places, in parts that have no place twice: there both have queries of their own.

    One part at least: without places nothing reads, and gradients are 0.
    """
    again = [place in places[:i].tolist() for i, place in enumerate(places.tolist())]
    second = torch.tensor(again, dtype=torch.bool, device=places.device)
    parts = [(~second).nonzero().flatten(), second.nonzero().flatten()]
    return parts if len(parts[1]) else parts[:1]


def outputs_and_gradients(
    case: GatedCase, leaves: dict[str, Tensor], places: Tensor, back: Tensor, wide: bool
) -> dict[str, Tensor]:
    """o and every gradient, by name: of the definition in float64, or of the kernels."""
    own = {
        name: (x.double() if wide else x).detach().clone().requires_grad_()
        for name, x in leaves.items()
    }
    if wide:
        o = exact(own, places, case.ones)
    else:
        o = gated_of_asked(GatedInputs(*own.values(), places, POWER, case.ones, True))
    grads = torch.autograd.grad(o, list(own.values()), back.to(o.dtype))
    return {"o": o.detach()} | {f"d{name}": g for name, g in zip(own, grads, strict=True)}


def relative_errors(
    case: GatedCase, dtype: torch.dtype, device: str, seed: int
) -> dict[str, float]:
    """Error of the output and every gradient; a second run must give the same bits."""
    inputs = make_inputs(case, dtype, device, seed)
    truth = outputs_and_gradients(case, *inputs, wide=True)
    return compared(
        lambda: outputs_and_gradients(case, *inputs, wide=False), truth, device, relative
    )[1]


GPU_CASES = [
    GatedCase(length=3000, states=12, features=64, values=64, asked=64),
    GatedCase(length=1000, states=4, features=64, values=64, asked=20, ones=True),
    GatedCase(features=64, values=64, asked="ends"),
    GatedCase(batch=3, features=64, values=64, asked="one row"),
    GatedCase(features=64, values=64, asked="twice", ones=True),
    GatedCase(features=64, values=64, strength=60.0),
    GatedCase(features=24, values=40, rank=8, ones=True),
    GatedCase(states=1, features=128, values=128, rank=64),
    GatedCase(states=2, features=64, values=100),
    GatedCase(asked=18),
]

INTERPRETER_CASES = [
    GatedCase(),
    GatedCase(states=1, features=24, values=24, rank=5),
    GatedCase(length=64, asked="ends", ones=True),
    GatedCase(length=65, batch=3, heads=1, asked="one row"),
    GatedCase(length=70, asked="twice", features=24, values=20),
    GatedCase(length=150, asked=18, heads=1),
    GatedCase(length=40, asked="none"),
    GatedCase(length=100, heads=1, ones=True, strength=60.0),
    GatedCase(length=1, asked=1),
]
