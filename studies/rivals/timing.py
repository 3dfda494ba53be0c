"""Measure what the rows of a setup cost: seconds of a round, own parameters, all methods interleaved on one machine.

Three silos of four batches, with network, batch size and epochs of the setup. A codebook is measured after
every silo has received codewords of its own, when a round costs most.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from torch import nn

from studies.archive import read_records
from studies.methods.runner import RunRecord
from studies.methods.timing import BATCHES_PER_SILO, NUM_REPEATS, TimedMethod, describe_environment, select_silos
from studies.rivals.runner import Files, read_frozen
from studies.rivals.setups import SETUPS
from studies.rivals.trials import FEDAVG, Setup, Trial
from uefl.algorithms.ifca import IFCA
from uefl.algorithms.uefl import UEFL
from uefl.core.federation import Method, ServerState, is_codeword_tensor
from uefl.experiment import records


class TimedRow(TimedMethod):
    """A row of a setup; its silos have codewords of their own from the first timed round on."""

    def prepare_server(self, server: ServerState) -> ServerState:
        """Give every silo codewords of its own, if the method has a codebook that grows."""
        codebook = self.method.codebook
        if not codebook or codebook.extend == "none":
            return server
        return codebook.extend_codebook(self.method, self.clients, server, server.silo_names)

    def count_own_parameters(self) -> int:
        """Return the mean number of values of a silo's model that no other silo has."""
        own = count_personal_values(self.method, self.clients.net)
        is_single = self.server.access & (self.server.access.sum(0) == 1)
        sizes = [t.shape[1] for n, t in self.server.model_state.items() if is_codeword_tensor(n)]
        return own + round(float(is_single.sum(1).float().mean()) * sum(sizes))


def count_personal_values(method: Method, net: nn.Module) -> int:
    """Return the number of values that stay at a silo; a model of IFCA, or of UEFL in groups, belongs to several."""
    if isinstance(method, IFCA) and method.num_models > 1:
        return 0
    if isinstance(method, UEFL) and method.group_rounds and not method.fine_tuning_epochs:
        return count_personal_values(replace(method, group_rounds=0), net)
    state = net.state_dict()
    return sum(state[name].numel() for name in method.personal_tensor_names(net))


def time_rows(name: str, device: str, files: Files, report: Callable[[str], None]) -> None:
    """Time every row of a setup with its chosen trial, and append one record per row."""
    setup = SETUPS[name]
    all_silos, images = setup.data.load(0)
    silos = select_silos(all_silos, setup.local.batch_size * BATCHES_PER_SILO)
    timed = {
        row: TimedRow(
            setup.make_experiment(row, trial, setup.schedules[0], 0),
            silos,
            len(images.classes),
            device,
        )
        for row, trial in choose_trials(name, files).items()
    }
    for _ in range(NUM_REPEATS):
        for run_timed_round in timed.values():  # interleaved: other load on the machine affects all alike
            run_timed_round()
    for row, method in timed.items():
        cost = {**method.summarize_costs(), "own_parameters": method.count_own_parameters()}
        records.append_records(
            files.times, [{"setup": name, "method": row, "round": cost, **describe_environment(device)}]
        )
        ratio = cost["seconds"] / timed[FEDAVG].summarize_costs()["seconds"]
        report(f"{name}, {row}: {cost['seconds']:.3f} s per round, {ratio:.2f} × FedAvg")


def choose_trials(name: str, files: Files) -> dict[str, Trial]:
    """Return the trial of every row that validation chose: the frozen one, or with folds the most frequent one."""
    setup, frozen = SETUPS[name], read_frozen(files.frozen)
    entry = frozen.get(setup.trials_of or name)
    if entry:
        return {row: setup.rows[row].trials[number] for row, number in entry["trials"].items()}
    labels = find_frequent_labels(setup, [r for r in read_records(files.trials) if r["setup"] == name])
    return {
        row: next((t for t in setup.rows[row].trials if t.label == labels.get(row)), setup.rows[row].trials[0])
        for row in setup.rows
    }


def find_frequent_labels(setup: Setup, trials: Sequence[RunRecord]) -> Mapping[str, str]:
    """Return by row the label of the trial that most folds choose by validation NLL."""
    labels = {}
    for row in setup.rows:
        best: dict[tuple[int, str], RunRecord] = {}
        for record in trials:
            part = record["seed"], record["settings"].get("data.fold", "")
            if record["method"].startswith(f"{row}: ") and (
                part not in best or record["validation_nll"] < best[part]["validation_nll"]
            ):
                best[part] = record
        counts = Counter(record["method"].removeprefix(f"{row}: ") for record in best.values())
        if counts:
            labels[row] = counts.most_common(1)[0][0]
    return labels
