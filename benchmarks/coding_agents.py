"""Drive coding agents with a scripted policy in the container of a Harbor task, and check the tokens to train on.

    bash examples/harbor/agent/install.sh claude codex mini qwen opencode
    npm install --prefix examples/harbor/agent ai @ai-sdk/openai @ai-sdk/anthropic zod
    python benchmarks/coding_agents.py [--image IMAGE] [--clients claude codex]

The policy makes each agent write a file, edit it, run a command, and answer. In clients named `*_subagent`, a sub-agent
does this. In clients named `*_compact`, the agent then compacts its history. The agents start with the scripts of
`examples/harbor/agent`, in a container that reaches nothing but the gateway. For every token with loss, the script
compares all tokens before it with the tokens that the engine received for this reply. It also compares the token's
log-probability under a tiny model, given what the engine received, with a forward pass over the trained sequence.

Target: the task's verifier rewards each agent with 1, each sampled token enters the loss exactly once, and the
log-probabilities differ by less than 1e-5. (A wrong token in the context makes a difference of 1e-4 or more.)
Otherwise, the exit code is 1.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from scripted import ScriptedEngine, written

from agentrl.models.loading import build_tiny_model, train_tokenizer
from agentrl.models.settings import TinyModelSettings
from agentrl.models.tokenizer import TextCodec
from agentrl.rollout.engines.base import Completion, Sampling
from agentrl.rollout.gateway import server
from agentrl.rollout.gateway.environment import program_for_environment
from agentrl.rollout.gateway.programs import AgentFailureError
from agentrl.rollout.gateway.render import ChatRenderer
from agentrl.rollout.gateway.rollout import AgentRollout
from agentrl.rollout.gateway.settings import AgentGatewaySettings
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
ROOT = Path(__file__).parents[1]
AGENTS = ROOT / "examples" / "harbor" / "agent"
TASK = "Write note.txt, add a line to it with a command, and say what you did."
NOTE = "/app/note.txt"
ADD_LINE = "echo two >> note.txt"
VERIFIER = f"""#!/bin/bash
[ "$(cat {NOTE})" = $'one\\ntwo' ] && echo 1 > /logs/verifier/reward.txt || echo 0 > /logs/verifier/reward.txt
"""
SDK = """
import { generateText, stepCountIs, streamText, tool } from "ai";
import { createOpenAI } from "@ai-sdk/openai";
import { createAnthropic } from "@ai-sdk/anthropic";
import { execSync } from "node:child_process";
import { writeFileSync } from "node:fs";
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
const edit = tool({
  description: "Write a file.",
  inputSchema: z.object({ path: z.string(), text: z.string() }),
  execute: async ({ path, text }) => writeFileSync(path, text) ?? "written",
});
const agent = tool({
  description: "Delegate a task.",
  inputSchema: z.object({ task: z.string() }),
  execute: async ({ task }) => (await generateText({ ...limits, tools: { shell, edit }, prompt: task })).text,
});
const limits = { model, stopWhen: stepCountIs(9), maxOutputTokens: 999 };
const compact = ({ messages }) => messages.length < 5 ? {} : {
  messages: [messages[0], { role: "assistant", content: "I wrote it." }, { role: "user", content: "Go on." }],
};
const asked = { ...limits, tools: { shell, edit, agent }, prompt: env.AGENTRL_STATEMENT };
if (env.COMPACT) asked.prepareStep = compact;
const { text } = await generateText(asked);
const streamed = streamText(asked);
console.log(text, await streamed.text);
"""


DONE = "I wrote it."
GO_ON = "AGENTRL_STATEMENT='Go on.' bash /agent"
# The context limit is smaller than the conversation with LONG_OUTPUT, and larger than its summary.
CONTEXT = {"provider": {"gateway": {"models": {"policy": {"limit": {"context": 14_000, "output": 500}}}}}}
LONG_OUTPUT = "seq 3000"
PATCH = "apply_patch <<'END'\n*** Begin Patch\n{}\n*** End Patch\nEND"


def call(name: str, **arguments: object) -> str:
    """Return a reply that calls a tool."""
    return f'I will continue.<tool_call>{{"name": "{name}", "arguments": {json.dumps(arguments)}}}</tool_call>'


def session(*commands: str) -> str:
    """Return a command that runs commands with a common home directory, so that they share the client's session."""
    return "mktemp() { echo /tmp/home; }; export -f mktemp; mkdir -p /tmp/home; " + " && ".join(commands)


