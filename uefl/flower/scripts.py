"""What `uefl deploy init` writes for people to start: shell scripts, systemd units, the run's configuration."""

from __future__ import annotations

from uefl.flower.quiet import QUIET

HEAD = """#!/usr/bin/env bash
# Written by `uefl deploy init`. Needs `pip install 'uefl[flower]'` and its programs in the PATH.
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
cd "$here"
export FLWR_HOME="$here/flwr"
# Nothing calls home, and nothing is installed at run time.
"""
QUIETLY = "".join(f"export {name}={value}\n" for name, value in QUIET.items())

CONNECTION = """mkdir -p "$FLWR_HOME"
cat > "$FLWR_HOME/config.toml" <<END
[superlink]
default = "federation"
[superlink.federation]
address = "{address}:{port}"
root-certificates = "$here/ca.crt"
END
"""

SUPERLINK = """exec python3 -m uefl.flower.superlink --host {bind} --port {port} \\
    --ssl-ca-certfile ca.crt --ssl-certfile server.crt --ssl-keyfile server.key \\
    --enable-supernode-auth --database "$here/superlink.db" --disable-runtime-dependency-installation
"""

REGISTER = """for key in keys/*.pub; do
    flwr supernode register "$key" federation --name "$(basename "$key" .pub)" || echo "$key: not registered (again?)"
done
flwr supernode list federation
"""

RUN = """uefl deploy check federation.toml  # a mistake is one line and exit code 2, before anything starts
exec flwr run "$here/app" federation --stream --run-config "$here/federation.toml"
"""

FEDERATION = """# What to run: overrides app/pyproject.toml. The same file again goes on with the same run.
method = "uefl"
data = "folder"              # every node reads its own folder: <class>/<image>, or {{train,test}}/<class>/<image>
settings = ""                # field=value, separated by spaces: "rounds=20 words=64 data.size=32"
silos = {silos}                    # to wait for
federation = "{name}"    # another name is another run
out = "runs"                 # below the coordinator's folder
"""

SUPERNODE = """exec flower-supernode --superlink {address}:{port} --root-certificates ca.crt \\
    --auth-supernode-private-key key --port "${{UEFL_PORT:-9094}}" \\
    --node-config "silo=\\"{silo}\\" data=\\"${{UEFL_SILO_DATA:-$here/data}}\\" state=\\"$here/state\\""
"""

UNIT = """# Written by `uefl deploy init`. Put the folder at {home}, the programs at /opt/uefl/venv, then
#   cp {unit} /etc/systemd/system/ && systemctl enable --now {unit}
[Unit]
Description={about}
After=network-online.target
Wants=network-online.target

[Service]
User=uefl
WorkingDirectory={home}
Environment=PATH=/opt/uefl/venv/bin:/usr/local/bin:/usr/bin:/bin
ExecStart={home}/{script}
# A node that was killed is let in again only after a minute: try until it is.
Restart=always
RestartSec=20
KillMode=control-group
NoNewPrivileges=true
PrivateTmp=true
ProtectSystem=full

[Install]
WantedBy=multi-user.target
"""


def script(body: str, *, connects: str = "") -> str:
    """A whole script around one command."""
    return HEAD + QUIETLY + connects + body
