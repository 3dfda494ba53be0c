"""Tables, progress and sentences about runs; every metric of a table is one entry of the registry."""

import io
import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from harness import TINY_SETTINGS_NO_CODEBOOK, call_cli
from rich.console import Console

from uefl.core.errors import InputError
from uefl.core.metrics import METRICS, TWO_CLASS_METRICS
from uefl.experiment.comparison import FEDAVG_NO_LAYER_NORM, print_results, select_better_fedavg
from uefl.experiment.experiment import RESULTS_VERSION
from uefl.experiment.parsing import parse_experiments, parse_seeds
from uefl.experiment.progress import ProgressDisplay
from uefl.experiment.report import (
    describe_decision,
    describe_grouping,
    describe_revocation,
    make_comparison_table,
    print_runs,
)
from uefl.experiment.run_folder import RESULTS_VERSION_KEY, RunFolder
from uefl.experiment.seeds import (
    SEEDS_TABLE_FILE,
    describe_differences,
    describe_own_means,
    format_mean_stderr,
    format_seed_table,
    make_seed_table,
    summarize_seeds,
)

LEGEND = (
    "mA: mean accuracy over silos (higher is better); mE: mean predictive entropy (lower is more certain, which is "
    "good only together with accuracy, NLL and AUGRC)"
)


def write_run(path, *, num_codewords, accuracy=0.5, validation=0.5, rejected=False, rounds=5, method="fedavg"):
    """Write the files of a finished run that tables read."""
    metrics = {"accuracy": accuracy, "entropy": 0.25, "perplexity": 3.4}
    silos = {name: {"domain": "x", **metrics, "num_codewords": num_codewords} for name in ("ada", "bob")}
    means = {"mA": accuracy, "mE": 0.25, "mP": 3.4, "domains": {"x": {**metrics, "num_codewords": num_codewords}}}
    extensions = [{"round": 3, "uncertain_silos": ["ada"], "new_codewords": {"ada": 8}}] if num_codewords else []
    path.mkdir()
    folder = RunFolder(path)
    (experiment,) = parse_experiments([method], [], "default").values()
    header = {RESULTS_VERSION_KEY: RESULTS_VERSION, "experiment": experiment.to_config()}
    folder.write_header({**header, "class_names": ["a", "b", "c", "d"], "chance_accuracy": 0.3})
    folder.write_summary(
        {
            "mean of last 5": {"round": [*range(rounds)], **means, "silos": silos},
            "extensions": extensions,
            "validation_accuracy": validation,
        }
    )
    silo = {"bytes_up": 1, **({"rejected": "not finite"} if rejected else {})}
    folder.records_path.write_text(json.dumps({"round": 1, "silos": {"ada": silo, "bob": silo}}) + "\n")
    return path


def capture(show, width=300):
    console = Console(width=width, highlight=False, force_terminal=False)
    with console.capture() as output:
        show(console)
    return output.get()


def test_a_table_shows_codewords_only_for_methods_with_a_codebook(tmp_path):
    fedavg, uefl = (write_run(tmp_path / n, num_codewords=v) for n, v in (("fedavg", 0), ("uefl", 16)))
    table = make_comparison_table({"fedavg": fedavg, "uefl": uefl})
    headings = [str(column.header) for column in table.columns]
    assert headings == [
        *("", "fedavg\nacc.", "fedavg\nentropy"),
        *("uefl\nacc.", "uefl\nentropy", "uefl\nperpl.", "uefl\ncodewords"),
    ]
    text = capture(lambda console: console.print(table))
    assert "│ ada " in text
    assert "mA, mE, mP; most codewords" in text
    assert "0.500 │   0.250 │ 0.500 │   0.250 │      3 │        16" in text


def test_the_class_that_metrics_of_two_classes_are_about_is_named(tmp_path):
    path = write_run(tmp_path / "fedavg", num_codewords=0)
    folder = RunFolder(path)
    assert "are about class" not in capture(lambda console: print_runs({"fedavg": path}, console))
    folder.write_header({**folder.read_header(), "class_names": ["ill", "[well]"]})
    summary = folder.read_summary()
    summary["mean of last 5"] |= {metric.label: 0.5 for metric in TWO_CLASS_METRICS}
    folder.write_summary(summary)
    output = capture(lambda console: print_runs({"fedavg": path}, console))
    assert output.endswith("AUROC, AUPRC and sensitivity are about class '[well]'; the other class is 'ill'\n")