@dataclass(frozen=True, kw_only=True)
class Client:
    """A command in the container, and the calls that the policy makes: write a file, edit it, run a command.

    With ``delegation``, the main agent makes these calls, and its sub-agent makes the ``calls``.
    """

    calls: list[str]
    command: str = ""  # default: the script with the client's name
    delegation: tuple[str, ...] = ()


CLAUDE = Client(
    command="bash /agent/claude.sh",
    calls=[
        call("Write", file_path=NOTE, content="zero\n"),
        call("Edit", file_path=NOTE, old_string="zero", new_string="one"),
        call("Bash", command=ADD_LINE, description="Add a line"),
    ],
)
CODEX = Client(
    command="bash /agent/codex.sh",
    calls=[
        call("exec_command", cmd=PATCH.format("*** Add File: note.txt\n+zero")),
        call("exec_command", cmd=PATCH.format("*** Update File: note.txt\n@@\n-zero\n+one")),
        call("exec_command", cmd=ADD_LINE),
    ],
)
QWEN = Client(
    command="bash /agent/qwen.sh",
    calls=[
        call("write_file", file_path=NOTE, content="zero\n"),
        call("edit", file_path=NOTE, old_string="zero", new_string="one"),
        call("run_shell_command", command=ADD_LINE, is_background=False),
    ],
)
OPENCODE = Client(
    command="bash /agent/opencode.sh",
    calls=[
        call("write", filePath=NOTE, content="zero\n"),
        call("edit", filePath=NOTE, oldString="zero", newString="one"),
        call("bash", command=ADD_LINE, description="Add a line"),
    ],
)
AI = Client(
    command="mkdir /tmp/ai && ln -s /agent/node_modules /tmp/ai && cat > /tmp/ai/agent.mjs <<'END' && "
    f"/agent/bin/node /tmp/ai/agent.mjs\n{SDK}\nEND",
    calls=[call("edit", path=NOTE, text="one\n"), call("shell", command=ADD_LINE)],
)
TO_AGENT = {"description": "note", "prompt": "Write it."}
CLAUDE_TOOLS = "claude.sh --tools Write,Edit,Bash"
CLIENTS = {
    "mini": Client(
        calls=[
            call("bash", command=command)
            for command in (
                "echo zero > note.txt",
                "sed -i s/zero/one/ note.txt",
                ADD_LINE,
                "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT",
            )
        ]
    ),
    "claude": CLAUDE,
    "claude_subagent": replace(CLAUDE, delegation=(call("Agent", subagent_type="general-purpose", **TO_AGENT),)),
    "claude_compact": replace(
        CLAUDE,
        command=session(
            f"bash /agent/{CLAUDE_TOOLS}",
            f"AGENTRL_STATEMENT=/compact bash /agent/{CLAUDE_TOOLS} --continue",
            f"{GO_ON}/{CLAUDE_TOOLS} --continue",
        ),
    ),
    "codex": CODEX,
    "codex_subagent": replace(
        CODEX,
        delegation=(
            call("multi_agent_v1__spawn_agent", message="Write it."),
            call("multi_agent_v1__wait_agent", targets=["AGENT_ID"], timeout_ms=600_000),
        ),
    ),
    "codex_compact": replace(
        CODEX,
        command=session(
            "bash /agent/codex.sh", f"{GO_ON}/codex.sh -c model_auto_compact_token_limit=1000 resume --last"
        ),
    ),
    "qwen": QWEN,
    "qwen_subagent": replace(QWEN, delegation=(call("agent", subagent_type="general-purpose", **TO_AGENT),)),
    "qwen_compact": replace(
        QWEN,
        command=session(
            "bash /agent/qwen.sh",
            "AGENTRL_STATEMENT=/compress bash /agent/qwen.sh --continue",
            f"{GO_ON}/qwen.sh --continue",
        ),
    ),
    "opencode": OPENCODE,
    "opencode_subagent": replace(OPENCODE, delegation=(call("task", subagent_type="general", **TO_AGENT),)),
    "opencode_compact": replace(
        OPENCODE,
        calls=[*OPENCODE.calls, call("bash", command=LONG_OUTPUT, description="Count")],
        command=session(
            "bash /agent/opencode.sh",
            f"echo '{json.dumps(CONTEXT)}' > opencode.json",
            f"{GO_ON}/opencode.sh --continue",
        ),
    ),
    **{
        f"ai_{api}": replace(AI, command=f"export API={api}; {AI.command}") for api in ("chat", "responses", "messages")
    },
    "ai_subagent": replace(AI, command=f"export API=chat; {AI.command}", delegation=(call("agent", task="Write it."),)),
    "ai_compact": replace(AI, command=f"export API=chat COMPACT=1; {AI.command}"),
}


