from pathlib import Path

import pytest

from vort import files
from vort.files import write_atomically


@pytest.mark.parametrize("unnamed", [True, False])
@pytest.mark.parametrize("data", [b"\x00\xff", "né\n"])
def test_the_new_contents_replace_the_old_and_nothing_else_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data: bytes | str, unnamed: bool
) -> None:
    if not unnamed:  # as on systems without files that have no name yet
        monkeypatch.setattr(files, "_write_unnamed", lambda *_: False)
    path = tmp_path / "state"
    path.write_text("a longer text that stood there before")
    write_atomically(path, data)
    assert path.read_bytes() == (data.encode() if isinstance(data, str) else data)
    assert list(tmp_path.iterdir()) == [path]


def test_a_write_that_fails_leaves_the_old_contents(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "state"
    path.write_text("before")

    def full(*_: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(files.os, "fsync", full)
    with pytest.raises(OSError, match="no space"):
        write_atomically(path, "after")
    assert path.read_text() == "before"
    assert list(tmp_path.iterdir()) == [path]
