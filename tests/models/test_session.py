"""A session streams at constant cost, branches, and survives crashes to the bit."""

import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

pytest.importorskip("transformers")

import typer
from typer.testing import CliRunner

import vort
from tests.forks import Forked
from tests.memories.cases import NAMES
from vort.lab.commands.command import Command
from vort.lab.commands.generate import generate
from vort.models import ByteTokenizer, VortConfig, VortForCausalLM, VortSession
from vort.models.session_file import read_state, write_state
from vort.sessions import sample_token

PROMPT = "It was a bright cold day. " * 4


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    # Sums are split by thread; a child process must split them alike. It is also faster here.
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def make_model(seed: int = 0, **changes: Any) -> VortForCausalLM:
    torch.manual_seed(seed)
    sizes: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    sizes |= {"sliding_window": 16, "initializer_range": 0.1}
    config = VortConfig(**{**sizes, **changes})
    return VortForCausalLM(config).eval()


@pytest.fixture(scope="module")
def model() -> VortForCausalLM:
    return make_model()


def started(model: VortForCausalLM, **settings: Any) -> VortSession:
    session = VortSession(model, ByteTokenizer(), **settings)
    session.feed(PROMPT)
    return session


def test_generation_equals_that_of_hugging_face(model: VortForCausalLM) -> None:
    ids = torch.tensor([list(PROMPT.encode())])
    expected = model.generate(ids, max_new_tokens=40, do_sample=False, eos_token_id=None)
    assert (
        list(started(model).generate(40, temperature=0, stop=()))
        == expected[0, ids.shape[1] :].tolist()
    )


@settings(max_examples=12)
@given(st.lists(st.integers(1, 60), min_size=1, max_size=6), st.integers(1, 50))
def test_feeding_in_pieces_equals_feeding_at_once(pieces: list[int], chunk: int) -> None:
    model = make_model()
    ids = torch.randint(256, (sum(pieces),))
    whole = VortSession(model)
    whole.feed(ids)
    split = VortSession(model, chunk_size=chunk)
    for piece in ids.split(pieces):
        split.feed(piece)
    assert split.tokens_seen == whole.tokens_seen
    torch.testing.assert_close(split.logits, whole.logits, atol=1e-4, rtol=1e-4)


def test_pieces_cut_at_multiples_of_the_chunk_give_the_same_bits(model: VortForCausalLM) -> None:
    ids = torch.randint(256, (100,))
    once = VortSession(model, chunk_size=32)
    once.feed(ids)
    twice = VortSession(model, chunk_size=32)
    twice.feed(ids[:64])
    twice.feed(ids[64:])
    assert torch.equal(once.logits, twice.logits)


def test_a_branch_goes_its_own_way_and_the_same_way_if_asked(model: VortForCausalLM) -> None:
    session = started(model)
    branch = session.branch()
    other = session.branch()
    other.feed("Something else entirely")
    assert list(session.generate(20)) == list(branch.generate(20))
    assert session.tokens_seen == branch.tokens_seen != other.tokens_seen


@pytest.mark.parametrize("settings", [{"temperature": 0}, {"top_k": 5}, {"top_p": 0.8}, {}])
def test_a_loaded_session_goes_on_to_the_bit(
    model: VortForCausalLM, settings: dict[str, Any], tmp_path: Path
) -> None:
    session = started(model, seed=3)
    list(session.generate(10, **settings))
    session.save(tmp_path / "state")
    loaded = VortSession.load(tmp_path / "state", model, session.tokenizer)
    assert torch.equal(loaded.logits, session.logits)
    assert list(loaded.generate(40, **settings)) == list(session.generate(40, **settings))
    loaded.feed(PROMPT)
    session.feed(PROMPT)
    assert torch.equal(loaded.logits, session.logits)


@pytest.mark.parametrize("memory", NAMES)
def test_every_memory_and_half_precision_can_be_saved(memory: str, tmp_path: Path) -> None:
    model = make_model(memory=memory).to(torch.bfloat16)
    session = started(model)
    session.save(tmp_path / "state")
    loaded = VortSession.load(tmp_path / "state", model)
    assert list(loaded.generate(8)) == list(session.generate(8))
    assert torch.equal(loaded.logits, session.logits)


def test_a_model_made_in_inference_mode_will_do(tmp_path: Path) -> None:
    with torch.inference_mode():
        model = make_model()
    started(model).save(tmp_path / "state")
    assert VortSession.load(tmp_path / "state", make_model()).tokens_seen == len(PROMPT)


