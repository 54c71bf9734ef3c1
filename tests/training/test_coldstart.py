from __future__ import annotations

import itertools
import json
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch

from agentrl.config import load_settings
from agentrl.errors import SettingsError
from agentrl.evaluation.scores import avg_at_k
from agentrl.kernels.attention import PackedRow
from agentrl.models.loading import build_tiny_model, train_tokenizer
from agentrl.models.policy import PolicyModel
from agentrl.models.tokenizer import TextCodec
from agentrl.problems.demonstrations import Demonstration, DemonstrationTurn, format_program
from agentrl.telemetry.console import Console
from agentrl.training.coldstart import train
from agentrl.training.coldstart.demonstrations import (
    EncodedDemonstration,
    add_observations,
    check_no_template_tool_calls,
)
from agentrl.training.coldstart.policy import StartingPolicyScore, prepare_starting_policy
from agentrl.training.coldstart.train import (
    encode_demonstration,
    pack_demonstrations,
    policy_cache_directory,
    random_repetition_demonstration,
    read_coldstart_demonstrations,
    shorten_to_direct_answers,
    shuffled_batches,
)
from agentrl.training.settings import ColdstartSettings
from agentrl_envs.episode import Environment
from agentrl_envs.protocols.simpletir import SimpleTIRProtocol
from agentrl_envs.types import Ended, Problem, Step

from .conftest import SMALL, CommandLine

PROBLEM = Problem(id="a", statement="2 + 3?", answer="5", source="made")
TOKENIZER = train_tokenizer(["2 + 3?\n```py\nfinal_answer(5)\n```"], vocabulary_size=300)


class PromptEpisode:
    """Only starts: an episode as the cold start uses it."""

    protocol = SimpleTIRProtocol(instruction="", observation_limit=512)
    stop_strings = protocol.stop_strings

    def __init__(self, problem: Problem) -> None:
        self._problem = problem

    def turn_complete(self, text: str) -> bool:
        return self.protocol.turn_complete(text)

    async def start(self) -> str:
        return self._problem.statement + "\n"

    async def step(self, action: str) -> Step:
        raise AssertionError("demonstrations are not played")

    async def fork(self) -> PromptEpisode:
        raise AssertionError("demonstrations are not forked")

    async def close(self) -> None:
        """Nothing is open."""


class PromptEnvironment(Environment):
    async def open(self) -> None: ...
    async def close(self) -> None: ...
    def describe(self) -> list[str]:
        return []

    def episode(self, problem: Problem) -> Any:
        return PromptEpisode(problem)


async def test_masks_are_true_on_turns_and_false_on_observations() -> None:
    codec = TextCodec(TOKENIZER)
    code, seen, boxed = format_program("print(5)"), "\nCode execution result: 5\n", "\\boxed{5}"
    shown = Demonstration(
        problem=PROBLEM, turns=(DemonstrationTurn(model=code, observation=seen), DemonstrationTurn(model=boxed))
    )
    encoded = await encode_demonstration(shown, environment=PromptEnvironment(), codec=codec)
    first, between, last = (codec.encode(text) for text in (code, seen, boxed))
    assert encoded.prompt_ids == codec.encode_prompt("2 + 3?\n")
    # A closed fence ends a turn by itself; what nothing ends gets the end-of-sequence token, which is trained.
    assert encoded.response_ids == (*first, *between, *last, codec.eos_id)
    assert encoded.response_mask == (True,) * len(first) + (False,) * len(between) + (True,) * (len(last) + 1)


class EchoEpisode(PromptEpisode):
    """Answers a turn with its text; "over" ends it."""

    async def step(self, action: str) -> Step:
        return Step(observation=f"[{action}]", reward=0.0, ended=Ended.ANSWERED if action == "over" else None)


class EchoEnvironment(PromptEnvironment):
    def episode(self, problem: Problem) -> Any:
        return EchoEpisode(problem)


