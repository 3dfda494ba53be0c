"""What a message costs beside its training: three nodes on this machine, over TLS, by `python results/message_cost.py`.

The app of the nodes is replaced by one that says when its process began, when it had imported what it needs and when it
worked. All clocks are this machine's, so the rest follows from the times at which messages were made and answered.
"""

import json
import os
import tempfile
from pathlib import Path
from statistics import median

from rich.console import Console

from uefl.flower.demo import SILOS, configured, digits, started
from uefl.flower.deploy import init
from uefl.flower.loopback import free_port, loopback

ROUNDS = 8
SETTINGS = (
    f"rounds={ROUNDS} iterations=1 width=8 hidden=64 local.rate=2e-3 local.batch=32 local.epochs=2 passes=10 "
    "normalise=none"
)
PARTS = {
    "wait": "the node's poll (3 s), SuperExec's poll (1 s), requests",
    "flower": "a process starts, imports flwr, fetches the message and the app",
    "torch": "it imports torch and uefl",
    "read": "the silo's images from the cache, the network",
    "work": "measures, trains, measures",
    "back": "the node's poll (0.5 s), ours (0.5 s), requests",
}
TIMED = """
import json, os, time
from pathlib import Path
age = float(Path("/proc/uptime").read_text().split()[0])
age -= int(Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()[19]) / os.sysconf("SC_CLK_TCK")
loaded = [time.time()]
born = loaded[0] - age
from flwr.clientapp import ClientApp
from uefl.flower.client import client_app
from uefl.flower.wire import body
loaded.append(time.time())
usual = client_app()

class Timed(ClientApp):
    def __call__(self, message, context):
        begin = time.time()
        reply = usual(message, context)
        if message.metadata.message_type == "train":
            times = [message.metadata.created_at, born, *loaded, begin, time.time()]
            about = {"round": body(message)["round"], "silo": body(message)["silo"], "times": times}
            with open(os.environ["UEFL_TIMES"], "a") as file:
                file.write(json.dumps(about | {"work": body(reply)["seconds"]}) + "\\n")
        return reply

app = Timed()
"""


def measured(folder: Path) -> list[dict[str, float]]:
    """For every round but the last, which has a second message, the parts of its slowest silo's time."""
    port, times = free_port(), folder / "times.jsonl"
    os.environ["UEFL_TIMES"] = str(times)
    init(folder / "f", list(SILOS), address="127.0.0.1", port=port)
    for i, (silo, shift) in enumerate(SILOS.items()):
        digits(folder / "f" / "silos" / silo / "data", shift, i)
    configured(folder / "f", SETTINGS, method="fedavg")
    (folder / "f" / "coordinator" / "app" / "uefl_app" / "client_app.py").write_text(TIMED)
    with loopback(folder / "f", port) as processes:
        started(processes, list(SILOS), Console(quiet=True))
        said = "\n".join(processes.lines())
    found = list((folder / "f").glob("coordinator/runs/*/records.jsonl"))
    assert found, said
    rounds = {r["round"]: r["seconds"] for r in map(json.loads, found[0].read_text().splitlines())}
    messages = [json.loads(line) for line in times.read_text().splitlines()]
    return [
        split(max((m for m in messages if m["round"] == t), key=lambda m: m["times"][-1]), rounds[t])
        for t in range(1, ROUNDS)
    ]


def split(message: dict, seconds: float) -> dict[str, float]:
    made, born, loading, loaded, begin, end = message["times"]
    parts = {"wait": born - made, "flower": loading - born + begin - loaded, "torch": loaded - loading}
    parts |= {"read": end - begin - message["work"], "work": message["work"], "back": seconds - (end - made)}
    return parts | {"round": seconds, "cost": seconds - message["work"]}


def main() -> None:
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        rounds = measured(Path(folder))
    print(f"three nodes, {os.cpu_count()} cores; load before {load:.1f}, after {os.getloadavg()[0]:.1f}")
    print("seconds of a round's slowest silo, median and range of", len(rounds), "rounds")
    for name, about in {**PARTS, "round": "all of it", "cost": "all but work"}.items():
        values = [r[name] for r in rounds]
        print(f"{name:>7} {median(values):5.1f}  {min(values):4.1f} to {max(values):4.1f}  {about}")


if __name__ == "__main__":
    main()
