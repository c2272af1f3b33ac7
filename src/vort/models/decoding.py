"""One token through a whole model as a single CUDA graph, replayed for every token.

States never grow, so a step of decoding is the same launches every time: recorded once, they cost
the host one call instead of hundreds. A graph has buffers of its own for the states; a cache that
decodes with it moves in, and out again when another cache does.
"""

from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn

from vort.layers.plain_step import PlainStep, fingerprint, plain_step_for
from vort.models.block import VortBlock
from vort.models.cache_vort import VortCache, dense_state
from vort.ops.custom import traced
from vort.ops.linear import few_rows, is_plain, is_watched

__all__ = ["DecodeGraph", "can_record", "fingerprint", "graph_for", "is_steady", "step_for"]

_graphs: WeakKeyDictionary[nn.Module, dict[Any, "DecodeGraph"]] = WeakKeyDictionary()
# The one that decoded last: it is asked first, for every token.
_last: WeakKeyDictionary[nn.Module, "DecodeGraph"] = WeakKeyDictionary()


class DecodeGraph:
    """A recorded step: tokens in, logits out, states moved on in place."""

    def __init__(self, model: Any, cache: VortCache, tokens: Tensor) -> None:
        self.made_for = fingerprint(model)
        self.place = model.lm_head.weight.data_ptr()
        self.resident: Any = None
        # Buffers of inference mode could not be written to outside of it.
        with torch.inference_mode(False), torch.no_grad():
            self.tokens = tokens.clone()
            self.states = _cloned(cache.states)
            self._record(model, cache)

    def _record(self, model: Any, cache: VortCache) -> None:
        inner = VortCache(cache.num_layers, static=True, state_dtype=cache.state_dtype)
        inner.in_place = True
        inner.states = {**self.states}
        before = _cloned(self.states)
        device = self.tokens.device
        # Once outside of the recording: kernels are compiled, workspaces are taken.
        side = torch.cuda.Stream(device)
        side.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(side):
            for _ in range(2):
                self._forward(model, inner)
        torch.cuda.current_stream(device).wait_stream(side)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.logits = self._forward(model, inner)
        for index, state in before.items():
            for name, x in state.items():
                self.states[index][name].copy_(x)

    def _forward(self, model: Any, cache: VortCache) -> Tensor:
        hidden = model.model(self.tokens, past_key_values=cache, use_cache=True).last_hidden_state
        head = model.lm_head
        if is_plain(hidden, head) and few_rows(hidden, head.weight):
            from vort.ops.linear.few import few_products

            return few_products(hidden, head.weight)
        logits: Tensor = head(hidden)
        return logits

    def step(self, tokens: Tensor, cache: VortCache) -> Tensor:
        """Logits `[B, 1, V]` of the tokens `[B, 1]` that come next in `cache`, which moves on."""
        self._move_in(cache)
        self.tokens.copy_(tokens)
        self.graph.replay()
        cache.positions = {index: cache.positions.get(index, 0) + 1 for index in self.states}
        return self.logits.clone()

    def houses(self, cache: VortCache) -> bool:
        """Whether the buffers hold the states of this cache."""
        lodger = None if self.resident is None else self.resident()
        return lodger is cache and cache.states.get(0) is self.states[0]

    def goes_on(self, model: Any, cache: VortCache, tokens: Tensor) -> bool:
        """Whether it is the one for these tokens too: asked for every token, so with little."""
        same = self.houses(cache) and self.tokens.shape == tokens.shape
        return same and self.place == model.lm_head.weight.data_ptr()

    def _move_in(self, cache: VortCache) -> None:
        if self.houses(cache):
            return
        lodger = None if self.resident is None else self.resident()
        if lodger is not None and lodger.states.get(0) is self.states[0]:
            lodger.states = _cloned(lodger.states)
            lodger.static = lodger.was_static
        for index, state in self.states.items():
            for name, x in state.items():
                x.copy_(cache.states[index][name])
        cache.was_static, cache.static = cache.static, True
        cache.states = {**self.states}
        self.resident = ref(cache)


def _cloned(states: dict[int, Any]) -> dict[int, dict[str, Tensor]]:
    return {index: dense_state(state) for index, state in states.items()}


def graph_for(model: Any, cache: VortCache, tokens: Tensor) -> DecodeGraph | None:
    """The graph that decodes `tokens` `[B, 1]` with this cache; None where there can be none.

    There is one for every batch size of a model; changed weights record it anew.
    """
    if not _may_replay(model, tokens):
        return None
    last = _last.get(model)
    if last is not None and last.goes_on(model, cache, tokens):
        return last
    if len(cache.states) == 0 or not is_steady(model):
        return None
    known = _graphs.setdefault(model, {})
    shapes = tuple((x.shape, x.dtype) for x in cache.states[0].values())
    key = (tokens.shape[0], tokens.device, shapes)
    graph = known.get(key)
    # Asked when a cache moves in, not for every token.
    if is_watched(*model.modules()):
        return None
    if graph is None or graph.made_for != fingerprint(model):
        graph = known[key] = DecodeGraph(model, cache, tokens)
    _last[model] = graph
    return graph


def step_for(model: Any, cache: VortCache, tokens: Tensor) -> PlainStep | None:
    """On a CPU, what decodes the one token `[1, 1]` with this cache; None: the model is called."""
    if torch.is_grad_enabled() or model.training or tokens.numel() != 1 or not cache.states:
        return None
    if torch.is_autocast_enabled("cpu") or traced(tokens):
        return None
    return plain_step_for(model, cache, VortBlock)


def _may_replay(model: Any, tokens: Tensor) -> bool:
    """Whether this very call wants no more than a recorded step gives."""
    if not tokens.is_cuda or torch.is_grad_enabled() or model.training:
        return False
    if torch.compiler.is_compiling() or torch.cuda.is_current_stream_capturing():
        return False
    return not torch.is_autocast_enabled("cuda")


def can_record(model: Any, tokens: Tensor) -> bool:
    """Whether a call for these tokens may be recorded: the same launches every time, none watched.

    Not asked for every token: it looks at every module.
    """
    known = is_steady(model) and all(memory.is_retention for memory in model.model.memories)
    return _may_replay(model, tokens) and known and not is_watched(*model.modules())


def is_steady(model: Any) -> bool:
    """Whether a step of the model is the same launches every time, into states of fixed size.

    Parts that stand in the place of ours are called for every token, whatever they do.
    """
    ours = all(type(block) is VortBlock and block.has_own_parts for block in model.model.layers)
    steady = ours and all(memory.records_steps for memory in model.model.memories)
    return isinstance(model.lm_head, nn.Linear) and steady
