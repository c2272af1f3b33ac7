"""A call's work, cut into pieces, and the states that go from piece to piece.

A piece is a run of chunks whose temporaries fit the workspace; both passes go piece by piece.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from vort.ops.products import baddbmm_, bmm
from vort.ops.retention.chunk.layout import Chunk, Layout, Plan, Workspace, make_layout
from vort.ops.retention.chunk.readers import Readers
from vort.ops.retention.chunk.weights import Decays, GatedWeights, LagWeights, at_offsets
from vort.ops.retention.inputs import Inputs, b_rows, compute_dtype, count_sequences

__all__ = [
    "Piece",
    "Work",
    "beside_states",
    "enter",
    "flat",
    "matrices",
    "run_states_backward",
    "spread",
]

# States of fewer elements than this cost more in calls than in sums.
SMALL = 1 << 15
# A sum over rows takes so many columns at a time, and others in another order.
COLUMNS = 32


class Work:
    """A call, with the sizes and tables that follow from it; its log_decay is [H, S].

    With readers, q and read are in their slots, and so is all that comes out for them.
    """

    def __init__(
        self,
        inputs: Inputs,
        decay_needs_grad: bool,
        part: "Part | None" = None,
        readers: Readers | None = None,
    ) -> None:
        self.inputs, self.decay_needs_grad, self.part = inputs, decay_needs_grad, part
        self.readers = readers
        q, k, v, write, log_decay, read, *_ = inputs
        self.normalizer = inputs.normalizer
        self.dtype = compute_dtype(q, k, v)
        self.heads, self.key_dim, self.value_dim = *k.shape[2:], v.shape[3]
        self.num_scales = write.shape[-1]
        self.b_rows = b_rows(self.normalizer, self.num_scales)
        self.sequences = count_sequences(inputs)
        self.plan: Plan = Plan.of(inputs) if part is None else part.whole.plan
        # Tables are small for decays that all heads share: [S] comes expanded, with stride 0.
        rates = log_decay[:1] if log_decay.stride(0) == 0 else log_decay
        given = (rates.to(self.dtype), self.plan.chunk, inputs.include_self, read is not None)
        self.direct: bool = part is not None and part.whole.direct
        self.decays, self.weights = _tables(*given, self.direct)
        if part is None and read is not None and isinstance(self.weights, GatedWeights):
            self.direct = self.weights.overflows(read, write)
            if self.direct:
                self.decays, self.weights = _tables(*given, True)
        self.workspace = self.weights.workspace = Workspace(self.decays.power)

    @property
    def reading_needs_grad(self) -> bool:
        """Whether anyone asks how positions read the states: `read`, or the decays."""
        return self.inputs.read is not None or self.decay_needs_grad

    @property
    def size(self) -> int:
        """Elements of all keys, or values, spread over the scales."""
        return self.inputs.write.numel() * max(self.key_dim, self.value_dim)

    @cached_property
    def layout(self) -> Layout:
        """Where the chunks are."""
        if self.part is not None:
            return self.part.whole.layout
        return make_layout(self.inputs.k, self.inputs.cu_seqlens, self.plan.chunk)

    @property
    def b_drop(self) -> Tensor:
        """What b, of R rows, loses over each length [C + 1, H, R]: nothing when undecayed."""
        if self.normalizer == "decayed":
            return self.decays.drop
        return torch.zeros_like(self.decays.drop[..., : self.b_rows])

    def of_heads(self, heads: slice) -> "Work":
        """The work of some heads, cut into pieces as all of it is."""
        q, k, v, write, log_decay, read, G, b, *_ = self.inputs
        inputs = self.inputs._replace(
            q=q[:, :, heads],
            k=k[:, :, heads],
            v=v[:, :, heads],
            write=write[:, :, heads],
            log_decay=log_decay[heads],
            read=None if read is None else read[:, :, heads],
            G=None if G is None else G[:, heads],
            b=None if b is None else b[:, heads],
        )
        return Work(inputs, self.decay_needs_grad, Part(self, heads), self.readers)

    def is_small(self, state: Tensor) -> bool:
        """Whether states [rows, H, ...] of the whole call cost more in calls than in sums."""
        return state.numel() // self.heads * self.all_heads < SMALL

    @property
    def all_heads(self) -> int:
        """Heads of the call, of which this may be a part."""
        return self.heads if self.part is None else self.part.whole.heads

    @property
    def per_piece(self) -> int:
        """Chunks in a piece: as many more as there are fewer heads, some pieces of the plan.

        The gradient of the decays is summed piece by piece, so there pieces are the plan's.
        """
        more = 1 if self.decay_needs_grad else self.all_heads // self.heads
        return self.plan.per_piece * more

    def sum_heads(self, x: Tensor, over: tuple[int, ...]) -> Tensor:
        """Sum of x [n, rows, H, ...] over some axes, n and rows among them: [H, ...].

        The order of a sum follows from the shape of what is summed. So that a part of the heads
        finds what all of them would, to the bit, it takes the sum in their shape.
        """
        if self.part is None:
            return x.sum(over)
        whole, heads = self.part
        filled = x.new_zeros(*x.shape[:2], whole.heads, *x.shape[3:])
        filled[:, :, heads] = x
        return filled.sum(over)[heads]

    def new(self, *shape: int) -> Tensor:
        """Zeros in the dtype of the sums."""
        return torch.zeros(shape, dtype=self.dtype, device=self.inputs.q.device)

    def empty(self, *shape: int) -> Tensor:
        """Like `new`, contents undefined."""
        return torch.empty(shape, dtype=self.dtype, device=self.inputs.q.device)

    def state_shapes(self, *count: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Shapes of G and b as the passes hold them: [..., H, S, K V] and [..., H, R, K]."""
        return (
            (*count, self.heads, self.num_scales, self.key_dim * self.value_dim),
            (*count, self.heads, self.b_rows, self.key_dim),
        )

    def new_states(self, *count: int) -> tuple[Tensor, Tensor]:
        """Zeros for G and b in those shapes."""
        G, b = self.state_shapes(*count)
        return self.new(*G), self.new(*b)

    def empty_states(self, *count: int) -> tuple[Tensor, Tensor]:
        """Like `new_states`, contents undefined."""
        G, b = self.state_shapes(*count)
        return self.empty(*G), self.empty(*b)

    def initial(self) -> tuple[Tensor, Tensor]:
        """The states that the sequences start from, in the same form."""
        G, b = self.new_states(self.sequences)
        if self.inputs.G is not None:
            G = self.inputs.G.to(self.dtype).flatten(-2)
        if self.inputs.b is not None:
            b = self.inputs.b.to(self.dtype)
        return G, b


