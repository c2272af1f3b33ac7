"""One token through a whole small model on a CPU, as few calls as PyTorch has for it.

A token of a small model costs its calls, not its numbers. So whatever is multiplied by the same
vector is joined into one matrix, norms' weights go into the matrices behind them, and what is asked
of a model is asked once. States go from one set of buffers to another and change places at the end:
a step that is interrupted has not happened.
"""

from collections.abc import Sequence
from dataclasses import fields
from threading import Lock
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vort.layers.cache import LayerStates
from vort.layers.parts import RMSNorm, VortMLP
from vort.layers.vort_attention import VortAttention
from vort.memories import LayerSettings, State
from vort.memories.retention_memory import GateProjection, SpreadReading
from vort.memories.vort import OrderProjection, Router, VortMemory
from vort.ops.feature_maps import HedgehogFeatures
from vort.ops.linear import is_watched
from vort.ops.local_attention.rope import angles_of

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
_NAMES = ("conv", "local.k", "local.v", "local.seen", "memory.G", "memory.b")
_steps: "WeakKeyDictionary[nn.Module, PlainStep]" = WeakKeyDictionary()


def plain_step_for(model: Any, states: LayerStates) -> "PlainStep | None":
    """What moves `states` on by a token of one row; None: the model has to be called.

    Every token asks whether weights have changed or somebody watches a module; all else is asked
    when a row of steps begins.
    """
    known = _steps.get(model)
    if known is not None and known.goes_on(model, states):
        return known
    blocks = model.model.layers
    if not all(type(block.self_attn.memory) is VortMemory for block in blocks) or not _fits(model):
        return None
    if known is None or known.made_for != fingerprint(model):
        known = _steps[model] = PlainStep(model)
    return known if known.takes(states) else None


def fingerprint(model: Any) -> int:
    """Of weights, by place and version, and of horizons: what is made of them knows no others."""
    weights = [(p.data_ptr(), 0 if p.is_inference() else p._version) for p in model.parameters()]
    memories = [block.self_attn.memory for block in model.model.layers]
    horizons = [getattr(getattr(m, "router", m), "horizon", None) for m in memories]
    return hash((*weights, *horizons))


class PlainStep:
    """A token in, logits out, states moved on.

    model: with the names of `VortForCausalLM`; `plain_step_for` says which ones will do.
    """

    def __init__(self, model: Any) -> None:
        self.made_for = fingerprint(model)
        # As long as this is kept, so is the model: no reference to the whole of it.
        self._weights = list(model.parameters())
        self._modules = [module for module in model.modules() if module is not model]
        self._versions = self._count()
        base, self._head = model.model, model.lm_head.weight
        with torch.inference_mode(False), torch.no_grad():
            self._embedding = base.embed_tokens.weight.detach()
            self._blocks = [_Block(block) for block in base.layers]
            norm = base.norm.fused()
            self._eps = norm.eps
            self._output = self._head.detach() * norm.weight
        layer: VortAttention = base.layers[0].self_attn
        self._rope = None if layer.rope_base is None else (layer.head_dim, layer.rope_base)
        self._window = layer.window
        self._lock = Lock()

    def goes_on(self, model: Any, states: LayerStates) -> bool:
        """Whether it made these states, of weights that are still the model's."""
        buffers = states.buffers
        if buffers is None or buffers.maker is not self or not buffers.hold(states):
            return False
        same = model.lm_head.weight is self._head and self._count() == self._versions
        return same and not is_watched(model, *self._modules)

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
        with torch.inference_mode():
            place = self._place(int(front[0].seen))
            x = self._embedding[token]
            for block, before, after in zip(self._blocks, front, back, strict=True):
                x = block(x, before, after, place)
            scale = (float(torch.dot(x, x)) / len(x) + self._eps) ** -0.5
            torch.mv(self._output, x, out=logits).mul_(scale)
        moved = {index: buffers.state for index, buffers in enumerate(back)}
        positions = {index: states.positions.get(index, 0) + 1 for index in moved}
        made = _Lent(self, back, front if ours else None)
        states.states, states.positions, states.buffers = moved, positions, made
        return logits

    def _place(self, seen: int) -> "_Place":
        """What all layers are told of the token's place."""
        turn = None
        if self._rope is not None:
            dim, base = self._rope
            cos, sin = angles_of(torch.empty(0, dim), torch.tensor(seen), base)
            cos, sin = torch.diag(cos.view(-1)), torch.diag(sin.view(-1))
            turn = torch.cat([torch.cat([cos, sin], 1), torch.cat([-sin, cos], 1)])
        window = self._window
        return _Place(seen % window, (seen - 1) % window, min(seen + 1, window), turn)

    def _count(self) -> int:
        return sum([p._version for p in self._weights])


