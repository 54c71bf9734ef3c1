"""Copies a scratch directory for a fork."""

from __future__ import annotations

import contextlib
import os
import shutil


def copy_scratch(source: str, target: str) -> int:
    """Copy directories, regular files and links, not pipes, sockets and devices. Returns an errno or 0."""
    try:
        _copy_directory(source, target)
    except OSError as error:
        return error.errno or 1
    return 0


def _copy_directory(source: str, target: str) -> None:
    os.mkdir(target, 0o700)
    with os.scandir(source) as entries:
        for entry in entries:
            copy = f"{target}/{entry.name}"
            if entry.is_symlink():
                os.symlink(os.readlink(entry.path), copy)
            elif entry.is_dir(follow_symlinks=False):
                _copy_directory(entry.path, copy)
            elif entry.is_file(follow_symlinks=False):
                shutil.copyfile(entry.path, copy, follow_symlinks=False)
                _copy_status(entry.path, copy)
    _copy_status(source, target)


def _copy_status(source: str, target: str) -> None:
    """Copy permissions and times, where programs may change them."""
    with contextlib.suppress(PermissionError):
        shutil.copystat(source, target, follow_symlinks=False)