def test_methods_that_train_with_another_optimizer_are_named(tmp_path):
    runs = {
        name: write_run(tmp_path / name, num_codewords=0, method=name) for name in ("fedavg", "fedprox", "scaffold")
    }
    sentence = (
        "Local training differs between methods (fedavg: optimizer=adam, lr=0.002; fedprox: optimizer=adam, lr=0.002; "
        "scaffold: optimizer=sgd, lr=0.02). Set local.optimizer= local.lr= to train all in the same way."
    )
    assert sentence in capture(lambda console: print_runs(runs, console))
    del runs["scaffold"]
    assert "Local training differs" not in capture(lambda console: print_runs(runs, console))


def test_the_labels_are_explained_under_the_table(tmp_path):
    fedavg, uefl = (write_run(tmp_path / n, num_codewords=v) for n, v in (("fedavg", 0), ("uefl", 16)))
    text = capture(lambda console: print_runs({"fedavg": fedavg, "uefl": uefl}, console))
    assert text.rstrip().endswith(f"{LEGEND}; mP: mean perplexity of codeword use")
    assert (
        "uefl: after round 3, 1 silo is more uncertain "
        "than the least uncertain one: ada; 1 silo receives 8 new codewords: ada\n" in text
    )
    text = capture(lambda console: print_results({"fedavg": fedavg}, tmp_path, console))
    assert f"{LEGEND}\nrun folder: {fedavg}\nfigure:     {fedavg / 'figure.png'}\n" in text
    assert "mP" not in text


@pytest.mark.parametrize(("validation", "selected"), [(0.8, "fedavg"), (0.6, FEDAVG_NO_LAYER_NORM)])
def test_the_better_fedavg_is_the_one_with_the_higher_validation_accuracy(tmp_path, validation, selected):
    """On test images the other one is better, which must not matter."""
    accuracy = 0.1 if selected == "fedavg" else 0.9
    folders = {
        "fedavg": write_run(tmp_path / "layer", num_codewords=0, accuracy=accuracy, validation=validation),
        "uefl": write_run(tmp_path / "uefl", num_codewords=8),
        FEDAVG_NO_LAYER_NORM: write_run(tmp_path / "none", num_codewords=0, accuracy=0.5, validation=0.7),
    }
    chosen = []
    text = capture(lambda console: chosen.append(select_better_fedavg(folders, console)))
    assert list(chosen[0]) == [selected, "uefl"]
    assert f"fedavg {validation:.3f}, fedavg, no layer norm 0.700. The better one is reported." in text


@pytest.mark.parametrize(("accuracy", "is_reported"), [(0.1, True), (0.34, True), (0.36, False)])
def test_a_result_at_chance_level_says_so(tmp_path, accuracy, is_reported):
    run = write_run(tmp_path / "run", num_codewords=0, accuracy=accuracy)
    degree = "not" if accuracy <= 0.3 else "hardly"
    line = (
        f"fedavg: mean accuracy {accuracy:.3f} is {degree} above chance level (0.300): the model has not learned; "
        "try more rounds, or a larger or smaller local.lr\n"
    )
    assert (line in capture(lambda console: print_runs({"fedavg": run}, console))) == is_reported


def test_a_decision_of_an_untrained_model_says_so():
    decision = {"test": "permutation", "level": 0.05, "extend": "uncertain", "is_codebook_final": True}
    record = {"round": 2, "iteration": 0, "has_decision": True, "decision": decision}
    header = {"class_names": ["a", "b"], "chance_accuracy": 0.5}

    def show(console, accuracy):
        silo = {"accuracy": accuracy, "entropy": 0.69, "is_uncertain": False}
        with ProgressDisplay(console) as display:
            display.on_event("uefl", {"kind": "start", "total_rounds": 4, "round": 0, "records": [], "header": header})
            display.on_event("uefl", {"kind": "round", "record": {**record, "silos": {"ada": silo, "bob": silo}}})

    settled = (
        "uefl: after round 2, no silo is more uncertain "
        "than the least uncertain one beyond chance (permutation test, level 0.05); "
        "no silo receives new codewords (extend=uncertain): the codebook is final\n"
    )
    untrained = settled.replace(
        "; no silo",
        ", but the model is at chance level, so this has no meaning: set more rounds before the first decision"
        "; no silo",
    )
    assert untrained in capture(lambda console: show(console, 0.5))
    assert settled in capture(lambda console: show(console, 0.9))


