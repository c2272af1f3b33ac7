"""Sequences packed into rows, by whichever name callers of attention layers send their bounds."""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._compile import _disable_dynamo

from vort.names import refuse_unknown
from vort.ops.custom import traced
from vort.ops.local_attention.checks import check_cu_seqlens

__all__ = ["CALLERS", "NO_ATTENTIONS", "Packing", "check_call", "is_exporting"]

NO_ATTENTIONS = "output_attentions must be off: a memory has no attention weights to show"
# What callers of attention layers send and a layer has no use for: positions follow from what has
# been seen, and there is no matrix of attention weights.
CALLERS = (
    "position_ids",
    "cu_seq_lens_q",
    "cu_seq_lens_k",
    "max_length_q",
    "max_length_k",
    "seq_idx",
    "position_embeddings",
    "cache_position",
    "output_attentions",
    "is_causal",
)


def check_call(owner: str, given: dict[str, Any], known: tuple[str, ...]) -> None:
    """Refuse keywords that nobody sends, and wishes that cannot be met.

    >>> check_call("VortAttention", {"attenton_mask": None}, ("attention_mask",))
    Traceback (most recent call last):
    TypeError: VortAttention has no argument 'attenton_mask'; did you mean attention_mask?
    """
    if not given:
        return
    refuse_unknown(owner, given, (*known, *CALLERS), kind="argument")
    if given.get("output_attentions"):
        raise ValueError(NO_ATTENTIONS)
    if given.get("is_causal") is False:
        raise ValueError("is_causal must be True: what is to come is not in memory yet")


class Packing(NamedTuple):
    """Where sequences begin and end.

    Attributes:
        bounds: `[N + 1]`, of all rows laid end to end.
        spread: whether there is more than one row, to be laid end to end first.
        places: `[tokens]` of all rows laid end to end, those that are laid; None: every one.
    """

    bounds: Tensor
    spread: bool
    places: Tensor | None = None

    @classmethod
    def of(
        cls,
        batch: int,
        length: int,
        mask: Tensor | None = None,
        *,
        cu_seqlens: Tensor | None = None,
        continues: bool = False,
        values: bool = True,
        position_ids: Tensor | None = None,
        cu_seq_lens_q: Tensor | None = None,
        cu_seq_lens_k: Tensor | None = None,
        seq_idx: Tensor | None = None,
        **others: Any,
    ) -> "Packing | None":
        """The packing of a call's rows; None where every row is one sequence.

        Args:
            batch: rows.
            length: positions of a row.
            mask: `[B, T]`, 0 at padding, None without any.
            cu_seqlens: `[N + 1]` bounds, B = 1.
            continues: whether states stand for a past.
            values: whether bounds on a GPU are looked at, which makes it wait.
            position_ids: `[B, T]`; a row of several sequences counts anew from where it began.
            cu_seq_lens_q: `[N + 1]` bounds under another name.
            cu_seq_lens_k: the same; attention from one text to another is none of ours.
            seq_idx: `[B, T]`, the number of each position's sequence.
            **others: ignored.

        >>> positions = torch.tensor([[0, 1, 2, 0, 1]])
        >>> Packing.of(1, 5, position_ids=positions).bounds.tolist()
        [0, 3, 5]
        >>> Packing.of(1, 5, position_ids=torch.arange(7, 12)[None]) is None
        True
        """
        bounds = _one_of(cu_seqlens, cu_seq_lens_q, cu_seq_lens_k)
        if bounds is not None:
            # Values on a GPU are looked at where something stops its queue anyway.
            near = isinstance(bounds, Tensor) and bounds.device.type == "cpu"
            check_cu_seqlens(bounds, batch, length, values=values or near)
            told = position_ids if seq_idx is None else seq_idx
            if near and told is not None and told.device.type == "cpu" and not traced(told):
                _check_told(bounds, length, position_ids, seq_idx)
            return cls(bounds, False)
        if length < 2 or (position_ids is None and seq_idx is None):
            return None
        if is_exporting():
            raise ValueError(
                "position_ids and seq_idx cannot be exported: which rows they pack is a question "
                "to their numbers; leave them out where they count up, or give cu_seqlens"
            )
        find = _starts_untraced if torch.compiler.is_compiling() else _starts
        starts = find(batch, length, mask, position_ids, seq_idx)
        if starts is None:
            return None
        if continues:
            raise ValueError(
                "packed sequences start afresh: past_key_values must be empty where position_ids "
                "or seq_idx tell several sequences apart"
            )
        end = starts.new_tensor([batch * length])
        return cls(torch.cat([starts, end]), batch > 1)

    @classmethod
    def of_tokens(cls, mask: Tensor) -> "Packing":
        """The tokens of padded rows alone, each row a sequence; mask `[B, T]`, 0 at padding.

        >>> packing = Packing.of_tokens(torch.tensor([[0, 0, 1], [1, 1, 0]]))
        >>> row = packing.lay(torch.tensor([[1, 2, 3], [4, 5, 6]]))
        >>> row.tolist(), packing.bounds.tolist(), packing.back(row, (2, 3)).tolist()
        ([[3, 4, 5]], [0, 1, 3], [[0, 0, 3], [4, 5, 0]])
        """
        real = mask.bool()
        bounds = torch.nn.functional.pad(real.sum(1).cumsum(0), (1, 0))
        return cls(bounds, True, real.flatten().nonzero().flatten())

    def lay(self, x: Tensor) -> Tensor:
        """`[B, T, ...]` as the one row that bounds are of."""
        if not self.spread:
            return x
        x = x.flatten(0, 1)
        return (x if self.places is None else x[self.places]).unsqueeze(0)

    def back(self, x: Tensor, shape: tuple[int, int]) -> Tensor:
        """The inverse of `lay`, for rows of this shape `(B, T)`; zeros where nothing was laid."""
        if not self.spread:
            return x
        row = x[0]
        if self.places is not None:
            whole = row.new_zeros(shape[0] * shape[1], *row.shape[1:])
            row = whole.index_copy(0, self.places, row)
        return torch.unflatten(row, 0, shape)


