"""Heads dealt out to ranks by `tp_plan="auto"` are trained as on one device."""

from pathlib import Path
from typing import Any

import pytest

from tests.distributed import jobs
from tests.distributed.processes import run
from tests.distributed.test_context import check_equal
from vort.memories import LayerSettings
from vort.models.tensor_parallel import tensor_parallel_plan

SLOW = pytest.mark.slow
pytestmark = pytest.mark.skipif(
    tensor_parallel_plan(LayerSettings()) is None, reason="needs a Transformers that shards"
)
GROUPED = {"num_attention_heads": 4, "num_key_value_heads": 2, "use_entity": True}


@pytest.mark.parametrize(
    ("memory", "kind", "changes"),
    [
        ("vort", "rows", {"output_gate": True}),
        pytest.param("vort", "packed", GROUPED | {"attention_bias": True}, marks=SLOW),
        pytest.param("vort", "rows", {"learn_basis": True}, marks=SLOW),
        pytest.param("mixture", "padded", {}, marks=SLOW),
        pytest.param("exponential", "packed", {}, marks=SLOW),
        pytest.param("uniform_power_law", "rows", {}, marks=SLOW),
        pytest.param("gla", "rows", {}, marks=SLOW),
        pytest.param("softmax", "padded", {}, marks=SLOW),
        pytest.param("linear", "rows", {}, marks=SLOW),
        pytest.param("gla_scales", "rows", {}, marks=SLOW),
        pytest.param("mamba2", "rows", {}, marks=SLOW),
        pytest.param("gated_delta", "rows", {}, marks=SLOW),
        pytest.param("mixture", "rows", {"write_gain": "scale"}, marks=SLOW),
        pytest.param("vort", "rows", {"write_gain": "scale"}, marks=SLOW),
        pytest.param("uniform_power_law", "packed", {"order_per_head": True}, marks=SLOW),
        pytest.param("none", "rows", {"tie_word_embeddings": False}, marks=SLOW),
    ],
)
def test_heads_over_two_ranks_are_learnt_as_by_one_process(
    tmp_path: Path, memory: str, kind: str, changes: dict[str, Any]
) -> None:
    model = jobs.model_of(memory, **changes)
    model.save_pretrained(tmp_path)
    expected = jobs.train(model, jobs.batch_of(kind), jobs.STEPS)
    model.eval()
    options = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": None}
    text = model.generate(jobs.tokens(2, 20), **options)
    for found, cut, said in run(2, jobs.over_heads, str(tmp_path), kind):
        assert cut >= 14  # projections, gates, maps and MLPs of two layers are in parts
        check_equal(found, expected)
        assert said == text.tolist()


def test_heads_that_cannot_be_dealt_out_are_refused_in_a_line(tmp_path: Path) -> None:
    jobs.model_of("vort", num_attention_heads=4, num_key_value_heads=1).save_pretrained(tmp_path)
    with pytest.raises(RuntimeError, match="num_key_value_heads must be a multiple of the 2 ranks"):
        run(2, jobs.over_heads, str(tmp_path), "rows", 1)
