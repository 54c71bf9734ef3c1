"""Every causal language model of the installed transformers trains exactly or is refused by name."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from models.architectures import build_tiny
from torch import Tensor
from transformers import AutoConfig, logging

from agentrl.errors import SettingsError
from agentrl.kernels.attention import pack_padded
from agentrl.models.attention import register_attention
from agentrl.models.exactness import (
    check_forward_matches_unpadded,
    check_packed_forward,
    choose_attention_backend,
    count_parameters,
    make_test_sequences,
    random_model,
    shrink_config,
)
from agentrl.models.loading import enable_gradient_checkpointing
from agentrl.models.policy import PolicyModel
from agentrl.models.settings import ModelSettings

sys.path.append(str(Path(__file__).parents[2] / "docs"))
from generate_models import KINDS, TARGET, UNBUILDABLE, config_for, decide, page

PACKED = {"qwen2", "qwen3", "qwen3_moe", "llama", "mistral", "gemma2", "gemma3_text", "gpt2", "stablelm", "nemotron"}
PACKED |= {"gpt_oss", "granite_swa", "granitemoe_swa", "mimo_v2_flash"}
PADDED = {"qwen3_next", "qwen3_5", "qwen3_5_moe", "kimi_linear", "mamba", "jamba", "bart", "gptj", "bloom"}


@pytest.fixture(autouse=True)
def no_advice() -> Any:
    """Default configurations are not checked by transformers' authors: their warnings say nothing here."""
    level = logging.get_verbosity()
    logging.set_verbosity_error()
    yield
    logging.set_verbosity(level)


def compare_with_own_gradients(config: Any, mode: str) -> None:
    """Log-probabilities and gradients of two rows against one unpadded eager row at a time."""
    own = random_model(config, attention="eager")
    attention, backend = (None, "padded") if mode == "padded" else (register_attention(), "sdpa")
    policy = PolicyModel(random_model(config, attention=attention, weights_from=own), attention=backend)
    rows = make_test_sequences(config.get_text_config().vocab_size)
    prompt, lengths = 5, [len(row) for row in rows]
    parts = []
    for row in rows:
        logits = own(input_ids=row[None], use_cache=False).logits[0, prompt - 1 : -1]
        parts.append(torch.log_softmax(logits, -1)[torch.arange(len(row) - prompt), row[prompt:]])
    wanted = torch.cat(parts)
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    mask = torch.arange(prompt, max(lengths)) < torch.tensor(lengths)[:, None]
    found = policy(*pack_padded(ids, torch.tensor([prompt, prompt]), mask))[0].log_probs
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-4)
    weights = torch.linspace(-1, 2, len(wanted))  # every token weighs something else
    gradients(found, weights, policy.causal_lm)
    for name, gradient in gradients(wanted, weights, own).items():
        other = gradients_of(policy.causal_lm)[name]
        assert float((other - gradient).norm()) <= 1e-3 * float(gradient.norm()) + 1e-5, name


def gradients(log_probs: Tensor, weights: Tensor, model: Any) -> dict[str, Tensor]:
    (log_probs * weights).sum().backward()
    return gradients_of(model)


def gradients_of(model: Any) -> dict[str, Tensor]:
    return {name: item.grad for name, item in model.named_parameters() if item.grad is not None}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # some classes of transformers use torch.jit.script
def test_every_class_is_exact_or_refused_by_name() -> None:
    decisions, wrong = {}, {}
    for kind in KINDS:
        if kind in UNBUILDABLE:
            continue
        decisions[kind] = decide(kind)
        if decisions[kind].mode == "refused":
            assert decisions[kind].reason, kind
            continue
        try:
            small = shrink_config(config_for(kind))
            assert count_parameters(small) < 50_000_000, "not small: nothing was compared"
            compare_with_own_gradients(small, decisions[kind].mode)
        except Exception as error:  # noqa: BLE001 - listed with its cause
            wrong[kind] = f"{type(error).__name__}: {error}"
    assert wrong == {}
    assert {decisions[kind].mode for kind in PACKED} == {"packed"}
    assert {decisions[kind].mode for kind in PADDED} == {"padded"}
    assert page(decisions) == TARGET.read_text(encoding="utf-8"), "run docs/generate_models.py"


@pytest.mark.parametrize("kind", ["stablelm", "nemotron"])
def test_layers_that_drop_keyword_arguments_train_when_they_are_recomputed(kind: str) -> None:
    config = shrink_config(config_for(kind))
    own = random_model(config, attention=register_attention())
    batch = make_test_sequences(config.vocab_size)
    ids = torch.nn.utils.rnn.pad_sequence(batch, batch_first=True)
    mask = torch.arange(5, ids.shape[1]) < torch.tensor([len(row) for row in batch])[:, None]
    found = []
    for checkpointed in (False, True):
        model = random_model(config, attention=register_attention(), weights_from=own).train()
        if checkpointed:
            enable_gradient_checkpointing(model)
        PolicyModel(model)(*pack_padded(ids, torch.tensor([5, 5]), mask))[0].log_probs.square().sum().backward()
        found.append(gradients_of(model))
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=0)


def test_ignored_position_ids_are_named_with_the_difference() -> None:
    with pytest.raises(
        SettingsError,
        match=r"model\.path='some/bart': BartForCausalLM cannot be .* and unpacked trajectories differ by 0\.\d+",
    ):
        check_forward_matches_unpadded("some/bart", AutoConfig.for_model("bart"), padded=False)


def test_loaded_weights_are_compared_and_left_as_they_were() -> None:
    for dtype in (torch.bfloat16, torch.float32):
        policy = PolicyModel(build_tiny("qwen3").to(dtype))
        check_packed_forward("some/model", policy)
        assert policy.causal_lm.config._attn_implementation == register_attention()
    inner = policy.causal_lm.model.rotary_emb.forward
    # Positions by index in the row, as in a model that ignores position_ids.
    policy.causal_lm.model.rotary_emb.forward = lambda states, position_ids: inner(
        states, torch.arange(states.shape[1])[None]
    )
    with pytest.raises(SettingsError, match=r"model\.path='some/model': Qwen3ForCausalLM .* differ"):
        check_packed_forward("some/model", policy)


@pytest.mark.parametrize(("rows", "kind", "reader"), [
    ("auto", "qwen3", "sdpa"),
    ("auto", "qwen3_next", "padded"),
    ("padded", "qwen3", "padded"),
    ("packed", "qwen3_next", "sdpa"),
])  # fmt: skip
def test_rows_are_packed_if_the_small_copy_is_exact(rows: Any, kind: str, reader: str) -> None:
    assert choose_attention_backend(ModelSettings(rows=rows), config_for(kind)) == reader


def test_padded_rows_of_different_lengths_and_a_shared_prompt_are_exact() -> None:
    """Short and long documents take several forward passes; packed rows are the reference."""
    torch.manual_seed(0)
    ids, mask = torch.randint(4, 250, (4, 40)), torch.arange(34) < torch.tensor([3, 34, 12, 30])[:, None]
    ids[:2, :6] = ids[0, :6]  # two documents share a prompt
    batch = pack_padded(ids, torch.tensor([6, 6, 6, 6]), mask)
    found = {}
    for backend in ("sdpa", "padded"):
        policy = PolicyModel(build_tiny("qwen3"), attention=backend)
        log_probs = policy(*batch)[0].log_probs
        found[backend] = (log_probs.detach(), gradients(log_probs, torch.linspace(-1, 2, 79), policy.causal_lm))
    torch.testing.assert_close(found["padded"], found["sdpa"], rtol=1e-4, atol=1e-5)
