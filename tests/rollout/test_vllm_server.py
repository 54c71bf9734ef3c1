"""A real vLLM server on the CPU against the model of transformers: log-probabilities, changing weights, stale weights.

One server for all tests, started by ``agentrl serve-policy``.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import random
import re
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from rollout.fakes import played
from torch import Tensor
from warm import LIBRARIES, WarmPopen, run_warm

from agentrl.algorithms import kl_penalty
from agentrl.batch import Batch, MicroBatch, scatter_tokens
from agentrl.config import load_settings
from agentrl.models.loading import build_tiny_model, read_model, train_tokenizer, write_model
from agentrl.models.policy import FrozenTopTokens, PolicyModel
from agentrl.models.settings import ModelSettings, TinyModelSettings
from agentrl.models.tokenizer import TextCodec, read_tokenizer
from agentrl.rollout.engines.base import Completion, EngineSpecification, Sampling
from agentrl.rollout.engines.sampling import restrict_to_likely_tokens
from agentrl.rollout.engines.server_pool import ServerEngine
from agentrl.rollout.engines.transformers import TransformersEngine
from agentrl.rollout.engines.vllm.engine import ManagedVLLM
from agentrl.rollout.engines.vllm.replica import VLLMClient
from agentrl.rollout.settings import longest_request_tokens
from agentrl.training.settings import TeacherSettings
from agentrl.training.step.reference_and_critic import FrozenPolicy
from agentrl.training.step.served_teacher import ServedTeacher
from agentrl.trajectory import Segment
from agentrl.weights.exports import write_export
from agentrl.weights.sources import ParameterSource
from agentrl.weights.verify import Probe

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("vllm_here"), pytest.mark.xdist_group("vllm")]

START = 900.0
PROBE = tuple(random.Random(1).randrange(300) for _ in range(64))
FLOAT32 = ModelSettings(dtype="float32")
LENGTHS = ["rollout.max_prompt_tokens=300", "rollout.max_turn_tokens=600", "rollout.max_response_tokens=700"]
LENGTHS += ["model.dtype=float32", "rollout.engine=vllm"]


@pytest.fixture(scope="session")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An untrained policy with tied embeddings."""
    settings = TinyModelSettings(vocabulary_size=300, hidden_size=64, layers=2, heads=2, intermediate_size=48)
    tokenizer = train_tokenizer(["1 + 1 = 2\n"], vocabulary_size=300)
    folder = tmp_path_factory.mktemp("served") / "policy"
    model = build_tiny_model(settings, tokenizer, seed=5)
    write_model(folder, model=model, tokenizer=tokenizer, title="random", body="Untrained.")
    return folder


@contextmanager
def serving(policy: Path, said: Path, *overrides: str) -> Iterator[str]:
    """Where ``agentrl serve-policy`` serves the policy; ``said``: the file of its output."""
    command = [sys.executable, "-m", "agentrl.cli", "serve-policy", "--model", str(policy), *LENGTHS, *overrides]
    own = {"OMP_NUM_THREADS": "1", LIBRARIES: "vllm"}
    with said.open("w") as file:
        process = WarmPopen(command, stdout=file, stderr=file, env=os.environ | own)
    try:
        deadline = time.monotonic() + START
        while (found := re.search(r"serving \S+ at (http://\S+)", said.read_text())) is None:
            assert process.poll() is None, said.read_text()
            assert time.monotonic() < deadline, said.read_text()
            time.sleep(0.2)
        yield found[1]
    finally:
        process.terminate()
        process.wait(60)


