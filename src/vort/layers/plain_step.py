"""One token through a whole small model on a CPU, in few calls that cost little.

A token of a small model costs its calls, not its numbers. So whatever is multiplied by the same
vector is joined into one matrix, norms' weights go into the matrices behind them, and what is asked
of a model is asked once. PyTorch multiplies by matrices and moves states on; what is done to a few
hundred numbers NumPy does, whose calls take a third of the time, on the same memory. States go from
one set of buffers to another and change places at the end: a step that is interrupted has not
happened.
"""

from collections.abc import Sequence
from dataclasses import fields
from threading import Lock
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary
from zlib import crc32

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.optimizer import register_optimizer_step_post_hook

from vort.layers.cache import LayerStates
from vort.layers.parts import RMSNorm, ShortConvolution, VortMLP
from vort.layers.vort_attention import VortAttention
from vort.memories import LayerSettings, Memory, State
from vort.memories.retention_memory import GateProjection, SpreadReading
from vort.memories.vort import OrderProjection, Router, VortMemory
from vort.ops.feature_maps import HedgehogFeatures
from vort.ops.linear import is_watched
from vort.ops.retention.recurrent import decay_in_parts

__all__ = ["PlainStep", "fingerprint", "plain_step_for"]

# Weights are joined as copies: not where they would matter, and where calls no longer do.
LARGEST = 50_000_000
# Settings that a step takes as they come, or looks at itself. What is not among them it does not
# know, and leaves alone unless it is at its default.
_KNOWN = {
    "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "sliding_window",
    "rope_theta", "memory", "routing", "horizon", "num_scales", "num_banks", "order_min",
    "order_start", "leak", "feature_map", "num_features", "normalizer", "include_self",
    "use_entropy", "write_gate", "read_weights", "read_start", "conv_size", "qk_norm",
    "output_norm", "output_gate", "attention_bias", "rms_norm_eps",
}  # fmt: skip
Array = NDArray[np.float32]
_NAMES = ("conv", "local.k", "local.v", "local.seen", "memory.G", "memory.b")
# What is made for a horizon.
MADE_FOR = (Memory, Router)
_steps: "WeakKeyDictionary[nn.Module, PlainStep]" = WeakKeyDictionary()


def plain_step_for(model: Any, states: LayerStates, kind: type) -> "PlainStep | None":
    """What moves `states` on by a token of one row; None: the model has to be called.

    kind: the class of the model's blocks, whose `forward` adds what attention and MLP make of their
    norms; blocks of any other class are called.

    Every token asks whether weights or modules are others, or somebody watches a module. When a row
    of steps begins all else is asked, what the weights hold among it: not all that writes to them
    counts as a version (a fused optimizer on a CPU, whatever goes by way of `.data`; the latter is
    not noticed between two tokens of one memory).
    """
    known = _steps.get(model)
    if known is not None and known.goes_on(model, states):
        return known
    if not _fits(model, kind):
        return None
    if known is None or known.made_for != (fingerprint(model), _contents(model)):
        known = _steps[model] = PlainStep(model)
    return known if known.takes(states) else None


def fingerprint(model: Any) -> int:
    """Of weights, by place and version, of modules and horizons.

    What is made of them knows no others.
    """
    weights = [(p.data_ptr(), 0 if p.is_inference() else p._version) for p in model.parameters()]
    modules = [*model.modules()]  # not by way of layers, which somebody may have wrapped
    horizons = [getattr(m, "horizon", None) for m in modules if isinstance(m, MADE_FOR)]
    return hash((*weights, *((id(m), type(m)) for m in modules), *horizons))


def _contents(model: Any) -> tuple[int, ...]:
    """A checksum of each weight; reading them all is what some two tokens cost."""
    arrays = (np.ascontiguousarray(weight.detach().numpy()) for weight in model.parameters())
    return tuple(crc32(array.data) for array in arrays)


_optimizer_steps = 0


def _count_optimizer_steps(*_: Any) -> None:
    global _optimizer_steps
    _optimizer_steps += 1


