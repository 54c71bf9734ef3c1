from __future__ import annotations

import ast
import asyncio
import itertools
import json
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
import stamina
import yaml
from markdown.extensions.toc import slugify

from agentrl.config import load_settings
from agentrl.config.messages import known_keys
from agentrl.config.overlays import parse_yaml
from agentrl.errors import append_help_link
from agentrl.problems.demonstrations import read_demonstrations
from agentrl.problems.settings import ProblemSourceSettings
from agentrl.rollout.environment import build_environment
from agentrl_envs.adapters.environments import resolve_environment
from agentrl_envs.episode import UnavailableError
from agentrl_envs.rewards import Conversation, Message, TimedRewardFunction
from agentrl_envs.settings import INSTRUCTIONS
from agentrl_envs.tools import EpisodeTools, load_tools
from agentrl_envs.types import Ended, Problem, Verdict

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), ROOT / "sandbox" / "README.md"])


def blocks(page: str, language: str) -> list[str]:
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def block(page: str, words: str) -> str:
    """The one Python example of the page that holds these words."""
    (found,) = (shown for shown in blocks(page, "python") if words in shown)
    return found


@pytest.mark.parametrize("page", ["configuration", "metrics"])
def test_a_generated_page_is_what_the_code_says(page: str) -> None:
    done = subprocess.run([sys.executable, ROOT / "docs" / f"generate_{page}.py", "--check"])
    assert done.returncode == 0, f"docs/reference/{page}.md is out of date: make docs"


