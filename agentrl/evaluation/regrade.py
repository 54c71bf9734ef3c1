"""``agentrl regrade``: grade the stored answers of an evaluation again, without sampling or running code.

``--extract`` first extracts the answers again from the stored conversations.
"""

from __future__ import annotations

import asyncio
import inspect
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import repeat
from pathlib import Path

from agentrl.errors import SettingsError
from agentrl.evaluation.directory import EvaluationDirectory
from agentrl.evaluation.formats import Provenance, RegradedResults, RegradedRollout, Results
from agentrl.evaluation.provenance import build_grader_record
from agentrl.evaluation.results import RolloutIndex, build_result_tables, make_results
from agentrl.evaluation.scores import AnswerGrader
from agentrl.evaluation.settings import EvaluationSections
from agentrl.evaluation.transcripts import Transcript
from agentrl.telemetry.console import Console
from agentrl_envs.execution import MAX_PRINTED_CHARACTERS
from agentrl_envs.grading import Grader
from agentrl_envs.protocols.base import TextProtocol, make_protocol
from agentrl_envs.reasoning import BoxedAnswerProtocol
from agentrl_envs.registry import PluginError, import_attribute
from agentrl_envs.settings import SimpleTIRSettings
from agentrl_envs.types import Ended, Verdict


def protocol_from_provenance(provenance: Provenance) -> TextProtocol:
    """Return the protocol of an evaluation. Raises SettingsError if its answers cannot be extracted again."""
    recorded = provenance["protocol"]
    if recorded["env"] == "reasoning":
        return BoxedAnswerProtocol(instruction=recorded["instruction"])
    if recorded["env"] != "simpletir":
        raise SettingsError(
            "--extract supports the environments simpletir and reasoning, but the evaluation used "
            f"{recorded['env']!r}, which extracts answers itself"
        )
    if recorded["protocol"] == "hermes":
        raise SettingsError(
            "--extract does not support the protocol hermes, because parsing its calls requires the model's chat "
            "template and tools"
        )
    return make_protocol(
        SimpleTIRSettings(
            protocol=recorded["protocol"],
            instruction=recorded["instruction"],
            observation_limit=recorded["observation_limit"],
        )
    )


def extract_answer_again(transcript: Transcript, protocol: TextProtocol) -> Transcript:
    """Extract a rollout's answer again. If the answer changes, the verdict is removed.

    Excluded rollouts are unchanged, except rollouts with an answer whose grader failed.
    """
    if transcript.ended.is_excluded and transcript.answer is None:
        return transcript
    answer = _extract_answer(transcript, protocol)
    if answer == transcript.answer:
        return transcript
    ended = transcript.ended
    if answer is not None:
        ended = Ended.ANSWERED
    elif ended is Ended.ANSWERED:
        ended = Ended.STOPPED  # the model's continuation is unknown
    return replace(transcript, answer=answer, verdict=None, reward=0.0, ended=ended)


def _extract_answer(transcript: Transcript, protocol: TextProtocol) -> str | None:
    """Return the first answer of the conversation. In a turn, a program's answer precedes an answer in text."""
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
            return transcript.answer  # more programs than stored calls: the rule for programs has changed
        printed = protocol.printed_answer(call.printed)
        if (
            printed is None
            and len(call.printed) == MAX_PRINTED_CHARACTERS
            and text is turns[-1]
            and transcript.answer is not None
        ):
            return transcript.answer  # the answer may be in the part of the output that was not stored
        if printed is not None or turn.answer is not None:
            return printed if printed is not None else turn.answer
    return None


_MOST_EXAMPLES = 20
# Rollouts are graded in batches to limit memory.
_BATCH_SIZE = 256


class FunctionGrader:
    """Grader that calls a custom ``function(answer, reference)``, which returns a bool, a Verdict or an awaitable."""

    def __init__(self, path: str) -> None:
        """Import the function ``path``, written ``module:name``. Raises PluginError if it is not a function."""
        function = import_attribute(path, "--grader")
        if not callable(function):
            raise PluginError(
                f"--grader must be a function (answer, reference) -> bool; {path!r} is a {type(function).__name__}"
            )
        self._function: Callable[[str, str], object] = function

    async def grade(self, answer: str | None, reference: str) -> Verdict:
        """Return the function's verdict, or NO_ANSWER for an empty answer without calling the function."""
        if answer is None or not answer.strip():
            return Verdict.NO_ANSWER
        verdict = self._function(answer, reference)
        verdict = await verdict if inspect.isawaitable(verdict) else verdict
        if isinstance(verdict, Verdict):
            return verdict
        return Verdict.CORRECT if verdict else Verdict.INCORRECT

    async def close(self) -> None:
        """Do nothing, because a function holds no resources."""


