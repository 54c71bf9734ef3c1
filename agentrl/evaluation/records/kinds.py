"""The result of a rollout in one word: the columns of a table and the filter of the report."""

from __future__ import annotations

from agentrl.evaluation.records.transcript import Transcript
from agentrl_envs.types import Ended, Verdict

KINDS = {
    "correct": "correct",
    "incorrect": "incorrect",
    "no_answer": "no answer",
    "unreadable": "unreadable",
    "grader_timeout": "grader timeout",
    "refused": "refused",
    "truncated": "truncated",
    "void": "void turn",
    "no_data": "no data",
}
"""Stored name -> displayed name. All but the first and the last count as wrong."""


def kind_of(transcript: Transcript) -> str:
    """The most informative of ``KINDS``: a verdict takes precedence over how the conversation ended."""
    if transcript.no_data:
        return "no_data"
    if transcript.correct:
        return "correct"
    if transcript.verdict is Verdict.ANSWER_TIMEOUT:
        return "grader_timeout"
    if transcript.verdict is Verdict.UNPARSABLE_ANSWER:
        return "unreadable"
    if transcript.refused:
        return "refused"
    if transcript.ended.is_truncation:
        return "truncated"
    if transcript.ended is Ended.VOID_TURN:
        return "void"
    return "incorrect" if transcript.answer is not None else "no_answer"
