"""What the kernels are checked on, and the relative error of every output and gradient.

The truth is backend "exact" in float64 on the very inputs the kernels get (rounded to bfloat16
first where they are bfloat16). Errors are `|x - truth| / |truth|`, NaN never passes.
"""

import math
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from tests.ops.case import NamedCase, compared, difference_if_compiled
from vort.ops.retention import RetentionState, retention


@dataclass(frozen=True)
class Case(NamedCase):
    """One call of the op; `lengths` are packed sequences and replace batch and length.

    rates: whether the gradient to the decays is wanted.
    asked: the only places whose output is looked at, runs from a first one up to an end; all, if
    there are none.
    """

    batch: int = 1
    length: int = 77
    heads: int = 2
    key_dim: int = 16
    value_dim: int = 16
    num_scales: int = 3
    normalizer: str = "decayed"
    include_self: bool = True
    read: bool = True
    initial: bool = True
    final: bool = True
    per_head: bool = False
    lengths: tuple[int, ...] = ()
    chunk_size: int | None = None
    fastest: float = 2.0
    fast_first: bool = False
    rates: bool = True
    asked: tuple[tuple[int, int], ...] = ()

    def places(self, device: torch.device | str) -> Tensor | None:
        places = [place for first, end in self.asked for place in range(first, end)]
        return torch.tensor(places, device=device) if places else None


def make_inputs(case: Case, dtype: torch.dtype, device: str, seed: int) -> dict[str, Tensor]:
    """Fresh random tensors; features and weights positive, as a normaliser expects them.

    The gradient to a decay sums terms over all pairs of tokens. Where their signs are random it is
    what is left after cancellation: rounding the inputs to bfloat16 alone can move it by percents,
    so no kernel could be held to 1e-2 there. Draws for bfloat16 therefore have a slight trend
    (values that grow along the sequence, a gradient with a mean, positive features) that gives the
    sum a sign; float32 keeps the hard draws, at 1e-4. A decayed normaliser takes the mean of the
    values out again, at the cost of digits in dq, the more of them the more tokens it averages: its
    trend is slighter, and falls with the length (benchmarks/gradient_accuracy_gpu.py measures what
    a mean costs).
    """
    generator = torch.Generator().manual_seed(seed)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator) + 0.1

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    batch, length = case.batch, case.length
    sequences = batch
    if case.lengths:
        batch, length, sequences = 1, sum(case.lengths), len(case.lengths)
    trend = dtype == torch.bfloat16
    feature = normal if case.normalizer == "none" and not trend else uniform
    rates = (
        -torch.logspace(-3, case.fastest, case.num_scales)
        if case.num_scales > 1
        else -torch.ones(1) / 20
    )
    if case.fast_first:
        rates = rates.flip(0)
    if case.per_head:
        rates = rates * uniform(case.heads, 1)
    shape = (batch, length, case.heads)
    v, do = normal(*shape, case.value_dim), normal(*shape, case.value_dim)
    mean = 0.0
    if trend:
        mean = 0.25
        if case.normalizer == "decayed":
            mean = 0.1 * min(1.0, 512 / max(length, 1)) ** 0.5
        v = v + 2 * mean * torch.linspace(0, 1, max(length, 1))[:length, None, None]
        do = do + mean
    tensors = {
        "q": feature(*shape, case.key_dim).to(dtype),
        "k": feature(*shape, case.key_dim).to(dtype),
        "v": v.to(dtype),
        "write": uniform(*shape, case.num_scales),
        "log_decay": rates,
    }
    if case.read:
        tensors["read"] = uniform(*shape, case.num_scales)
    if case.initial:
        state = (sequences, case.heads, case.num_scales, case.key_dim)
        tensors["G"] = normal(*state, case.value_dim) + mean
        if case.normalizer != "none":
            rows = case.num_scales if case.normalizer == "decayed" else 1
            tensors["b"] = uniform(sequences, case.heads, rows, case.key_dim)
    tensors["do"] = do.to(dtype)
    return {name: x.to(device) for name, x in tensors.items()}


