"""Reading and writing with a model that keeps a memory: feed, generate, stream."""

import operator
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from vort.fractional._checks import check_at_least

__all__ = ["Session", "sample_token"]

_CONTEXT = 16  # tokens that the text of the next one may depend on
_LOWEST = 1e-30  # a temperature: below it logits would overflow, and the draw is the same


class Session:
    """A model and the memory of all it has been fed, in space that does not grow.

    What every session can do, whoever made the model; `vort.VortSession` also branches, merges,
    saves and loads.

    Args:
        model: in evaluation mode: a `VortForCausalLM`, or a `BareModel`.
        tokenizer: needed to feed or stream text; token ids need none.
        chunk_size: inputs are read in pieces of this many tokens, cut at multiples of it since
            the start of the session. Memory while feeding grows with it, speed does too.
        seed: of the random numbers that `generate` draws; they are part of the session.
    """

    def __init__(
        self, model: Any, tokenizer: Any = None, *, chunk_size: int = 1024, seed: int = 0
    ) -> None:
        if model.training:
            raise ValueError("model must be in evaluation mode: call model.eval() first")
        self.model = model
        self.tokenizer = tokenizer
        self.chunk_size = check_at_least(chunk_size, 1, "chunk_size")
        self.tokens_seen = 0
        self._cache: Any = model.new_cache()
        self._logits: Tensor | None = None
        self._generator = torch.Generator().manual_seed(seed)

    @property
    def logits(self) -> Tensor:
        """What the model expects next: `[vocab_size]`, float32, on the CPU."""
        if self._logits is None:
            when = "since its memory was changed" if self.tokens_seen else "yet"
            raise ValueError(f"nothing has been fed {when}: call feed(prompt) first")
        return self._logits

    @property
    def nbytes(self) -> int:
        """Bytes of the memory."""
        size: int = self._cache.nbytes
        return size

    def feed(self, tokens: str | Sequence[int] | Tensor, entity_mask: Tensor | None = None) -> None:
        """Read a text or token ids into the memory.

        Args:
            tokens: a text (special tokens are not added), or `[T]` ids, or `[1, T]`.
            entity_mask: `[T]`, 1 at tokens of a named entity, for models that use it. Take
                `entity_indicator(..., causal=True)`, which a stream can go on with.
        """
        ids = self._as_ids(tokens)
        if entity_mask is not None and entity_mask.numel() != len(ids):
            raise ValueError(
                f"entity_mask must have one entry for each of the {len(ids)} tokens, "
                f"got {list(entity_mask.shape)}"
            )
        start = 0
        while start < len(ids):
            room = self.chunk_size - self.tokens_seen % self.chunk_size
            piece = slice(start, start + room)
            self._read(ids[piece], None if entity_mask is None else entity_mask.view(-1)[piece])
            start += room

    def generate(
        self,
        max_new_tokens: int,
        *,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float | None = None,
        seed: int | None = None,
        stop: Collection[int] | None = None,
    ) -> Iterator[int]:
        """Tokens one by one; each is in the memory when it comes out, so one may save or stop.

        Args:
            max_new_tokens: how many at most.
            temperature: 0 takes the likeliest; below 1 sharpens, above 1 flattens.
            top_k: draw from the k likeliest alone.
            top_p: draw from the fewest likeliest that hold this much probability.
            seed: start the session's random numbers anew; None goes on with them.
            stop: tokens after which to end; None: the model's end-of-text tokens.
        """
        if max_new_tokens < 0:
            raise ValueError(f"max_new_tokens must not be negative, got {max_new_tokens}")
        _check_sampling(temperature, top_k, top_p)
        self.logits  # noqa: B018  # raises here, not at the first token
        ends = frozenset(_end_tokens(self.model.config)) if stop is None else _as_tokens(stop)
        if seed is not None:
            self._generator.manual_seed(seed)
        return self._generate(max_new_tokens, ends, temperature, top_k, top_p)

    def stream(self, max_new_tokens: int, **settings: Any) -> Iterator[str]:
        """Text piece by piece, as `generate` makes it; needs a tokenizer.

        A letter whose bytes are not all there yet is held back. End-of-text tokens are not shown.
        """
        tokenizer = self._need_tokenizer()
        tokens = self.generate(max_new_tokens, **settings)
        return _as_text(tokens, tokenizer)

    def _as_ids(self, tokens: str | Sequence[int] | Tensor) -> Tensor:
        if isinstance(tokens, str):
            tokens = self._need_tokenizer()(tokens, add_special_tokens=False)["input_ids"]
        try:
            given = torch.as_tensor(tokens)
        except (TypeError, ValueError, RuntimeError):
            kind = type(tokens).__name__
            raise TypeError(f"tokens must be a text or token ids, got {kind}") from None
        whole = not (given.is_floating_point() or given.is_complex() or given.dtype == torch.bool)
        if not whole and given.numel():  # an empty list counts as floats
            raise TypeError(f"tokens must be integers, got {given.dtype}")
        ids = given.to("cpu", torch.long)
        if ids.ndim == 2 and len(ids) == 1:
            ids = ids[0]
        if ids.ndim != 1:
            raise ValueError(f"tokens must have shape [T] or [1, T], got {list(ids.shape)}")
        size = self.model.config.vocab_size
        wrong = torch.nonzero((ids < 0) | (ids >= size))
        if len(wrong):
            index = int(wrong[0])
            raise ValueError(f"tokens must lie in 0..{size - 1}, got {int(ids[index])} at {index}")
        return ids

    @torch.no_grad()
    def _read(self, ids: Tensor, entity_mask: Tensor | None) -> None:
        """Feed one piece. If anything goes wrong on the way, the session is as it was before."""
        former = self._logits, self.tokens_seen, self._cache.bookmark()
        device = self.model.device
        try:
            found = self.model(
                input_ids=ids[None].to(device),
                past_key_values=self._cache,
                use_cache=True,
                entity_mask=None if entity_mask is None else entity_mask[None].to(device),
                logits_to_keep=1,
                return_dict=True,
            )
            if len(ids) > 1:
                # States may be views of all that the piece needed; keep what is theirs alone.
                self._cache.change(torch.clone)
            self._logits = found.logits[0, -1].float().cpu()
            self.tokens_seen += len(ids)
        except BaseException:  # an interrupt by the user too
            self._logits, self.tokens_seen, self._cache = former
            raise

    def _generate(
        self,
        max_new_tokens: int,
        ends: frozenset[int],
        temperature: float,
        top_k: int | None,
        top_p: float | None,
    ) -> Iterator[int]:
        for _ in range(max_new_tokens):
            drawn_before = self._generator.get_state()
            token = sample_token(self.logits, self._generator, temperature, top_k, top_p)
            try:
                self._read(torch.tensor([token]), None)
            except BaseException:
                self._generator.set_state(drawn_before)
                raise
            yield token
            if token in ends:
                return

    def _need_tokenizer(self) -> Any:
        if self.tokenizer is None:
            raise ValueError(
                "text needs a tokenizer, and this session has none: "
                "VortSession(model, tokenizer), or feed token ids"
            )
        return self.tokenizer


