"""The app in flower_app/: simulated by Flower's own command, with the code that is deployed."""

import json
import shutil
import sys
import tomllib
from dataclasses import fields
from pathlib import Path

import pytest
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp

from uefl.flower.deployment import find_flower_app
from uefl.flower.deployment_templates import make_script
from uefl.flower.local_processes import find_free_port, open_local_federation
from uefl.flower.silo_registry import RoundPolicy

SMALL_SETTINGS = (
    "data.num_silos=1,1,1 train_per_silo=24 test_per_silo=12 image_size=14 width=2 hidden_size=8 mc_samples=2 "
    "batch_size=12 epochs=1 num_codewords=4 warmup_rounds=1 rounds=2 extra_rounds=1 iterations=2 gamma=0 "
    "min_standard_errors=0"
)
SUPERLINK_COMMAND = """exec flower-superlink --insecure --simulation --host 127.0.0.1 --port {port} \\
    --disable-runtime-dependency-installation
"""
CONNECTION_CONFIG = """mkdir -p "$FLWR_HOME"
cat > "$FLWR_HOME/config.toml" <<END
[superlink]
default = "federation"
[superlink.federation]
address = "127.0.0.1:{port}"
insecure = true
END
"""
RUN_COMMAND = """exec flwr run "$here/app" federation --stream --run-config "$here/federation.toml" \\
    --federation-config 'num-supernodes=3 client-resources-num-cpus=1 client-resources-num-gpus=0.0'
"""


def test_the_app_is_complete(monkeypatch):
    project = tomllib.loads((find_flower_app() / "pyproject.toml").read_text())
    monkeypatch.syspath_prepend(str(find_flower_app()))
    apps = {}
    for component, target in project["tool"]["flwr"]["app"]["components"].items():
        module, _, name = target.partition(":")
        apps[component] = getattr(__import__(module, fromlist=[name]), name)
        sys.modules.pop(module)
    assert isinstance(apps["serverapp"], ServerApp)
    assert isinstance(apps["clientapp"], ClientApp)
    assert project["project"]["license"] == {"file": "LICENSE"}
    assert (find_flower_app() / "LICENSE").read_bytes() == Path(__file__).parents[2].joinpath("LICENSE").read_bytes()


def test_the_app_has_the_defaults_of_the_round_policy():
    project = tomllib.loads((find_flower_app() / "pyproject.toml").read_text())
    defaults, policy = project["tool"]["flwr"]["app"]["config"], RoundPolicy()
    for name in {field.name for field in fields(policy)} - {"poll_interval"}:
        assert defaults[name] == getattr(policy, name)


@pytest.mark.real
def test_the_app_runs_in_flowers_simulation(tmp_path):
    folder, port = tmp_path / "coordinator", find_free_port()
    shutil.copytree(find_flower_app(), folder / "app")
    run_config = f'num_silos = 3\nsettings = "{SMALL_SETTINGS}"\nout = "{folder}/runs"\n'
    (folder / "federation.toml").write_text(run_config)
    for name, command, connection in (("serve", SUPERLINK_COMMAND, ""), ("run", RUN_COMMAND, CONNECTION_CONFIG)):
        text = make_script(command, connection=connection).replace("{port}", str(port))
        (folder / f"{name}.sh").write_text(text)
        (folder / f"{name}.sh").chmod(0o755)
    with open_local_federation(tmp_path, port, port) as processes:
        processes.start_coordinator()
        output = "\n".join(processes.stream_run_output())
    records = [json.loads(line) for path in folder.glob("runs/*/*.jsonl") for line in path.read_text().splitlines()]
    assert [record["round"] for record in records] == [1, 2, 3], output
    assert not processes.list_process_ids()
