import json
import re
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from vort.cli import app
from vort.fractional import PowerLawBasis

runner = CliRunner(env={"TERM": "dumb"})


def plain(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


def test_kernel_prints_basis_certificate_and_comparison(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vort.commands.kernel.console", Console(width=120))
    picture, saved = tmp_path / "kernels.png", tmp_path / "basis.json"
    arguments = ["kernel", "--horizon", "10000", "--tolerance", "2e-3"]
    result = runner.invoke(app, [*arguments, "--plot", str(picture), "--save", str(saved)])
    output = plain(result.output)
    assert result.exit_code == 0, output
    assert "11 shared rates" in output
    assert "worst relative error 1.3" in output
    rows = {line.split("│")[1].strip(): line for line in output.splitlines() if "│" in line}
    assert "15" in rows["Legendre, as printed"]
    assert "150" in rows["Legendre, as printed"]
    assert "1.8e-01" in rows["Legendre, E1 corrected"]  # order .9 fails, as E2 says
    assert rows["shared rates (ours)"].count("1.3e-03") >= 3
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert PowerLawBasis.load(saved).terms == 11


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["kernel", "--horizon", "0"], "horizon must be a whole number >= 1, got 0"),
        (["kernel", "--tolerance", "1e-9"], "tolerance must be reachable within 64 terms"),
        (["kernel", "--tolerance", "0.1", "--terms", "4"], "give either terms or tolerance"),
        (["reproduce", "--only", "dreams"], "--only takes kernel, got dreams"),
    ],
)
def test_bad_options_are_explained(arguments: list[str], message: str) -> None:
    result = runner.invoke(app, arguments)
    assert result.exit_code == 2
    flat = " ".join(plain(result.output).replace("│", " ").split())
    assert message in flat


def test_reproduce_writes_a_report_with_computed_verdicts(tmp_path: Path) -> None:
    result = runner.invoke(app, ["reproduce", "--only", "kernel", "--out", str(tmp_path)])
    assert result.exit_code == 0, result.output
    folder = tmp_path / "kernel"
    record = json.loads((folder / "results.json").read_text())
    verdicts = {claim["where"]: claim["verdict"] for claim in record["claims"]}
    assert verdicts["theorem soe"] == "reproduced once corrected"
    assert verdicts["abstract"] == "not reproduced"
    assert verdicts["theorem quant"] == "reproduced"
    assert {"command", "torch", "device"} <= set(record["made_by"])
    report = (folder / "report.md").read_text()
    for name in ("power_law.png", "kernels_soe.png"):
        assert name in report
        assert (folder / name).stat().st_size > 10_000
