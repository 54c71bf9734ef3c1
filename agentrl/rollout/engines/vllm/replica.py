"""The client for one vLLM server: requests, validated responses, and checks of the server's configuration.

A response with unexpected content raises InvalidResponseError.
"""

from __future__ import annotations

import base64
import io
import logging
import math
import re
import shlex
from array import array
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Annotated, Any, ClassVar, Literal

import msgspec
import numpy as np

from agentrl.models.tokenizer import TextCodec
from agentrl.rollout.engines.base import CacheUse, Completion
from agentrl.rollout.engines.replica import (
    LONG_TIMEOUT,
    QUICK_TIMEOUT,
    InvalidResponseError,
    ServerClient,
    ServerIdentity,
    ServerRequirements,
    StatusError,
    TurnRequest,
)
from agentrl.rollout.engines.vllm.plan import (
    FLOAT32_HEAD,
    WORKER_EXTENSION,
    logprobs_to_request,
    max_logprobs,
    supported_lora_rank,
)
from agentrl.rollout.settings import RolloutSettings

logger = logging.getLogger(__name__)

GENERATE_PATH = "/inference/v1/generate"
_PROBABILITY_SUM_TOLERANCE = 1e-3  # allows for the rounding of float32 probabilities
_SEED_LIMIT = 1 << 63
_MINUS_INFINITY = -9999.0  # vLLM's encoding of minus infinity and NaN
_CACHE_METRICS = re.compile(
    r"^vllm:(kv_cache_usage_perc|num_preemptions_total|cache_config_info)\{(.*)\} (\S+)", re.MULTILINE
)
_TOKEN_METRICS = re.compile(r"^vllm:(?:generation|prompt)_tokens_total(?:\{.*\})? (\S+)", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="([^"]*)"')


def build_generate_body(request: TurnRequest, *, seeded: bool) -> dict[str, object]:
    """Build the request for one turn. Only ``eos_ids`` and stop strings end the turn, not the server's EOS."""
    sampling = request.sampling
    parameters: dict[str, object] = {
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "logprobs": logprobs_to_request(sampling.top_k) if sampling.returns_support else 0,
        "ignore_eos": True,
        "stop_token_ids": sorted(request.eos_ids),
    }
    if sampling.stop:
        parameters["stop"] = list(sampling.stop)
    if sampling.top_p < 1:
        parameters["top_p"] = sampling.top_p
    if sampling.top_k:
        parameters["top_k"] = sampling.top_k
    if sampling.min_p > 0:
        parameters["min_p"] = sampling.min_p
    if sampling.routes_from is not None:
        parameters["routed_experts_prompt_start"] = sampling.routes_from
    if seeded:
        parameters["seed"] = request.seed % _SEED_LIMIT
    body: dict[str, object] = {
        "request_id": request.request_id,
        "token_ids": list(request.token_ids),
        "sampling_params": parameters,
        "cache_salt": request.salt,
    }
    return body if request.adapter is None else {**body, "model": request.adapter}


class _ListedToken(msgspec.Struct, gc=False):
    token_id: int
    logprob: float


class _Token(msgspec.Struct, gc=False):
    logprob: Annotated[float, msgspec.Meta(gt=_MINUS_INFINITY, le=1e-6)]
    top_logprobs: list[_ListedToken] = []


class _Tokens(msgspec.Struct):
    content: list[_Token]


class _VersionSpan(msgspec.Struct):
    """The half-open interval of tokens that one version sampled."""

    start: int
    end: int
    version: str


class _Choice(msgspec.Struct):
    finish_reason: str
    token_ids: tuple[Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)], ...]
    logprobs: _Tokens
    weight_versions: list[_VersionSpan] | None
    routed_experts: str | None = None


class GenerateResponse(msgspec.Struct):
    """The decoded fields of the response to a request from :func:`build_generate_body`.

    vLLM 0.32 sends each token id three times and each log-probability twice, with ranks: 140 bytes per token. Decoding
    takes most of the worker's time per token. No objects are created for skipped fields, so the ids are read only from
    the list ``token_ids``, without a loop in Python. json takes ten times as long as msgspec.
    """

    choices: Annotated[list[_Choice], msgspec.Meta(min_length=1, max_length=1)]