@pytest.fixture(scope="session")
def address(policy: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with serving(policy, tmp_path_factory.mktemp("serve") / "said") as found:
        yield found


def codec_of(policy: Path) -> TextCodec:
    return TextCodec(read_tokenizer(policy))


def managed_of(policy: Path, address: str, *overrides: str) -> ManagedVLLM:
    settings = load_settings(
        None,
        None,
        [f"model.path={policy}", *LENGTHS, "rollout.vllm.placement=external", f"rollout.vllm.addresses=[{address}]",
         *overrides],
        command="eval",
    )  # fmt: skip
    request = EngineSpecification(
        rollout=settings.rollout,
        policy=settings.model,
        policy_path=str(policy),
        codec=codec_of(policy),
        longest=longest_request_tokens(settings.rollout, None),
        folder=policy.parent,
    )
    return ManagedVLLM(request)


@torch.inference_mode()
def teacher_forced(model: Any, prompt: tuple[int, ...], sampled: tuple[int, ...], temperature: float) -> list[float]:
    ids = torch.tensor([prompt + sampled])
    logits = model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1].double() / temperature
    return torch.log_softmax(logits, dim=-1).gather(1, ids[0, len(prompt) :, None])[:, 0].tolist()


def largest_difference(one: list[float], other: tuple[float, ...]) -> float:
    return max(abs(a - b) for a, b in zip(one, other, strict=True))


async def turn(
    engine: ServerEngine, context: tuple[int, ...], name: str, *, seed: int = 1, **sampling: Any
) -> Completion:
    return await engine.generate(
        context,
        Sampling(**{"max_tokens": 24, **sampling}),
        trajectory_id=name,
        request_id=name,
        seed=seed,
    )


async def converse(engine: ServerEngine, model: Any, number: int) -> None:
    """Three turns with observations between, each compared with the plain forward of the exact tokens."""
    numbers = random.Random(number)
    temperature = (0.6, 1.0, 1.4)[number % 3]
    context = tuple(numbers.randrange(1, 300) for _ in range(numbers.randint(1, 200)))
    for _ in range(3):
        answer = await turn(engine, context, f"t{number}", seed=number, temperature=temperature)
        expected = teacher_forced(model, context, answer.token_ids, temperature)
        assert largest_difference(expected, answer.log_probs) < 1e-4
        context += answer.token_ids + tuple(numbers.randrange(1, 300) for _ in range(numbers.randint(0, 20)))
    engine.release(f"t{number}")


async def check_support(engine: ServerEngine, model: Any) -> None:
    """Check that the server lists the tokens of the restricted distribution, and samples only from them."""
    limits = {"top_k": 8, "top_p": 0.9, "min_p": 0.01}
    prompt = (5, 6, 7)
    answer = await turn(engine, prompt, "restricted", temperature=0.8, returns_support=True, **limits)
    ids = torch.tensor([prompt + answer.token_ids])
    with torch.inference_mode():
        rows = torch.log_softmax(model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1] / 0.8, dim=-1)
    expected = restrict_to_likely_tokens(
        rows, **{f"{name}s": torch.full((len(rows),), value) for name, value in limits.items()}
    )
    sizes, listed = answer.support_sizes, iter(answer.support_ids)
    for row, token, log_prob, size in zip(expected, answer.token_ids, answer.log_probs, sizes, strict=True):
        assert {next(listed) for _ in range(size)} == {*(row > -torch.inf).nonzero()[:, 0].tolist()}
        assert abs(float(row[token]) - log_prob) < 1e-4


def test_an_evaluation_samples_from_the_server_and_says_so(policy: Path, address: str, tmp_path: Path) -> None:
    """The first test: the server still holds the policy it was started with. A random policy scores exactly 0."""
    rows = [{"id": f"q{place}", "problem": f"{place} + 1?", "answer": "impossible"} for place in range(3)]
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = [sys.executable, "-m", "agentrl.cli", "eval", "--model", str(policy), "--n", "2", "--output", "out"]
    command += ["--benchmarks", "sums.jsonl", "model.dtype=float32", "environment.max_turns=2", "rollout.engine=vllm"]
    command += ["rollout.vllm.placement=external", f"rollout.vllm.addresses=[{address}]"]
    command += ["rollout.max_prompt_tokens=500", "evaluation.max_turn_tokens=40", "evaluation.max_response_tokens=200"]
    asked = requests_of(address)
    done = run_warm(command, cwd=tmp_path, timeout=START)
    assert done.returncode == 0, done.stdout
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    engine = results["provenance"]["engine"]
    assert (engine["name"], engine["version"][:4], engine["dtype"]) == ("vllm", "0.32", "float32")
    assert results["benchmarks"]["sums"]["avg"]["mean"] == 0.0
    assert results["benchmarks"]["sums"]["rollouts"] == 6
    assert (tmp_path / "out" / "report.html").is_file()
    assert requests_of(address) >= asked + 6


