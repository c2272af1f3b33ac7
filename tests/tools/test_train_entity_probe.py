"""LitBank is read to the letter, the probe learns from it, and the figures can be had again."""

import os
import re
from pathlib import Path

import pytest
from tools.train_entity_probe import (
    Novel,
    Score,
    app,
    fit_probe,
    read_litbank,
    score_probe,
    split_novels,
)
from typer.testing import CliRunner

from vort.layers.entity_probe import LinearProbe, RuleProbe

SENTENCES = [
    '" Come , " said the late Mr. Brown of Leeds .',
    "Then Mary 's dog barked ; the Browns ' cat ( a tabby ) did n't .",
]
MENTIONS = [
    ("0 5 0 8", "the late Mr. Brown", "PER", "PROP"),
    ("0 10 0 10", "Leeds", "GPE", "PROP"),
    ("1 1 1 1", "Mary", "PER", "PROP"),
    ("1 0 1 3", "Then", "PER", "NOM"),
]


def write_novel(folder: Path, name: str, sentences: list[str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}_brat.txt").write_text("\n".join(sentences) + "\n")
    lines = [
        "\t".join(["MENTION", f"T{i}", *place.split(), *rest])
        for i, (place, *rest) in enumerate(MENTIONS)
    ]
    (folder / f"{name}_brat.ann").write_text("\n".join([*lines, "COREF\tT1\tMary-1"]) + "\n")


@pytest.fixture
def small_litbank(tmp_path: Path) -> Path:
    for number in range(40):
        write_novel(tmp_path / "coref", f"{number}_novel", SENTENCES)
    return tmp_path


@pytest.fixture(scope="module")
def litbank() -> Path:
    folder = os.environ.get("VORT_DATA")
    if folder is None:
        pytest.skip("VORT_DATA names no folder with LitBank")
    path = Path(folder)
    if not any((path / part / "coref").is_dir() for part in (".", "litbank")):
        pytest.skip(f"no LitBank in VORT_DATA={folder}")
    return path


def test_annotation_becomes_running_text_with_marked_tokens(small_litbank: Path) -> None:
    novel = read_litbank(small_litbank)[0]
    assert novel.text == (
        '"Come," said the late Mr. Brown of Leeds. '
        "Then Mary's dog barked; the Browns' cat (a tabby) didn't."
    )
    tokens = [novel.text[start:end] for start, end in novel.spans]
    assert tokens == " ".join(SENTENCES).split()
    assert [t for t, y in zip(tokens, novel.names, strict=True) if y] == [
        "Mr.",
        "Brown",
        "Leeds",
        "Mary",
    ]
    assert sum(novel.in_name) == 6


def test_the_split_is_by_novel_and_always_the_same(small_litbank: Path) -> None:
    novels = read_litbank(small_litbank)
    split = split_novels(novels)
    assert [novel.name for novel in split["test"]] == [
        novel.name for novel in split_novels(novels[::-1])["test"]
    ]
    everywhere = [novel.name for part in split.values() for novel in part]
    assert sorted(everywhere) == sorted(novel.name for novel in novels)


@pytest.mark.parametrize("causal", [False, True])
def test_a_probe_learns_the_names_it_is_shown(small_litbank: Path, causal: bool) -> None:
    novels = read_litbank(small_litbank)
    fit = fit_probe(novels[:3], novels[3:5], causal=causal, buckets=1024, penalties=(0.01,))
    assert score_probe(fit.probe, novels[5:]).f1 == 1.0


def test_f1_is_the_harmonic_mean_of_precision_and_recall() -> None:
    score = Score(found=8, spurious=2, missed=2)
    assert (score.precision, score.recall, score.f1) == (0.8, 0.8, 0.8)


def test_absent_data_is_reported(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["eval", "--data", str(tmp_path)])
    assert result.exit_code == 2
    # The frame around an error breaks lines where it likes.
    assert "coref/*.ann" in re.sub(r"[\s│]", "", result.output)


def test_train_and_eval_run_from_the_command_line(small_litbank: Path, tmp_path: Path) -> None:
    out = tmp_path / "probe.safetensors"
    run = CliRunner().invoke(app, ["train", "--data", str(small_litbank), "--out", str(out)])
    assert run.exit_code == 0, run.output
    assert str(tmp_path) not in str(LinearProbe.load(out).metadata)
    arguments = ["eval", "--data", str(small_litbank), "--probe", str(out)]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert "LinearProbe" in result.output


def test_the_shipped_probe_reaches_80_percent_on_novels_it_never_saw(litbank: Path) -> None:
    test: list[Novel] = split_novels(read_litbank(litbank))["test"]
    about = LinearProbe.pretrained().metadata
    assert [novel.name for novel in test] == about["split"]["test"]
    for causal, name in ((False, "full"), (True, "causal")):
        f1 = score_probe(LinearProbe.pretrained(causal=causal), test).f1
        assert f1 >= 0.80
        assert f1 == pytest.approx(about["test_f1"][name], abs=5e-4)
        assert f1 > score_probe(RuleProbe(causal=causal), test).f1


@pytest.mark.slow
def test_training_again_gives_the_shipped_scores(litbank: Path) -> None:
    split = split_novels(read_litbank(litbank))
    fit = fit_probe(split["train"], split["validation"], causal=False)
    about = LinearProbe.pretrained().metadata
    assert fit.penalty == about["penalty"]["full"]
    assert score_probe(fit.probe, split["test"]).f1 == pytest.approx(
        about["test_f1"]["full"], abs=0.01
    )
