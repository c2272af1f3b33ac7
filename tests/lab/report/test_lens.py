"""What the lens puts on its page: the model's own numbers, and any text inert."""

import json
import re
import subprocess
import sys
import unicodedata
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from tests.test_cli import plain
from vort.cli import app
from vort.lab.commands import load_model
from vort.lab.commands.lens import _page
from vort.lab.report.lens.codes import LogCode, LogRows, _knots, logits_of, softmaxes
from vort.lab.report.lens.page import LensText, cells_of, lens_page
from vort.lab.report.lens.view import LayerView, TextView, view_text
from vort.lab.report.standalone import visible
from vort.memories.interface import MemoryInputs
from vort.models import ByteTokenizer, VortConfig, VortForCausalLM

runner = CliRunner(env={"TERM": "dumb"})
MEMORIES = ["vort", "uniform_power_law", "exponential", "mixture", "linear"]


def model_of(**changes: object) -> VortForCausalLM:
    torch.manual_seed(0)
    settings: dict[str, object] = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "sliding_window": 8,
        "horizon": 500,
        "initializer_range": 0.2,
    }
    return VortForCausalLM(VortConfig(**{**settings, **changes})).eval()


def view_of(text: str, **changes: object) -> tuple[VortForCausalLM, TextView]:
    model = model_of(**changes)
    return model, view_text(model, torch.tensor([list(text.encode())]))


@pytest.mark.parametrize(
    "changes",
    [
        *({"memory": name} for name in MEMORIES),
        {"routing": "banks", "num_banks": 3, "num_scales": 4},
        {"normalizer": "undecayed"},
        {"normalizer": "none"},
        {"include_self": False},
        {"feature_map": "identity"},
        {"feature_map": "hedgehog"},
        {"num_key_value_heads": 1, "write_gate": False, "read_weights": False},
    ],
    ids=str,
)
def test_weights_of_the_view_give_what_the_memory_retrieves(changes: dict[str, object]) -> None:
    model = model_of(**changes)
    seen: list[tuple[MemoryInputs, torch.Tensor]] = []

    def keep(module: object, args: tuple[MemoryInputs], output: object) -> None:
        seen.append((args[0], output.output))  # type: ignore[attr-defined]

    for block in model.model.layers:
        block.self_attn.memory.register_forward_hook(keep)
    ids = torch.randint(0, 256, (1, 90))
    view = view_text(model, ids)
    for layer, (inputs, output) in zip(view.layers, seen, strict=True):
        values = inputs.with_all_heads().v[0]
        for head in range(2):
            for position in (0, 1, 45, 89):
                weights = torch.from_numpy(layer.weights(head, position).sum(1))
                expected = output[0, position, head]
                got = weights @ values[: position + 1, head]
                torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-3)


def test_surprise_is_the_models_loss() -> None:
    text = "a text with some words in it"
    model, view = view_of(text)
    ids = torch.tensor([list(text.encode())])
    loss = model(ids, labels=ids).loss.item() / np.log(2)
    assert np.isnan(view.surprise[0])
    assert view.surprise[1:].mean() == pytest.approx(loss, rel=1e-5)


@pytest.mark.parametrize("memory", ["softmax", "gla", "none"])
def test_memories_without_a_kernel_are_refused_by_name(memory: str) -> None:
    with pytest.raises(ValueError, match=f"retention kernel.*memory {memory}"):
        view_of("text", memory=memory)


@given(st.text(max_size=60))
def test_cells_cover_text_and_tokens_once(text: str) -> None:
    text = text.encode(errors="replace").decode()
    offsets = ByteTokenizer()(text, return_offsets_mapping=True)["offset_mapping"]
    cells = cells_of(text, offsets)
    assert "".join(text[cell.start : cell.end] for cell in cells) == text
    tokens = [token for cell in cells for token in range(cell.first, cell.last + 1)]
    assert tokens == list(range(len(offsets)))


def test_tokens_that_share_or_lack_characters_find_their_cells() -> None:
    offsets = [(0, 0), (0, 3), (4, 6), (5, 7)]
    cells = [(cell.shown, cell.first, cell.last) for cell in cells_of("the cat", offsets)]
    assert cells == [("◇", 0, 0), ("the", 1, 1), (" cat", 2, 3)]


@given(st.text())
def test_nothing_visible_hides_or_moves_text(text: str) -> None:
    shown = visible(text)
    categories = {unicodedata.category(character) for character in shown} - {"Cc"}
    assert not categories & {"Cf", "Cs", "Co", "Cn", "Zl", "Zp"}
    assert {character for character in shown if unicodedata.category(character) == "Cc"} <= {
        "\n",
        "\t",
    }


@pytest.mark.parametrize("bits", [8, 12])
@pytest.mark.parametrize("signed", [False, True])
def test_codes_keep_their_precision(bits: int, signed: bool) -> None:
    draw = np.random.default_rng(0)
    rows = np.exp(draw.uniform(-13, 0, (40, 33))).astype(np.float32) * 1e-9
    rows[:, 0] = 1e-9
    rows[3] = 0
    if signed:
        rows *= draw.choice([-1, 1], rows.shape).astype(np.float32)
    code = LogCode(bits, signed)
    decoded = code.decode(code.encode(rows), 33)
    assert (np.abs(decoded - rows) <= code.precision * np.abs(rows)).all()
    assert code.precision < {8: 0.06, 12: 0.0035}[bits]