def is_exporting() -> bool:
    """Whether `torch.export` traces.

    The flag itself: before torch 2.13 torch's own `is_exporting()` says yes to torch.compile too.
    """
    return bool(getattr(torch.compiler, "_is_exporting_flag", False))


def _one_of(*given: Tensor | None) -> Tensor | None:
    """The bounds that are there; if under several names, they must be the same."""
    found = [x for x in given if x is not None]
    for other in found[1:]:
        same = other is found[0] or other.shape == found[0].shape
        # Values on a GPU are not looked at: that would stop its queue.
        if same and other is not found[0] and other.device.type == "cpu":
            same = torch.equal(other, found[0].to(other))
        if not same:
            raise ValueError(
                "cu_seqlens, cu_seq_lens_q and cu_seq_lens_k must be the same bounds, got "
                f"{other.tolist()} beside {found[0].tolist()}"
            )
    return found[0] if found else None


def _check_told(
    bounds: Tensor, length: int, positions: Tensor | None, seq_idx: Tensor | None
) -> None:
    """Refuse sequences that begin where bounds have none.

    With bounds positions may begin with any number: each sequence may go on from a state, or be a
    part of a longer one. Where none counts on, as at padding, nothing begins.
    """
    _, anew = _turns(1, length, positions, seq_idx)
    if seq_idx is None:
        anew = anew & torch.nn.functional.pad(~anew[:, 1:], (0, 1))
    begun = (anew[0].nonzero().flatten() + 1).tolist()
    wrong = sorted({*begun} - {*bounds.tolist()})
    if wrong:
        raise ValueError(
            "position_ids and seq_idx must begin anew where cu_seqlens do, or nowhere, got a "
            f"beginning at {wrong[0]} and cu_seqlens {bounds.tolist()}"
        )


def _turns(
    batch: int, length: int, positions: Tensor | None, seq_idx: Tensor | None
) -> tuple[Tensor, Tensor]:
    """What tells sequences apart `[B, T]`, and `[B, T - 1]`: where the next is of another one."""
    if seq_idx is not None:
        numbers = _as_rows("seq_idx", seq_idx, batch, length)
        return numbers, numbers[:, 1:] != numbers[:, :-1]
    assert positions is not None
    numbers = _as_rows("position_ids", positions, batch, length)
    return numbers, numbers[:, 1:] != numbers[:, :-1] + 1


def _starts(
    batch: int, length: int, mask: Tensor | None, positions: Tensor | None, seq_idx: Tensor | None
) -> Tensor | None:
    """`[N]` first positions of the sequences in all rows laid end to end; None for one a row."""
    real = None if mask is None else mask.bool()
    # Next to padding anything may stand: `generate` counts it as 0 or 1.
    beside = None if real is None else real[:, 1:] & real[:, :-1]
    numbers, anew = _turns(batch, length, positions, seq_idx)
    anew = anew if beside is None else anew & beside
    if not bool(anew.any()):
        return None
    first = torch.ones(batch, 1, dtype=torch.bool, device=anew.device)
    if real is not None:
        # Packed and padded: a stretch of padding is a sequence nobody reads.
        anew = anew | (real[:, 1:] != real[:, :-1])
    anew = torch.cat([first, anew], 1)
    if positions is not None and seq_idx is None:
        counted = anew if real is None else anew & real
        begun = numbers[counted]
        if bool((begun != begun[0]).any()):
            raise ValueError(
                "position_ids must count up by one, or begin each packed sequence anew at "
                f"{int(begun[0])}, got {_shown(numbers, counted)}"
            )
    return anew.flatten().nonzero().flatten()


# Which rows are packed is a question to the numbers: asked outside of a compiled graph. This is
# torch's lazy form of `torch.compiler.disable`, which loads the compiler for those who need none.
_starts_untraced = _disable_dynamo(_starts)


def _as_rows(name: str, x: Tensor, batch: int, length: int) -> Tensor:
    """`[B, T]` integers, of one row for all where one is given."""
    x = x[None] if x.dim() == 1 else x
    if x.dim() != 2 or x.shape[0] not in (1, batch) or x.shape[1] != length:
        raise ValueError(f"{name} must be [{batch}, {length}], got shape {tuple(x.shape)}")
    if x.is_floating_point() or x.dtype == torch.bool:
        raise TypeError(f"{name} must hold integers, got {x.dtype}")
    return x.expand(batch, length)


def _shown(numbers: Tensor, begins: Tensor) -> str:
    """The first beginning that is none: what stands there and before it."""
    flat, starts = numbers.flatten().tolist(), begins.flatten().nonzero().flatten().tolist()
    wrong = next(i for i in starts if flat[i] != flat[starts[0]])
    row, column = divmod(wrong, numbers.shape[1])
    before = f"{flat[wrong - 1]} then " if column else ""
    return f"{before}{flat[wrong]} at position {column} of row {row}"