def outputs_and_gradients(
    backend: str, case: Case, inputs: dict[str, Tensor], dtype: torch.dtype | None = None
) -> dict[str, Tensor]:
    """Everything the backend returns and every gradient, by name; inputs in `dtype` if given."""
    leaf = {
        name: x.detach().to(dtype or x.dtype).clone().requires_grad_()
        for name, x in inputs.items()
        if name != "do"
    }
    leaf["log_decay"].requires_grad_(case.rates)
    cu_seqlens = None
    if case.lengths:
        ends = torch.tensor((0, *case.lengths)).cumsum(0)
        cu_seqlens = ends.to(inputs["q"].device)
    asked = case.places(inputs["q"].device)
    state = RetentionState(leaf["G"], leaf.get("b")) if case.initial else None
    o, last = retention(
        leaf["q"], leaf["k"], leaf["v"], leaf["write"], leaf["log_decay"],
        read=leaf.get("read"), normalizer=case.normalizer, include_self=case.include_self,
        initial_state=state, output_final_state=case.final, cu_seqlens=cu_seqlens, backend=backend,
        chunk_size=case.chunk_size if backend == "triton" else None, asked=asked,
    )  # fmt: skip
    do = inputs["do"].to(dtype or torch.float32)
    if asked is not None:
        o, do = (x.flatten(0, 1)[asked] for x in (o, do))
    results = {"o": o}
    loss = (o.to(dtype or torch.float32) * do).sum()
    if last is not None:
        for name, x in (("G_last", last.G), ("b_last", last.b)):
            if x is not None:
                results[name] = x
                ramp = torch.linspace(-1, 1, x.numel(), device=x.device, dtype=x.dtype)
                loss = loss + (x.flatten() * ramp).sum() / x.shape[-1]
    learning = {name: x for name, x in leaf.items() if x.requires_grad}
    grads = torch.autograd.grad(loss, list(learning.values()))
    return results | {f"d{name}": g for name, g in zip(learning, grads, strict=True)}


def relative_errors(case: Case, dtype: torch.dtype, device: str, seed: int) -> dict[str, float]:
    """Error of every output and gradient; a second run must give the same bits."""
    inputs = make_inputs(case, dtype, device, seed)
    truth = outputs_and_gradients("exact", case, inputs, torch.float64)
    return compared(
        lambda: outputs_and_gradients("triton", case, inputs), truth, device, _distance
    )[1]


def rounding_errors(case: Case, seed: int) -> dict[str, float]:
    """What the equation itself loses on such a draw, step by step in float32."""
    inputs = make_inputs(case, torch.float32, "cpu", seed)
    truth = outputs_and_gradients("exact", case, inputs, torch.float64)
    got = outputs_and_gradients("recurrent", case, inputs)
    return {name: _distance(name, got[name].double(), x) for name, x in truth.items()}


def _distance(name: str, got: Tensor, truth: Tensor) -> float:
    # one token has no lags: its decay gradient is zero, and only its size can be checked
    size = truth.norm().clamp_min(1.0 if truth.norm() < 1e-9 else 1e-30)
    return ((got - truth).norm() / size).item() if truth.numel() else 0.0


def wrongly_left_out(device: str) -> dict[str, int]:
    """Rows that are 0 and should not be, or the other way around.

    Pair by pair only places asked for have an output; where a state is wanted too, every place of a
    block of 16 with one.
    """
    case = Case(batch=2, length=50, heads=1, num_scales=2, asked=((20, 21), (99, 100)))
    inputs = make_inputs(case, torch.float32, device, 0)
    given = [inputs[name] for name in ("q", "k", "v", "write", "log_decay")]
    blocks = torch.zeros(2, 50, dtype=torch.bool, device=device)
    places = blocks.clone()
    blocks[0, 16:32] = blocks[1, 48:] = True
    places[0, 20] = places[1, 49] = True
    wrong = {}
    for name, state, wanted in (("by pairs", False, places), ("by states", True, blocks)):
        options = {"backend": "triton", "output_final_state": state}
        o, _ = retention(*given, asked=case.places(device), **options)
        wrong[name] = int((o.flatten(1).view(2, 50, -1).any(-1) != wanted).sum())
    return wrong


