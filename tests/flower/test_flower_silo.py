"""A silo reports no paths, writes one line per message to its audit log, and keeps its files private."""

import json
import os
import shutil
import stat
from dataclasses import replace

import pytest
from in_process_grid import InProcessGrid
from small_federation import QUICK_POLICY, make_experiment, make_grid, run_rounds

from uefl.core.errors import InputError
from uefl.core.federation import size_in_bytes
from uefl.data.config import DataConfig
from uefl.flower import client_audit
from uefl.flower.client import make_client_app
from uefl.flower.client_audit import AUDIT_FILE, AuditEntry, append_audit_entry
from uefl.flower.connect import connect
from uefl.flower.demo import write_digits
from uefl.flower.silo_errors import describe_error
from uefl.flower.silo_registry import RoundPolicy
from uefl.flower.wire import make_message, read_payload, read_tensors

PATIENT = "Jane Doe 1961-03-14.png"


def make_folder_experiment(method_name="fedavg", **fields):
    experiment = make_experiment(method_name, **fields)
    return replace(experiment, data=DataConfig(name="folder", image_size=14))


def make_folder_grid(tmp_path, silos=("north", "south", "west")):
    """Nodes that read their own folders of digits."""
    for i, silo in enumerate(silos):
        write_digits(tmp_path / silo / "data", "rotate:0", i, num_images=60)
    nodes = {
        i: {"silo": silo, "data_path": str(tmp_path / silo / "data"), "state_path": str(tmp_path / silo / "state")}
        for i, silo in enumerate(silos)
    }
    return InProcessGrid(make_client_app(), nodes)


def list_texts(message):
    return [json.dumps(dict(record)) for record in message.content.config_records.values()]


def empty_folder(folder):
    for child in folder.iterdir():
        shutil.rmtree(child)


def break_image(folder):
    (folder / "0").mkdir(parents=True, exist_ok=True)
    (folder / "0" / PATIENT).write_bytes(b"no image")


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (break_image, "a file of this silo cannot be read"),
        (shutil.rmtree, "the data folder of this silo does not exist"),
        (empty_folder, "the data folder of this silo has no files"),
    ],
    ids=["broken image", "absent folder", "empty folder"],
)
def test_no_path_or_file_name_leaves_a_silo(damage, reason, tmp_path, caplog):
    experiment, grid = make_folder_experiment(rounds=2, iterations=1), make_folder_grid(tmp_path)
    engine, replies = connect(grid, experiment, num_silos=3, policy=QUICK_POLICY), []
    damage(tmp_path / "west" / "data")
    grid.tamper = lambda _message, reply: replies.append(reply) or reply
    _, records = run_rounds(engine, experiment)
    assert all(reason in record["silos"]["west"]["rejected"] for record in records)
    for text in (json.dumps(records), *(text for reply in replies for text in list_texts(reply))):
        assert not [part for part in ("Jane", "Doe", "1961", ".png", str(tmp_path), "west/data") if part in text]
    assert str(tmp_path / "west" / "data") in caplog.text, "the silo's own log has the path"


def test_an_error_is_described_without_paths():
    assert describe_error(FileNotFoundError(2, "No such file or directory", "/data/Jane Doe.png")).startswith(
        "FileNotFoundError: no such file or directory; the silo's log"
    )
    assert "Jane" not in describe_error(RuntimeError("/data/Jane Doe.png is broken"))
    assert "etc" not in describe_error(InputError("cannot use /etc/passwd"))
    assert describe_error(InputError("unknown data set '../../etc'")) == "unknown data set '../../etc'"


def read_audit_log(folder):
    return [json.loads(line) for line in (folder / AUDIT_FILE).read_text().splitlines()]


def test_every_message_has_a_line_in_the_audit_log(tmp_path):
    experiment, grid = make_folder_experiment("uefl"), make_folder_grid(tmp_path)
    run_rounds(connect(grid, experiment, num_silos=3, policy=QUICK_POLICY), experiment)
    messages = [message for message in grid.sent_messages if message.metadata.dst_node_id == 0]
    entries = read_audit_log(tmp_path / "north" / "state")
    assert len(entries) == len(messages)
    for entry, message in zip(entries, messages):
        payload, model_state = read_payload(message), read_tensors(message, "model_state")
        expected = payload.get("task", "training" if "evaluate" in payload else "registration")
        assert (entry["task"], entry.get("round")) == (expected, payload.get("round"))
        assert entry["accepted"]
        assert entry["time"].endswith("+00:00")
        assert (entry["silo"], entry["method"]) == ("north", "uefl")
        assert entry["num_codewords"] == len(model_state.get("codebook.codewords", ()))
        assert entry["bytes_in"] > size_in_bytes(model_state)
        assert entry["bytes_out"] > 0
    assert entries[0]["settings"] == experiment.to_config()
    assert len({entry["settings_hash"] for entry in entries}) == 1
    assert {entry["requested_codewords"] for entry in entries if entry["task"] == "compute_centroids"} == {8}


