"""The app in flower_app/: simulated by Flower's own command, with the code that is deployed."""

import json
import shutil
import sys
import tomllib
from pathlib import Path

import pytest
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp

from uefl.flower import scripts
from uefl.flower.deploy import app
from uefl.flower.loopback import free_port, loopback

SMALL = "silos=1,1,1 train=24 test=12 size=14 width=2 hidden=8 passes=2 batch=12 epochs=1 words=4"
LINK = """exec flower-superlink --insecure --simulation --host 127.0.0.1 --port {port} \\
    --disable-runtime-dependency-installation
"""
CONNECTION = """mkdir -p "$FLWR_HOME"
cat > "$FLWR_HOME/config.toml" <<END
[superlink]
default = "federation"
[superlink.federation]
address = "127.0.0.1:{port}"
insecure = true
END
"""
RUN = """exec flwr run "$here/app" federation --stream --run-config "$here/federation.toml" \\
    --federation-config 'num-supernodes=3 client-resources-num-cpus=1 client-resources-num-gpus=0.0'
"""


def test_the_app_is_complete(monkeypatch):
    project = tomllib.loads((app() / "pyproject.toml").read_text())
    monkeypatch.syspath_prepend(str(app()))
    found = {}
    for part, place in project["tool"]["flwr"]["app"]["components"].items():
        module, _, name = place.partition(":")
        found[part] = getattr(__import__(module, fromlist=[name]), name)
        sys.modules.pop(module)
    assert isinstance(found["serverapp"], ServerApp)
    assert isinstance(found["clientapp"], ClientApp)
    assert project["project"]["license"] == {"file": "LICENSE"}
    assert (app() / "LICENSE").read_bytes() == Path(__file__).parents[2].joinpath("LICENSE").read_bytes()


@pytest.mark.real
def test_the_app_runs_in_flowers_simulation(tmp_path):
    place, port = tmp_path / "coordinator", free_port()
    shutil.copytree(app(), place / "app")
    settings = f"{SMALL} warm_up=1 rounds=2 extra_rounds=1 iterations=2 gamma=0 errors=0"
    (place / "federation.toml").write_text(f'silos = 3\nsettings = "{settings}"\nout = "{place}/runs"\n')
    for name, body, connects in (("superlink", LINK, ""), ("run", RUN, CONNECTION)):
        text = scripts.script(body.replace("{port}", str(port)), connects=connects.replace("{port}", str(port)))
        (place / f"{name}.sh").write_text(text)
        (place / f"{name}.sh").chmod(0o755)
    with loopback(tmp_path, port) as processes:
        processes.superlink()
        said = "\n".join(processes.lines())
    lines = [json.loads(line) for path in place.glob("runs/*/*.jsonl") for line in path.read_text().splitlines()]
    assert [record["round"] for record in lines] == [1, 2, 3], said
    assert not processes.alive()
