"""A saved model without Hugging Face: the same numbers, or none; and nothing is loaded for it."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from vort.models import ByteTokenizer, VortConfig, VortForCausalLM, VortSession
from vort.pretrained import pretrained_path
from vort.sessions import BareModel, Bytes, Session, read_bare

TEXT = "It was the best of times, "


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = VortForCausalLM(VortConfig(**sizes, sliding_window=8, initializer_range=0.2))
    model.save_pretrained(tmp_path / "model")
    ByteTokenizer().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def logits_of(session: Session) -> list[torch.Tensor]:
    """After a text read at once, and after every token that is written then."""
    session.feed(TEXT)
    tokens = session.generate(20, temperature=0.8, stop=())
    return [session.logits, *(session.logits for _ in tokens)]


def test_its_numbers_are_those_of_the_model_to_the_bit(folder: Path) -> None:
    for place in (folder, pretrained_path()):
        bare = read_bare(place)
        assert bare is not None
        model = VortForCausalLM.from_pretrained(place).eval()
        ours = logits_of(Session(bare, Bytes(), seed=1))
        theirs = logits_of(VortSession(model, ByteTokenizer(), seed=1))
        assert all(torch.equal(x, y) for x, y in zip(ours, theirs, strict=True))


def test_steps_of_the_shipped_model_are_what_it_says_when_it_is_called() -> None:
    bare = read_bare(pretrained_path())
    assert bare is not None
    session = Session(bare, Bytes(), seed=1)
    session.feed("It was a dark")
    written = "".join(session.stream(150, temperature=0.8))
    whole = Session(bare, Bytes())
    whole.feed("It was a dark" + written)
    torch.testing.assert_close(session.logits, whole.logits, atol=1e-3, rtol=1e-3)


def test_the_texts_tokens_are_those_of_the_tokenizer() -> None:
    theirs = ByteTokenizer()
    for text in ("né <eos>", "", "\ud7ff 漢"):
        ids = Bytes()(text)["input_ids"]
        assert ids == theirs(text, add_special_tokens=False)["input_ids"]
        cut = [257, *ids[:-1], 258]
        assert Bytes().decode(cut) == theirs.decode(cut, skip_special_tokens=True)


def edit(name: str, **changes: Any) -> Callable[[Path], None]:
    def run(folder: Path) -> None:
        saved = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps({**saved, **changes}))

    return run


def weights(change: Callable[[dict[str, torch.Tensor]], Any]) -> Callable[[Path], None]:
    def run(folder: Path) -> None:
        held = load_file(folder / "model.safetensors")
        change(held)
        save_file(held, folder / "model.safetensors")

    return run


@pytest.mark.parametrize(
    "spoil",
    [
        edit("config.json", layer_memories=["vort", "softmax"]),
        edit("config.json", layer_settings=[{"num_scales": 4}, {}]),
        edit("config.json", dtype="bfloat16"),
        edit("config.json", quantization_config={"bits": 4}),
        edit("config.json", sliding_windw=3),
        edit("config.json", order_min=7),
        edit("config.json", vocab_size=300),
        edit("tokenizer_config.json", tokenizer_class="LlamaTokenizer"),
        edit("tokenizer_config.json", split_special_tokens=False),
        edit("tokenizer_config.json", added_tokens_decoder={"300": {"content": "<me>"}}),
        weights(lambda held: held.popitem()),
        weights(lambda held: held.update(more=torch.zeros(1))),
        weights(lambda held: held["model.norm.weight"].fill_(float("nan"))),
        lambda folder: (folder / "model.safetensors").write_bytes(b"\x08" + bytes(20)),
        lambda folder: (folder / "config.json").write_text("[]"),
        lambda folder: (folder / "config.json").unlink(),
        lambda folder: (folder / "model.safetensors").unlink(),
    ],
)
def test_what_is_not_plain_is_left_to_hugging_face(
    folder: Path, spoil: Callable[[Path], None]
) -> None:
    assert isinstance(read_bare(folder), BareModel)
    spoil(folder)
    assert read_bare(folder) is None


def test_a_pipe_is_not_read(folder: Path) -> None:
    (folder / "generation_config.json").unlink()
    assert isinstance(read_bare(folder), BareModel)
    os.mkfifo(folder / "generation_config.json")
    assert read_bare(folder) is None


CHECK = """
import sys
from vort.cli import app
app(["generate", "--prompt", "It was a dark", "--max-new-tokens", "3"], standalone_mode=False)
slow = ["transformers", "torch._dynamo", "scipy.special", "matplotlib", "sympy"]
print([name for name in slow if name in sys.modules])
"""


def test_vort_generate_with_the_shipped_model_loads_nothing_slow() -> None:
    done = subprocess.run([sys.executable, "-c", CHECK], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
