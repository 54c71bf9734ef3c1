"""Builds the requests to a vLLM server and reads its answers; an invalid answer raises GarbageError."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import Annotated, Literal

import msgspec

from agentrl.rollout.engines.base import CacheUse, Completion, Sampling
from agentrl.rollout.engines.http import GarbageError
from agentrl.rollout.engines.replica import TurnRequest

GENERATE = "/inference/v1/generate"
_SEEDS = 1 << 63
# vLLM encodes minus infinity and NaN as this number.
_FLOOR = -9999.0
_METRIC = re.compile(r"^vllm:(kv_cache_usage_perc|num_preemptions_total|cache_config_info)\{(.*)\} (\S+)", re.MULTILINE)
_TOKENS = re.compile(r"^vllm:(?:generation|prompt)_tokens_total(?:\{.*\})? (\S+)", re.MULTILINE)
_TokenId = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
_LABEL = re.compile(r'(\w+)="([^"]*)"')


def generate_body(request: TurnRequest, *, seeded: bool) -> dict[str, object]:
    """Return the body for one turn. It ends only at ``eos_ids`` and stop strings, not at the server's EOS tokens."""
    sampling = request.sampling
    parameters: dict[str, object] = {
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "logprobs": 0,
        "ignore_eos": True,
        "stop_token_ids": sorted(request.eos_ids),
    }
    if sampling.stop:
        parameters["stop"] = list(sampling.stop)
    if sampling.top_p < 1:
        parameters["top_p"] = sampling.top_p
    if seeded:
        parameters["seed"] = request.seed % _SEEDS
    body: dict[str, object] = {
        "request_id": request.request_id,
        "token_ids": list(request.token_ids),
        "sampling_params": parameters,
        "cache_salt": request.salt,
    }
    return body if request.adapter is None else {**body, "model": request.adapter}


class _LogProb(msgspec.Struct, gc=False):
    token_id: int
    logprob: Annotated[float, msgspec.Meta(gt=_FLOOR, le=1e-6)]


class _LogProbs(msgspec.Struct):
    content: list[_LogProb]


class _Span(msgspec.Struct):
    """The half-open interval of tokens that one version sampled."""

    start: int
    end: int
    version: str


class _Choice(msgspec.Struct):
    token_ids: list[_TokenId]
    finish_reason: str
    logprobs: _LogProbs | None
    weight_versions: list[_Span] | None


class _Answer(msgspec.Struct):
    """The parts of an answer that are read. Everything else is skipped without becoming an object: vLLM sends each
    log-probability twice, with ranks, and json takes ten times as long."""

    choices: Annotated[list[_Choice], msgspec.Meta(min_length=1, max_length=1)]


_ANSWER = msgspec.json.Decoder(_Answer)


def read_completion(content: bytes, sampling: Sampling, eos_ids: frozenset[int]) -> Completion:
    """The sampled tokens of an answer to :func:`generate_body`, checked."""
    try:
        (choice,) = _ANSWER.decode(content).choices
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise GarbageError(f"not a completion of one choice ({error}): {_short(content)}") from None
    token_ids = tuple(choice.token_ids)
    if not 1 <= len(token_ids) <= sampling.max_tokens:
        raise GarbageError(f"not 1 to {sampling.max_tokens} token ids: {_short(token_ids)}")
    reason = _reason(choice.finish_reason, token_ids, eos_ids)
    if reason == "length" and len(token_ids) < sampling.max_tokens:
        raise GarbageError(
            f"the server ended a turn after {len(token_ids)} of {sampling.max_tokens} tokens: its own limit on tokens "
            "(--max-model-len) is below the run's"
        )
    greedy = sampling.temperature == 0
    log_probs = (0.0,) * len(token_ids) if greedy else _log_probs(choice.logprobs, token_ids)
    return Completion(
        token_ids=token_ids,
        log_probs=log_probs,
        finish_reason=reason,
        version_spans=_spans(choice.weight_versions or [], len(token_ids)),
    )


