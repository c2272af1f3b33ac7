"""Books: windows inside documents, splits that share no file."""

import os
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chisquare

from vort.lab.tasks import Books
from vort.lab.tasks.books import _ended_names, _join_short
from vort.lab.tasks.corpus import find_source, load_corpus

WIDTH = 33


@pytest.fixture
def shelf(tmp_path: Path) -> Path:
    """Books in which every byte says which book it is in."""
    for split, count, first in (("train", 14, 0), ("test", 3, 14)):
        (tmp_path / split).mkdir()
        for number in range(first, first + count):
            text = bytes([65 + number]) * (100 + 7 * number)
            (tmp_path / split / f"book{number:02d}.txt").write_bytes(text)
    return tmp_path


def books_in(task: Books, split: str) -> set[int]:
    count = task.size(split) or 500
    return set(task.batch(split, range(count))["input_ids"].flatten().tolist())


def test_splits_share_no_book_and_lose_none(shelf: Path) -> None:
    task = Books(source=str(shelf), length=32, validation_files=4)
    found = {split: books_in(task, split) for split in ("train", "validation", "test")}
    assert [len(found[split]) for split in ("train", "validation", "test")] == [10, 4, 3]
    assert len(set.union(*found.values())) == 17
    assert found["test"] == {65 + 14, 65 + 15, 65 + 16}


def test_held_out_books_do_not_depend_on_the_seed_or_on_other_books(shelf: Path) -> None:
    held = [Books(source=str(shelf), length=32, seed=s, validation_files=4) for s in (0, 1)]
    assert books_in(held[0], "validation") == books_in(held[1], "validation")


def test_a_window_lies_in_one_book(shelf: Path) -> None:
    task = Books(source=str(shelf), length=32)
    for split in ("train", "test"):
        for row in task.batch(split, range(9))["input_ids"]:
            assert len(row.unique()) == 1


def test_labels_are_the_next_characters() -> None:
    task = Books(length=100)
    for split in ("train", "test"):
        batch = task.batch(split, [0, 1, 2])
        assert torch.equal(batch["labels"][:, :-1], batch["input_ids"][:, 1:])
        assert (batch["sources"] == -1).all()


def test_test_windows_ask_for_every_character_once(tmp_path: Path) -> None:
    text = np.random.default_rng(0).integers(0, 256, 1000, dtype=np.uint8).tobytes()
    for split in ("train", "test"):
        (tmp_path / split).mkdir()
    (tmp_path / "test" / "a.txt").write_bytes(text)
    for number in range(2):
        (tmp_path / "train" / f"{number}.txt").write_bytes(text[number:500])
    task = Books(source=str(tmp_path), length=100, validation_files=1)
    batch = task.batch("test", range(task.size("test")))
    found = sorted(bytes(row.tolist()) for row in batch["labels"])
    assert found == sorted(text[first : first + 100] for first in range(1, 901, 100))


@given(lengths=st.lists(st.integers(1, 100), max_size=20))
def test_joining_short_documents_loses_nothing(lengths: list[int]) -> None:
    joined = _join_short(lengths, WIDTH)
    if joined:
        assert sum(joined) == sum(lengths)
        assert min(joined) >= WIDTH
    else:
        assert sum(lengths) < WIDTH


def test_training_windows_start_uniformly_wherever_one_fits(tmp_path: Path) -> None:
    for split in ("train", "test"):
        (tmp_path / split).mkdir()
        for number, size in enumerate((20, 40, 60)):
            text = bytes(range(60 * number, 60 * number + size)) + bytes(split == "test")
            (tmp_path / split / f"{number}.txt").write_bytes(text)
    task = Books(source=str(tmp_path), length=10, validation_files=1)
    documents = task.corpus["train"]
    fits = [byte for document in documents for byte in document.text[:-10]]
    starts = task.batch("train", range(3000))["input_ids"][:, 0].numpy()
    counts = np.bincount(starts, minlength=256)
    assert counts[fits].sum() == 3000
    assert chisquare(counts[fits]).pvalue > 1e-3


def test_the_digest_changes_with_the_texts_alone(shelf: Path) -> None:
    first = Books(source=str(shelf), length=32).digest
    assert Books(source=str(shelf), length=16, seed=1).digest == first
    (shelf / "train" / "book00.txt").write_bytes(b"x" * 100)
    assert Books(source=str(shelf), length=32).digest != first


def test_a_copy_of_a_test_book_does_not_train(shelf: Path) -> None:
    (shelf / "train" / "copy.txt").write_bytes((shelf / "test" / "book15.txt").read_bytes())
    task = Books(source=str(shelf), length=32)
    assert 65 + 15 not in books_in(task, "train") | books_in(task, "validation")