def test_the_size_of_a_run_and_its_time_are_printed_before_it_starts():
    event = {"kind": "plan", "num_images": 5000, "num_silos": 5, "num_parameters": 153946, "num_rounds": 20}

    def show(console, seconds):
        with ProgressDisplay(console) as display:
            display.on_event("uefl", {**event, "seconds": seconds})

    for seconds, text in ((3.2, "3 s"), (200, "3 min"), (9000, "2.5 h")):
        line = f"uefl: 5000 examples, 5 silos, 153946 parameters, 20 rounds; estimated time: {text}\n"
        assert capture(lambda console, seconds=seconds: show(console, seconds)) == line


def test_three_methods_fit_into_80_columns_without_cutting_a_cell(tmp_path):
    runs = {name: write_run(tmp_path / name, num_codewords=v) for name, v in (("fedavg", 0), ("vq", 16), ("uefl", 16))}
    console = Console(width=80, highlight=False, force_terminal=False)
    with console.capture() as output:
        print_runs(runs, console)
    text = output.get()
    tables = [line for line in text.splitlines() if line.startswith(("│", "┃"))]
    assert max(map(len, tables)) <= 80
    assert "…" not in text
    assert text.count("┏") == 2, "as few tables as possible"
    # The last method has a table of its own, whose title names it.
    assert all(text.count(f" {name} ┃") == count for name, count in (("fedavg", 2), ("vq", 4), ("uefl", 0)))
    assert "\nuefl  " in text


def test_metrics_of_two_classes_fit_into_80_columns_with_every_silo_and_interval(tmp_path):
    runs = {name: write_run(tmp_path / name, num_codewords=16) for name in ("fedavg, no layer norm", "uefl")}
    for path in runs.values():
        summary = RunFolder(path).read_summary()
        means = summary["mean of last 5"]
        for silo in (*means["silos"].values(), *means["domains"].values()):
            for name in ("auroc", "auprc", "sensitivity"):
                silo |= {name: 0.75, f"{name}_low": 0.5, f"{name}_high": 0.875}
        means |= {"mAUROC": 0.75, "mAUPRC": 0.75, "mSens": 0.75}
        RunFolder(path).write_summary(summary)
    console = Console(width=80, highlight=False, force_terminal=False)
    with console.capture() as output:
        print_runs(runs, console)
    text = output.get()
    silos = list(means["silos"])
    assert "…" not in text
    assert max(map(len, (line for line in text.splitlines() if line.startswith(("│", "┃"))))) <= 80
    for silo in silos:
        assert text.count(f"│ {silo} ") >= 3, "in one table per run, and in the table of intervals"
    assert text.count("0.50–0.88") == 3 * 2 * (len(silos) + 1), "each silo, and the worst one"
    assert text.count("│ worst silo") == 2 * 2, "in both tables of each run"


def test_the_quality_of_uncertainty_has_a_table_of_its_own_that_fits_80_columns(tmp_path):
    """Too few examples of a silo for a calibration error give a dash; all silos together may have enough."""
    runs = {name: write_run(tmp_path / name, num_codewords=0) for name in ("fedavg", "fedprox", "uefl")}
    assert "Quality" not in capture(lambda console: print_runs(runs, console))  # of records without these metrics
    for path in runs.values():
        summary = RunFolder(path).read_summary()
        pooled = {"nll": 0.25, "brier": 0.125, "ece": 0.0625, "augrc": 0.0156, "risk_at_80": 0.01}
        summary["mean of last 5"] |= {"mNLL": 0.5, "mBrier": 0.2, "mAUGRC": 0.0314, "all_silos": pooled}
        RunFolder(path).write_summary(summary)
    console = Console(width=80, highlight=False, force_terminal=False)
    with console.capture() as output:
        print_runs(runs, console)
    text = output.get()
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert "┃ ┃ NLL ┃ Brier ┃ ECE ┃ AUGRC ┃" in lines
    assert lines.count("│ uefl, mean over silos │ 0.500 │ 0.200 │ – │ 0.0314 │") == 1
    assert lines.count("│ all silos together │ 0.250 │ 0.125 │ 0.062 │ 0.0156 │") == 3
    assert "fewer than 500 test examples, which are too few" in text
    assert "…" not in text
    assert max(len(line) for line in text.splitlines() if line.startswith(("│", "┃"))) <= 80


