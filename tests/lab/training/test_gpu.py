"""Training on a GPU: bf16 where it has it, masters in float32, checkpoints from there."""

import math
from pathlib import Path

import pytest
import torch

from tests.lab.training.tiny import quick
from vort.lab.tasks import ZipfRetrieval, embed_parts
from vort.lab.training import evaluate, train

pytestmark = pytest.mark.gpu

TASK = ZipfRetrieval(length=512, pairs=16, keys=32, bounds=(32,), test_sequences=50)


def model() -> torch.nn.Module:
    models = pytest.importorskip("vort.models")
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = models.VortConfig(vocab_size=TASK.vocab_size, horizon=512, **sizes)
    found = models.VortForCausalLM(config)
    embed_parts(found, TASK)
    return found


def test_bf16_is_used_and_weights_stay_in_float32() -> None:
    seen = set()
    subject = model()
    head = subject.get_output_embeddings()
    head.register_forward_hook(lambda module, inputs, output: seen.add(output.dtype))
    found = train(subject, TASK, quick(steps=20, log_every=5))
    assert torch.bfloat16 in seen
    assert {parameter.dtype for parameter in subject.parameters()} == {torch.float32}
    assert all(math.isfinite(entry["loss"]) for entry in found.history)
    assert found.history[-1]["loss"] < found.history[0]["loss"]
    assert found.tokens_per_second > 0


def test_a_run_resumes_close_to_where_it_would_have_gone(tmp_path: Path) -> None:
    config = quick(steps=10, checkpoint_every=5, keep_checkpoints=2, precision="float32")
    whole = model()
    wanted = train(whole, TASK, config, directory=tmp_path)
    (tmp_path / "step-00000010").rename(tmp_path / "aside")
    again = model()
    found = train(again, TASK, config, directory=tmp_path, resume=True)
    assert found.test["all"]["bits"] == pytest.approx(wanted.test["all"]["bits"], abs=0.02)
    assert evaluate(again, TASK, "test")["all"]["count"] == 50 * 16


# With processes that draw batches, whose memory a thread pins while a step is recorded.
@pytest.mark.parametrize(("precision", "workers"), [("bf16", 2), ("float32", 0)])
def test_recorded_steps_train_as_plain_ones_do(
    precision: str, workers: int, recwarn: pytest.WarningsRecorder
) -> None:
    losses = []
    for recorded in (False, True):
        config = quick(
            steps=16, log_every=1, precision=precision, workers=workers, record_steps=recorded
        )
        found = train(model(), TASK, config)
        losses.append([entry["loss"] for entry in found.history if "loss" in entry])
    assert not [w for w in recwarn if "recorded" in str(w.message)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-3 if precision == "float32" else 2e-2)
