"""An evaluation directory that is generated without a model."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from evaluation.runs import WrittenSampler, play, problem_set, results, transcript

from agentrl.evaluation.transcripts import Sample, Transcript, Turn


def written(sample: Sample) -> Transcript:
    """Write samples of which two per problem are correct."""
    turns = (Turn(origin="model", text=f"I am sample {sample.number}.", tokens=9),)
    return transcript(sample, correct=sample.number > 1, turns=turns)


def better(sample: Sample) -> Transcript:
    """Write samples that always solve problem 1."""
    turns = (Turn(origin="model", text="</script><img src=x onerror=alert(1)>", tokens=9),)
    return transcript(sample, correct=sample.number > 1 or sample.problem.id == "p1", turns=turns)


def made_evaluation(folder: Path, write: Callable[[Sample], Transcript]) -> Path:
    sets = [problem_set(2)]
    asyncio.run(play(WrittenSampler(write), folder, sets))
    results(folder, sets)
    return folder
