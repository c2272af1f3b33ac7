"""VORT's memory: every token decays by an order of its own, which a router computes."""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from vort.fractional import PowerLawBasis
from vort.fractional._checks import check_at_least
from vort.fractional.bounds import bank_orders
from vort.memories.interface import Along, MemoryInputs, StepWeights
from vort.memories.retention_memory import (
    GateProjection,
    Gates,
    RetentionMemory,
    Routing,
    SpreadReading,
    WriteGain,
    widen,
    without_queries,
    write_gain,
)
from vort.memories.settings import LayerSettings, settings_of
from vort.ops.asked import Asked
from vort.ops.feature_maps import HedgehogFeatures
from vort.ops.linear import is_plain, is_watched, products
from vort.ops.retention import paper_banks, shared_basis
from vort.ops.retention.routing import nearest_bank

__all__ = ["OrderProjection", "Router", "VortMemory", "fit_basis", "starting_shares"]


class VortMemory(RetentionMemory):
    """Retrieval through the orders of a `Router`.

    >>> memory = VortMemory(hidden_size=16, num_attention_heads=2, horizon=1000)
    >>> q, k, v = torch.randn(3, 1, 5, 2, 8)
    >>> result = memory(MemoryInputs(torch.randn(1, 5, 16), q, k, v), output_state=True)
    >>> result.output.shape, result.order.shape, result.state["G"].shape
    (torch.Size([1, 5, 2, 8]), torch.Size([1, 5, 2]), torch.Size([1, 2, 8, 8, 8]))
    """

    def __init__(self, settings: LayerSettings | None = None, **options: Any) -> None:
        super().__init__(settings, **options)
        self.router = Router(self.settings)

    @property
    def num_scales(self) -> int:
        """S: states of each head."""
        return self.router.num_scales

    @property
    def needs_entropy(self) -> bool:
        """Whether the router sees the entropy of local attention."""
        return self.router.use_entropy

    @property
    def needs_entity(self) -> bool:
        """Whether the router sees who is an entity."""
        return self.router.use_entity

    @without_queries
    def route(self, inputs: MemoryInputs) -> Routing:
        """Write and read weights from the order of each token (eq. routing)."""
        if inputs.along is not None:
            return self.router.routing_of(inputs.along, inputs.entropy, inputs.entity)
        values = inputs.v.flatten(2) if self.router.order_input == "values" else None
        return self.router(  # type: ignore[no-any-return]
            inputs.hidden_states, inputs.entropy, inputs.entity, values, inputs.asked
        )

    def along(self, x: Tensor) -> Along | None:
        """The router's weights, unless somebody watches it."""
        router = self.router
        return None if is_watched(router, router.gates) else router.along(x)

    def step_weights(self, x: Tensor) -> StepWeights | None:
        """Those of a router of continuous orders behind learned maps; see `Memory`."""
        query, key, router = self.query_map, self.key_map, self.router
        if type(query) is not HedgehogFeatures or type(key) is not HedgehogFeatures:
            return None
        # Whoever routes or retrieves in a way of its own is asked; and the kernels have maps for
        # each head, and one row of rates for all heads.
        alone = type(self) is VortMemory and type(router) is Router and not router.learns_rates
        if not alone or query.num_heads is None or key.num_heads is None:
            return None
        along = self.along(x)
        if along is None:
            return None
        gates, gain = router.gates, router.gate_gain
        write, read = gates.write, gates.read
        return StepWeights(
            query.weight,
            key.weight,
            along.weights,
            router.order.bias,
            None if write is None else write.bias,
            None if read is None else read.bias,
            None if gain is None else gain.bias,
            along.rest[0] if router.use_entropy else None,
            router.basis.polynomials_on(x.device, torch.float32),
            router.log_decay(x.device),
            router.order_min,
            self.normalizer,
            self.include_self,
            self.eps,
        )

    def set_horizon(self, horizon: int) -> None:
        """Re-calibrate the kernels for lags up to `horizon`; see `Router.set_horizon`."""
        self.router.set_horizon(horizon)