Tables: TypeAlias = tuple[Decays, LagWeights | GatedWeights]
# What calls of this thread were made with, by the numbers that decide it. A backward has the decays
# of its forward, and those that are not trained stay what they are; a few layers have their own.
_known = threading.local()
MOST_KNOWN = 16


def _tables(rates: Tensor, chunk: int, include_self: bool, gated: bool, direct: bool) -> Tables:
    """The tables for log_decay [H, S], on a CPU those of an earlier call where there are any.

    direct: whether gated weights take no factor that grows.
    """
    known: dict[Any, Tables] = {}
    key = None
    if rates.device.type == "cpu":
        known = _known.__dict__.setdefault("tables", known)
        numbers = rates.detach().numpy().tobytes()
        key = (numbers, rates.shape, rates.dtype, chunk, include_self, gated, direct)
    found = known.get(key)
    if found is None:
        with torch.inference_mode(False), torch.no_grad():  # a later call may train
            decays = Decays.of(rates, chunk, include_self)
            workspace = Workspace(decays.power)
            if gated:
                found = decays, GatedWeights(decays, workspace, direct)
            else:
                found = decays, LagWeights(decays, workspace)
        if len(known) >= MOST_KNOWN:
            known.clear()
        known[key] = found
    return found


class Part(NamedTuple):
    """Which heads of which work a part of it has."""

    whole: Work
    heads: slice