def test_a_session_that_was_fed_nothing_can_be_saved(
    model: VortForCausalLM, tmp_path: Path
) -> None:
    VortSession(model, ByteTokenizer()).save(tmp_path / "state")
    loaded = VortSession.load(tmp_path / "state", model, ByteTokenizer())
    loaded.feed(PROMPT)
    assert torch.equal(loaded.logits, started(model).logits)


def test_a_session_is_for_one_model_and_says_so(model: VortForCausalLM, tmp_path: Path) -> None:
    path = tmp_path / "state"
    started(model).save(path)
    with pytest.raises(ValueError, match="another model: its weights differs"):
        VortSession.load(path, make_model(seed=1))
    with pytest.raises(ValueError, match="another model: its config differs"):
        VortSession.load(path, make_model(sliding_window=8))
    changed = make_model()
    with torch.no_grad():
        changed.lm_head.weight[0, 0] += 1
    with pytest.raises(ValueError, match="weights"):
        VortSession.load(path, changed)
    assert VortSession.load(path, make_model()).tokens_seen == len(PROMPT)


def test_a_model_loaded_from_disk_is_the_same_model(model: VortForCausalLM, tmp_path: Path) -> None:
    started(model).save(tmp_path / "state")
    model.save_pretrained(tmp_path / "model")
    again = VortForCausalLM.from_pretrained(tmp_path / "model")
    assert VortSession.load(tmp_path / "state", again).tokens_seen == len(PROMPT)


def test_weights_changed_after_a_save_are_noticed(tmp_path: Path) -> None:
    model = make_model()
    started(model).save(tmp_path / "state")
    with torch.no_grad():
        model.lm_head.weight[0, 0] += 1
    with pytest.raises(ValueError, match="weights"):
        VortSession.load(tmp_path / "state", model)


def test_weights_that_a_fused_optimizer_changed_are_noticed(tmp_path: Path) -> None:
    """On a CPU it does not count that it writes."""
    model = make_model()
    started(model).save(tmp_path / "state")
    ids = torch.arange(8)[None]
    model(ids, labels=ids).loss.backward()
    torch.optim.AdamW(model.parameters(), lr=0.1, fused=True).step()
    with pytest.raises(ValueError, match="weights"):
        VortSession.load(tmp_path / "state", model)
    started(model).save(tmp_path / "state")
    model.save_pretrained(tmp_path / "model")
    again = VortForCausalLM.from_pretrained(tmp_path / "model")
    assert VortSession.load(tmp_path / "state", again).tokens_seen == len(PROMPT)