def regrade_command(
    run: Path, settings: EvaluationSections, grader: str | None, *, extract: bool = False
) -> RegradedResults:
    """Grade all answers again, print the changes and write ``regraded.json``. Returns its content.

    ``extract`` first extracts the answers again.
    """
    directory = EvaluationDirectory.open_existing(run)
    before = directory.results()
    console = Console(settings.telemetry)
    protocol = protocol_from_provenance(before["provenance"]) if extract else None
    changes, after = asyncio.run(_regrade(directory, before, settings, grader, protocol))
    answers = [change for change in changes if change["answer"] != change["answer_before"]]
    verdicts = [change for change in changes if change["before"] != change["after"]]
    if answers:
        _print_answer_changes(console, answers)
    elif extract:
        console.note("no answer changed: extraction returned the stored answers")
    if verdicts:
        _print_verdict_changes(console, verdicts)
    else:
        console.note("no verdict changed")
    for name, one in after["benchmarks"].items():
        console.note(f"{name}: {before['benchmarks'][name]['avg']['mean']:.4f} -> {one['avg']['mean']:.4f}")
    scores = build_result_tables(after)[0]
    console.table("Scores after regrading", scores.columns, scores.rows)
    record: RegradedResults = {
        **after,
        "changed": verdicts,
        "changed_answers": answers,
        "extracted": extract,
        "grader": grader or build_grader_record(settings),
    }
    directory.write_json("regraded.json", record)
    also = f"{len(answers)} changed answers, " if extract else ""
    console.note(f"{also}{len(verdicts)} changed verdicts and the new scores: {directory.path / 'regraded.json'}")
    return record


async def _regrade(
    directory: EvaluationDirectory,
    before: Results,
    settings: EvaluationSections,
    path: str | None,
    protocol: TextProtocol | None,
) -> tuple[list[RegradedRollout], Results]:
    sets = directory.problem_sets()
    golds = {(one.name, problem.id): problem.answer for one in sets for problem in one.problems}
    grader: Grader | FunctionGrader = Grader(settings.grader) if path is None else FunctionGrader(path)
    index, changes = RolloutIndex(), list[RegradedRollout]()

    async def flush(batch: list[Transcript]) -> None:
        current = batch if protocol is None else [extract_answer_again(one, protocol) for one in batch]
        expected = [golds[one.benchmark, one.problem] for one in batch]
        graded = await asyncio.gather(*map(_grade_again, batch, current, expected, repeat(grader)))
        for old, new, reference in zip(batch, graded, expected, strict=True):
            index.add(new)
            if new.verdict is not old.verdict or new.answer != old.answer:
                changes.append(_change(old, new, reference))

    try:
        batch: list[Transcript] = []
        for transcript in directory.transcripts():
            batch.append(transcript)
            if len(batch) == _BATCH_SIZE:
                await flush(batch)
                batch = []
        await flush(batch)
        ks = sorted({int(k) for one in before["benchmarks"].values() for k in one["pass"]})
        return changes, await make_results(before["provenance"], sets, index, ks, grader)
    finally:
        await grader.close()


async def _grade_again(old: Transcript, new: Transcript, reference: str | None, grader: AnswerGrader) -> Transcript:
    """Grade ``new`` if it has an answer and a reference answer.

    A rollout without an earlier verdict is graded only if its grader had failed or its answer changed.
    After grading, a rollout whose grader had failed counts as answered.
    """
    ungraded = old.verdict is None and not old.ended.is_excluded and new.answer == old.answer
    if new.answer is None or reference is None or ungraded:
        return new
    verdict = await grader.grade(new.answer, reference)
    ended = Ended.ANSWERED if new.ended is Ended.INFRASTRUCTURE_FAILURE else new.ended
    return replace(new, verdict=verdict, ended=ended, reward=float(verdict is Verdict.CORRECT))


def _change(old: Transcript, new: Transcript, reference: str | None) -> RegradedRollout:
    return {
        "benchmark": old.benchmark,
        "problem": old.problem,
        "sample": old.sample,
        "answer_before": old.answer,
        "answer": new.answer,
        "gold": reference,
        "before": "none" if old.verdict is None else old.verdict.value,
        "after": "none" if new.verdict is None else new.verdict.value,
    }


def _print_verdict_changes(console: Console, changes: list[RegradedRollout]) -> None:
    """Print counts of changed verdicts by kind of change, and examples."""
    kinds = Counter(
        (change["before"], change["after"], change["answer"] == change["answer_before"]) for change in changes
    )
    rows = tuple(
        (f"{old} -> {new}", "unchanged" if same else "changed", str(count))
        for (old, new, same), count in kinds.most_common()
    )
    console.table("Verdicts that changed", ("verdict", "answer", "rollouts"), rows)
    columns = ("problem", "answer", "reference answer", "before", "now")
    _print_examples(console, "Answers whose verdict changed", columns, changes, ("answer", "gold", "before", "after"))


def _print_answer_changes(console: Console, changes: list[RegradedRollout]) -> None:
    kinds = Counter(_kind_of_answer(change) for change in changes)
    console.table(
        "Answers that changed", ("answer", "rollouts"), tuple((kind, str(count)) for kind, count in kinds.most_common())
    )
    columns = ("problem", "answer before", "answer now", "reference answer")
    _print_examples(console, "Rollouts whose answer changed", columns, changes, ("answer_before", "answer", "gold"))


def _kind_of_answer(change: RegradedRollout) -> str:
    if change["answer_before"] is None:
        return "newly extracted"
    return "no longer extracted" if change["answer"] is None else "different"


def _print_examples(
    console: Console,
    title: str,
    columns: tuple[str, ...],
    changes: Sequence[Mapping[str, object]],
    keys: tuple[str, ...],
) -> None:
    """Print the first example of each distinct change."""
    different = {(one["benchmark"], one["problem"], *(one[key] for key in keys)): one for one in reversed(changes)}
    rows = tuple(
        (
            f"{one['benchmark']} {one['problem']}",
            *("(none)" if one[key] is None else str(one[key])[:60] for key in keys),
        )
        for one in list(reversed(different.values()))[:_MOST_EXAMPLES]
    )
    more = f" (the first {_MOST_EXAMPLES} of {len(different)})" if len(different) > len(rows) else ""
    console.table(title + more, columns, rows)
