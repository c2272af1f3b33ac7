"""Scoring as evaluation harnesses do it: log-likelihoods of continuations in padded batches."""

import json
import subprocess
import sys

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


TASK = """
task: tiny
dataset_path: json
dataset_kwargs:
  data_files:
    test: {folder}/tiny.jsonl
  cache_dir: {folder}/cache
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: choices
doc_to_target: answer
metric_list:
  - metric: acc
"""
# The command line of lm_eval as it comes: nobody imports vort.
COMMAND = "from lm_eval.__main__ import cli_evaluate; cli_evaluate()"


@pytest.mark.slow
def test_lm_eval_runs_a_local_task_on_a_saved_model(tmp_path) -> None:
    for package in ("lm_eval", "accelerate", "datasets"):
        pytest.importorskip(package, reason=f"{package} is not installed")
    from vort.models import ByteTokenizer

    model_of(vocab_size=259).save_pretrained(tmp_path)
    ByteTokenizer().save_pretrained(tmp_path)
    lines = [
        {"question": "one two " * length, "choices": ["three", "four"], "answer": length % 2}
        for length in range(1, 6)
    ]
    (tmp_path / "tiny.jsonl").write_text("\n".join(json.dumps(line) for line in lines))
    (tmp_path / "tiny.yaml").write_text(TASK.format(folder=tmp_path))
    options = {
        "model": "hf",
        "model_args": f"pretrained={tmp_path},trust_remote_code=True",
        "tasks": "tiny",
        "include_path": str(tmp_path),
        "device": "cpu",
        "batch_size": "2",
    }
    arguments = [part for name, value in options.items() for part in (f"--{name}", value)]
    finished = subprocess.run(
        [sys.executable, "-c", COMMAND, *arguments], capture_output=True, text=True, check=False
    )
    assert finished.returncode == 0, finished.stderr[-2000:]
    assert "tiny" in finished.stdout
    assert "acc" in finished.stdout