register_optimizer_step_post_hook(_count_optimizer_steps)


class PlainStep:
    """A token in, logits out, states moved on.

    model: with the names of `VortForCausalLM`; `plain_step_for` says which ones will do.
    """

    def __init__(self, model: Any) -> None:
        self.made_for = (fingerprint(model), _contents(model))
        # As long as this is kept, so is the model: no reference to the whole of it.
        self._weights = list(model.parameters())
        self._modules = [module for module in model.modules() if module is not model]
        self._places = [
            (place, name, held)
            for module in model.modules()
            for place in (module._parameters, module._modules)
            for name, held in place.items()
        ]
        self._versions = self._count()
        base, self._head = model.model, model.lm_head.weight
        with torch.inference_mode(False), torch.no_grad():
            self._embedding = _Twins.of(base.embed_tokens.weight.detach())
            self._blocks = [_Block(block) for block in base.layers]
            norm = base.norm.fused()
            self._eps = norm.eps
            self._output = self._head.detach() * norm.weight
        layer: VortAttention = base.layers[0].self_attn
        self._turns: NDArray[np.float64] | None = None
        if layer.rope_base is not None:  # angles in float64, as `angles_of` has them
            self._turns = layer.rope_base ** -(np.arange(0, layer.head_dim, 2) / layer.head_dim)
        self._window = layer.window
        self._lock = Lock()

    def goes_on(self, model: Any, states: LayerStates) -> bool:
        """Whether it made these states, of weights that are still the model's."""
        buffers = states.buffers
        if buffers is None or buffers.maker is not self or not buffers.hold(states):
            return False
        if self._count() != self._versions or any(p.get(n) is not x for p, n, x in self._places):
            return False
        return not is_watched(model, *self._modules)

    def takes(self, states: LayerStates) -> bool:
        """Whether the states are those of one row, in float32, of equally many tokens."""
        if states.state_dtype != torch.float32 or states.static or states.in_place:
            return False
        if states.states.keys() != set(range(len(self._blocks))):
            return False
        for state in states.states.values():
            if state.keys() != set(_NAMES) or any(len(x) != 1 for x in state.values()):
                return False
            kinds = {x.dtype for name, x in state.items() if name != "local.seen"}
            if kinds != {torch.float32} or any(x.device.type != "cpu" for x in state.values()):
                return False
        return len({int(state["local.seen"]) for state in states.states.values()}) == 1

    def __call__(self, token: int, states: LayerStates) -> Tensor:
        """Logits `[V]` after one more token, which `states` then hold, or nothing has changed."""
        if not 0 <= token < len(self._output):
            raise IndexError(f"token must lie in 0..{len(self._output) - 1}, got {token}")
        with self._lock:  # blocks have room for one token's numbers
            return self._step(token, states)

    def _step(self, token: int, states: LayerStates) -> Tensor:
        held = states.buffers
        ours = held is not None and held.maker is self and held.hold(states)
        with torch.inference_mode(False), torch.no_grad():
            if ours and held is not None:
                front, back = held.front, held.back or [_Buffers(x.state) for x in held.front]
            else:
                front = [_Buffers(states.states[i], copied=False) for i in range(len(self._blocks))]
                back = [_Buffers(x.state) for x in front]
            logits = torch.empty(self._output.shape[0])
        # Exponentials may overflow where what follows divides by them.
        with torch.inference_mode(), np.errstate(all="ignore"):
            place = self._place(int(front[0].seen))
            x = _Twins(self._embedding.tensor[token], self._embedding.array[token])
            for block, before, after in zip(self._blocks, front, back, strict=True):
                x = block(x, before, after, place)
            torch.mv(self._output, x.tensor, out=logits).mul_(_scale(x.array, self._eps))
        moved = {index: buffers.state for index, buffers in enumerate(back)}
        positions = {index: states.positions.get(index, 0) + 1 for index in moved}
        made = _Lent(self, back, front if ours else None)
        states.states, states.positions, states.buffers = moved, positions, made
        return logits

    def _place(self, seen: int) -> "_Place":
        """What all layers are told of the token's place."""
        turn = None
        if self._turns is not None:
            angles = seen * self._turns
            cos, sin = np.cos(angles), np.sin(angles)
            turn = (
                np.concatenate([cos, cos]).astype(np.float32),
                np.concatenate([-sin, sin]).astype(np.float32),
            )
        window = self._window
        return _Place(seen, seen % window, (seen - 1) % window, min(seen + 1, window), turn)

    def _count(self) -> tuple[int, int]:
        """What changes with what weights hold or where they lie, as far as it is cheap to ask."""
        return _optimizer_steps, sum([p._version + p.data_ptr() for p in self._weights])


