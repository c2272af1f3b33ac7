"""A conversation with a model that never grows: feed, generate, branch, save, go on."""

import hashlib
import json
import os
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

import vort
from vort.fractional._checks import check_at_least
from vort.memories import LayerSettings
from vort.models.cache_vort import VortCache
from vort.models.configuration_vort import VortConfig
from vort.models.modeling_vort import VortForCausalLM
from vort.models.session_file import read_state, update_digest, write_state
from vort.sessions import Session

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["VortSession"]

# What a saved memory does not depend on: which tokens are special, and defaults of calls.
_IRRELEVANT = {"pad_token_id", "bos_token_id", "eos_token_id", "use_cache"}
_weights_digests: "WeakKeyDictionary[VortForCausalLM, tuple[Any, str]]" = WeakKeyDictionary()


class VortSession(Session):
    """A model and the memory of all it has been fed, in space that does not grow.

    The same calls give the same bits: after a crash, `VortSession.load` and the calls since the
    last `save` lead to the very tokens of a run that was never interrupted.

    Args:
        model: a `VortForCausalLM` in evaluation mode.
        tokenizer: needed to feed or stream text; token ids need none.
        chunk_size: inputs are read in pieces of this many tokens, cut at multiples of it since
            the start of the session. Memory while feeding grows with it, speed does too.
        seed: of the random numbers that `generate` draws; they are part of the session.

    >>> from vort.models import ByteTokenizer, VortConfig
    >>> config = VortConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2)
    >>> session = VortSession(VortForCausalLM(config).eval(), ByteTokenizer())
    >>> session.feed("It was the best of times, ")
    >>> len(list(session.generate(5, stop=())))
    5
    >>> session.tokens_seen
    31
    """

    model: VortForCausalLM
    tokenizer: "PreTrainedTokenizerBase | None"
    _cache: VortCache

    def __init__(
        self,
        model: VortForCausalLM,
        tokenizer: "PreTrainedTokenizerBase | None" = None,
        *,
        chunk_size: int = 1024,
        seed: int = 0,
    ) -> None:
        if not isinstance(model, VortForCausalLM):
            raise TypeError(f"model must be a VortForCausalLM, got {type(model).__name__}")
        super().__init__(model, tokenizer, chunk_size=chunk_size, seed=seed)

    @classmethod
    @torch.no_grad()
    def read_apart(
        cls,
        model: VortForCausalLM,
        texts: "Sequence[str | Sequence[int] | Tensor]",
        tokenizer: "PreTrainedTokenizerBase | None" = None,
        *,
        rows: int = 16,
        chunk_size: int = 1024,
        seed: int = 0,
    ) -> "list[VortSession]":
        """A session for each text, read side by side: what feeding each alone leaves.

        Texts of about the same length share a batch; one that ends leaves it, and what stands in
        its place until then counts for nothing.

        Args:
            model: of all sessions.
            texts: each a text or token ids, as `feed` takes them.
            tokenizer: needed for text.
            rows: texts that are read at once; memory while reading grows with it.
            chunk_size: tokens of a text that are read at once, and the sessions' own.
            seed: of each session.

        >>> from vort.models import ByteTokenizer, VortConfig
        >>> config = VortConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2)
        >>> model = VortForCausalLM(config).eval()
        >>> found = VortSession.read_apart(model, ["Ada.", "At nine.", ""], ByteTokenizer())
        >>> [session.tokens_seen for session in found]
        [4, 8, 0]
        """
        rows = check_at_least(rows, 1, "rows")
        chunk_size = check_at_least(chunk_size, 1, "chunk_size")
        if isinstance(texts, str):
            raise TypeError("texts must be several, got one: feed it to a session")
        found = [cls(model, tokenizer, chunk_size=chunk_size, seed=seed) for _ in texts]
        ids = [session._as_ids(text) for session, text in zip(found, texts, strict=True)]
        # The longest first: those that are left then stand at the front of a batch.
        order = sorted((i for i in range(len(ids)) if len(ids[i])), key=lambda i: -len(ids[i]))
        for first in range(0, len(order), rows):
            left, cache = order[first : first + rows], model.new_cache()
            for start in range(0, len(ids[left[0]]), chunk_size):
                pieces = [ids[i][start : start + chunk_size] for i in left]
                logits = _read_rows(model, pieces, cache)
                stay = [i for i in left if len(ids[i]) > start + chunk_size]
                for row in range(len(stay), len(left)):
                    seen = len(ids[left[row]])
                    found[left[row]]._begin(cache.select(torch.tensor([row])), logits[row], seen)
                cache = cache.select(torch.arange(len(stay)))
                left = stay
        return found

    def _begin(self, cache: VortCache, logits: Tensor, tokens_seen: int) -> None:
        """Go on from what one row of a batch has read."""
        for index, state in cache.states.items():
            self._cache.store_state(index, state, tokens_seen)
        self._logits, self.tokens_seen = logits, tokens_seen

    def branch(self) -> "VortSession":
        """An independent copy, random numbers included; the model is shared."""
        other = VortSession(self.model, self.tokenizer, chunk_size=self.chunk_size)
        other.tokens_seen = self.tokens_seen
        other._logits = self._logits
        other._generator.set_state(self._generator.get_state())
        other._cache = self._cache.copy().change(torch.clone)
        return other

    def aged(self, steps: int) -> "VortSession":
        """A branch whose memory is `steps` tokens older, as if these had written nothing.

        What comes next is known again once something was fed.
        """
        return self._with_memory(self._cache.aged(steps, self.model), self.tokens_seen)

    @staticmethod
    def merged(
        sessions: "Sequence[VortSession]", ages: Sequence[int] | None = None
    ) -> "VortSession":
        """One session with the memories of several, which read their texts apart.

        In one layer it is the memory of having read them in a row, but for the first tokens of
        each text; in deeper models an approximation to it (`vort.models.merging`). Window,
        tokenizer and random numbers are the last one's.

        Args:
            sessions: of one model, the nearest text last.
            ages: how many tokens ago each text ended; by default as if read in a row.
        """
        if not sessions:
            raise ValueError("merged needs at least one session, got none")
        last = sessions[-1]
        if any(session.model is not last.model for session in sessions):
            raise ValueError("sessions must be of one model to be merged")
        memory = VortCache.merged([session._cache for session in sessions], last.model, ages)
        return last._with_memory(memory, sum(session.tokens_seen for session in sessions))

    def without(self, other: "VortSession", ago: int = 0) -> "VortSession":
        """A branch whose memory has lost a text that was merged into it.

        Args:
            other: the session that read this text alone.
            ago: how many tokens have been read since the text ended.
        """
        if other.model is not self.model:
            raise ValueError("sessions must be of one model to be taken from each other")
        memory = self._cache.without(other._cache, self.model, ago)
        return self._with_memory(memory, max(0, self.tokens_seen - other.tokens_seen))

    def _with_memory(self, memory: VortCache, tokens_seen: int) -> "VortSession":
        other = self.branch()
        other._cache, other._logits = memory.change(torch.clone), None
        other.tokens_seen = tokens_seen
        return other

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the session to one safetensors file, whole or not at all."""
        tensors = {"generator": self._generator.get_state()}
        if self._logits is not None:
            tensors["logits"] = self._logits
        for index, state in self._cache.states.items():
            tensors |= _named(index, state)
        about = {
            "vort": vort.__version__,
            "torch": torch.__version__,
            "config": _config_digest(self.model),
            "weights": _weights_digest(self.model),
            "tokens_seen": self.tokens_seen,
            "most_seen": self._most_seen(),
            "chunk_size": self.chunk_size,
            # A memory that was merged or aged knows what comes next once something was fed.
            "knows_next": self._logits is not None,
        }
        write_state(Path(path), tensors, about)

    def _most_seen(self) -> int:
        """Tokens that a layer has seen at most; more than `tokens_seen` once a text was taken out.

        The window is then still that of the last text, and counts it.
        """
        states = self._cache.states.values()
        windows = [int(state["local.seen"].max()) for state in states if "local.seen" in state]
        return max(self.tokens_seen, int(len(states) > 0), *windows, 0)

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        model: VortForCausalLM,
        tokenizer: "PreTrainedTokenizerBase | None" = None,
    ) -> "VortSession":
        """A saved session, to go on where it was; `model` must be the one that made it."""
        tensors, about = read_state(Path(path))
        _check_origin(Path(path), about, model)
        _check_contents(Path(path), tensors, about, model)
        session = cls(model, tokenizer, chunk_size=about["chunk_size"])
        session.tokens_seen = about["tokens_seen"]
        session._generator.set_state(tensors.pop("generator"))
        session._logits = tensors.pop("logits", None)
        states: dict[int, dict[str, Tensor]] = defaultdict(dict)
        for key, x in tensors.items():
            _, layer, name = key.split(".", 2)
            states[int(layer)][name] = x.to(model.device)
        for index, state in states.items():
            session._cache.store_state(index, state, session.tokens_seen)
        return session


def _read_rows(model: VortForCausalLM, pieces: list[Tensor], cache: VortCache) -> Tensor:
    """Read one piece of each text into a row of the cache; logits after each, `[rows, V]`."""
    lengths = torch.tensor([len(piece) for piece in pieces])
    ids = torch.nn.utils.rnn.pad_sequence(pieces, batch_first=True).to(model.device)
    mask = None
    if int(lengths.min()) < ids.shape[1]:
        mask = (torch.arange(ids.shape[1]) < lengths[:, None]).to(ids)
    hidden = model.model(ids, mask, cache, use_cache=True, return_dict=True).last_hidden_state
    last = hidden[torch.arange(len(pieces)), lengths - 1]
    logits: Tensor = model.lm_head(last).float().cpu()
    return logits


def _config_digest(model: VortForCausalLM) -> str:
    known = {**LayerSettings.__annotations__, **VortConfig.__annotations__}
    names = [name for name in known if name not in _IRRELEVANT]
    settings = {name: getattr(model.config, name) for name in names}
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()


def _weights_digest(model: VortForCausalLM) -> str:
    """Digest of all weights, computed again only if what they hold has changed."""
    weights = model.state_dict()
    stamp = _stamp(weights)
    known = _weights_digests.get(model)
    if known is None or known[0] != stamp:
        digest = hashlib.sha256()
        update_digest(digest, weights)
        known = _weights_digests[model] = (stamp, digest.hexdigest())
    return known[1]


def _stamp(weights: dict[str, Tensor]) -> list[Any]:
    """What is another where weights are: where they lie, their norms and their sums.

    Versions would not do: fused optimizers on a CPU, and whatever goes by way of `.data`, write to
    weights and do not count it.
    """
    held = (x if x.is_floating_point() else x.float() for x in weights.values())
    sums = [float(sum_of(x)) for x in held for sum_of in (torch.linalg.vector_norm, torch.sum)]
    return [*((x.data_ptr(), x.dtype) for x in weights.values()), *sums]


def _check_origin(path: Path, about: dict[str, Any], model: VortForCausalLM) -> None:
    """Raise unless this version and this model can go on with the state."""
    saved_by = str(about.get("vort"))
    made_by, here = (version.split(".")[:2] for version in (saved_by, vort.__version__))
    if made_by != here:
        raise ValueError(
            f"{path} was saved by vort {saved_by}, and this is vort {vort.__version__}: "
            "states are exchanged within one minor version only"
        )
    for part, digest in (("config", _config_digest), ("weights", _weights_digest)):
        if about.get(part) != digest(model):
            raise ValueError(
                f"{path} belongs to another model: its {part} differs from the given model's"
            )


def _named(index: int, state: Any) -> dict[str, Tensor]:
    """The tensors of a layer's state as a file names them."""
    return {f"layers.{index}.{name}": x for name, x in state.items()}