class Router(nn.Module):
    """order = d + (1 - d) sigmoid(W [x; H; e] + b) for each head, and the writing that follows.

    Args:
        settings: of the layer: routing, horizon, num_scales, num_banks, order_min (the d above),
            order_start, order_input, learn_basis, leak, use_entropy, use_entity, write_gate,
            write_gain, read_weights.
        **options: or the same by name.

    >>> router = Router(hidden_size=16, num_attention_heads=2, horizon=1000)
    >>> routing = router(torch.randn(1, 5, 16))
    >>> routing.write.shape, routing.read.shape, routing.order.shape
    (torch.Size([1, 5, 2, 8]), torch.Size([1, 5, 2, 8]), torch.Size([1, 5, 2]))
    """

    def __init__(self, settings: LayerSettings | None = None, **options: Any) -> None:
        super().__init__()
        s = settings_of("Router", settings, options)
        self.num_heads = s.num_attention_heads
        self.routing = s.routing
        self.order_min = s.order_min
        self.use_entropy = s.use_entropy
        self.use_entity = s.use_entity
        self.order_input = s.order_input
        self.leak = s.leak
        self._rule = (s.num_banks, s.num_scales)
        self._calibrate(s.horizon)
        _, kv_heads, head_dim = s.head_sizes()
        width = s.hidden_size if self.order_input == "hidden" else kv_heads * head_dim
        width += self.use_entropy * self.num_heads + self.use_entity
        self.order = OrderProjection(width, self.num_heads, s.order_start)
        self.gates = Gates(s, self.num_scales)
        self.gate_gain = write_gain(s, self.num_scales)
        shape = (self.num_heads, self.num_scales)
        self.log_factor = nn.Parameter(torch.empty(shape)) if s.learn_basis else None
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Rates that are learned start where the basis has them."""
        if self.log_factor is not None:
            self.log_factor.zero_()

    @property
    def learns_rates(self) -> bool:
        """Whether heads have rates of their own, see `learn_basis`."""
        return self.log_factor is not None

    @property
    def num_scales(self) -> int:
        """S: scales, and so states, of each head."""
        return len(self._log_decay)

    def set_horizon(self, horizon: int) -> None:
        """Re-calibrate the kernels for lags up to `horizon`; learned weights stay as they are.

        The number of scales stays too, since the read weights have one output for each: at a longer
        horizon the same number is a little less exact (see `basis.certificate`). Scales keep their
        places from slow to fast; the slower one is, the more it slows. States made before the call
        have decayed at the former rates and must be thrown away.
        """
        self._calibrate(horizon)

    def forward(
        self,
        hidden_states: Tensor,
        entropy: Tensor | None = None,
        entity: Tensor | None = None,
        values: Tensor | None = None,
        asked: Asked | None = None,
    ) -> Routing:
        """Write weights, decays, read weights and orders of every token.

        Args:
            hidden_states: `[B, T, hidden_size]`.
            entropy: `[B, T, H]` of the local attention; zeros if absent.
            entity: `[B, T]`, 1 within a named entity; zeros if absent.
            values: `[B, T, Hkv V]`, where order_input="values".
            asked: positions whose read weights are wanted; all by default.
        """
        along = self.along(hidden_states)
        if along is not None:
            _, _, logits = products(hidden_states, along.weights)
            return self.routing_of(along._replace(product=logits), entropy, entity)
        order = self.orders(hidden_states if values is None else values, entropy, entity)
        gate, read = self.gates(hidden_states, asked)
        if self.routing == "continuous":
            # Orders lie in range by construction, but for rounding.
            write, log_decay = shared_basis(order, self.basis, gate, validate=False)
            log_decay = self.log_decay(order.device) if self.learns_rates else log_decay
        else:
            orders, table = self._banks_on(order.device)
            write = nearest_bank(order, orders.to(order)) @ table.to(order)
            write = write if gate is None else write * gate.unsqueeze(-1)
            log_decay = self.log_decay(order.device)
        if self.gate_gain is not None:
            write = write * self.gate_gain(hidden_states)
        return Routing(write, log_decay, read, order)

    def along(self, x: Tensor) -> Along | None:
        """The weights behind all logits, where kernels take them past their modules."""
        known = self.routing == "continuous" and self.order_input == "hidden"
        gates, order = self.gates, self.order
        projections = (gates.write, gates.read, self.gate_gain)
        if not known or not is_plain(x, order, *projections, kinds=_PLAIN):
            return None
        weight = order.weight
        columns = [x.shape[-1], *[self.num_heads] * self.use_entropy, *[1] * self.use_entity]
        parts = torch.split_with_sizes(weight, columns, 1) if len(columns) > 1 else (weight,)
        weights = [parts[0], *(p.weight for p in projections if p is not None)]
        return Along(weights, parts[1:])

    def routing_of(self, along: Along, entropy: Tensor | None, entity: Tensor | None) -> Routing:
        """`forward` as one pass over the logits of `along`."""
        from vort.ops.order_weights.triton import RoutingInputs, routing_weights_fused

        logits = along.product
        assert logits is not None
        features = [entropy] * self.use_entropy + [
            None if entity is None else entity[..., None]
        ] * self.use_entity
        given = [
            (x if x.is_floating_point() else x.to(logits.dtype), w)
            for x, w in zip(features, along.rest, strict=True)
            if x is not None
        ]
        more, weight = given[0] if given else (None, None)
        if len(given) > 1:
            more, weight = (torch.cat(parts, -1) for parts in zip(*given, strict=True))
        write, read = self.gates.write, self.gates.read
        inputs = RoutingInputs(
            logits,
            self.order.bias,
            None if write is None else write.bias,
            None if read is None else read.bias,
            None if self.gate_gain is None else self.gate_gain.bias,
            more,
            weight,
            self.basis.polynomials_on(logits.device, torch.float32),
            self.order_min,
        )
        order, written, weights = routing_weights_fused(inputs)
        return Routing(written, self.log_decay(logits.device), weights, order)

    def orders(
        self, hidden_states: Tensor, entropy: Tensor | None = None, entity: Tensor | None = None
    ) -> Tensor:
        """The order of every token and head, `[B, T, H]` in [order_min, 1] (eq. routing).

        hidden_states: or what stands in their place, see `order_input`.
        """
        parts = [hidden_states]
        shape = hidden_states.shape[:2]
        if self.use_entropy:
            absent = hidden_states.new_zeros(*shape, self.num_heads)
            parts.append(absent if entropy is None else entropy.to(hidden_states.dtype))
        if self.use_entity:
            absent = hidden_states.new_zeros(*shape, 1)
            parts.append(absent if entity is None else entity.to(hidden_states.dtype).unsqueeze(-1))
        logits = widen(self.order(torch.cat(parts, -1) if len(parts) > 1 else hidden_states))
        return self.order_min + (1 - self.order_min) * torch.sigmoid(logits)

    def log_decay(self, device: torch.device) -> Tensor:
        """`[S]` float32 on a device, or `[H, S]` where rates are learned.

        The rates of the basis are kept there, and are no buffer: half precision would put them off
        by up to 0.4 %, and a kernel off by far more. A learned factor is near 1 and its logarithm
        near 0, where half precision is close.
        """
        made = self._on_device.get(device)
        if made is None:
            made = self._log_decay.to(device)
            # An export sees tensors without numbers: nothing for the next call.
            if type(made) is Tensor:
                self._on_device[device] = made
        return made if self.log_factor is None else made * widen(self.log_factor).exp()

    def _banks_on(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Orders of the banks and what each writes, kept on a device like `log_decay`."""
        if device not in self._banks:
            self._banks[device] = (self._bank_orders.to(device), self._bank_table.to(device))
        return self._banks[device]

    def _calibrate(self, horizon: int) -> None:
        """Rates and weights for a horizon; a horizon that is refused changes nothing."""
        horizon = check_at_least(horizon, 1, "horizon")
        banks, scales = self._rule
        if self.routing == "continuous":
            self.basis = fit_basis(horizon, scales, self.order_min, self.leak)
            self._log_decay = self.basis.log_decay
            self._made_for(horizon)
            return
        # Constants, so not on the meta device where Hugging Face builds a model to be loaded.
        with torch.device("cpu"):
            # What a token that sits exactly on a bank writes: row k of the table is bank k's rule.
            orders = torch.from_numpy(bank_orders(banks, self.order_min))
            table, decay = paper_banks(
                orders.view(1, -1, 1), banks, scales, horizon, order_min=self.order_min
            )
        self._bank_orders, self._bank_table = orders.float(), table[0, :, 0].float()
        self._log_decay = decay.float()
        self._made_for(horizon)

    def _made_for(self, horizon: int) -> None:
        self.horizon = horizon
        self._on_device: dict[torch.device, Tensor] = {}
        self._banks: dict[torch.device, tuple[Tensor, Tensor]] = {}

    def extra_repr(self) -> str:
        """What the kernels are made for."""
        return f"routing={self.routing!r}, horizon={self.horizon}, num_scales={self.num_scales}"