class CallingEngine(ScriptedEngine[None]):
    """Makes the calls in order. The number of results in the prompt determines the next call.

    Requests without tools ask for a title or a summary. The prompt of a sub-agent does not contain the task.
    """

    def __init__(self, codec: TextCodec, model: torch.nn.Module, client: Client) -> None:
        super().__init__()
        self._codec = codec
        self._model = model
        self._calls = client.calls
        self._delegation = client.delegation
        self.sampled: list[tuple[tuple[int, ...], tuple[int, ...]]] = []

    async def generate(
        self, token_ids: tuple[int, ...], sampling: Sampling, *, trajectory_id: str, request_id: str, seed: int
    ) -> Completion:
        prompt = self._codec.decode(token_ids)
        made = prompt.count("<tool_response>")
        calls = self._delegation if self._delegation and TASK in prompt else self._calls
        done = made >= len(calls) or DONE in prompt  # in a summary
        text = DONE if done or "<tools>" not in prompt else calls[made]
        text = text.replace("AGENT_ID", next(iter(re.findall(r"agent_id\W+([0-9a-f-]{36})", prompt)), ""))
        completion = written(self._codec, text, ended=True)
        self.sampled.append((tuple(token_ids), completion.token_ids))
        scores = await asyncio.to_thread(score, self._model, [*token_ids, *completion.token_ids])
        return replace(completion, log_probs=tuple(scores[-len(completion.token_ids) :]))


def score(model: torch.nn.Module, token_ids: Sequence[int]) -> list[float]:
    """Return the log-probabilities of ``token_ids[1:]``, from one forward pass."""
    ids = torch.tensor([token_ids])
    with torch.inference_mode():
        logits = model(input_ids=ids).logits[0, :-1]
    scores: list[float] = logits.log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0].tolist()
    return scores


