"""A recorded step: the gradients of a plain one, and what it refuses."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("transformers")

from vort.models import RecordedStep, VortConfig, VortForCausalLM
from vort.ops.padding import not_looking

SIZES: dict[str, Any] = {
    "vocab_size": 32, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
    "horizon": 256,
}  # fmt: skip


def model(**options: Any) -> VortForCausalLM:
    torch.manual_seed(0)
    return VortForCausalLM(VortConfig(**SIZES, **options)).train()


def batch(length: int = 40, device: str = "cpu", seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(32, (2, length), generator=generator).to(device)
    return {"input_ids": ids, "labels": ids}


def gradients(subject: nn.Module) -> dict[str, torch.Tensor]:
    return {n: p.grad.clone() for n, p in subject.named_parameters() if p.grad is not None}


def test_on_a_cpu_it_is_a_plain_step() -> None:
    subject = model()
    step = RecordedStep(subject)
    for _ in range(6):
        loss = step(batch())
        found = gradients(subject)
        subject.zero_grad()
        plain = subject(**batch()).loss
        plain.backward()
        assert torch.equal(loss, plain.detach())
        assert not loss.requires_grad
        assert found.keys() == gradients(subject).keys()
        assert all(torch.equal(x, found[name]) for name, x in gradients(subject).items())
        subject.zero_grad()
    assert not step.recorded


def test_gradients_that_are_there_are_refused() -> None:
    subject = model()
    step = RecordedStep(subject)
    step(**batch())
    with pytest.raises(RuntimeError, match="zero_grad"):
        step(**batch())
    subject.zero_grad(set_to_none=False)
    with pytest.raises(RuntimeError, match="set_to_none=True"):
        step(**batch())


def test_a_model_without_a_loss_is_refused() -> None:
    with pytest.raises(ValueError, match="labels"):
        RecordedStep(model())(input_ids=batch()["input_ids"])


def trained(subject: VortForCausalLM, recorded: bool, steps: int = 12) -> list[float]:
    optimizer = torch.optim.AdamW(subject.parameters(), lr=1e-3, fused=True)
    step = RecordedStep(subject)
    losses = []
    for number in range(steps):
        given = batch(64, "cuda", number)
        if recorded:
            losses.append(step(given).item())
        else:
            loss = subject(**given).loss
            loss.backward()
            losses.append(loss.item())
        nn.utils.clip_grad_norm_(subject.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    assert step.recorded == recorded
    return losses


def padded(device: str = "cpu", seed: int = 0) -> dict[str, torch.Tensor]:
    """Rows of all tokens, of some after padding, and of some before it."""
    found = batch(40, device, seed)
    ids = torch.cat([found["input_ids"], found["input_ids"][:1]])
    mask = torch.ones_like(ids)
    mask[1, : 5 + seed], mask[2, 17 + seed :] = 0, 0
    labels = ids.masked_fill(mask == 0, -100)
    return {"input_ids": ids, "labels": labels, "attention_mask": mask}


class Looks(TorchDispatchMode):
    """Counts how often numbers are asked for, or shapes that depend on them."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.count += str(function).startswith(("aten._local_scalar_dense", "aten.nonzero"))
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("memory", ["vort", "mixture", "gla", "softmax", "none"])
def test_a_mask_is_not_looked_at_in_a_step_that_is_to_be_recorded(memory: str) -> None:
    subject = model(memory=memory)
    for given in (padded(), batch() | {"attention_mask": torch.ones(2, 40)}):
        wanted_loss = subject(**given).loss
        wanted_loss.backward()
        wanted = gradients(subject)
        subject.zero_grad()
        with Looks() as without:  # on a CPU some look at their rates and at how large gates are
            subject(
                **{name: x for name, x in given.items() if name != "attention_mask"}
            ).loss.backward()
        subject.zero_grad()
        with not_looking(), Looks() as looks:
            loss = subject(**given).loss
            loss.backward()
        assert looks.count == without.count
        torch.testing.assert_close(loss, wanted_loss)
        found = gradients(subject)
        for name, gradient in wanted.items():
            torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-6)
        subject.zero_grad()
    with Looks() as looks:
        subject(**padded()).loss.backward()
    assert looks.count > without.count


def test_what_broke_a_recording_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def broken(*args: Any, **options: Any) -> Iterator[None]:
        try:
            yield
        finally:
            raise RuntimeError("failed due to a previous error")

    monkeypatch.setattr(torch.cuda, "graph", broken)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", object)

    def loss(given: Any) -> torch.Tensor:
        raise RuntimeError("a number was asked for\nand more")

    layer = nn.Linear(1, 1)
    step = RecordedStep(layer, loss)
    try:
        raise KeyError("of no concern")
    except KeyError:
        with pytest.warns(UserWarning, match="as usual: a number was asked for$"):
            assert step._record({}, list(layer.parameters())) is None