class _Place(NamedTuple):
    """A token's slot in the ring, the one before it, how many are written, and RoPE's matrix."""

    slot: int
    former: int
    written: int
    turn: Tensor | None


class _Buffers:
    """A layer's state, and views of it that a step would otherwise make for every token."""

    def __init__(self, state: State, *, copied: bool = True) -> None:
        form = torch.contiguous_format
        made = {
            n: state[n].detach().clone(memory_format=form) if copied else state[n] for n in _NAMES
        }
        self.state = made
        self.conv, k, v, seen, G, b = (made[name][0] for name in _NAMES)
        self.seen = seen
        self.keys, self.values = k.unbind(), v.unbind()
        self.all_keys, self.all_values = k.permute(1, 2, 0), v.permute(1, 0, 2)
        self.G, self.b = G.flatten(1, 2), b.flatten(1)


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
        self.sizes = [channels, 2 * heads, heads * scales, width]
        self.eps, self.after_eps = norm.eps, after.eps
        self.taps = layer.convolution.weight.detach().t().flip(0).contiguous()
        norms = [n.weight.detach().expand(heads, dim) for n in (layer.q_norm, layer.k_norm)]
        self.head_norm, self.head_eps = torch.cat(norms), layer.q_norm.fused().eps
        self.scale = dim**-0.5
        # Entropy comes with its sign turned.
        seen = router.order.weight[:, size : size + heads] if router.use_entropy else None
        self.mix = None if seen is None else -seen.detach().contiguous()
        self.order_min, self.heads, self.dim, self.scales = router.order_min, heads, dim, scales
        self.exponents = _exponents(router)
        self.powers = torch.arange(len(self.exponents), dtype=torch.float32)
        self.parts = torch.tensor([0, *[1] * (scales - 2), *[2] * (scales > 1)])
        maps = torch.cat([memory.query_map.weight, memory.key_map.weight]).detach()
        self.maps = torch.cat([maps, -maps], -1).contiguous()
        forget = torch.expm1(router.log_decay(torch.device("cpu")).detach())
        self.forget = forget.repeat_interleave(self.maps.shape[-1])
        self.memory_eps = memory.eps
        self.change = torch.empty(heads, scales * self.maps.shape[-1], dim)
        out = layer.norm.fused()
        self.out_eps = out.eps
        self.out = (layer.o_proj.weight * out.weight.repeat(heads)).detach().contiguous()
        inner = torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight]) * after.weight
        self.inner, self.down = inner.detach().contiguous(), mlp.down_proj.weight.detach()

    def __call__(self, x: Tensor, before: _Buffers, after: _Buffers, place: _Place) -> Tensor:
        heads, size = self.heads, len(x)
        scale = (float(torch.dot(x, x)) / size + self.eps) ** -0.5
        joined = torch.addmv(self.bias, self.joined, x, alpha=scale)
        projected, routed, read, gate = joined.split(self.sizes)
        # Short convolution, norms of queries and keys.
        seen = torch.cat([before.conv, projected[None]])
        after.conv.copy_(seen[1:])
        every = F.silu(seen.mul_(self.taps).sum(0)).view(3 * heads, self.dim)
        both, values = every[: 2 * heads], every[2 * heads :]
        both = both * self.head_norm * self._inverse_norm(both, self.head_eps)
        local, entropy = self._attend(both, values, before, after, place)
        if self.mix is not None:
            routed[:heads].addmv_(self.mix, entropy)
        # Memory: queries read by the read weights, keys are written by the orders'.
        weights = self._weigh(routed, read)
        features = torch.bmm(both[:, None], self.maps).view(2 * heads, 2, -1).softmax(-1)
        spread = (weights[..., None] * features.view(2 * heads, 1, -1)).flatten(1)
        queries, keys = spread[:heads], spread[heads:]
        # The change is small beside the state: it is summed up first, so that one rounding follows.
        torch.mul(before.G, self.forget[:, None], out=self.change)
        self.change.baddbmm_(keys[..., None], values[:, None])
        torch.add(before.G, self.change, out=after.G)
        torch.add(before.b, keys.addcmul(before.b, self.forget), out=after.b)
        found = torch.bmm(queries[:, None], after.G).squeeze(1)
        asked = torch.linalg.vecdot(queries, after.b).abs_().add_(self.memory_eps)
        found = found.div_(asked[:, None]).add_(local)
        mixed = found.mul_(self._inverse_norm(found, self.out_eps)).view(-1)
        x = torch.addmv(x, self.out, mixed.mul_(F.silu(gate)) if len(gate) else mixed)
        scale = (float(torch.dot(x, x)) / size + self.after_eps) ** -0.5
        gate, up = torch.mv(self.inner, x).mul_(scale).chunk(2)
        return torch.addmv(x, self.down, F.silu(gate).mul_(up))

    def _attend(
        self, both: Tensor, values: Tensor, before: _Buffers, after: _Buffers, place: _Place
    ) -> tuple[Tensor, Tensor]:
        """Local attention `[H, D]`, its entropy with the sign turned `[H]`; the ring moves on."""
        turned = both if place.turn is None else both @ place.turn
        q, k = turned[: self.heads], turned[self.heads :]
        slot, former, written = place[:3]
        # The buffers that are written to are a token behind.
        torch._foreach_copy_(
            [after.keys[former], after.values[former], after.keys[slot], after.values[slot]],
            [before.keys[former], before.values[former], k, values],
        )
        torch.add(before.seen, 1, out=after.seen)
        keys, all_values = after.all_keys, after.all_values
        if written < keys.shape[-1]:
            keys, all_values = keys[..., :written], all_values[:, :written]
        scores = torch.bmm(q[:, None], keys).mul_(self.scale).log_softmax(-1)
        p = scores.exp()
        found = torch.bmm(p, all_values).squeeze(1)
        return found, torch.linalg.vecdot(p, scores).view(-1)

    def _weigh(self, routed: Tensor, read: Tensor) -> Tensor:
        """`[2 H, S]`: read weights of all heads, then what they write."""
        heads, scales = self.heads, self.scales
        opened = torch.sigmoid(routed)
        order = opened[:heads].mul(1 - self.order_min).add_(self.order_min)[:, None]
        rest = 1 - order
        first = torch.sinc(rest)
        inner = first * rest
        exponent = torch.mm(order.pow(self.powers), self.exponents)
        parts = torch.cat([first, inner, inner / order], 1).index_select(1, self.parts)
        written = exponent.exp_().mul_(parts).mul_(opened[heads:, None])
        reading = read.view(heads, scales).softmax(-1).mul_(scales)
        return torch.cat([reading, written])

    def _inverse_norm(self, x: Tensor, eps: float) -> Tensor:
        """1 / rms of every row, `[H, 1]`."""
        squares: Tensor = torch.linalg.vecdot(x, x)
        return squares.div_(self.dim).add_(eps).rsqrt_()[:, None]