def added_elsewhere(device: str) -> dict[str, int]:
    """Gradients to q and read that are not 0 where nobody asks, or where nobody asks at all."""
    found = {}
    for name, asked in (("few", ((20, 21), (99, 100))), ("none", ())):
        case = Case(batch=2, length=50, heads=1, num_scales=2, asked=asked)
        inputs = make_inputs(case, torch.float32, device, 0)
        leaf = {n: x.requires_grad_() for n, x in inputs.items() if n not in ("do", "G", "b")}
        read = leaf.pop("read")
        places = torch.tensor([p for p, _ in asked], dtype=torch.int64, device=device)
        o, _ = retention(**leaf, read=read, backend="triton", asked=places)
        # of what nobody asks for, whatever comes back is no matter
        grads = torch.autograd.grad(o, [*leaf.values(), read], inputs["do"])
        others = torch.ones(100, dtype=torch.bool, device=device).index_fill_(0, places, False)
        dq, dread = grads[0], grads[-1]
        found[f"{name}: dq, dread"] = sum(
            int((x.flatten(0, 1)[others] != 0).sum()) for x in (dq, dread)
        )
        if not asked:
            found[f"{name}: others"] = sum(int((x != 0).sum()) for x in (o, *grads))
    return found


def errors_of_lean_queries(device: str) -> dict[str, float]:
    """Errors of the lean kernel of queries, with whole and half blocks of columns, as in bf16."""
    from vort.ops.retention.triton.spans import Tiling, choose_tiling

    found = {}
    for parts, case in (
        (2, Case(heads=1, length=128, num_scales=3, rates=False)),
        (1, Case(heads=1, length=64, batch=2, key_dim=20, num_scales=5, rates=False)),
        (2, Case(heads=1, lengths=(0, 1, 75, 24), num_scales=2, initial=False, rates=False)),
        (1, Case(heads=1, lengths=(70, 9), normalizer="undecayed", num_scales=1, rates=False)),
        (2, Case(length=57, normalizer="undecayed", include_self=False, rates=False)),
        (1, Case(length=64, normalizer="none", include_self=False, rates=False)),
        (2, Case(length=50, read=False, asked=((9, 10), (40, 41)), rates=False)),
        (2, Case(length=64, num_scales=5, asked=((17, 18), (40, 41)), rates=False)),
    ):
        tile = choose_tiling(case.key_dim, case.value_dim, 3, torch.float32, None).query
        with mock.patch.object(Tiling, "query_form", return_value=(parts, tile)):
            errors = relative_errors(case, torch.float32, device, 0)
        found |= {f"{parts}: {case.name}: {name}": error for name, error in errors.items()}
    return found


def errors_in_few_parts(device: str) -> dict[str, float]:
    """Errors pair by pair where a part has several blocks, as where there are many programs."""
    from vort.ops.retention.triton import pairs

    case = Case(heads=1, length=170, asked=((3, 5), (97, 98), (150, 170)), **PAIRS)
    with mock.patch.object(pairs, "RESIDENT", 6):  # three parts of two blocks
        return relative_errors(case, torch.float32, device, 0)


def compiled_difference(device: str) -> float:
    """Relative difference of gradients with and without `torch.compile(fullgraph=True)`.

    The larger of two: of all outputs and a state, and of outputs at a few places.
    """
    case = Case(length=33, heads=1, initial=False, num_scales=2)
    inputs = make_inputs(case, torch.float32, device, 0)
    places = torch.tensor([30, 7], device=device)

    def loss(q: Tensor, k: Tensor, v: Tensor, write: Tensor, log_decay: Tensor) -> Tensor:
        o, last = retention(q, k, v, write, log_decay, output_final_state=True, backend="triton")
        assert last is not None
        return (o * o).sum() + last.G.sum()

    def of_places(q: Tensor, k: Tensor, v: Tensor, write: Tensor, log_decay: Tensor) -> Tensor:
        o, _ = retention(q, k, v, write, log_decay, backend="triton", asked=places)
        return (o * o).sum()

    leaves = [inputs[name] for name in ("q", "k", "v", "write", "log_decay")]
    differences = [difference_if_compiled(f, leaves) for f in (loss, of_places)]
    # a NaN is the larger one
    return max(differences, key=lambda x: math.inf if math.isnan(x) else x)


