"""Section plasticity, measured: who is remembered longer, and how fast orders converge."""

# transformers leaves its own hooks untyped.
# mypy: disable-error-code="no-untyped-call"

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vort.fractional import PowerLawBasis
from vort.lab.experiments.cell import Cell, Size
from vort.lab.experiments.experiment import Experiment, Figure, Summary
from vort.lab.report.tables import Sheet
from vort.lab.tasks import Batch, LabelCopy, ZipfRetrieval, embed_parts, sources_by_key
from vort.lab.training import Interval, TrainingConfig, interval, train
from vort.lab.verdicts import Claim, Verdict, judge, judge_sign
from vort.plasticity import (
    LayerScores,
    Retrievals,
    memory_features,
    model_retrieval_loss,
    record_memories,
    refine_by_layer,
    refine_orders,
    retrieval_loss,
    retrieval_objective,
)
from vort.plasticity.loss import Similarity

if TYPE_CHECKING:
    from vort.models import VortConfig, VortForCausalLM

__all__ = ["PLASTICITY", "claims", "one_order", "run"]

Array = NDArray[np.float64]
Record = dict[str, Any]

# Orders of all layers start here when they are free: the middle of the paper's range.
START = 0.5
SCALES = 8
HORIZON = 1000
HELD_OUT = 32


def run(
    seeds: Sequence[int] = (0, 1, 2),
    *,
    steps: int = 80,
    length: int = 128,
    learning_rate: float = 5e-3,
    weight: float = 1.0,
    iterations: int = 30,
    feature_map: str = "hedgehog",
    similarity: Similarity = "exp",
) -> Record:
    """Orders by kind of token with and without plasticity on label copy, ready for JSON.

    For each seed (model, data and order of sequences) a small model in the paper's mode (no gates)
    is trained twice, with L_ret beside the cross-entropy (`with`) and without it (`without`), and
    orders are read off held-out sequences. Then free orders, one for each token and head, are
    refined on queries and keys of the model trained with it, layer by layer (`refined`; figure
    diffusion-plasticity b). Nothing in any of the three says what an order should be.

    Args:
        seeds: one run of everything for each; intervals are over them.
        steps: training steps.
        length: positions of a sequence.
        learning_rate: the highest, in training.
        weight: of L_ret.
        iterations: descent steps in each layer, for free orders.
        feature_map: of the memories; "favor" is the paper's.
        similarity: for free orders: "exp", as eq. retrieval-loss prints it, or "features", as the
            memories take it. Trained features tell tokens apart so well that fillers stand in
            nobody's way: their orders then hardly move.

    Returns:
        "with", "without", "refined": for each, "runs" (one for each seed, with "orders" by layer
        and kind of token, loss curves, and scores of trained models) and "difference" (by layer:
        order of first mentions minus that of fillers, mean and 95 % interval over seeds); runs of
        "refined" have an "example": one sequence, kinds and orders by layer token by token;
        "one_order": see `one_order`; "settings".
    """
    runs: dict[str, list[Record]] = {"with": [], "without": [], "refined": []}
    for seed in seeds:
        task = _task(length, seed)
        for name, factor in (("without", 0.0), ("with", weight)):
            model, found = _train(task, feature_map, seed, steps, learning_rate, factor)
            runs[name].append({"seed": seed, **found})
        runs["refined"].append({"seed": seed, **_refine(model, task, iterations, similarity)})
    groups = {name: {"runs": each, "difference": _differences(each)} for name, each in runs.items()}
    settings: Record = {"seeds": list(seeds), "steps": steps, "learning_rate": learning_rate}
    settings |= {"weight": weight, "iterations": iterations, "feature_map": feature_map}
    settings["similarity"] = similarity
    settings["task"] = _task(length, 0).describe()
    return {**groups, "one_order": one_order(), "settings": settings}


