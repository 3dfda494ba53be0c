"""A checkpoint holds the server and the client states completely; a kill leaves the old or the new one."""

import os
from dataclasses import replace

import pytest
import torch
from harness import CODEWORDS, LOCAL, SHORT_RUN, SMALL_CODEBOOK, drop_seconds, have_equal_bits, make_clients, run_rounds

from uefl.algorithms.ditto import Ditto
from uefl.algorithms.fccl import FCCL
from uefl.algorithms.fedavg import FedAvg
from uefl.algorithms.pmfl import PMFL
from uefl.algorithms.references import LocalOnly
from uefl.algorithms.scaffold import Scaffold
from uefl.algorithms.uefl import UEFL
from uefl.core.errors import ResumableError
from uefl.core.federation import ServerState
from uefl.engines.serial import SerialEngine
from uefl.engines.stacked.stacked_engine import StackedEngine
from uefl.experiment.checkpoint import load_checkpoint, load_tensors, save_checkpoint, save_tensors
from uefl.experiment.files import write_text

EAGER = replace(SMALL_CODEBOOK, min_examples=10, uncertainty_test="permutation")


def make_server():
    state = {
        "w": torch.randn(3, 4, 2, 2).to(memory_format=torch.channels_last),
        "half": torch.randn(3).bfloat16(),
        "double": torch.randn(2, dtype=torch.float64),
        "count": torch.tensor(7),
        CODEWORDS: torch.zeros(0, 5),
        "a.name/with a slash": torch.ones(1),
    }
    return ServerState(
        ("ada", "bob/1", "ümit"),
        state,
        torch.ones(3, 0, dtype=torch.bool),
        {"initial_codewords": torch.tensor(3), "c": torch.randn(2)},
        round=4,
        iteration=2,
        is_codebook_final=True,
        open_record={
            "round": 4,
            "silos": {"ada": {"accuracy": 0.1 + 0.2}},
            "participants": ["ada"],
            "has_decision": False,
        },
    )


def test_a_loaded_checkpoint_equals_the_saved_one(tmp_path):
    server = make_server()
    client_states = {
        "ada": {"m.v": torch.randn(2)},
        "bob/1": {"optimizer.0.step.w": torch.tensor(3.0)},
        "ümit": {"b": torch.ones(1)},
    }
    save_checkpoint(tmp_path / "c", server, client_states)
    loaded, loaded_states = load_checkpoint(tmp_path / "c", "cpu")
    for field in ("silo_names", "round", "iteration", "is_codebook_final", "open_record", "completed_records"):
        assert getattr(loaded, field) == getattr(server, field), field
    for one, other in ((loaded.model_state, server.model_state), (loaded.method_state, server.method_state)):
        assert have_equal_bits(one, other)
        assert {n: t.dtype for n, t in one.items()} == {n: t.dtype for n, t in other.items()}
        assert {n: t.shape for n, t in one.items()} == {n: t.shape for n, t in other.items()}
    assert torch.equal(loaded.access, server.access)
    assert loaded.access.dtype == torch.bool
    assert loaded_states.keys() == client_states.keys()
    assert all(have_equal_bits(loaded_states[name], client_states[name]) for name in client_states)


def test_the_ledger_is_loaded_bit_by_bit(tmp_path):
    access = torch.rand(3, 17, generator=torch.Generator().manual_seed(0)) > 0.5
    save_checkpoint(tmp_path / "c", make_server().replace(access=access), {})
    assert torch.equal(load_checkpoint(tmp_path / "c", "cpu")[0].access, access)


def test_saving_leaves_no_temporary_file_and_changes_no_tensor(tmp_path):
    server = make_server()
    before = {n: t.clone() for n, t in server.model_state.items()}
    save_checkpoint(tmp_path / "c", server, {})
    assert have_equal_bits(server.model_state, before)
    assert os.listdir(tmp_path) == ["c"]