def test_the_table_of_seeds_has_the_quality_that_every_run_has():
    def make_run(name, **quality):
        means = {"mA": 0.5, "mE": 0.25, "mP": 3.4, "mNLL": 0.5, **quality}
        return {
            "name": name,
            "mean of last 5": means,
            "experiment": {"seed": 0},
            "validation_accuracy": 0.5,
            "averaged rounds": 5,
        }

    rows = format_seed_table([make_run("fedavg"), make_run("uefl", mECE=0.1)]).splitlines()
    assert rows[0] == "| mean of last 5 rounds | mA | mE | mP | mNLL | mA, seeds 0 | mE, seeds 0 |"
    assert rows[2] == "| fedavg | 0.5000 | 0.2500 | 3.4 | 0.5000 | 0.5000 | 0.2500 |"


def test_all_rows_show_the_last_round_if_one_of_them_is_fine_tuned(tmp_path):
    """FedAvg's mean of five rounds beside the last round of a fine-tuned model would be another comparison."""

    def make_run(name, count, mean, last):
        fields = {"experiment": {"seed": 0}, "validation_accuracy": 0.5, "averaged rounds": count}
        means = {a: {"mA": m, "mE": 0.25, "mP": 3.4} for a, m in {"mean of last 5": mean, "last": last}.items()}
        return {"name": name, **means, **fields}

    records = [{**make_run("fedavg", 5, 0.5, 0.6), "total_codewords": 0}, make_run("uefl", 1, 0.7, 0.7)]
    rows = format_seed_table(records).splitlines()
    assert rows[0].startswith("| last round |")
    assert rows[2].startswith("| fedavg | 0.6000 | 0.2500 | – |")
    screen = capture(lambda console: console.print(make_seed_table(summarize_seeds(records))), width=80)
    assert re.search(r"mA +│ 0\.6000 │ 0\.7000 │", screen)
    assert re.search(r"mP +│ +– │ +3\.4 │", screen)

    runs = {}
    for name, rounds, last in (("fedavg", 5, 0.6), ("uefl", 1, 0.7)):
        runs[name] = write_run(tmp_path / name, num_codewords=0, rounds=rounds)
        summary = RunFolder(runs[name]).read_summary()
        mean = summary["mean of last 5"]
        silos = {silo: {**metrics, "accuracy": last} for silo, metrics in mean["silos"].items()}
        RunFolder(runs[name]).write_summary({**summary, "last": {**mean, "round": [5], "mA": last, "silos": silos}})
    text = capture(lambda console: print_runs(runs, console))
    assert "Test examples, last round\n" in text
    assert all(f"{last:.3f}" in text for last in (0.6, 0.7))
    assert "0.500" not in next(line for line in text.splitlines() if "ada" in line)


@pytest.mark.parametrize(
    ("rounds", "title"), [(5, "mean of last 5 rounds"), (3, "mean of last 3 rounds"), (1, "last round")]
)
def test_the_table_names_the_rounds_that_it_averages(tmp_path, rounds, title):
    run = write_run(tmp_path / "run", num_codewords=0, rounds=rounds)
    assert f"Test examples, {title}\n" in capture(lambda console: print_runs({"fedavg": run}, console))


def test_rounds_without_a_usable_reply_are_reported(tmp_path):
    run = write_run(tmp_path / "run", num_codewords=0, rejected=True)
    text = capture(lambda console: print_runs({"fedavg": run}, console))
    assert "fedavg: in 1 of 1 rounds (first: round 1) no reply could be used, so the model did not change" in text


PERMUTATION = {"test": "permutation", "level": 0.05, "extend": "uncertain", "threshold": 0.33}
SILOS = {"a": {"entropy": 0.412}, "b": {"entropy": 0.5}, "c": {"entropy": 0.3}}