def _check_contents(
    path: Path, tensors: dict[str, Tensor], about: dict[str, Any], model: VortForCausalLM
) -> None:
    """Raise unless the tensors are what this model would have saved; a checksum can be made up."""

    def refuse(problem: str) -> None:
        raise ValueError(f"{path} is no session of this model: {problem}")

    most_seen: Any = about.get("most_seen", about.get("tokens_seen"))
    for name, least in (("tokens_seen", 0), ("most_seen", 0), ("chunk_size", 1)):
        value = most_seen if name == "most_seen" else about.get(name)
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            refuse(f"{name} must be an integer from {least} on, got {value!r}")
    wanted = {"generator": torch.Generator().get_state()}
    if most_seen > 0:
        wanted |= _states_of_a_token(model)
        if about.get("knows_next", True) is True:
            wanted["logits"] = torch.empty(model.config.vocab_size)
    if odd := sorted(wanted.keys() ^ tensors.keys()):
        what = "is missing" if odd[0] in wanted else "has no place in it"
        refuse(f"{odd[0]} {what}")
    grows = model.new_cache().grows
    for name, like in wanted.items():
        x = tensors[name]
        floats = x.is_floating_point() and like.is_floating_point()
        if x.dtype != like.dtype and not floats:
            refuse(f"{name} must be {like.dtype}, got {x.dtype}")
        shape, expected = list(x.shape), list(like.shape)
        if grows and ".memory." in name and len(shape) == len(expected) > 1:
            shape[1] = expected[1]  # as many as it has seen
        if shape != expected:
            refuse(f"{name} must have shape {expected}, got {list(x.shape)}")
        if floats and not bool(torch.isfinite(x).all()):
            refuse(f"{name} must be finite")
        if name.endswith(".seen") and bool(((x < 0) | (x > most_seen)).any()):
            refuse(f"{name} must lie in 0..{most_seen}, got {x.tolist()}")


@torch.no_grad()
def _states_of_a_token(model: VortForCausalLM) -> dict[str, Tensor]:
    """What a session holds of the layers after one token."""
    cache = model.new_cache()
    token = torch.zeros(1, 1, dtype=torch.long, device=model.device)
    model(input_ids=token, past_key_values=cache, use_cache=True)
    found: dict[str, Tensor] = {}
    for index, state in cache.states.items():
        found |= _named(index, state)
    return found
