"""Log a run to the real trackers (``tell FOLDER DONE STEPS``, resumed if DONE > 0), or print their data as JSON
(``read FOLDER``)."""

from __future__ import annotations

import importlib
import json
import struct
import sys
from collections.abc import Iterator
from pathlib import Path

from agentrl.telemetry.run_directory import RunDirectory
from agentrl.telemetry.settings import TelemetrySettings
from agentrl.telemetry.tracker_threads import Trackers

NAMES = ("wandb", "trackio", "tensorboard", "mlflow")
SETTINGS = {"seed": 7, "model": {"path": None, "lora": {"rank": 4}}}
PIXEL = bytes.fromhex(
    "89504e470d0a1a0a0000000d4948445200000001000000010802000000907753de0000000c4944415408d763f8cfc000000301010018dd8d"
    "b00000000049454e44ae426082"
)


def record(number: int) -> dict[str, object]:
    segments = [
        {"origin": "model", "text": f"print({number}) | <b>", "token_ids": [1, 2], "reward": 0.25},
        {"origin": "observation", "text": f"{number}\n", "token_ids": [3], "reward": 0.0},
        {"origin": "model", "text": "done", "token_ids": [4], "reward": 0.5},
    ]
    problem = {"id": f"p{number}", "statement": "What?"}
    return {
        "problem": problem,
        "group": 0,
        "sample": number,
        "ended": "answered",
        "verdict": None,
        "segments": segments,
    }


def tell(folder: Path, done: int, steps: int) -> None:
    path = folder / "runs" / "tracked"
    run = RunDirectory.resume(path) if done else RunDirectory.create(path, "seed: 7\n")
    telemetry = TelemetrySettings(
        trackers=NAMES, tracker_project="tests", tracker_tables_every=2, tracker_rows=2, tracker_deadline=250
    )
    trackers = Trackers(telemetry, run, notify=print, warn=lambda text: print("WARNING", text))
    trackers.start(SETTINGS, step=done, resumed=done > 0)
    for step in range(done + 1, steps + 1):
        run.write_trajectories(step, map(record, range(3)))
        trackers.log_metrics({"step": step, "policy/updates": 1, "reward/mean": step / 8})
    trackers.log_metrics({"step": steps, "eval/avg_at_k": 0.5})
    (run.plots / "reward.png").write_bytes(PIXEL)
    trackers.log_plots()
    trackers.close()


def read(folder: Path) -> None:
    trackers = folder / "runs" / "tracked" / "trackers"
    found = {name: reader(trackers / name) for name, reader in READERS.items()}
    print(json.dumps(found))


def read_wandb(folder: Path) -> dict[str, object]:

    rows, ids, config = [], set(), {}
    for file in sorted(folder.glob("wandb/offline-run-*/*.wandb")):
        for data in leveldb_log(file.read_bytes(), header=7):
            one = importlib.import_module("wandb.proto.wandb_internal_pb2").Record()  # generated, without types
            one.ParseFromString(data)
            if one.HasField("run"):
                ids.add((one.run.run_id, one.run.project, one.run.display_name))
                config |= {item.key: json.loads(item.value_json) for item in one.run.config.update}
            if one.HasField("history"):
                items = one.history.item
                rows.append({item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items})
    tables = [json.loads(file.read_text()) for file in sorted(folder.glob("wandb/*/files/media/table/*"))]
    return {"rows": rows, "ids": sorted(ids), "rank": config.get("model.lora.rank"), "tables": tables}


def leveldb_log(data: bytes, *, header: int) -> Iterator[bytes]:
    """The records of a log in LevelDB's format: blocks of 32 KiB, each record in fragments (1: whole, 4: its last)."""
    at, record = header, b""
    while at + 7 <= len(data):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        length, kind = struct.unpack_from("<HB", data, at + 4)
        record += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            yield record
            record = b""


def read_trackio(folder: Path) -> dict[str, object]:
    from trackio.sqlite_storage import SQLiteStorage

    names = SQLiteStorage.get_runs("tests")
    rows = [row for name in names for row in SQLiteStorage.get_logs("tests", name)]
    return {"ids": names, "rows": rows, "own": (folder / "run-id").read_text()}


def read_tensorboard(folder: Path) -> dict[str, object]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder.parents[1]))
    events.Reload()
    tags = events.Tags()
    scalars = {tag: [(item.step, item.value) for item in events.Scalars(tag)] for tag in tags["scalars"]}
    texts = {tag: events.Tensors(tag)[-1].tensor_proto.string_val[0].decode() for tag in tags["tensors"]}
    return {"scalars": scalars, "texts": texts, "images": tags["images"]}


def read_mlflow(folder: Path) -> dict[str, object]:
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=(folder / "store").as_uri())
    experiment = client.get_experiment_by_name("tests")
    runs = client.search_runs([experiment.experiment_id])
    own = runs[0].info.run_id
    histories = {name: client.get_metric_history(own, name) for name in runs[0].data.metrics}
    history = {name: [(item.step, item.value) for item in items] for name, items in histories.items()}
    tables = [json.loads(Path(client.download_artifacts(own, "trajectories/00000002.json")).read_text())]
    plots = [item.path for item in client.list_artifacts(own, "plots")]
    info = runs[0].info
    return {
        "runs": len(runs), "name": info.run_name, "status": info.status, "history": history, "tables": tables,
        "plots": plots, "rank": runs[0].data.params["model.lora.rank"],
    }  # fmt: skip


READERS = {"wandb": read_wandb, "trackio": read_trackio, "tensorboard": read_tensorboard, "mlflow": read_mlflow}

if __name__ == "__main__":
    if sys.argv[1] == "read":
        read(Path(sys.argv[2]))
    else:
        tell(Path(sys.argv[2]), *map(int, sys.argv[3:]))