@pytest.mark.parametrize(
    ("silos", "new_codewords", "decision", "sentence"),
    [
        (
            ["a", "b"],
            {"a": 8, "b": 8},
            {**PERMUTATION, "silos": SILOS},
            "2 of 3 silos are more uncertain "
            "than the least uncertain one (permutation test, level 0.05): a (entropy 0.41, "
            "threshold 0.33), b (entropy 0.50, threshold 0.33); 2 silos receive 8 new codewords each "
            "(extend=uncertain): a, b",
        ),
        (
            ["b"],
            {"a": 8, "b": 6},
            {**PERMUTATION, "silos": SILOS, "test": "standard_errors", "min_standard_errors": 2.0, "extend": "all"},
            "1 of 3 silos is more uncertain "
            "than the least uncertain one (by 2 standard errors): b (entropy 0.50, threshold 0.33); "
            "2 silos receive 6 or 8 new codewords each (extend=all): a, b",
        ),
        (
            [],
            {"c": 8},
            {**PERMUTATION, "silos": SILOS},
            "no silo is more uncertain "
            "than the least uncertain one beyond chance (permutation test, level 0.05); 1 silo receives 8 "
            "new codewords (extend=uncertain): c",
        ),
        (
            [],
            {},
            {"test": "none", "extend": "uncertain", "silos": SILOS, "is_codebook_final": True},
            "no silo is more uncertain "
            "than the least uncertain one (threshold without a test); no silo receives new codewords "
            "(extend=uncertain): the codebook is final",
        ),
        (
            [],
            {"c": 8},
            {"test": "not_comparable", "extend": "uncertain", "silos": SILOS},
            "no silo is reported as uncertain: silos predict with tensors of their own, such as batch norm, so a "
            "difference of their entropies may be one of models; 1 silo receives 8 new codewords (extend=uncertain): c",
        ),
        (
            [],
            {},
            {"test": "permutation", "extend": "uncertain", "silos": {}, "threshold": None, "is_codebook_final": True},
            "no silo was compared, since none sent the entropy of validation examples; no silo receives new codewords "
            "(extend=uncertain): the codebook is final",
        ),
        (
            [],
            {f"silo {k}": 8 for k in range(10)},
            {**PERMUTATION, "silos": SILOS, "extend": "all"},
            "no silo is more uncertain than the least uncertain one beyond chance (permutation test, level 0.05); "
            "10 silos receive 8 new codewords each (extend=all)",
        ),  # too many to name
        (
            ["a"],
            {},
            {},
            "1 silo is more uncertain than the least uncertain one: a; no silo receives new codewords",
        ),  # an older run
    ],
)
def test_a_decision_is_described_in_one_sentence(silos, new_codewords, decision, sentence):
    step = {"round": 5, "uncertain_silos": silos, "new_codewords": new_codewords, "decision": decision}
    assert describe_decision(step) == f"after round 5, {sentence}"


def test_revoked_codewords_are_described_in_one_sentence():
    step = {"round": 5, "num_silos": 3, "revoked_codewords": {"a": 8, "b": 8}}
    assert describe_revocation(step) == (
        "after round 5, 2 of 3 silos lose their new codewords, without which validation NLL is lower: a, b"
    )
    assert describe_revocation({**step, "revoked_codewords": {}}) == (
        "after round 5, no silo loses its new codewords: none of 3 has a lower NLL without them"
    )


def test_a_damaged_summary_is_named(tmp_path):
    run = write_run(tmp_path / "run", num_codewords=0)
    RunFolder(run).summary_path.write_text("{")
    with pytest.raises(ValueError, match=r"summary\.json is damaged \(.*\); delete it and run again"):
        make_comparison_table({"fedavg": run})


@pytest.mark.parametrize("name", ["uefl", "uefl, seed 1003, no layer norm"])
def test_the_bar_keeps_round_and_time_on_one_line_of_80_columns(name):
    silo = {"accuracy": 0.5, "entropy": 0.25, "is_uncertain": False}
    console, screen = (Console(width=80, force_terminal=True, file=io.StringIO(), color_system=None) for _ in range(2))
    with ProgressDisplay(console) as display:
        display.on_event(name, {"kind": "start", "total_rounds": 20, "round": 0, "records": []})
        record = {"round": 2, "iteration": 0, "silos": {"ada": silo}}
        display.on_event(name, {"kind": "round", "record": record})
        display.on_event(name, {"kind": "silo", "silo": "VA Long Beach", "activity": "compute_centroids"})
        screen.print(display.progress.get_renderable())
    (line,) = screen.file.getvalue().splitlines()
    assert len(line) <= 80
    assert " 2/20 " in line
    assert re.search(r"…  ?0:00:0\d", line)
    assert "left" in line