@pytest.mark.parametrize("step", [0.01, 0.25])
@pytest.mark.parametrize("felt", [False, True])
def test_rows_of_logarithms_are_off_by_about_a_step(step: float, felt: bool) -> None:
    draw = np.random.default_rng(0)
    mixed = draw.normal(size=(12, 12)) * np.geomspace(3, 0.01, 12)
    rows = (draw.normal(size=(400, 12)) @ mixed + 5).astype(np.float32)
    root = draw.normal(size=(12, 12))
    code = LogRows(step)
    off = code.decode(code.encode(rows, root @ root.T if felt else None)) - rows
    # Steps are uniform: a twelfth of one, squared, for each of twelve axes.
    assert np.abs(off).max() < 4 * step
    assert np.sqrt((off**2).mean()) < (1.0 if felt else 0.35) * step


def test_what_is_felt_is_kept_more_finely() -> None:
    draw = np.random.default_rng(0)
    rows = draw.normal(size=(1000, 4)).astype(np.float32)
    felt = np.diag([100.0, 1.0, 1.0, 1.0])
    code = LogRows(0.3)
    off = code.decode(code.encode(rows, felt)) - rows
    assert np.abs(off[:, 0]).mean() < 0.7 * np.abs(off[:, 1:]).mean()


def test_features_that_are_softmaxes_are_known_by_their_numbers() -> None:
    draw = np.random.default_rng(0)
    logits = draw.normal(size=(50, 8)).astype(np.float32) * 3
    found = logits_of(softmaxes(logits))
    assert found is not None
    np.testing.assert_allclose(found, logits - logits.mean(1, keepdims=True), atol=1e-4)
    assert logits_of(np.abs(draw.normal(size=(50, 8))).astype(np.float32)) is None
    assert logits_of(-softmaxes(logits)) is None


def large_and_small(feature_map: str) -> tuple[str, str]:
    """The page of a text as it is, and where it has hardly any room."""
    text = "some text " * 30
    _, view = view_of(text, feature_map=feature_map)
    source = LensText(text, [(i, i + 1) for i in range(len(text))])
    large = lens_page(source, view, title="t", about={})
    small = lens_page(source, view, title="t", about={}, limit_bytes=1000)
    assert len(small) < len(large)
    return large, small


def test_large_pages_have_coarser_steps_and_say_so() -> None:
    large, small = large_and_small("hedgehog")
    assert '"step":0.005,' in large
    assert '"step":0.64,' in small


def test_large_pages_of_other_features_fall_back_to_eight_bits_and_say_so() -> None:
    large, small = large_and_small("favor")
    assert '"bits":8' in small
    assert '"bits":12' in large
    assert '"turned":true' not in small


def test_five_thousand_tokens_of_the_models_size_stay_below_eight_megabytes() -> None:
    """Seven layers of four heads, 64 features and 12 scales, as the model that comes with vort."""
    draw = np.random.default_rng(0)
    heads, length, scales = 4, 5000, 12

    def logits(size: int, spread: float) -> np.ndarray:
        return draw.normal(scale=spread, size=(heads, length, size)).astype(np.float32)

    def layer() -> LayerView:
        order = draw.uniform(0.05, 1, (heads, length)).astype(np.float32)
        read = np.exp(logits(scales, 1.0))
        powers = np.linspace(0, 3, scales, dtype=np.float32)
        return LayerView(
            order=order,
            gate=draw.uniform(0.05, 1, (heads, length)).astype(np.float32),
            write=np.exp(-order[..., None] * powers),
            read=read / read.mean(-1, keepdims=True),
            rates=np.geomspace(1e-4, 5, scales).astype(np.float32)[None].repeat(heads, 0),
            q=np.stack([softmaxes(x) for x in logits(32, 2.0)]),
            k=np.stack([softmaxes(x) for x in logits(32, 2.0)]),
            denominator=draw.uniform(0.01, 1, (heads, length)).astype(np.float32),
            include_self=True,
            shares=True,
        )

    view = TextView([layer()] * 7, draw.uniform(0, 8, length).astype(np.float32))
    text = "".join(draw.choice(list("abc de"), length))
    source = LensText(text, [(i, i + 1) for i in range(length)])
    page = lens_page(source, view, title="t", about={})
    assert 7_000_000 < len(page) < 8_000_000
    # Numbers without any pattern are the worst there are: real ones are off by half of it.
    assert float(re.search(r'"usual":([\d.e-]+)', page)[1]) < 0.15


def test_write_weights_that_orders_decide_are_drawn_between_knots() -> None:
    _, view = view_of("a text with some words in it " * 9)
    layer = view.layers[0]
    assert layer.order is not None
    knots = _knots(layer.order[0], layer.write[0])
    assert knots is not None
    assert _knots(layer.order[0], layer.write[0][::-1]) is None


