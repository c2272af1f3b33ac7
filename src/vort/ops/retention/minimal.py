"""The parallel form in plain PyTorch, to read and to paste: autograd does the rest."""

import torch
from torch import Tensor
from torch.nn.functional import pad


def retention_minimal(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    write: Tensor,
    log_decay: Tensor,
    *,
    read: Tensor | None = None,
    normalizer: str = "decayed",
    include_self: bool = True,
    initial_state: tuple[Tensor, Tensor | None] | None = None,
    chunk_size: int = 64,
    eps: float = 1e-20,
) -> tuple[Tensor, tuple[Tensor, Tensor | None]]:
    """What `retention` returns for these arguments, final state always; all of one dtype.

    >>> q = k = v = write = torch.ones(1, 3, 1, 1)
    >>> o, _ = retention_minimal(q, k, v, write, torch.zeros(1), normalizer="none")
    >>> o.flatten().tolist()
    [1.0, 2.0, 3.0]
    """
    if normalizer not in ("decayed", "undecayed", "none"):
        raise ValueError(f"normalizer must be decayed, undecayed or none, got {normalizer!r}")
    G, b = initial_state or (None, None)
    read = torch.ones_like(write) if read is None else read
    o, G = _retrieve(q, k, v, write, log_decay, read, G, include_self, chunk_size)
    if normalizer == "none":
        return o, (G, None)
    if normalizer == "undecayed":  # one scale that never forgets
        write = read = torch.ones_like(write[..., :1])
        log_decay = torch.zeros_like(log_decay[..., :1])
    # the normaliser is what a value of 1 at every token would retrieve
    ones, past = torch.ones_like(v[..., :1]), None if b is None else b.unsqueeze(-1)
    n, past = _retrieve(q, k, ones, write, log_decay, read, past, include_self, chunk_size)
    return o / (n.abs() + eps), (G, past.squeeze(-1))


def _retrieve(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    write: Tensor,
    log_decay: Tensor,
    read: Tensor,
    G: Tensor | None,
    include_self: bool,
    C: int,
) -> tuple[Tensor, Tensor]:
    """The sums [B, T, H, V] before they are divided, and the state G [B, H, S, K, V] after them."""
    (B, T, H, K), V, S = q.shape, v.shape[-1], write.shape[-1]
    G = q.new_zeros(B, H, S, K, V) if G is None else G
    decay = log_decay.expand(H, S)
    # chunks of C tokens, [B, n, C, H, .]; the last one may hold fewer, and is padded with 0
    cut = [pad(x, (0, 0, 0, 0, 0, -T % C)).unflatten(1, (-1, C)) for x in (q, k, v, write, read)]
    q, k, v, write, read = cut
    at = torch.arange(C, device=q.device)
    length = (T - C * torch.arange(q.shape[1], device=q.device)).clamp_max(C)

    # inside a chunk: one masked matrix, (q k^T) * W
    lag = at[:, None] - at  # [t, i]
    seen = lag >= (0 if include_self else 1)
    aged = torch.exp(decay * lag.clamp_min(0)[..., None, None]) * seen[..., None, None]
    W = torch.einsum("bnths,tihs,bnihs->bnhti", read, aged, write)
    o = torch.einsum("bnhti,bnihv->bnthv", torch.einsum("bnthk,bnihk->bnhti", q, k) * W, v)

    # between chunks: S states, each read by what is left of it at t, and written to by what is
    # left of i at the chunk's end
    since = torch.exp(decay * (at + 1)[:, None, None])
    until = torch.exp(decay * (length[:, None] - 1 - at).clamp_min(0)[..., None, None])
    added = torch.einsum("bnihs,bnihk,bnihv->bnhskv", write * until, k, v)
    before = []
    for n in range(q.shape[1]):
        before.append(G)
        G = torch.exp(decay * length[n])[..., None, None] * G + added[:, n]
    if before:
        o = o + torch.einsum("bnths,bnthk,bnhskv->bnthv", read * since, q, torch.stack(before, 1))
    return o.flatten(1, 2)[:, :T], G