def test_progress_without_a_terminal_is_one_line_per_event_of_interest():
    silo = {"accuracy": 0.5, "entropy": 0.25, "is_uncertain": True, "new_codewords": 8}
    record = {"round": 2, "iteration": 0, "initial_codewords": 16, "has_decision": True}
    events = [
        {"kind": "load", "data": "mnist"},
        {"kind": "warning", "message": "few images"},
        {"kind": "start", "total_rounds": 4, "round": 1, "records": []},
        {"kind": "silo", "silo": "ada", "activity": "training"},
        {"kind": "trained", "round": 2, "seconds": 6.4},
        {"kind": "silo", "silo": "", "activity": "an unknown node was rejected"},
        {"kind": "round", "record": {**record, "silos": {"ada": silo, "bob": {**silo, "rejected": "not finite"}}}},
        {"kind": "round", "record": {"round": 3, "iteration": 0, "groups": [["ada"]], "silos": {"ada": silo}}},
        {"kind": "finished", "folder": "runs/a", "engine": "serial"},
    ]

    def show(console):
        with ProgressDisplay(console) as display:
            for event in events:
                display.on_event("uefl", event)

    lines = [line for line in capture(show).splitlines() if line]
    assert lines.pop(-2).startswith("uefl: in groups, round 3/4  mA 0.500  mE 0.250  about ")
    assert lines.pop(-2).startswith("uefl: iteration 1, round 2/4  mA 0.500  mE 0.250  about ")
    assert lines == [
        "uefl: warning: few images",
        "uefl: resumed after round 1 of 4",
        "uefl: round 2/4 trained in 6 s; its metrics follow with the next round",
        "uefl: an unknown node was rejected",
        "uefl: after round 2, an initial codebook of 16 codewords",
        "uefl: after round 2, 2 silos are more uncertain than the least uncertain one: ada, bob; "
        "2 silos receive 8 new codewords each: ada, bob",
        "uefl: round 2, reply of bob rejected: not finite",
        "uefl: already finished (engine serial), in runs/a",
    ]


def test_a_warning_about_the_data_is_printed_once_for_all_runs():
    def show(console):
        with ProgressDisplay(console) as display:
            for run in ("fedavg", "uefl"):
                display.on_event(run, {"kind": "warning", "about": "data", "message": "few images"})
                display.on_event(run, {"kind": "warning", "message": "round 1: not finite"})

    lines = ["warning: few images", "fedavg: warning: round 1: not finite", "uefl: warning: round 1: not finite"]
    assert capture(show).splitlines() == lines


def test_the_table_of_seeds_has_means_with_standard_errors_and_every_seed():
    def make_run(name, seed, accuracy, validation):
        means = {"mA": accuracy, "mE": 0.25, "mP": 3.4}
        fields = {"experiment": {"seed": seed}, "validation_accuracy": validation, "averaged rounds": 5}
        return {"name": name, "mean of last 5": means, **fields}

    rows = format_seed_table(
        [make_run("fedavg", seed, 0.5 + seed / 10, 0.6) for seed in (0, 1)]
        + [make_run("fedavg, no layer norm", seed, 0.5, 0.7) for seed in (0, 1)]  # worse on test images
    ).splitlines()
    assert rows == [
        "| mean of last 5 rounds | mA | mE | mP | mA, seeds 0, 1 | mE, seeds 0, 1 |",
        "|---|---|---|---|---|---|",
        "| fedavg | 0.5500 ± 0.0500 | 0.2500 ± 0.0000 | 3.4 ± 0.0 | 0.5000 0.6000 | 0.2500 0.2500 |",
        "| fedavg, no layer norm (better by validation) | 0.5000 ± 0.0000 | 0.2500 ± 0.0000 | 3.4 ± 0.0 "
        "| 0.5000 0.5000 | 0.2500 0.2500 |",
        "",
        f"{LEGEND}; mP: mean perplexity of codeword use",
    ]
    assert format_mean_stderr([0.5], 2) == "0.50"
    assert parse_seeds("2,0") == [2, 0]
    with pytest.raises(InputError, match="seeds='2,0,2' names seed 2 more than once"):
        parse_seeds("2,0,2")