@pytest.mark.gpu
@pytest.mark.parametrize("memory", ["vort", "mixture", "softmax"])
def test_padded_batches_are_recorded_whatever_their_padding(memory: str) -> None:
    subject = model(memory=memory).cuda()
    step = RecordedStep(subject)
    for number in range(8):
        given = padded("cuda", number)
        subject(**given).loss.backward()
        wanted = gradients(subject)
        subject.zero_grad()
        step(given)
        for name, gradient in gradients(subject).items():
            torch.testing.assert_close(gradient, wanted[name], rtol=1e-3, atol=1e-5)
        subject.zero_grad()
    assert step.recorded


@pytest.mark.gpu
@pytest.mark.parametrize("memory", ["vort", "mixture", "softmax"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_recorded_run_is_the_plain_run(memory: str, dtype: torch.dtype) -> None:
    one = model(memory=memory).to("cuda", dtype)
    two = copy.deepcopy(one)
    tolerance = 1e-4 if dtype == torch.float32 else 2e-2
    assert trained(one, True) == pytest.approx(trained(two, False), rel=tolerance)
    for a, b in zip(one.parameters(), two.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


@pytest.mark.gpu
def test_what_changes_is_recorded_anew_or_computed_as_usual() -> None:
    subject = model().cuda()
    step = RecordedStep(subject)

    def check(given: dict[str, torch.Tensor]) -> None:
        loss = step(given)
        found = gradients(subject)
        subject.zero_grad()
        plain = subject(**given).loss
        plain.backward()
        assert loss.item() == pytest.approx(plain.item(), rel=1e-4)
        assert found.keys() == gradients(subject).keys()
        for name, x in gradients(subject).items():
            torch.testing.assert_close(found[name], x, rtol=1e-3, atol=1e-5)
        subject.zero_grad()

    for seed in range(6):
        check(batch(64, "cuda", seed))
    assert step.recorded
    check(batch(48, "cuda"))  # another shape, then the recorded one again
    check(batch(64, "cuda", 7))
    subject.model.embed_tokens.requires_grad_(False)
    for seed in range(6):
        check(batch(64, "cuda", seed))
    subject.set_horizon(1024)
    for seed in range(6):
        check(batch(64, "cuda", seed))
    with torch.autocast("cuda", torch.bfloat16):
        for seed in range(6):
            loss = step(batch(64, "cuda", seed))
            subject.zero_grad()
            plain = subject(**batch(64, "cuda", seed)).loss
            assert loss.item() == pytest.approx(plain.item(), rel=1e-2)
            del plain
    calls: list[int] = []
    subject.register_forward_hook(lambda *given: calls.append(1))
    for seed in range(6):
        step(batch(64, "cuda", seed))
        subject.zero_grad()
    assert len(calls) == 6


@pytest.mark.gpu
def test_several_shapes_have_a_recording_each() -> None:
    """Mixed, in one memory, with weights that change: as the plain run goes."""
    one = model().cuda()
    two = copy.deepcopy(one)
    step = RecordedStep(one)
    optimizers = [torch.optim.AdamW(x.parameters(), lr=1e-3, fused=True) for x in (one, two)]
    for number in range(40):
        given = batch((64, 48, 16, 80)[number % 4], "cuda", number)
        loss, plain = step(given), two(**given).loss
        plain.backward()
        assert loss.item() == pytest.approx(plain.item(), rel=1e-3)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert len(step._recordings) == 4
    for a, b in zip(one.parameters(), two.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)


@pytest.mark.gpu
def test_no_more_shapes_are_recorded_than_there_is_room_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from vort.models import training

    monkeypatch.setattr(training, "MOST", 2)
    subject = model().cuda()
    step = RecordedStep(subject)
    for number in range(30):
        step(batch((64, 48, 16)[number % 3], "cuda", number))
        subject.zero_grad()
    assert len(step._recordings) == 2


@pytest.mark.gpu
def test_a_step_that_looks_at_numbers_is_computed_as_usual() -> None:
    layer = nn.Linear(4, 1).cuda()

    def loss(given: Any) -> torch.Tensor:
        y = layer(given["x"]).square().mean()
        return y if y.item() < 1e9 else 2 * y

    step = RecordedStep(layer, loss)

    def run() -> None:
        for _ in range(5):
            step(x=torch.ones(2, 4, device="cuda"))
            assert layer.weight.grad is not None
            layer.zero_grad()

    with pytest.warns(UserWarning, match="cannot be recorded"):
        run()
    assert not step.recorded