def one_order(beta: float = 0.5, start: float = 0.95, iterations: int = 40) -> Record:
    """Descent on one order for all tokens beside the bound of eq. pl-rate, ready for JSON.

    Queries and keys are blank, so p_it is the kernel alone and L_ret the likelihood of the lags,
    which are drawn as d^-beta. The loss is then convex in the order ("curvature" is its least
    second derivative over [δ, 1]). L and μ are the theorem's own, over the whole interval, not
    along the path; F* is the minimum over the interval.
    """
    basis = PowerLawBasis.fit(HORIZON, SCALES)
    task = ZipfRetrieval(length=200, beta=beta, pairs=48)
    retrievals = Retrievals.of(task.batch("train", [0])["sources"])
    q = k = torch.zeros(1, task.length, 1, 1, dtype=torch.float64)
    orders = torch.linspace(basis.order_min, 1, 96, dtype=torch.float64)
    values, slopes = _scan(retrievals, orders, basis, task.length)
    curvatures = np.diff(slopes) / np.diff(orders.numpy())
    # The change of the slope over a cell is its mean curvature: a point may have a little more.
    smoothness = 1.1 * float(np.abs(curvatures).max())
    first = torch.tensor(start, dtype=torch.float64)
    settled = refine_orders(q, k, first, retrievals, basis, iterations=60)
    optimum = min(float(values.min()), min(settled.losses))
    away = values - optimum > 1e-9
    mu = float((slopes[away] ** 2 / (2 * (values[away] - optimum))).min())
    descent = refine_orders(
        q,
        k,
        first,
        retrievals,
        basis,
        iterations=iterations,
        smoothness=smoothness,
        optimum=optimum,
    )
    return {
        "order": float(descent.order),
        "losses": descent.losses,
        "bound": descent.bound_with(mu),
        "optimum": optimum,
        "smoothness": smoothness,
        "curvature": float(curvatures.min()),
        "pl_constant": mu,
        "step": descent.step,
        "rate": descent.rate,
        "rate_bound": 1 - descent.step * mu,
        "holds": descent.holds(mu),
    }


def claims(record: Record) -> list[Claim]:
    """The paper's statements on plasticity, judged by a record of `run`."""
    if len(record["settings"]["seeds"]) < 2:
        raise ValueError("record must be of at least 2 seeds to be judged, got 1")
    refined, trained, plain = (
        record[name]["difference"] for name in ("refined", "with", "without")
    )
    # What the paper says of all entities holds of those that are asked for.
    entities = judge_sign([_interval(refined[-1])])
    corrected: Verdict = "reproduced once corrected" if entities == "reproduced" else entities
    case = record["one_order"]
    ends = [each["orders"][-1] for each in record["refined"]["runs"]]
    return [
        Claim(
            "figure diffusion-plasticity (b)",
            "entity tokens converge to high order, other tokens settle at low order",
            f"free orders, last layer, first mentions less fillers: {_shown(refined[-1])}; "
            f"later mentions, entities that nobody asks for: {_mean(ends, 'later_mention'):.2f}, "
            f"beside {_mean(ends, 'first_mention'):.2f} and {_mean(ends, 'filler'):.2f}",
            corrected,
            "E23",
        ),
        Claim(
            "section plasticity",
            "orders are refined by retrieval feedback",
            f"learned orders, first mentions less fillers, by layer: "
            f"{', '.join(_shown(x) for x in trained)}; without the loss "
            f"{', '.join(_shown(x) for x in plain)}",
            judge_sign([_interval(found) for found in trained]),
        ),
        Claim(
            "theorem plasticity",
            "F - F* falls at least as (1 - ημ)^l",
            f"one order, convex: {case['rate']:.3f} a step, bound {case['rate_bound']:.3f}",
            judge(case["holds"] and case["rate"] <= case["rate_bound"]),
            "E18",
        ),
    ]


