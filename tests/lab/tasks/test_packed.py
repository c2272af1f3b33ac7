"""Texts larger than memory: the same windows, from files of tokens that are mapped."""

import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from vort.lab.tasks import SPLITS, Books, packed
from vort.lab.tasks.packed import FileText


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    generator = np.random.default_rng(0)
    folder = tmp_path / "texts"
    folder.mkdir()
    for number in range(25):
        letters = generator.integers(97, 123, 200 + 31 * number, dtype=np.uint8)
        (folder / f"{number}.txt").write_bytes(letters.tobytes())
    return folder


@pytest.mark.parametrize("marks", [True, False])
@pytest.mark.parametrize("single", [True, False])
def test_a_packed_text_has_the_windows_of_one_in_memory(
    texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, marks: bool, single: bool
) -> None:
    source = str(texts / "24.txt" if single else texts)
    whole = Books(source=source, length=16, marks=marks)
    expected = {split: whole.batch(split, range(2)) for split in SPLITS}
    assert whole.pack(tmp_path / "tokens") is None
    monkeypatch.setattr(packed, "LARGE", 100)
    monkeypatch.setattr(packed, "_BLOCK", 37)
    task = Books(source=source, length=16, marks=marks)
    assert task.pack(tmp_path / "tokens") is not None
    other = Books(source=source, length=8, marks=marks)
    other.pack(tmp_path / "tokens")
    longer = other.of_length(16)
    assert "corpus" not in vars(longer), "what is packed is not read again"
    for found in (task, longer):
        assert found.describe() == whole.describe()
        for split in SPLITS:
            assert found.size(split) == whole.size(split)
            assert found.characters(split) == whole.characters(split)
            batch = found.batch(split, range(2))
            assert batch["input_ids"].equal(expected[split]["input_ids"])
            assert batch["labels"].equal(expected[split]["labels"])
            assert isinstance(found._texts[split].text, np.memmap)
    assert task.bytes_per_character("test") == whole.bytes_per_character("test")
    assert task.splits() == whole.splits() == longer.splits()


def test_a_source_that_has_changed_is_packed_again(
    texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed, "LARGE", 100)
    folder = tmp_path / "tokens"
    first = Books(source=str(texts), length=16)
    first.pack(folder)
    before = (folder / "train.bin").stat().st_mtime_ns
    Books(source=str(texts), length=16).pack(folder)
    assert (folder / "train.bin").stat().st_mtime_ns == before
    (texts / "3.txt").write_text("something else " * 30)
    second = Books(source=str(texts), length=16)
    second.pack(folder)
    assert second.digest != first.digest


def test_a_text_is_packed_and_read_within_a_fraction_of_its_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed, "LARGE", 2**20)
    monkeypatch.setattr(packed, "_BLOCK", 2**18)
    file = tmp_path / "long.txt"
    file.write_bytes(b"a line of a text that does not fit into memory\n" * 700_000)
    size = file.stat().st_size
    tracemalloc.start()
    task = Books(source=str(file), length=256, marks=True)
    task.pack(tmp_path / "tokens")
    task.batch("train", range(8))
    task.batch("test", range(8))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < size / 8


def test_a_file_that_shrinks_while_it_is_read_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "text.txt"
    file.write_text("many words")
    text = FileText(file)
    file.write_text("few")
    with pytest.raises(OSError, match="has become shorter"):
        bytes(text)
