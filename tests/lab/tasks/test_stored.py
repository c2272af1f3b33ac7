"""Tasks from users' files: made ones here, the real ones where they are."""

import json
import os
from pathlib import Path

import pytest
import torch

from vort.lab.experiments.models import MODELS, sized
from vort.lab.tasks import (
    BABI,
    CFQ,
    IGNORED,
    SCAN,
    SPLITS,
    Batch,
    WikiHop,
    answers_right,
    make_task,
)
from vort.lab.tasks.question_files import read_hotpotqa, read_squad, read_wikihop
from vort.lab.tasks.stored import Example, hold_out
from vort.lab.training import Scorer
from vort.lab.training.data import compact

# A folder with the unpacked archives of SCAN and bAbI.
DATA = os.environ.get("VORT_DATA", "")
COMMANDS = ("walk", "run", "look", "jump")
TURNS = ("left", "right")


def scan_files(folder: Path, part: str = "simple") -> Path:
    lines = [
        f"IN: {a} {turn} {n} and {b} OUT: " + f"I_TURN_{turn.upper()} I_{a.upper()} " * k + f"I_{b}"
        for a in COMMANDS
        for b in COMMANDS
        for turn in TURNS
        for n, k in (("twice", 2), ("thrice", 3))
    ]
    (folder / f"tasks_train_{part}.txt").write_text(
        "\n".join(lines[:50] + ["IN: run OUT: I_RUN"] * 9)
    )
    (folder / f"tasks_test_{part}.txt").write_text("\n".join(lines[50:]) + "\n")
    return folder


def test_scan_asks_for_all_actions_and_the_end(tmp_path: Path) -> None:
    (tmp_path / "below").mkdir()
    scan_files(tmp_path / "below", "mcd1")
    task = SCAN(source=str(tmp_path), part="mcd1")
    assert task.size("test") == 14
    assert task.size("train") + task.size("validation") == 59
    batch = task.batch("test", [0])
    words = task.decode(batch["input_ids"][0].tolist())
    asked = (batch["labels"][0] != IGNORED).nonzero().flatten()
    said = task.decode(batch["labels"][0, asked].tolist())
    begin = words.index("<out>")
    assert int(asked[0]) == begin
    assert said == words[begin + 1 : words.index("<end>") + 1]
    assert words[0] == "<begin>"
    assert words[words.index("<end>") + 1 :] == ["<pad>"] * (64 - words.index("<end>") - 1)
    assert int(batch["labels"].max()) < task.num_classes < task.vocab_size
    right = answers_right(batch, batch["labels"])
    assert right.tolist() == [[0, 0, 1]]
    wrong = batch["labels"].clone()
    wrong[0, asked[2]] = (wrong[0, asked[2]] + 1) % task.num_classes
    assert answers_right(batch, wrong).tolist() == [[0, 0, 0]]


def test_splits_of_scan_share_nothing_and_repeated_commands_train(tmp_path: Path) -> None:
    task = SCAN(source=str(scan_files(tmp_path)))
    texts = {split: {one.words for one in task.examples[split]} for split in SPLITS}
    assert not texts["train"] & texts["validation"]
    assert not texts["train"] & texts["test"]
    assert Example(("run", "<out>", "I_RUN", "<end>"), (2, 3)) in task.examples["train"]
    twice = [Example((str(n),), (0,)) for n in range(200)]
    kept, held = hold_out([*twice, *twice])
    assert (len(kept), held) == (400, [])
    assert 2 <= len(hold_out(twice)[1]) <= 30


def babi_files(folder: Path, lacking: tuple[int, ...] = ()) -> Path:
    for release, count in (("en-valid-10k", 12), ("en", 4)):
        (folder / release).mkdir(parents=True)
        for task in range(1, 21):
            story = (
                "1 Mary moved to the bathroom.\n2 Where is Mary? \tbathroom\t1\n"
                "3 John has milk.\n4 What has John?\tmilk,apple\t3\n"
            )
            for split in ("train", "valid", "test"):
                short = release == "en-valid-10k"
                if short and split == "train" and task in lacking:
                    continue
                name = f"qa{task}_{split}.txt" if short else f"qa{task}_some-facts_{split}.txt"
                (folder / release / name).write_text(story * count)
    return folder


