"""trajectory_energies against one backward pass a trajectory, with plain autograd and the full logits."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from kernels.cases import seeded
from torch import Tensor, nn

from agentrl.kernels import KernelInputError, exact_energies, layer_energies, trajectory_energies
from agentrl.models.loading import enable_gradient_checkpointing
from agentrl.models.policy import PolicyModel

pytestmark = pytest.mark.on_device

VOCABULARY = 37
WIDTH = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 4, "num_hidden_layers": 2}
PAD = 5


def make_model(kind: str = "qwen2", *, dtype: torch.dtype = torch.float64, tied: bool = True, **more: Any) -> Any:
    """A random model with two key-value heads; biases and norms are drawn, so that no term vanishes."""
    from transformers import AutoConfig, AutoModelForCausalLM

    own: dict[str, Any] = {"vocab_size": VOCABULARY, "num_key_value_heads": 2, "tie_word_embeddings": tied, **WIDTH}
    own |= {"max_position_embeddings": 64, "pad_token_id": None, "bos_token_id": None, "eos_token_id": None, **more}
    own |= {"head_dim": 6} if kind in ("qwen3", "gemma2") else {}
    torch.manual_seed(0)
    made = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **own)).to(dtype)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            spread = 0.3 if parameter.ndim > 1 else 0.5
            parameter.normal_(1.0 if "norm" in name else 0.0, spread)
    return made


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Rows of different lengths: token ids, which tokens count, their weights."""

    ids: tuple[tuple[int, ...], ...]
    counted: tuple[tuple[bool, ...], ...]
    weights: tuple[tuple[float, ...], ...]

    def padded(self, side: str = "right") -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(ids, counted, attended, weights), each [B, S]; weights are NaN wherever they must not be read."""
        width = max(map(len, self.ids))
        ids = torch.full((len(self.ids), width), PAD)
        counted, attended = torch.zeros_like(ids).bool(), torch.zeros_like(ids).bool()
        weights = torch.full(ids.shape, torch.nan, dtype=torch.float64)
        for row, tokens in enumerate(self.ids):
            place = slice(0, len(tokens)) if side == "right" else slice(width - len(tokens), width)
            ids[row, place] = torch.tensor(tokens)
            counted[row, place] = torch.tensor(self.counted[row])
            attended[row, place] = True
            weights[row, place] = torch.tensor(self.weights[row], dtype=torch.float64)
        return ids, counted, attended, torch.where(counted, weights, torch.nan)


def make_rows(lengths: tuple[int, ...] = (9, 14, 4, 11), seed: int = 1) -> Rows:
    """Prompts of two tokens, then model tokens with observations between; ids repeat, PAD occurs inside."""
    draw = seeded(seed)
    ids, counted, weights = [], [], []
    for length in lengths:
        tokens = torch.randint(0, 12, (length,), generator=draw).tolist()
        tokens[min(3, length - 1)] = PAD
        mask = (torch.rand(length, generator=draw) < 0.6).tolist()
        mask[0] = mask[1] = False
        mask[min(4, length - 1)] = True
        ids.append(tuple(tokens))
        counted.append(tuple(mask))
        weights.append(tuple((0.2 + 1.5 * torch.rand(length, generator=draw)).tolist()))
    return Rows(ids=tuple(ids), counted=tuple(counted), weights=tuple(weights))


def one_by_one(model: Any, rows: Rows, *, weighted: bool = False, temperature: float = 1.0) -> Tensor:
    """The definition: a forward and a backward of every row on its own, squares of all parameters' gradients."""
    energies = []
    parameters = [item for item in model.parameters() if item.requires_grad]
    for ids, counted, weights in zip(rows.ids, rows.counted, rows.weights, strict=True):
        logits = model(input_ids=torch.tensor([ids])).logits[0] / temperature
        log_p = torch.log_softmax(logits, dim=-1)
        total = log_p.sum() * 0
        for position, counts in enumerate(counted):
            if counts:
                factor = weights[position] if weighted else 1.0
                total = total + factor * log_p[position - 1, ids[position]]
        gradients = torch.autograd.grad(total, parameters)
        energies.append(sum(float(item.double().square().sum()) for item in gradients))
    return torch.tensor(energies, dtype=torch.float64)


def energies(model: Any, rows: Rows, *, side: str = "right", weighted: bool = False, **options: Any) -> Tensor:
    ids, counted, attended, weights = rows.padded(side)
    given = weights.to(next(model.parameters()).dtype) if weighted else None
    mask = attended if side == "left" else None
    result = trajectory_energies(model, ids, counted, attention_mask=mask, importance_weights=given, **options)
    assert result.shape == (len(rows.ids),)
    assert not result.requires_grad
    return result.double()


