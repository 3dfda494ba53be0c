"""A silo joins a run whose silos ended with models of their own as it joins the same run without them."""

import json
import re
import shutil
from pathlib import Path

import pytest
from harness import call_cli, find_folder, have_equal_bits, list_photo_names, write_hospitals, write_photos

from uefl.experiment.checkpoint import load_checkpoint
from uefl.experiment.loading import open_models
from uefl.experiment.run_folder import RunFolder

SETTINGS = ["rounds=3", "iterations=2", "epochs=1", "mc_samples=3", "calibration_fraction=0.2"]
SMALL_NETWORK = ["width=4", "depth=1", "hidden_size=8", "image_size=12", "min_examples=2", "num_codewords=4"]
NO_OWN_MODELS = ["fine_tuning_epochs=0", "extra_rounds=2", "group_rounds=0"]
OWN_MODELS = {
    "tuning": ["fine_tuning_epochs=2", "extra_rounds=2", "group_rounds=0"],
    "groups": ["fine_tuning_epochs=0", "extra_rounds=3", "group_rounds=1"],  # one round more than the others
}


def write_folders(root: Path) -> tuple[list[str], Path]:
    """Write images of two silos, and of a third."""
    photos = write_photos(root / "photos", list_photo_names(["north", "south"], count=12))
    east = write_photos(root / "east", [f"{label}/{i}.png" for label in "xy" for i in range(30)], (20, 20), 1)
    return ["folder", f"path={photos}", *SMALL_NETWORK], east


class Pair:
    """The same run with and without models of silos' own, and the data of a further silo."""

    def __init__(self, root: Path, kind: str) -> None:
        data, self.newcomer = write_hospitals(root, "east.csv") if kind == "tables" else write_folders(root)
        settings = {"none": NO_OWN_MODELS, **OWN_MODELS}
        answers = {n: call_cli("run", "uefl", *data, *SETTINGS, *s, "--out", str(root)) for n, s in settings.items()}
        sentence = "silos have models of their own: mean NLL of test examples"
        assert [sentence in answer.stdout for answer in answers.values()] == [False, True, True]
        self.runs = {name: find_folder(answer.stdout) for name, answer in answers.items()}
        self.said: dict[tuple[str, ...], str] = {}

    def join(self, name: str, *settings: str) -> tuple[Path, str]:
        """Join one of the runs once, and return the new folder and what the command printed."""
        key = (name, *settings)
        if key not in self.said:
            answer = call_cli("join", str(self.runs[name]), str(self.newcomer), "name=east", *settings)
            assert answer.code == 0, answer
            self.said[key] = answer.stdout
        return find_folder(self.said[key]), self.said[key]