@pytest.mark.parametrize("objective", ["reverse_kl", "forward_kl", "jsd", "sampled"])
def test_a_served_teacher_gives_the_gradient_of_a_local_one(policy: Path, address: str, objective: Any) -> None:
    """The local teacher's most likely tokens are taken from all its logits. The policy has other weights."""
    settings = TeacherSettings(url=f"{address}/v1", path="policy", objective=objective)
    random.seed(3)
    rows = []
    for turns in (1, 2, 3):
        segments = []
        for _ in range(turns):
            ids = tuple(random.randrange(300) for _ in range(12))
            given: Any = {"log_probs": (-1.0,) * 12, "version_spans": ((0, 12),)}
            segments += [Segment(origin="model", token_ids=ids, text="", **given)]
            segments += [Segment(origin="observation", token_ids=ids[:5], text="")]
        rows.append(played(prompt_ids=(1, 2, 3 + turns), segments=tuple(segments[:-1])))
    batch = Batch.from_micro_batch(MicroBatch.from_trajectories(rows))
    frozen = PolicyModel(read_model(policy, FLOAT32).requires_grad_(False).eval())
    local = FrozenPolicy(frozen, frozen, temperature=1.0, needs_full_distribution=True)
    here, head = local.score_batch(batch)
    assert head is not None
    top = (head.hidden @ head.weight.T).log_softmax(-1).topk(settings.top_tokens)
    listed = FrozenTopTokens(ids=top.indices, log_probs=top.values, beta=settings.resolved_beta)
    there, served = ServedTeacher(settings, refused_ids={}).score_batch(batch)
    tiny = TinyModelSettings(vocabulary_size=300, hidden_size=32, layers=2, heads=2, intermediate_size=48)
    student = PolicyModel(build_tiny_model(tiny, read_tokenizer(policy), seed=6))
    found = []
    for log_probs, distribution in ((here, listed if settings.needs_full_distribution else None), (there, served)):
        statistics, _ = student(batch.row, batch.rows, batch.columns, teacher=distribution)
        own = statistics.map(lambda values: scatter_tokens(values, batch.response_mask))
        full = own.teacher_divergence
        loss = kl_penalty(own.log_probs, log_probs, settings.estimator, mask=batch.response_mask, full=full).sum()
        gradients = torch.autograd.grad(loss, tuple(student.parameters()))
        found.append(torch.cat([gradient.flatten() for gradient in gradients]))
    assert float(found[0].norm()) > 0.1
    assert float((found[1] - found[0]).norm() / found[0].norm()) < 1e-5


def requests_of(address: str) -> float:
    """Requests that the server has finished in its life."""
    with urllib.request.urlopen(f"{address}/metrics") as answer:
        counts = re.findall(r"^vllm:request_success_total\{.*\} (\S+)", answer.read().decode(), re.MULTILINE)
    return sum(map(float, counts))


async def test_log_probabilities_are_those_of_transformers(policy: Path, address: str) -> None:
    model, host = read_model(policy, FLOAT32).eval(), managed_of(policy, address)
    reference = TransformersEngine(model, codec_of(policy), load_settings().rollout)
    engine = host.engine
    await engine.open()
    try:
        await asyncio.gather(*(converse(engine, model, number) for number in range(24)))
        await check_support(engine, model)
        served = await engine._servers[0].replica.score(PROBE, salt="x")
        assert largest_difference(list(await reference.score(PROBE)), served) < 1e-4
        assert (await engine.health()).startswith("vLLM 0.")
        again = [await turn(engine, (5, 6, 7), "again", seed=3) for _ in range(2)]
        assert again[0].token_ids == again[1].token_ids != (await turn(engine, (5, 6, 7), "again", seed=4)).token_ids
    finally:
        await engine.close()
        await reference.close()