def test_the_lens_needs_no_hugging_face_for_a_plain_model(tmp_path: Path) -> None:
    model_of(output_gate=True).save_pretrained(tmp_path / "model")
    (tmp_path / "text.txt").write_text("Some wörds, and more.", encoding="utf-8")
    program = (
        "import sys; from vort.cli import app\n"
        "try: app(sys.argv[1:])\n"
        "except SystemExit as end: assert end.code in (0, None), end.code\n"
        "assert 'transformers' not in sys.modules"
    )
    given = ["lens", "model", "--text", "text.txt", "--out", "bare.html"]
    subprocess.run([sys.executable, "-c", program, *given], cwd=tmp_path, check=True)
    page = (tmp_path / "bare.html").read_text(encoding="utf-8")
    model, tokenizer = load_model(str(tmp_path / "model"), "cpu")
    other, _ = _page(model, tokenizer, tmp_path / "text.txt", 5000, "text.txt", "model")
    assert _facts(page) == _facts(other)


def _facts(page: str) -> tuple[dict[str, Any], list[str]]:
    data = json.loads(re.search(r'id="data">(.*?)</script>', page)[1])
    data["about"].pop("command")
    return data, re.findall(r'id="head-\d+-\d+">(.*?)</script>', page)


@pytest.mark.parametrize("memory", ["vort", "exponential"])  # the latter looks at no entities
def test_command_writes_a_page(memory: str, tmp_path: Path) -> None:
    folder, text, out = tmp_path / "model", tmp_path / "text.txt", tmp_path / "deep" / "page.html"
    model_of(use_entity=True, memory=memory).save_pretrained(folder)
    text.write_bytes("Anna met Vronsky in Moscow — \xe9\n".encode() + b"\xff\xfe</script>")
    result = runner.invoke(app, ["lens", str(folder), "--text", str(text), "--out", str(out)])
    assert result.exit_code == 0, result.output
    page = out.read_text(encoding="utf-8")
    assert "2 places are no UTF-8" in page
    assert page.count("</script>") == page.count("<script")


def test_the_page_of_a_hybrid_names_all_its_memories(tmp_path: Path) -> None:
    names = ["mixture", "vort"]
    model = model_of(memory="mixture", layer_memories=names, horizon=8)
    model.save_pretrained(tmp_path / "model")
    (tmp_path / "text.txt").write_text("some words")
    where = ["--text", str(tmp_path / "text.txt"), "--out", str(tmp_path / "page.html")]
    result = runner.invoke(app, ["lens", str(tmp_path / "model"), *where])
    assert result.exit_code == 0, result.output
    assert "10 tokens are more than the horizon of 8" in " ".join(plain(result.output).split())
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "1 x mixture, 1 x vort, continuous routing" in page


def test_command_says_on_the_terminal_what_it_cut(tmp_path: Path) -> None:
    model_of().save_pretrained(tmp_path / "model")
    (tmp_path / "text.txt").write_bytes(b"some words and more \xff")
    where = ["--text", str(tmp_path / "text.txt"), "--out", str(tmp_path / "page.html")]
    arguments = ["lens", str(tmp_path / "model"), *where]
    result = runner.invoke(app, [*arguments, "--max-tokens", "10"])
    assert result.exit_code == 0, result.output
    cut = "The text is cut after 10 tokens, 10 of its 21 characters (--max-tokens)."
    assert cut in plain(result.output)
    assert "1 places are no UTF-8" in plain(result.output)
    assert cut in (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "is cut" not in runner.invoke(app, arguments).output


def test_a_command_in_the_foot_cannot_turn_text_around() -> None:
    _, view = view_of("text")
    source = LensText("text", [(i, i + 1) for i in range(4)])
    page = lens_page(source, view, title="a\u202eb", about={"command": "vort lens \u2067x"})
    assert "\\u202e" not in page
    assert "\\u2067" not in page
    assert "\u202e" not in page


@pytest.mark.parametrize(
    ("changes", "content", "options", "message"),
    [
        ({"memory": "softmax"}, "text", [], "retention kernel"),
        (
            {"layer_memories": ["vort", "softmax"]},
            "text",
            [],
            "got a model with memory 1 x vort, 1 x softmax",
        ),
        ({}, "", [], "at least one character"),
        ({}, "text", ["--max-tokens", "1"], "--max-tokens must be at least 2, got 1"),
    ],
)
def test_command_explains_what_it_cannot_show(
    tmp_path: Path, changes: dict[str, object], content: str, options: list[str], message: str
) -> None:
    model_of(**changes).save_pretrained(tmp_path / "model")
    (tmp_path / "text.txt").write_text(content)
    arguments = [str(tmp_path / "model"), "--text", str(tmp_path / "text.txt")]
    result = runner.invoke(app, ["lens", *arguments, "--out", str(tmp_path / "p.html"), *options])
    assert result.exit_code == 2
    assert message in " ".join(plain(result.output).replace("│", " ").split())
    assert not (tmp_path / "p.html").exists()
