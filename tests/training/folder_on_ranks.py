"""The check of a run's folder on as many ranks as the environment says: ``FOLDER``. Run by test_launchers.py."""

from __future__ import annotations

import sys
from pathlib import Path

import torch.distributed

from agentrl.errors import SettingsError
from agentrl.training.engine.collectives import check_shared_folder


def main() -> None:
    torch.distributed.init_process_group("gloo")
    folder = Path(sys.argv[1])
    try:
        check_shared_folder(folder, rank=torch.distributed.get_rank(), visible_seconds=0.5)
    except SettingsError as error:
        (folder / "refused").write_text(str(error))


if __name__ == "__main__":
    main()
