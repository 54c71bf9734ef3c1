"""Drive coding agents with a scripted policy through the gateway, and check that every sampled token is trained once.

    npm install --prefix DIRECTORY @anthropic-ai/claude-code @openai/codex @qwen-code/qwen-code opencode-ai \\
        ai @ai-sdk/openai @ai-sdk/anthropic zod
    python -m venv DIRECTORY/venv && DIRECTORY/venv/bin/pip install mini-swe-agent
    python benchmarks/coding_agents.py --packages DIRECTORY [--clients claude codex] [--show]

The script makes each agent write a file, edit it with a command, and answer. Each agent runs in an empty home directory
and reaches nothing but the gateway. For every token with loss, the script compares all tokens before it with the tokens
that the engine received for this reply. `--show` prints the fields of every request.

Target: each agent executes both calls, and each sampled token is trained exactly once; else the exit code is 1.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from scripted import ScriptedEngine, written

from agentrl.models.loading import train_tokenizer
from agentrl.models.tokenizer import TextCodec
from agentrl.rollout.engines.base import Completion, Sampling
from agentrl.rollout.gateway import server
from agentrl.rollout.gateway.render import ChatRenderer
from agentrl.rollout.gateway.rollout import AgentRollout
from agentrl.rollout.gateway.settings import AgentGatewaySettings
from agentrl.rollout.gateway.wire import Access
from agentrl.rollout.policy import TokenPolicy
from agentrl.rollout.settings import RolloutSettings
from agentrl.trajectory import Trajectory
from agentrl_envs.types import Ended, Problem

TEMPLATE = (
    "{% if tools %}<tools>{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}</tools>{% endif %}"
    "{% for message in messages %}<|{{ message.role }}|>"
    "{% if message.role == 'tool' %}<tool_response>{% endif %}{{ message.content }}"
    "{% for call in message.tool_calls or [] %}{{ call | tojson }}{% endfor %}"
    "{{ '\n' }}{% endfor %}<|assistant|>"
)
TASK = "Write note.txt, add a line to it with a command, and say what you did."
ADD_LINE = "echo two >> note.txt"
LIMIT = 180.0
SDK = """
import { generateText, stepCountIs, streamText, tool } from "ai";
import { createOpenAI } from "@ai-sdk/openai";
import { createAnthropic } from "@ai-sdk/anthropic";
import { execSync } from "node:child_process";
import { z } from "zod";

const env = process.env;
const openai = createOpenAI({ baseURL: env.OPENAI_BASE_URL, apiKey: env.OPENAI_API_KEY });
const anthropic = createAnthropic({ baseURL: env.ANTHROPIC_BASE_URL + "/v1", apiKey: env.ANTHROPIC_API_KEY });
const model = { chat: openai.chat, responses: openai.responses, messages: anthropic }[env.API]("policy");
const shell = tool({
  description: "Run a command.",
  inputSchema: z.object({ command: z.string() }),
  execute: async ({ command }) => execSync(command, { encoding: "utf-8" }),
});
const asked = { model, tools: { shell }, stopWhen: stepCountIs(9), prompt: env.TASK, maxOutputTokens: 999 };
const { text } = await generateText(asked);
const streamed = streamText(asked);
console.log(text, await streamed.text);
"""


def call(name: str, **arguments: object) -> str:
    """Return a reply that calls a tool."""
    return f'I go on.<tool_call>{{"name": "{name}", "arguments": {json.dumps(arguments)}}}</tool_call>'


@dataclass(frozen=True, kw_only=True)
class Client:
    """A command, the calls that the policy makes in a directory, and the client's environment variables and files."""

    command: tuple[str, ...]
    calls: Callable[[Path], list[str]]
    variables: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    delegated: bool = False  # a sub-agent makes the calls


def shell_calls(name: str, key: str = "command", **more: object) -> Callable[[Path], list[str]]:
    """Return calls of a tool that runs commands."""
    return lambda folder: [call(name, **{key: one}, **more) for one in ("echo one > note.txt", ADD_LINE)]