class Piece:
    """A run of chunks, loaded.

    Of those that read there are R: C of them, or the slots of `Readers`. q, k, v and all matrices
    are batches [n rows H, C or R, .]; scores, weights and their product, pairs, go by source:
    [n rows H, C, R] at [i, t], where t reads i. The gates read and write, how positions read the
    states that enter their chunk (reading) and write those that leave it (writing) keep their
    [n, rows, H, C or R, S]. `batch` is (n, rows, H).
    """

    def __init__(self, work: Work, start: int, stop: int) -> None:
        self.work, self.bounds = work, (start, stop)
        q, k, v, write, _, read, *_ = work.inputs
        self.chunks = work.layout.chunks[start:stop]
        self.q = flat(self.load_read("q", q))
        self.k = flat(self.load("k", k))
        self.v = flat(self.load("v", v))
        self.write = self.load("write", write)
        self.batch = self.write.shape[:3]
        power = work.decays.power
        if read is None:
            self.read = power.new_ones(()).expand(*self.batch, self.q.shape[1], work.num_scales)
        else:
            self.read = self.load_read("read", read)
        if self.offset is None:
            self.arrive = power[1:].transpose(0, 1).contiguous()
        else:
            self.arrive = power[1:][self.offset].transpose(2, 3).contiguous()
        self.lengths = torch.tensor([chunk.length for chunk in self.chunks], device=power.device)
        steps = self.lengths[:, None] - 1 - torch.arange(work.plan.chunk, device=power.device)
        steps = steps.clamp_min_(0)
        self.steps_to_end = steps[:, None, None, :, None]
        self.leave = power[steps].transpose(1, 2).unsqueeze(1).contiguous()
        self.reading = self.read * self.arrive
        self.writing = self.write * self.leave
        size = self.q.shape[1]
        self.weights = self._weights()
        self.scores = bmm(self.k, self.q.mT, out=self.take("scores", size))
        self.pairs = torch.mul(self.scores, self.weights, out=self.take("pairs", size))

    def load(self, name: str, x: Tensor) -> Tensor:
        """This piece's part of x [B, T, H, D], in the memory of that name."""
        (start, stop), work = self.bounds, self.work
        shape = (stop - start, work.layout.rows, x.shape[2], work.plan.chunk, x.shape[3])
        out = work.workspace.take(name, *shape)
        return work.layout.load(x, start, stop, out)

    def load_read(self, name: str, x: Tensor) -> Tensor:
        """`load` of something on the reading side."""
        if self.work.readers is None:
            return self.load(name, x)
        return x[slice(*self.bounds)].contiguous()

    @property
    def offset(self) -> Tensor | None:
        """Where in their chunks the readers are [n, rows, R]; None: everywhere, in order."""
        readers = self.work.readers
        return None if readers is None else readers.offset[slice(*self.bounds)]

    @cached_property
    def columns(self) -> Tensor:
        """`offset` as an index of the columns of matrices [n rows H, C, C]: [n rows H, C, R]."""
        assert self.offset is not None
        every = self.offset[:, :, None, None].expand(*self.batch, self.work.plan.chunk, -1)
        return every.flatten(0, 2)

    @cached_property
    def seen(self) -> Tensor:
        """1 at [i, t] where t may see i: [C, C], or [n rows H, C, R] of readers."""
        seen = self.work.decays.seen
        if self.offset is None:
            return seen
        return seen.expand(len(self.columns), -1, -1).gather(2, self.columns)

    def _weights(self) -> Tensor:
        """W by source [n rows H, C, R]."""
        weights = self.work.weights
        if self.offset is None:
            return weights.by_source(self.read, self.write)
        if isinstance(weights, GatedWeights) and weights.diagonal is None:
            return weights.by_source(self.read, self.write, self.offset, self.seen)
        return weights.by_source(self._whole_read(), self.write).gather(2, self.columns)

    def weights_backward(self, dW: Tensor) -> tuple[Tensor | None, Tensor, Tensor | None]:
        """dread, dwrite and, if needed, dlog_decay [H, S] from the gradient of W."""
        weights, needed = self.work.weights, self.work.decay_needs_grad
        if self.offset is None:
            return weights.backward(dW, self.read, self.write, needed)
        if isinstance(weights, GatedWeights) and weights.diagonal is None:
            return weights.backward(dW, self.read, self.write, needed, self.offset, self.seen)
        chunk = self.work.plan.chunk
        whole = self.work.workspace.take("weight gradients", len(dW), chunk, chunk).zero_()
        whole.scatter_add_(2, self.columns, dW)
        dread, dwrite, dlog_decay = weights.backward(whole, self._whole_read(), self.write, needed)
        if dread is not None:
            index = self.offset[:, :, None, :, None].expand(self.read.shape)
            dread = dread.gather(3, index)
        return dread, dwrite, dlog_decay

    def _whole_read(self) -> Tensor:
        """`read` of whole chunks, where the weights look at it."""
        gated = isinstance(self.work.weights, GatedWeights)
        return self.at_offsets(self.read) if gated else self.read

    def at_offsets(self, x: Tensor) -> Tensor:
        """x [n, rows, H, R, ...] in its places of whole chunks, [n, rows, H, C, ...]."""
        return at_offsets(x, self.offset, self.work.plan.chunk)

    def whole(self, x: Tensor) -> Tensor:
        """`at_offsets` of [n rows H, R, D]: [n rows H, C, D]."""
        return flat(self.at_offsets(x.view(*self.batch, *x.shape[1:])))

    def take(self, name: str, size: int) -> Tensor:
        """Memory of that name for [n rows H, C, size], contents undefined."""
        return self.work.workspace.take(name, *self.k.shape[:2], size)

    def take_read(self, name: str, size: int) -> Tensor:
        """Memory of that name for [n rows H, R, size], contents undefined."""
        return self.work.workspace.take(name, *self.q.shape[:2], size)

    def store_read(self, x: Tensor, value: Tensor) -> None:
        """`store` of something on the reading side."""
        if self.work.readers is None:
            self.store(x, value)
        else:
            x[slice(*self.bounds)] = value.view(*self.batch, *value.shape[-2:])

    def over_sources(self, x: Tensor) -> Tensor:
        """Sum of x [n rows H, C, R] over the sources; in one order, however many readers."""
        missing = -x.shape[-1] % COLUMNS
        if not missing:
            return x.sum(-2)
        return nn.functional.pad(x, (0, missing)).sum(-2)[..., : x.shape[-1]]

    def store(self, x: Tensor, value: Tensor) -> None:
        """Put this piece's part into x."""
        tokens = value.view(*self.batch, *value.shape[-2:])
        self.work.layout.store(x, *self.bounds, tokens)

    def by_chunk(self, x: Tensor) -> Tensor:
        """A batch [n rows H, i, j] chunk by chunk, [n, rows H, i, j]."""
        chunks, rows, heads = self.batch
        return x.view(chunks, rows * heads, *x.shape[1:])

    def pair_sums(self) -> Tensor:
        """What the tokens of its own chunk add to each position's normaliser, [n rows H, C]."""
        if self.work.normalizer == "decayed":
            return self.over_sources(self.pairs)
        return self.over_sources(self.scores * self.seen)

    def for_b(self, weight: Tensor) -> Tensor:
        """How positions write or read each row of b: as they do G, or plainly (undecayed)."""
        weight = flat(weight)
        if self.work.normalizer == "decayed":
            return weight
        return weight.new_ones(()).expand(*weight.shape[:-1], self.work.b_rows)


