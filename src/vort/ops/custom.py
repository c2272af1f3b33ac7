"""A forward and a backward written by hand, as one differentiable function: the wiring of all ops.

Two ways lead to the same pair of functions. Whatever traces (`torch.compile`, fake tensors) sees
two operators of torch.library, opaque and with known shapes: no graph break, and nothing unrolled.
Calls that nothing traces take an autograd function, which costs the host far less than an operator
does. Neither way has a second derivative: where one is asked for, and under torch.func, the same
is computed by plain PyTorch, for those ops that say how.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from inspect import Parameter as Argument
from inspect import Signature
from typing import Any, Generic, TypeAlias, TypeVar, get_type_hints

import torch
from torch import Tensor
from torch.nn import Parameter

from vort.ops.gpu.launcher import debugging, transformed

__all__ = ["Op", "Some", "Tensors", "checks_values", "custom_op", "traced", "without_autocast"]

Inputs = TypeVar("Inputs", bound=tuple[Any, ...])
Tensors: TypeAlias = tuple[Tensor | None, ...]
# The same for a reader who knows which are there.
Some: TypeAlias = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Op(Generic[Inputs]):
    """A differentiable function of its inputs: call it.

    `forward` and `backward` are what it was made of, for ops that are several others in a row.
    """

    call: Callable[[Inputs], tuple[Any, ...]]
    forward: Callable[[Inputs], Tensors]
    backward: Callable[[Inputs, Some, Some, Sequence[bool]], Tensors]

    def __call__(self, given: Inputs) -> tuple[Any, ...]:
        """The outputs that are shown."""
        return self.call(given)


def custom_op(
    name: str,
    inputs: type[Inputs],
    forward: Callable[[Inputs], Tensors],
    backward: Callable[[Inputs, Some, Some, Sequence[bool]], Tensors],
    shapes: Callable[[Inputs], Tensors] | None,
    *,
    gradients: tuple[str, ...],
    outputs: tuple[str, ...] = ("y",),
    shown: int = 1,
    saved: tuple[str, ...] = (),
    forget: tuple[str, ...] = (),
    plain: Callable[[Inputs], Tensors] | None = None,
) -> Op[Inputs]:
    """Return a function of `inputs` that gives the first `shown` outputs of `forward`.

    name: the operator's, say `vort::rms_norm_fused`; `vort::rms_norm_fused_backward` comes with it
    (a last `_forward` gives way).
    inputs: a NamedTuple of the arguments with their types: tensors that may be None first, the
    first of all being there always, then options. It is the one list of arguments.
    forward(inputs): all `outputs`, None where absent; what follows them the autograd function keeps
    for the backward too, and an operator, which would have to foretell its size, does not.
    backward(inputs, kept, grads, needs): what goes to the inputs named in `gradients`. kept: the
    outputs named in `saved`, then what followed the outputs; grads: one for each output shown, None
    where nothing came back (of a single output it always does); needs: whether each of `gradients`
    is wanted. What is not wanted may be None.
    shapes(inputs): uninitialised `outputs`, None where absent. Without it there is no operator: for
    what an operator may not do, such as hand out one tensor twice. Callers then take another way
    where something traces.
    forget: inputs the backward does without, and finds as None. A gradient to one of them has the
    shape and type of the first output's.
    plain(inputs): the outputs shown, by PyTorch's own ops, which can be differentiated any number
    of times and any way; memory need not matter. Not together with `forget`.
    """
    if plain is not None and forget:
        raise ValueError(f"plain needs all inputs, but {', '.join(forget)} would be forgotten")
    types = get_type_hints(inputs)
    names = list(types)
    tensors = sum(types[n] in (Tensor, Tensor | None) for n in names)
    if any(types[n] not in (Tensor, Tensor | None) for n in names[:tensors]):
        raise TypeError(f"tensors must come first in {inputs.__name__}, got {names}")
    wanted = [names.index(n) for n in gradients]
    kept_outputs = [outputs.index(n) for n in saved]
    kept_inputs = [None if n in forget else i for i, n in enumerate(names[:tensors])]

    def save(ctx: Any, inputs: tuple[Any, ...], outputs: Tensors, more: Tensors = ()) -> None:
        ctx.set_materialize_grads(shown == 1)
        ctx.options = inputs[tensors:]
        ctx.save_for_backward(
            *(None if i is None else inputs[i] for i in kept_inputs),
            *(outputs[i] for i in kept_outputs),
            *more,
        )

    def needs_of(ctx: Any) -> list[bool]:
        return [ctx.needs_input_grad[i] for i in wanted]

    def at_inputs(grads: Tensors, needs: list[bool]) -> Tensors:
        """One for each input."""
        spread: list[Tensor | None] = [None] * len(names)
        for i, grad, needed in zip(wanted, grads, needs, strict=True):
            if needed:
                spread[i] = grad
        return tuple(spread)

    def direct_forward(ctx: Any, *given: Any) -> Tensors:
        found = forward(inputs(*given))
        save(ctx, given, found, found[len(outputs) :])
        return found[:shown]

    def direct_backward(ctx: Any, *grads: Tensor | None) -> Tensors:
        held, needs = ctx.saved_tensors, needs_of(ctx)
        given = inputs(*held[:tensors], *ctx.options)
        if torch.is_grad_enabled():  # somebody means to differentiate what comes out
            return at_inputs(again(given, grads, needs), needs)
        return at_inputs(backward(given, held[tensors:], grads, needs), needs)

    def again(given: Inputs, grads: Tensors, needs: list[bool]) -> Tensors:
        """What `backward` returns, with a history."""
        if plain is None:
            raise RuntimeError(
                f"{name} has no second derivative: compute it under vort.ops.without_kernels()"
            )
        # One view for each input: the same tensor may be several of them.
        apart = [x if x is None else x.view_as(x) for x in given[:tensors]]
        arguments: Any = (*apart, *given[tensors:])
        found = plain(inputs(*arguments))
        reached = [
            (y, dy)
            for y, dy in zip(found, grads, strict=True)
            if y is not None and dy is not None and y.requires_grad
        ]
        asked = [apart[i] for i, needed in zip(wanted, needs, strict=True) if needed]
        ys, dys = [y for y, _ in reached], [dy for _, dy in reached]
        options = {"create_graph": True, "allow_unused": True}
        came = iter(torch.autograd.grad(ys, asked, dys, **options) if ys else [None] * len(asked))  # type: ignore[arg-type]
        return tuple(next(came) if needed else None for needed in needs)

    # a class of the op's name: autograd and profilers show it
    direct: Any = type(
        name.split("::")[-1],
        (torch.autograd.Function,),
        {
            "forward": staticmethod(direct_forward),
            "backward": staticmethod(direct_backward),
        },
    )

    # Python's own `apply` only adds a look at functorch's wrappers, argument by argument.
    quick = super(torch.autograd.Function, direct).apply

    def run(given: Inputs) -> tuple[Any, ...]:
        if plain is not None and transformed():
            return plain(given)
        if not torch.is_grad_enabled():
            return forward(given)[:shown]
        if torch._C._are_functorch_transforms_active():
            return direct.apply(*given)  # type: ignore[no-any-return]
        return quick(*given)  # type: ignore[no-any-return]

    if shapes is None:
        return Op(run, forward, backward)
    empty = shapes

    def run_forward(*given: Any) -> Any:
        return _filled(forward(inputs(*given))[: len(outputs)], *given)

    def fake_forward(*given: Any) -> Any:
        return _filled(empty(inputs(*given)), *given)

    operator = torch.library.custom_op(
        name, run_forward, mutates_args=(), schema=_schema(types, len(outputs))
    )
    operator.register_fake(fake_forward)

    def parts(given: tuple[Any, ...]) -> tuple[Inputs, Tensors, Tensors]:
        """Inputs, kept outputs and gradients out of what the backward operator is given."""
        grads, given = given[:shown], given[shown:]
        kept = _emptied(given[len(names) :])
        return inputs(*given[: len(names)]), kept, grads

    def run_backward(needs: list[bool], *given: Any) -> Any:
        arguments, kept, grads = parts(given)
        found = backward(arguments, kept, grads, needs)
        return _filled([x if n else None for x, n in zip(found, needs, strict=True)], *given)

    def fake_backward(needs: list[bool], *given: Any) -> Any:
        arguments, _, grads = parts(given)
        like = [grads[0] if names[i] in forget else arguments[i] for i in wanted]
        return _filled(
            [_dense_like(x) if n else None for x, n in zip(like, needs, strict=True)], *given
        )

    backward_types: dict[str, Any] = {"needs": list[bool]}
    backward_types |= {f"grad_{n}": Tensor | None for n in outputs[:shown]}
    backward_types |= types | dict.fromkeys(forget, Tensor | None)
    backward_types |= {f"saved_{n}": Tensor for n in saved}
    backward_operator = torch.library.custom_op(
        f"{name.removesuffix('_forward')}_backward",
        run_backward,
        mutates_args=(),
        schema=_schema(backward_types, len(gradients)),
    )
    backward_operator.register_fake(fake_backward)

    def differentiate(ctx: Any, *grads: Tensor | None) -> Tensors:
        held, needs = ctx.saved_tensors, needs_of(ctx)
        found = backward_operator(
            needs, *grads[:shown], *held[:tensors], *ctx.options, *held[tensors:]
        )
        return at_inputs(_tuple(found), needs)

    def setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        save(ctx, inputs, _tuple(output))

    operator.register_autograd(differentiate, setup_context=setup)

    def call(given: Inputs) -> tuple[Any, ...]:
        if traced(given[0]):
            return _emptied(_tuple(operator(*given))[:shown])
        return run(given)

    return Op(call, forward, backward)


def traced(x: Tensor) -> bool:
    """Whether something records what is called on x, and so must see an operator.

    What has no numbers is as if it were recorded.

    >>> traced(torch.zeros(1)), traced(torch.zeros(1, device="meta"))
    (False, True)
    """
    return torch.compiler.is_compiling() or type(x) not in (Tensor, Parameter) or x.is_meta


def checks_values(x: Tensor) -> bool:
    """Whether numbers where x is are looked at: on a CPU, and elsewhere under `VORT_DEBUG=1`.

    Reading one would stop a GPU's queue; and what is traced has none.

    >>> checks_values(torch.zeros(1)), checks_values(torch.zeros(1, device="meta"))
    (True, False)
    """
    return not traced(x) and (x.device.type == "cpu" or debugging())


def without_autocast(x: Tensor) -> AbstractContextManager[Any]:
    """A context in which autocast leaves sums in the precision they were given, where x is.

    Devices without numbers know of none; and where none is on, a context would only take a while.
    A graph has it always: it may be run where autocast is on.

    >>> with torch.autocast("cpu"), without_autocast(torch.zeros(1)):
    ...     (torch.ones(2, 2) @ torch.ones(2, 2)).dtype
    torch.float32
    """
    device = x.device.type
    if not torch.amp.is_autocast_available(device):
        return nullcontext()
    if traced(x) or torch.is_autocast_enabled(device):
        return torch.autocast(device, enabled=False)
    return nullcontext()


def _schema(types: dict[str, Any], outputs: int) -> str:
    """The schema of an operator of these arguments that returns so many tensors."""

    def prototype() -> None: ...

    arguments = [
        Argument(n, Argument.POSITIONAL_OR_KEYWORD, annotation=t) for n, t in types.items()
    ]
    returned = Tensor if outputs == 1 else tuple[(Tensor,) * outputs]  # type: ignore[misc]
    prototype.__signature__ = Signature(arguments, return_annotation=returned)  # type: ignore[attr-defined]
    return torch.library.infer_schema(prototype, mutates_args=())


def _filled(tensors: Sequence[Tensor | None], *beside: Any) -> Any:
    """What an operator may return: no None, so what is absent is empty and bool, as no output is.

    beside: arguments, the first there being a tensor on the device of them all.
    """
    near = next(x for x in beside if x is not None)
    found = [near.new_empty(0, dtype=torch.bool) if x is None else x for x in tensors]
    return found[0] if len(found) == 1 else tuple(found)


def _emptied(tensors: Sequence[Tensor]) -> Tensors:
    """The reverse of `_filled`."""
    return tuple(None if x.dtype is torch.bool else x for x in tensors)


def _tuple(x: Any) -> tuple[Any, ...]:
    return x if isinstance(x, tuple) else (x,)


def _dense_like(x: Any) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)