class _Twins(NamedTuple):
    """The same numbers for PyTorch and for NumPy."""

    tensor: Tensor
    array: Array

    @classmethod
    def of(cls, tensor: Tensor) -> "_Twins":
        """A tensor and its twin."""
        return cls(tensor, tensor.numpy())

    @classmethod
    def made(cls, *shape: int) -> "_Twins":
        """New ones."""
        return cls.of(torch.zeros(shape))


class _Place(NamedTuple):
    """Tokens before this one, its slot in the ring, the one before, how many are written; RoPE.

    turn: cosines of a head, and sines for it with its halves in each other's place.
    """

    seen: int
    slot: int
    former: int
    written: int
    turn: tuple[Array, Array] | None


class _Buffers:
    """A layer's state, and views of it that a step would otherwise make for every token."""

    def __init__(self, state: State, *, copied: bool = True) -> None:
        form = torch.contiguous_format
        made = {
            n: state[n].detach().clone(memory_format=form) if copied else state[n] for n in _NAMES
        }
        self.state = made
        conv, k, v, seen, G, b = (made[name][0] for name in _NAMES)
        self.conv, self.keys, self.values = conv.numpy(), k.numpy(), v.numpy()
        self.seen = seen.numpy()
        self.all_keys, self.all_values = self.keys.transpose(1, 2, 0), self.values.swapaxes(0, 1)
        # Whole scales decay alike; a token adds to all scales of a head.
        self.scales, self.G, self.b = G.flatten(2), G.flatten(1, 2), b.flatten(1).numpy()
        self.read = self.G.numpy()


class _Lent(NamedTuple):
    """The states that a step has left, where they were before it, and who made it."""

    maker: PlainStep
    front: list[_Buffers]
    back: list[_Buffers] | None

    def hold(self, states: LayerStates) -> bool:
        """Whether these are still the states of all layers: nobody has put others there."""
        held = states.states
        return len(held) == len(self.front) and all(
            held.get(index) is buffers.state for index, buffers in enumerate(self.front)
        )

    def __reduce__(self) -> Any:
        """None, in a copy or a file: what is copied belongs to whoever has the copy."""
        return type(None), ()


