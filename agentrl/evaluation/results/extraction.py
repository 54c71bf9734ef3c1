"""Extraction of answers from stored conversations with the current protocol, without sampling or running code."""

from __future__ import annotations

from dataclasses import replace

from agentrl.errors import SettingsError
from agentrl.evaluation.formats import Provenance
from agentrl.evaluation.records.transcript import Transcript
from agentrl_envs.execution import PRINTED
from agentrl_envs.protocols.base import Protocol
from agentrl_envs.protocols.factory import make_protocol
from agentrl_envs.reasoning import ReasoningProtocol
from agentrl_envs.settings import SimpleTIRSettings
from agentrl_envs.types import Ended


def protocol_of(provenance: Provenance) -> Protocol:
    """Return the protocol of an evaluation. Raises SettingsError if its environment has none."""
    recorded = provenance["protocol"]
    if recorded["env"] == "reasoning":
        return ReasoningProtocol(instruction=recorded["instruction"])
    if recorded["env"] != "simpletir":
        raise SettingsError(
            f"--extract: the evaluation used the environment {recorded['env']!r}, which extracts answers itself; "
            "answers can be extracted again for simpletir and reasoning"
        )
    if recorded["protocol"] == "hermes":
        raise SettingsError(
            "--extract: the evaluation used the protocol hermes, whose calls can be parsed only with the model's chat "
            "template and its tools; answers can be extracted again for the other protocols"
        )
    return make_protocol(
        SimpleTIRSettings(
            protocol=recorded["protocol"],
            instruction=recorded["instruction"],
            observation_limit=recorded["observation_limit"],
        )
    )


def extracted(transcript: Transcript, protocol: Protocol) -> Transcript:
    """Replace the answer by the one that the protocol extracts now. A changed answer has no verdict.

    Excluded rollouts are unchanged, except those with an answer, whose grader failed.
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
        ended = Ended.STOPPED  # it is unknown how the model would have continued
    return replace(transcript, answer=answer, verdict=None, reward=0.0, ended=ended)


def _answer(transcript: Transcript, protocol: Protocol) -> str | None:
    """The first answer, in the order of an episode: in each turn a program's answer precedes one in the text."""
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
            return transcript.answer  # more programs than calls: the rule for programs has changed
        printed = protocol.printed_answer(call.printed)
        if printed is None and len(call.printed) == PRINTED and text is turns[-1] and transcript.answer is not None:
            return transcript.answer  # the answer may be in the part of the output that was not stored
        if printed is not None or turn.answer is not None:
            return printed if printed is not None else turn.answer
    return None
