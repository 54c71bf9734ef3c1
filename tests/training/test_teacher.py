"""A frozen teacher, local and on a server: the rows that it reads, refused ids, and its prompt with a hint."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from multiprocessing.connection import Pipe
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from rollout.fakes import played, tiny_model
from training.teacher_server import TeacherServer, serve_teacher

from agentrl.batch import Batch, MicroBatch
from agentrl.config import load_settings
from agentrl.errors import SettingsError, WorldError
from agentrl.models.policy import PolicyModel
from agentrl.rollout.engines.replica import InvalidResponseError
from agentrl.training.run.preflight import check_teacher_sources
from agentrl.training.run.start import train
from agentrl.training.settings import TeacherSettings
from agentrl.training.step import reference_and_critic
from agentrl.training.step.reference_and_critic import FrozenPolicy, TeachersBySource, open_teachers
from agentrl.training.step.served_teacher import ServedTeacher, parse_score_response
from agentrl.trajectory import Segment, Trajectory

TURN = {"origin": "model", "text": "", "version_spans": ((0, 2),), "log_probs": (-1.0, -1.0)}
SEEN = Segment(origin="observation", token_ids=(40, 41), text="")
ROWS = [
    played(prompt_ids=(1, 2), segments=(Segment(token_ids=(3, 4), **TURN), SEEN, Segment(token_ids=(5, 6), **TURN))),
    played(prompt_ids=(1, 2), segments=(Segment(token_ids=(7, 8), **TURN),)),
]
HINT = (90, 91, 92)


def frozen_policy(model: Any, **options: Any) -> FrozenPolicy:
    policy = PolicyModel(model)
    return FrozenPolicy(policy, policy.requires_grad_(False).eval(), **options)


def with_hint(item: Trajectory) -> tuple[int, ...]:
    return HINT + item.prompt_ids


RECEIVER = """
import sys
from multiprocessing.connection import Connection
micro = Connection(int(sys.argv[1])).recv()
print(micro.row.token_ids.tolist(), micro.teacher_row.token_ids.tolist())
"""


def test_a_hinted_micro_batch_reaches_a_process_with_another_authentication_key() -> None:
    """The worker sends plans to ranks that it did not start."""
    micro = MicroBatch.from_trajectories(ROWS, teacher_prompt=with_hint)
    sender, receiver = Pipe()
    sender.send(micro)
    command = [sys.executable, "-c", RECEIVER, str(receiver.fileno())]
    ended = subprocess.run(command, pass_fds=[receiver.fileno()], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    response = [3, 4, 40, 41, 5, 6, 7, 8]
    assert ended.stdout == f"{[1, 2, *response]} {[*HINT, 1, 2, *response]}\n"


def test_only_the_teacher_reads_the_hint() -> None:
    batch = Batch.from_micro_batch(MicroBatch.from_trajectories(ROWS, teacher_prompt=with_hint))
    assert 90 not in batch.row.token_ids
    model = tiny_model()
    wanted = torch.zeros(batch.response_mask.shape)
    for row, item in enumerate(ROWS):
        ids = torch.tensor([with_hint(item) + item.response_ids])
        log_p = torch.log_softmax(model(input_ids=ids).logits[0, :-1], dim=-1).gather(1, ids[0, 1:, None])[:, 0]
        wanted[row, : len(item.response_ids)] = log_p[len(with_hint(item)) - 1 :].detach()
    for hinted in (True, False):
        found, _ = frozen_policy(model, temperature=1.0, hinted=hinted).score_batch(batch)
        same = torch.allclose(found, torch.where(batch.response_mask, wanted, 0.0), atol=1e-5)
        assert same == hinted


@pytest.fixture
def server() -> Iterator[TeacherServer]:
    with serve_teacher(tiny_model()) as made:
        yield made


def served(server: TeacherServer, **settings: Any) -> ServedTeacher:
    return ServedTeacher(TeacherSettings(url=server.url, path="teacher", **settings), refused_ids={})


@pytest.mark.parametrize("objective", ["reverse_kl", "forward_kl", "jsd"])
def test_a_server_gives_the_divergence_of_a_local_teacher(server: TeacherServer, objective: Any) -> None:
    batch = Batch.from_micro_batch(MicroBatch.from_trajectories(ROWS))
    settings = TeacherSettings(objective=objective)
    local = frozen_policy(tiny_model(), temperature=1.0, needs_full_distribution=True, beta=settings.resolved_beta)
    policy = PolicyModel(tiny_model(seed=1))
    found = []
    for teacher in (local, served(server, objective=objective, top_tokens=264), served(server, objective=objective)):
        log_probs, head = teacher.score_batch(batch)
        statistics, _ = policy(batch.row, batch.rows, batch.columns, teacher=head)
        (gradient,) = torch.autograd.grad(statistics.teacher_divergence.sum(), policy.head.weight)
        found.append((log_probs, statistics.teacher_divergence.detach(), gradient))
    for here, there in zip(*found[:2], strict=True):
        torch.testing.assert_close(there, here, rtol=1e-4, atol=2e-5)
    assert bool((found[2][1] < found[0][1]).all())  # smaller, because all but twenty tokens count as one
    assert {request["model"] for request in server.requests} == {"teacher"}


@pytest.mark.parametrize("objective", ["jsd", "sampled"])
def test_each_source_is_scored_by_its_teacher(server: TeacherServer, objective: Any) -> None:
    """One of them on a server, which receives only its trajectory. The token 5 is refused for the other teacher."""
    settings = TeacherSettings(objective=objective)
    other = replace(ROWS[1], problem=replace(ROWS[1].problem, source="code"))
    batch = Batch.from_micro_batch(MicroBatch.from_trajectories([ROWS[0], other]))
    options = {
        "temperature": 1.0,
        "needs_full_distribution": settings.needs_full_distribution,
        "beta": settings.resolved_beta,
    }
    away = served(server, objective=objective, top_tokens=264)
    coder = frozen_policy(tiny_model(seed=2), refused_ids={5: "id differs"}, **options)
    by_source = TeachersBySource({"code": coder, None: away})
    log_probs, head = by_source.score_batch(batch)
    assert {tuple(request["prompt"]) for request in server.requests} == {ROWS[0].prompt_ids + ROWS[0].response_ids}
    policy = PolicyModel(tiny_model(seed=1))
    statistics, _ = policy(batch.row, batch.rows, batch.columns, teacher=head)
    for number, seed in enumerate((0, 2)):
        alone, own_head = frozen_policy(tiny_model(seed=seed), **options).score_batch(batch)
        torch.testing.assert_close(log_probs[number], alone[number], rtol=1e-4, atol=2e-5)
        if objective == "sampled":
            assert head is own_head is None
            continue
        expected, _ = policy(batch.row, batch.rows, batch.columns, teacher=own_head)
        own = batch.rows == number
        values = [one.teacher_divergence[own] for one in (statistics, expected)]
        gradients = [torch.autograd.grad(value.sum(), policy.head.weight, retain_graph=True)[0] for value in values]
        torch.testing.assert_close(values[0], values[1], rtol=1e-4, atol=2e-5)
        torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-4, atol=2e-5)


def test_every_source_needs_a_teacher() -> None:
    data = ["data.train=[{path: 'builtin:horizon'}, {path: 'code.jsonl'}]"]
    named = "teacher.by_source.horizon.path=a"
    for more in ([named], [named, "teacher.by_source.cod.path=b"], ["teacher.path=a", "teacher.by_source.cod.path=b"]):
        with pytest.raises(SettingsError, match=r"but data\.train has code, horizon: every source needs a teacher"):
            check_teacher_sources(load_settings(overrides=[*data, *more]))
    for more in ([], [named, "teacher.path=b"], [named, "teacher.by_source.code.path=b"]):
        check_teacher_sources(load_settings(overrides=[*data, *more]))
    with pytest.raises(SettingsError, match=r"unknown key teacher\.by_source\.horizon\.pth"):
        load_settings(overrides=["teacher.by_source.horizon.pth=a"])


def test_the_ranks_of_a_launcher_check_the_teachers_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without the check, a source without a teacher would be trained with the probability 1 for every token."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "0")
    data = ["data.train=[{path: 'builtin:horizon'}]", "teacher.by_source.code.path=a", f"runs_dir={tmp_path}"]
    settings = load_settings(overrides=[*data, "cluster.kind=environment"])
    with pytest.raises(SettingsError, match=r"but data\.train has horizon: every source needs a teacher"):
        train(settings, resume=False)
    assert not any(tmp_path.iterdir())


def test_the_initial_policy_is_opened_once(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str | None] = []

    def open_one(teacher: TeacherSettings, *arguments: Any, **options: Any) -> object:
        opened.append(teacher.path)
        return object.__new__(ServedTeacher)

    monkeypatch.setattr(reference_and_critic, "_open_teacher", open_one)
    teacher = {"hint": "{answer}", "objective": "sampled", "by_source": {"a": {"path": "p"}, "b": {"path": "q"}}}
    settings = load_settings().model_copy(update={"teacher": TeacherSettings(**teacher)})
    monkeypatch.setattr(ServedTeacher, "needs_full_distribution", False, raising=False)
    open_teachers(settings, cast(Any, None), initial="p")
    assert opened == ["p", "q"]


def test_one_log_probability_suffices_for_the_sampled_form(server: TeacherServer) -> None:
    batch = Batch.from_micro_batch(MicroBatch.from_trajectories(ROWS))
    here, _ = frozen_policy(tiny_model(), temperature=1.0).score_batch(batch)
    there, head = served(server, objective="sampled").score_batch(batch)
    torch.testing.assert_close(there, here, rtol=0, atol=1e-5)
    assert head is None
    assert {request["prompt_logprobs"] for request in server.requests} == {0}


def test_a_server_may_list_tokens_that_the_policy_lacks(server: TeacherServer) -> None:
    """The teacher's vocabulary may be padded further: such tokens count among the others."""
    batch = Batch.from_micro_batch(MicroBatch.from_trajectories(ROWS))
    settings = TeacherSettings(url=server.url, path="teacher")
    _, all_tokens = ServedTeacher(settings, refused_ids={}).score_batch(batch)
    _, head = ServedTeacher(settings, refused_ids={}, vocabulary=200).score_batch(batch)
    assert int(all_tokens.ids.max()) >= 200 > int(head.ids.max())
    assert 0 < head.ids.shape[1] < 20  # equally many for all tokens
    known = all_tokens.ids < 200
    for row in range(len(head.ids)):
        assert all_tokens.ids[row][known[row]].tolist()[: head.ids.shape[1]] == head.ids[row].tolist()
        torch.testing.assert_close(all_tokens.log_probs[row][known[row]][: head.ids.shape[1]], head.log_probs[row])