def clients(access: Access, packages: Path) -> dict[str, Client]:
    """Return the clients, configured for ``access``. Files are written below the home directory."""
    bin_, model = packages / "node_modules" / ".bin", access.model
    claude = Client(
        command=(str(bin_ / "claude"), "-p", TASK, "--allowedTools", "Write,Edit,Bash"),
        calls=lambda folder: [
            call("Write", file_path=str(folder / "note.txt"), content="one\n"),
            call("Bash", command=ADD_LINE, description="Add a line"),
        ],
        variables={
            "ANTHROPIC_DEFAULT_HAIKU_MODEL": f"{model}:frozen",
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        },
    )
    sdk = Client(
        command=("node", "agent.mjs"),
        calls=shell_calls("shell"),
        files={"agent.mjs": SDK},
    )
    return {
        "mini": Client(
            command=(
                str(packages / "venv/bin/mini"),
                *("-y", "--exit-immediately", "-l", "0"),
                "-m",
                f"openai/{model}",
                "-t",
                TASK,
            ),
            calls=lambda folder: [
                *shell_calls("bash")(folder),
                call("bash", command="echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"),
            ],
            variables={
                "MSWEA_COST_TRACKING": "ignore_errors",
                "MSWEA_CONFIGURED": "true",
                "LITELLM_LOCAL_MODEL_COST_MAP": "True",
            },
        ),
        "claude": claude,
        "claude_subagent": replace(claude, delegated=True),
        "codex": Client(
            command=(
                *(str(bin_ / "codex"), "exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"),
                TASK,
            ),
            calls=shell_calls("exec_command", "cmd"),
            files={
                ".codex/config.toml": f'model = "{model}"\nmodel_provider = "gateway"\nweb_search = "disabled"\n'
                f'[model_providers.gateway]\nname = "gateway"\nbase_url = "{access.base_url}"\n'
                'env_key = "OPENAI_API_KEY"\nwire_api = "responses"\n'
            },
        ),
        "qwen": Client(
            command=(str(bin_ / "qwen"), "--auth-type", "openai", "--yolo", "-p", TASK),
            calls=lambda folder: [
                call("write_file", file_path=str(folder / "note.txt"), content="one\n"),
                call("run_shell_command", command=ADD_LINE, is_background=False),
            ],
        ),
        "opencode": Client(
            command=(str(bin_ / "opencode"), "run", "-m", f"gateway/{model}", TASK),
            calls=lambda folder: [
                call("write", filePath=str(folder / "note.txt"), content="one\n"),
                call("bash", command=ADD_LINE, description="Add a line"),
            ],
            files={
                "opencode.json": json.dumps(
                    {
                        "provider": {
                            "gateway": {
                                "npm": "@ai-sdk/openai-compatible",
                                "options": {"baseURL": access.base_url, "apiKey": access.api_key},
                                "models": {model: {}, f"{model}:frozen": {}},
                            }
                        },
                        "small_model": f"gateway/{model}:frozen",
                        "permission": "allow",
                        "autoupdate": False,
                        "share": "disabled",
                    }
                )
            },
        ),
        **{
            f"ai_{api}": replace(sdk, variables={"API": api, "TASK": TASK}) for api in ("chat", "responses", "messages")
        },
    }


class CallingEngine(ScriptedEngine[None]):
    """Makes the calls in order, by the number of results in the prompt. Answers requests without tools with a title.

    With ``delegated``, the sub-agent makes the calls. Its prompt does not contain the task.
    """

    def __init__(self, codec: TextCodec) -> None:
        super().__init__()
        self._codec = codec
        self.calls: list[str] = []
        self.delegated: list[str] | None = None
        self.sampled: list[tuple[tuple[int, ...], tuple[int, ...]]] = []

    async def generate(
        self, token_ids: tuple[int, ...], sampling: Sampling, *, trajectory_id: str, request_id: str, seed: int
    ) -> Completion:
        await asyncio.sleep(0)
        prompt = self._codec.decode(token_ids)
        made = prompt.count("<tool_response>")
        calls = self.calls if self.delegated is None or TASK in prompt else self.delegated
        text = "A note" if "<tools>" not in prompt else calls[made] if made < len(calls) else "I wrote it."
        completion = written(self._codec, text, ended=True)
        self.sampled.append((tuple(token_ids), completion.token_ids))
        return completion