def score_body(token_ids: Sequence[int], *, salt: str, adapter: str | None = None) -> dict[str, object]:
    """The request for the log-probabilities of a prompt's own tokens. The one sampled token is discarded."""
    parameters = {"max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0}
    body: dict[str, object] = {"token_ids": list(token_ids), "sampling_params": parameters, "cache_salt": salt}
    return body if adapter is None else {**body, "model": adapter}


def read_scores(answer: object, token_ids: Sequence[int]) -> tuple[float, ...]:
    """Log-probabilities of ``token_ids[1:]`` from an answer to :func:`score_body`."""
    entries = answer.get("prompt_logprobs") if isinstance(answer, Mapping) else None
    if not isinstance(entries, list) or len(entries) != len(token_ids):
        raise GarbageError(f"no prompt_logprobs of {len(token_ids)} tokens: {_short(entries)}")
    scores = []
    for token, entry in zip(token_ids[1:], entries[1:], strict=True):
        value = entry.get(str(token)) if isinstance(entry, Mapping) else None
        scores.append(_finite(value.get("logprob") if isinstance(value, Mapping) else None))
    return tuple(scores)


def read_cache_use(metrics: str) -> CacheUse:
    """The KV cache from a server's Prometheus metrics: the total over its engines, with the usage of the fullest.

    >>> read_cache_use('''# TYPE vllm:kv_cache_usage_perc gauge
    ... vllm:kv_cache_usage_perc{engine="0",model_name="policy"} 0.25
    ... vllm:kv_cache_usage_perc{engine="1",model_name="policy"} 0.75
    ... vllm:num_preemptions_total{engine="0",model_name="policy"} 3.0
    ... vllm:cache_config_info{block_size="16",engine="0",kv_cache_size_tokens="1600",num_gpu_blocks="120"} 1.0
    ... vllm:cache_config_info{block_size="16",engine="1",kv_cache_size_tokens="1600",num_gpu_blocks="120"} 1.0''')
    CacheUse(tokens=3200, used=0.75, preemptions=3)
    """
    found: dict[str, list[tuple[str, str]]] = {}
    for name, labels, value in _METRIC.findall(metrics):
        found.setdefault(name, []).append((labels, value))
    try:
        sizes = [dict(_LABEL.findall(labels)) for labels, _ in found["cache_config_info"]]
        return CacheUse(
            tokens=sum(int(size["kv_cache_size_tokens"]) for size in sizes),
            used=max(float(value) for _, value in found["kv_cache_usage_perc"]),
            preemptions=int(sum(float(value) for _, value in found["num_preemptions_total"])),
        )
    except (KeyError, ValueError) as error:
        raise GarbageError(f"its metrics lack the usage of its KV cache: {error!r}") from error


def read_tokens(metrics: str) -> int | None:
    """The number of tokens that a server has sampled and prefilled, from its Prometheus metrics; None if absent.

    >>> read_tokens('''vllm:prompt_tokens_total{engine="0"} 40.0
    ... vllm:generation_tokens_total{engine="0"} 1.2e+03
    ... vllm:generation_tokens_created{engine="0"} 1.7e+09''')
    1240
    >>> read_tokens("vllm:kv_cache_usage_perc 0.5") is None
    True
    """
    try:
        counts = [float(value) for value in _TOKENS.findall(metrics)]
    except ValueError as error:
        raise GarbageError(f"its metrics give no valid number of computed tokens: {error}") from error
    return int(sum(counts)) if counts else None


def read_models(answer: object) -> frozenset[str]:
    """The names of the model and its adapters.

    >>> sorted(read_models({"data": [{"id": "policy"}, {"id": "policy-1"}]}))
    ['policy', 'policy-1']
    """
    found = answer.get("data") if isinstance(answer, Mapping) else None
    if not isinstance(found, list) or not all(isinstance(item, Mapping) and "id" in item for item in found):
        raise GarbageError(f"no list of models: {_short(answer)}")
    return frozenset(str(item["id"]) for item in found)


def read_checksums(answer: object) -> list[dict[str, tuple[int, int]]]:
    """Each worker's count of values and total, for each parameter.

    >>> read_checksums({"results": [{"a": [2, 9]}, {"a": [1, 5]}]})
    [{'a': (2, 9)}, {'a': (1, 5)}]
    """
    workers = answer.get("results") if isinstance(answer, Mapping) else None
    if not isinstance(workers, list) or not workers:
        raise GarbageError(f"no checksums: {_short(answer)}")
    try:
        return [{name: (int(values), int(total)) for name, (values, total) in worker.items()} for worker in workers]
    except (AttributeError, TypeError, ValueError) as error:
        raise GarbageError(f"no checksums: {_short(answer)}") from error


def _reason(reason: str, token_ids: tuple[int, ...], eos_ids: frozenset[int]) -> Literal["eos", "stop", "length"]:
    match reason:
        case "length":
            return "length"
        case "stop":
            return "eos" if token_ids[-1] in eos_ids else "stop"
    raise GarbageError(f"the server ended a turn for the reason {reason!r}")


def _log_probs(logprobs: _LogProbs | None, token_ids: tuple[int, ...]) -> tuple[float, ...]:
    content = [] if logprobs is None else logprobs.content
    scored = tuple(map(attrgetter("token_id"), content))
    if scored != token_ids:
        raise GarbageError(
            f"not {len(token_ids)} log-probabilities of the sampled tokens {_short(token_ids)}: {_short(scored)}"
        )
    return tuple(map(attrgetter("logprob"), content))


def _spans(spans: list[_Span], count: int) -> tuple[tuple[int, int], ...]:
    """Versions and lengths from vLLM's intervals, which must cover all tokens in order."""
    found: list[tuple[int, int]] = []
    covered = 0
    for span in spans:
        if span.start != covered:
            break
        if not span.version.isdecimal():
            raise GarbageError(f"tokens of weights with the label {span.version!r}, which is not a policy version")
        if span.end > covered:
            found.append((int(span.version), span.end - covered))
        covered = span.end
    if covered != count:
        raise GarbageError(f"weight_versions do not cover {count} tokens: {_short(spans)}")
    return tuple(found)


def _finite(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not _FLOOR < value <= 1e-6:
        raise GarbageError(f"{value!r} is not a log-probability")
    return float(value)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 200 else text[:200] + "..."