async def test_the_branches_of_a_fork_use_the_cached_prefix(policy: Path, address: str) -> None:
    def cached_tokens() -> float:
        with urllib.request.urlopen(f"{address}/metrics") as answer:
            counts = re.findall(r"^vllm:prefix_cache_hits_total\{.*\} (\S+)", answer.read().decode(), re.MULTILINE)
        return sum(map(float, counts))

    engine = managed_of(policy, address).engine
    await engine.open()
    try:
        root = tuple(random.Random(7).randrange(1, 300) for _ in range(290))
        shared = root + (await turn(engine, root, "tree")).token_ids
        before = cached_tokens()
        branches = await asyncio.gather(*(turn(engine, shared, f"tree.{n}", seed=n) for n in range(4)))
        assert len({branch.token_ids for branch in branches}) == 4
        assert cached_tokens() - before >= 4 * 256  # whole blocks of up to 128 tokens
    finally:
        await engine.close()


async def test_its_count_of_tokens_grows_while_a_turn_is_sampled(policy: Path, address: str) -> None:
    """What tells a slow server from a dead one."""
    host = managed_of(policy, address)
    replica = VLLMClient(address, load_settings().rollout)
    await host.engine.open()
    try:
        deadline = time.monotonic() + 120
        for seed in itertools.count():  # a busy machine may answer the first poll only when the turn has ended
            before = await replica.count_computed_tokens()
            assert before is not None
            long = asyncio.create_task(turn(host.engine, (5, 6, 7), f"slow-{seed}", max_tokens=600, seed=seed))
            counts = {before}
            while not long.done():
                counts.add(await replica.count_computed_tokens() or 0)
            taken = len((await long).token_ids)
            counts.add(await replica.count_computed_tokens() or 0)
            assert max(counts) >= before + taken
            if len(counts) > 2:
                return
            assert time.monotonic() < deadline, "the count grew only when a turn had ended"
    finally:
        await replica.close()
        await host.engine.close()


async def test_a_turn_ends_behind_its_stop_string_with_all_that_was_sampled(policy: Path, address: str) -> None:
    codec, host = codec_of(policy), managed_of(policy, address)
    await host.engine.open()
    try:
        free = await turn(host.engine, (9, 9), "free", seed=11, max_tokens=200)
        text = codec.decode(free.token_ids[:60])
        stop = next(character for character in text[20:] if character.isascii() and character.isprintable())
        cut = await turn(host.engine, (9, 9), "cut", seed=11, max_tokens=200, stop=(stop,))
        assert (cut.finish_reason, cut.token_ids) == ("stop", free.token_ids[: len(cut.token_ids)])
        assert stop in codec.decode(cut.token_ids)
        assert stop not in codec.decode(cut.token_ids[:-1])
        ended = await turn(host.engine, (9, 9), "eos", seed=3, max_tokens=600)
        while ended.finish_reason != "eos":
            ended = await turn(host.engine, (9, 9), "eos", seed=len(ended.token_ids) + ended.token_ids[0])
        assert ended.token_ids[-1] == codec.eos_id
        assert codec.eos_id not in ended.token_ids[:-1]
    finally:
        await host.engine.close()


