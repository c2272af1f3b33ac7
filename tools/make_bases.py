"""Fit the bases that come with the package and write src/vort/fractional/bases.json.

python tools/make_bases.py
"""

import json
from pathlib import Path

from rich.progress import track

from vort.fractional import PowerLawBasis

# Round numbers for the mathematics, powers of two for context lengths.
HORIZONS = (
    *(1_000, 10_000, 100_000, 1_000_000),
    *(1 << exponent for exponent in (10, 11, 12, 13, 14, 15, 16, 17, 20)),
)
TERMS = (4, 6, 8, 10, 12, 16)


def main() -> None:
    wanted = [(horizon, terms) for horizon in sorted(HORIZONS) for terms in TERMS]
    entries = [
        PowerLawBasis.fit(horizon, terms, use_shipped=False).to_dict()
        for horizon, terms in track(wanted, "fitting bases")
    ]
    target = Path(__file__).parents[1] / "src" / "vort" / "fractional" / "bases.json"
    target.write_text("[\n" + ",\n".join(json.dumps(entry) for entry in entries) + "\n]\n")
    print(f"{len(entries)} bases, {target.stat().st_size / 1e3:.0f} kB")


if __name__ == "__main__":
    main()
