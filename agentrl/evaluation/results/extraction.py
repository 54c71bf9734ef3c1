"""The answers of stored conversations, found again by the protocol as it is now. Nothing is generated, nothing is run.

A conversation is read as an episode plays it: turn by turn, a program's answer before the words', and the first answer
ends it. What programs printed stands in their calls, not in the observations, which are cut to what a model is shown.
"""

from __future__ import annotations

from dataclasses import replace

from agentrl.errors import SettingsError
from agentrl.evaluation.formats import Provenance
from agentrl.evaluation.records.transcript import Transcript
from agentrl_envs.execution import PRINTED
from agentrl_envs.protocols.base import Protocol
from agentrl_envs.protocols.factory import make_protocol
from agentrl_envs.protocols.reasoning import ReasoningProtocol
from agentrl_envs.settings import SimpleTIRSettings
from agentrl_envs.types import Ended


def protocol_of(provenance: Provenance) -> Protocol:
    """The protocol under which an evaluation was played. SettingsError where its environment has none."""
    recorded = provenance["protocol"]
    if recorded["env"] == "reasoning":
        return ReasoningProtocol(instruction=recorded["instruction"])
    if recorded["env"] != "simpletir":
        raise SettingsError(
            f"--extract: the evaluation was played in the environment {recorded['env']!r}, which finds answers itself; "
            "answers can be extracted again from conversations of simpletir and reasoning"
        )
    if recorded["protocol"] == "hermes":
        raise SettingsError(
            "--extract: the evaluation was played under protocol hermes, whose calls are read by the model's chat "
            "template and the tools there were; answers can be extracted again from the other protocols"
        )
    return make_protocol(
        SimpleTIRSettings(
            protocol=recorded["protocol"],
            instruction=recorded["instruction"],
            observation_limit=recorded["observation_limit"],
        )
    )


def extracted(transcript: Transcript, protocol: Protocol) -> Transcript:
    """With the answer that the protocol finds now, and without a verdict where that is another one than before.

    A rollout without data stays as it is, but for one that has an answer (its grader failed).
    """
    if transcript.ended.is_no_data and transcript.answer is None:
        return transcript
    answer = _answer(transcript, protocol)
    if answer == transcript.answer:
        return transcript
    ended = transcript.ended
    if answer is not None:
        ended = Ended.ANSWERED
    elif ended is Ended.ANSWERED:
        ended = Ended.STOPPED  # what the model would have gone on to write, nobody knows
    return replace(transcript, answer=answer, verdict=None, reward=0.0, ended=ended)


def _answer(transcript: Transcript, protocol: Protocol) -> str | None:
    calls = iter(transcript.tool_calls)
    turns = [turn.text for turn in transcript.turns if turn.origin == "model"]
    for text in turns:
        turn = protocol.parse(text)
        if turn.program is None:
            if turn.answer is not None:
                return turn.answer
            continue
        call = next(calls, None)
        if call is None:
            return transcript.answer  # more programs than were run: the rule for programs is another one now
        printed = protocol.printed_answer(call.printed)
        if printed is None and len(call.printed) == PRINTED and text is turns[-1] and transcript.answer is not None:
            return transcript.answer  # it may stand before what was kept of the output
        if printed is not None or turn.answer is not None:
            return printed if printed is not None else turn.answer
    return None
