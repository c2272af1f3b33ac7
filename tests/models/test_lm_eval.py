"""Scoring as evaluation harnesses do it: log-likelihoods of continuations in padded batches."""

import pytest
import torch

from tests.models.cases import model_of, tokens


@pytest.mark.parametrize("side", ["left", "right"])
@torch.no_grad()
def test_log_likelihoods_do_not_depend_on_the_batch(side: str) -> None:
    model = model_of()
    requests = [tokens(1, length, seed=length)[0] for length in (4, 9, 23, 40)]
    longest = max(len(request) for request in requests)
    ids = torch.zeros(len(requests), longest, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, request in enumerate(requests):
        place = slice(longest - len(request), None) if side == "left" else slice(len(request))
        ids[row, place], mask[row, place] = request, 1
    logits = model(ids, attention_mask=mask).logits.log_softmax(-1)
    for row, request in enumerate(requests):
        alone = model(request[None]).logits.log_softmax(-1)[0]
        together = logits[row, mask[row].bool()]
        torch.testing.assert_close(together, alone, atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_lm_eval_scores_a_saved_model(tmp_path) -> None:
    pytest.importorskip("lm_eval", reason="lm_eval is not installed")
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    from vort.models import ByteTokenizer

    model_of(vocab_size=259).save_pretrained(tmp_path)
    ByteTokenizer().save_pretrained(tmp_path)
    harness = HFLM(pretrained=str(tmp_path), device="cpu", batch_size=2)
    pairs = [("the cat", " sat"), ("a", " b"), ("one two three", " four")]
    requests = [Instance("loglikelihood", {}, pair, index) for index, pair in enumerate(pairs)]
    together = [score for score, _ in harness.loglikelihood(requests)]
    alone = [harness.loglikelihood([request])[0][0] for request in requests]
    assert together == pytest.approx(alone, abs=1e-3)
    assert all(score < 0 for score in together)