def test_another_version_is_refused(
    model: VortForCausalLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started(model).save(tmp_path / "state")
    monkeypatch.setattr(vort, "__version__", "99.0.0")
    with pytest.raises(ValueError, match=r"saved by vort .*, and this is vort 99\.0\.0"):
        VortSession.load(tmp_path / "state", model)


@pytest.mark.parametrize("kept", [0, 4, 100, 0.5, 0.99])
def test_a_truncated_file_is_refused(model: VortForCausalLM, tmp_path: Path, kept: float) -> None:
    path = tmp_path / "state"
    started(model).save(path)
    data = path.read_bytes()
    path.write_bytes(data[: int(kept * len(data)) if isinstance(kept, float) else kept])
    with pytest.raises(ValueError, match="damaged"):
        VortSession.load(path, model)


def test_a_flipped_bit_is_noticed(model: VortForCausalLM, tmp_path: Path) -> None:
    path = tmp_path / "state"
    started(model).save(path)
    data = bytearray(path.read_bytes())
    data[-1000] ^= 1
    path.write_bytes(data)
    with pytest.raises(ValueError, match="checksum"):
        VortSession.load(path, model)


def test_a_missing_file_is_reported(model: VortForCausalLM, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no session at"):
        VortSession.load(tmp_path / "none", model)


Change = Callable[[dict[str, Any], dict[str, Any]], object]
MADE_UP: dict[str, tuple[Change, str]] = {
    "integers": (
        lambda x, _: x.update({"layers.0.memory.G": x["layers.0.memory.G"].int()}),
        r"layers\.0\.memory\.G must be torch\.float32, got torch\.int32",
    ),
    "a layer gone": (
        lambda x, _: [x.pop(name) for name in list(x) if name.startswith("layers.1.")],
        r"layers\.1\..* is missing",
    ),
    "a layer more": (lambda x, _: x.update({"layers.7.conv": x["layers.0.conv"]}), "has no place"),
    "another shape": (
        lambda x, _: x.update({"layers.0.conv": x["layers.0.conv"][:, 1:]}),
        r"layers\.0\.conv must have shape \[1, 3, 96\], got \[1, 2, 96\]",
    ),
    "NaN": (lambda x, _: x["layers.0.memory.b"].fill_(float("nan")), "must be finite"),
    "a count": (lambda x, _: x["layers.0.local.seen"].fill_(-1), "must lie in 0..104"),
    "logits": (lambda x, _: x.update(logits=x["logits"][:9]), r"logits must have shape \[259\]"),
    "no logits": (lambda x, _: x.pop("logits"), "logits is missing"),
    "tokens": (lambda _, about: about.update(tokens_seen="many"), "tokens_seen must be an integer"),
    "pieces": (lambda _, about: about.update(chunk_size=0), "chunk_size must be an integer from 1"),
    "no model": (lambda _, about: about.pop("weights"), "belongs to another model"),
    "no version": (lambda _, about: about.pop("vort"), "was saved by vort None"),
}


@pytest.mark.parametrize("kind", MADE_UP)
def test_a_file_with_a_checksum_of_its_own_is_looked_at(
    model: VortForCausalLM, tmp_path: Path, kind: str
) -> None:
    change, words = MADE_UP[kind]
    path = tmp_path / "state"
    started(model).save(path)
    tensors, about = read_state(path)
    change(tensors, about)
    write_state(path, tensors, about)
    with pytest.raises(ValueError, match=words):
        VortSession.load(path, model)


def test_a_pipe_is_no_session(model: VortForCausalLM, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "state")
    with pytest.raises(ValueError, match="no regular file"):
        VortSession.load(tmp_path / "state", model)


def test_a_save_that_fails_leaves_the_former_state(
    model: VortForCausalLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = started(model)
    session.save(tmp_path / "state")
    session.feed("more")

    def full_disk(*args: Any) -> None:
        raise OSError("no space left on device")

    for step in ("fsync", "replace"):
        with monkeypatch.context() as patch:
            patch.setattr(os, step, full_disk)
            with pytest.raises(OSError, match="no space"):
                session.save(tmp_path / "state")
        assert os.listdir(tmp_path) == ["state"]
        assert VortSession.load(tmp_path / "state", model).tokens_seen == len(PROMPT)


def test_a_file_system_without_unnamed_files_will_do(
    model: VortForCausalLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, "O_TMPFILE", raising=False)
    started(model).save(tmp_path / "state")
    assert os.listdir(tmp_path) == ["state"]
    assert VortSession.load(tmp_path / "state", model).tokens_seen == len(PROMPT)


def test_an_interrupted_step_leaves_the_session_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model()
    session = started(model)
    expected = list(session.branch().generate(10))

    def interrupt(*args: Any, **kwargs: Any) -> None:
        raise KeyboardInterrupt

    tokens = session.generate(10)
    first = [next(tokens) for _ in range(3)]
    with monkeypatch.context() as patch:  # the first layer has stored its state by then
        patch.setattr(model.model.layers[1], "forward", interrupt)
        with pytest.raises(KeyboardInterrupt):
            next(tokens)
    assert session.tokens_seen == len(PROMPT) + 3
    assert first + list(session.generate(7)) == expected


CHILD = """
import os, signal, sys
import torch
torch.set_num_threads(1)
torch.use_deterministic_algorithms(True, warn_only=True)
torch.utils.deterministic.fill_uninitialized_memory = True
from vort.models import VortForCausalLM, VortSession

folder, fatal_save = sys.argv[1], int(sys.argv[2])
model = VortForCausalLM.from_pretrained(folder + "/model").eval()
session = VortSession.load(folder + "/sessions/state", model)
saves = 0
flush = os.fsync
def dying_flush(file):
    if saves == fatal_save:
        os.kill(os.getpid(), signal.SIGKILL)  # written, not yet safe, not yet named
    flush(file)
os.fsync = dying_flush
for count, _ in enumerate(session.generate(100_000, stop=()), 1):
    if count % 7 == 0:
        saves += 1
        session.save(folder + "/sessions/state")
        print(saves, flush=True)
"""


@pytest.mark.parametrize("fatal_save", [3, 0], ids=["within a save", "anywhere"])
def test_after_kill_9_the_session_goes_on_to_the_bit(
    model: VortForCausalLM, tmp_path: Path, fatal_save: int
) -> None:
    folder = tmp_path / "sessions"
    folder.mkdir()
    session = started(model)
    session.save(folder / "state")
    model.save_pretrained(tmp_path / "model")
    child = Forked(CHILD, tmp_path, fatal_save)
    try:
        if fatal_save == 0:
            assert "4\n" in child.stdout
            time.sleep(0.013)
            child.send_signal(signal.SIGKILL)
        assert child.wait() == -signal.SIGKILL
    finally:
        child.end()
    assert os.listdir(folder) == ["state"]
    resumed = VortSession.load(folder / "state", model)
    done = resumed.tokens_seen - len(PROMPT)
    assert done == 14 if fatal_save else done >= 28
    uninterrupted = list(session.generate(done + 30, stop=()))
    assert list(resumed.generate(30, stop=())) == uninterrupted[done:]
    assert torch.equal(resumed.logits, session.logits)


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


class _Work(TorchDispatchMode):
    """Counts calls of operators and the numbers they make."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = self.numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        self.calls += 1
        self.numbers += sum(x.numel() for x in tree_leaves(made) if isinstance(x, torch.Tensor))
        return made


def stream_and_measure(total: int, piece: int) -> tuple[float, tuple[int, int], int]:
    """Growth of resident memory after the first tenth, the last piece's work, state bytes."""
    session = VortSession(make_model(num_hidden_layers=1), chunk_size=1024)
    tokens = torch.randint(256, (piece,))
    memory: list[int] = []
    for step in range(total // piece - 1):
        session.feed(tokens)
        if step % 25 == 0:
            memory.append(resident_bytes())
    with _Work() as counted:
        session.feed(tokens)
    assert session.tokens_seen == total
    memory = memory[len(memory) // 10 :]
    return max(memory) / memory[0] - 1, (counted.calls, counted.numbers), session.nbytes


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads memory from /proc")
@pytest.mark.parametrize(
    ("total", "piece"),
    [
        (10_000, 40),
        pytest.param(200_000, 10, marks=pytest.mark.slow),
    ],
)
def test_streaming_costs_the_same_forever(total: int, piece: int) -> None:
    grown, work, state = stream_and_measure(total, piece)
    assert grown < 0.02
    assert (work, state) == stream_and_measure(10 * piece, piece)[1:]


def test_generation_costs_the_same_after_many_tokens(model: VortForCausalLM) -> None:
    def work(session: VortSession) -> tuple[int, int]:
        tokens = session.generate(3, stop=())
        next(tokens)
        with _Work() as counted:
            next(tokens)
        return counted.calls, counted.numbers

    fresh, old = started(model), started(model)
    old.feed(torch.randint(256, (5_000,)))
    assert work(old) == work(fresh)
    assert work(fresh) > (10, 10)


@given(st.text(max_size=20), st.binary(max_size=12))
def test_streamed_text_is_the_text_of_the_tokens(text: str, noise: bytes) -> None:
    from vort.sessions.session import _as_text

    tokenizer = ByteTokenizer()
    ids = list(text.encode() + noise + text.encode())
    pieces = list(_as_text(iter(ids), tokenizer))
    assert "".join(pieces) == tokenizer.decode(ids)
    if not noise:
        assert all(pieces)


def test_stream_needs_a_tokenizer_and_hides_the_end(model: VortForCausalLM) -> None:
    with pytest.raises(ValueError, match="needs a tokenizer"):
        VortSession(model).feed("text")
    session = started(model)
    session._logits = torch.zeros(259).index_fill(0, torch.tensor(258), 100.0)
    assert list(session.generate(5, temperature=0)) == [258]
    session._logits = torch.zeros(259).index_fill(0, torch.tensor(258), 100.0)
    assert "".join(session.stream(5, temperature=0)) == ""


def test_top_k_and_top_p_draw_from_the_likeliest() -> None:
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
    generator = torch.Generator().manual_seed(0)

    def drawn(**settings: Any) -> set[int]:
        return {sample_token(logits, generator, **settings) for _ in range(400)}

    assert drawn() == {0, 1, 2, 3}
    assert drawn(top_k=2) == {0, 1}
    assert drawn(top_p=0.6) == {0, 1}
    assert drawn(top_p=0.01) == {0}
    assert drawn(temperature=0) == drawn(temperature=0.01) == {0}
    assert drawn(temperature=1e-40) == drawn(temperature=5e-324) == {0}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperature": -1.0}, "temperature must be 0"),
        ({"top_k": 0}, "top_k must be at least 1, got 0"),
        ({"top_p": 1.5}, r"top_p must lie in \(0, 1\], got 1.5"),
        ({"max_new_tokens": -1}, "max_new_tokens must not be negative"),
    ],
)
def test_wrong_settings_are_named_at_once(
    model: VortForCausalLM, settings: dict[str, Any], message: str
) -> None:
    session = started(model)
    with pytest.raises(ValueError, match=message):
        session.generate(**{"max_new_tokens": 3, **settings})


def test_tokens_to_stop_at_may_be_a_tensor(model: VortForCausalLM) -> None:
    first = next(started(model).generate(1, temperature=0, stop=()))
    found = started(model).generate(9, temperature=0, stop=torch.tensor([first]))  # type: ignore[arg-type]
    assert list(found) == [first]


def test_wrong_input_is_named(model: VortForCausalLM) -> None:
    session = VortSession(model)
    with pytest.raises(ValueError, match="nothing has been fed"):
        session.generate(3)
    with pytest.raises(TypeError, match=r"tokens must be integers, got torch.float32"):
        session.feed([5.9, 6.2])
    with pytest.raises(TypeError, match=r"tokens must be integers, got torch.bool"):
        session.feed(torch.tensor([True, False]))
    with pytest.raises(ValueError, match=r"tokens must lie in 0\.\.258, got 300 at 1"):
        session.feed([5, 300])
    with pytest.raises(ValueError, match=r"shape \[T\] or \[1, T\], got \[2, 3\]"):
        session.feed(torch.zeros(2, 3, dtype=torch.long))
    with pytest.raises(ValueError, match="entity_mask must have one entry"):
        session.feed([1, 2], torch.ones(3))
    for wrong in (None, b"bytes", ["It", "was"]):
        kind = type(wrong).__name__
        with pytest.raises(TypeError, match=f"tokens must be a text or token ids, got {kind}"):
            session.feed(wrong)  # type: ignore[arg-type]
    session.feed([1, 2])
    drawn = session._generator.get_state()
    with pytest.raises(TypeError, match="stop must be token ids, got the text 'end'"):
        session.generate(3, seed=5, stop="end")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="stop must be token ids, got 5"):
        session.generate(3, seed=5, stop=5)  # type: ignore[arg-type]
    assert torch.equal(session._generator.get_state(), drawn)
    for size in (2.5, 0, "16"):
        with pytest.raises(ValueError, match="chunk_size must be a whole number >= 1, got"):
            VortSession(model, chunk_size=size)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="VortForCausalLM, got str"):
        VortSession("model")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="evaluation mode"):
        VortSession(make_model().train())