def changed(model: Any, seed: int) -> Any:
    """The model with other weights, its embeddings still tied."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    return model


async def probe_of(model: Any, codec: TextCodec) -> Probe:
    engine = TransformersEngine(model.eval(), codec, load_settings().rollout)
    scores = await engine.score(PROBE)
    await engine.close()
    source = ParameterSource(model)
    for _ in source:
        pass
    return Probe(token_ids=PROBE, log_probs=scores, checksums=source.checksums)


@pytest.mark.parametrize("kv", ["recomputed", "kept"])
async def test_weights_change_under_running_requests_and_are_verified(
    policy: Path, address: str, tmp_path: Path, kv: str
) -> None:
    codec, host = codec_of(policy), managed_of(policy, address, f"rollout.kv_on_update={kv}")
    await host.engine.open()
    try:
        old, new = changed(read_model(policy, FLOAT32), 1), changed(read_model(policy, FLOAT32), 2)
        probes = {id(model): await probe_of(model, codec) for model in (old, new)}

        async def install(model: Any, version: int) -> None:
            await host.pause()
            folder = write_export(tmp_path, model.named_parameters(), version)
            assert await host.install(str(folder), version, probes[id(model)]) is None

        prompt = (3, 4, 5)
        across: list[Completion] = []
        version = 8
        for wait in (0.1, 0.3, 0.2, 0.5, 0.05, 1.0, 2.0, 4.0):  # how fast the server is nobody knows
            version += 2
            await install(old, version)
            running = [
                asyncio.create_task(turn(host.engine, prompt, f"{version}-{seed}", max_tokens=600, seed=seed))
                for seed in range(16)
            ]
            await asyncio.sleep(wait)
            await install(new, version + 1)
            across = [answer for answer in await asyncio.gather(*running) if len(answer.version_spans) == 2]
            if across:
                break
        assert across, "every turn was over before the weights changed, or had not begun"
        tails = []
        for answer in across:
            assert [one for one, _ in answer.version_spans] == [version, version + 1]
            first = answer.version_spans[0][1]
            before = teacher_forced(old, prompt, answer.token_ids, 1.0)
            after = teacher_forced(new, prompt, answer.token_ids, 1.0)
            assert largest_difference(before[:first], answer.log_probs[:first]) < 1e-4
            tails.append(largest_difference(after[first:], answer.log_probs[first:]))
        # Kept keys and values are those of the old weights: neither policy alone gave what came after.
        assert (max(tails) < 1e-4) == (kv == "recomputed")
        fresh = await turn(host.engine, (3, 4, 5), "fresh", seed=9)
        assert largest_difference(teacher_forced(new, (3, 4, 5), fresh.token_ids, 1.0), fresh.log_probs) < 1e-4
    finally:
        await host.engine.close()


DOWN, GATE, UP = (f"model.layers.1.mlp.{part}_proj.weight" for part in ("down", "gate", "up"))


def stale(good: dict[str, Tensor], old: dict[str, Tensor]) -> dict[str, Tensor]:
    return good | {DOWN: old[DOWN]}


def missing(good: dict[str, Tensor], old: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in good.items() if name != DOWN}


def perturbed(good: dict[str, Tensor], old: dict[str, Tensor]) -> dict[str, Tensor]:
    return good | {DOWN: good[DOWN] * (1 + 1e-6)}


def swapped(good: dict[str, Tensor], old: dict[str, Tensor]) -> dict[str, Tensor]:
    return good | {GATE: good[UP], UP: good[GATE]}


def small_step(policy: Path) -> tuple[dict[str, Tensor], Any]:
    """The old weights, and a model that moved from them as far as Adam does in a step at a learning rate of 1e-6."""
    model = read_model(policy, FLOAT32)
    old = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    generator = torch.Generator().manual_seed(6)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1e-6 * torch.randn(parameter.shape, generator=generator).sign())
    return old, model


async def test_what_arrives_wrong_is_named_at_once_and_the_probe_alone_sees_little_of_it(
    policy: Path, address: str, tmp_path: Path
) -> None:
    codec, host = codec_of(policy), managed_of(policy, address)
    await host.engine.open()
    try:
        old, model = small_step(policy)
        good = {name: parameter.detach() for name, parameter in model.named_parameters()}
        before, after = await probe_of(read_model(policy, FLOAT32), codec), await probe_of(model, codec)
        assert len(after.checksums) == len(good) + 1  # the head too, which the server packed
        assert largest_difference(list(before.log_probs), after.log_probs) < 1e-3

        async def transfer(tensors: dict[str, Tensor], probe: Probe) -> str | None:
            await host.pause()
            return await host.install(str(write_export(tmp_path, tensors.items(), 20)), 20, probe)

        for damage, names in ((stale, [DOWN]), (perturbed, [DOWN]), (swapped, [GATE, UP]), (missing, [DOWN])):
            assert await transfer(old, before) is None
            said = await transfer(damage(good, old), after)
            wrong = f"{len(names)} of {len(after.checksums)} parameters differ from the trainer's: {', '.join(names)}"
            assert said == f"the vLLM server {address}: the checksums of {wrong}", damage
        assert await transfer(old, before) is None
        said = await transfer(old, after)  # nothing arrived
        assert said is not None
        assert f"{len(after.checksums)} of {len(after.checksums)} parameters differ from the trainer's" in said
        assert await transfer(good, after) is None

        alone = replace(after, checksums={})
        for damage in (stale, perturbed, missing):
            assert await transfer(damage(good, old), alone) is None, damage  # it cannot see one matrix's small change
        said = await transfer(swapped(good, old), alone)
        assert said is not None
        assert "differ from the trainer's by" in said
        assert await transfer(good, after) is None
    finally:
        await host.engine.close()


class Liar(BaseHTTPRequestHandler):
    """Passes everything on to a server but new weights, which it says have been loaded."""

    target = ""
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._answer(*self._pass_on(None))

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        self._answer(*((200, b"{}") if b"reload_weights" in body else self._pass_on(body)))

    def _pass_on(self, body: bytes | None) -> tuple[int, bytes]:
        request = urllib.request.Request(self.target + self.path, data=body, method=self.command)
        request.add_header("content-type", "application/json")
        try:
            with urllib.request.urlopen(request, timeout=START) as answer:
                return answer.status, answer.read()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read()

    def _answer(self, status: int, data: bytes) -> None:
        self.send_response(status)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""


@pytest.fixture
def liar(address: str) -> Iterator[str]:
    """The address of a server that takes no weights."""
    proxy = ThreadingHTTPServer(("127.0.0.1", 0), type("OneLiar", (Liar,), {"target": address}))
    proxy.daemon_threads = True
    thread = threading.Thread(target=proxy.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{proxy.server_address[1]}"
    proxy.shutdown()
    proxy.server_close()
    thread.join()


def test_a_server_that_new_weights_do_not_reach_ends_the_run(policy: Path, liar: str, tmp_path: Path) -> None:
    # The last test on the server, because it changes the weights.
    counting = Path(__file__).parent.parent / "training"
    lengths = ["rollout.max_prompt_tokens=300", "rollout.max_turn_tokens=12", "rollout.max_response_tokens=64"]
    done = run_warm(
        [
            *(sys.executable, "-m", "agentrl.cli", "train", "--env", "counting_env:CountingEnv", "name=stale"),
            *("environment.kwargs.tally=tally", "data.train.0.path=builtin:arithmetic", f"model.path={policy}"),
            *("model.dtype=float32", "optimizer.learning_rate=1e-2", "training.steps=3", "training.threads=1"),
            *("rollout.problems_per_step=2", "rollout.group_size=2", "algorithm.drop_zero_variance=false", *lengths),
            *("algorithm.entropy_coefficient=0.01", "evaluation.problems=1", "rollout.engine=vllm"),
            *("rollout.vllm.placement=external", f"rollout.vllm.addresses=[{liar}]"),
        ],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(counting), "OMP_NUM_THREADS": "1"},
        timeout=START,
    )
    said = re.sub(r"\s+", " ", done.stdout)
    assert done.returncode == 1, said
    unwritten = r"the checksums of \d+ of \d+ parameters differ from the trainer's: model.embed_tokens.weight"
    assert re.search(rf"transfer 1 of 2 for version \d failed: the vLLM server {liar}: {unwritten}", said), said
    assert re.search(r"error: the weights of version \d did not arrive in 2 transfers by file: ", said), said
    assert "Traceback" not in said
