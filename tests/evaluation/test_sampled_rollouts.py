"""Rollouts of both samplers: equal transcripts from tokens and text, complete sets of samples, endings and failures."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from evaluation.runs import settings
from rollout.fakes import ScriptedEngine, ScriptedEnvironment, ScriptedEpisode, byte_codec, completion, ends, goes_on

from agentrl.config import Settings
from agentrl.evaluation.endpoint import ContextFullError, TextCompletion, TextSampling
from agentrl.evaluation.samplers import EndpointSampler, ModelSampler
from agentrl.evaluation.transcripts import Sample, Transcript
from agentrl.rollout.engines.base import EngineError
from agentrl.rollout.settings import RolloutSettings
from agentrl_envs.types import Ended, Problem, ToolCall, Verdict

SETTINGS = RolloutSettings(max_response_tokens=40, max_turn_tokens=20, concurrency=3)


def sample(number: int = 0, *, problem: str = "p", attempt: int = 0) -> Sample:
    question = Problem(id=problem, statement="?", answer="5", source="toy")
    return Sample(benchmark="toy", problem=question, number=number, attempt=attempt)


def answered(**changes: Any) -> Any:
    return ends(reward=1.0, verdict=Verdict.CORRECT, answer="5", observation="O", **changes)


class ScriptedText:
    """Endpoint that answers request n with ``script(conversation, n)``. Raises exceptions and awaits coroutines."""

    def __init__(self, script: Callable[[Sequence[str], int], Any]) -> None:
        self._script = script
        self.asked: list[tuple[tuple[str, ...], TextSampling]] = []
        self.running = self.most = 0

    async def generate(self, conversation: Sequence[str], sampling: TextSampling) -> TextCompletion:
        self.asked.append((tuple(conversation), sampling))
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            answer = self._script(conversation, len(self.asked) - 1)
            if asyncio.iscoroutine(answer):
                answer = await answer
            await asyncio.sleep(0)
            if isinstance(answer, Exception):
                raise answer
            return answer
        finally:
            self.running -= 1


def text(words: str, tokens: int = 4, reason: str = "stop") -> TextCompletion:
    return TextCompletion(text=words, tokens=tokens, prompt_tokens=3, finish_reason=reason)  # type: ignore[arg-type]


def chosen(**changes: Any) -> Settings:
    rollout = SETTINGS.model_copy(update={"top_p": 0.9, **changes})
    return settings(
        "seed=3", "evaluation.endpoint.url=http://localhost:1/v1", "evaluation.endpoint.concurrency=3"
    ).model_copy(update={"rollout": rollout})


def sampled_text(engine: ScriptedText, environment: ScriptedEnvironment, *samples: Sample, **changes: Any) -> Any:
    """Return the rollouts of ``samples`` with an endpoint."""
    sampler = EndpointSampler(engine=engine, settings=chosen(**changes))  # type: ignore[arg-type]
    return listed(sampler.sample_rollouts(environment, samples))


async def listed(transcripts: AsyncIterator[Transcript]) -> list[Transcript]:
    return [transcript async for transcript in transcripts]


async def test_a_conversation_with_an_endpoint() -> None:
    call = ToolCall(outcome="ok", seconds=0.1)
    environment = ScriptedEnvironment(
        lambda problem, n: ScriptedEpisode([goes_on("EEEEE"), answered(tool_calls=(call,))])
    )
    engine = ScriptedText(lambda conversation, n: text(f"turn {n}"))
    (one,) = await sampled_text(engine, environment, sample(2))
    assert [(turn.origin, turn.text, turn.tokens) for turn in one.turns] == [
        ("model", "turn 0", 4),
        ("observation", "EEEEE", 2),
        ("model", "turn 1", 4),
        ("observation", "O", 1),
    ]
    assert (one.ended, one.verdict, one.answer, one.reward) == (Ended.ANSWERED, Verdict.CORRECT, "5", 1.0)
    assert (one.benchmark, one.problem, one.sample, one.prompt_tokens, one.tool_calls) == ("toy", "p", 2, 3, (call,))
    assert [asked for asked, _ in engine.asked] == [("P",), ("P", "turn 0", "EEEEE")]
    assert [asked.max_tokens for _, asked in engine.asked] == [20, 20]
    assert {(asked.temperature, asked.top_p) for _, asked in engine.asked} == {(1.0, 0.9)}
    assert environment.episodes[0].closed == 1


async def test_thoughts_are_stored_and_refusals_known() -> None:
    turn = TextCompletion(text="", tokens=9, prompt_tokens=3, finish_reason="refused", reasoning="May I?")
    environment = ScriptedEnvironment(lambda problem, n: ScriptedEpisode([ends(Ended.VOID_TURN)]))
    engine = ScriptedText(lambda conversation, n: turn)
    (one,) = await sampled_text(engine, environment, sample())
    assert (one.refused, one.turns[0].reasoning, one.turns[0].text) == (True, "May I?", "")
    assert Transcript.from_record(json.loads(json.dumps(one.to_record()))) == one


async def test_seeds_differ_by_sample_turn_and_attempt_and_stay_the_same() -> None:
    async def seeds(*samples: Sample) -> list[int]:
        environment = ScriptedEnvironment(lambda problem, n: ScriptedEpisode([goes_on(), answered()]))
        engine = ScriptedText(lambda conversation, n: text("x"))
        await sampled_text(engine, environment, *samples)
        return [asked.seed for _, asked in engine.asked]

    first = await seeds(sample(0)) + await seeds(sample(1)) + await seeds(sample(0, attempt=1))
    assert len(set(first)) == 6
    assert all(0 <= seed < 2**31 for seed in first)
    assert await seeds(sample(0)) == first[:2]


@pytest.mark.parametrize(
    ("answers", "steps", "expected"),
    [
        ([text("x", 20, "length"), text("x", 20, "length")], [goes_on(""), goes_on("")], Ended.TOKEN_LIMIT),
        ([text("x", 20, "length")], [ends(Ended.VOID_TURN)], Ended.VOID_TURN),  # the turn's limit, not the whole one
        ([text("x", 20, "eos"), text("x", 20, "length")], [goes_on(""), ends(Ended.VOID_TURN)], Ended.TOKEN_LIMIT),
        ([text("x"), ContextFullError("full")], [goes_on()], Ended.TOKEN_LIMIT),
        ([ContextFullError("full")], [], Ended.INFRASTRUCTURE_FAILURE),
        ([text("x"), EngineError("down")], [goes_on()], Ended.INFRASTRUCTURE_FAILURE),
    ],
)
async def test_how_text_conversations_end(answers: list[Any], steps: list[Any], expected: Ended) -> None:
    environment = ScriptedEnvironment(lambda problem, n: ScriptedEpisode(steps))
    (one,) = await sampled_text(ScriptedText(lambda conversation, n: answers[n]), environment, sample())
    assert one.ended is expected
    assert one.is_excluded is (expected is Ended.INFRASTRUCTURE_FAILURE)
    assert (one.failure == "down") is (EngineError in map(type, answers))


async def test_waiting_costs_a_conversation_nothing_and_programs_what_they_run() -> None:
    async def one(*steps: Any, **limits: Any) -> Transcript:
        environment = ScriptedEnvironment(lambda problem, n: ScriptedEpisode(steps))
        engine = ScriptedText(lambda conversation, n: asyncio.sleep(0.05, text("x")))
        (played_once,) = await sampled_text(engine, environment, sample(), **limits)
        return played_once

    ran = replace(goes_on("E"), tool_calls=(ToolCall(outcome="ok", seconds=3.0),))
    assert (await one(ran, ran, answered(), program_seconds=6.0)).ended is Ended.ANSWERED
    assert (await one(ran, ran, answered(), program_seconds=5.9)).ended is Ended.DEADLINE
    silent = await one(asyncio.sleep(60), environment_deadline=0.02)
    assert (silent.ended, silent.is_excluded) == (Ended.INFRASTRUCTURE_FAILURE, True)
    assert silent.failure == "the environment did not respond within 0.02 s (rollout.environment_deadline)"


async def test_text_players_keep_their_concurrency_and_lose_nothing() -> None:
    environment = ScriptedEnvironment(lambda problem, n: ScriptedEpisode([answered()]))
    engine = ScriptedText(lambda conversation, n: text("x"))
    done = await sampled_text(engine, environment, *(sample(number) for number in range(10)))
    assert sorted(one.sample for one in done) == list(range(10))
    assert engine.most == 3


async def test_a_bug_in_an_episode_is_raised() -> None:
    environment = ScriptedEnvironment(lambda problem, n: ScriptedEpisode([ZeroDivisionError("bug")]))
    with pytest.raises(ZeroDivisionError):
        await sampled_text(ScriptedText(lambda conversation, n: text("x")), environment, sample(0), sample(1))


# -- tokens ------------------------------------------------------------------------------------------------------------


async def sampled_tokens(
    script: Callable[[str, int], Any], steps: Callable[[], list[Any]], *samples: Sample
) -> tuple[list[Transcript], ScriptedEngine]:
    """Return the rollouts of ``samples`` with a model, and the engine with its requests."""
    engine = ScriptedEngine(script)
    sampler = ModelSampler(
        engine=engine,  # type: ignore[arg-type]
        codec=byte_codec(),
        settings=chosen(retries=5),
        fingerprint="f",
        record={},
    )
    environment = ScriptedEnvironment(lambda problem, n: ScriptedEpisode(steps()))
    return await listed(sampler.sample_rollouts(environment, samples)), engine


async def test_tokens_give_the_same_transcript() -> None:
    codec = byte_codec()
    (one,), engine = await sampled_tokens(
        lambda name, n: completion(codec, "aEND"), lambda: [goes_on("EE"), answered()], sample(7, attempt=2)
    )
    assert [(turn.origin, turn.text, turn.tokens) for turn in one.turns] == [
        ("model", "aEND", 4),
        ("observation", "EE", 2),
        ("model", "aEND", 4),
        ("observation", "O", 1),
    ]
    assert (one.sample, one.attempt, one.prompt_tokens, one.correct) == (7, 2, 1, True)
    assert {request[2].top_p for request in engine.requests} == {0.9}


async def test_a_failure_comes_back_at_once_with_its_reason() -> None:
    (one,), engine = await sampled_tokens(lambda name, n: EngineError("out of memory"), list, sample())
    assert (one.ended, one.failure, len(engine.requests)) == (Ended.INFRASTRUCTURE_FAILURE, "out of memory", 1)


async def test_a_rollouts_randomness_depends_on_nothing_beside_it() -> None:
    async def seeds(*samples: Sample) -> dict[tuple[int, ...], int]:
        codec = byte_codec()
        _, engine = await sampled_tokens(lambda name, n: completion(codec, "END"), lambda: [answered()], *samples)
        return {request[0]: request[3] for request in engine.requests}  # type: ignore[misc]

    alone = await seeds(sample(1))
    among = await seeds(sample(0), sample(1), sample(1, problem="q"), sample(1, attempt=1))
    assert len(set(among.values())) == 4
    assert alone.items() <= among.items()
