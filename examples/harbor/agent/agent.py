"""An agent for ``--env 'harbor:tasks:python3 /agent/agent.py'``: runs the policy's replies as commands.

It needs only Python, because a container has no network to install packages.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
import urllib.request

TURNS = 5
OUTPUT_BYTES = 2000


def ask(messages: list[dict[str, str]]) -> str:
    """Return the policy's reply."""
    request = urllib.request.Request(
        f"{os.environ['OPENAI_BASE_URL']}/chat/completions",
        json.dumps({"model": os.environ["OPENAI_MODEL"], "messages": messages}).encode(),
        {"authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"},
    )
    with urllib.request.urlopen(request) as response:
        return str(json.load(response)["choices"][0]["message"]["content"])


def execute(command: str) -> str:
    """Return the end of a command's output. No command may crash the agent, because a crash excludes the rollout."""
    limited = 'ulimit -f 1048576; exec timeout 30 bash -c "$0"'  # files of at most 1 GiB
    words = ["bash", "-c", limited, command.replace("\0", "")]
    with tempfile.TemporaryFile() as output:  # with a pipe, run() would wait for background processes
        run = subprocess.run(words, stdin=subprocess.DEVNULL, stdout=output, stderr=output, check=False)
        output.seek(max(0, output.seek(0, os.SEEK_END) - OUTPUT_BYTES))
        return output.read(OUTPUT_BYTES).decode(errors="replace") or f"exit code {run.returncode}"


def main() -> None:
    """Play one task: each reply is a command, until the policy replies ``done``."""
    messages = [{"role": "user", "content": os.environ["AGENTRL_STATEMENT"]}]
    for _ in range(TURNS):
        reply = ask(messages).strip()
        if reply == "done":
            return
        output = execute(reply)
        messages += [{"role": "assistant", "content": reply}, {"role": "user", "content": output}]


if __name__ == "__main__":
    main()