class _Block:
    """x + attention(norm(x)), then x + mlp(norm(x)), of one token."""

    def __init__(self, block: Any) -> None:
        layer, mlp = block.self_attn, block.mlp
        memory: Any = layer.memory
        router, gates = memory.router, memory.router.gates
        heads, dim, scales = layer.num_heads, layer.head_dim, memory.num_scales
        norm, after = block.input_layernorm.fused(), block.post_attention_layernorm.fused()
        size = layer.q_proj.in_features
        # Whatever the normed hidden states are multiplied by, in the order it is used.
        orders = router.order.weight[:, :size]
        linears = (layer.q_proj, layer.k_proj, layer.v_proj)
        weights = [*(p.weight for p in linears), orders, gates.write.weight, gates.read.weight]
        weights += [] if layer.g_proj is None else [layer.g_proj.weight]
        self.joined = (torch.cat(weights) * norm.weight).detach().contiguous()
        channels, width = 3 * heads * dim, 0 if layer.g_proj is None else heads * dim
        biases = torch.cat([router.order.bias, gates.write.bias, gates.read.bias])
        self.bias = F.pad(biases.detach(), (channels, width)).contiguous()
        joint = _Twins.made(channels + 2 * heads + heads * scales + width)
        bounds = np.cumsum([channels, 2 * heads, heads * scales]).tolist()
        self.joint = joint.tensor
        self.projected, self.routed, read, gate = np.split(joint.array, bounds)
        self.read, self.gate = read.reshape(heads, scales), gate.reshape(heads, -1)
        self.eps, self.after_eps = norm.eps, after.eps
        taps = layer.convolution.weight.detach().t().flip(0).contiguous().numpy()
        self.taps, self.last_tap = taps[:-1], taps[-1]
        norms = [n.weight.detach().expand(heads, dim) for n in (layer.q_norm, layer.k_norm)]
        self.head_norm, self.head_eps = torch.cat(norms).numpy(), layer.q_norm.fused().eps
        self.scale = dim**-0.5
        # Entropy comes with its sign turned.
        seen = router.order.weight[:, size : size + heads] if router.use_entropy else None
        self.mix = None if seen is None else -seen.detach().contiguous().numpy()
        self.order_min, self.heads, self.dim, self.num_scales = router.order_min, heads, dim, scales
        self.exponents = _exponents(router).numpy()
        self.powers = np.arange(len(self.exponents), dtype=np.float32)
        self.parts = np.array([0, *[1] * (scales - 2), *[2] * (scales > 1)])
        maps = torch.cat([memory.query_map.weight, memory.key_map.weight]).detach()
        self.maps = torch.cat([maps, -maps], -1).contiguous().numpy()
        features = self.maps.shape[-1]
        kept, aged = decay_in_parts(router.log_decay(torch.device("cpu")).detach())
        self.aged = aged[:, None]
        self.kept_b, self.aged_b = (x.repeat_interleave(features).numpy() for x in (kept, aged))
        # Rows of the scales of which nothing is kept, and what a step leaves of them.
        self.fast = [
            (slice(s * features, (s + 1) * features), aged[s].numpy())
            for s in (kept == 0).nonzero().flatten().tolist()
        ]
        self.memory_eps = memory.eps
        every, spread = _Twins.made(3 * heads, dim), _Twins.made(2 * heads, scales, features)
        self.every, self.value_rows = every.array, every.tensor[2 * heads :, None]
        self.spread, self.key_columns = spread.array, spread.tensor[heads:].flatten(1)[..., None]
        flat = self.spread.reshape(2 * heads, scales * features)
        self.queries, self.written = flat[:heads], flat[heads:]
        out = layer.norm.fused()
        self.out_eps = out.eps
        self.out = (layer.o_proj.weight * out.weight.repeat(heads)).detach().contiguous()
        inner = torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight]) * after.weight
        self.inner, self.down = inner.detach().contiguous(), mlp.down_proj.weight.detach()
        mixed, opened = _Twins.made(heads * dim), _Twins.made(len(inner))
        self.mixed, self.found = mixed.tensor, mixed.array.reshape(heads, dim)
        self.opened, (self.open, self.up) = opened.tensor, np.split(opened.array, 2)
        self.hidden, self.middle, self.x = map(_Twins.made, (len(inner) // 2, size, size))

    def __call__(self, x: _Twins, before: _Buffers, after: _Buffers, place: _Place) -> _Twins:
        heads = self.heads
        scale = _scale(x.array, self.eps)
        torch.addmv(self.bias, self.joined, x.tensor, alpha=scale, out=self.joint)
        # Short convolution, norms of queries and keys.
        summed = self.projected * self.last_tap
        summed += (before.conv * self.taps).sum(0)
        after.conv[:-1], after.conv[-1] = before.conv[1:], self.projected
        np.copyto(self.every, _silu(summed).reshape(3 * heads, self.dim))
        both = self.every[: 2 * heads]
        both = both * self.head_norm * self._inverse_norm(both, self.head_eps)
        local, entropy = self._attend(both, before, after, place)
        if self.mix is not None:
            self.routed[:heads] += self.mix @ entropy
        # Memory: queries read by the read weights, keys are written by the orders'.
        weights = self._weigh(self.routed)
        features = _softmax(np.matmul(both[:, None], self.maps).reshape(2 * heads, 2, -1))
        np.multiply(weights[..., None], features.reshape(2 * heads, 1, -1), out=self.spread)
        # What is forgotten is small beside the state, and is taken off as it is: 1 less it would
        # be rounded.
        torch.addcmul(before.scales, before.scales, self.aged, out=after.scales)
        for rows, share in self.fast:
            np.multiply(before.read[:, rows], share, out=after.read[:, rows])
        after.G.addcmul_(self.key_columns, self.value_rows)
        np.multiply(before.b, self.aged_b, out=after.b)
        after.b += self.written
        after.b += before.b * self.kept_b
        found = np.matmul(self.queries[:, None], after.read)[:, 0]
        found /= (np.abs(np.vecdot(self.queries, after.b)) + self.memory_eps)[:, None]
        found += local
        np.multiply(found, self._inverse_norm(found, self.out_eps), out=self.found)
        if self.gate.size:
            self.found *= _silu(self.gate)
        middle = self.middle.tensor
        torch.addmv(x.tensor, self.out, self.mixed, out=middle)
        torch.mv(self.inner, middle, out=self.opened)
        scale = _scale(self.middle.array, self.after_eps)
        np.multiply(_silu(self.open * scale), self.up * scale, out=self.hidden.array)
        torch.addmv(middle, self.down, self.hidden.tensor, out=self.x.tensor)
        return self.x

    def _attend(
        self, both: Array, before: _Buffers, after: _Buffers, place: _Place
    ) -> tuple[Array, Array]:
        """Local attention `[H, D]`, its entropy with the sign turned `[H]`; the ring moves on."""
        heads, half = self.heads, self.dim // 2
        turned = both
        if place.turn is not None:
            cos, sin = place.turn
            turned = both * cos
            turned += np.concatenate([both[:, half:], both[:, :half]], 1) * sin
        slot, former, written = place[1:4]
        # The buffers that are written to are a token behind.
        after.keys[former], after.values[former] = before.keys[former], before.values[former]
        after.keys[slot], after.values[slot] = turned[heads:], self.every[2 * heads :]
        after.seen[...] = place.seen + 1
        keys, values = after.all_keys, after.all_values
        if written < keys.shape[-1]:
            keys, values = keys[..., :written], values[:, :written]
        scores = np.matmul(turned[:heads, None], keys)
        scores *= self.scale
        scores -= scores.max(-1, keepdims=True)
        p = np.exp(scores)
        total = p.sum(-1, keepdims=True)
        p /= total
        entropy = np.vecdot(p, scores)[:, 0] - np.log(total)[:, 0, 0]
        return np.matmul(p, values)[:, 0], entropy

    def _weigh(self, routed: Array) -> Array:
        """`[2 H, S]`: read weights of all heads, then what they write."""
        heads = self.heads
        opened = 1 / (1 + np.exp(-routed))
        order = (opened[:heads] * (1 - self.order_min) + self.order_min)[:, None]
        rest = 1 - order
        angle = np.maximum(rest * np.pi, 1e-20)  # an order of 1 leaves none
        first = np.sin(angle) / angle
        inner = first * rest
        written = np.exp(np.power(order, self.powers) @ self.exponents)
        written *= np.concatenate([first, inner, inner / order], 1).take(self.parts, 1)
        written *= opened[heads:, None]
        reading = _softmax(self.read)
        reading *= self.num_scales
        return np.concatenate([reading, written])

    def _inverse_norm(self, x: Array, eps: float) -> Array:
        """1 / rms of every row, `[H, 1]`."""
        squares = np.vecdot(x, x)
        squares /= self.dim
        squares += eps
        found: Array = 1 / np.sqrt(squares)[:, None]
        return found


def _scale(x: Array, eps: float) -> float:
    """1 / rms of a vector."""
    return float((float(np.dot(x, x)) / len(x) + eps) ** -0.5)


def _silu(x: Array) -> Array:
    divisor = np.exp(-x)
    divisor += 1
    return np.divide(x, divisor, out=divisor)


def _softmax(x: Array) -> Array:
    found: Array = np.exp(x - x.max(-1, keepdims=True))
    found /= found.sum(-1, keepdims=True)
    return found


def _exponents(router: Router) -> Tensor:
    """`[degree + 2, S]`: polynomials of the order whose exp the basis' weights are made of.

    The first scale's is multiplied by 1 - order, one degree more; see `PowerLawBasis`.
    """
    polynomials = router.basis.polynomials_on(torch.device("cpu"), torch.float64)
    padded = F.pad(polynomials, (0, 1))
    first = padded[:1] - F.pad(polynomials[:1], (1, 0))
    return torch.cat([first, padded[1:]]).t().to(torch.float32).contiguous()


def _fits(model: Any, kind: type) -> bool:
    """Whether every part is what a step knows, in float32 on a CPU, and nobody watches it."""
    base, head, weights = model.model, model.lm_head, list(model.parameters())
    # States go by the number of a layer, which here is its place.
    blocks = list(enumerate(base.layers))
    if not all(type(block) is kind and _block_fits(block, place) for place, block in blocks):
        return False
    if sum(p.numel() for p in weights) > LARGEST or is_watched(*model.modules()):
        return False
    if any(p.dtype != torch.float32 or p.device.type != "cpu" or p.is_inference() for p in weights):
        return False
    if any(type(p) is not nn.Parameter or not p.is_contiguous() for p in weights):
        return False
    plain = type(base.embed_tokens) is nn.Embedding and _are_linear(head)
    plain = plain and base.embed_tokens.max_norm is None and type(base.norm) is RMSNorm
    first = base.layers[0].self_attn
    alike = all(
        (block.self_attn.window, block.self_attn.rope_base) == (first.window, first.rope_base)
        for block in base.layers
    )
    return plain and alike


def _block_fits(block: Any, place: int) -> bool:
    layer, mlp = block.self_attn, block.mlp
    if type(layer) is not VortAttention or type(mlp) is not VortMLP or layer.layer_idx != place:
        return False
    memory: Any = layer.memory
    if type(memory) is not VortMemory:
        return False
    router, heads = memory.router, layer.num_heads
    norms: Sequence[Any] = (
        block.input_layernorm, block.post_attention_layernorm,
        layer.q_norm, layer.k_norm, layer.norm,
    )  # fmt: skip
    linears = [layer.q_proj, layer.k_proj, layer.v_proj, layer.o_proj]
    linears += [] if layer.g_proj is None else [layer.g_proj]
    maps = (memory.query_map, memory.key_map)
    gates = (router.gates.write, router.gates.read)
    unknown = [field for field in fields(LayerSettings) if field.name not in _KNOWN]
    return (
        all(getattr(memory.settings, field.name) == field.default for field in unknown)
        and all(type(norm) is RMSNorm for norm in norms)
        and _are_linear(*linears, mlp.gate_proj, mlp.up_proj, mlp.down_proj)
        and all(type(m) is HedgehogFeatures and m.num_heads == heads for m in maps)
        and all(type(gate) in (GateProjection, SpreadReading) for gate in gates)
        and type(router) is Router
        and type(router.order) is OrderProjection
        and router.routing == "continuous"
        and memory.normalizer == "decayed"
        and memory.include_self
        and layer.num_key_value_heads == heads
        and type(layer.convolution) is ShortConvolution
        and layer.window > 0
        and layer.head_dim % 2 == 0
    )


def _are_linear(*modules: Any) -> bool:
    return all(type(m) is nn.Linear and m.bias is None for m in modules)