def test_stories_of_babi_are_asked_right_after_their_questions(tmp_path: Path) -> None:
    task = BABI(source=str(babi_files(tmp_path / "babi", lacking=(3,))), length=64)
    assert task.lacking == (3,)
    assert task.size("test") == 20 * 12
    assert len(task.examples["train"]) == 19 * 12 + 4
    batch = task.batch("test", [24])
    asked = (batch["labels"][0] != IGNORED).nonzero().flatten()
    assert task.decode(batch["labels"][0, asked].tolist()) == ["bathroom", "milk", "apple"]
    assert task.decode(batch["input_ids"][0, asked].tolist()) == ["?", "?", "milk"]
    assert task.bucket_names[int(batch["buckets"][0, asked[0]])] == "qa3"
    assert answers_right(batch, batch["labels"])[:, 2].tolist() == [1, 1]
    assert task.describe()["lacking"] == [3]


def test_packed_training_loses_no_story(tmp_path: Path) -> None:
    task = BABI(source=str(babi_files(tmp_path / "babi")), length=50)
    batch = task.batch("train", range(task.size("train")))
    assert int((batch["labels"] != IGNORED).sum()) == 20 * 12 * 3
    assert task.size("train") == 20 * 12 // 2
    alone = task.batch("train", [5])
    assert torch.equal(alone["input_ids"][0], batch["input_ids"][5])
    other = BABI(source=task.source, length=50, seed=1).batch("train", range(9))
    assert not torch.equal(other["buckets"], batch["buckets"][:9])


