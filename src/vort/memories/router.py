"""From a token to its order, and from the order to what it writes (eq. routing)."""

from functools import lru_cache
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn

from vort.fractional import PowerLawBasis
from vort.fractional.bounds import bank_orders
from vort.memories.gates import Gates, widen
from vort.ops.order_weights import order_weights
from vort.ops.retention import paper_banks
from vort.ops.retention.routing import nearest_bank

__all__ = ["OrderProjection", "Router", "Routing", "RoutingMode", "fit_basis"]

RoutingMode = Literal["continuous", "banks"]


class Routing(NamedTuple):
    """How tokens use the memory.

    Attributes:
        write: `[B, T, H, S]`, how much each token writes to each time scale.
        log_decay: `[S]` or `[H, S]`, log of what a time scale keeps in one step.
        read: `[B, T, H, S]`, how much each query reads of each; None: all alike.
        order: `[B, T, H]`, the fractional order behind `write`; None where there is none.
    """

    write: Tensor
    log_decay: Tensor
    read: Tensor | None
    order: Tensor | None


class OrderProjection(nn.Linear):
    """W [x; H; e] + b, where heads begin at orders spread from short to long memory, or at one.

    start: where all heads begin, as a share of [order_min, 1]; None: spread.
    """

    def __init__(self, width: int, heads: int, start: float | None = None) -> None:
        if start is not None and not 0 < start < 1:
            raise ValueError(f"order_start must lie in (0, 1), or be None, got {start}")
        self.start = start  # first: the constructor draws the weights
        super().__init__(width, heads)

    def reset_parameters(self) -> None:
        """Small weights, and biases at the logits of the starting shares of [order_min, 1]."""
        nn.init.normal_(self.weight, std=0.02)
        heads = self.out_features
        # From a quick memory to a nearly lossless one; a head alone starts at the paper's 0.7.
        shares = torch.linspace(0.25, 0.95, heads) if heads > 1 else torch.tensor([0.7])
        if self.start is not None:
            shares = torch.full((heads,), self.start)
        with torch.no_grad():
            self.bias.copy_(torch.logit(shares))


