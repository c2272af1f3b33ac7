"""Forward and backward of a loss as one CUDA graph for each shape of a batch, replayed.

A small model, or a small batch of a large one, keeps a GPU busy for a fraction of the time that the
host takes to launch its kernels. A training step is the same launches for every batch of a shape:
recorded once, they cost the host one call.
"""

import gc
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from vort.ops.padding import not_looking

__all__ = ["RecordedStep"]

Batch = Mapping[str, Tensor]
# Steps of a shape before it is recorded: kernels are compiled and tuned, workspaces are taken.
BEFORE = 3
# Shapes that are recorded: each keeps its gradients, and takes a moment to record.
MOST = 16


@dataclass
class _Recording:
    """A graph, what it reads and what it writes."""

    graph: Any
    batch: dict[str, Tensor]
    loss: Tensor
    grads: list[Tensor | None]


class RecordedStep:
    """Loss and gradients of a batch: on a GPU recorded once, from then on replayed.

    Call it in the place of `loss = model(**batch).loss; loss.backward()`. The first steps of a
    shape are computed as usual; a shape that came several times is recorded, up to sixteen of them,
    and any other computed as usual. Weights may change in place, as optimisers change them; what
    changes more (a layer frozen, `eval()`, another autocast or horizon, weights put elsewhere)
    records anew. On a CPU nothing is recorded.

    A recording is for whatever mask comes: rows are computed with their padding, which `model` by
    itself would leave out on a GPU. Packed sequences are as many as they are, and computed as usual
    (with a warning, as all that cannot be recorded).

    Gradients are written, not added: they must be gone (`optimizer.zero_grad()`) before the next
    step. Recordings keep the memory of the largest step, and gradients for each shape. Hooks are
    Python, which a replay does not call: a model that has any is computed as usual. Those added
    after the recording are looked for on the model itself alone.

    Args:
        model: whose parameters get gradients.
        loss: from a batch to a scalar; `model(**batch).loss` by default. It must do the same for
            every batch of a shape, and not look at numbers on the way (`.item()`).

    >>> from torch import nn
    >>> layer = nn.Linear(3, 1)
    >>> step = RecordedStep(layer, lambda batch: layer(batch["x"]).square().mean())
    >>> loss = step(x=torch.ones(2, 3))
    >>> loss.requires_grad, layer.weight.grad.shape
    (False, torch.Size([1, 3]))
    """

    def __init__(self, model: nn.Module, loss: Callable[[Batch], Tensor] | None = None) -> None:
        self.model = model
        self.loss = self._of_model if loss is None else loss
        self._recordings: dict[tuple[Any, ...], _Recording] = {}
        self._times: Counter[tuple[Any, ...]] = Counter()
        self._setting: tuple[Any, ...] = ()
        self._pool: Any = None
        self._never = False
        self._stream: torch.cuda.Stream | None = None

    def _of_model(self, batch: Batch) -> Tensor:
        found: Tensor | None = self.model(**batch).loss
        if found is None:
            raise ValueError("the model returned no loss: give labels, or a `loss` of your own")
        return found

    def __call__(self, batch: Batch | None = None, /, **tensors: Tensor) -> Tensor:
        """The loss, detached; its gradients are in `.grad`.

        batch: tensors by name; or give them as arguments.
        """
        given: Batch = {**(batch or {}), **tensors}
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        if any(p.grad is not None for p in parameters):
            raise RuntimeError(
                "a recorded step writes gradients and adds to none: "
                "call optimizer.zero_grad() (set_to_none=True, the default) before it"
            )
        setting = self._settings(parameters)
        if setting != self._setting:
            self._forget()
            self._setting = setting
        shape = tuple((name, x.shape, x.dtype, x.device) for name, x in given.items())
        known = self._recordings.get(shape)
        if known is not None and not _is_hooked(self.model):
            return self._replay(known, given, parameters)
        self._times[shape] += 1
        if not self._may_record(given):
            return self._compute(given)
        if self._times[shape] > BEFORE:
            recording = self._record(given, parameters)
            if recording is None:
                return self._compute(given)
            self._recordings[shape] = recording
            return self._replay(recording, given, parameters)
        # By the kernels that will be recorded: compiled here, they need not be there.
        with not_looking():
            return self._compute(given)

    def _compute(self, batch: Batch) -> Tensor:
        """As usual, but on the stream of the recording.

        Autograd remembers the stream that a parameter's gradient was first asked for on. Were that
        another one, a recording would have to wait for it, and cannot.
        """
        if not batch or not all(x.is_cuda for x in batch.values()):
            return _backward(self.loss(batch))
        self._stream = torch.cuda.Stream() if self._stream is None else self._stream
        outside = torch.cuda.current_stream()
        self._stream.wait_stream(outside)
        with torch.cuda.stream(self._stream):
            loss = _backward(self.loss(batch))
        outside.wait_stream(self._stream)
        return loss

    @property
    def recorded(self) -> bool:
        """Whether there is a recording."""
        return bool(self._recordings)

    def _forget(self) -> None:
        """Give back what recordings keep."""
        self._recordings.clear()
        self._times.clear()
        self._pool = None

    def _settings(self, parameters: list[nn.Parameter]) -> tuple[Any, ...]:
        """All that recordings depend on, but for batches and the numbers of weights."""
        autocast = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
        places = [p.data_ptr() for p in parameters]
        horizon = getattr(getattr(self.model, "config", None), "horizon", None)
        return (self.model.training, horizon, *autocast, *places)

    def _may_record(self, batch: Batch) -> bool:
        if self._never or len(self._recordings) >= MOST:
            return False
        if not batch or not all(x.is_cuda for x in batch.values()):
            return False
        if not torch.is_grad_enabled() or torch.cuda.is_current_stream_capturing():
            return False
        distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
        alone = not distributed or torch.distributed.get_world_size() == 1
        return alone and not _is_hooked(*self.model.modules())

    def _record(self, batch: Batch, parameters: list[nn.Parameter]) -> _Recording | None:
        """The step of this shape as a graph; None, and a warning, where it cannot be one."""
        # What the steps before left in the allocator is of no use to a graph's own memory. That
        # is one for all: no two are replayed at once, and what is read afterwards is held.
        gc.collect()
        torch.cuda.empty_cache()
        self._pool = torch.cuda.graph_pool_handle() if self._pool is None else self._pool
        inputs = {name: x.clone() for name, x in batch.items()}
        graph = torch.cuda.CUDAGraph()
        # Other threads go on: one of them may be pinning the memory of batches to come.
        options: Any = {"stream": self._stream, "capture_error_mode": "thread_local"}
        outside = sys.exception()
        try:
            with not_looking(), torch.cuda.graph(graph, pool=self._pool, **options):
                loss = _backward(self.loss(inputs))
        except RuntimeError as problem:
            self._never = True
            for p in parameters:
                p.grad = None
            reason = str(_first(problem, outside)).strip().split("\n")[0]
            warnings.warn(
                f"the step cannot be recorded and is computed as usual: {reason}", stacklevel=3
            )
            return None
        grads = [p.grad for p in parameters]
        return _Recording(graph, inputs, loss, grads)

    def _replay(
        self, recording: _Recording, batch: Batch, parameters: list[nn.Parameter]
    ) -> Tensor:
        torch._foreach_copy_(list(recording.batch.values()), list(batch.values()))
        recording.graph.replay()
        for p, grad in zip(parameters, recording.grads, strict=True):
            p.grad = grad
        return recording.loss.clone()


def _backward(loss: Tensor) -> Tensor:
    """Gradients of a loss, and the loss without what they came from."""
    loss.backward()
    return loss.detach()


def _first(problem: BaseException, outside: BaseException | None) -> BaseException:
    """What went wrong first: the end of a recording complains of what broke it, too.

    outside: what was being dealt with when the recording began.
    """
    while problem.__context__ not in (None, outside):
        problem = problem.__context__
    return problem


def _is_hooked(*modules: nn.Module) -> bool:
    """Whether somebody wants to be called as these modules are, or as their gradients come."""
    for m in modules:
        if m._forward_hooks or m._forward_pre_hooks or m._backward_hooks or m._backward_pre_hooks:
            return True
        for p in m._parameters.values():
            if p is not None and (p._backward_hooks or p._post_accumulate_grad_hooks):
                return True
    return False