def packed_energies(policy: PolicyModel, rows: Rows, **options: Any) -> Tensor:
    """As :func:`energies`, weighted, of rows that the model reads as one without padding."""
    ids, counted, _, weights = rows.padded()
    lengths = torch.ones(len(ids), dtype=torch.int64)
    seen: list[int] = []
    handle = policy.backbone.layers[0].register_forward_pre_hook(lambda module, given: seen.append(given[0].shape))
    try:
        found = policy.trajectory_energies(ids, lengths, counted[:, 1:], importance_weights=weights[:, 1:], **options)
    finally:
        handle.remove()
    read = [max(place for place, counts in enumerate(row) if counts) for row in rows.counted]
    assert {shape[:2] for shape in seen} == {(1, sum(read))}  # and nothing after the last token that counts
    return found.double()


def assert_equal(found: Tensor, wanted: Tensor, relative: float = 1e-9) -> None:
    torch.testing.assert_close(found, wanted, rtol=relative, atol=0.0)


GRANITE = {"logits_scaling": 4.0, "embedding_multiplier": 3.0, "residual_multiplier": 0.6, "attention_multiplier": 0.4}
GEMMA = {"attn_logit_softcapping": None, "final_logit_softcapping": 2.0, "query_pre_attn_scalar": 6}


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize(
    ("kind", "more", "scale", "cap"),
    [("granite", GRANITE, 0.25, None), ("gemma2", GEMMA, 1.0, 2.0), ("mistral", {}, 1.0, None)],
)
@pytest.mark.parametrize("blocks", [1, 37 * 14], ids=["many-blocks", "one-block"])
def test_scaled_and_capped_logits_enter_by_the_chain_rule(
    kind: str, more: dict[str, Any], scale: float, cap: float | None, tied: bool, blocks: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(exact_energies, "_BLOCK_ELEMENTS", blocks * 10)
    rows = make_rows()
    model = make_model(kind, tied=tied, **more)
    wanted = one_by_one(model, rows, weighted=True, temperature=0.7)
    assert_equal(energies(model, rows, weighted=True, temperature=0.7 / scale, cap=cap), wanted)
    ids, counted, _, weights = rows.padded()
    found = PolicyModel(model).trajectory_energies(
        ids, torch.full((len(ids),), 1), counted[:, 1:], importance_weights=weights[:, 1:], temperature=0.7
    )
    assert_equal(found, wanted)


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("qwen2", {}),
        ("qwen2", {"tie_word_embeddings": True, "pad_token_id": PAD}),
        ("qwen3", {}),
        ("qwen3", {"attention_bias": True}),
        ("llama", {}),
        ("llama", {"attention_bias": True, "mlp_bias": True}),
    ],
    ids=["qwen2", "qwen2-padding-token", "qwen3", "qwen3-bias", "llama", "llama-bias"],
)
def test_equal_to_single_backward_passes(kind: str, more: dict[str, Any], tied: bool) -> None:
    rows = make_rows()
    model = make_model(kind, tied=tied, **{key: value for key, value in more.items() if key != "tie_word_embeddings"})
    wanted = one_by_one(model, rows, weighted=True, temperature=0.7)
    assert_equal(energies(model, rows, weighted=True, temperature=0.7), wanted)
    assert_equal(energies(model, rows), one_by_one(model, rows))
    policy = PolicyModel(model)
    assert_equal(packed_energies(policy, rows, temperature=0.7), wanted)
    equal_prompts = replace(rows, ids=tuple((*rows.ids[0][:3], *ids[3:]) for ids in rows.ids))
    assert_equal(packed_energies(policy, equal_prompts), one_by_one(model, equal_prompts, weighted=True))
    single = model.float()
    assert_equal(energies(single, rows), one_by_one(single, rows), 1e-4)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("kind", ["qwen2", "qwen3", "llama"])
def test_padding_on_either_side_adds_nothing(kind: str, attention: str, side: str) -> None:
    rows = make_rows()
    model = make_model(kind, attn_implementation=attention)
    exact = 1e-9 if attention == "sdpa" else 1e-5  # eager attention takes its softmax in float32, whatever the model
    wanted = one_by_one(model, rows)
    assert_equal(energies(model, rows, side=side), wanted, exact)
    ids, counted, attended, _ = rows.padded(side)
    nothing = torch.zeros(len(ids), 3, dtype=torch.int64)
    wider = [torch.cat([nothing, item.long()] if side == "left" else [item.long(), nothing], 1) for item in
             (ids, counted, attended)]  # fmt: skip
    assert_equal(trajectory_energies(model, wider[0], wider[1].bool(), attention_mask=wider[2]), wanted, exact)