def test_a_rejected_message_has_a_line_with_its_reason(tmp_path):
    grid = make_folder_grid(tmp_path, ("north",))
    grid.send_and_receive([make_message({"experiment": {"name": "evil\n[red]"}}, 0, "train", ttl=60)])
    (entry,) = read_audit_log(tmp_path / "north" / "state")
    assert not entry["accepted"]
    assert entry["reason"].startswith("InputError: unknown method 'evil\\n(red)'")


def test_a_silo_sends_nothing_if_its_audit_log_cannot_be_written(tmp_path, monkeypatch):
    grid = make_folder_grid(tmp_path, ("north",))

    def fail(*_):
        raise OSError(28, "No space left on device", str(tmp_path))

    monkeypatch.setattr(client_audit.os, "write", fail)
    message = make_message({"experiment": make_folder_experiment().to_config()}, 0, "query", ttl=60)
    (reply,) = grid.send_and_receive([message])
    payload = read_payload(reply)
    assert payload["rejected"].startswith("OSError: no space left on device")
    assert "classes" not in payload


def test_a_line_that_a_full_disk_cuts_off_does_not_damage_the_audit_log(tmp_path, monkeypatch):
    write = os.write
    append_audit_entry(tmp_path / "state", AuditEntry(silo="north"))
    with monkeypatch.context() as context:
        context.setattr(client_audit.os, "write", lambda file, content: write(file, content[:7]))
        with pytest.raises(OSError, match="No space left on device"):
            append_audit_entry(tmp_path / "state", AuditEntry(silo="north"))
    append_audit_entry(tmp_path / "state", AuditEntry(silo="north"))
    assert [entry["silo"] for entry in read_audit_log(tmp_path / "state")] == ["north", "north"]


def test_files_of_a_silo_are_readable_by_their_owner_only(tmp_path):
    experiment, grid = make_folder_experiment("local-only", rounds=2, iterations=1), make_folder_grid(tmp_path)
    run_rounds(connect(grid, experiment, num_silos=3, policy=QUICK_POLICY), experiment)
    paths = [tmp_path / "north" / "state", *(tmp_path / "north" / "state").rglob("*")]
    assert {path.suffix for path in paths} >= {".safetensors", ".jsonl"}
    for path in paths:
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path


def test_a_rule_of_the_silo_rejects_a_request_before_data_are_read(tmp_path):
    def reject_training(request):
        if "evaluate" in request.payload:
            raise InputError("this silo does not train")

    def load_no_data(*_):
        raise AssertionError("data were read")

    app = make_client_app(load_no_data, tmp_path, screens=[reject_training])
    grid = InProcessGrid(app, {0: {"silo": "north"}})
    payload = {"experiment": make_folder_experiment().to_config(), "evaluate": True}
    (reply,) = grid.send_and_receive([make_message(payload, 0, "train", ttl=60)])
    assert read_payload(reply)["rejected"] == "this silo does not train"


def run_with_new_images(tmp_path, num_new, **policy):
    """Run three rounds; silo west receives new images before the second."""
    experiment, grid = make_folder_experiment(rounds=3, iterations=1), make_folder_grid(tmp_path)
    engine = connect(grid, experiment, num_silos=3, policy=replace(QUICK_POLICY, retries=0, **policy))
    method = experiment.method
    server, records = method.step(engine, method.initialize_server(engine)), []
    before = engine.num_examples["west"]
    write_digits(tmp_path / "west" / "data", "rotate:0", 3, num_images=num_new)
    for _ in range(2):
        server = method.step(engine, server)
        records += server.completed_records
    return [record["silos"]["west"] for record in records], before, engine.num_examples["west"]


def test_new_images_are_accepted_at_the_next_round_with_a_note(tmp_path):
    silos, before, after = run_with_new_images(tmp_path, 20)
    assert after > before
    assert not [silo for silo in silos if "rejected" in silo]
    assert [silo.get("note", "") for silo in silos] == [
        "",
        f"training examples changed from {before} to {after}",
        "",
    ]


def test_changed_data_are_rejected_if_the_policy_freezes_them(tmp_path):
    silos, before, after = run_with_new_images(tmp_path, 20, data_changes="freeze")
    assert after == before
    assert ["rejected" in silo for silo in silos] == [False, True, True]
    assert f"but the silo registered {before}" in silos[1]["rejected"]


def test_a_silo_cannot_report_many_more_examples_than_it_registered(tmp_path):
    silos, before, _ = run_with_new_images(tmp_path, 300)
    assert f"but the silo registered {before}; at most {2 * before} are accepted" in silos[1]["rejected"]


def test_an_unknown_policy_for_changed_data_is_an_error():
    with pytest.raises(InputError, match="unknown data_changes 'maybe'; known: accept, freeze"):
        RoundPolicy(data_changes="maybe")


def test_simulated_silos_keep_their_audit_log_in_the_state_folder(tmp_path):
    connect(make_grid(tmp_path / "state"), make_experiment("fedavg"), num_silos=3, policy=QUICK_POLICY)
    entries = read_audit_log(tmp_path / "state")
    assert sorted(entry["silo"] for entry in entries) == ["D1-1", "D2-1", "D3-1"]