class OrderProjection(nn.Linear):
    """W [x; H; e] + b, where heads begin at orders spread from short to long memory, or at one.

    start: where heads begin, as a share of [order_min, 1], or shares, one for each; None: spread.
    """

    def __init__(
        self, width: int, heads: int, start: float | Sequence[float] | None = None
    ) -> None:
        self.start = start  # first: the constructor draws the weights
        super().__init__(width, heads)

    def reset_parameters(self) -> None:
        """Small weights, and biases at the logits of the starting shares of [order_min, 1]."""
        nn.init.normal_(self.weight, std=0.02)
        with torch.no_grad():
            self.bias.copy_(torch.logit(starting_shares(self.out_features, self.start)))


def starting_shares(heads: int, start: float | Sequence[float] | None) -> Tensor:
    """`[H]`: where the orders of heads begin, as shares of [order_min, 1]; see `order_start`.

    >>> starting_shares(3, None)
    tensor([0.2500, 0.6000, 0.9500])
    """
    if isinstance(start, Sequence):
        return torch.tensor(start)
    if start is not None:
        return torch.full((heads,), start)
    # From a quick memory to a nearly lossless one; a head alone starts at the paper's 0.7.
    return torch.linspace(0.25, 0.95, heads) if heads > 1 else torch.tensor([0.7])


# What a router's projections may be, and have biases, to be fused.
_PLAIN = (GateProjection, SpreadReading, OrderProjection, WriteGain)


@lru_cache(maxsize=64)
def fit_basis(horizon: int, num_scales: int, order_min: float, leak: bool = False) -> PowerLawBasis:
    """`PowerLawBasis.fit`, remembered: a fit takes seconds, and layers ask for the same one.

    leak: its slowest scale, which keeps for good, forgets over the horizon instead; the
        certificate is that of the basis without.
    """
    basis = PowerLawBasis.fit(horizon, num_scales, order_min=order_min)
    if not leak:
        return basis
    rates = basis.rates.copy()
    # Slower than the next, however few there are.
    rates[0] = min([1 / horizon, *rates[1:2] / 2])
    return PowerLawBasis(
        rates, basis.polynomials, basis.horizon, basis.order_min, basis.certificate
    )
