"""Builds the requests to a vLLM server and reads its answers; an invalid answer raises GarbageError."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Literal

from agentrl.rollout.engines.base import CacheUse, Completion, Sampling
from agentrl.rollout.engines.http import GarbageError

GENERATE = "/inference/v1/generate"
_SEEDS = 1 << 63
# vLLM encodes minus infinity and NaN as this number.
_FLOOR = -9999.0
_METRIC = re.compile(r"^vllm:(kv_cache_usage_perc|num_preemptions_total|cache_config_info)\{(.*)\} (\S+)", re.MULTILINE)
_TOKENS = re.compile(r"^vllm:(?:generation|prompt)_tokens_total(?:\{.*\})? (\S+)", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="([^"]*)"')


def generate_body(
    token_ids: Sequence[int],
    sampling: Sampling,
    *,
    request_id: str,
    seed: int | None,
    eos_ids: Sequence[int],
    salt: str,
    adapter: str | None = None,
) -> dict[str, object]:
    """The request for one turn. It ends only at ``eos_ids`` and stop strings, not at the server's own EOS tokens.

    ``adapter``: the name of what samples; None for the model. ``salt`` separates cached prefixes: only requests with
    the same salt share keys and values.
    """
    parameters: dict[str, object] = {
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "logprobs": 0,
        "ignore_eos": True,
        "stop_token_ids": list(eos_ids),
    }
    if sampling.stop:
        parameters["stop"] = list(sampling.stop)
    if sampling.top_p < 1:
        parameters["top_p"] = sampling.top_p
    if seed is not None:
        parameters["seed"] = seed % _SEEDS
    body: dict[str, object] = {
        "request_id": request_id,
        "token_ids": list(token_ids),
        "sampling_params": parameters,
        "cache_salt": salt,
    }
    return body if adapter is None else {**body, "model": adapter}


def read_completion(answer: object, sampling: Sampling, eos_ids: frozenset[int]) -> Completion:
    """The sampled tokens of an answer to :func:`generate_body`, checked."""
    choice = _choice(answer)
    token_ids = choice.get("token_ids")
    if not isinstance(token_ids, list) or not _are_ids(token_ids) or not 1 <= len(token_ids) <= sampling.max_tokens:
        raise GarbageError(f"not 1 to {sampling.max_tokens} token ids: {_short(token_ids)}")
    reason = _reason(choice, token_ids, eos_ids)
    if reason == "length" and len(token_ids) < sampling.max_tokens:
        raise GarbageError(
            f"the server ended a turn after {len(token_ids)} of {sampling.max_tokens} tokens: its own limit on tokens "
            "(--max-model-len) is below the run's"
        )
    greedy = sampling.temperature == 0
    log_probs = (0.0,) * len(token_ids) if greedy else _log_probs(choice, token_ids)
    return Completion(
        token_ids=tuple(token_ids),
        log_probs=log_probs,
        finish_reason=reason,
        version_spans=_spans(choice.get("weight_versions"), len(token_ids)),
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
        return [{name: (int(values), int(total)) for name, (values, total) in told.items()} for told in workers]
    except (AttributeError, TypeError, ValueError) as error:
        raise GarbageError(f"no checksums: {_short(answer)}") from error


def _choice(answer: object) -> Mapping[str, object]:
    choices = answer.get("choices") if isinstance(answer, Mapping) else None
    if not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], Mapping):
        raise GarbageError(f"not one choice: {_short(answer)}")
    return choices[0]


def _reason(
    choice: Mapping[str, object], token_ids: list[int], eos_ids: frozenset[int]
) -> Literal["eos", "stop", "length"]:
    match choice.get("finish_reason"):
        case "length":
            return "length"
        case "stop":
            return "eos" if token_ids[-1] in eos_ids else "stop"
    raise GarbageError(f"the server ended a turn for the reason {choice.get('finish_reason')!r}")


def _log_probs(choice: Mapping[str, object], token_ids: list[int]) -> tuple[float, ...]:
    logprobs = choice.get("logprobs")
    content = logprobs.get("content") if isinstance(logprobs, Mapping) else None
    if not isinstance(content, list) or len(content) != len(token_ids):
        raise GarbageError(f"not {len(token_ids)} log-probabilities: {_short(content)}")
    values = []
    for token, entry in zip(token_ids, content, strict=True):
        if not isinstance(entry, Mapping) or entry.get("token_id") != token:
            raise GarbageError(f"the log-probability of another token than the sampled {token}: {_short(entry)}")
        values.append(_finite(entry.get("logprob")))
    return tuple(values)


def _spans(spans: object, count: int) -> tuple[tuple[int, int], ...]:
    """Versions and lengths from vLLM's half-open intervals, which must cover all tokens in order."""
    found: list[tuple[int, int]] = []
    place = 0
    for span in spans if isinstance(spans, list) else ():
        if not isinstance(span, Mapping) or span.get("start") != place or not isinstance(span.get("end"), int):
            break
        version = str(span.get("version"))
        if not version.isdecimal():
            raise GarbageError(f"tokens of weights with the label {version!r}, which is not a policy version")
        if span["end"] > place:
            found.append((int(version), span["end"] - place))
        place = span["end"]
    if place != count:
        raise GarbageError(f"weight_versions do not cover {count} tokens: {_short(spans)}")
    return tuple(found)


def _finite(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not _FLOOR < value <= 1e-6:
        raise GarbageError(f"{value!r} is not a log-probability")
    return float(value)


def _are_ids(values: list[object]) -> bool:
    return all(type(item) is int and item >= 0 for item in values)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 200 else text[:200] + "..."
