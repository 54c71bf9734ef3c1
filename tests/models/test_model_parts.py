"""What a model does between its transformer and its logits: in the fused head, in the engine, or refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from models.architectures import SHAPES, build_tiny
from rollout.fakes import byte_codec, played

from agentrl.algorithms import HeadVarianceAccumulator, kl_penalty
from agentrl.batch import Batch, MicroBatch, scatter_tokens
from agentrl.errors import SettingsError
from agentrl.kernels import TokenStatistics
from agentrl.models.lora import add_adapters, is_adapter_factor
from agentrl.models.model_parts import LogitMap, split_model
from agentrl.models.policy import FrozenHead, PolicyModel, ValueModel
from agentrl.models.settings import LoRASettings
from agentrl.rollout.engines.base import Sampling
from agentrl.rollout.engines.transformers import TransformersEngine
from agentrl.rollout.settings import RolloutSettings
from agentrl.training.settings import TeacherSettings
from agentrl.training.step.reference_and_critic import FrozenPolicy
from agentrl.trajectory import Segment

TEMPERATURE = 0.7
KINDS = sorted(SHAPES)
# Without OPT and models with sliding windows, which the engine refuses.
SAMPLED_KINDS = [kind for kind in KINDS if kind != "opt" and SHAPES[kind].get("sliding_window") is None]
ROWS = [((1, 2, 3), (4, 5, 40, 41, 6)), ((7, 8), (9, 10)), ((1, 2, 3), (11, 12, 13))]


def batch() -> Batch:
    def segment(ids: tuple[int, ...]) -> Segment:
        return Segment(
            origin="model", token_ids=ids, text="", log_probs=(-1.0,) * len(ids), version_spans=((0, len(ids)),)
        )

    rows = [played(prompt_ids=prompt, segments=(segment(response),)) for prompt, response in ROWS]
    return Batch.from_micro_batch(MicroBatch.from_trajectories(rows))


def forward_inputs() -> tuple[torch.Tensor, ...]:
    data = batch()
    return data.row, data.rows, data.columns


def plain(model: Any, temperature: float = TEMPERATURE) -> tuple[torch.Tensor, torch.Tensor]:
    """(ln p [N, V] by the model's own logits, targets [N])."""
    rows = []
    for prompt, response in ROWS:
        logits = model(input_ids=torch.tensor([prompt + response]), use_cache=False).logits[0]
        rows.append(torch.log_softmax(logits[len(prompt) - 1 : -1] / temperature, dim=-1))
    return torch.cat(rows), torch.tensor([token for _, response in ROWS for token in response])


def gradients(value: torch.Tensor, model: Any) -> dict[str, torch.Tensor]:
    learned = [(name, item) for name, item in model.named_parameters() if item.requires_grad]
    names, parameters = zip(*learned, strict=True)
    found = torch.autograd.grad(value, parameters, allow_unused=True)
    return {name: grad for name, grad in zip(names, found, strict=True) if grad is not None}


@torch.no_grad()
def test_logits_of_half_precision_weights_are_not_rounded() -> None:
    model = build_tiny("qwen2").bfloat16()
    parts = split_model(model)
    hidden = torch.randn(2, 3, parts.head.in_features, generator=torch.Generator().manual_seed(0)).bfloat16()
    exact = hidden.double() @ parts.head.weight.double().T
    torch.testing.assert_close(parts.logits(hidden), exact.float(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("backend", ["chunked", "reference"])
@pytest.mark.parametrize("kind", KINDS)
def test_statistics_and_gradients_are_those_of_the_models_own_softmax(kind: str, backend: Any) -> None:
    model = build_tiny(kind)
    log_p, targets = plain(model)
    own = log_p.gather(1, targets[:, None])[:, 0]
    entropy = -(log_p.exp() * log_p).sum(-1)
    weights = torch.arange(len(targets)) % 3 - 1.2
    wanted = gradients((own * weights + 0.3 * entropy).sum(), model)

    policy = PolicyModel(model, backend=backend)
    statistics, _ = policy(*forward_inputs(), temperature=TEMPERATURE)
    torch.testing.assert_close(statistics.log_probs, own, rtol=0, atol=1e-5)
    torch.testing.assert_close(statistics.entropy, entropy, rtol=0, atol=1e-5)
    torch.testing.assert_close(statistics.sum_pi_squared, (2 * log_p).exp().sum(-1), rtol=0, atol=1e-5)
    found = gradients((statistics.log_probs * weights + 0.3 * statistics.entropy).sum(), model)
    torch.testing.assert_close(found, wanted, rtol=1e-3, atol=2e-4)
    log_p_again, _ = plain(model)
    # Not bitwise: the model keeps the attention function of the policy, whose sums of sinks have another order.
    message = "the fused head changed the model's own logits"
    torch.testing.assert_close(log_p_again, log_p, rtol=1e-5, atol=1e-5, msg=message)


@pytest.mark.parametrize("kind", KINDS)
def test_head_exact_energy_is_the_squared_gradient_norm_of_the_heads_weight(kind: str) -> None:
    # The energy leaves out 1 / tau^2 and the scale's square, which all tokens share.
    model = build_tiny(kind, tie_word_embeddings=False)
    head = model.get_output_embeddings()
    log_p, targets = plain(model)
    wanted = [
        float(torch.autograd.grad(row[target], head.weight, retain_graph=True)[0].square().sum())
        for row, target in zip(log_p, targets, strict=True)
    ]
    statistics, _ = PolicyModel(model)(*forward_inputs(), temperature=TEMPERATURE)
    found = (
        statistics.energy
        * statistics.hidden_norm_squared
        / split_model(model).logit_map.head_temperature(TEMPERATURE) ** 2
    )
    torch.testing.assert_close(found, torch.tensor(wanted), rtol=2e-4, atol=1e-6)


@pytest.mark.parametrize("kind", ["qwen2", "granite", "gemma2"])
def test_the_head_exact_monitor_measures_the_gradient_of_the_models_own_head(kind: str) -> None:
    model = build_tiny(kind, tie_word_embeddings=False)
    policy = PolicyModel(model)
    statistics, hidden = policy(*forward_inputs(), temperature=TEMPERATURE, keep_hidden=True)
    done = policy.head.logit_map
    monitor = HeadVarianceAccumulator(
        policy.head.weight, temperature=done.head_temperature(TEMPERATURE), cap=done.output_cap
    )
    mask = batch().response_mask
    rows = mask.nonzero()[:, 0]
    advantages = torch.linspace(-1, 2, len(rows))
    targets = torch.tensor([token for _, response in ROWS for token in response])
    monitor.update(hidden=hidden, targets=targets, advantages=advantages, rows=rows, groups=torch.zeros(3).long())
    (gradient,) = torch.autograd.grad((statistics.log_probs * advantages).sum() / 3, policy.head.weight)
    assert monitor.result().power == pytest.approx(float(gradient.double().square().sum()), rel=1e-4)


@pytest.mark.parametrize(("kind", "other"), [("gemma2", "qwen2"), ("granite", "cohere"), ("qwen2", "gemma3_text")])
def test_the_divergence_is_between_the_models_own_softmaxes(kind: str, other: str) -> None:
    model, reference = build_tiny(kind), build_tiny(other, seed=1)
    log_p, _ = plain(model)
    log_q = plain(reference)[0].detach()
    divergence = (log_p.exp() * (log_p - log_q)).sum(-1)
    wanted = gradients(divergence.sum(), model)
    second = PolicyModel(reference)
    _, hidden = second(*forward_inputs(), temperature=TEMPERATURE, keep_hidden=True)
    head = FrozenHead(hidden=hidden, weight=second.head.weight.detach(), bias=None, logit_map=second.head.logit_map)
    statistics, _ = PolicyModel(model)(*forward_inputs(), temperature=TEMPERATURE, reference=head)
    torch.testing.assert_close(statistics.full_kl, divergence, rtol=1e-4, atol=1e-5)
    found = gradients(statistics.full_kl.sum(), model)
    torch.testing.assert_close(found, wanted, rtol=1e-3, atol=2e-4)


@pytest.mark.parametrize("objective", ["reverse_kl", "forward_kl", "jsd", "sampled"])
@pytest.mark.parametrize(
    ("kind", "adapted"),
    [(kind, False) for kind in ("qwen2", "qwen3", "llama", "gemma2", "granite", "gpt2")]
    + [("qwen2", True), ("gemma2", True)],
)
def test_every_divergence_from_a_teacher_has_the_gradient_of_the_full_logits(
    kind: str, adapted: bool, objective: Any
) -> None:
    """In float64, except for the norms: in float32, plain autograd itself is up to 3e-5 from the exact gradient."""
    settings = TeacherSettings(objective=objective, beta=0.3)
    model, other = build_tiny(kind).double(), build_tiny(kind, seed=1).double()
    if adapted:
        add_adapters(model, LoRASettings(rank=2))
        for name, item in model.named_parameters():
            if is_adapter_factor(name):
                torch.nn.init.normal_(item, std=0.1, generator=torch.Generator().manual_seed(len(name)))
    (log_p, targets), log_q = plain(model), plain(other, 1.1)[0].detach()
    p, q = log_p.exp(), log_q.exp()
    mixture = 0.3 * q + 0.7 * p
    own, others = (values.gather(1, targets[:, None])[:, 0] for values in (log_p, log_q))
    exact = {
        "reverse_kl": p * (p / q).log(),
        "forward_kl": q * (q / p).log(),
        "jsd": 0.3 * q * (q / mixture).log() + 0.7 * p * (p / mixture).log(),
        "sampled": (own - others).detach() * own,
    }
    wanted = gradients(exact[objective].sum(), model)
    frozen = PolicyModel(other.requires_grad_(False))
    teacher = FrozenPolicy(
        frozen,
        frozen,
        temperature=1.1,
        needs_full_distribution=settings.needs_full_distribution,
        beta=settings.resolved_beta,
    )
    data = batch()
    log_probs, head = teacher.score_batch(data)
    statistics, _ = PolicyModel(model)(*forward_inputs(), temperature=TEMPERATURE, teacher=head)
    found = gradients(penalty(statistics, log_probs, settings, data), model)
    apart = sum(float((found[name] - wanted[name]).double().square().sum()) for name in wanted)
    assert found.keys() == wanted.keys()
    assert (apart / sum(float(value.double().square().sum()) for value in wanted.values())) ** 0.5 < 1e-6


def penalty(
    statistics: TokenStatistics, log_probs: torch.Tensor, settings: TeacherSettings, data: Batch
) -> torch.Tensor:
    """The teacher's term of the loss on tokens that the policy has just sampled."""
    values = statistics.map(lambda value: scatter_tokens(value, data.response_mask))
    full = values.teacher_divergence
    return kl_penalty(values.log_probs, log_probs, settings.estimator, mask=data.response_mask, full=full).sum()


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("kind", SAMPLED_KINDS)
async def test_what_the_engine_says_is_what_training_says(kind: str, attention: Any) -> None:
    model = build_tiny(kind, attention=attention)
    engine = TransformersEngine(model, byte_codec(), RolloutSettings(kv_cache_tokens=4096))
    sampling = Sampling(temperature=TEMPERATURE, max_tokens=6)
    log_probs, responses = [], []
    try:
        for row, (prompt, _) in enumerate(ROWS):
            answer = await engine.generate(prompt, sampling, trajectory_id=str(row), request_id=str(row), seed=row)
            responses.append(answer.token_ids)
            log_probs.extend(answer.log_probs)
        scores = await engine.score(ROWS[0][0] + ROWS[0][1])
    finally:
        await engine.close()
    rows = []
    for (prompt, _), response in zip(ROWS, responses, strict=True):
        logits = model(input_ids=torch.tensor([prompt + response]), use_cache=False).logits[0, len(prompt) - 1 : -1]
        log_p = torch.log_softmax(logits / TEMPERATURE, dim=-1)
        rows.extend(log_p[range(len(response)), response].tolist())
    assert log_probs == pytest.approx(rows, abs=1e-5)
    ids = torch.tensor([ROWS[0][0] + ROWS[0][1]])
    whole = torch.log_softmax(model(input_ids=ids, use_cache=False).logits[0, :-1], dim=-1)
    assert scores == pytest.approx(whole.gather(1, ids[0, 1:, None])[:, 0].tolist(), abs=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_a_critic_stands_on_any_of_them(kind: str) -> None:
    data = batch()
    critic = ValueModel(build_tiny(kind))
    values = critic(data.row, 5)
    assert values.shape == (3, 6)
    values.sum().backward()


def test_a_map_is_a_temperature_and_a_cap_of_the_heads_output() -> None:
    done = LogitMap(scale=0.25, cap=3.0)
    output = torch.tensor([-40.0, -3.0, 0.1, 12.0])
    by_parts = done.output_cap * torch.tanh(output / done.output_cap) / done.head_temperature(0.7)
    torch.testing.assert_close(done(output) / 0.7, by_parts)
    assert LogitMap()(output) is output


@pytest.mark.parametrize("half", [False, True])
def test_what_else_a_model_does_is_refused_by_name(half: bool) -> None:
    def model(**more: Any) -> Any:
        made = build_tiny("qwen2", **more)
        return made.bfloat16() if half else made

    def also(change: Any) -> Any:
        made = model()
        inner = made.forward

        def forward(**inputs: Any) -> Any:
            result = inner(**inputs)
            result.logits = change(result.logits)
            return result

        made.forward = forward
        return made

    for change in (lambda x: x * 1.01, lambda x: 30 * torch.tanh(x / 30), lambda x: x + 0.1, lambda x: x[..., :-1]):
        with pytest.raises(SettingsError, match=r"Qwen2ForCausalLM changes its head's output.*final_logit_softcapping"):
            PolicyModel(also(change))
    split_model(also(lambda x: x))

    declared = model(logits_scaling=2.0)  # says so and does not
    with pytest.raises(SettingsError, match="Qwen2ForCausalLM changes its head's output"):
        split_model(declared)

    states = model()
    inner = states.model.forward
    states.lm_head.register_forward_pre_hook(lambda module, inputs: (inputs[0] * 2,))
    with pytest.raises(SettingsError, match="changes the hidden states between its transformer and its head"):
        split_model(states)
    assert states.model.forward == inner

    more = model()
    more.model.register_forward_pre_hook(
        lambda module, args, kwargs: (args, kwargs | {"token_type_ids": torch.zeros(1, 3)}), with_kwargs=True
    )
    with pytest.raises(SettingsError, match="passes more than token ids to its transformer"):
        split_model(more)

    with pytest.raises(SettingsError, match="GPT2Model is not a causal language model"):
        split_model(build_tiny("gpt2").transformer)
    with pytest.raises(SettingsError, match=r"multiplies its head's output by -0\.5"):
        split_model(build_tiny("cohere", logit_scale=-0.5))


def test_the_check_reads_no_weight() -> None:
    with torch.device("meta"):
        model = build_tiny("granite")
    model.get_output_embeddings().to_empty(device="cpu")
    assert split_model(model).logit_map == LogitMap(scale=1 / 8)