def test_position_buckets_are_those_of_the_paper() -> None:
    task = Books(length=8192)
    assert task.bucket_names == ("<256", "256-1024", "1024-4096", ">=4096")
    buckets = task.batch("test", [0])["buckets"][0]
    for position, bucket in ((0, 0), (255, 0), (256, 1), (1023, 1), (1024, 2), (4096, 3)):
        assert buckets[position] == bucket
    assert Books(length=300).bucket_names == ("<256", ">=256")


def test_the_standard_library_is_there_and_its_splits_are_disjoint_by_file() -> None:
    corpus = load_corpus("stdlib")
    names = [{document.name for document in documents} for documents in corpus.values()]
    assert not names[0] & names[1]
    assert not (names[0] | names[1]) & names[2]
    assert all(len(split) >= 5 for split in names)
    assert not any("site-packages" in name for split in names for name in split)
    assert 1 <= Books().bytes_per_character("train") < 1.01


def test_data_sets_in_the_format_of_the_hub_are_streamed(tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    for split, count in (("train", 12), ("test", 4)):
        lines = [f'{{"text": "{chr(97 + n) * 50}{split}"}}' for n in range(count)]
        (tmp_path / f"{split}.jsonl").write_text("\n".join(lines))
    corpus = load_corpus(f"hf:{tmp_path}", validation_files=2, max_documents=8)
    assert [len(corpus[split]) for split in ("train", "validation", "test")] == [6, 2, 4]


def test_missing_and_small_sources_are_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"source must be .*nowhere"):
        Books(source=str(tmp_path / "nowhere")).size("test")
    with pytest.raises(ValueError, match="no documents"):
        Books(source=str(tmp_path)).size("test")
    with pytest.raises(ValueError, match=r"length must be below \d+, .* got 1000000000"):
        Books(length=10**9).size("test")


@pytest.mark.skipif(
    not (Path(os.environ.get("VORT_DATA", "")) / "books" / "train").is_dir(),
    reason="needs VORT_DATA, a folder that holds books/train and books/test",
)
def test_a_folder_of_books_has_ten_held_out_and_is_read_in_ascii() -> None:
    task = Books(source=str(Path(os.environ["VORT_DATA"]) / "books"))
    assert len(task.corpus["validation"]) == 10
    assert len(task.corpus["train"]) + 10 == 200
    assert task.bytes_per_character("test") == 1.0
    assert task.size("test") > 100


def test_a_file_is_split_by_position_and_loses_nothing(tmp_path: Path) -> None:
    text = ("Zwölf Boxkämpfer jagen Viktor quer über den Sylter Deich. " * 50).encode()
    (tmp_path / "a.md").write_bytes(text)
    corpus = load_corpus(str(tmp_path / "a.md"))
    parts = [corpus[split] for split in ("train", "validation", "test")]
    assert b"".join(part.text for (part,) in parts) == text
    for (part,), share in zip(parts, (0.85, 0.05, 0.1), strict=True):
        assert abs(len(part.text) / len(text) - share) < 0.002
        part.text.decode()  # no letter is cut
    assert [(part.begins, part.ends) for (part,) in parts] == [
        (True, False),
        (False, False),
        (False, True),
    ]


@pytest.mark.parametrize("count", [2, 8, 20, 300])
def test_any_number_of_texts_is_split_in_proportion(tmp_path: Path, count: int) -> None:
    rng = np.random.default_rng(count)
    for number in range(count):
        text = bytes(rng.integers(97, 122, rng.integers(500, 3000)).tolist())
        (tmp_path / f"{number}.txt").write_bytes(text)
    corpus = load_corpus(str(tmp_path))
    sizes = {split: sum(len(d.text) for d in documents) for split, documents in corpus.items()}
    assert sum(sizes.values()) == sum(path.stat().st_size for path in tmp_path.iterdir())
    for split, share in (("train", 0.85), ("validation", 0.05), ("test", 0.1)):
        assert 0.5 < sizes[split] / sum(sizes.values()) / share < 2, sizes  # type: ignore[index]
    names = [{document.name for document in documents} for documents in corpus.values()]
    if corpus.how == "by document":
        assert not names[0] & names[1]
        assert not (names[0] | names[1]) & names[2]
        assert count >= 20
    else:
        assert all(len(each) == count for each in names)
    again = load_corpus(str(tmp_path))
    assert again == corpus


