"""Extract the answers of stored conversations again with the current protocol, without generating or running code."""

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
    """The protocol of an evaluation. SettingsError if its environment has none."""
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
    """``transcript`` with the answer that the protocol finds now, and without a verdict if the answer has changed.

    A rollout excluded from the data is unchanged, unless it has an answer (its grader failed).
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
        ended = Ended.STOPPED  # how the model would have continued is unknown
    return replace(transcript, answer=answer, verdict=None, reward=0.0, ended=ended)


def _answer(transcript: Transcript, protocol: Protocol) -> str | None:
    """The first answer, read as an episode does: in each turn a program's answer comes before one in the text."""
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
            return transcript.answer  # more programs than were run: the rule for programs has changed
        printed = protocol.printed_answer(call.printed)
        if printed is None and len(call.printed) == PRINTED and text is turns[-1] and transcript.answer is not None:
            return transcript.answer  # it may be before the part of the output that was kept
        if printed is not None or turn.answer is not None:
            return printed if printed is not None else turn.answer
    return None