def trained(rows: tuple[Trajectory, ...]) -> Counter[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Return the tokens with loss, each reply with all tokens before it."""
    found: Counter[tuple[tuple[int, ...], tuple[int, ...]]] = Counter()
    for row in rows:
        context = row.prompt_ids
        for segment in row.segments:
            if segment.origin == "model":
                found[context, segment.token_ids] += 1
            context += segment.token_ids
    return found


async def drive(name: str, packages: Path, *, show: bool) -> bool:
    """Play one client. Returns True if it executed its calls and every token was trained once."""
    tokenizer = train_tokenizer([TEMPLATE, TASK, "You are an agent. Be careful. " * 4], vocabulary_size=512)
    codec = TextCodec(tokenizer)
    engine = CallingEngine(codec)
    settings = RolloutSettings(max_turn_tokens=4096, max_prompt_tokens=10**6, max_response_tokens=10**6)
    limits = AgentGatewaySettings(max_request_bytes=2**24)
    policy = TokenPolicy(
        problem=Problem(id="note", statement=TASK, answer="", source="note"),
        settings=settings,
        step=0,
        group=0,
        sample_index=0,
        name="note",
        seed=0,
        start_time=0.0,
        engine=engine,
        codec=codec,
    )
    rollout = AgentRollout(
        policy=policy, settings=settings, gateway=limits, renderer=ChatRenderer(tokenizer, codec, template=TEMPLATE)
    )
    gateway = server.AgentGateway(limits)
    await gateway.open()
    access = gateway.admit(rollout)
    client = clients(access, packages)[name]
    with tempfile.TemporaryDirectory() as home:
        folder = Path(home).resolve()
        engine.calls = client.calls(folder)
        if client.delegated:
            engine.delegated = engine.calls
            engine.calls = [
                call("Agent", description="note", prompt="Write the note.", subagent_type="general-purpose")
            ]
        for path, text in client.files.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_text(text)
        (folder / "node_modules").symlink_to((packages / "node_modules").resolve())
        variables = {
            **{one: os.environ[one] for one in ("PATH", "LANG") if one in os.environ},
            "HOME": str(folder),
            "OPENAI_BASE_URL": access.base_url,
            "OPENAI_API_KEY": access.api_key,
            "OPENAI_MODEL": access.model,
            "ANTHROPIC_BASE_URL": access.base_url.removesuffix("/v1"),
            "ANTHROPIC_API_KEY": access.api_key,
            "ANTHROPIC_MODEL": access.model,
            **client.variables,
        }
        pipe, none = asyncio.subprocess.PIPE, asyncio.subprocess.DEVNULL
        process = await asyncio.create_subprocess_exec(
            *client.command, cwd=folder, env=variables, stdin=none, stdout=pipe, stderr=asyncio.subprocess.STDOUT
        )
        try:
            said, _ = await asyncio.wait_for(process.communicate(), LIMIT)
        except TimeoutError:
            process.kill()
            said = (await process.communicate())[0]
        note = (folder / "note.txt").read_text() if (folder / "note.txt").exists() else ""
    rows = rollout.trajectories(Ended.ANSWERED)
    await rollout.finish()
    await gateway.close()
    expected = Counter(
        (one.prompt.context, one.completion.token_ids) for one in rollout.tree.generations if one.trainable
    )
    once = trained(rows) == expected and expected <= Counter(engine.sampled)
    worked = note == "one\ntwo\n" and process.returncode == 0
    replies = rollout.tree.generations
    print(
        f"{name}: {'works' if worked else f'fails with {process.returncode}'}; {len(replies)} replies, "
        f"{sum(not one.trainable for one in replies)} not to train, sequences of "
        f"{[row.turns for row in rows]} turns, {dict(rollout.counts)}; every token "
        f"{'trained once' if once else 'NOT TRAINED ONCE'}",
        flush=True,
    )
    if show or not (worked and once):
        print(said.decode(errors="replace")[-3000:], repr(note))
    return worked and once


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = list(clients(Access(name="", base_url="", api_key="", model=""), Path()))
    parser.add_argument("--packages", type=Path, required=True)
    parser.add_argument("--clients", nargs="+", choices=names, default=names)
    parser.add_argument("--show", action="store_true")
    arguments = parser.parse_args()
    packages = arguments.packages.resolve()
    worked = [asyncio.run(drive(name, packages, show=arguments.show)) for name in arguments.clients]
    return int(not all(worked))


if __name__ == "__main__":
    sys.exit(main())