def test_a_folder_without_txt_gives_all_its_texts_and_says_what_it_leaves_out(
    tmp_path: Path,
) -> None:
    for name, text in (("a.md", b"x" * 900), ("b.py", b"y" * 900), ("c.bin", b"\0" * 900)):
        (tmp_path / name).write_bytes(text)
    (tmp_path / ".hidden").write_bytes(b"z" * 900)
    os.mkfifo(tmp_path / "pipe")
    corpus = load_corpus(str(tmp_path))
    assert {d.name for documents in corpus.values() for d in documents} == {"a.md", "b.py"}
    assert corpus.left_out == "1 files that are no text"
    with pytest.raises(ValueError, match="zero bytes"):
        load_corpus(str(tmp_path / "c.bin"))


def test_few_training_books_beside_a_test_folder_give_a_share_for_validation(
    tmp_path: Path,
) -> None:
    for split in ("train", "test"):
        (tmp_path / split).mkdir()
        for number in range(3):
            (tmp_path / split / f"{number}.txt").write_bytes(f"{split} {number} ".encode() * 200)
    corpus = load_corpus(str(tmp_path))
    assert [len(corpus[split]) for split in ("train", "validation", "test")] == [3, 3, 3]


def test_marks_stand_where_a_text_begins_and_ends(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"abc" * 300)
    task = Books(source=str(tmp_path / "a.txt"), length=16, marks=True)
    assert task.vocab_size == 259
    assert task.characters("train") == round(0.85 * 900)
    texts = {split: task._texts[split].text.tolist() for split in ("train", "validation", "test")}
    assert texts["train"][0] == 257
    assert texts["test"][-1] == 258
    assert max(texts["validation"]) < 256
    assert Books(source=str(tmp_path / "a.txt"), length=16).vocab_size == 256
    longer = task.of_length(20)
    assert longer.corpus is task.corpus
    assert longer.batch("train", [0])["input_ids"].shape == (1, 20)


def test_a_text_is_known_by_what_it_says_and_not_by_where_it_is(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"abc" * 300)
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "a.txt").write_bytes(b"abc" * 300)
    first, second = (Books(source=str(tmp_path / name), length=8) for name in ("a.txt", "b/a.txt"))
    assert first.describe() == second.describe()
    assert str(tmp_path) not in str(first.describe())


def test_a_slip_in_a_path_is_no_data_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "books").mkdir()
    for slip in ("nope", "nope.txt", "books/nope", "a/b/c", "./nope", "other/nope.txt"):
        with pytest.raises(FileNotFoundError, match="no such file or folder"):
            find_source(slip)
    assert find_source("books") == str(tmp_path / "books")
    assert find_source("someone/something") == "hf:someone/something"


def test_a_data_set_without_the_package_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ModuleNotFoundError, match="pip install datasets"):
        load_corpus("hf:someone/something")


def test_no_more_of_a_data_set_is_read_than_was_asked_for(tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    lines = [f'{{"text": "{chr(97 + n % 26) * 100}{n}"}}' for n in range(200)]
    (tmp_path / "train.jsonl").write_text("\n".join(lines))
    corpus = load_corpus(f"hf:{tmp_path}", max_bytes=10_000)
    size = sum(len(d.text) for documents in corpus.values() for d in documents)
    assert 8_000 < size < 10_000
    assert corpus.left_out
    with pytest.raises(ValueError, match="no column 'body', it has text"):
        load_corpus(f"hf:{tmp_path}", column="body")


def test_names_are_marked_when_they_have_ended_and_never_ahead_of_time(tmp_path: Path) -> None:
    text = b"then old Mary said to Tom that nobody knew, and Paris it was. "
    for split in ("train", "test"):
        (tmp_path / split).mkdir()
        for number in range(2):
            own = f"{split} number {number}: ".encode()  # copies are dropped
            (tmp_path / split / f"{number}.txt").write_bytes(own + text * 10)
    task = Books(source=str(tmp_path), length=120, validation_files=1, entities=True)
    batch = task.batch("test", [0, 1])
    ids, mask = batch["input_ids"], batch["entity_mask"]
    assert mask.shape == ids.shape
    for row in range(2):
        for index in mask[row].nonzero().flatten().tolist():
            before = bytes(ids[row, :index].tolist())
            assert before.endswith((b"Mary", b"Tom", b"Paris"))
    assert mask.sum() >= 6
    # A mark depends on nothing that comes later.
    for stop in range(1, 120, 7):
        assert torch.equal(_ended_names(ids[0, :stop]), mask[0, :stop])
    assert "entity_mask" not in replace(task, entities=False).batch("test", [0])
    kinds = task.kinds(batch)
    assert torch.equal(kinds["marked"], mask.bool())
    assert (sum(kind.long() for kind in kinds.values()) == 1).all()