class _ScoreResponse(msgspec.Struct):
    prompt_logprobs: list[dict[str, _Token] | None]


class _WeightVersionResponse(msgspec.Struct):
    weight_version: str


class _WorldSizeResponse(msgspec.Struct):
    world_size: int


class _VersionResponse(msgspec.Struct):
    version: str


class _TokenizeResponse(msgspec.Struct):
    tokens: tuple[int, ...]


class _ListedModel(msgspec.Struct):
    id: str


class _ModelsResponse(msgspec.Struct):
    data: list[_ListedModel]


class _ChecksumsResponse(msgspec.Struct):
    results: Annotated[list[dict[str, tuple[int, int]]], msgspec.Meta(min_length=1)]


class VLLMConfig(msgspec.Struct):
    """The configuration of a server, by section."""

    model_config: dict[str, Any]
    cache_config: dict[str, Any] = {}
    scheduler_config: dict[str, Any] = {}
    device_config: dict[str, Any] = {}
    parallel_config: dict[str, Any] = {}
    lora_config: dict[str, Any] | None = None


class _ServerInfo(msgspec.Struct):
    vllm_config: VLLMConfig


def read_completion(response: GenerateResponse, request: TurnRequest) -> Completion:
    """Convert a response to a completion. Raises InvalidResponseError if the response is invalid."""
    sampling, (choice,) = request.sampling, response.choices
    token_ids = choice.token_ids
    log_probs = tuple([token.logprob for token in choice.logprobs.content])
    if not 1 <= len(token_ids) <= sampling.max_tokens:
        raise InvalidResponseError(f"expected 1 to {sampling.max_tokens} token ids; got {_shortened_repr(token_ids)}")
    if len(log_probs) != len(token_ids):
        raise InvalidResponseError(
            f"expected one log-probability per token; got {len(log_probs)} for {len(token_ids)} tokens"
        )
    reason = _finish_reason(choice.finish_reason, token_ids, request.eos_ids)
    if reason == "length" and len(token_ids) < sampling.max_tokens:
        raise InvalidResponseError(
            f"the server ended a turn after {len(token_ids)} of {sampling.max_tokens} tokens: its token limit "
            "(--max-model-len) is lower than the run's"
        )
    supports = [_read_token_support(token) for token in choice.logprobs.content] if sampling.returns_support else []
    greedy = sampling.temperature == 0
    return Completion(
        token_ids=token_ids,
        log_probs=(0.0,) * len(token_ids) if greedy else log_probs,
        finish_reason=reason,
        version_spans=_version_spans(choice.weight_versions or [], len(token_ids)),
        support_ids=array("i", chain.from_iterable(supports)) if supports else (),
        support_sizes=array("i", map(len, supports)) if supports else (),
        routes=b""
        if sampling.routes_from is None
        else _decode_routes(choice.routed_experts, len(request.token_ids) + len(token_ids) - 1 - sampling.routes_from),
    )


def _decode_routes(encoded: str | None, tokens: int) -> bytes:
    """Decode the experts [tokens, layers, k] of a response, an array in the format of NumPy files."""
    try:
        experts = np.load(io.BytesIO(base64.b64decode(encoded or "", validate=True)), allow_pickle=False)
    except (ValueError, EOFError, OSError) as error:
        raise InvalidResponseError(
            f"the response contains no routes ({error}): start the server with --enable-return-routed-experts"
        ) from error
    if experts.ndim != 3 or len(experts) != tokens:
        raise InvalidResponseError(f"expected routes of {tokens} tokens; got an array of shape {experts.shape}")
    return bytes(experts.astype(np.int16).tobytes())


def _read_token_support(token: _Token) -> list[int]:
    """Return the listed tokens with a probability above 0. Raises InvalidResponseError if the list is incomplete."""
    kept = [item for item in token.top_logprobs if item.logprob > _MINUS_INFINITY]
    total = math.fsum(math.exp(item.logprob) for item in kept)
    if abs(total - 1) > _PROBABILITY_SUM_TOLERANCE:
        raise InvalidResponseError(
            f"the {len(kept)} tokens that the server listed have a total probability of {total:.4f}, so the server "
            "samples from other tokens too: more than rollout.top_k tokens are equally likely, or the server ignores "
            "top_k"
        )
    return [item.token_id for item in kept]


