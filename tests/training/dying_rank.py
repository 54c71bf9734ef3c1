"""A plug-in: rank 1 is killed as soon as the run has a checkpoint, and at every start after that."""

import os
import signal
import threading
import time
from pathlib import Path


def die() -> None:
    while not [*Path("runs/dying/checkpoints").glob("step-*")]:
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)


if os.environ.get("RANK") == "1":
    threading.Thread(target=die, daemon=True).start()