def _task(length: int, seed: int) -> LabelCopy:
    return LabelCopy(
        length=length,
        entities=4,
        mentions=3,
        names=16,
        labels=4,
        fillers=16,
        bounds=(length // 8, length // 2),
        seed=seed,
        train_sequences=None,
        validation_sequences=HELD_OUT,
        test_sequences=2 * HELD_OUT,
    )


def _config(task: LabelCopy, feature_map: str) -> "VortConfig":
    """A small model in the paper's mode: the order is all that a token says about its writing."""
    from vort.models import VortConfig

    return VortConfig(
        vocab_size=task.vocab_size,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=1,
        sliding_window=16,
        horizon=HORIZON,
        num_scales=SCALES,
        write_gate=False,
        read_weights=False,
        conv_size=0,
        output_gate=False,
        feature_map=feature_map,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
    )


def _train(
    task: LabelCopy, feature_map: str, seed: int, steps: int, learning_rate: float, weight: float
) -> "tuple[VortForCausalLM, Record]":
    """A model trained with this weight of L_ret, and what came of it."""
    from vort.models import VortForCausalLM

    torch.manual_seed(seed)
    model = VortForCausalLM(_config(task, feature_map))
    embed_parts(model, task)
    batch = task.batch("validation", range(HELD_OUT))
    before = model_retrieval_loss(model, batch["input_ids"], batch["sources"])
    config = TrainingConfig(
        steps=steps,
        batch_size=8,
        learning_rate=learning_rate,
        seed=seed,
        precision="float32",
        evaluation_sequences=1,
        log_every=5,
        progress=False,
    )
    objective = retrieval_objective(
        weight, sources=sources_by_key(task.vocabulary), num_classes=task.num_classes
    )
    result = train(model, task, config, objective=objective)
    after = model_retrieval_loss(model, batch["input_ids"], batch["sources"])
    return model, {
        "orders": [_by_kind(order, batch) for order in _orders(model, batch)],
        "losses": [entry["loss"] for entry in result.history if "loss" in entry],
        "retrieval_loss": [{"before": a, "after": b} for a, b in zip(before, after, strict=True)],
        "accuracy": {name: found["accuracy"] for name, found in (result.test or {}).items()},
    }


@torch.no_grad()
def _orders(model: "VortForCausalLM", batch: Batch) -> list[Tensor]:
    """`[B, T, H]` for each layer."""
    model.eval()
    found = model.model(batch["input_ids"], output_orders=True, use_cache=False).orders
    return list(found)


def _by_kind(order: Tensor, batch: Batch) -> dict[str, float]:
    """Mean order of each kind of token."""
    return {name: float(order[where].mean()) for name, where in _kinds(batch).items()}


def _kinds(batch: Batch) -> dict[str, Tensor]:
    """Which tokens `[B, T]` are of which kind; the last kind overlaps two others."""
    entity = batch["entity_mask"].bool()
    first = Retrievals.of(batch["sources"]).is_source(entity.shape[1])
    return {
        "first_mention": first,
        "later_mention": entity & ~first,
        "filler": ~entity,
        "other": ~first,
    }


def _example(orders: Sequence[Tensor], batch: Batch) -> Record:
    """The first sequence token by token: its kinds, and by layer the orders of its first head."""
    members = {name: where[0].tolist() for name, where in _kinds(batch).items()}
    kinds = [next(k for k, where in members.items() if where[t]) for t in range(orders[0].shape[1])]
    rows = [[round(x, 4) for x in order[0, :, 0].tolist()] for order in orders]
    return {"kinds": kinds, "orders": rows}


def _refine(
    model: "VortForCausalLM", task: LabelCopy, iterations: int, similarity: Similarity
) -> Record:
    """Free orders refined layer by layer on the queries and keys of a model."""
    batch = task.batch("validation", range(4))
    model.eval()
    with torch.no_grad(), record_memories(model) as found:
        model(input_ids=batch["input_ids"], use_cache=False)
        layers = [
            LayerScores(inputs.q, inputs.k)
            if similarity == "exp"
            else LayerScores(*memory_features(memory, inputs))
            for memory, inputs in found
        ]
    start = torch.full(layers[0].q.shape[:3], START, dtype=torch.float64)
    basis = PowerLawBasis.fit(HORIZON, SCALES)
    retrievals = Retrievals.of(batch["sources"])
    runs = refine_by_layer(
        layers, start, retrievals, basis, iterations=iterations, similarity=similarity
    )
    return {
        "orders": [_by_kind(each.order, batch) for each in runs],
        "example": _example([start, *(each.order for each in runs)], batch),
        "descents": [each.to_dict() for each in runs],
    }


def _differences(runs: Sequence[Record]) -> list[Record]:
    """By layer, order of first mentions minus that of fillers, with its interval over seeds."""
    found = []
    for layer in range(len(runs[0]["orders"])):
        orders = [each["orders"][layer] for each in runs]
        over = interval([order["first_mention"] - order["filler"] for order in orders])
        known = over.count > 1
        ends = {"low": over.low if known else None, "high": over.high if known else None}
        found.append({**over.to_dict(), **ends})
    return found


def _scan(
    retrievals: Retrievals, orders: Tensor, basis: PowerLawBasis, length: int
) -> tuple[Array, Array]:
    """L_ret and its derivative at each of P orders, with blank scores: one row for each order."""
    points = len(orders)
    leaf = orders.clone().requires_grad_()
    blank = torch.zeros(points, length, 1, 1, dtype=torch.float64)
    write = basis.weights(leaf[:, None, None].expand(points, length, 1))
    rows = Retrievals(*(x.expand(points, -1) for x in retrievals))
    values = retrieval_loss(blank, blank, write, torch.from_numpy(-basis.rates), rows)
    (slopes,) = torch.autograd.grad(values.sum(), leaf)
    return values.detach().flatten().numpy(), slopes.numpy()


def _mean(orders: Sequence[Record], kind: str) -> float:
    return float(np.mean([order[kind] for order in orders]))


def _interval(found: Record) -> Interval:
    return Interval(found["mean"], found["half"], found["count"])


def _shown(found: Record) -> str:
    return f"{found['mean']:+.2f} [{found['low']:.2f}, {found['high']:.2f}]"


_SEEDS = (0, 1, 2)
_GROUPS = {
    "with": "trained with L_ret",
    "without": "trained without",
    "refined": "free orders, refined",
}


def _cells(size: Size, data: Path | None = None) -> list[Cell]:
    """One, at laptop size: all seeds together, since what is shown are intervals over them."""
    if size == "paper":
        return []
    return [
        Cell(
            experiment="plasticity",
            size=size,
            model="vort",
            seed=_SEEDS[0],
            task={"name": "label_copy", "length": 128},
            training={
                "steps": 80,
                "learning_rate": 5e-3,
                "seeds": list(_SEEDS),
                "weight": 1.0,
                "iterations": 30,
                "feature_map": "hedgehog",
                "similarity": "exp",
            },
        )
    ]


def _summarise(records: Sequence[Mapping[str, Any]], size: Size) -> Summary:
    """Order of first mentions minus fillers by layer, claims, and orders over layers."""
    if not records:
        return Summary([], notes=["No results: measured at --scale laptop only."])
    sheets = [_sheet(record) for record in records]
    # Records of changed settings come last, and nothing is claimed of them.
    cell, record = records[0], records[0]["plasticity"]
    if "set" in cell["cell"]:
        return Summary(sheets)

    def draw(path: Path) -> None:
        from vort.lab.report.figures.diffusion_plasticity import draw_plasticity

        draw_plasticity(path, record)

    settings = record["settings"]
    task = settings["task"]
    notes = [
        f"{len(settings['seeds'])} seeds of model and data; intervals are 95 %, Student's t.",
        f"Two layers in the paper's mode (no gates), {settings['steps']} steps on sequences of "
        f"{task['length']} with {task['entities']} entities, {cell['seconds']:.0f} s in all.",
    ]
    caption = (
        "Orders by layer on held-out sequences: one sequence of free orders refined layer by "
        "layer, and means by kind of token with 95 % intervals over seeds."
    )
    return Summary(sheets, claims(record), [Figure("plasticity.png", caption, draw)], notes)


def _sheet(cell: Mapping[str, Any]) -> Sheet:
    record = cell["plasticity"]
    layers = range(len(record["with"]["difference"]))
    rows = [
        [
            label,
            *(_with_half(record[name]["difference"][layer]) for layer in layers),
            _accuracy(record[name]["runs"]),
        ]
        for name, label in _GROUPS.items()
    ]
    headings = ["orders", *(f"layer {layer + 1}" for layer in layers), "accuracy, longest lags"]
    changes = f" [{cell['cell']['set']}]" if "set" in cell["cell"] else ""
    return Sheet(f"Order of first mentions minus that of fillers{changes}", headings, rows)


def _with_half(found: Mapping[str, Any]) -> str:
    if found["low"] is None:
        return f"{found['mean']:+.2f}"
    return f"{found['mean']:+.2f} ± {(found['high'] - found['low']) / 2:.2f}"


def _accuracy(runs: Sequence[Mapping[str, Any]]) -> str:
    """Mean over seeds in the last class of lags; blank where nothing was trained."""
    last = [each["accuracy"] for each in runs if "accuracy" in each]
    if not last:
        return ""
    name = [key for key in last[0] if key != "all"][-1]
    return f"{sum(100 * found[name] for found in last) / len(last):.0f} %"


PLASTICITY = Experiment(
    name="plasticity",
    title="Retrieval-driven plasticity (section plasticity, figure diffusion-plasticity b)",
    about="Label copy, a small model in the paper's mode, trained with the retrieval loss beside "
    "the cross-entropy and without it; then orders that belong to tokens, not to a router, are "
    "refined by gradient descent on the queries and keys of the former, layer by layer. Nothing "
    "says what an order should be.",
    cells=_cells,
    summarise=_summarise,
    measure=lambda cell: {"plasticity": run(length=cell.task["length"], **cell.training)},
)
