"""Models that come with the package: found by name; and the one that does, if it is there."""

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from tools.publish_model import MOST_BYTES, table

from vort.models import ByteTokenizer, VortForCausalLM, VortSession
from vort.pretrained import DEFAULT, pretrained_names, pretrained_path

# Half of what stands in an English text, near enough.
COMMON = re.findall(
    r"\w+",
    "the of and to a in that he was it his i with as had is for her you not be at on she but him "
    "my have said they all this by which me so there were from no one what if or an would them "
    "when been their will who up do out could then more are some into your we has very now about",
)


def test_models_are_found_by_name_and_a_slip_is_told_which_there_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vort.pretrained.FOLDER", tmp_path)
    with pytest.raises(FileNotFoundError, match=r"no model 'books-6m'; none comes with it"):
        pretrained_path()
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
    (tmp_path / "__pycache__").mkdir()
    assert pretrained_names() == ["one", "two"]
    assert pretrained_path("two") == tmp_path / "two"
    with pytest.raises(FileNotFoundError, match=r"no model 'tow'; those that .*: one, two"):
        pretrained_path("tow")
    with pytest.raises(FileNotFoundError, match="no model"):
        pretrained_path("../two")


@pytest.fixture(scope="module")
def shipped() -> Path:
    if DEFAULT not in pretrained_names():
        pytest.skip(f"{DEFAULT} is not in this tree")
    return pretrained_path()


@pytest.fixture(scope="module")
def model(shipped: Path) -> VortForCausalLM:
    found: VortForCausalLM = VortForCausalLM.from_pretrained(shipped)
    return found.eval()


def test_it_is_small_and_its_matrices_are_in_bfloat16(shipped: Path) -> None:
    assert sum(path.stat().st_size for path in shipped.iterdir()) <= MOST_BYTES
    with safe_open(shipped / "model.safetensors", "pt") as file:
        for name in file.keys():  # noqa: SIM118  # no dict
            x = file.get_tensor(name)
            assert x.dtype == (torch.bfloat16 if x.ndim > 1 else torch.float32), name


def test_its_card_says_how_it_was_trained_and_what_it_scores(shipped: Path) -> None:
    card, record = (shipped / "README.md").read_text(), (shipped / "scores.json").read_text()
    found = json.loads(record)
    assert table(found["scores"]) in card
    assert "vort train --out run --text" in card
    assert "public domain" in card
    assert not re.search(r"(?<![\w.])/(home|root|tmp|work|data|mnt)\b", card + record)


def test_the_readme_says_what_it_scores(shipped: Path) -> None:
    readme = Path(__file__).parents[1].joinpath("README.md").read_text()
    words = readme.partition("test books take")[2].partition("beyond 16,384")[0]
    scores = json.loads((shipped / "scores.json").read_text())["scores"]["test"]
    wanted = [f"{scores[place]['bits']:.3f}" for place in ("2048-4096", ">=16384")]
    assert re.findall(r"\d\.\d{3}", words) == wanted


def test_it_is_what_was_scored(shipped: Path, model: VortForCausalLM) -> None:
    about = json.loads((shipped / "scores.json").read_text())
    assert sum(x.numel() for x in model.parameters()) == about["parameters"]
    assert about["scores"]["test"]["all"]["bits"] < 2


@torch.no_grad()
def test_it_has_read_books(model: VortForCausalLM) -> None:
    text = (
        "When the old gentleman had finished his letter he rose from the table, looked for some "
        "time out of the window, and said that he should not go to London before the spring."
    )
    ids = torch.tensor([ByteTokenizer()(text)["input_ids"]])
    bits = float(model(input_ids=ids, labels=ids).loss) / torch.tensor(2.0).log()
    assert bits < 2.4


def test_it_writes_words(model: VortForCausalLM) -> None:
    session = VortSession(model, ByteTokenizer(), seed=0)
    session.feed("It was a dark")
    written = "".join(session.stream(400, temperature=0.8, top_p=0.95))
    words = re.findall(r"[a-z]+", written.lower())
    assert sum(word in COMMON for word in words) >= 0.3 * len(words)