def step_errors(case: Case, dtype: torch.dtype, device: str, seed: int) -> dict[str, float]:
    """Errors of `case.length` single steps: outputs, final state, and the same through `retention`.

    The latter leaves the state it is given as it was.
    """
    from vort.ops.retention.triton import retention_step_triton

    inputs = make_inputs(case, dtype, device, seed)
    b = inputs.get("b")
    start = RetentionState(inputs["G"], b)
    state = RetentionState(inputs["G"].clone(), None if b is None else b.clone())
    options = {"normalizer": case.normalizer, "include_self": case.include_self}
    token_names = [name for name in ("q", "k", "v", "write", "read") if name in inputs]
    rows, whole, later = [], [], start
    for t in range(case.length):
        token = {name: inputs[name][:, t] for name in token_names}
        rows.append(retention_step_triton(state, **token, log_decay=inputs["log_decay"], **options))
        one = {name: inputs[name][:, t : t + 1] for name in token_names}
        o, later = retention(
            **one, log_decay=inputs["log_decay"], initial_state=later, output_final_state=True,
            backend="triton", **options,
        )  # fmt: skip
        whole.append(o)
    wide: dict[str, Tensor] = {name: x.double() for name, x in inputs.items()}
    o, last = retention(
        **{name: wide[name] for name in token_names}, log_decay=wide["log_decay"],
        initial_state=RetentionState(wide["G"], wide.get("b")), output_final_state=True,
        backend="exact", **options,
    )  # fmt: skip
    assert last is not None
    pairs = {"o": (torch.stack(rows, 1), o), "G": (state.G, last.G)}
    pairs |= {"o by retention": (torch.cat(whole, 1), o), "G by retention": (later.G, last.G)}
    pairs["G given"] = (start.G, wide["G"])
    if last.b is not None and state.b is not None:
        pairs |= {"b": (state.b, last.b), "b by retention": (later.b, last.b)}
        pairs["b given"] = (start.b, wide["b"])
    return {
        name: ((x.double() - truth).norm() / truth.norm()).item()
        for name, (x, truth) in pairs.items()
    }


def slow_decay_error(device: str) -> float:
    """Relative error of what a scale that forgets a millionth a token has lost after 50 steps."""
    from vort.ops.retention.triton import retention_step_triton

    generator = torch.Generator().manual_seed(0)
    G = torch.rand(1, 2, 1, 16, 64, generator=generator).to(device) + 0.5
    state = RetentionState(G.clone(), None)
    q, k, v = (torch.zeros(1, 2, n, device=device) for n in (16, 16, 64))
    write, log_decay = torch.zeros(1, 2, 1, device=device), torch.full((1,), -1e-6, device=device)
    for _ in range(50):
        retention_step_triton(state, q, k, v, write, log_decay, normalizer="none")
    lost = 1 - (state.G.double() / G.double()).mean().item()
    truth = -math.expm1(-50e-6)
    return abs(lost / truth - 1)


def fast_decay_error(device: str) -> float:
    """Relative error of what a step that writes nothing leaves of scales that forget nearly all."""
    from vort.ops.retention.triton import retention_step_triton

    log_decay = -torch.tensor([0.7, 3.0, 12.0, 17.0], device=device)
    before = RetentionState(*(torch.ones(1, 2, 4, *size, device=device) for size in ((8, 5), (8,))))
    after = RetentionState(*(x.clone() for x in before))
    token = (torch.zeros(1, 2, n, device=device) for n in (8, 8, 5, 4))
    retention_step_triton(after, *token, log_decay)
    assert after.b is not None
    wanted = log_decay.double().exp()
    pairs = ((after.G, wanted[:, None, None]), (after.b, wanted[:, None]))
    return max(((x.double() / truth - 1).abs().max()).item() for x, truth in pairs)


STEP_CASES = [
    Case(batch=2, length=5, key_dim=16, value_dim=20, per_head=True),
    Case(batch=1, length=4, normalizer="undecayed", include_self=False),
    Case(batch=1, length=3, normalizer="none", read=False),
    Case(batch=3, length=3, key_dim=80, value_dim=80, num_scales=5, include_self=False),
]