class Entered(NamedTuple):
    """Keys spread over scales [n rows H, C, S K]; G and b before each chunk; those after all."""

    written: Tensor
    G: Tensor
    b: Tensor
    last: tuple[Tensor, Tensor]


def enter(
    piece: Piece,
    state: tuple[Tensor, Tensor],
    initial: tuple[Tensor, Tensor],
    final: tuple[Tensor | None, Tensor | None] = (None, None),
    place: Tensor | None = None,
) -> Entered:
    """What a piece writes, and the states before each chunk and after all.

    Where there is a place [n or n + 1, rows, H, S, K V] G goes there: before each chunk of the
    piece, and before the next if there is one.
    """
    work, chunks, workspace = piece.work, piece.chunks, piece.work.workspace
    shape_G, shape_b = work.state_shapes(piece.batch[0] + 1, piece.batch[1])
    written = spread(piece.writing, piece.k, workspace, "written")
    if place is None:
        place = workspace.take("states", *shape_G)
    each = list(place.unbind())
    if len(each) == len(chunks):
        each.append(workspace.take("last states", *shape_G[1:]))
    if state[0].data_ptr() != each[0].data_ptr():
        each[0].copy_(state[0])
    pair = (piece.by_chunk(written).mT, piece.by_chunk(piece.v))
    small = work.is_small(each[0])
    run_states(each, *pair, chunks, work.decays.drop, small, initial[0], final[0])
    b = workspace.take("sums", *shape_b)
    b[0] = state[1]
    if work.b_rows:
        pair = (piece.by_chunk(piece.for_b(piece.writing)).mT, piece.by_chunk(piece.k))
        small = work.is_small(b[0])
        run_states(b.unbind(), *pair, chunks, work.b_drop, small, initial[1], final[1])
    return Entered(written, place[: len(chunks)], b[:-1], (each[-1], b[-1]))