async def test_observations_that_are_missing_are_played() -> None:
    turns = tuple(DemonstrationTurn(model=text) for text in ("a", "b", "c"))
    played = await add_observations(Demonstration(problem=PROBLEM, turns=turns), EchoEnvironment())
    assert [(turn.model, turn.observation) for turn in played.turns] == [("a", "[a]"), ("b", "[b]"), ("c", "")]
    written = Demonstration(
        problem=PROBLEM, turns=(DemonstrationTurn(model="a", observation="x"), DemonstrationTurn(model="b"))
    )
    assert await add_observations(written, PromptEnvironment()) is written
    early = Demonstration(problem=PROBLEM, turns=(DemonstrationTurn(model="over"), DemonstrationTurn(model="b")))
    with pytest.raises(
        SettingsError, match=r"turn 1 of 2 of demonstration 'a' ends the episode \(answered\), .*: 'over'"
    ):
        await add_observations(early, EchoEnvironment())


def test_generated_demonstrations_do_not_show_the_tools_of_a_class(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "one_room.py").write_text("class A:\n    def reset(self): ...\n")
    settings = load_settings("one_room:A")
    message = r"coldstart\.demonstrations=builtin:horizon contains no calls to the tools of env=one_room:A: set a JSONL"
    with pytest.raises(SettingsError, match=message):
        read_coldstart_demonstrations(settings)
    with pytest.raises(SettingsError, match=r"is plain text, but env=one_room:A uses the chat template"):
        check_no_template_tool_calls(settings, "{{ messages }}")
    check_no_template_tool_calls(settings, None)
    check_no_template_tool_calls(load_settings(), "{{ messages }}")


