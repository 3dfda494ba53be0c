"""Templates of the files that `uefl deploy init` writes: shell scripts, systemd units, the run configuration."""

from __future__ import annotations

from uefl.flower.environment import FLOWER_ENVIRONMENT

SCRIPT_HEADER = """#!/usr/bin/env bash
# Written by `uefl deploy init`. Needs uefl with its extra `flower`, and Flower's programs in the PATH.
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
cd "$here"
umask 077  # files of this folder hold data and keys
export FLWR_HOME="$here/flwr"
# No telemetry, no update check, no installation at run time.
"""
EXPORT_LINES = "".join(f"export {name}={value}\n" for name, value in FLOWER_ENVIRONMENT.items())

CONNECTION_CONFIG = """mkdir -p "$FLWR_HOME"
cat > "$FLWR_HOME/config.toml" <<END
[superlink]
default = "federation"
[superlink.federation]
address = "127.0.0.1:{superlink_port}"
root-certificates = "$here/ca.crt"
END
"""

SERVE_COMMAND = """exec uefl deploy serve "$here" --host {host} --port {port} --superlink-port {superlink_port}
"""

REGISTER_COMMAND = """uefl deploy check federation.toml --certificates-only
for key in keys/*.pub; do
    flwr supernode register "$key" federation --name "$(basename "$key" .pub)" ||
        echo "$key: not registered; it may be registered already"
done
flwr supernode list federation
"""

RUN_COMMAND = """uefl deploy check federation.toml  # a mistake is one line and exit code 2, before anything starts
started="$(date +%s)"
trap 'kill "$!"' TERM
flwr run "$here/app" federation --stream --run-config "$here/federation.toml" &
wait "$!"
exec uefl deploy result federation.toml --since "$started"  # the exit code of the run; `flwr run` has none
"""

RUN_CONFIG = """# Run configuration; overrides app/pyproject.toml. Starting the run again with this file resumes it.
method = "uefl"
data = "folder"              # every node reads its own folder: <class>/<image>, or {{train,test}}/<class>/<image>
                             # or "table": every node reads its own CSV file; settings = "label=ill levels.sex=f,m …"
settings = ""                # field=value, separated by spaces: "rounds=20 num_codewords=64 data.image_size=32"
num_silos = {num_silos}                # number of silos to wait for
federation_name = "{federation_name}"  # a different name starts a different run
out = "runs"                 # folder of run folders, relative to the coordinator's folder
"""

NODE_COMMAND = """exec uefl deploy node "$here" --coordinator {address}:{port} --silo {silo} \\
    --data "${{UEFL_SILO_DATA:-$here/data}}"
"""

SYSTEMD_UNIT = """# Written by `uefl deploy init`. Put the folder at {home}, the programs at /opt/uefl/venv, then
#   cp {unit} /etc/systemd/system/ && systemctl enable --now {unit}
[Unit]
Description={description}
After=network-online.target
Wants=network-online.target

[Service]
User=uefl
WorkingDirectory={home}
Environment=PATH=/opt/uefl/venv/bin:/usr/local/bin:/usr/bin:/bin
ExecStart={home}/{script}
Restart=always
RestartSec=20
KillMode=control-group
NoNewPrivileges=true
PrivateTmp=true
ProtectSystem=full

[Install]
WantedBy=multi-user.target
"""


def make_script(command: str, *, connection: str = "") -> str:
    """Return a complete script around one command."""
    return SCRIPT_HEADER + EXPORT_LINES + connection + command