def test_an_entity_mask_reaches_the_model() -> None:
    model = make_model(use_entity=True)
    marks = torch.zeros(50)
    marks[20:30] = 1
    plain, marked = VortSession(model), VortSession(model, chunk_size=16)
    ids = torch.randint(256, (50,))
    plain.feed(ids)
    marked.feed(ids, marks)
    expected = model(ids[None], entity_mask=marks[None]).logits[0, -1]
    torch.testing.assert_close(marked.logits, expected, atol=1e-4, rtol=1e-4)
    assert not torch.equal(plain.logits, marked.logits)


def test_vort_generate_streams_and_goes_on(tmp_path: Path) -> None:
    model = make_model(eos_token_id=None)
    model.save_pretrained(tmp_path / "model")
    app = typer.Typer()
    app.command()(generate)

    def run(*arguments: str) -> Any:
        return CliRunner().invoke(app, [str(tmp_path / "model"), *arguments])

    state = ["--session", str(tmp_path / "state"), "--save-every", "4"]
    first = run("--prompt", PROMPT, "--max-new-tokens", "10", "--seed", "5", *state)
    assert first.exit_code == 0, first.output
    second = run("--max-new-tokens", "20", *state)
    assert second.exit_code == 0, second.output
    resumed = VortSession.load(tmp_path / "state", model)
    straight = started(model, seed=5)
    text = ByteTokenizer().decode(list(straight.generate(10)), skip_special_tokens=True)
    assert first.stdout == text + "\n"
    list(straight.generate(20))
    assert torch.equal(straight.logits, resumed.logits)


def test_vort_generate_names_what_is_wrong(model: VortForCausalLM, tmp_path: Path) -> None:
    model.save_pretrained(tmp_path / "model")
    app = typer.Typer()
    app.command(cls=Command)(generate)
    for arguments, message in (
        ([str(tmp_path / "model"), "--temperature", "-2"], "temperature must be 0"),
        ([str(tmp_path / "model"), "--save-every", "0"], "must be at least 1, got 0"),
        ([str(tmp_path / "none")], "none"),
    ):
        result = CliRunner().invoke(app, arguments)
        assert result.exit_code == 2
        # The frame around an error breaks lines where it likes.
        assert message.replace(" ", "") in re.sub(r"[\s│]", "", result.output)