# Of 1,034 places; most blocks of 64 have none.
SPARSE = ((70, 128), (500, 530), (700, 765), (1033, 1034))
# Of 4 rows of 1,500, 64 places each, some of them twice, in no order. The truth is quadratic, and
# the compile check computes it on a CPU: longer rows would not fit there.
RECALL = tuple(
    (1500 * row + 1499 - 47 * i * (7 + row) % 1499, 1500 * row + 1500 - 47 * i * (7 + row) % 1499)
    for i in range(64)
    for row in (2, 0, 3, 1)
    for _ in range(1 + (i % 9 == 0))
)
# What is left to outputs alone.
PAIRS: dict[str, Any] = {"initial": False, "final": False}

GPU_CASES = [
    Case(),
    Case(length=1, initial=False, normalizer="none"),
    Case(batch=2, length=517, key_dim=64, value_dim=64, num_scales=8, heads=3),
    Case(length=517, key_dim=64, value_dim=64, num_scales=8, heads=3, read=False, initial=False),
    Case(length=333, key_dim=64, value_dim=64, num_scales=8, normalizer="undecayed", per_head=True),
    Case(length=333, key_dim=64, value_dim=64, num_scales=8, normalizer="none", include_self=False),
    Case(length=300, key_dim=64, value_dim=64, num_scales=8, include_self=False, chunk_size=64),
    # one scale under a decayed normaliser: the read gate cancels, so it has no gradient to check
    Case(length=300, key_dim=64, value_dim=64, num_scales=1, final=False, normalizer="undecayed"),
    # in segments
    Case(length=1700, key_dim=64, value_dim=64, num_scales=8, heads=1, chunk_size=128),
    Case(length=1030, key_dim=64, value_dim=64, num_scales=8, heads=1, chunk_size=512),
    Case(length=200, key_dim=32, value_dim=80, num_scales=5, per_head=True),
    Case(
        length=200, key_dim=80, value_dim=32, num_scales=2, normalizer="undecayed",
        include_self=False,
    ),
    Case(length=300, key_dim=128, value_dim=128, num_scales=8, chunk_size=128),
    Case(length=300, key_dim=128, value_dim=64, num_scales=12, normalizer="none"),
    Case(length=150, key_dim=256, value_dim=256, num_scales=4, heads=1),
    Case(length=150, key_dim=256, value_dim=16, num_scales=4, heads=1, normalizer="undecayed"),
    Case(length=150, key_dim=16, value_dim=256, num_scales=16, heads=1),
    Case(length=130, key_dim=64, value_dim=64, num_scales=32, heads=1),
    Case(length=130, key_dim=64, value_dim=128, num_scales=16, include_self=False),
    Case(lengths=(0, 1, 257, 64, 0, 130, 0), key_dim=64, value_dim=64, num_scales=8),
    Case(lengths=(5, 300, 0, 63), key_dim=32, value_dim=32, num_scales=4, normalizer="undecayed"),
    Case(
        lengths=(0, 65, 512), key_dim=64, value_dim=32, num_scales=4, normalizer="none",
        chunk_size=64,
    ),
    Case(length=300, key_dim=64, value_dim=64, num_scales=8, fastest=1.7),
    Case(length=200, key_dim=64, value_dim=64, num_scales=8, fastest=1.7, normalizer="none"),
    # fast scales, which others that are remembered come after
    Case(length=600, key_dim=64, value_dim=64, num_scales=8, fastest=1.0, fast_first=True),
    # ends two tokens into a part of its last span, with segments left over after it
    Case(length=3394, key_dim=64, value_dim=64, num_scales=8, heads=1, fastest=1.7, initial=False),
    # decays that do not learn, as the lean kernel of queries has them: full spans, others, and
    # packed ones; two it leaves to the other kernel, of few scales and of many
    *(
        Case(key_dim=64, value_dim=64, rates=False, **options)
        for options in (
            {"length": 512, "num_scales": 8, "heads": 3},
            {"length": 517, "num_scales": 7, "batch": 2, "per_head": True},
            {"lengths": (0, 1, 257, 64, 0, 130, 0), "num_scales": 8},
            {"length": 512, "num_scales": 8, "normalizer": "undecayed", "include_self": False},
            {"length": 600, "num_scales": 13, "normalizer": "undecayed", "fastest": 1.0},
            {"length": 512, "num_scales": 5, "normalizer": "none", "read": False},
            {"length": 300, "num_scales": 12, "normalizer": "none", "include_self": False},
            {"length": 256, "num_scales": 4},
            {"length": 512, "num_scales": 32, "heads": 1},
            {"length": 300, "num_scales": 32, "heads": 1},
            {"length": 512, "batch": 2, "num_scales": 8, "asked": SPARSE[:3]},
            {"length": 517, "batch": 2, "num_scales": 9, "asked": SPARSE, "include_self": False},
        )
    ),
    Case(length=300, key_dim=32, value_dim=32, num_scales=5, rates=False),
    Case(length=512, key_dim=128, value_dim=128, num_scales=8, rates=False),
    Case(lengths=(0, 1, 257, 66), key_dim=128, value_dim=128, num_scales=7, rates=False),
    # full spans
    Case(length=512, key_dim=64, value_dim=64, num_scales=8),
    Case(length=512, key_dim=64, value_dim=64, num_scales=5, normalizer="undecayed", read=False),
    Case(length=512, key_dim=128, value_dim=128, num_scales=8),
    # few scales, and k and v of different width: see machine_code.py
    Case(length=200, key_dim=64, value_dim=32, num_scales=1, normalizer="none"),
    Case(length=200, key_dim=64, value_dim=16, num_scales=2),
    # few places asked for
    Case(
        batch=2, length=517, key_dim=64, value_dim=64, num_scales=12, asked=SPARSE, initial=False,
        final=False,
    ),
    Case(
        batch=2, length=517, key_dim=64, value_dim=64, num_scales=8, asked=SPARSE, per_head=True,
        normalizer="undecayed", include_self=False,
    ),
    Case(batch=2, length=517, key_dim=64, value_dim=128, num_scales=8, asked=SPARSE, read=False),
    Case(
        lengths=(0, 1, 257, 64, 0, 712, 0), key_dim=64, value_dim=64, num_scales=4, asked=SPARSE,
        normalizer="none",
    ),
    # pair by pair
    Case(
        batch=4, length=1500, heads=1, key_dim=64, value_dim=64, num_scales=12, asked=RECALL,
        **PAIRS,
    ),
    Case(
        batch=2, length=517, key_dim=64, value_dim=64, num_scales=12, asked=SPARSE, per_head=True,
        normalizer="undecayed", include_self=False, **PAIRS,
    ),
    Case(
        batch=2, length=517, key_dim=64, value_dim=32, num_scales=8, asked=SPARSE, read=False,
        normalizer="none", **PAIRS,
    ),
    Case(
        batch=3, length=700, key_dim=32, value_dim=64, num_scales=32, asked=SPARSE, fastest=1.7,
        include_self=False, **PAIRS,
    ),
    Case(
        batch=2, length=517, key_dim=40, value_dim=24, num_scales=1, asked=SPARSE[1:],
        normalizer="undecayed", **PAIRS,
    ),
    Case(length=1034, num_scales=5, normalizer="none", asked=SPARSE[::3], **PAIRS),
    # the printed banks' many scales, and a group of them with the ones their normaliser is made of
    *(
        Case(
            batch=2, length=517, key_dim=64, value_dim=64, num_scales=136, asked=SPARSE, read=read,
            rates=rates, **PAIRS,
        )
        for read, rates in ((False, False), (True, False), (True, True))
    ),
    Case(
        batch=2, length=517, key_dim=64, value_dim=1, num_scales=28, asked=SPARSE, read=False,
        normalizer="none", **PAIRS,
    ),
    # decays that do not learn
    *(
        Case(
            batch=2, length=517, key_dim=64, value_dim=values, num_scales=scales, asked=SPARSE,
            read=False, rates=False, normalizer=normalizer, **PAIRS,
        )
        for values, scales, normalizer in (
            (64, 15, "decayed"), (64, 12, "none"), (64, 28, "none"), (1, 28, "none"),
        )
    ),
    # so many programs that a part has several blocks
    Case(
        batch=8, length=700, heads=12, key_dim=32, value_dim=32, num_scales=4, **PAIRS,
        asked=tuple((place, place + 1) for place in range(13, 5600, 87)),
    ),
]  # fmt: skip