def test_a_comparison_over_seeds_has_paired_intervals_and_names_models_of_silos_own():
    def make_run(name, seed, accuracy, nll, own_models, **method):
        means = {"mA": accuracy, "mE": 0.25, "mP": 3.4, "mNLL": nll}
        experiment = {"seed": seed, "method": {"fine_tuning_epochs": 0, "group_rounds": 0, **method}}
        fields = {"experiment": experiment, "validation_accuracy": 0.5, "averaged rounds": 5}
        fields["group_rounds"] = 2 if name == "uefl" else 0  # of the setting, 8, as many as were run
        return {"name": name, "mean of last 5": means, "own_models": own_models, **fields}

    accuracies, nlls = {"fedavg": (0.50, 0.60, 0.55), "uefl": (0.60, 0.65, 0.67)}, (0.9, 0.8, 0.85)
    records = [make_run("fedavg", seed, accuracies["fedavg"][seed], nlls[seed], {}) for seed in range(3)]
    own = {"num_silos": 9, "nll": 0.4, "shared_nll": 1.2}
    settings = {"fine_tuning_epochs": 5, "group_rounds": 8}
    records += [make_run("uefl", s, accuracies["uefl"][s], nlls[s] - 0.4, own, **settings) for s in range(3)]
    # Differences of 10, 5 and 12 points: 9 ± t(0.975, 2) · 3.6056 / √3, and t = 4.3027.
    assert describe_differences(summarize_seeds(records)) == [
        "uefl minus fedavg, paired by seed, 95 % intervals: mA +9.0 (0.0 to +18.0) points, "
        "mNLL −0.400 (−0.400 to −0.400) (lower is better)"
    ]
    assert describe_own_means(records) == [
        "uefl (rounds in groups of alike silos: 2, epochs of local fine-tuning: 5): after the last round, silos have "
        "models of their own: mean NLL of test examples 0.400, of the shared model 1.200"
    ]
    assert describe_differences(summarize_seeds([r for r in records if r["experiment"]["seed"] == 0])) == []
    records[-1]["mean of last 5"]["mNLL"] = math.inf
    (line,) = describe_differences(summarize_seeds(records))
    assert line.endswith("mA +9.0 (0.0 to +18.0) points, mNLL –")
    # Of two FedAvgs, the others are compared with the one that is better by validation.
    better = [{**r, "name": "fedavg, no layer norm", "validation_accuracy": 0.6} for r in records[:3]]
    named = [line.partition(",")[0] for line in describe_differences(summarize_seeds([*records[:3], *better]))]
    assert named == ["fedavg minus fedavg"]
    assert (
        "fedavg minus fedavg, no layer norm, paired"
        in describe_differences(summarize_seeds([*records[:3], *better]))[0]
    )
    # Without FedAvg, with the first one.
    others = [{**r, "name": name} for name in ("ditto", "uefl") for r in records[:3]]
    assert describe_differences(summarize_seeds(others))[0].startswith("uefl minus ditto, paired")


def test_comparing_seeds_prints_differences_and_own_models_once_per_method(tmp_path):
    arguments = ["mnist5k", *TINY_SETTINGS_NO_CODEBOOK, "fine_tuning_epochs=1", "batch_norm=not_averaged"]
    methods = ["fedavg", "fine-tuning", "encoder=mlp"]
    answer = call_cli("compare", *methods, *arguments, "--seeds", "0,1", "--out", str(tmp_path))
    assert answer.code == 0, answer.stderr
    lines = answer.stdout.splitlines()
    (folder,) = tmp_path.glob("compare-*")
    saved = (folder / "seeds.md").read_text()
    (better,) = re.findall(r"^\| (fedavg.*) \(better by validation\)", saved, re.MULTILINE)
    paired = [line for line in lines if "paired by seed, 95 % intervals: mA" in line]
    assert len(paired) == 2
    assert all(f" minus {better}, paired by seed" in line for line in paired)
    (own,) = (line for line in lines if "models of their own" in line)
    assert own.startswith("fine-tuning (epochs of local fine-tuning: 1): after the last round, silos have models")
    assert all(line in saved for line in [*paired, own])
    idle = [line for line in lines if "batch_norm=not_averaged has no effect" in line]
    assert sorted(line.partition(":")[0] for line in idle) == ["fedavg", "fedavg, no layer norm", "fine-tuning"]


