"""The file of rollouts: appending, reading, removal of an incomplete end, messages about damage."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from agentrl.errors import WorldError
from agentrl.evaluation.transcripts import RolloutLog, Transcript, Turn, read_rollouts, remove_incomplete_frame
from agentrl_envs.types import Ended, ToolCall, Verdict


def transcript(number: int, text: str = "x") -> Transcript:
    return Transcript(
        benchmark="toy",
        problem=f"p{number}",
        sample=number,
        turns=(Turn(origin="model", text=text, tokens=3), Turn(origin="observation", text="\n2\n", tokens=2)),
        ended=Ended.ANSWERED,
        prompt_tokens=5,
        verdict=Verdict.INCORRECT,
        answer="2",
        tool_calls=(ToolCall(outcome="ok", seconds=0.1),),
        seconds=1.5,
    )


def written(path: Path, *texts: str) -> list[Transcript]:
    made = [transcript(number, text) for number, text in enumerate(texts)]
    with RolloutLog(path) as log:
        for one in made:
            log.append(one)
    return made


def test_what_was_appended_is_read_again_and_more_can_be_appended(tmp_path: Path) -> None:
    path = tmp_path / "rollouts.jsonl.zst"
    made = written(path, "a", "ü\u2028\x00", "long " * 500_000)
    assert list(read_rollouts(path)) == made
    with RolloutLog(path) as log:
        log.append(transcript(9))
    assert [one.sample for one in read_rollouts(path)] == [0, 1, 2, 9]


def test_other_readers_of_zstd_read_json_lines(tmp_path: Path) -> None:
    path = tmp_path / "rollouts.jsonl.zst"
    written(path, "a", "b\nc")
    with path.open("rb") as file:
        plain = zstandard.ZstdDecompressor().stream_reader(file, read_across_frames=True)
        lines = io.TextIOWrapper(plain, encoding="utf-8").readlines()
    assert [json.loads(line)["turns"][0]["text"] for line in lines] == ["a", "b\nc"]


def test_a_missing_file_holds_nothing(tmp_path: Path) -> None:
    assert list(read_rollouts(tmp_path / "none")) == []
    assert remove_incomplete_frame(tmp_path / "none") == 0


@given(data=st.data())
def test_wherever_the_file_is_torn_whole_rollouts_stay(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject):
    path = tmp_path_factory.mktemp("torn") / "rollouts.jsonl.zst"
    made, ends = [], [0]
    with RolloutLog(path) as log:
        for number in range(3):
            made.append(transcript(number))
            log.append(made[-1])
            ends.append(path.stat().st_size)
    cut = data.draw(st.integers(0, ends[-1]))
    path.write_bytes(path.read_bytes()[:cut])
    whole = sum(end <= cut for end in ends[1:])
    assert list(read_rollouts(path)) == made[:whole]
    assert remove_incomplete_frame(path) == cut - ends[whole]
    with RolloutLog(path) as log:
        log.append(transcript(7))
    assert list(read_rollouts(path)) == [*made[:whole], transcript(7)]


def test_damage_elsewhere_is_named_and_nothing_is_cut(tmp_path: Path) -> None:
    path = tmp_path / "rollouts.jsonl.zst"
    written(path, "a", "b")
    data = bytearray(path.read_bytes())
    data[30] ^= 0xFF
    path.write_bytes(data)
    with pytest.raises(WorldError, match=r"rollouts\.jsonl\.zst is damaged at byte 0: "):
        RolloutLog(path)
    assert path.read_bytes() == data
    path.write_bytes(zstandard.ZstdCompressor().compress(b'{"benchmark": "toy"}\n'))
    with pytest.raises(WorldError, match="damaged at byte 0: not a rollout"):
        list(read_rollouts(path))