# Ordered so that any third of them takes about as long as another.
INTERPRETER_CASES = [
    Case(length=45, per_head=True, key_dim=20, value_dim=17, num_scales=2),
    Case(heads=1, normalizer="undecayed", include_self=False, chunk_size=32, num_scales=2),
    Case(heads=1, lengths=(0, 1, 33, 0, 40), num_scales=2, chunk_size=32),
    Case(heads=1, length=34, num_scales=17, initial=False, fastest=1.7, normalizer="undecayed"),
    # long enough to be cut into segments
    Case(heads=1, length=300, chunk_size=32, num_scales=3, normalizer="undecayed", read=False),
    Case(heads=1, lengths=(5, 70, 0), num_scales=2, normalizer="none", include_self=False),
    Case(heads=1, length=40, value_dim=80, num_scales=5, initial=False, read=False),
    Case(heads=1, length=100, num_scales=4, fast_first=True),
    # ends two tokens into a part of its last span, with segments left over after it
    Case(
        heads=1,
        length=674,
        chunk_size=64,
        num_scales=4,
        fastest=1.7,
        normalizer="none",
        initial=False,
    ),
    Case(heads=1, length=0, num_scales=2),
    # few places asked for: blocks of 16 without any at either end of a span, and whole spans
    Case(heads=1, batch=2, length=150, num_scales=3, asked=((20, 36), (149, 151), (270, 271))),
    Case(
        heads=1,
        length=100,
        value_dim=80,
        num_scales=2,
        read=False,
        asked=((99, 100),),
        chunk_size=32,
    ),
    Case(
        heads=1,
        lengths=(0, 1, 33, 0, 70),
        num_scales=2,
        chunk_size=32,
        normalizer="undecayed",
        include_self=False,
        asked=((0, 1), (20, 22), (34, 35), (103, 104)),
    ),
    Case(heads=2, length=90, num_scales=3, normalizer="none", per_head=True, asked=((40, 42),)),
    # pair by pair: rows with many, few and no readers, who come unsorted and twice
    Case(
        batch=3,
        length=100,
        key_dim=20,
        value_dim=17,
        num_scales=12,
        per_head=True,
        asked=((299, 300), (30, 70), (5, 6), (99, 100), (40, 42), *((299, 300),) * 20),
        **PAIRS,
    ),
    Case(
        heads=1,
        batch=2,
        length=96,
        normalizer="undecayed",
        include_self=False,
        asked=((0, 1), (33, 34), (95, 98), (191, 192)),
        **PAIRS,
    ),
    Case(heads=1, length=70, num_scales=40, asked=((3, 5), (33, 34), (69, 70)), **PAIRS),
    Case(
        heads=1,
        length=130,
        value_dim=33,
        num_scales=17,
        normalizer="none",
        read=False,
        asked=((60, 68), (3, 4), (129, 130)),
        **PAIRS,
    ),
    Case(heads=1, length=40, include_self=False, asked=((1, 40),), **PAIRS),
    Case(heads=1, length=75, fastest=1.7, read=False, asked=((74, 75),), **PAIRS),
    Case(
        heads=1,
        length=70,
        num_scales=1,
        normalizer="undecayed",
        asked=((69, 70), (31, 33)),
        **PAIRS,
    ),
    # more scales than kernels take
    Case(
        heads=1,
        batch=2,
        length=90,
        num_scales=36,
        read=False,
        asked=((5, 6), (60, 63), (5, 6)),
        **PAIRS,
    ),
    Case(heads=1, length=90, num_scales=8, read=False, rates=False, asked=((5, 6),), **PAIRS),
    # nothing but full spans
    Case(heads=1, length=128, num_scales=3, rates=False),
    Case(heads=1, length=64, batch=2, key_dim=20, num_scales=5, normalizer="undecayed"),
    Case(heads=1, length=64, value_dim=80, num_scales=2, normalizer="none", include_self=False),
    Case(heads=2, length=128, num_scales=1, read=False, rates=False, asked=((17, 18), (64, 66))),
]


def small(case: Case) -> Case:
    """The same options on few tokens, for memory checkers."""
    return replace(case, length=min(case.length, 70), heads=1, batch=1)