def test_a_server_that_is_gone_or_shows_too_few_tokens_is_named(server: TeacherServer) -> None:
    batch = Batch.from_micro_batch(MicroBatch.from_trajectories(ROWS))
    with pytest.raises(WorldError, match=r"the teacher t at http://127.0.0.1:9/v1 cannot score trajectories"):
        ServedTeacher(TeacherSettings(url="http://127.0.0.1:9/v1", path="t"), refused_ids={}, deadline=0.1).score_batch(
            batch
        )
    with pytest.raises(InvalidResponseError, match="expected 3 log-probabilities for each of 2 tokens"):
        parse_score_response({"choices": [{"prompt_logprobs": [None, {"5": {"logprob": -1.0}}]}]}, [4, 5], 3)
    with pytest.raises(InvalidResponseError, match=r"expected choices\.0\.prompt_logprobs; got \{\}"):
        parse_score_response({}, [4, 5], 3)


def test_an_id_that_means_something_else_to_the_teacher_is_refused_when_it_occurs() -> None:
    batch = Batch.from_micro_batch(MicroBatch.from_trajectories(ROWS))
    for refused, occurs in ((41, True), (99, False)):
        teacher = frozen_policy(tiny_model(), temperature=1.0, refused_ids={refused: "id differs"})
        if occurs:
            with pytest.raises(SettingsError, match="id differs"):
                teacher.score_batch(batch)
        else:
            teacher.score_batch(batch)


