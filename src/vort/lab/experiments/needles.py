"""Needles in texts up to 131,072 tokens: what is found by length and depth, and at what cost."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vort.lab.experiments.cell import Cell, Size
from vort.lab.experiments.experiment import Experiment, Figure, Record, Summary
from vort.lab.experiments.models import BY_KEY, MODELS, build_model, sized
from vort.lab.experiments.origins import training_notes
from vort.lab.experiments.recall import has_note
from vort.lab.experiments.scores import (
    as_planned,
    by_row,
    label_of,
    labels_of,
    lead_in_points,
    row_of,
    seed_interval,
    seeds_of,
    show,
)
from vort.lab.experiments.search import first_searched
from vort.lab.report.tables import Sheet
from vort.lab.training.metrics import Interval
from vort.lab.verdicts import Claim, judge_floor

__all__ = [
    "DECODING",
    "NEEDLES",
    "OURS",
    "QUADRATIC",
    "TRAINING",
    "long_config",
    "searched_rate",
    "seeds_and_rows",
]

_MODEL: dict[Size, dict[str, Any]] = {
    "laptop": {
        **BY_KEY,
        "num_hidden_layers": 1,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "head_dim": 32,
        "num_features": 32,
        "intermediate_size": 128,
        "num_scales": 4,
        "horizon": 4096,
    },
    "paper": {
        **BY_KEY,
        "num_hidden_layers": 2,
        "hidden_size": 256,
        "num_attention_heads": 4,
        "num_scales": 12,
        "horizon": 131_072,
    },
}
_TASK: dict[Size, dict[str, Any]] = {
    "laptop": {
        "name": "multi_needle",
        "length": 256,
        "mixed": (128, 256),
        "needles": 4,
        "needles_from": 1,
        "asked": "all",
        "words": 64,
        "values": 16,
        "validation_sequences": 40,
    },
    "paper": {
        "name": "multi_needle",
        "length": 4096,
        "mixed": (256, 512, 1024, 2048, 4096),
        # Texts that follow each other in a sequence would teach to forget the one before.
        "apart": 8,
        "needles": 4,
        "needles_from": 1,
        "asked": "all",
        # Of a thousand numbers, nothing is learned in so few steps.
        "words": 256,
        "values": 64,
    },
}
TRAINING: dict[Size, dict[str, Any]] = {
    "laptop": {
        "steps": 300,
        "batch_size": 8,
        "evaluation_sequences": 40,
        "test_sequences": 0,
    },
    "paper": {
        # After 2,000 some seeds tell four needles apart, and others of the same row do not yet.
        "steps": 6000,
        "batch_size": 8,
        "evaluation_sequences": 64,
        "test_sequences": 0,
        "checkpoint_every": 500,
        "workers": 2,
    },
}
# Of rows that were not searched.
_RATE: dict[Size, float] = {"laptop": 3e-3, "paper": 2e-3}
_DEPTHS = (0.0, 0.11, 0.22, 0.33, 0.44, 0.56, 0.67, 0.78, 0.89, 1.0)
_MAP: dict[Size, dict[str, Any]] = {
    "laptop": {"lengths": (256, 512, 1024, 2048, 4096), "depths": _DEPTHS, "sequences": 20},
    "paper": {
        "lengths": (4096, 8192, 16_384, 32_768, 65_536, 131_072),
        "depths": _DEPTHS,
        "sequences": 200,
    },
}
# Of what attends to every pair of positions, or goes token by token, half as many; the latter not
# to the end, which would take minutes.
_FEWER = 2
_H2O_LONGEST = 32_768
_MERGED: dict[Size, dict[str, Any]] = {
    "laptop": {"length": 1024, "documents": (2, 8, 32), "sequences": 20},
    "paper": {"length": 8192, "documents": (2, 8, 32), "sequences": 200},
}
_CONSTANT = ("vort", "exponential_learned_gated", "mixture_rates_gated")
# Memories that can be aged in closed form; of the last two a token is free in what it writes.
_AGED = (*_CONSTANT, "vort_free", "mixture_rates_free")
_ROWS: dict[Size, tuple[str, ...]] = {
    "laptop": _CONSTANT,
    "paper": (*_AGED, "softmax", "hybrid_half", "gla", "gated_delta"),
}
# Rows that claims are of, and no rivals of each other.
OURS = {"vort": "VORT", "vort_free": "VORT with free writes"}
_SEEDS: dict[Size, tuple[int, ...]] = {"laptop": (0,), "paper": (0, 1, 2)}
# Beside the comparison.
_ONCE = ("softmax", "hybrid_half", "gla", "gated_delta")
_KINDS = {"one": "one needle", "all": "four needles, all of them right"}
_FLOORS = {"one": 95.0, "all": 90.0}
# Rows whose memory grows, or that attend to every pair of positions in training.
QUADRATIC = ("softmax", "hybrid_half", "h2o")


def long_config(size: Size, model: str) -> dict[str, Any]:
    """Settings of a row's model for long texts: all alike but for the memory."""
    config = sized(size, _MODEL[size], {}, MODELS[model].settings)
    if config.get("memory") == "mixture":
        config["num_scales"] = _MODEL[size]["num_scales"]
    if config.get("memory") == "exponential":
        # Spread over the heads, up to the horizon.
        config["exponential_rate"] = None
    return config