def _exponents(router: Router) -> Tensor:
    """`[degree + 2, S]`: polynomials of the order whose exp the basis' weights are made of.

    The first scale's is multiplied by 1 - order, one degree more; see `PowerLawBasis`.
    """
    polynomials = router.basis.polynomials_on(torch.device("cpu"), torch.float64)
    padded = F.pad(polynomials, (0, 1))
    first = padded[:1] - F.pad(polynomials[:1], (1, 0))
    return torch.cat([first, padded[1:]]).t().to(torch.float32).contiguous()


def _fits(model: Any) -> bool:
    """Whether every part is what a step knows, in float32 on a CPU, and nobody watches it."""
    weights = list(model.parameters())
    if sum(p.numel() for p in weights) > LARGEST or is_watched(*model.modules()):
        return False
    if any(p.dtype != torch.float32 or p.device.type != "cpu" or p.is_inference() for p in weights):
        return False
    if any(type(p) is not nn.Parameter or not p.is_contiguous() for p in weights):
        return False
    base, head = model.model, model.lm_head
    plain = type(base.embed_tokens) is nn.Embedding and _are_linear(head)
    plain = plain and base.embed_tokens.max_norm is None and type(base.norm) is RMSNorm
    first = base.layers[0].self_attn
    alike = all(
        (block.self_attn.window, block.self_attn.rope_base) == (first.window, first.rope_base)
        for block in base.layers
    )
    return plain and alike and all(_block_fits(block) for block in base.layers)


def _block_fits(block: Any) -> bool:
    layer, mlp = block.self_attn, block.mlp
    if type(layer) is not VortAttention or type(mlp) is not VortMLP:
        return False
    memory: Any = layer.memory
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
        and layer.convolution is not None
        and layer.window > 0
        and layer.head_dim % 2 == 0
    )


def _are_linear(*modules: Any) -> bool:
    return all(type(m) is nn.Linear and m.bias is None for m in modules)