def trained(rows: tuple[Trajectory, ...]) -> Counter[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Count the replies that enter the loss, each with all tokens before it."""
    found: Counter[tuple[tuple[int, ...], tuple[int, ...]]] = Counter()
    for row in rows:
        context = row.prompt_ids
        for segment in row.segments:
            if segment.origin == "model":
                found[context, segment.token_ids] += 1
            context += segment.token_ids
    return found


def largest_difference(model: torch.nn.Module, rows: tuple[Trajectory, ...]) -> float:
    """Score each sequence in a forward pass, and return the largest difference from the stored log-probabilities."""
    worst = 0.0
    for row in rows:
        scores = score(model, [*row.prompt_ids, *row.response_ids])[len(row.prompt_ids) - 1 :]
        stored = [value for part in row.segments for value in part.log_probs or [None] * len(part.token_ids)]
        assert [value is not None for value in stored] == list(row.response_mask)
        worst = max(worst, *(abs(new - old) for new, old in zip(scores, stored, strict=True) if old is not None))
    return worst


def write_task(directory: Path, image: str) -> None:
    """Write the task in Harbor's format."""
    files = {
        "task.toml": "[agent]\ntimeout_sec = 900\n",
        "instruction.md": TASK,
        "environment/Dockerfile": f"FROM {image}\nENTRYPOINT []\nWORKDIR /app\n",
        "tests/test.sh": VERIFIER,
    }
    for name, text in files.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text(text, encoding="utf-8")


async def drive(name: str, image: str, directory: Path) -> bool:
    """Run one client. Returns True if it executed its calls and every token enters the loss once."""
    pages = [page.read_text(encoding="utf-8") for page in sorted(ROOT.glob("docs/*/*.md"))]
    tokenizer = train_tokenizer([TEMPLATE, TASK, *pages], vocabulary_size=4096)
    codec = TextCodec(tokenizer)
    shape = TinyModelSettings(hidden_size=64, layers=2, heads=4, intermediate_size=32, max_positions=10**6)
    model = build_tiny_model(shape, tokenizer, seed=0)
    client = CLIENTS[name]
    engine = CallingEngine(codec, model, client)
    settings = RolloutSettings(max_turn_tokens=4096, max_prompt_tokens=10**6, max_response_tokens=10**6)
    limits = AgentGatewaySettings(max_request_bytes=2**24)
    problem = Problem(id="note", statement=TASK, answer="", source="note", info={"task": str(directory)})
    policy = TokenPolicy(
        problem=problem,
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
    env = f"harbor:{directory}:{client.command or f'bash /agent/{name}.sh'}"
    program = program_for_environment(env, {"agent_files": str(AGENTS), "helper_image": image}, limits)
    gateway = server.AgentGateway(limits)
    await gateway.open()
    await program.open(gateway)
    gateway.register_rollout(rollout)
    began = time.monotonic()
    try:
        reward, failure = await program.run(rollout, lambda: None), ""
    except AgentFailureError as error:
        reward, failure = None, str(error)
    seconds = time.monotonic() - began
    rows = rollout.build_trajectories(Ended.ANSWERED)
    await rollout.reject_further_requests()
    await program.close()
    await gateway.close()
    replies = rollout.tree.generations
    expected = Counter((one.prompt.context_tokens, one.completion.token_ids) for one in replies if one.trainable)
    once = trained(rows) == expected and expected <= Counter(engine.sampled)
    difference = largest_difference(model, rows)
    print(
        f"{name}: reward {reward} in {seconds:.0f} s; {len(replies)} replies, "
        f"{sum(not one.trainable for one in replies)} of them without loss, sequences of "
        f"{[row.turns for row in rows]} turns and {[len(row.prompt_ids + row.response_ids) for row in rows]} tokens, "
        f"{dict(rollout.counts)}; every token {'enters the loss once' if once else 'DOES NOT ENTER THE LOSS ONCE'}; "
        f"log-probabilities differ by at most {difference:.0e}{failure and f'; {failure}'}",
        flush=True,
    )
    return reward == 1.0 and once and difference < 1e-5


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--image", default=os.environ.get("AGENTRL_SANDBOX_IMAGE", "agentrl-sandbox"))
    parser.add_argument("--clients", nargs="+", choices=CLIENTS, default=list(CLIENTS))
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        write_task(Path(directory), arguments.image)
        worked = [asyncio.run(drive(name, arguments.image, Path(directory))) for name in arguments.clients]
    return int(not all(worked))


if __name__ == "__main__":
    sys.exit(main())