def searched_rate(size: Size, row: str) -> tuple[str, dict[str, Any]]:
    """Whose search a row's learning rate is from, and the rate."""
    rows = (row, MODELS[row].kin or row)
    return first_searched([f"needles/{name}" for name in rows], size, _RATE[size])


def seeds_and_rows(size: Size) -> list[tuple[int, str]]:
    """Of all cells, the first seed of every row before the second of any."""
    first = _SEEDS[size][0]
    return [
        (seed, row)
        for seed in _SEEDS[size]
        for row in _ROWS[size]
        if seed == first or row not in _ONCE
    ]


def _state_of_vort(size: Size) -> int:
    """Numbers that the memory of a layer of VORT keeps."""
    from vort.layers import VortAttention
    from vort.models import VortConfig

    return int(VortAttention(VortConfig(**long_config(size, "vort"))).memory.state_size())


def cells(size: Size, data: Path | None = None) -> list[Cell]:
    """All cells."""
    found = {row: searched_rate(size, row) for row in _ROWS[size]}
    return [
        Cell(
            experiment="needles",
            size=size,
            model=model,
            seed=seed,
            task={**_TASK[size], "seed": seed},
            config=long_config(size, model),
            training={**TRAINING[size], **found[model][1]},
            search=found[model][0],
            after=_after(size, model),
        )
        for seed, model in seeds_and_rows(size)
    ]


def _after(size: Size, model: str) -> dict[str, Any]:
    shape = dict(_MAP[size])
    if model in QUADRATIC:
        shape["sequences"] //= _FEWER
    found: dict[str, Any] = {"needles": shape}
    if model in _AGED:
        found["merged_needles"] = _MERGED[size]
    if model == "softmax":
        lengths = [x for x in shape["lengths"] if x <= _H2O_LONGEST]
        budget = {"lengths": lengths, "state_numbers": _state_of_vort(size)}
        found["h2o_needles"] = {**shape, **budget}
    return found


def _label(row: str) -> str:
    return label_of(row).replace("h2o", "attention, H2O cache at VORT's state", 1)


def _with_h2o(records: Sequence[Record]) -> list[Record]:
    """All maps, those of full attention under H2O's policy as rows of their own."""
    more = [
        {
            **record,
            "needles": record["h2o_needles"],
            "cell": {**record["cell"], "model": "h2o"},
        }
        for record in records
        if "h2o_needles" in record
    ]
    return [*records, *more]


def _longest(record: Record) -> float | None:
    """Texts of the longest length whose four needles are all right, in percent."""
    found = record.get("needles", {}).get("all")
    last = found[max(found, key=int)] if found else None
    return None if last is None else float(100 * last["whole"] / last["sequences"])


