"""Figures say which commit they are of, where there is a repository and where there is none."""

import subprocess
from pathlib import Path

import pytest

from vort.lab.report import provenance as module
from vort.lab.report.provenance import code_of_models, provenance, under_version_control


@pytest.fixture(autouse=True)
def nothing_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(module.COMMIT, raising=False)
    for function in (module._commit, code_of_models):
        function.cache_clear()


def git(folder: Path, *arguments: str) -> str:
    who = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
    command = ["git", *who, *arguments]
    done = subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True)
    return done.stdout.strip()


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package of one file of models and one of other things, in place of ours."""
    folder = tmp_path / "src"
    (folder / "ops").mkdir(parents=True)
    (folder / "lab").mkdir()
    for name in ("__init__.py", "ops/kernel.py", "lab/table.py"):
        (folder / name).write_text("")
    monkeypatch.setattr(module, "_SOURCE", folder)
    return folder


def test_the_commit_is_the_repositorys_and_changed_files_are_told(source: Path) -> None:
    git(source, "init", "-q")
    git(source, "add", ".")
    git(source, "commit", "-qm", "x")
    head = git(source, "rev-parse", "HEAD")
    found = provenance()
    assert head.startswith(found["commit"])
    assert len(found["commit"]) == 12
    assert found["dirty"] is False
    (source / "lab" / "table.py").write_text("changed")
    module._commit.cache_clear()
    assert provenance()["dirty"] is True


def test_without_a_repository_the_environment_says(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert (provenance()["commit"], provenance()["dirty"]) == ("unknown", None)
    for given, expected in (("abc1234", False), ("abc1234-dirty", True)):
        monkeypatch.setenv(module.COMMIT, given)
        module._commit.cache_clear()
        assert (provenance()["commit"], provenance()["dirty"]) == ("abc1234", expected)


def test_a_package_within_anothers_repository_is_not_of_its_commits(source: Path) -> None:
    git(source, "init", "-q")
    git(source, "commit", "-qm", "x", "--allow-empty")
    assert provenance()["commit"] == "unknown"


def test_the_code_changes_with_kernels_and_models_alone(source: Path) -> None:
    before = code_of_models()
    (source / "lab" / "table.py").write_text("changed")
    (source / "ops" / "__pycache__").mkdir()
    (source / "ops" / "__pycache__" / "kernel.pyc").write_text("x")
    code_of_models.cache_clear()
    assert code_of_models() == before
    (source / "ops" / "kernel.py").write_text("changed")
    code_of_models.cache_clear()
    assert code_of_models() != before


def test_files_under_version_control_are_known(tmp_path: Path) -> None:
    kept, free, gone = (tmp_path / name for name in ("kept", "free", "gone"))
    kept.write_text("")
    free.write_text("")
    assert under_version_control(tmp_path, [kept]) == []
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", "kept")
    assert under_version_control(tmp_path, [kept, free, gone]) == [kept]
    assert under_version_control(tmp_path / "none", [kept]) == []
