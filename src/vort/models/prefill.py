"""Prompts: in pieces where they are long, and recorded where the same shape comes again.

A prompt of a few thousand tokens keeps a GPU busy for a fraction of the time that the host needs to
launch its kernels. States are of fixed size, so a piece of a prompt is the same launches whatever
went before it: the second time a shape is seen it is recorded as a CUDA graph, from then on
replayed. Prompts of equal length profit, and those that come in pieces of one.
"""

from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from vort.models.cache_vort import VortCache, dense_state

__all__ = ["PrefillGraph", "pieces_of", "prefill_graph_for"]

# Tokens of all rows that are taken at a time where only the last logits are asked for.
PIECE = 131_072
# More tokens than this keep the GPU busy without a recording, which would hold memory for them all.
LARGEST = 16_384
# Recordings of a model that are kept, the latest used.
KEPT = 4
# Shapes that are remembered until they come again.
SEEN = 256

_graphs: WeakKeyDictionary[nn.Module, dict[Any, "PrefillGraph | None"]] = WeakKeyDictionary()


class PrefillGraph:
    """A recorded piece of a prompt: tokens and states in, last logits and states out."""

    def __init__(self, model: Any, cache: VortCache, tokens: Tensor, made_for: int) -> None:
        self.made_for = made_for
        with torch.inference_mode(False), torch.no_grad():
            self.tokens = tokens.clone()
            self.before = {i: dense_state(cache.load_state(i) or {}) for i in cache.states}
            inner = VortCache(cache.num_layers)
            inner.states = {**self.before}
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                found = model.model(self.tokens, past_key_values=inner, use_cache=True)
                self.logits: Tensor = model.lm_head(found.last_hidden_state[:, -1:])
            self.after = inner.states

    def run(self, tokens: Tensor, cache: VortCache) -> Tensor:
        """Logits `[B, 1, V]` after tokens `[B, T]` that come next in `cache`, which moves on."""
        with torch.inference_mode(False), torch.no_grad():
            for index, state in self.before.items():
                given = cache.load_state(index)
                assert given is not None
                torch._foreach_copy_(list(state.values()), [given[name] for name in state])
            self.tokens.copy_(tokens)
            self.graph.replay()
            for index, after in self.after.items():
                cache.store_state(index, dense_state(after), tokens.shape[1])
            return self.logits.clone()


def prefill_graph_for(
    model: Any, cache: VortCache, tokens: Tensor, made_for: int
) -> PrefillGraph | None:
    """The recording for tokens `[B, T]` after this cache; None for a shape that is new.

    Whether the model can be recorded at all is the caller's to know; made_for is a fingerprint of
    its weights, which a recording reads where they lay.
    """
    if not 1 < tokens.shape[1] <= tokens.numel() <= LARGEST:
        return None
    known = _graphs.setdefault(model, {})
    shapes = tuple((x.shape, x.dtype) for x in (cache.load_state(0) or {}).values())
    key = (tokens.shape, tokens.device, shapes)
    if key not in known:
        for old in [k for k, g in known.items() if g is None][:-SEEN]:
            del known[old]
        known[key] = None  # seen once: when it comes again its kernels will have been compiled
        return None
    graph = known.pop(key)
    if graph is None or graph.made_for != made_for:
        graph = PrefillGraph(model, cache, tokens, made_for)
    known[key] = graph  # the latest used is last
    recorded = [k for k, g in known.items() if g is not None]
    for old in recorded[:-KEPT]:
        del known[old]
    return graph


def pieces_of(tokens: Tensor) -> list[slice]:
    """Where a prompt `[B, T]` is cut; into one piece where it is not long."""
    length = max(1, PIECE // max(1, tokens.shape[0]))
    return [slice(i, i + length) for i in range(0, tokens.shape[1], length)]