def spread(weight: Tensor, x: Tensor, workspace: Workspace, name: str) -> Tensor:
    """weight [..., C, S] times x [n rows H, C, D]: [n rows H, C, S D]."""
    batch, chunk, size = x.shape
    num_scales = weight.shape[-1]
    out = workspace.take(name, batch, chunk, num_scales, size)
    torch.mul(weight.view(batch, chunk, num_scales, 1), x.unsqueeze(-2), out=out)
    return out.view(batch, chunk, num_scales * size)


def flat(x: Tensor) -> Tensor:
    """[n, rows, H, i, j] as one batch of matrices [n rows H, i, j]."""
    return x.flatten(0, 2)


def matrices(states: Tensor, work: Work) -> Tensor:
    """[n, rows, H, S, K V] as a batch of [S K, V]."""
    return states.view(-1, work.num_scales * work.key_dim, work.value_dim)


def beside_states(states: Tensor, work: Work, *batches: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """States [n, rows, H, S, K V] as batches of [S K, V], each with its part of [n rows H, i, j].

    One batch, but for some heads of states that lie among those of others: there, of one row, a
    batch for every head.
    """
    if states.is_contiguous():
        yield matrices(states, work), *batches
        return
    count, rows, heads = states.shape[:3]
    assert rows == 1
    size = (work.num_scales * work.key_dim, work.value_dim)
    for head in range(heads):
        of_head = (x.view(count, heads, *x.shape[1:])[:, head] for x in batches)
        yield states[:, 0, head].view(count, *size), *of_head


def run_states(
    each: Sequence[Tensor],
    left: Tensor,
    right: Tensor,
    chunks: Sequence[Chunk],
    drop: Tensor,
    small: bool,
    initial: Tensor,
    final: Tensor | None = None,
) -> None:
    """Fill n + 1 states [rows, H, S, D], before each chunk and after the last; the first is given.

    Chunk c adds left[c] @ right[c], [rows H, i, C] times [rows H, C, j] with i j = S D. A chunk
    that starts a sequence takes its state from `initial`, one that ends a sequence leaves it in
    `final`: nothing crosses over.
    """
    add_product = _adder(each[1:], left, right, small)
    aging = _aging_of(chunks, drop)
    for index, chunk in enumerate(chunks):
        before, after = each[index], each[index + 1]
        if chunk.first is not None:
            before.copy_(initial[chunk.first])
        torch.addcmul(before, before, aging[chunk.length], out=after)
        add_product(index)
        if final is not None and chunk.last is not None:
            final[chunk.last] = after


def run_states_backward(
    grads: Tensor,
    left: Tensor,
    right: Tensor,
    chunks: Sequence[Chunk],
    drop: Tensor,
    small: bool,
    initial: Tensor,
    final: Tensor,
) -> None:
    """Fill grads [n + 1, rows, H, S, D]: of the state before the first chunk, and after each.

    grads[n] is given; left[c] @ right[c] is what the chunk's own reading gives to the gradient of
    the state entering it. Gradients of final states come in through `final`, those of initial
    ones go out to `initial`.
    """
    each = grads.unbind()
    add_product = _adder(each[:-1], left, right, small)
    aging = _aging_of(chunks, drop)
    for index in reversed(range(len(chunks))):
        chunk, before, after = chunks[index], each[index], each[index + 1]
        if chunk.last is not None:
            after.copy_(final[chunk.last])
        torch.addcmul(after, after, aging[chunk.length], out=before)
        add_product(index)
        if chunk.first is not None:
            initial[chunk.first] = before


def _adder(
    each: Sequence[Tensor], left: Tensor, right: Tensor, small: bool
) -> Callable[[int], Tensor]:
    """A function of c that adds left[c] @ right[c] to each[c]."""
    if small:
        products = bmm(left.flatten(0, 1), right.flatten(0, 1))
        sums = products.view(len(each), *each[0].shape).unbind()
        return lambda index: each[index].add_(sums[index])
    shape = (-1, left.shape[-2], right.shape[-1])
    lefts, rights = left.unbind(), right.unbind()
    return lambda index: baddbmm_(each[index].view(shape), lefts[index], rights[index])


def _aging_of(chunks: Sequence[Chunk], drop: Tensor) -> dict[int, Tensor]:
    """What a state [rows, H, S, D] loses over a chunk, by the chunk's length."""
    return {length: drop[length].unsqueeze(-1) for length in {chunk.length for chunk in chunks}}