class Router(nn.Module):
    """order = d + (1 - d) sigmoid(W [x; H; e] + b) for each head, and the writing that follows.

    Args:
        hidden_size: size of a token's hidden state x.
        num_heads: heads, each with an order of its own.
        routing: "continuous" writes to one basis of rates that all orders share; "banks" writes to
            the nearest of `banks` fixed orders (eq. bank-update), straight-through in training.
        horizon: the largest lag that the kernels are made for.
        terms: exponentials in the basis, or in each bank. 8 by default.
        tolerance: instead of `terms`, the relative error the basis must keep ("continuous" only).
        banks: K of eq. bank-update.
        order_min: d, the lowest order.
        order_start: where the orders of all heads begin, as a share of [order_min, 1]. None: spread
            over the heads. Heads that begin apart take over short and long lags: text gains by it,
            but what must be found again at long lags is left to few heads (docs/model.md).
        use_entropy: take the attention entropy of every head as input.
        use_entity: take the entity indicator as input.
        write_gate: scale all that a token writes by a learned gate in (0, 1).
        read_weights: let the query weigh the time scales.

    >>> router = Router(16, num_heads=2, horizon=1000)
    >>> routing = router(torch.randn(1, 5, 16))
    >>> routing.write.shape, routing.read.shape, routing.order.shape
    (torch.Size([1, 5, 2, 8]), torch.Size([1, 5, 2, 8]), torch.Size([1, 5, 2]))
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        *,
        routing: RoutingMode = "continuous",
        horizon: int = 8192,
        terms: int | None = None,
        tolerance: float | None = None,
        banks: int = 10,
        order_min: float = 0.05,
        order_start: float | None = None,
        use_entropy: bool = False,
        use_entity: bool = False,
        write_gate: bool = True,
        read_weights: bool = True,
    ) -> None:
        super().__init__()
        if routing not in get_args(RoutingMode):
            raise ValueError(f"routing must be 'continuous' or 'banks', got {routing!r}")
        if tolerance is not None and (terms is not None or routing == "banks"):
            raise ValueError(
                "tolerance chooses the terms of a continuous basis: leave it out with "
                f"routing={routing!r} and terms={terms!r}"
            )
        self.num_heads = num_heads
        self.routing = routing
        self.banks = banks
        self.order_min = order_min
        self.use_entropy = use_entropy
        self.use_entity = use_entity
        self.rule_terms = 8 if terms is None and tolerance is None else terms
        self._calibrate(horizon, tolerance)
        width = hidden_size + (num_heads if use_entropy else 0) + (1 if use_entity else 0)
        self.order = OrderProjection(width, num_heads, order_start)
        self.gates = Gates(
            hidden_size, num_heads, self.terms, write_gate=write_gate, read_weights=read_weights
        )

    @property
    def terms(self) -> int:
        """S: time scales, and so states, of each head."""
        return len(self._log_decay)

    def set_horizon(self, horizon: int) -> None:
        """Re-calibrate the kernels for lags up to `horizon`; learned weights stay as they are.

        The number of terms stays too, since the read weights have one output for each: at a longer
        horizon the same terms are a little less exact (see `basis.certificate`). Time scales keep
        their places from slow to fast; the slower one is, the more it slows. States made before
        the call have decayed at the former rates and must be thrown away.
        """
        if self.routing == "continuous":
            self.rule_terms = self.terms
        self._calibrate(horizon, None)

    def forward(
        self, hidden_states: Tensor, entropy: Tensor | None = None, entity: Tensor | None = None
    ) -> Routing:
        """Write weights, decays, read weights and orders of every token.

        Args:
            hidden_states: `[B, T, hidden_size]`.
            entropy: `[B, T, H]` of the local attention; zeros if absent.
            entity: `[B, T]`, 1 within a named entity; zeros if absent.
        """
        order = self.orders(hidden_states, entropy, entity)
        gate, read = self.gates(hidden_states)
        if self.routing == "continuous":
            write = order_weights(self.basis, order, gate)
        else:
            orders, table = self._bank_tables(order)
            write = nearest_bank(order, orders) @ table
            write = write if gate is None else write * gate.unsqueeze(-1)
        return Routing(write, self.log_decay(order.device), read, order)

    def orders(
        self, hidden_states: Tensor, entropy: Tensor | None = None, entity: Tensor | None = None
    ) -> Tensor:
        """The order of every token and head, `[B, T, H]` in [order_min, 1] (eq. routing)."""
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
        """`[S]` float32 on a device, kept there: not a buffer, since `.to(bfloat16)` would ruin it.

        Half precision would put rates off by up to 0.4 %, and a kernel off by far more.
        """
        if device not in self._on_device:
            self._on_device[device] = self._log_decay.to(device)
        return self._on_device[device]

    def _calibrate(self, horizon: int, tolerance: float | None) -> None:
        """Rates and weights for a horizon."""
        self.horizon = horizon
        self._on_device: dict[torch.device, Tensor] = {}
        if self.routing == "continuous":
            self.basis = fit_basis(horizon, self.rule_terms, tolerance, self.order_min)
            self._log_decay = self.basis.log_decay
            return
        # Constants, so not on the meta device where Hugging Face builds a model to be loaded.
        with torch.device("cpu"):
            self._fill_banks(8 if self.rule_terms is None else self.rule_terms)

    def _fill_banks(self, terms: int) -> None:
        """What a token that sits exactly on a bank writes: row k of the table is bank k's rule."""
        orders = torch.from_numpy(bank_orders(self.banks, self.order_min))
        table, decay = paper_banks(
            orders.view(1, -1, 1), self.banks, terms, self.horizon, order_min=self.order_min
        )
        self._bank_orders, self._bank_table = orders.float(), table[0, :, 0].float()
        self._log_decay = decay.float()

    def _bank_tables(self, order: Tensor) -> tuple[Tensor, Tensor]:
        """Bank orders `[K]` and the weights of each `[K, S']`, like `order`."""
        return self._bank_orders.to(order), self._bank_table.to(order)

    def extra_repr(self) -> str:
        """What the kernels are made for."""
        return f"routing={self.routing!r}, horizon={self.horizon}, terms={self.terms}"


@lru_cache(maxsize=64)
def fit_basis(
    horizon: int, terms: int | None, tolerance: float | None, order_min: float
) -> PowerLawBasis:
    """`PowerLawBasis.fit`, remembered: a fit takes seconds, and layers ask for the same one."""
    return PowerLawBasis.fit(horizon, terms, tolerance, order_min)