def build_score_body(token_ids: Sequence[int], *, salt: str, adapter: str | None = None) -> dict[str, object]:
    """Build the request for the log-probabilities of a prompt's tokens. The single sampled token is discarded."""
    parameters = {"max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0}
    body: dict[str, object] = {"token_ids": list(token_ids), "sampling_params": parameters, "cache_salt": salt}
    return body if adapter is None else {**body, "model": adapter}


def read_cache_use(metrics: str) -> CacheUse:
    """Read a server's KV cache usage from its Prometheus metrics.

    Returns the total capacity of the server's engines and the usage of the fullest engine.

    >>> read_cache_use('''# TYPE vllm:kv_cache_usage_perc gauge
    ... vllm:kv_cache_usage_perc{engine="0",model_name="policy"} 0.25
    ... vllm:kv_cache_usage_perc{engine="1",model_name="policy"} 0.75
    ... vllm:num_preemptions_total{engine="0",model_name="policy"} 3.0
    ... vllm:cache_config_info{block_size="16",engine="0",kv_cache_size_tokens="1600",num_gpu_blocks="120"} 1.0
    ... vllm:cache_config_info{block_size="16",engine="1",kv_cache_size_tokens="1600",num_gpu_blocks="120"} 1.0''')
    CacheUse(tokens=3200, used=0.75, preemptions=3)
    """
    found: dict[str, list[tuple[str, str]]] = {}
    for name, labels, value in _CACHE_METRICS.findall(metrics):
        found.setdefault(name, []).append((labels, value))
    try:
        sizes = [dict(_LABEL.findall(labels)) for labels, _ in found["cache_config_info"]]
        return CacheUse(
            tokens=sum(int(size["kv_cache_size_tokens"]) for size in sizes),
            used=max(float(value) for _, value in found["kv_cache_usage_perc"]),
            preemptions=int(sum(float(value) for _, value in found["num_preemptions_total"])),
        )
    except (KeyError, ValueError) as error:
        raise InvalidResponseError(f"the server's metrics lack its KV cache usage: {error!r}") from error


def read_computed_tokens(metrics: str) -> int | None:
    """Return the number of tokens that a server sampled and prefilled, from its Prometheus metrics; None if absent.

    >>> read_computed_tokens('''vllm:prompt_tokens_total{engine="0"} 40.0
    ... vllm:generation_tokens_total{engine="0"} 1.2e+03
    ... vllm:generation_tokens_created{engine="0"} 1.7e+09''')
    1240
    >>> read_computed_tokens("vllm:kv_cache_usage_perc 0.5") is None
    True
    """
    try:
        counts = [float(value) for value in _TOKEN_METRICS.findall(metrics)]
    except ValueError as error:
        raise InvalidResponseError(
            f"the server's metrics contain no valid number of computed tokens: {error}"
        ) from error
    return int(sum(counts)) if counts else None


def _finish_reason(
    reason: str, token_ids: tuple[int, ...], eos_ids: frozenset[int]
) -> Literal["eos", "stop", "length"]:
    match reason:
        case "length":
            return "length"
        case "stop":
            return "eos" if token_ids[-1] in eos_ids else "stop"
    raise InvalidResponseError(f"the server ended a turn with the unexpected finish_reason {reason!r}")


def _version_spans(spans: list[_VersionSpan], count: int) -> tuple[tuple[int, int], ...]:
    """Convert vLLM's intervals to versions and lengths. The intervals must cover all tokens in order."""
    found: list[tuple[int, int]] = []
    covered = 0
    for span in spans:
        if span.start != covered:
            break
        if not span.version.isdecimal():
            raise InvalidResponseError(f"the weights' label {span.version!r} is not a policy version")
        if span.end > covered:
            found.append((int(span.version), span.end - covered))
        covered = span.end
    if covered != count:
        raise InvalidResponseError(f"weight_versions do not cover {count} tokens: {_shortened_repr(spans)}")
    return tuple(found)


def _shortened_repr(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 200 else text[:200] + "..."


# Text whose tokens distinguish tokenizers: digits, blanks, code, accents, other scripts.
_TOKENIZER_TEST = "The sum 12 + 345 = 357.\n```python\nprint(  7*8)\t# naïve, 你好, Ω\n```\n"

SUPPORTED_RELEASE = "0.32"
"""The supported vLLM release."""


class VLLMClient(ServerClient):
    title: ClassVar[str] = "vLLM"

    def __init__(self, address: str, rollout: RolloutSettings, *, adapter_rank: int = 0) -> None:
        """Create a client without connecting. ``adapter_rank``: the rank of the adapters to load; 0: none."""
        super().__init__(address)
        self._vllm = rollout.vllm
        self._adapter_rank = adapter_rank
        self._max_logprobs = max_logprobs(rollout)

    # -- sampling -------------------------------------------------------------------------------------------------

    async def generate(self, request: TurnRequest) -> Completion:
        body = build_generate_body(request, seeded=self._vllm.seeded)
        return read_completion(await self.http.post(GENERATE_PATH, body, GenerateResponse, seconds=None), request)

    async def score(self, token_ids: tuple[int, ...], *, salt: str) -> tuple[float, ...]:
        body = build_score_body(token_ids, salt=salt, adapter=self.adapter)
        entries = (await self.http.post(GENERATE_PATH, body, _ScoreResponse, seconds=LONG_TIMEOUT)).prompt_logprobs
        try:
            listed = zip(token_ids[1:], entries[1:], strict=True)
            return tuple(entry[str(token)].logprob for token, entry in listed)
        except (KeyError, TypeError, ValueError):
            raise InvalidResponseError(
                f"expected a log-probability for each of {len(token_ids)} tokens; got {_shortened_repr(entries)}"
            ) from None

    # -- control --------------------------------------------------------------------------------------------------

    async def version_label(self) -> str | None:
        label = (await self.http.get("/weight_info", _WeightVersionResponse, seconds=QUICK_TIMEOUT)).weight_version
        return None if label == "default" else label

    async def cache_use(self) -> CacheUse:
        return read_cache_use(await self.http.get_text("/metrics", seconds=QUICK_TIMEOUT))

    async def count_computed_tokens(self) -> int | None:
        try:
            return read_computed_tokens(await self.http.get_text("/metrics", seconds=QUICK_TIMEOUT))
        except (StatusError, InvalidResponseError):
            return None

    async def pause(self) -> None:
        """Pause every request, keeping its keys and values, until :meth:`resume`.

        According to vLLM's documentation, ``clear_cache`` is ignored for ``keep``. vLLM 0.32 nevertheless applies it,
        even to running requests.
        """
        await self.http.post("/pause?mode=keep&clear_cache=false", seconds=LONG_TIMEOUT)

    async def resume(self) -> None:
        await self.http.post("/resume", seconds=QUICK_TIMEOUT)

    async def load(self, directory: str) -> None:
        """Load all weights. The server exits if loading fails."""
        body = {"method": "reload_weights", "kwargs": {"weights_path": directory}}
        await self.http.post("/collective_rpc", body, seconds=LONG_TIMEOUT)

    async def adapters(self) -> frozenset[str]:
        models = await self.http.get("/v1/models", _ModelsResponse, seconds=QUICK_TIMEOUT)
        return frozenset(model.id for model in models.data)

    async def load_adapter(self, name: str, directory: str) -> None:
        body = {"lora_name": name, "lora_path": directory}
        await self.http.post("/v1/load_lora_adapter", body, seconds=LONG_TIMEOUT)

    async def unload_adapter(self, name: str) -> None:
        await self.http.post("/v1/unload_lora_adapter", {"lora_name": name}, seconds=LONG_TIMEOUT)

    async def set_version_label(self, version: int) -> None:
        await self.http.post("/update_weight_version", {"new_version": str(version)}, seconds=QUICK_TIMEOUT)

    async def drop_cached_prefixes(self, *, recompute_running: bool) -> None:
        await self.http.post(
            f"/reset_prefix_cache?reset_running_requests={str(recompute_running).lower()}", seconds=LONG_TIMEOUT
        )

    async def checksums(self) -> list[dict[str, tuple[int, int]]]:
        body = {"method": "agentrl_checksums"}
        return (await self.http.post("/collective_rpc", body, _ChecksumsResponse, seconds=LONG_TIMEOUT)).results

    async def sleep(self, *, keep_weights: bool) -> None:
        """Release GPU memory. The weights are moved to host memory or, without ``keep_weights``, dropped."""
        await self.http.post(f"/sleep?level={1 if keep_weights else 2}", seconds=LONG_TIMEOUT)

    async def wake(self, tag: str) -> None:
        """Reallocate memory for ``weights`` (restored if they were kept) or the ``kv_cache``."""
        await self.http.post(f"/wake_up?tags={tag}", seconds=LONG_TIMEOUT)

    # -- checks ---------------------------------------------------------------------------------------------------

    async def identify(self, needs: ServerRequirements) -> ServerIdentity:
        """Check the server's endpoints, settings, token limit, tokenizer and vocabulary size against the run's needs.

        Raises SettingsError with the difference and the fix, and ServerCallError if the server does not respond.
        """
        await self.check_health()
        try:
            version = await self.version_label()
            info = await self.http.get("/server_info?config_format=json", _ServerInfo, seconds=4 * QUICK_TIMEOUT)
            workers = (await self.http.get("/get_world_size", _WorldSizeResponse, seconds=QUICK_TIMEOUT)).world_size
        except StatusError as error:
            raise self.unusable_server_error(
                "its control endpoints are disabled: start it with the environment variable VLLM_SERVER_DEV_MODE=1"
            ) from error
        config = info.vllm_config
        self._check_config(config, needs)
        self._check_adapters(config)
        self.has_checksums = config.parallel_config.get("worker_extension_cls") == WORKER_EXTENSION
        await self._check_generate_endpoint()
        await self._check_tokenizer(needs.codec)
        await self._check_vocabulary(needs.vocabulary)
        release = (await self.http.get("/version", _VersionResponse, seconds=QUICK_TIMEOUT)).version
        if not release.startswith(SUPPORTED_RELEASE):
            logger.warning(
                "the server %s runs vLLM %s; agentrl supports vLLM %s", self.address, release, SUPPORTED_RELEASE
            )
        note = f"logits in {_read_logits_dtype(config.model_config, needs.head_dtype)}"
        return ServerIdentity(release=release, version=version, workers=workers, note=note)

    def _check_config(self, config: VLLMConfig, needs: ServerRequirements) -> None:
        model, device = config.model_config, config.device_config.get("device")
        if model.get("logprobs_mode") != "processed_logprobs":
            raise self.unusable_server_error(
                f"its log-probabilities are {model.get('logprobs_mode')}, which ignore the temperature: start it with "
                "--logprobs-mode processed_logprobs"
            )
        if not config.cache_config.get("enable_prefix_caching"):
            raise self.unusable_server_error("prefix caching is disabled: start it with --enable-prefix-caching")
        if self._vllm.seeded and device == "cpu" and config.scheduler_config.get("enable_chunked_prefill"):
            raise self.unusable_server_error(
                "on a CPU, vLLM crashes if a request with a seed is prefilled in chunks: start it with "
                "--no-enable-chunked-prefill, or set rollout.vllm.seeded=false"
            )
        head = _read_logits_dtype(model, needs.head_dtype)
        if head != "float32" and device == "cuda":
            raise self.unusable_server_error(
                f"the server rounds logits to {head}, but training computes them in float32: start the server with "
                f"{shlex.join(FLOAT32_HEAD)}"
            )
        if 0 <= int(model.get("max_logprobs", self._max_logprobs)) < self._max_logprobs:
            raise self.unusable_server_error(
                f"it lists at most {model['max_logprobs']} log-probabilities per token, but rollout.top_k needs "
                f"{self._max_logprobs}: start it with --max-logprobs {self._max_logprobs}"
            )
        quantization = self._vllm.quantization
        if quantization is not None and model.get("quantization") != quantization:
            raise self.unusable_server_error(
                f"its quantization is {model.get('quantization')}, but rollout.vllm.quantization={quantization}: "
                f"start it with --quantization {quantization}"
            )
        needed = needs.max_tokens
        if int(model["max_model_len"]) < needed:
            raise self.unusable_server_error(
                f"its token limit is {model['max_model_len']}, but rollout.max_prompt_tokens plus the larger "
                f"max_response_tokens of rollout and evaluation is {needed}: start it with --max-model-len {needed}, "
                "or lower these settings"
            )

    def _check_adapters(self, config: VLLMConfig) -> None:
        rank, largest = self._adapter_rank, int((config.lora_config or {}).get("max_lora_rank", 0))
        if largest < rank:
            limit = f"adapters up to rank {largest}" if largest else "no adapters"
            raise self.unusable_server_error(
                f"it accepts {limit}, but model.lora.rank={rank}: start it with the environment variable "
                f"VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 and --enable-lora --max-lora-rank {supported_lora_rank(rank)}, "
                "or set rollout.vllm.lora=merged"
            )

    async def _check_generate_endpoint(self) -> None:
        try:
            await self.score((1, 2), salt="check")
        except StatusError as error:
            if error.status in (403, 404):
                raise self.unusable_server_error(
                    f"it does not serve {GENERATE_PATH}: start it with --enable-scale-out"
                ) from error
            raise

    async def _check_tokenizer(self, codec: TextCodec) -> None:
        try:
            body = {"prompt": _TOKENIZER_TEST, "add_special_tokens": False}
            theirs = (await self.http.post("/tokenize", body, _TokenizeResponse, seconds=QUICK_TIMEOUT)).tokens
        except StatusError as error:
            raise self.unusable_server_error(
                f"it has no tokenizer (/tokenize: {error}): start it without --tokens-only"
            ) from error
        ours = codec.encode(_TOKENIZER_TEST)
        if theirs != ours:
            raise self.unusable_server_error(
                f"its tokenizer differs from the policy's: a test sentence has {len(theirs)} tokens on the server and "
                f"{len(ours)} with the policy's tokenizer; first difference: {_first_difference(ours, theirs)}"
            )

    async def _check_vocabulary(self, vocabulary: int) -> None:
        """Check that the policy's last token exists on the server and that the next id does not."""
        for token, expected in ((vocabulary - 1, True), (vocabulary, False)):
            try:
                await self.score((1, token), salt="check")
                exists = True
            except StatusError as error:
                if error.status != 400:
                    raise
                exists = False
            if exists != expected:
                less = "fewer" if expected else "more"
                raise self.unusable_server_error(
                    f"it serves a different model: the policy's vocabulary has {vocabulary} tokens, "
                    f"the server's has {less}"
                )


def _read_logits_dtype(model_config: Mapping[str, Any], policy_dtype: str = "model") -> str:
    """Return the dtype of a server's logits, from ``hf_overrides`` or ``policy_dtype``; "model": the weights' dtype.

    vLLM uses ``head_dtype`` of the model's config.json, changed by ``--hf-overrides``. /server_info lists the overrides
    but not the config, so ``policy_dtype`` comes from the policy's config.json. An edited config.json on the server
    causes no error here, but a difference of log-probabilities in the first step.

    >>> _read_logits_dtype({"dtype": "torch.bfloat16", "hf_overrides": {}})
    'bfloat16'
    >>> _read_logits_dtype({"dtype": "torch.bfloat16", "hf_overrides": {"head_dtype": "float32"}})
    'float32'
    >>> _read_logits_dtype({"dtype": "torch.bfloat16", "hf_overrides": {}}, "float32")
    'float32'
    """
    overrides = model_config.get("hf_overrides")  # a string if the override is a function
    head = overrides.get("head_dtype") or policy_dtype if isinstance(overrides, Mapping) else policy_dtype
    return str(model_config.get("dtype") if head == "model" else head).lower().removeprefix("torch.")


def _first_difference(ours: tuple[int, ...], theirs: tuple[int, ...]) -> str:
    index = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), min(len(ours), len(theirs)))
    return f"policy {list(ours[index : index + 3])}, server {list(theirs[index : index + 3])}"
