"""A packed batch against the same rows padded, and against one row at a time, for each architecture."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from kernels.gpu_attention import stand_in
from models.architectures import build_tiny, write_tiny
from rollout.fakes import played
from torch import Tensor

from agentrl.batch import Batch, MicroBatch
from agentrl.errors import SettingsError
from agentrl.kernels import KernelInputError
from agentrl.kernels.attention import pack_padded
from agentrl.kernels.attention.backends import torch_varlen_attention
from agentrl.models import attention as attention_module
from agentrl.models.attention import (
    choose_packed_attention,
    document_length_where_attention_dominates,
    reason_too_long_to_pack,
    register_attention,
)
from agentrl.models.loading import enable_gradient_checkpointing, read_model, read_model_config_if_available
from agentrl.models.lora import add_adapters
from agentrl.models.policy import PolicyModel, ValueModel
from agentrl.models.settings import LoRASettings, ModelSettings
from agentrl.trajectory import Segment

WINDOWS = {"sliding_window": 3, "layer_types": ["sliding_attention", "full_attention"]}
MODELS: dict[str, dict[str, Any]] = {
    "qwen2": {},
    "qwen3": {},
    "llama": {},
    "mistral": {"sliding_window": 4},
    "gemma2": WINDOWS,
    "gemma3_text": WINDOWS,
    "gpt_oss": {},
    "granite_swa": {},
    "mimo_v2_flash": {},
}
EXPERTS = {"gpt_oss", "mimo_v2_flash"}


def conversation(draw: random.Random, prompt: tuple[int, ...]) -> Any:
    """Up to three turns with observations between, one of which may come last."""

    def tokens(most: int) -> tuple[int, ...]:
        return tuple(draw.randrange(250) for _ in range(draw.randint(1, most)))

    segments = []
    for _ in range(draw.randint(1, 3)):
        ids = tokens(6)
        given = {"log_probs": (-1.0,) * len(ids), "version_spans": ((0, len(ids)),)}
        segments.append(Segment(origin="model", token_ids=ids, text="", **given))
        segments.append(Segment(origin="observation", token_ids=tokens(3), text=""))
    return played(prompt_ids=prompt, segments=tuple(segments[: len(segments) - draw.randint(0, 1)]))


def conversations(seed: int, rows: int = 7) -> Batch:
    """Conversations over three prompts, some of which continue an earlier one."""
    draw = random.Random(seed)
    prompts = [tuple(draw.randrange(250) for _ in range(draw.randint(1, 9))) for _ in range(3)]
    made: list[Any] = []
    for _ in range(rows):
        prompt = draw.choice(prompts)
        if made and draw.random() < 0.5:
            earlier = draw.choice(made)
            prompt = (*earlier.prompt_ids, *earlier.response_ids[: draw.randint(1, len(earlier.response_ids))], 1, 2)
        made.append(conversation(draw, prompt))
    draw.shuffle(made)
    return Batch.from_micro_batch(MicroBatch.from_trajectories(made))


def plain_states(model: Any, batch: Batch, rows: slice) -> Tensor:
    """States before each model token of ``rows``, padded to the longest of them, without packing."""
    width = int((batch.prompt_lengths + batch.response_lengths)[rows].max())
    states = model.get_decoder()(input_ids=batch.input_ids[rows, :width], use_cache=False).last_hidden_state
    places, columns = batch.response_mask[rows].nonzero(as_tuple=True)
    return states[places, batch.prompt_lengths[rows][places] + columns - 1]


def gradients(model: Any, log_probs: Tensor, entropy: Tensor) -> dict[str, Tensor]:
    weights = torch.arange(len(log_probs)) % 5 - 2.0
    model.zero_grad()
    (log_probs * weights + 0.1 * entropy).sum().backward()
    return {name: value.grad.clone() for name, value in model.named_parameters() if value.grad is not None}


@pytest.mark.on_device
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("kind", MODELS)
def test_packed_is_padded_is_one_row_at_a_time(kind: str, checkpointing: bool) -> None:
    batch = conversations(seed=len(kind))
    model, plain = (build_tiny(kind, **MODELS[kind]).double().train() for _ in range(2))
    policy = PolicyModel(model)
    if checkpointing:
        enable_gradient_checkpointing(model)
    inputs = (batch.row, batch.rows, batch.columns)
    statistics, hidden = policy(*inputs, temperature=0.7, keep_hidden=True)
    found = gradients(model, statistics.log_probs, statistics.entropy)
    targets = batch.response_ids[batch.response_mask]
    rows = len(batch.input_ids)
    for parts in ([slice(0, rows)], [slice(row, row + 1) for row in range(rows)]):
        states = torch.cat([plain_states(plain, batch, part) for part in parts])
        table = torch.log_softmax(policy.head.logit_map(plain.get_output_embeddings()(states)) / 0.7, dim=-1)
        log_probs = table.gather(1, targets[:, None])[:, 0]
        entropy = -(table.exp() * table).sum(-1)
        # Norms and rotations are computed in float32 whatever the model's dtype.
        torch.testing.assert_close(hidden, states, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(statistics.log_probs, log_probs, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(statistics.entropy, entropy, rtol=1e-5, atol=1e-5)
        wanted = gradients(plain, log_probs, entropy)
        for name, gradient in wanted.items():
            own = found.get(name, found.get("lm_head.weight") if name.startswith("lm_head") else None)
            assert own is not None, name
            assert float((own - gradient).norm()) <= 1e-5 * float(gradient.norm()) + 1e-7, name


@pytest.mark.on_device
@pytest.mark.parametrize(("kind", "rank"), [*((kind, 0) for kind in MODELS), ("qwen3", 4)])
def test_shared_prefixes_have_the_gradient_of_separate_rows_in_float32(kind: str, rank: int) -> None:
    batch = conversations(seed=1, rows=9)
    tokens: dict[bool, int] = {}
    found: dict[bool, Tensor] = {}
    for shared in (True, False):
        model = add_adapters(build_tiny(kind, **MODELS[kind]), LoRASettings(rank=rank)).train()
        packed = pack_padded(batch.input_ids, batch.prompt_lengths, batch.response_mask, share_prefixes=shared)
        statistics, _ = PolicyModel(model)(*packed, temperature=0.7)
        tokens[shared] = len(packed[0].token_ids)
        values = gradients(model, statistics.log_probs, statistics.entropy).values()
        found[shared] = torch.cat([value.flatten() for value in values])
    assert tokens == {True: 101, False: 143}
    assert float((found[True] - found[False]).norm() / found[False].norm()) < 1e-6


@pytest.mark.on_device
@pytest.mark.parametrize("backend", ["flex", "flash"])
@pytest.mark.parametrize("kind", ["qwen3", "mistral", "gemma2", "gpt_oss", "mimo_v2_flash"])
def test_the_kernels_of_gpus_give_what_sdpa_gives_for_shared_prefixes(
    kind: str, backend: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(monkeypatch)
    batch = conversations(seed=6)
    changes = MODELS[kind] | ({"attn_logit_softcapping": 2.0} if kind == "gemma2" else {})
    found, wanted = (statistics_and_gradients(kind, changes, batch, way) for way in (backend, "sdpa"))
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        # Capped scores and norms go through float32.
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6, msg=name)


def statistics_and_gradients(kind: str, changes: dict[str, Any], batch: Batch, attention: Any) -> dict[str, Tensor]:
    """Compute statistics and gradients of a packed batch in which some documents share a prefix.

    Also compute the exact energies, which models with experts do not support.
    """
    model = build_tiny(kind, **changes).double().train()
    policy = PolicyModel(model, attention=attention)
    places = (batch.input_ids, batch.prompt_lengths, batch.response_mask)
    statistics, _ = policy(batch.row, batch.rows, batch.columns)
    found = {"log_probs": statistics.log_probs.detach(), "energy": statistics.energy.detach()}
    found |= gradients(model, statistics.log_probs, statistics.entropy)
    return found if kind in EXPERTS else found | {"exact energies": policy.trajectory_energies(*places)}


def ends(batch: Batch, row: int) -> bool:
    """Return True if no other document contains the path to the first response token of ``row``."""
    count = int(batch.prompt_lengths[row]) + 1
    return int((batch.input_ids[:, :count] == batch.input_ids[row, :count]).all(-1).sum()) == 1


@pytest.mark.on_device
@pytest.mark.parametrize("kind", sorted(MODELS.keys() - EXPERTS))  # an expert computes all of its tokens at once
def test_a_change_in_one_document_changes_no_other_by_one_bit(kind: str) -> None:
    batch = conversations(seed=3)
    policy = PolicyModel(build_tiny(kind, **MODELS[kind]))
    changed = next(row for row, length in enumerate(batch.response_lengths.tolist()) if length > 2 and ends(batch, row))
    owner = batch.response_mask.nonzero()[:, 0]

    def numbers(ids: Tensor) -> list[Tensor]:
        policy.zero_grad()
        packed = pack_padded(ids, batch.prompt_lengths, batch.response_mask)
        statistics, hidden = policy(*packed, temperature=0.7, keep_hidden=True)
        others = owner != changed
        statistics.log_probs[others].sum().backward()
        values = [statistics.log_probs, statistics.entropy, statistics.energy, hidden]
        return [value.detach()[others] for value in values] + [item.grad.clone() for item in policy.parameters()]

    before = numbers(batch.input_ids)
    ids = batch.input_ids.clone()
    start = int(batch.prompt_lengths[changed])
    ids[changed, start : start + 2] = (ids[changed, start : start + 2] + 1) % 250
    assert all(torch.equal(one, other) for one, other in zip(before, numbers(ids), strict=True))


POSITIONS: dict[str, dict[str, Any]] = {
    "dynamic": {"max_position_embeddings": 12, "rope_parameters": {"rope_type": "dynamic", "factor": 4.0}},
    "longrope": {
        "rope_parameters": {
            "rope_type": "longrope",
            "short_factor": [1.0] * 4,
            "long_factor": [2.0, 4.0, 8.0, 16.0],
            "original_max_position_embeddings": 12,
        }
    },
}
"""Rotary positions that change for a whole row where one of its sequences passes 12 tokens."""


def with_positions(kind: str) -> Any:
    changes = POSITIONS[kind]
    return build_tiny("llama", **changes | {"rope_parameters": {"rope_theta": 1e4} | changes["rope_parameters"]})


def statistics_of(policy: PolicyModel, lengths: list[int]) -> Tensor:
    """Log-probabilities of packed documents of these lengths with prompts of two."""
    ids = torch.arange(1, 1 + len(lengths) * max(lengths)).view(len(lengths), -1) % 250
    given = torch.tensor(lengths)
    mask = torch.arange(max(lengths) - 2) < given[:, None] - 2
    with torch.no_grad():
        statistics, _ = policy(*pack_padded(ids, torch.full((len(lengths),), 2), mask))
    return statistics.log_probs


@pytest.mark.parametrize("kind", POSITIONS)
def test_positions_that_change_with_the_longest_sequence_pack_up_to_where_they_change(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = PolicyModel(with_positions(kind))
    alone = statistics_of(policy, [12])
    torch.testing.assert_close(statistics_of(policy, [12, 5, 12])[:10], alone, rtol=1e-6, atol=1e-6)
    message = rf"beyond 12 tokens, the model's rotary embeddings \({kind}\) depend on the longest sequence"
    with pytest.raises(SettingsError, match=message):
        statistics_of(policy, [12, 14])
    critic = ValueModel(with_positions(kind))
    with pytest.raises(SettingsError, match=message):
        critic(pack_padded(torch.ones(1, 13, dtype=torch.int64), torch.tensor([2]), torch.ones(1, 11).bool())[0], 11)
    # What the refusal is for: without it a longer neighbour changes this one's numbers.
    monkeypatch.setattr(attention_module, "reason_too_long_to_pack", lambda config, longest: None)
    assert not torch.allclose(statistics_of(policy, [12, 14])[:10], alone, rtol=1e-2)


def test_the_refusal_names_what_would_work() -> None:
    dynamic, longrope = (with_positions(kind).config for kind in ("dynamic", "longrope"))
    assert reason_too_long_to_pack(dynamic, 12) is reason_too_long_to_pack(longrope, 12) is None
    valid = "lower the sum of rollout.max_prompt_tokens and rollout.max_response_tokens to 12"
    assert str(reason_too_long_to_pack(dynamic, 40)).endswith(valid)
    other = ", or use a copy of the model whose config.json sets short_factor to long_factor"
    assert str(reason_too_long_to_pack(longrope, 40)).endswith(valid + other)
    longrope.rope_parameters["short_factor"] = longrope.rope_parameters["long_factor"]
    assert reason_too_long_to_pack(longrope, 40) is None
    layers = build_tiny("gemma3_text").config
    layers.rope_parameters = {"full_attention": dynamic.rope_parameters, "sliding_attention": {}}
    assert reason_too_long_to_pack(layers, 256) is None
    assert "beyond 256 tokens, the model's rotary embeddings (dynamic)" in str(reason_too_long_to_pack(layers, 257))


@pytest.mark.on_device
def test_values_are_those_of_one_row_at_a_time() -> None:
    batch = conversations(seed=5)
    critic = ValueModel(build_tiny("qwen2").double())
    torch.nn.init.normal_(critic.value_head.weight)
    plain = build_tiny("qwen2").double().get_decoder()
    values = critic(batch.row, batch.response_mask.shape[1])
    assert values.shape == (7, batch.response_ids.shape[1] + 1)
    for row, (prompt, count) in enumerate(zip(batch.prompt_lengths, batch.response_lengths, strict=True)):
        states = plain(input_ids=batch.input_ids[row : row + 1, : prompt + count]).last_hidden_state[0, prompt - 1 :]
        wanted = critic.value_head(states).squeeze(-1)
        torch.testing.assert_close(values[row, : count + 1], wanted, rtol=1e-5, atol=1e-5)


def test_a_model_whose_layers_do_not_ask_for_attention_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    batch, policy = conversations(seed=1), PolicyModel(build_tiny("qwen2"))
    monkeypatch.setattr(
        policy.causal_lm.model.layers[1].self_attn, "forward", lambda hidden_states, **_: (hidden_states, None)
    )
    with pytest.raises(
        KernelInputError, match=r"Qwen2Model does not support packed documents: 1 attention modules .* 2 layers"
    ):
        policy(batch.row, batch.rows, batch.columns)


def test_a_layer_that_is_recomputed_without_its_row_raises() -> None:
    batch, model = conversations(seed=1), build_tiny("qwen2").train()
    policy = PolicyModel(model)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    statistics, _ = policy(batch.row, batch.rows, batch.columns)
    with pytest.raises(KernelInputError, match="enable_gradient_checkpointing"):
        statistics.log_probs.sum().backward()


def test_a_window_that_only_the_mask_has_is_refused() -> None:
    batch, policy = conversations(seed=1), PolicyModel(build_tiny("qwen2"))
    policy.causal_lm.config.layer_types = ["full_attention", "sliding_attention"]
    policy.causal_lm.config.sliding_window = 4
    policy.causal_lm.model.has_sliding_layers = True
    with pytest.raises(SettingsError, match="Qwen2Attention has a window of 4 but calls attention with None"):
        policy(batch.row, batch.rows, batch.columns)


def test_capped_scores_are_those_of_the_model_itself(tmp_path: Path) -> None:
    write_tiny(tmp_path, "gemma2", attn_logit_softcapping=2.0)
    model = read_model(tmp_path, ModelSettings(dtype="float32"))
    eager = build_tiny("gemma2", attention="eager", attn_logit_softcapping=2.0)
    batch = conversations(seed=2)
    ids = batch.input_ids[:1, : int(batch.prompt_lengths[0] + batch.response_lengths[0])]
    torch.testing.assert_close(model(input_ids=ids).logits, eager(input_ids=ids).logits, rtol=1e-5, atol=1e-5)
    inputs = (batch.row, batch.rows, batch.columns)
    _, hidden = PolicyModel(model)(*inputs, keep_hidden=True)
    states = torch.cat([plain_states(eager, batch, slice(row, row + 1)) for row in range(7)])
    torch.testing.assert_close(hidden, states, rtol=1e-4, atol=1e-4)


def test_cudnn_plans_no_attention() -> None:
    build_tiny("qwen2")
    register_attention()
    assert not torch.backends.cuda.cudnn_sdp_enabled()


def test_attention_is_chosen_by_machine_and_model(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, windows = build_tiny("qwen2").config, build_tiny("mistral", sliding_window=4).config
    capped = build_tiny("gemma2", attn_logit_softcapping=2.0).config

    def chosen(wanted: Any, config: Any = plain, dtype: str = "bfloat16") -> str:
        return choose_packed_attention(wanted, config, dtype=dtype)

    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert (chosen("auto"), chosen("auto", windows), chosen("sdpa")) == ("sdpa", "sdpa", "sdpa")
    for wanted in ("flex", "flash"):
        with pytest.raises(SettingsError, match=f"model.attention={wanted} needs a GPU; otherwise set model.attention"):
            chosen(wanted)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("agentrl.models.attention.varlen_attention_function", lambda: torch_varlen_attention)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda: (7, 5))
    assert (chosen("auto"), chosen("auto", windows), chosen("flex")) == ("sdpa", "flex", "flex")
    with pytest.raises(SettingsError, match=r"needs a GPU of compute capability 8\.0"):
        chosen("flash")
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda: (8, 0))  # by torch's varlen_attn
    assert (chosen("auto"), chosen("auto", windows), chosen("auto", capped)) == ("flash", "flash", "flex")
    with pytest.raises(SettingsError, match=r"needs the package flash-attn .*, because the model caps its scores"):
        chosen("flash", capped)
    monkeypatch.setattr(
        "agentrl.models.attention.varlen_attention_function", lambda: lambda *given: None
    )  # flash-attn's
    assert (chosen("auto"), chosen("auto", dtype="float32"), chosen("flash")) == ("flash", "sdpa", "flash")
    with pytest.raises(SettingsError, match=r"needs model\.dtype=bfloat16"):
        chosen("flash", dtype="float32")
    wide = build_tiny("qwen3", head_dim=512).config
    assert chosen("auto", wide) == "sdpa"
    with pytest.raises(SettingsError, match="supports heads of up to 256 dimensions, but the model's have 512"):
        chosen("flash", wide)


def test_attention_of_a_long_document_costs_as_much_as_everything_else() -> None:
    config = read_model_config_if_available(ModelSettings())
    # Four projections of 96 x 96 and three of 96 x 256 weights, attention over 96 dimensions.
    assert document_length_where_attention_dominates(config) == (4 * 96 * 96 + 3 * 96 * 256) / 96
