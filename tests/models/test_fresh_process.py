"""A saved folder in a process that never imported vort: its code says where the classes are."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.forks import output_of
from tests.models.cases import model_of
from vort.models import ByteTokenizer

AUTO = """
import sys
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoTokenizer, pipeline

folder, trust = sys.argv[1], {"trust_remote_code": True}
assert "vort" not in sys.modules
kinds = (AutoConfig, AutoModel, AutoModelForCausalLM, AutoTokenizer)
found = [kind.from_pretrained(folder, **trust) for kind in kinds]
print([f"{type(x).__module__}.{type(x).__name__}" for x in found])
say = pipeline("text-generation", folder, **trust)
print(len(say("hello", max_new_tokens=3)[0]["generated_text"]) > 5)
found[2].save_pretrained(folder + "/again")
found[3].save_pretrained(folder + "/again")
print(type(AutoModelForCausalLM.from_pretrained(folder + "/again")).__name__)
"""
SERVE = """
import os, sys
from transformers.cli.serving.model_manager import ModelManager

loaded = ModelManager(trust_remote_code=True, device="cpu").load_model_and_processor(sys.argv[1])
print([type(x).__name__ for x in loaded], flush=True)
os._exit(0)  # its timer would keep the process for minutes
"""
# What is remembered from a call in inference mode must serve one that trains.
TRAIN_LATER = """
import torch
from vort.models import VortConfig, VortForCausalLM

sizes = {"hidden_size": 32, "num_attention_heads": 2, "num_hidden_layers": 1, "sliding_window": 8}
ids = torch.randint(256, (2, 70))
mask, bounds = torch.ones_like(ids), torch.tensor([0, 30, 30, 140])
mask[0, :9] = 0
calls = [
    {"input_ids": ids},
    {"input_ids": ids, "attention_mask": mask},
    {"input_ids": ids.view(1, -1), "cu_seqlens": bounds},
]
for changes in ({}, {"memory": "gla"}, {"routing": "banks", "num_banks": 3}):
    model = VortForCausalLM(VortConfig(**sizes, **changes)).eval()
    with torch.inference_mode():
        for call in calls:
            model(**call, labels=call["input_ids"])
        model.generate(ids[:1], max_new_tokens=4, do_sample=False)
    model.train()
    for call in calls:
        model(**call, labels=call["input_ids"]).loss.backward()
    model.eval().generate(ids[:1], max_new_tokens=4, do_sample=False)
    print("trained", flush=True)
"""


def finished(folder: Path, code: str, name: str) -> str:
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_MODULES_CACHE": str(folder / "modules")}
    run = subprocess.run(
        [sys.executable, "-c", code, name],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
        timeout=300,
    )
    assert run.returncode == 0, run.stderr[-2000:]
    return run.stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("saved")
    model_of(vocab_size=259).save_pretrained(path)
    ByteTokenizer().save_pretrained(path)
    return path


def test_a_folder_says_where_its_classes_are(folder: Path) -> None:
    assert "from vort.models import" in (folder / "vort_auto.py").read_text()
    assert not list(folder.glob("modeling_*")), "a copy of the code would be another version's"


@pytest.mark.slow
def test_auto_classes_and_pipelines_need_no_import_by_hand(folder: Path) -> None:
    kinds, said, again = finished(folder, AUTO, str(folder)).splitlines()
    assert "vort.models.configuration_vort.VortConfig" in kinds
    assert "vort.models.modeling_vort.VortForCausalLM" in kinds
    assert "vort.models.tokenization_vort.ByteTokenizer" in kinds
    assert said == "True"
    assert again == "VortForCausalLM"


@pytest.mark.slow
def test_transformers_serve_loads_the_folder(folder: Path) -> None:
    pytest.importorskip("transformers.cli.serving.model_manager")
    assert "['VortForCausalLM', 'ByteTokenizer']" in finished(folder, SERVE, f"{folder}@main")


def test_a_process_that_began_in_inference_mode_may_train() -> None:
    assert output_of(TRAIN_LATER).count("trained") == 3