def test_every_setting_is_on_the_page_with_a_meaning() -> None:
    text = (ROOT / "docs/reference/configuration.md").read_text(encoding="utf-8")
    rows = [line.split(" | ") for line in text.splitlines() if line.startswith("| `")]
    assert [row[0] for row in rows if not row[-1].removesuffix("|").strip()] == []
    named = {row[0].strip("| `") for row in rows}
    sections = set(re.findall(r"^## (\S+)", text, re.MULTILINE))
    for key in known_keys("simpletir"):
        last = key.rpartition(".")[2]
        assert last in named or key in sections, key


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text(encoding="utf-8")):
        assert target.startswith("https://") or (page.parent / target).exists(), target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_wrapped_number_does_not_become_a_list(page: Path) -> None:
    text = re.sub(r"^ *```.*?^ *```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    for before, line in itertools.pairwise(text.splitlines()):
        assert not re.match(r"\s*\d+[.)] ", line) or not before or re.match(r"\s*\d+[.)] |   ", before), line


@pytest.mark.slow
def test_the_site_builds_and_its_links_lead_somewhere() -> None:
    builder = ROOT / "docs" / "build_site.py"
    done = subprocess.run([sys.executable, builder], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_link_to_a_missing_page_or_anchor_is_reported(tmp_path: Path) -> None:
    (tmp_path / "page").mkdir()
    (tmp_path / "page" / "index.html").write_text('<h2 id="here">Here</h2> <a href="../">home</a> <a href="#no">x</a>')
    (tmp_path / "index.html").write_text('<a href="page/#here">a</a> <a href="page/#gone">b</a> <img src="c.png">')
    broken_links = runpy.run_path(str(ROOT / "docs" / "build_site.py"))["broken_links"]
    assert sorted(broken_links(tmp_path)) == [
        "index.html: c.png leads nowhere",
        "index.html: page/#gone leads nowhere",
        "page/index.html: #no leads nowhere",
    ]


def test_the_workflow_publishes_main_and_a_release_side_by_side(tmp_path: Path) -> None:
    workflow = yaml.safe_load((ROOT / ".github/workflows/docs.yml").read_text(encoding="utf-8"))
    (script,) = (step["run"] for step in workflow["jobs"]["publish"]["steps"] if "run" in step)

    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=tmp_path, check=True, capture_output=True, text=True).stdout

    git("init", "--bare", "origin")
    for ref, text in (("main", "old"), ("v0.1.0", "released"), ("main", "new")):
        checkout = tmp_path / f"checkout-{text}"
        git("clone", "origin", checkout.name)
        (checkout / "docs").mkdir()
        shutil.copy(ROOT / "docs" / "publish_site.py", checkout / "docs")
        git("-C", checkout.name, "add", "docs")
        git("-C", checkout.name, "-c", "user.name=me", "-c", "user.email=me@localhost", "commit", "-m", "docs")
        site = checkout / "build" / "site"
        site.mkdir(parents=True)
        (site / "index.html").write_text(text)
        (site / "404.html").write_text("lost")
        command = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", script]
        done = subprocess.run(
            command, cwd=checkout, env={**os.environ, "GITHUB_REF_NAME": ref}, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
    git("clone", "--branch", "gh-pages", "origin", "pages")
    pages = tmp_path / "pages"
    assert (pages / "latest/index.html").read_text() == "new"
    assert (pages / "0.1.0/index.html").read_text() == "released"
    assert 'url=latest/"' in (pages / "index.html").read_text()
    listed = json.loads((pages / "versions.json").read_text())
    assert [entry["version"] for entry in listed] == ["latest", "0.1.0"]
    assert not (pages / "docs").exists()


def test_the_pictures_of_the_concepts_can_be_drawn(tmp_path: Path) -> None:
    runpy.run_path(str(ROOT / "docs" / "draw.py"))["main"](tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {path.name for path in (ROOT / "docs/images").glob("*.svg")}


def string_pieces() -> list[str]:
    """Every piece of text in the code, without what f-strings insert."""
    files = [path for name in ("agentrl", "envs", "sandbox") for path in (ROOT / name).rglob("*.py")]
    nodes = (node for path in files for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    return [node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]


def test_the_messages_of_the_troubleshooting_page_are_those_of_the_code() -> None:
    text = (ROOT / "docs/how-to/troubleshooting.md").read_text(encoding="utf-8")
    messages = re.findall(r"^### `(.*)`$", text, re.MULTILINE)
    assert len(messages) >= 25
    code = string_pieces()
    parts = [(message, part) for message in messages for part in message.split("...") if part.strip(" ,:;")]
    assert [pair for pair in parts if not any(pair[1] in piece for piece in code)] == []


def test_a_message_names_its_entry_on_the_troubleshooting_page() -> None:
    text = (ROOT / "docs/how-to/troubleshooting.md").read_text(encoding="utf-8")
    for heading in re.findall(r"^### `(.*)`$", text, re.MULTILINE):
        message = heading.replace("...", "X")
        anchor = slugify(heading, "-")
        assert append_help_link(message) == f"{message}\nhelp: docs/how-to/troubleshooting.md#{anchor}"
    assert append_help_link("some other message") == "some other message"


def test_the_first_change_is_in_the_code() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    steps = re.findall(r"^ +```python\n +# (\S+)\n +(.*)\n +```$", text, re.MULTILINE)
    assert len(steps) == 3
    assert [file for file, line in steps if line not in (ROOT / file).read_text(encoding="utf-8")] == []


def test_settings_that_replace_those_of_other_libraries_exist() -> None:
    text = (ROOT / "docs/how-to/coming-from.md").read_text(encoding="utf-8")
    named = re.findall(
        r"`([a-z_]+(?:\.[a-z_0-9]+)+)(?:=[^`]*)?`", "".join(re.findall(r"^\|.*\| (.*) \|$", text, re.MULTILINE))
    )
    known = known_keys("simpletir")
    generic = {re.sub(r"^data\.(?:train|eval)\.0", "data.train.0", key) for key in named}
    assert len(named) > 80
    sources = {f"data.train.0.{name}" for name in ProblemSourceSettings.model_fields}
    pages = {"libraries.md", "estimators.md", "losses.md", "agents.md", "data.md"}
    assert generic - set(known) - sources - pages == {"data.train_batch_size"}


@pytest.mark.slow
def test_the_gymnasium_example_runs(tmp_path: Path) -> None:
    example = block("how-to/protocols.md", "SimpleTIR-v0")
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", example], cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_the_own_environment_trains(tmp_path: Path) -> None:
    example = block("how-to/environments.md", "class MentalArithmetic")
    (tmp_path / "mental.py").write_text(example)
    (command,) = (shown for shown in blocks("how-to/environments.md", "console") if "mental" in shown)
    short = (
        "coldstart.steps=5 coldstart.count=64 training.steps=1 evaluation.problems=2 evaluation.samples=2 "
        "rollout.problems_per_step=2 rollout.group_size=2 name=own"
    )
    agentrl = command.removeprefix("$ ").split()
    assert agentrl[0] == "agentrl"
    script = Path(sys.executable).parent / "agentrl"
    done = subprocess.run(
        [script, *agentrl[1:], *short.split()], cwd=tmp_path, capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stderr
    assert "gymnasium environment MentalArithmetic" in done.stdout + done.stderr
    assert json.loads((tmp_path / "runs" / "own" / "summary.json").read_text())["steps"] == 1


async def judges(program: str, problem: Problem, conversation: Conversation) -> None:
    """The judge's example against an endpoint that grades with 7 of 10 after two failures, then writes no grade and no
    text, and then stays overloaded."""
    names: dict[str, Any] = {}
    exec(compile(program, "environments.md", "exec"), names)
    await names["CLIENT"].aclose()
    replies = iter([429, 503, '2 errors. It says "Grade: 10". **Grade:** 7 out of 10.', "I give it 7.", None, 401])

    def answer(request: httpx.Request) -> httpx.Response:
        reply = next(replies, 429)
        if isinstance(reply, int):
            return httpx.Response(reply)
        return httpx.Response(200, json={"choices": [{"message": {"content": reply}}]})

    answers = httpx.MockTransport(answer)
    async with httpx.AsyncClient(base_url="http://judge/v1", transport=answers) as names["CLIENT"]:
        assert await names["judged"](problem, conversation, None) == 0.7
        for message in ("I give it 7", "no grade: None"):
            with pytest.raises(UnavailableError, match=message):
                await names["judged"](problem, conversation, None)
        with pytest.raises(httpx.HTTPStatusError, match="401"):
            await names["judged"](problem, conversation, None)
        with pytest.raises(UnavailableError, match=r"overloaded \(HTTP 429"):
            await names["judged"](problem, conversation, None)


async def called(problem: Problem, *calls: tuple[str, dict[str, object]]) -> list[str]:
    chosen = load_tools(("python", "my_tools:constant"))
    tools = EpisodeTools(chosen, problem, sandbox=None, timeout=60.0)
    await tools.open()
    try:
        return [(await tools.call(name, arguments))[0] for name, arguments in calls]
    finally:
        await tools.close()


def test_a_tool_and_a_reward_of_ones_own_and_reasoning_are_as_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_tools.py").write_text(block("how-to/environments.md", "def constant"))
    (tmp_path / "my_rewards.py").write_text(block("how-to/environments.md", "def shorter"))
    (tmp_path / "my_orders.py").write_text(block("how-to/environments.md", "class Orders"))
    monkeypatch.syspath_prepend(tmp_path)
    problem = Problem(id="toy", statement="?", answer="5", source="toy")
    assert asyncio.run(called(problem, ("constant", {"which": "pi"}))) == ["3.14159"]
    turns = tuple(Message(role=role, text="x") for role in ("assistant", "tool", "assistant"))
    right = Conversation(turns=turns, ended=Ended.ANSWERED, answer="5", environment_reward=1.0)
    shorter = TimedRewardFunction("my_rewards:shorter", deadline=60.0)
    assert asyncio.run(shorter(problem, right, Verdict.CORRECT)) == (0.0, 0.9)
    assert asyncio.run(shorter(problem, right, Verdict.INCORRECT)) == (0.0, 0.0)
    exec(compile(block("how-to/protocols.md", "Reasoning-v0"), "protocols.md", "exec"), {})
    factory = resolve_environment("my_orders:Orders")
    assert factory.tools is not None
    assert [schema.name for schema in factory.tools.schemas] == ["query", "answer"]
    with stamina.set_testing(True, attempts=3):  # no pauses
        asyncio.run(judges(block("how-to/environments.md", "async def judged"), problem, right))


def test_every_protocol_is_described() -> None:
    text = (ROOT / "docs/how-to/protocols.md").read_text(encoding="utf-8")
    assert [name for name in INSTRUCTIONS if f"`{name}`" not in text and f"--env {name}`" not in text] == []
    command, *_ = blocks("how-to/protocols.md", "console")
    settings = load_settings(overrides=command.removeprefix("$ agentrl train --config tiny ").split())
    assert settings.environment.protocol == "torl"


def test_the_examples_of_other_libraries_have_valid_settings() -> None:
    shown = "".join(blocks("how-to/libraries.md", "console")).replace("\\\n", "").splitlines()
    prefixes = ("reasoning_gym:", "openenv:")
    commands = [line for line in shown if any(f"--env {prefix}" in line for prefix in prefixes)]
    assert len(commands) == 3
    for command in commands:
        _, _, _, env, *overrides = shlex.split(command.removeprefix("$ "))
        settings = load_settings(env, overrides=overrides)
        assert [source.split for source in settings.data.eval] in ([], ["heldout"])
        if env.startswith("openenv:"):
            assert build_environment(settings).describe()[0].endswith("up to 3 turns")


def test_the_examples_of_chat_models_and_servers_have_valid_settings() -> None:
    shown = (
        "".join([*blocks("how-to/protocols.md", "console"), *blocks("how-to/environments.md", "console")])
        .replace("\\\n", "")
        .splitlines()
    )
    (chat,) = (shlex.split(line)[2:] for line in shown if "system_prompt" in line)
    settings = load_settings(chat[2], overrides=chat[3:])
    assert (settings.env, settings.environment.chat, settings.environment.system_prompt) == (
        "reasoning",
        "always",
        "Be brief.",
    )
    (served,) = (shlex.split(line)[3:] for line in shown if "mcp:http" in line)
    settings = load_settings(overrides=served)
    assert settings.environment.tools == ("python", "mcp:python shop_server.py", "mcp:http://localhost:8000/mcp")


def test_the_server_of_the_example_answers_as_shown(tmp_path: Path) -> None:
    server = block("how-to/environments.md", "MCPServer")
    script = tmp_path / "shop_server.py"
    script.write_text(server)

    async def told() -> list[str]:
        tools = load_tools((f"mcp:{sys.executable} {script}",))
        problem = Problem(id="toy", statement="?", answer="5", source="toy")
        episode = EpisodeTools(tools, problem, sandbox=None, timeout=60.0)
        await episode.open()
        try:
            return [(await episode.call("price", {"item": item}))[0] for item in ("pen", "moon")]
        finally:
            await episode.close()

    pen, moon = asyncio.run(told())
    assert (pen, "there is no moon; there are pen, book" in moon) == ("2", True)


def test_playing_by_hand_is_as_shown(capsys: pytest.CaptureFixture[str]) -> None:
    example = block("how-to/python.md", "agentrl.play")
    exec(compile(example, "python.md", "exec"), {})
    assert capsys.readouterr().out.endswith("=== answered, reward 1\n")


def test_every_ending_is_described() -> None:
    text = (ROOT / "docs/concepts/exclusion.md").read_text(encoding="utf-8")
    assert [ended for ended in Ended if f"`{ended}`" not in text] == []


def test_the_data_examples_are_valid(tmp_path: Path) -> None:
    sections = [parse_yaml(example, "data.md")["data"] for example in blocks("how-to/data.md", "yaml")]
    entries = [entry for part in sections for entry in [*part["train"], *part.get("eval", [])]]
    sources = [ProblemSourceSettings(**entry) for entry in entries]
    assert [source.weight for source in sources] == [3, 1, 1, 1]
    assert sources[-1].fields == {"problem": "question", "db": "meta.database", "image": None}
    (demonstration,) = blocks("how-to/data.md", "json")
    file = tmp_path / "demonstrations.jsonl"
    file.write_text(json.dumps(json.loads(demonstration)) + "\n")
    (read,) = read_demonstrations(file)
    assert (read.problem.answer, len(read.turns), read.turns[1].observation) == ("43", 2, "")


def test_the_order_of_settings_is_as_described(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("base: tiny\nrollout: {group_size: 3, problems_per_step: 5}\n")
    settings = load_settings(None, file, ["rollout.group_size=2", "data.train.0.weight=2"])
    assert (settings.rollout.group_size, settings.rollout.problems_per_step) == (2, 5)
    assert (settings.data.train[0].path, settings.data.train[0].weight) == ("builtin:horizon", 2)


def test_the_runs_of_the_results_are_those_of_their_commands() -> None:
    arguments = runpy.run_path(str(ROOT / "benchmarks" / "learning.py"))["arguments"]
    commands = re.findall(
        r"^\$ python benchmarks/learning.py (.*)", "".join(blocks("research/results.md", "console")), re.MULTILINE
    )
    parsed = [arguments(shlex.split(command)) for command in commands]
    assert [options.seeds for options in parsed if options.config is None] == [[1, 0, 2]]
    assert all("=" in override for options in parsed for override in options.overrides)


def test_every_function_on_the_architecture_page_is_where_the_page_says() -> None:
    text = (ROOT / "docs/concepts/architecture.md").read_text(encoding="utf-8")
    hops = re.findall(r"^\|.*\| `([\w.]+)` \| `([\w/.]+)` \|$", text, re.MULTILINE)
    assert len(hops) > 20
    for name, file in hops:
        path = ROOT / file if file.startswith(("envs/", "sandbox/")) else ROOT / "agentrl" / file
        assert name in defined(path), f"{file} does not define {name}"


def defined(path: Path) -> set[str]:
    """The functions, classes and methods of a file; those of a class as ``Class.method``."""
    found = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            methods = (item for item in node.body if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef))
            found |= {f"{node.name}.{method.name}" for method in methods}
    return found


def test_every_package_on_the_module_map_exists_and_none_is_missing() -> None:
    text = (ROOT / "docs/concepts/architecture.md").read_text(encoding="utf-8").split("## The module map")[1]
    named = re.findall(r"^(agentrl[\w.]*)", text.split("```text")[1].split("```")[0], re.MULTILINE)
    packages = [
        path for path in (ROOT / "agentrl").iterdir() if (path / "__init__.py").exists() or path.suffix == ".py"
    ]
    there = {f"agentrl.{path.stem}" for path in packages if path.stem != "__init__"}
    assert set(named) == there | {"agentrl_envs", "agentrl_sandbox"}
