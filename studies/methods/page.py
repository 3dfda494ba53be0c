"""docs/methods.md from records alone, with the hand-written notes of notes.md between the tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import NamedTuple

from studies.methods.running import Job, Line, chosen_rate, search
from studies.methods.set_ups import FEDAVG, SEEDS, SET_UPS, SetUp
from uefl.algorithms import ALGORITHMS
from uefl.report import LEVEL

NOTES = Path(__file__).with_name("notes.md")


class Words(NamedTuple):
    """What a method exchanges, in words; the bytes beside them are measured."""

    up: str = "model"
    down: str = "model"
    keeps: str = "nothing"
    dropout: str = "as the paper's"  # where mE comes from
    sizes: bool = True  # whether the bytes were measured


WORDS: dict[str, Words] = {
    "fedavg": Words(),
    "fedprox": Words(),
    "scaffold": Words("model, change of its control variate", "model, mean control variate", "control variate"),
    "fedbn": Words("model without batch norm", "the same", "batch norm"),
    "fedsr": Words(keeps="class priors", dropout="added"),
    "fediir": Words("model; before, a gradient of the head", "model, mean gradient; before, model", dropout="added"),
    "fedcr": Words("body, class statistics", "body, class priors", "head", "added"),
    "vhl": Words("model", "model, virtual images", dropout="added"),
    "fedbr": Words("model, projection", "model, projection, pseudo-images", dropout="added"),
    "distrans": Words("model without offset", "the same", "offset", "added"),
    "vq-fedavg": Words("model, its words", "the same"),
    "uefl": Words("model, its words", "the same"),
    "alone": Words("nothing", "nothing", "everything"),
    "pooled": Words("all its images, once", "model at the end", "nothing", sizes=False),
}
BOOKS = {  # with and without a codebook, in one table
    "rotated": {
        FEDAVG: "UEFL",
        "FedProx": "FedProx with codebook",
        "FedBN": "FedBN with codebook",
        "FedSR": "FedSR with codebook",
    },
    "rotated-sgd": {FEDAVG: "UEFL", "SCAFFOLD": "SCAFFOLD with codebook"},
}


def page(lines: Sequence[Line], times: Sequence[Line]) -> str:
    """The whole page."""
    notes = sections(NOTES.read_text())
    parts = [notes[""]]
    for name in SET_UPS:
        parts += [f"## {SET_UPS[name].title}", notes.get(name, ""), protocol(name, lines), table(name, lines, times)]
        parts += [rates(name, lines), collapse(name, lines)]
    parts += ["## With and without a codebook", notes.get("codebook", ""), books(lines)]
    return "\n\n".join(part for part in parts if part) + "\n"


def sections(text: str) -> dict[str, str]:
    """Notes by set-up: what stands below `## <name>`; what stands above the first one opens the page."""
    first, *rest = text.split("\n## ")
    return {"": first.strip(), **{part.partition("\n")[0].strip(): part.partition("\n")[2].strip() for part in rest}}


def found(name: str, method: str, lines: Sequence[Line]) -> dict[int, Line]:
    """The finished runs of a row, by seed."""
    rate = chosen_rate(name, lines)
    if rate is None:
        return {}
    jobs = [Job(name, method, seed, SET_UPS[name].experiment(method, rate, seed)) for seed in SEEDS]
    return {job.seed: line for job in jobs for line in lines if job.is_in([line])}


def seeds_of(*rows: Mapping[int, Line]) -> list[int]:
    """The seeds that all of them have."""
    return [seed for seed in SEEDS if all(seed in row for row in rows)]


def mark(seeds: Sequence[int]) -> str:
    """Figures of fewer seeds than all say so."""
    return "" if len(seeds) == len(SEEDS) else f" (incomplete: {len(seeds)} of {len(SEEDS)} seeds)"


# --- one set-up ---------------------------------------------------------------------------------------------------


def protocol(name: str, lines: Sequence[Line]) -> str:
    """What is the same for all methods of a set-up."""
    set_up, rate = SET_UPS[name], chosen_rate(name, lines)
    local, method = set_up.local, set_up.experiment(FEDAVG, set_up.rates[0], 0).method
    each = f"{method.participation} silos a round, " if method.participation else ""
    optimiser = f"SGD with momentum {local.momentum:g}" if local.optimizer == "sgd" else "Adam"
    return (
        f"Setting `{name}`: {method.budget} rounds, {each}{local.epochs} local epoch{'s' if local.epochs > 1 else ''} "
        f"of batch {local.batch}, {optimiser}, rate {f'{rate:g}' if rate else 'not chosen yet'}; encoder "
        f"`{set_up.model.encoder}`{f', width {set_up.model.width}' if set_up.model.width else ''}, hidden layer "
        f"{set_up.model.hidden}, layer norm: {'yes' if set_up.model.normalise == 'layer' else 'no'}. Accuracy: "
        f"{'mean of the last 5 rounds' if set_up.level == LEVEL else 'last round'}."
    )


def table(name: str, lines: Sequence[Line], times: Sequence[Line]) -> str:
    set_up = SET_UPS[name]
    devices = list(dict.fromkeys(line["device"] for line in times if line["set-up"] == name))
    head = ["method", "mA, %", "− FedAvg", "mE", "dropout", "up", "down", "stays with the silo"]
    head += [f"time of a round, {device}" for device in devices] + ["paper"]
    rows = [head, ["---"] * len(head)]
    base = found(name, FEDAVG, lines)
    for method, variant in set_up.methods.items():
        mine, words = found(name, method, lines), _words(set_up, method)
        cost = {device: _timed(name, method, device, times) for device in devices}
        against = {device: _timed(name, FEDAVG, device, times) for device in devices}
        rows.append(
            [
                method,
                *_results(set_up, mine, base),
                words.dropout,
                f"{words.up}{_size(mine, 'up', cost) if words.sizes else ''}",
                f"{words.down}{_size(mine, 'down', cost) if words.sizes else ''}",
                words.keeps,
                *(_ratio(cost[device], against[device]) for device in devices),
                variant.paper or "–",
            ]
        )
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def _words(set_up: SetUp, method: str) -> Words:
    row = set_up.methods[method]
    name = next(name for name, kind in ALGORITHMS.items() if kind is row.kind)
    words, built = WORDS[name], row.kind(**{"local": set_up.local, **row.fields})
    if built.codebook and "words" not in words.up:
        down = words.down if words.down == "the same" else f"{words.down}, its words"
        words = words._replace(up=f"{words.up}, its words", down=down)
    if row.fields.get("offsets") == "mean":
        words = words._replace(up="model, offset", keeps="nothing")
    if row.model.get("members", 1) > 1:
        words = words._replace(up="5 models", down="5 models", dropout="none: 5 members")
    if row.model.get("dropout") == 0.0:
        words = words._replace(dropout="none: one prediction")
    return words


def _results(set_up: SetUp, mine: Mapping[int, Line], base: Mapping[int, Line]) -> list[str]:
    seeds = seeds_of(mine, base)
    if len(seeds) < 2:
        return [mark(seeds).strip(), "", ""]
    accuracy, entropy = ({s: mine[s][set_up.level][m] for s in seeds} for m in ("mA", "mE"))
    gain = [100 * (accuracy[s] - base[s][set_up.level]["mA"]) for s in seeds]
    against = "" if mine == base else _spread(gain, 2, sign=True)
    return [_spread([100 * a for a in accuracy.values()], 2) + mark(seeds), against, _spread(list(entropy.values()), 3)]


def _spread(values: Sequence[float], digits: int, *, sign: bool = False) -> str:
    """Mean ± standard deviation over seeds."""
    return f"{mean(values):{'+' if sign else ''}.{digits}f} ± {stdev(values):.{digits}f}"


def _size(mine: Mapping[int, Line], way: str, timed: Mapping[str, Line | None]) -> str:
    """Measured bytes of one silo in one round: of its message in the runs, and of questions beside it."""
    if not mine or not mean(line[way] for line in mine.values()):
        return ""
    costs = [line["round"] for line in timed.values() if line]
    asked = costs[0][f"{way} with questions"] - costs[0][way] if costs else 0
    return f" ({(mean(line[way] for line in mine.values()) + asked) / 1e6:.2f} MB)"


def _timed(name: str, method: str, device: str, times: Sequence[Line]) -> Line | None:
    mine = [t for t in times if (t["set-up"], t["method"], t["device"]) == (name, method, device)]
    return mine[-1] if mine else None  # the newest counts


def _ratio(cost: Line | None, against: Line | None) -> str:
    if not cost or not against:
        return "–"
    return f"× {cost['round']['seconds'] / against['round']['seconds']:.2f}"


def rates(name: str, lines: Sequence[Line]) -> str:
    """What the rate was chosen by."""
    tried = [(job, line) for job in search([name]) for line in lines if job.is_in([line])]
    if not tried:
        return ""
    each = [f"{job.experiment.method.local.rate:g}: {100 * line['validation_accuracy']:.2f} %" for job, line in tried]
    return f"Rate by FedAvg's validation accuracy, seed 0: {', '.join(each)}."


def collapse(name: str, lines: Sequence[Line]) -> str:
    """When training error was zero, where it was watched."""
    said = []
    for method in SET_UPS[name].methods:
        for seed, line in found(name, method, lines).items():
            if "train_accuracy" in line:
                zero = line["zero_error"]
                when = (
                    f"zero error in round {zero['round']}, mA then {100 * zero['mA']:.2f} %"
                    if zero
                    else "never zero error"
                )
                said.append(
                    f"{method}, seed {seed}: {when}; training accuracy at the end {100 * line['train_accuracy']:.2f} %."
                )
    return "\n".join(said)


# --- the codebook around other rounds -----------------------------------------------------------------------------


def books(lines: Sequence[Line]) -> str:
    """Every round that takes a codebook, with it and without it."""
    head = ["round", "setting", "mA without, %", "mA with, %", "difference", "mE without", "mE with", "difference"]
    rows = [head, ["---"] * len(head)]
    for name, pairs in BOOKS.items():
        for plain, booked in pairs.items():
            without, having = found(name, plain, lines), found(name, booked, lines)
            seeds = seeds_of(without, having)
            cells = [mark(seeds).strip(), *[""] * 5]
            if len(seeds) > 1:
                cells = [*_pair(without, having, seeds, "mA", 100, 2), *_pair(without, having, seeds, "mE", 1, 3)]
                cells[0] += mark(seeds)
            label = f"{plain} (with: UEFL)" if booked == "UEFL" else plain
            rows.append([label, f"`{name}`", *cells])
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def _pair(
    without: Mapping[int, Line],
    having: Mapping[int, Line],
    seeds: Sequence[int],
    metric: str,
    times: float,
    digits: int,
) -> list[str]:
    a, b = ([times * row[seed][LEVEL][metric] for seed in seeds] for row in (without, having))
    return [_spread(a, digits), _spread(b, digits), _spread([y - x for x, y in zip(a, b)], digits, sign=True)]
