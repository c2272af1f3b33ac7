"""A recorded step: the gradients of a plain one, and what it refuses."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("transformers")

from vort.models import RecordedStep, VortConfig, VortForCausalLM

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