def _lengths(records: Sequence[Record]) -> list[int]:
    return sorted({int(x) for record in records for x in record["needles"]["one"]})


def _whole(records: Sequence[Record], kind: str, length: int) -> Interval | None:
    """Texts that are answered right, in percent, over all depths."""
    return seed_interval(
        (record["cell"]["seed"], 100 * found["whole"] / found["sequences"])
        for record in records
        for found in [record["needles"][kind].get(str(length))]
        if found is not None
    )


def _places(records: Sequence[Record], kind: str, length: int) -> list[Interval | None]:
    """The same by depth."""
    return [
        seed_interval(
            (record["cell"]["seed"], 100 * found["right"][place] / found["asked"][place])
            for record in records
            for found in [record["needles"][kind].get(str(length))]
            if found is not None and found["asked"][place]
        )
        for place in range(len(records[0]["needles"]["depths"]))
    ]


def summarise(records: Sequence[Record], size: Size) -> Summary:
    """A table by length for one needle and for all, claims, and the map as a picture."""
    times = {row_of(record): record["decoding"] for record in records if "decoding" in record}
    records = [record for record in records if "needles" in record]
    if not records:
        return Summary([])
    found, lengths = by_row(_with_h2o(records)), _lengths(records)
    sheets = [
        Sheet(
            f"Texts with {words}: answered right (%), over all depths (worst depth)",
            ["model", "state", "ms a token", *(f"{length:,}" for length in lengths)],
            [_line(row, members, kind, lengths, times.get(row)) for row, members in found.items()],
        )
        for kind, words in _KINDS.items()
    ]
    sheets.append(
        Sheet(
            "Texts with four needles: answers right (%)",
            ["model", "state", *(f"{length:,}" for length in lengths)],
            [_answers(row, members, lengths) for row, members in found.items()],
        )
    )
    trained = records[0]["task"]["length"]
    notes = [
        f"Trained on texts up to {trained:,} tokens with one to four needles, all asked for; read "
        "in pieces, answers token by token given what stands before them. State is that of the "
        "longest text of a row; milliseconds a token, of one sequence alone, are those after it "
        "(how they were taken: what a token costs after a long text).",
        *training_notes(records, paper=False),
        *has_note(records),
        *_former_plan(records, size),
    ]
    if size == "laptop":
        notes.append(
            "Laptop size: a small vocabulary, one layer, a minute of training; four needles by key "
            "are only begun to be told apart."
        )
    labels = labels_of(records)

    def draw(path: Path) -> None:
        from vort.lab.report.figures.long_context import draw_needle_maps

        most = max(record["steps"] for record in records)

        def name(row: str, steps: int) -> str:
            return _label(row) if steps == most else f"{_label(row)}, {steps:,} steps"

        maps = {
            name(row, m[0]["steps"]): {
                kind: [[_mean(x) for x in _places(m, kind, length)] for length in lengths]
                for kind in _KINDS
            }
            for row, m in found.items()
        }
        depths = records[0]["needles"]["depths"]
        draw_needle_maps(path, maps, lengths, depths, _KINDS, trained)

    caption = (
        "Texts that are answered right, by length and by depth of a needle (0 %: at the beginning; "
        "of several needles, one of them), mean over seeds. Dashed: the longest text in training."
    )
    figures = [Figure("needle_map.png", caption, draw)]
    return Summary(sheets, _claims(as_planned(records), lengths), figures, notes, labels)


def _former_plan(records: Sequence[Record], size: Size) -> list[str]:
    """How long all rows are to be trained, where some of the plan were not."""
    planned = TRAINING[size]["steps"]
    whole = [r for r in as_planned(records) if r["cell"].get("share", 1) == 1]
    other = sorted({r["steps"] for r in whole if r["steps"] != planned})
    if not other:
        return []
    words = " and ".join(f"{steps:,}" for steps in other)
    return [f"All rows are planned with {planned:,} steps; those of {words} are of a former plan."]