def _check_sampling(temperature: float, top_k: int | None, top_p: float | None) -> None:
    """Raise if a setting is out of range."""
    if not 0 <= temperature < float("inf"):
        raise ValueError(f"temperature must be 0 (greedy) or positive, got {temperature}")
    if top_k is not None and top_k < 1:
        raise ValueError(f"top_k must be at least 1, got {top_k}")
    if top_p is not None and not 0 < top_p <= 1:
        raise ValueError(f"top_p must lie in (0, 1], got {top_p}")


def sample_token(
    logits: Tensor,
    generator: torch.Generator,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
) -> int:
    """One token drawn from `logits` `[vocab_size]`; the likeliest if temperature is 0.

    Args:
        logits: unnormalised log-probabilities.
        generator: where randomness comes from.
        temperature: below 1 sharpens, above 1 flattens.
        top_k: draw from the k likeliest tokens alone.
        top_p: draw from the fewest likeliest tokens that hold this much probability.

    >>> sample_token(torch.tensor([0.0, 2.0, 1.0]), torch.Generator(), temperature=0)
    1
    """
    if temperature == 0:
        return int(logits.argmax())
    logits = logits.float() / max(temperature, _LOWEST)
    if top_k is not None and top_k < len(logits):
        logits = logits.masked_fill(logits < logits.topk(top_k).values[-1], float("-inf"))
    probabilities = logits.softmax(-1)
    if top_p is not None:
        probabilities = _nucleus(probabilities, top_p)
    return int(torch.multinomial(probabilities, 1, generator=generator))


def _nucleus(probabilities: Tensor, top_p: float) -> Tensor:
    """Zero all but the likeliest tokens up to and including the one that reaches `top_p`."""
    ordered, tokens = probabilities.sort(descending=True, stable=True)
    before = ordered.cumsum(-1) - ordered
    return torch.zeros_like(probabilities).scatter(-1, tokens, ordered * (before < top_p))


def _as_tokens(stop: Collection[int] | str) -> frozenset[int]:
    """Tokens to end after as numbers; those of a tensor would equal none."""
    if isinstance(stop, str):
        raise TypeError(f"stop must be token ids, got the text {stop!r}")
    try:
        return frozenset(map(operator.index, stop))
    except TypeError:
        raise TypeError(f"stop must be token ids, got {stop!r}") from None


def _end_tokens(config: Any) -> tuple[int, ...]:
    end = config.eos_token_id
    return () if end is None else (end,) if isinstance(end, int) else tuple(end)


def _as_text(tokens: Iterator[int], tokenizer: Any) -> Iterator[str]:
    """Text as soon as it is certain: the bytes of an unfinished letter end in U+FFFD and wait.

    Tokens are decoded after those before them: alone, one may lose the space that it begins with.
    """

    def decode(ids: list[int]) -> str:
        return str(tokenizer.decode(ids, skip_special_tokens=True))

    context: list[int] = []
    window: list[int] = []
    text, shown = "", 0
    for token in tokens:
        window.append(token)
        text = decode(context + window)
        certain = len(text) - text.endswith("\ufffd")
        if certain > shown:
            yield text[shown:certain]
            shown = certain
        if shown == len(text):
            context, window = window[-_CONTEXT:], []
            text = decode(context)
            shown = len(text)
    if shown < len(text):
        yield text[shown:]