def test_rows_do_not_mix_and_their_order_does_not_matter() -> None:
    rows = make_rows()
    model = make_model("qwen3")
    whole = energies(model, rows)
    order = [2, 0, 3, 1]
    turned = replace(rows, **{name: tuple(value[i] for i in order) for name, value in vars(rows).items()})
    assert_equal(energies(model, turned), whole[order])
    for row in range(len(rows.ids)):
        alone = Rows(**{name: (value[row],) for name, value in vars(rows).items()})
        assert_equal(energies(model, alone), whole[row : row + 1])


@pytest.mark.parametrize("forms", ["gram", "product", "blocks", "chunks"])
def test_every_form_gives_the_same(forms: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = make_rows()
    model = make_model("qwen3", attention_bias=True)
    wanted = energies(model, rows)
    if forms in ("gram", "product"):
        for module in (layer_energies, exact_energies):
            monkeypatch.setattr(module, "gram_matrices_are_cheaper", lambda *_: forms == "gram")
    elif forms == "blocks":
        monkeypatch.setattr(exact_energies, "_BLOCK_ELEMENTS", 50)
    else:
        monkeypatch.setattr(layer_energies, "_CHUNK_ELEMENTS", 1000)
    assert_equal(energies(model, rows), wanted)


def test_long_rows_take_the_product_and_short_ones_the_gram_form() -> None:
    for lengths in ((50, 33), (3, 4)):
        rows = make_rows(lengths)
        model = make_model("llama")
        assert_equal(energies(model, rows), one_by_one(model, rows))


@pytest.mark.parametrize("kind", ["qwen2", "qwen3", "llama"])
def test_gradient_checkpointing_changes_nothing(kind: str) -> None:
    rows = make_rows()
    model = make_model(kind)
    wanted = one_by_one(model, rows)
    enable_gradient_checkpointing(model)
    model.train()
    assert_equal(energies(model, rows), wanted)
    assert_equal(energies(model, rows, side="left"), wanted)
    packed = packed_energies(PolicyModel(model), rows)
    assert_equal(packed, one_by_one(model, rows, weighted=True))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("mlp" in name)
    assert_equal(energies(model, rows), one_by_one(model.eval(), rows))


def test_checkpointed_inputs_are_not_kept_over_the_forward() -> None:
    model = make_model("qwen2").train()
    enable_gradient_checkpointing(model)
    held: list[list[str]] = []
    sites = layer_energies.LayerEnergies.mark_forward_finished

    def look(self: layer_energies.LayerEnergies) -> None:
        held.append([site.name for site in self._sites if site.input is not None])
        sites(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layer_energies.LayerEnergies, "mark_forward_finished", look)
        energies(model, make_rows())
    assert held == [["model.norm"]]


def test_reentrant_checkpointing_is_refused() -> None:
    model = make_model("qwen2").train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
    with pytest.raises(KernelInputError, match="use_reentrant=False"):
        energies(model, make_rows())


@pytest.mark.parametrize("tied", [True, False])
def test_the_fused_head_serves_too(tied: bool) -> None:
    rows = make_rows()
    model = make_model("qwen2", tied=tied)
    wanted = one_by_one(model, rows)
    assert_equal(energies(PolicyModel(model).causal_lm, rows), wanted)


def test_the_policy_takes_its_batch() -> None:
    rows = make_rows((9, 14, 6))
    model = make_model("qwen2")
    policy = PolicyModel(model)
    wanted = one_by_one(policy.causal_lm, rows, weighted=True, temperature=0.5)
    ids, counted, _, weights = rows.padded()
    lengths = torch.tensor([2, 1, 2])
    mask = torch.zeros(3, 13, dtype=torch.bool)
    rho = torch.full(mask.shape, torch.nan, dtype=torch.float64)
    for row, length in enumerate(lengths.tolist()):
        mask[row, : 14 - length] = counted[row, length:]
        rho[row, : 14 - length] = weights[row, length:]
    found = policy.trajectory_energies(ids, lengths, mask, importance_weights=rho, temperature=0.5)
    assert_equal(found, wanted)


def test_parameters_gradients_and_mode_stay_as_they_are() -> None:
    rows = make_rows()
    model = make_model("qwen2")
    marks = {name: torch.randn_like(item) for name, item in model.named_parameters()}
    for name, parameter in model.named_parameters():
        parameter.grad = marks[name].clone()
    for training in (True, False):
        model.train(training)
        with torch.no_grad():
            energies(model, rows)
        assert all(module.training is training for module in model.modules())
    assert all(torch.equal(item.grad, marks[name]) for name, item in model.named_parameters())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize("kept", ["mlp", "embed_tokens", "norm", "k_proj", "bias"])
def test_frozen_parameters_do_not_count(kept: str) -> None:
    rows = make_rows()
    for tied in (True, False):
        model = make_model("qwen2", tied=tied)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(kept in name)
        assert_equal(energies(model, rows), one_by_one(model, rows))


def test_a_row_without_counted_tokens_has_no_energy() -> None:
    rows = make_rows((6, 8))
    silent = replace(rows, counted=((False,) * 6, rows.counted[1]))
    model = make_model("qwen3")
    found = energies(model, silent)
    assert found[0] == 0.0
    assert_equal(found[1:], one_by_one(model, rows)[1:])
    assert energies(model, replace(rows, counted=((False,) * 6, (False,) * 8))).tolist() == [0.0, 0.0]


def test_a_sure_prediction_keeps_its_accuracy_in_float32() -> None:
    """p(y) = 1 - 3e-8 rounds to 1 in float32; the energy is not 0 there."""
    model = make_model("llama", tied=False)
    rows = make_rows((3,))
    with torch.no_grad():
        state = model.base_model(input_ids=torch.tensor(rows.ids)).last_hidden_state[0, 1]
        model.lm_head.weight.normal_(0.0, 0.01)
        model.lm_head.weight[rows.ids[0][2]] += 21.0 * state / state.square().sum()
    wanted = one_by_one(model, rows)
    assert 0 < float(wanted) < 1e-10
    assert_equal(energies(model.float(), rows), wanted, 1e-3)


def test_bfloat16_accumulates_in_float32() -> None:
    rows = make_rows((40, 30, 20))
    model = make_model("qwen2", dtype=torch.bfloat16)
    found = energies(model, rows)
    wanted = one_by_one(model.double(), rows)
    assert_equal(found, wanted, 0.05)


class Adapter(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, hidden: Tensor) -> Tensor:
        return self.inner(hidden) * self.scale


def test_unknown_modules_are_named() -> None:
    model = make_model("qwen2")
    model.model.layers[1].mlp.up_proj = Adapter(model.model.layers[1].mlp.up_proj)
    with pytest.raises(KernelInputError, match=r"model\.layers\.1\.mlp\.up_proj \(Adapter\)"):
        energies(model, make_rows())
    model.model.layers[1].mlp.up_proj.scale.requires_grad_(False)
    assert_equal(energies(model, make_rows()), one_by_one(model, make_rows()))


def test_unknown_models_and_shared_layers_are_refused() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    other = GPT2LMHeadModel(GPT2Config(n_embd=8, n_layer=1, n_head=2, vocab_size=VOCABULARY))
    with pytest.raises(KernelInputError, match="Gemma2ForCausalLM of transformers, not GPT2LMHeadModel"):
        energies(other, make_rows())
    model = make_model("qwen2")
    layers = model.model.layers
    layers[1].mlp.up_proj.weight = layers[0].mlp.up_proj.weight
    with pytest.raises(KernelInputError, match=r"layers\.0\.mlp\.up_proj and model\.layers\.1\.mlp\.up_proj share"):
        energies(model, make_rows())
    model = make_model("qwen2")
    model.model.layers[1].mlp = model.model.layers[0].mlp
    with pytest.raises(KernelInputError, match=r"model\.layers\.0\.mlp\.gate_proj is called twice"):
        energies(model, make_rows())
    with pytest.raises(KernelInputError, match="no trainable parameter"):
        energies(make_model("qwen2").requires_grad_(False), make_rows())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"token_mask": torch.ones(1, 4).bool()}, "row 0 at position 0, but no state predicts this token"),
        ({"attention_mask": torch.tensor([[0, 0, 1, 1]])}, "row 0 at position 2, but no state predicts this token"),
        ({"attention_mask": torch.tensor([[1, 1, 0, 0]])}, "row 0 at position 2, but no state predicts this token"),
        ({"temperature": 0.0}, "temperature must be positive"),
        ({"importance_weights": torch.ones(1, 3)}, r"importance_weights must be \[B, S\] = \(1, 4\); got \(1, 3\)"),
        ({"importance_weights": torch.full((1, 4), torch.nan)}, "importance_weights is nan in row 0 at position 2"),
        ({"input_ids": torch.zeros(4, dtype=torch.int64)}, r"input_ids must be \[B, S\]"),
    ],
)
def test_bad_inputs_are_named(change: dict[str, Any], message: str) -> None:
    ids, counted = torch.tensor([[1, 2, 3, 4]]), torch.tensor([[False, False, True, True]])
    with pytest.raises(KernelInputError, match=message):
        trajectory_energies(make_model("llama"), **{"input_ids": ids, "token_mask": counted, **change})