def reader(kind: str, vocabulary: int) -> torch.nn.Module:
    """A small model of a row of the table, or one of the library's own."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    if kind == "Llama":
        transformers = pytest.importorskip("transformers")
        more = {"intermediate_size": 32, "num_key_value_heads": 2, "pad_token_id": None}
        config = transformers.LlamaConfig(vocab_size=vocabulary, **sizes, **more)
        return transformers.LlamaForCausalLM(config)
    models = pytest.importorskip("vort.models")
    sizes |= {"num_scales": 3, "horizon": 64, "sliding_window": 8}
    settings = sized("laptop", sizes, {}, MODELS[kind].settings)
    return models.VortForCausalLM(models.VortConfig(vocab_size=vocabulary, **settings))


@pytest.mark.parametrize(
    "kind", ["vort", "softmax", "exponential_learned_gated", "gla", "mixture_rates_gated", "Llama"]
)
def test_what_a_story_costs_does_not_depend_on_the_stories_packed_beside_it(
    tmp_path: Path, kind: str
) -> None:
    task = BABI(source=str(babi_files(tmp_path / "babi")), length=80)
    batch = task.batch("train", range(3))
    begins = (batch["input_ids"] == task.vocab_size - 2).nonzero()[:, 1].view(3, -1)
    second, third = begins[0, 1:3].tolist()
    model = reader(kind, task.vocab_size).eval()
    with torch.no_grad():  # so that memories matter
        for weight in model.parameters():
            weight += 0.3 * torch.randn_like(weight)
    scorer = Scorer(model, task.num_classes)

    def logits(rows: Batch) -> torch.Tensor:
        small = compact(rows)
        places = small["positions"] % task.length
        with torch.no_grad():
            return scorer(small)["logits"][(places >= second) & (places < third)].view(3, 3, -1)

    found = logits(batch)
    others = batch["input_ids"].clone()
    others[:, :second] = torch.randint(task.vocab_size, (3, second))
    others[:, third:] = torch.randint(task.vocab_size, (3, task.length - third))
    torch.testing.assert_close(logits({**batch, "input_ids": others}), found)
    # As in tests, where a story stands alone.
    alone = task.batch("test", range(3))
    story = batch["input_ids"][:, second:third]
    assert torch.equal(alone["input_ids"][:, : third - second], story)
    with torch.no_grad():
        expected = scorer(compact(alone))["logits"].view(3, 3, -1)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_rows_of_one_example_have_no_bounds_and_a_model_without_positions_is_told(
    tmp_path: Path,
) -> None:
    task = BABI(source=str(babi_files(tmp_path / "babi")), length=50)
    assert "position_ids" not in task.batch("test", [0])
    assert "position_ids" not in SCAN(source=str(scan_files(tmp_path))).batch("train", [0])
    batch = task.batch("train", [0, 1])
    begins = batch["input_ids"] == task.vocab_size - 2
    assert torch.equal(batch["position_ids"] == 0, begins)
    sizes = (task.vocab_size, 8), (8, task.num_classes)
    plain = torch.nn.Sequential(torch.nn.Embedding(*sizes[0]), torch.nn.Linear(*sizes[1]))
    with pytest.raises(TypeError, match=r"Sequential must take position_ids .* packed=False"):
        Scorer(plain, task.num_classes)(compact(batch))
    apart = BABI(source=task.source, length=50, packed=False)
    assert Scorer(plain, task.num_classes)(compact(apart.batch("train", [0])))["loss"] > 0


def cfq_files(folder: Path) -> Path:
    entries = [
        {
            "questionPatternModEntities": f"Did M{n} 's editor direct M1 ?",
            "sparqlPatternModEntities": f"SELECT count(*) WHERE {{\nM{n} a M1 .\n}}",
        }
        for n in range(6)
    ]
    (folder / "dataset.json").write_text(json.dumps(entries))
    (folder / "splits").mkdir()
    split = {"trainIdxs": [0, 1, 2], "devIdxs": [3], "testIdxs": [4, 5]}
    (folder / "splits" / "mcd1.json").write_text(json.dumps(split))
    return folder


def test_cfq_reads_the_published_format(tmp_path: Path) -> None:
    task = CFQ(source=str(cfq_files(tmp_path)))
    assert [task.size(split) for split in SPLITS] == [3, 1, 2]
    words = task.decode(task.batch("test", [1])["input_ids"][0].tolist())
    assert words[1:4] == ["Did", "M5", "'s"]
    query = words[words.index("<out>") + 1 : words.index("<end>")]
    assert query == ["SELECT", "count(*)", "WHERE", "{", "M5", "a", "M1", ".", "}"]


def wikihop_files(folder: Path) -> Path:
    def one(n: int) -> dict:
        return {
            "id": f"WH_{n}",
            "query": f"place_of_birth person {n}",
            "answer": f"town {n}",
            "candidates": [f"town {n}", "elsewhere"],
            "supports": [f"person {n} lived near a river. " * 20, f"town {n} has a river."],
        }

    (folder / "train.json").write_text(json.dumps([one(n) for n in range(40)]))
    (folder / "dev.json").write_text(json.dumps([one(n) for n in range(40, 45)]))
    return folder


def test_wikihop_asks_for_a_candidate_and_keeps_the_end_of_long_documents(tmp_path: Path) -> None:
    task = WikiHop(source=str(wikihop_files(tmp_path)), length=256)
    assert [task.size(split) for split in SPLITS] == [38, 2, 5]
    batch = task.batch("test", [2])
    asked = batch["labels"][0] != IGNORED
    assert bytes(batch["labels"][0, asked].tolist()) == b" town 42\n"
    text = bytes(batch["input_ids"][0].tolist())
    assert b"Question: place of birth of person 42\nOne of: town 42; elsewhere\nAnswer:" in text
    assert text.endswith(b" town 42\n")
    assert answers_right(batch, batch["labels"]).tolist() == [[0, 0, 1]]


def test_wikihop_needs_a_question_to_train_on_and_one_to_validate(tmp_path: Path) -> None:
    wikihop_files(tmp_path)
    first = json.loads((tmp_path / "train.json").read_text())[:1]
    (tmp_path / "train.json").write_text(json.dumps(first))
    with pytest.raises(ValueError, match="must have two training questions or more"):
        WikiHop(source=str(tmp_path)).size("train")


def test_squad_and_hotpotqa_are_read_as_published(tmp_path: Path) -> None:
    answer = {"text": "Paris", "answer_start": 0}
    asked = [
        {"question": "Where?", "answers": [answer, {"text": "in Paris"}], "is_impossible": False},
        {"question": "Never?", "answers": [], "is_impossible": True},
    ]
    paragraphs = [{"context": "Paris is here.", "qas": asked}, {"context": "Other.", "qas": []}]
    squad = tmp_path / "dev-v2.0.json"
    squad.write_text(json.dumps({"data": [{"paragraphs": paragraphs}]}))
    found = read_squad(squad)
    assert found.documents == ["Other.", "Paris is here."]
    (only,) = found.asked
    assert (only.answers, only.gold, only.near) == (("Paris", "in Paris"), (1,), (0,))
    hotpot = tmp_path / "hotpot.json"
    context = [["A", ["One. ", "Two."]], ["B", ["Three."]]]
    hotpot.write_text(json.dumps([{"question": "Q?", "answer": "yes", "context": context}]))
    found = read_hotpotqa(hotpot)
    assert found.documents == ["A\nOne. Two.", "B\nThree."]
    assert found.asked[0].gold == (0, 1)


@pytest.mark.parametrize(
    ("name", "file", "text", "message"),
    [
        ("scan", "tasks_train_simple.txt", "IN: walk", "simple.txt:1 must be IN: command OUT:"),
        ("scan", "tasks_train_simple.txt", b"\xff\xfe", "is no text in UTF-8"),
        ("scan", "other.txt", "", "holds no file tasks_train_simple.txt"),
        ("babi", "qa1_train.txt", "Mary\tmoved", "qa1_train.txt:1 is no line of bAbI"),
        ("babi", "other.txt", "", "holds no file qa1_train.txt"),
        ("cfq", "dataset.json", "{", "holds no file mcd1.json"),
        ("wikihop", "train.json", "[", "train.json is no JSON"),
        ("wikihop", "train.json", "[" * 100_000, "train.json is no JSON"),
        ("wikihop", "train.json", '{"a": 1}', "train.json is no file of WikiHop"),
        ("wikihop", "train.json", "[]", "it has no question with an answer"),
    ],
)
def test_files_that_are_missing_or_wrong_are_named_in_a_line(
    tmp_path: Path, name: str, file: str, text: str | bytes, message: str
) -> None:
    (tmp_path / file).write_bytes(text.encode() if isinstance(text, str) else text)
    with pytest.raises((ValueError, OSError)) as problem:
        make_task(name, source=str(tmp_path)).batch("test", [0])
    assert message in str(problem.value)
    assert "\n" not in str(problem.value)
    with pytest.raises(FileNotFoundError, match=r"no such folder|holds no file"):
        make_task(name, source=str(tmp_path / "nowhere")).batch("test", [0])
    with pytest.raises(ValueError, match="source must be the folder"):
        make_task(name)


def test_an_example_that_is_too_long_says_so(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"length must be at least \d+, that of the longest"):
        SCAN(source=str(scan_files(tmp_path)), length=8).batch("test", [0])


def test_a_candidate_must_be_the_answer(tmp_path: Path) -> None:
    path = tmp_path / "dev.json"
    one = {"query": "q x", "answer": "a", "candidates": ["b"], "supports": ["c"]}
    path.write_text(json.dumps([one]))
    with pytest.raises(ValueError, match="the answer 'a' is no candidate"):
        read_wikihop(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"answer": ""}, "an answer is empty"),
        ({"answer": " \n"}, "an answer is empty"),
        ({"answer": None}, "must be texts, got NoneType"),
        ({"question": 3}, "must be texts, got int"),
        ({"question": "\ud800"}, "surrogates not allowed"),
        ({"context": [["A", ["\ud800"]]]}, "surrogates not allowed"),
        ({"context": [["A"]]}, "not enough values"),
        ({"context": 5}, "is no file of HotpotQA"),
    ],
)
def test_questions_and_answers_are_texts_that_say_something(
    tmp_path: Path, change: dict, message: str
) -> None:
    path = tmp_path / "hotpot.json"
    one = {"question": "Q?", "answer": "yes", "context": [["A", ["One. "]]], **change}
    path.write_text(json.dumps([one]))
    with pytest.raises(ValueError, match=message) as problem:
        read_hotpotqa(path)
    assert str(problem.value).startswith(f"{path} is no file of HotpotQA: ")
    assert "\n" not in str(problem.value)


def test_a_number_of_too_many_digits_is_named_with_its_file(tmp_path: Path) -> None:
    path = tmp_path / "dev.json"
    path.write_text("[" + "1" * 5000 + "]")
    with pytest.raises(ValueError, match=r"dev.json is no JSON: Exceeds the limit"):
        read_wikihop(path)


@pytest.mark.slow
@pytest.mark.skipif(not DATA, reason="VORT_DATA names no folder with scan and babi")
def test_the_real_files_are_read_whole() -> None:
    sizes = {"simple": 4182, "length": 3920, "addprim_jump": 7706, "mcd1": 1045}
    for part, size in sizes.items():
        assert SCAN(source=f"{DATA}/scan", part=part).size("test") == size
    task = BABI(source=f"{DATA}/babi")
    asked = sum(
        int(answers_right(batch, batch["labels"]).shape[0])
        for batch in (task.batch("test", [index]) for index in range(task.size("test")))
    )
    assert asked == 20 * 1000