@pytest.fixture(scope="module", params=["tables", "images"])
def pair(request, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return Pair(tmp_path_factory.mktemp("own"), request.param)


def select_own_parts(folder: Path) -> dict:
    """Return tensors of the silo that joined, and its codewords."""
    header, models = RunFolder(folder).read_header(), open_models(folder)
    copy = models.select_silo("east")
    names = [n for n in header["joined"][-1]["own_tensors"] if n in copy.model_state]
    return {n: copy.personal_tensors.get("east", {}).get(n, copy.model_state[n]) for n in names}


def read_rounds(folder: Path) -> list[dict]:
    return [json.loads(line) for line in RunFolder(folder).records_path.read_text().splitlines()]


@pytest.mark.parametrize("own", OWN_MODELS)
@pytest.mark.parametrize("settings", [["epochs=3"], ["head=new", "epochs=2"], ["head=shared", "epochs=2"]])
def test_the_join_has_the_same_bits_evaluation_and_words(pair, own, settings, tmp_path) -> None:
    (folder, said), (plain, said_of_plain) = (pair.join(name, *settings) for name in (own, "none"))
    one, other = select_own_parts(folder), select_own_parts(plain)
    assert one.keys() == other.keys()
    assert one
    assert have_equal_bits(one, other)
    entries = [RunFolder(f).read_header()["joined"][-1] for f in (folder, plain)]
    assert entries[0] == entries[1]
    records = [read_rounds(f)[-1]["silos"]["east"] for f in (folder, plain)]
    assert records[0] == records[1]
    said, said_of_plain = (re.sub(r"uefl-(table|folder)-\w+", "", text) for text in (said, said_of_plain))
    assert said == said_of_plain
    copies = [shutil.copytree(f, tmp_path / f.name) for f in (folder, plain)]
    for command, silo in (("predict", ""), ("watch", "east"), ("calibrate", "east"), ("predict", "east")):
        arguments = [*([] if command == "calibrate" else [str(pair.newcomer)]), *(["--silo", silo] if silo else [])]
        answers = [call_cli(command, str(f), *arguments) for f in copies]
        assert answers[0].code == 0, answers[0]
        said, said_of_plain = (re.sub(r"uefl-(table|folder)-\w+", "", a.stdout + a.stderr) for a in answers)
        assert said == said_of_plain


@pytest.mark.parametrize("own", OWN_MODELS)
def test_the_others_keep_their_own_models_and_further_silos_join(pair, own, tmp_path) -> None:
    folder, _ = pair.join(own, "epochs=2", "head=own")
    before, after = open_models(pair.runs[own]), open_models(folder)
    for name in before.description.silo_names:
        assert have_equal_bits(before.personal_tensors[name], after.personal_tensors[name])
        assert any((after.personal_tensors[name][n] != t).any() for n, t in before.build().net.named_parameters())
    plain, _ = pair.join("none", "epochs=2", "head=own")
    answers = [call_cli("join", str(f), str(pair.newcomer), "name=west", "epochs=2") for f in (folder, plain)]
    assert [answer.code for answer in answers] == [0, 0], answers
    records = [read_rounds(find_folder(answer.stdout))[-1]["silos"]["west"] for answer in answers]
    assert records[0] == records[1]
    exported = call_cli("export", str(folder), str(tmp_path / "east.pt2"), "--silo", "east")
    assert exported.code == 0, exported


def test_further_rounds_start_with_the_server_s_model_and_end_with_own_models(pair) -> None:
    (folder, _), (plain, _) = (pair.join(name, "others=train", "rounds=2") for name in ("tuning", "none"))
    servers = [load_checkpoint(RunFolder(f).server_path, "cpu")[0] for f in (folder, plain)]
    assert have_equal_bits(servers[0].model_state, servers[1].model_state)
    rounds, plain_rounds = read_rounds(folder), read_rounds(plain)
    names = list(plain_rounds[-1]["silos"])
    metrics = [[r[-2]["silos"][name]["nll"] for name in names] for r in (rounds, plain_rounds)]
    assert metrics[0] == metrics[1]
    for name in names:
        entry, plain_entry = (r[-1]["silos"][name] for r in (rounds, plain_rounds))
        assert entry["shared"]["nll"] == plain_entry["nll"]
        assert entry["nll"] != plain_entry["nll"]
    assert set(open_models(folder).personal_tensors) == set(names)


def test_after_further_rounds_all_silos_are_divided_into_groups_again(pair) -> None:
    parent = load_checkpoint(RunFolder(pair.runs["groups"]).server_path, "cpu")[0]
    folder, _ = pair.join("groups", "others=train", "rounds=2")
    server, rounds = load_checkpoint(RunFolder(folder).server_path, "cpu")[0], read_rounds(folder)
    assert [r["round"] for r in rounds if "groups" in r] == [parent.round, parent.round + 3]
    assert sorted(name for group in rounds[-1]["groups"] for name in group) == list(server.silo_names)
    assert "east" in server.silo_names
    assert not have_equal_bits(server.model_state, parent.model_state), "two more shared rounds"
    for entry, last_shared in ((r[-1]["silos"][n], r[-2]["silos"][n]) for r in [rounds] for n in server.silo_names):
        assert entry["shared"]["nll"] == last_shared["nll"] != entry["nll"]
