"""One token through a whole model as a single CUDA graph, replayed for every token.

States never grow, so a step of decoding is the same launches every time: recorded once, they cost
the host one call instead of hundreds. A graph has buffers of its own for the states; a cache that
decodes with it moves in, and out again when another cache does.
"""

from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn

from vort.models.cache_vort import VortCache

__all__ = ["DecodeGraph", "graph_for"]

_graphs: WeakKeyDictionary[nn.Module, dict[Any, "DecodeGraph"]] = WeakKeyDictionary()


class DecodeGraph:
    """A recorded step: tokens in, logits out, states moved on in place."""

    def __init__(self, model: Any, cache: VortCache, tokens: Tensor) -> None:
        self.weights = _fingerprint(model)
        self.tokens = tokens.clone()
        self.states = {
            index: {
                name: x.detach().clone(memory_format=torch.contiguous_format)
                for name, x in s.items()
            }
            for index, s in cache.states.items()
        }
        self.resident: Any = None
        inner = VortCache(cache.num_layers, static=True)
        inner.in_place = True
        inner.states = {**self.states}
        before = _cloned(self.states)
        # Once outside of the recording: kernels are compiled, workspaces are taken.
        side = torch.cuda.Stream(tokens.device)
        side.wait_stream(torch.cuda.current_stream(tokens.device))
        with torch.cuda.stream(side):
            for _ in range(2):
                self._forward(model, inner)
        torch.cuda.current_stream(tokens.device).wait_stream(side)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.logits = self._forward(model, inner)
        for index, state in before.items():
            for name, x in state.items():
                self.states[index][name].copy_(x)

    def _forward(self, model: Any, cache: VortCache) -> Tensor:
        hidden = model.model(self.tokens, past_key_values=cache, use_cache=True).last_hidden_state
        logits: Tensor = model.lm_head(hidden)
        return logits

    def step(self, tokens: Tensor, cache: VortCache) -> Tensor:
        """Logits `[B, 1, V]` of the tokens `[B, 1]` that come next in `cache`, which moves on."""
        self._move_in(cache)
        self.tokens.copy_(tokens)
        self.graph.replay()
        for index in self.states:
            cache.positions[index] = cache.positions.get(index, 0) + 1
        return self.logits.clone()

    def _move_in(self, cache: VortCache) -> None:
        lodger = None if self.resident is None else self.resident()
        if lodger is cache and cache.states.get(0) is self.states[0]:
            return
        if lodger is not None and lodger.states.get(0) is self.states[0]:
            lodger.states = {
                i: {n: x.clone() for n, x in s.items()} for i, s in lodger.states.items()
            }
            lodger.static = lodger.was_static
        for index, state in self.states.items():
            for name, x in state.items():
                x.copy_(cache.states[index][name])
        cache.was_static, cache.static = cache.static, True
        cache.states = {**self.states}
        self.resident = ref(cache)


def _cloned(states: dict[int, Any]) -> dict[int, dict[str, Tensor]]:
    dense = torch.contiguous_format
    return {
        index: {name: x.detach().clone(memory_format=dense) for name, x in state.items()}
        for index, state in states.items()
    }


def graph_for(model: Any, cache: VortCache, tokens: Tensor) -> DecodeGraph | None:
    """The graph that decodes `tokens` `[B, 1]` with this cache; None where there can be none.

    There is one for every batch size of a model; changed weights record it anew.
    """
    if not _can_record(model, cache, tokens):
        return None
    known = _graphs.setdefault(model, {})
    shapes = tuple(x.shape for x in cache.states[0].values())
    key = (tokens.shape[0], tokens.device, shapes)
    graph = known.get(key)
    if graph is not None and cache.states.get(0) is graph.states[0]:
        return graph
    # Asked when a cache moves in, not for every token.
    if _hooked(model):
        return None
    if graph is None or graph.weights != _fingerprint(model):
        graph = known[key] = DecodeGraph(model, cache, tokens)
    return graph


def _can_record(model: Any, cache: VortCache, tokens: Tensor) -> bool:
    """Whether a step is the same launches every time."""
    if not tokens.is_cuda or torch.is_grad_enabled() or model.training or len(cache.states) == 0:
        return False
    if torch.compiler.is_compiling() or torch.cuda.is_current_stream_capturing():
        return False
    memory = model.model.layers[0].self_attn.memory
    plain = isinstance(model.lm_head, nn.Linear) and memory.records_steps
    return plain and not torch.is_autocast_enabled("cuda")


def _hooked(model: nn.Module) -> bool:
    """Whether somebody watches a module from within: a recording would not call them."""
    return any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def _fingerprint(model: nn.Module) -> int:
    """Of the weights' places and versions: a recording knows no others."""
    return hash(
        tuple((p.data_ptr(), 0 if p.is_inference() else p._version) for p in model.parameters())
    )