def test_a_demonstration_calls_only_the_tools_of_its_class(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    tool = "    def look(self) -> str:\n        'Look around.'\n        return 'a box'\n"
    Path("called.py").write_text("class Keeper:\n    def reset(self): ...\n\n" + tool)

    def call(name: str) -> str:
        return f'<tool_call>\n{{"name": "{name}", "arguments": {{}}}}\n</tool_call>'

    settings = load_settings("called:Keeper", overrides=["coldstart.demonstrations=shown.jsonl"])
    good = {"id": "one", "problem": "?", "turns": [{"model": call("look")}, {"model": "5"}]}
    Path("shown.jsonl").write_text(json.dumps(good))
    assert len(read_coldstart_demonstrations(settings).demonstrations) == 1
    bad = {"problem": "?", "turns": [{"model": call("look")}, {"model": call("lok")}, {"model": "5"}]}
    Path("shown.jsonl").write_text(json.dumps(good) + "\n" + json.dumps(bad))
    message = r"shown\.jsonl:2: turn 2 calls 'lok', which is not a tool of env=called:Keeper; did you mean 'look'\?"
    with pytest.raises(SettingsError, match=message):
        read_coldstart_demonstrations(settings)


def test_a_demonstration_of_other_columns_or_arguments_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    tool = "    def look(self) -> str:\n        'Look around.'\n        return 'a box'\n"
    Path("columns.py").write_text("class Keeper:\n    def reset(self, box): ...\n\n" + tool)
    settings = load_settings("columns:Keeper", overrides=["coldstart.demonstrations=shown.jsonl"])
    call = '<tool_call>\n{"name": "look", "arguments": {"far": 1}}\n</tool_call>'
    row = {"question": "?", "box": 1, "turns": [{"model": call}, {"model": "5"}]}
    Path("shown.jsonl").write_text(f"{json.dumps(row)}\n" * 3)
    (first, *_) = read_coldstart_demonstrations(settings).demonstrations
    assert (first.problem.statement, first.problem.info) == ("?", {"box": 1})
    (said,) = caplog.messages
    assert "shown.jsonl:1: turn 1: arguments of look: Additional properties are not allowed ('far' was" in said
    assert "(and 2 more such calls)" in said
    Path("shown.jsonl").write_text(json.dumps({"problem": "?", "bax": 1, "turns": [{"model": "5"}]}))
    message = r"shown\.jsonl:1: reset\(\) of environment 'columns:Keeper' requires the column 'box'; columns of"
    with pytest.raises(SettingsError, match=message):
        read_coldstart_demonstrations(settings)


def test_the_cache_knows_the_class_and_its_columns(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    Path("two_rooms.py").write_text("class A:\n    def reset(self): ...\n\nclass B(A): ...\n")
    row = {"problem": "2?", "answer": "2", "room": 1, "turns": [{"model": "2"}]}
    Path("one.jsonl").write_text(json.dumps(row))
    Path("other.jsonl").write_text(json.dumps(row | {"room": 2}))

    def place(env: str, file: str = "one.jsonl") -> str:
        settings = load_settings(env, overrides=[f"coldstart.demonstrations={file}"])
        shown = read_coldstart_demonstrations(settings).demonstrations
        settings = settings.model_copy(update={"coldstart": ColdstartSettings(demonstrations="same")})
        return policy_cache_directory(settings, shown).name

    first = place("two_rooms:A")
    assert len({first, place("two_rooms:B"), place("two_rooms:A", "other.jsonl")}) == 3
    Path("two_rooms.py").write_text("class A:\n    def reset(self): return 'new'\n")
    assert place("two_rooms:A") != first


def test_demonstrations_are_packed_with_the_tokens_of_the_model() -> None:
    rows = [
        EncodedDemonstration(prompt_ids=(1, 2), response_ids=(3, 4, 5), response_mask=(True, False, True)),
        EncodedDemonstration(prompt_ids=(6,), response_ids=(7,), response_mask=(True,)),
    ]
    row, *tokens = pack_demonstrations(rows)
    assert row.input_ids.tolist() == [[1, 2, 3, 4, 5, 6, 7]]
    assert row.position_ids.tolist() == [[0, 1, 2, 3, 4, 0, 1]]
    assert [part.tolist() for part in tokens] == [[0, 0, 1], [0, 2, 0]]
    assert row.response_token_ids(*tokens).tolist() == [3, 5, 7]
    assert row.predicting_positions(*tokens).tolist() == [1, 3, 5]


def test_repeated_tokens_can_be_predicted_only_by_copying() -> None:
    vocabulary, generator = torch.tensor([3, 5, 8]), torch.Generator().manual_seed(0)
    rows = [random_repetition_demonstration(vocabulary, generator) for _ in range(200)]
    assert {len(row.prompt_ids) for row in rows} == set(range(4, 17))
    assert all(row.response_ids == row.prompt_ids * 3 and set(row.prompt_ids) <= {3, 5, 8} for row in rows)
    assert all(row.response_mask == (False, *[True] * (len(row.response_ids) - 1)) for row in rows)
    assert len(set(rows)) == 200


class _Engine:
    """An engine without DeepSpeed. Records the number of sequences of each forward pass."""

    device = torch.device("cpu")

    def __init__(self, module: PolicyModel, **_: object) -> None:
        self.module = module
        self.sequences: list[int] = []

    def __call__(self, row: PackedRow, rows: torch.Tensor, columns: torch.Tensor) -> Any:
        self.sequences.append(int(rows.max()) + 1)
        return self.module(row, rows, columns)

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()

    def step(self) -> None:
        pass

    def close(self) -> None:
        pass


@pytest.mark.parametrize(("copy_steps", "sequences"), [(0, [3, 3, 3]), (2, [6, 6, 3]), (9, [6, 6, 6])])
def test_the_first_steps_also_repeat_tokens_and_report_the_loss_on_demonstrations(
    copy_steps: int, sequences: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    engines: list[_Engine] = []

    def make_engine(module: PolicyModel, **options: object) -> _Engine:
        engines.append(_Engine(module, **options))
        return engines[-1]

    monkeypatch.setattr(train, "TrainingEngine", make_engine)
    monkeypatch.setattr(train, "start_distributed", lambda deadline: (0, 1))
    small = ["model.tiny.layers=1", "coldstart.steps=3", "coldstart.batch_size=3", "coldstart.direct_steps=null"]
    settings = load_settings(overrides=[*small, f"coldstart.copy_steps={copy_steps}"])
    model = build_tiny_model(settings.model.tiny, train_tokenizer(["1 + 2"], vocabulary_size=300), seed=0)
    mask = (True, False, True)
    rows = [EncodedDemonstration(prompt_ids=(3, 4), response_ids=(5, 6, 7), response_mask=mask)] * 4
    losses: list[float] = []
    train.fine_tune(model, rows, rows, settings, report=lambda step, loss: losses.append(loss))
    assert engines[0].sequences == sequences
    assert losses == pytest.approx([losses[0]] * 3)  # the weights do not change


async def test_a_cold_start_that_is_killed_leaves_no_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(train, "TrainingEngine", _Engine)
    monkeypatch.setattr(train, "start_distributed", lambda deadline: (0, 1))
    settings = load_settings(
        overrides=["coldstart.count=8", "coldstart.steps=2", "coldstart.batch_size=2", "model.tiny.layers=1"]
    )
    during: list[list[Path]] = []
    output = tmp_path / "made" / "policy"
    await train.cold_start(settings, output, lambda step, loss: during.append(list(output.parent.iterdir())))
    assert during == [[], []]
    assert list(output.parent.iterdir()) == [output]


def test_every_demonstration_comes_once_an_epoch() -> None:
    drawn = list(itertools.islice(shuffled_batches(5, 2, seed=1), 5))
    flat = [index for batch in drawn for index in batch]
    assert sorted(flat[:5]) == sorted(flat[5:]) == [0, 1, 2, 3, 4]
    assert drawn == list(itertools.islice(shuffled_batches(5, 2, seed=1), 5))
    assert drawn != list(itertools.islice(shuffled_batches(5, 2, seed=2), 5))


def test_direct_answers_replace_a_share() -> None:
    shown = [Demonstration(problem=PROBLEM, turns=(DemonstrationTurn(model=format_program("x")),))] * 400
    direct = [
        item for item in shorten_to_direct_answers(shown, share=0.25, seed=0) if item.turns[0].model == "\\boxed{5}"
    ]
    assert 70 < len(direct) < 130
    assert shorten_to_direct_answers(shown, share=0.0, seed=0) == tuple(shown)


def test_direct_answers_in_any_turn_keep_what_was_seen_before() -> None:
    looks = tuple(DemonstrationTurn(model=format_program(f"box({n})"), observation=f"\n{n}\n") for n in range(3))
    shown = [Demonstration(problem=PROBLEM, turns=(*looks, DemonstrationTurn(model="\\boxed{5}")))] * 400
    mixed = shorten_to_direct_answers(shown, share=1.0, seed=0, turn="any")
    early = [
        sum(item.turns == (*looks[:kept], DemonstrationTurn(model="\\boxed{5}")) for item in mixed) for kept in range(3)
    ]
    assert sum(early) == 400  # never behind the look that tells the answer
    assert min(early) > 90
    (single,) = shorten_to_direct_answers([replace(shown[0], turns=looks[:1])], share=1.0, seed=0, turn="any")
    assert single.turns == (DemonstrationTurn(model="\\boxed{5}"),)


def test_direct_answers_in_the_words_of_the_author() -> None:
    turns = (DemonstrationTurn(model=format_program("x"), observation="\n5\n"), DemonstrationTurn(model="Answer: five"))
    shown = [Demonstration(problem=replace(PROBLEM, answer=None), turns=turns)]
    (direct,) = shorten_to_direct_answers(shown, share=1.0, seed=0, boxed=False)
    assert direct.turns == turns[1:]


def test_the_cache_knows_what_makes_another_policy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)

    def place(*overrides: str) -> Path:
        settings = load_settings(overrides=["coldstart.count=16", *overrides])
        return policy_cache_directory(settings, read_coldstart_demonstrations(settings).demonstrations)

    here = place()
    assert here.is_relative_to(tmp_path / "agentrl" / "coldstart")
    assert place("rollout.group_size=4", "training.steps=7") == here
    assert place("model.gradient_checkpointing=true", "model.attention=sdpa") == here
    assert place("coldstart.seed=0") == place("seed=9", "coldstart.seed=0") == here
    others = ("coldstart.steps=3", "seed=9", "model.tiny.layers=2", "environment.instruction=Go", "coldstart.count=17")
    assert len({here, *map(place, others)}) == 1 + len(others)


def test_without_a_model_and_demonstrations_there_is_no_policy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    settings = load_settings(overrides=["coldstart.demonstrations=null"])
    with pytest.raises(SettingsError, match=r"neither model\.path nor coldstart\.demonstrations is set"):
        read_coldstart_demonstrations(settings)


@pytest.mark.slow
def test_the_command_learns_a_file_without_a_compiler(command_line: CommandLine) -> None:
    rows = [
        {"problem": f"{n} + 1?", "answer": str(n + 1), "turns": [{"model": f"\\boxed{{{n + 1}}}"}]} for n in range(8)
    ]
    (command_line.folder / "shown.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    small = ["coldstart.steps=3", "coldstart.batch_size=4", "model.tiny.layers=1", "--config", "tiny"]
    command = ["coldstart", "--demonstrations", "shown.jsonl", "--output", "made/policy", *small]
    bare = {"PATH": "/nowhere", "CXX": "/nowhere/c++", "TORCH_EXTENSIONS_DIR": str(command_line.folder / "none")}
    said = command_line.run(*command, environment=bare)
    assert "policy: made/policy, trained in" in said
    assert "cold start: the policy solves 0 of 8 problems of the demonstrations, 0.000 [0.000, 0." in said
    assert "warning: the policy solves no problem after its cold start, so training has little success to" in said
    assert "Traceback" not in said
    made = command_line.folder / "made"
    assert [path.name for path in made.iterdir()] == ["policy"]
    assert {"config.json", "model.safetensors", "tokenizer.json", "README.md", "coldstart.json"} <= {
        path.name for path in (made / "policy").iterdir()
    }
    # What is there is not overwritten, and a place that cannot be written is said before the training.
    assert "already exists" in command_line.run(*command, code=2)
    (command_line.folder / "file").write_text("")
    command[command.index("made/policy")] = "file/policy"
    said = command_line.run(*command, code=2)
    assert "error: cannot create --output file/policy: Not a directory" in said
    assert "cold-start step" not in said


@pytest.mark.slow
def test_what_a_policy_solves_is_stored_beside_it(cold_policy: Path) -> None:
    score = StartingPolicyScore.read(cold_policy)
    assert score is not None
    assert (score.source, score.problems) == ("the demonstrations", 64)
    # This policy is made in a few seconds and may solve none of them. Its interval is that of 64 problems played once.
    interval = avg_at_k([1] * 64, [1] * score.solved + [0] * (64 - score.solved)).problems_like_these
    assert (score.low, score.high) == pytest.approx((interval.low, interval.high))
    assert score.highest_reward == float(score.solved > 0)
    assert score.mean_reward == pytest.approx(score.solved / 64)  # right or wrong, nothing in between


def test_a_cached_policy_shows_the_stored_score(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    settings = load_settings(overrides=["coldstart.count=16"])
    path = policy_cache_directory(settings, read_coldstart_demonstrations(settings).demonstrations)
    path.mkdir(parents=True)

    def shown(**changes: Any) -> list[str]:
        values = {"source": "x", "problems": 8, "solved": 0, "low": 0.0, "high": 0.4} | changes
        StartingPolicyScore(**{"mean_reward": 0.0, "highest_reward": 0.0} | values).write(path)
        said = StringIO()
        assert prepare_starting_policy(settings, Console(settings.telemetry, said)) == str(path)
        return said.getvalue().splitlines()

    said = StringIO()
    prepare_starting_policy(
        settings, Console(settings.telemetry, said)
    )  # of an earlier version, or its playing was stopped
    assert said.getvalue() == f"policy: {path} (cold start of an earlier run)\n"
    _, line, warning = shown()
    assert line == "cold start: the policy solves 0 of 8 problems of x, 0.000 [0.000, 0.400]"
    assert "warning: the policy solves no problem after its cold start" in warning
    assert "coldstart.copy_steps" in warning
    assert "coldstart.count" in warning
    assert len(shown(solved=1)) == 2
    *_, warning = shown(problems=64, solved=2)
    assert "warning: the policy solves only 2 of 64 problems after its cold start" in warning
    # Rewards between 0 and 1 are something to learn from.
    assert shown(mean_reward=0.25, highest_reward=0.5)[1:] == [f"{line}; mean reward 0.250"]
    assert len(shown(mean_reward=-1.0, highest_reward=-1.0)) == 3
    (path / "coldstart.json").write_text("{")
    said = StringIO()
    assert prepare_starting_policy(settings, Console(settings.telemetry, said)) == str(path)
    assert "warning: the score of the cold start cannot be read: " in said.getvalue()


@pytest.mark.slow
def test_a_cache_that_cannot_be_written_is_said_before_the_cold_start(command_line: CommandLine) -> None:
    said = command_line.run("train", *SMALL, "name=x", code=2, environment={"XDG_CACHE_HOME": "/dev/null/cache"})
    assert "error: cannot write the policy to /dev/null/cache/agentrl/coldstart/" in said
    assert "cold-start step" not in said
    assert "Traceback" not in said
