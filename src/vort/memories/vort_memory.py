"""Power-law memory: every token decays by an order of its own."""

from typing import Any

from vort.memories.interface import MemoryInputs
from vort.memories.retention_memory import RetentionMemory
from vort.memories.router import Router, Routing, RoutingMode

__all__ = ["VortMemory"]


class VortMemory(RetentionMemory):
    """Retrieval through a router's orders; see `Router` and `RetentionMemory` for the arguments.

    >>> import torch
    >>> memory = VortMemory(hidden_size=16, num_heads=2, head_dim=8, horizon=1000)
    >>> q, k, v = torch.randn(3, 1, 5, 2, 8)
    >>> result = memory(MemoryInputs(torch.randn(1, 5, 16), q, k, v), output_state=True)
    >>> result.output.shape, result.order.shape, result.state["G"].shape
    (torch.Size([1, 5, 2, 8]), torch.Size([1, 5, 2]), torch.Size([1, 2, 8, 8, 8]))
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        head_dim: int,
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
        **retention_options: Any,
    ) -> None:
        super().__init__(num_heads, head_dim, **retention_options)
        self.router = Router(
            hidden_size,
            num_heads,
            routing=routing,
            horizon=horizon,
            terms=terms,
            tolerance=tolerance,
            banks=banks,
            order_min=order_min,
            order_start=order_start,
            use_entropy=use_entropy,
            use_entity=use_entity,
            write_gate=write_gate,
            read_weights=read_weights,
        )

    @property
    def terms(self) -> int:
        """S: states of each head."""
        return self.router.terms

    def route(self, inputs: MemoryInputs) -> Routing:
        """Write and read weights from the order of each token (eq. routing)."""
        return self.router(inputs.hidden_states, inputs.entropy, inputs.entity)  # type: ignore[no-any-return]