def test_an_incomplete_temporary_file_is_ignored(tmp_path):
    """A kill during writing leaves one behind, named after this process or another."""
    save_checkpoint(tmp_path / "c", make_server(), {})
    whole = (tmp_path / "c").read_bytes()
    for pid in (os.getpid(), 1):
        (tmp_path / f".c.{pid}").write_bytes(whole[: len(whole) // 2])
    assert load_checkpoint(tmp_path / "c", "cpu")[0].round == 4
    save_checkpoint(tmp_path / "c", make_server().replace(round=5), {})
    assert load_checkpoint(tmp_path / "c", "cpu")[0].round == 5


def test_a_write_that_fails_leaves_the_old_file(tmp_path, monkeypatch):
    save_checkpoint(tmp_path / "c", make_server(), {})
    write_text(tmp_path / "t", "old")
    for name in ("fsync", "replace"):
        with monkeypatch.context() as patch:

            def fails(*_):
                raise OSError("disk full")

            patch.setattr(os, name, fails)
            with pytest.raises(OSError, match="disk full"):
                save_checkpoint(tmp_path / "c", make_server().replace(round=9), {})
            with pytest.raises(OSError, match="disk full"):
                write_text(tmp_path / "t", "new")
        assert load_checkpoint(tmp_path / "c", "cpu")[0].round == 4
        assert (tmp_path / "t").read_text() == "old"


@pytest.mark.parametrize("owner", ["model_state", "method_state"])
def test_a_state_that_is_not_finite_never_replaces_a_checkpoint(owner, tmp_path):
    save_checkpoint(tmp_path / "c", make_server(), {})
    infinite = make_server().replace(round=5, **{owner: {"w": torch.tensor([1.0, torch.inf])}})
    with pytest.raises(ResumableError, match=r"round 5: w of .* is not finite; the previous checkpoint is kept"):
        save_checkpoint(tmp_path / "c", infinite, {})
    assert load_checkpoint(tmp_path / "c", "cpu")[0].round == 4


def test_tensors_are_saved_with_metadata(tmp_path):
    save_tensors(tmp_path / "m", {"x": torch.arange(3)}, {"classes": ["a", "ü"], "n": 1.5})
    tensors, metadata = load_tensors(tmp_path / "m")
    assert tensors["x"].tolist() == [0, 1, 2]
    assert metadata == {"classes": ["a", "ü"], "n": 1.5}


def test_loaded_tensors_are_aligned(tmp_path):
    """Matrix products of tensors that are not aligned round differently, so that a resumed run would differ."""
    save_tensors(tmp_path / "m", {str(i): torch.ones(3) for i in range(20)}, {})
    assert all(tensor.data_ptr() % 64 == 0 for tensor in load_tensors(tmp_path / "m")[0].values())


RUNS = {
    "uefl": UEFL(**SHORT_RUN, codebook=EAGER),
    "newest codewords, optimizer state": UEFL(
        **{**SHORT_RUN, "iterations": 3, "local": replace(LOCAL, reset_optimizer=False)},
        codebook=replace(EAGER, retention="newest"),
    ),
    "local batch norm, some silos": FedAvg(**SHORT_RUN, batch_norm="local", clients_per_round=2),
    "clipped": FedAvg(**{**SHORT_RUN, "local": replace(LOCAL, max_grad_norm=0.5)}),
    "scaffold, clipped": Scaffold(
        **{**SHORT_RUN, "local": replace(Scaffold().adapt_local_training(LOCAL), max_grad_norm=0.5)}
    ),
    "local-only": LocalOnly(**SHORT_RUN),
    "ditto": Ditto(**SHORT_RUN),
    "pmfl": PMFL(**SHORT_RUN),
    "fccl": FCCL(**SHORT_RUN),
}


@pytest.mark.parametrize("kind", [SerialEngine, StackedEngine])
@pytest.mark.parametrize("name", RUNS)
def test_a_run_that_is_reloaded_after_every_round_ends_in_the_same_bits(name, kind, tmp_path):
    method = RUNS[name]
    engine = make_clients(method, engine=kind)
    whole, records = run_rounds(method, engine)
    server, resumed_records = None, []
    for _ in range(method.total_rounds):
        resumed = make_clients(method, engine=kind)
        if server is not None:
            server, resumed.client_states = load_checkpoint(tmp_path / "c", "cpu")
        server, completed = run_rounds(method, resumed, 1, server)
        resumed_records += completed
        save_checkpoint(tmp_path / "c", server, resumed.client_states)
    assert have_equal_bits(server.model_state, whole.model_state)
    assert have_equal_bits(server.method_state, whole.method_state)
    assert torch.equal(server.access, whole.access)
    assert [*map(drop_seconds, resumed_records)] == [*map(drop_seconds, records)]
    assert resumed.client_states.keys() == engine.client_states.keys()
    for name, client_state in engine.client_states.items():
        assert have_equal_bits(resumed.client_states[name], client_state)


def test_names_keep_their_order(tmp_path):
    """Members 0 to 11 sorted by name are 0, 1, 10, 11, 2 and would receive each other's codewords."""
    state = {f"members.{i}.codebook.codewords": torch.ones(1) for i in range(12)}
    save_checkpoint(tmp_path / "c", make_server().replace(model_state=state), {})
    assert list(load_checkpoint(tmp_path / "c", "cpu")[0].model_state) == list(state)