ONE_MORE_METRIC = """
import sys, types
from pathlib import Path
import uefl.core.codebook, uefl.core.federation

path = Path(uefl.core.__file__).with_name("metrics.py")
entry = '''METRICS = (
    Metric("error_rate", "error rate", lambda sums: 1 - _mean("correct")(sums), label="mX", column="err.", digits=2),
'''
module = types.ModuleType("uefl.core.metrics")
sys.modules[module.__name__] = uefl.core.metrics = module
exec(compile(path.read_text().replace("METRICS = (\\n", entry, 1), str(path), "exec"), module.__dict__)

from harness import TINY_SETTINGS
from rich.console import Console
from uefl.experiment.comparison import RunResources, compare_experiments
from uefl.experiment.parsing import parse_experiments
from uefl.experiment.run_folder import RunFolder
from uefl.experiment.seeds import compare_seeds

out, console = Path(sys.argv[1]), Console(width=150)
settings = [s for s in TINY_SETTINGS if not s.startswith("iterations")]
experiments = parse_experiments([*settings, "iterations=1", "fine_tuning_epochs=0"], ["uefl"], "default")
compare_experiments(experiments, out, RunResources(), console)
compare_seeds(experiments, [0], out, RunResources(), console)
"""


def test_one_entry_adds_a_metric_to_all_tables(tmp_path):
    """A metric that is added to the source of the registry appears in progress, table, legend, summary and seeds."""
    command = [sys.executable, "-c", ONE_MORE_METRIC, str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, Path(__file__).parents[1:3]))}
    result = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert result.returncode == 0, result.stderr
    (summary,) = (json.loads(path.read_text()) for path in tmp_path.glob(f"*/{RunFolder.SUMMARY_FILE}"))
    last = summary["last"]
    assert last["mX"] == pytest.approx(1 - last["mA"])
    assert all(silo["error_rate"] == pytest.approx(1 - silo["accuracy"]) for silo in last["silos"].values())
    error = f"mX {summary['last']['mX']:.2f}  mA {last['mA']:.3f}"
    assert error in result.stdout
    assert "err." in result.stdout
    assert "mX: mean error rate over silos; mA: mean accuracy" in result.stdout
    headings = "mX | mA | mE | mP | mNLL | mBrier | mAUGRC | mX, seeds 0 | mA, seeds 0 | mE, seeds 0"
    (table,) = (path.read_text() for path in tmp_path.glob(f"*/{SEEDS_TABLE_FILE}"))
    assert f"| mean of last 3 rounds | {headings} |" in table
    assert "Test examples, mean of last 3 rounds; mean ± standard error over seeds 0\n" in result.stdout
    assert re.search(r"│ mX +│ +\d\.\d+ │", result.stdout)


def test_the_names_of_metrics_and_of_shared_sums_are_unambiguous():
    assert len({metric.name for metric in METRICS}) == len(METRICS)
    names = [name for metric in METRICS for name in metric.sums]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize(
    ("groups", "unlike", "expected"),
    [
        ([["a", "b"], ["c", "d"]], [], "groups of alike silos trained one model each: a, b; c, d"),
        (
            [["a", "b"], ["c", "d"]],
            ["c", "d"],
            "groups of alike silos trained one model each: a, b; silos alike to no other, together: c, d",
        ),
        ([["a", "b", "c"]], [], "all silos are alike and trained one model together: a, b, c"),
        ([["a", "b", "c"]], ["a", "b", "c"], "no two silos are alike, so all trained one model together: a, b, c"),
    ],
)
def test_groups_are_named_with_the_silos_that_are_alike_to_no_other(groups, unlike, expected):
    assert describe_grouping(groups, unlike) == expected
