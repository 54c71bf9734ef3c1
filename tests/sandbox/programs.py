"""Parts of programs that several tests run."""

LEAVE = "def leave():\n    try:\n        os.setsid()\n    except PermissionError:\n        pass\n"
"""For programs that leave their process group where they may."""