def test_the_padding_of_a_row_that_ranks_share_is_no_token() -> None:
    """The padding has the id 0, which may be a special token that differs."""
    batch = Batch.from_micro_batch(MicroBatch.from_trajectories(ROWS), multiple=16)
    assert 0 in batch.row.token_ids
    frozen_policy(tiny_model(), temperature=1.0, refused_ids={0: "id differs"}).score_batch(batch)
    last = int(batch.row.token_ids[batch.row.token_ids > 0][-1])
    teacher = frozen_policy(tiny_model(), temperature=1.0, refused_ids={last: "id differs"})
    with pytest.raises(SettingsError, match="id differs"):
        teacher.score_batch(batch)


def test_hints_that_cannot_be_read() -> None:
    with pytest.raises(SettingsError, match=r"teacher\.hint .*is not a template .*write \{\{ and \}\}"):
        load_settings(overrides=["teacher.hint='{answer'"])
    for hint in ("{}", "{0}", "{answer:d}", "{answer!r}", "{answer.x}", "{answer[a]}"):
        with pytest.raises(
            SettingsError, match=r"teacher\.hint .*may contain only column names in braces, such as \{answer\}"
        ):
            load_settings(overrides=[f"teacher.hint='{hint}'"])


def test_a_server_needs_a_name_and_the_whole_distribution_at_temperature_1() -> None:
    url = ["teacher.url=http://127.0.0.1:1/v1", "teacher.path=t"]
    load_settings(overrides=url)
    with pytest.raises(SettingsError, match=r"teacher\.url requires teacher\.path"):
        load_settings(overrides=url[:1])
    for more in ("rollout.temperature=0.7", "rollout.top_k=5"):
        with pytest.raises(SettingsError, match="servers score at temperature 1 and over the whole vocabulary"):
            load_settings(overrides=[*url, more])