def _mean(value: Interval | None) -> float | None:
    return None if value is None else value.mean


def _line(
    row: str,
    members: Sequence[Record],
    kind: str,
    lengths: Sequence[int],
    times: Mapping[str, Any] | None,
) -> list[str]:
    state = members[0]["needles"]["state_numbers"]
    longest = max(state, key=int)
    time = None if times is None else times["ms_per_token"].get(longest)
    line = [_label(row), f"{state[longest]:,}", "–" if time is None else f"{time:.2f}"]
    for length in lengths:
        every = [x.mean for x in _places(members, kind, length) if x is not None]
        worst = f" ({min(every):.0f})" if every else ""
        line.append(show(_whole(members, kind, length), 1) + worst)
    return line


def _answers(row: str, members: Sequence[Record], lengths: Sequence[int]) -> list[str]:
    """Answers that are right by themselves, whatever else of their text is."""
    state = members[0]["needles"]["state_numbers"]
    line = [_label(row), f"{state[max(state, key=int)]:,}"]
    for length in lengths:
        over = seed_interval(
            (m["cell"]["seed"], 100 * found["answers"] / found["sequences"] / needles)
            for m in members
            for found, needles in [(m["needles"]["all"].get(str(length)), m["needles"]["needles"])]
            if found is not None
        )
        line.append(show(over, 1))
    return line


def _claims(records: Sequence[Record], lengths: Sequence[int]) -> list[Claim]:
    found = by_row(records)
    rivals = [row for row in found if row not in (*OURS, *QUADRATIC)]
    claims = []
    for row in OURS:
        if row in found:
            claims += _floors(row, found[row], lengths)
            for length in lengths[-2:]:
                states = (
                    f"{OURS[row]} answers more texts of {length:,} tokens, mean of one needle and "
                    "of all, than every rival that trains in linear time"
                )
                gains = {rival: _gain(found[row], found[rival], length) for rival in rivals}
                claims += lead_in_points(states, gains)
    return claims


def _floors(row: str, ours: Sequence[Record], lengths: Sequence[int]) -> list[Claim]:
    """Whether a row of ours answers as many texts as it is to, one needle and all."""
    claims = []
    for kind, words in _KINDS.items():
        every = {
            (length, place): value
            for length in lengths
            for place, value in enumerate(_places(ours, kind, length))
            if value is not None
        }
        length, place = min(every, key=lambda key: every[key].mean)
        lowest, depth = every[length, place], ours[0]["needles"]["depths"][place]
        claims.append(
            Claim(
                "ours",
                f"{OURS[row]} answers at least {_FLOORS[kind]:.0f} % of texts with {words} at "
                f"every length to {lengths[-1]:,} and at every depth",
                f"lowest is {show(lowest, 1)} at {length:,} tokens and a depth of {depth:.0%}, "
                f"{seeds_of(lowest)}",
                judge_floor(list(every.values()), _FLOORS[kind]),
            )
        )
    return claims


def _gain(ours: Sequence[Record], rival: Sequence[Record], length: int) -> Interval | None:
    """How many more texts are answered in points, mean of both kinds, seed by seed."""

    def score(record: Record) -> float:
        both = [record["needles"][kind][str(length)] for kind in _KINDS]
        shares = [float(found["whole"] / found["sequences"]) for found in both]
        return 100 * sum(shares) / len(shares)

    other = {record["cell"]["seed"]: score(record) for record in rival}
    return seed_interval(
        (record["cell"]["seed"], score(record) - other[record["cell"]["seed"]])
        for record in ours
        if record["cell"]["seed"] in other
    )


NEEDLES = Experiment(
    name="needles",
    title="Needles in long texts",
    about='Facts "The special magic number for KEY is VALUE." at chosen depths of made sentences, '
    "asked for at the end: one, or four, all of which must be right. Models are trained on texts "
    "up to 4,096 tokens (256 at laptop size), lengths mixed, and tested to 131,072 (4,096), by "
    "length and depth. All share projections, convolution and MLP, and have equally many "
    "parameters.",
    cells=cells,
    summarise=summarise,
    uses=("decoding",),
    searchable=True,
    past=("four needles at the longest (%)", _longest),
)


