"""A name is bound to the key of its node, and no single silo decides on the format of all data."""

import json

import pytest
from small_federation import QUICK_POLICY, SILOS, make_experiment, make_grid, run_rounds

from uefl.core.errors import InputError, ResumableError
from uefl.flower.connect import connect
from uefl.flower.data_format import DataFormat, parse_data_format
from uefl.flower.wire import PAYLOAD_RECORD, read_payload


def make_registered_grid(state_folder):
    """Nodes that were registered with a name and a key, as `uefl deploy` does."""
    grid = make_grid(state_folder)
    grid.registrations = {90 - i: (name, f"key of {name}".encode()) for i, name in enumerate(SILOS)}
    return grid


def connect_grid(grid, experiment, events, **options):
    return connect(
        grid,
        experiment,
        num_silos=3,
        policy=QUICK_POLICY,
        on_silo_event=lambda _silo, activity: events.append(activity),
        **options,
    )


def test_a_node_under_the_name_of_an_absent_silo_is_rejected_by_name(tmp_path):
    """Attack A9: D4-1 presents itself as D2-1 while the real D2-1 restarts, to receive its codewords."""
    experiment, grid, events = make_experiment("uefl"), make_registered_grid(tmp_path), []
    engine, method = connect_grid(grid, experiment, events), experiment.method
    server = method.step(engine, method.initialize_server(engine))
    grid.registrations[87] = ("D4-1", b"key of D4-1")
    real = grid.nodes.pop(89)
    grid.nodes[87] = dict(real)
    grid.sent_messages.clear()
    server = method.step(engine, server)
    assert not [p for p in map(read_payload, grid.sent_messages) if p.get("silo") == "D2-1"]
    grid.nodes[89] = real  # the real silo is back, and the name is still its own
    server = method.step(engine, server)
    assert any("the node that is registered as silo D4-1 presents itself as silo D2-1" in event for event in events)
    assert server.round == 3
    addressed = {
        (message.metadata.dst_node_id, payload["silo"])
        for message in grid.sent_messages
        if "silo" in (payload := read_payload(message))
    }
    assert addressed >= {(89, "D2-1")}
    assert (87, "D2-1") not in addressed


def test_an_unregistered_node_cannot_take_a_bound_name(tmp_path):
    experiment, grid, events = make_experiment("fedavg", rounds=1, iterations=1), make_registered_grid(tmp_path), []
    engine = connect_grid(grid, experiment, events)
    grid.nodes[17] = grid.nodes.pop(89)
    run_rounds(engine, experiment)
    assert any("its key is not registered and this silo is bound to key" in event for event in events)


def test_a_registered_silo_that_restarts_is_the_same_silo(tmp_path):
    experiment, grid, events = make_experiment("fedavg", rounds=1, iterations=1), make_registered_grid(tmp_path), []
    engine = connect_grid(grid, experiment, events)
    grid.nodes[17], grid.registrations[17] = grid.nodes.pop(89), grid.registrations.pop(89)
    _, (record,) = run_rounds(engine, experiment)
    assert "rejected" not in record["silos"]["D2-1"]


def forge_registration(grid, node_id, **changes):
    """Change what one node reports of itself."""

    def tamper(message, reply):
        if message.metadata.dst_node_id == node_id and message.metadata.message_type == "query":
            payload = {**read_payload(reply), **changes}
            reply.content[PAYLOAD_RECORD]["json"] = json.dumps(payload)
        return reply

    grid.tamper = tamper


DIGITS = [str(i) for i in range(10)]
MISFITS = {
    "another shape": (
        {"image_shape": [3, 14, 14]},
        "silo D2-1 has images of shape 3×14×14, but the federation uses 1×14×14",
    ),
    "extra classes": (
        {"classes": [*DIGITS, *(f"extra {i}" for i in range(2000))]},
        "classes that the federation does not use: extra 0, extra 1, extra 2, extra 3, extra 4 and 1995 more",
    ),
    "huge shape": ({"image_shape": [1, 10**6, 10**6]}, "silo D2-1 reported an invalid shape of images"),
    "hostile class": ({"classes": ["\x1b[31m"]}, "silo D2-1 sent a name that is too long or has unusual characters"),
    "same class twice": ({"classes": ["0", "0"]}, "silo D2-1 has no classes, or two of the same name"),
}


@pytest.mark.parametrize("configured", [DataFormat(), DataFormat((1, 14, 14), tuple(DIGITS))], ids=["majority", "set"])
@pytest.mark.parametrize("kind", MISFITS)
def test_a_silo_with_another_format_is_left_out_and_the_others_start(kind, configured, tmp_path):
    """Attack A10: one silo kept the federation from starting, or enlarged the classifier of all silos."""
    changes, reason = MISFITS[kind]
    grid, events = make_grid(tmp_path), []
    forge_registration(grid, 89, **changes)
    engine = connect_grid(grid, make_experiment("fedavg"), events, data_format=configured)
    assert list(engine.num_examples) == ["D1-1", "D3-1"]
    assert (engine.image_shape, engine.class_names) == ((1, 14, 14), tuple(DIGITS))
    assert any(reason in event for event in events)


def test_the_chosen_format_is_reported(tmp_path):
    grid, events = make_grid(tmp_path), []
    forge_registration(grid, 89, image_shape=[3, 14, 14])
    connect_grid(grid, make_experiment("fedavg"), events)
    expected = (
        "images of shape 1×14×14, by the majority of silos; 10 classes, by the majority of silos: 0, 1, 2, 3, 4 and"
    )
    assert any(expected in event for event in events)


def test_classes_that_the_coordinator_sets_may_exist_at_one_silo_only(tmp_path):
    grid, events = make_grid(tmp_path), []
    forge_registration(grid, 89, classes=[*DIGITS, "ten"])
    configured = parse_data_format("", ",".join([*DIGITS, "ten"]))
    engine = connect_grid(grid, make_experiment("fedavg"), events, data_format=configured)
    assert list(engine.num_examples) == list(SILOS)
    assert engine.class_names == (*DIGITS, "ten")


def test_a_silo_without_some_classes_takes_part(tmp_path):
    grid, events = make_grid(tmp_path), []
    forge_registration(grid, 89, classes=DIGITS[:7])
    engine = connect_grid(grid, make_experiment("fedavg"), events)
    assert list(engine.num_examples) == list(SILOS)
    assert engine.class_names == tuple(DIGITS)


def test_too_few_silos_of_the_set_format_are_an_error(tmp_path):
    with pytest.raises(ResumableError, match="only 0 of 3 silos can take part; 2 are required; silo D1-1 has images"):
        connect_grid(make_grid(tmp_path), make_experiment("fedavg"), [], data_format=DataFormat((3, 14, 14)))


@pytest.mark.parametrize(
    ("image_shape", "classes", "reason"),
    [
        ("1x28", "", "image_shape=1x28 must be"),
        ("0,2", "", "image_shape=0,2 must be"),
        ("", "a,,b", "classes=a,,b must"),
    ],
)
def test_an_invalid_format_in_the_run_configuration_is_an_error(image_shape, classes, reason):
    with pytest.raises(InputError, match=reason):
        parse_data_format(image_shape, classes)