def decoding_cells(size: Size, data: Path | None = None) -> list[Cell]:
    """Every row of the map once, and H2O's cache; at paper size, where there is a GPU to time."""
    if size == "laptop":
        return []
    lengths = sorted({_TASK[size]["length"], _H2O_LONGEST, _MAP[size]["lengths"][-1]})
    return [
        Cell(
            experiment="decoding",
            size=size,
            model=model,
            seed=0,
            task=_TASK[size],
            config=long_config(size, "softmax" if model == "h2o" else model),
            training={
                "lengths": lengths,
                "timed": 64,
                "state_numbers": _state_of_vort(size) if model == "h2o" else None,
            },
        )
        for model in (*_ROWS[size], "h2o")
    ]


def time_decoding(cell: Cell) -> dict[str, Any]:
    """What `decoding_times` says of a row; weights make no difference, so none are trained."""
    import torch

    from vort.lab.experiments.long_context import decoding_times
    from vort.lab.tasks import make_task

    model = build_model(make_task(**cell.task), cell.config, cell.seed)
    if torch.cuda.is_available():
        model = model.to("cuda", torch.bfloat16)
    return {"decoding": decoding_times(model, **cell.training)}


def summarise_decoding(records: Sequence[Record], size: Size) -> Summary:
    """Milliseconds a token and bytes kept, by what was read before."""
    if not records:
        return Summary([])
    lengths = list(records[0]["decoding"]["ms_per_token"])
    rows = []
    for record in records:
        found = record["decoding"]
        times = [f"{found['ms_per_token'][length]:.2f}" for length in lengths]
        kept = [f"{4 * found['state_numbers'][length] / 2**20:,.2f}" for length in lengths]
        rows.append([_label(row_of(record)), *times, *kept])
    sheet = Sheet(
        "One sequence alone: milliseconds a token, and MiB kept, after so many tokens",
        [
            "model",
            *(f"{int(length):,}: ms" for length in lengths),
            *(f"{int(length):,}: MiB" for length in lengths),
        ],
        rows,
    )
    notes = [
        "Models of the needle map; what is kept counted at four bytes a number. What does not grow "
        "is timed once, as generate writes; a cache that grows, a token at a time.",
        *_recorded_note(records),
    ]
    labels = {record["cell"]["model"]: _label(record["cell"]["model"]) for record in records}
    return Summary([sheet], notes=notes, labels=labels)


def _recorded_note(records: Sequence[Record]) -> list[str]:
    """Whose steps cost their kernels alone, and whose cost their launches; nothing on a CPU."""
    found = {row_of(record): _is_recorded(record) for record in records}
    rows, others = (
        [_label(row) for row, recorded in found.items() if recorded is wanted]
        for wanted in (True, False)
    )
    if not rows or not others:
        return []
    return [
        f"On a GPU a step of these rows is recorded and replayed as one CUDA graph: "
        f"{', '.join(rows)}. Steps of the others are launched kernel by kernel, which is most of "
        "their time: compare these by how they grow with the text, not with the first."
    ]


def _is_recorded(record: Record) -> bool:
    found = record["decoding"]
    if "recorded" in found:
        return bool(found["recorded"])
    # Cells of before did not say; then it was what calls `retention`, in all layers.
    steady = len(set(found["state_numbers"].values())) == 1
    return steady and record["model"].get("memory", "vort") in ("vort", "mixture", "exponential")


DECODING = Experiment(
    name="decoding",
    title="What a token costs after a long text",
    about="Milliseconds of a token and what is kept of the text, by the models of the needle map, "
    "one sequence alone, nothing else on the device.",
    cells=decoding_cells,
    summarise=summarise_decoding,
    measure=time_decoding,
    alone=True,
)
