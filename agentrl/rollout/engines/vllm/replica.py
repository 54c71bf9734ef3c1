"""The client of one vLLM server: the calls to it, and the checks that it is the required server."""

from __future__ import annotations

import logging
import shlex
from collections.abc import Mapping
from typing import Any, ClassVar, TypeVar

from agentrl.models.tokenizer import TextCodec
from agentrl.rollout.engines.base import CacheUse, Completion
from agentrl.rollout.engines.http import GarbageError, StatusError
from agentrl.rollout.engines.replica import LONG, QUICK, Identity, Replica, ServerNeeds, TurnRequest
from agentrl.rollout.engines.vllm.messages import (
    GENERATE,
    generate_body,
    read_cache_use,
    read_checksums,
    read_completion,
    read_models,
    read_scores,
    read_tokens,
    score_body,
)
from agentrl.rollout.engines.vllm.plan import FLOAT32_HEAD, WORKER_EXTENSION, served_rank

logger = logging.getLogger(__name__)

# Text whose tokens distinguish tokenizers: digits, blanks, code, accents, other scripts.
_TEXT = "The sum 12 + 345 = 357.\n```python\nprint(  7*8)\t# naïve, 你好, Ω\n```\n"

RELEASE = "0.32"
"""The supported vLLM release."""
_Value = TypeVar("_Value", str, int)

_CONTROLS = "it has no control endpoints: start it with the environment variable VLLM_SERVER_DEV_MODE=1"


class VLLMReplica(Replica):
    title: ClassVar[str] = "vLLM"

    def __init__(self, address: str, *, seeded: bool = True, adapter_rank: int = 0) -> None:
        """``seeded``: each request has its own seed. ``adapter_rank``: of the adapters that it will load; 0: none."""
        super().__init__(address)
        self._seeded = seeded
        self._adapter_rank = adapter_rank

    # -- sampling -------------------------------------------------------------------------------------------------

    async def generate(self, request: TurnRequest) -> Completion:
        body = generate_body(request, seeded=self._seeded)
        content = await self.http.content(GENERATE, body, seconds=None)
        return read_completion(content, request.sampling, request.eos_ids)

    async def score(self, token_ids: tuple[int, ...], *, salt: str) -> tuple[float, ...]:
        body = score_body(token_ids, salt=salt, adapter=self.adapter)
        return read_scores(await self.http.post(GENERATE, body, seconds=LONG), token_ids)

    # -- control --------------------------------------------------------------------------------------------------

    async def version(self) -> str | None:
        label = await self._value("/weight_info", "weight_version", str)
        return None if label == "default" else label

    async def cache_use(self) -> CacheUse:
        return read_cache_use(await self.http.text("/metrics", seconds=QUICK))

    async def tokens_so_far(self) -> int | None:
        try:
            return read_tokens(await self.http.text("/metrics", seconds=QUICK))
        except (StatusError, GarbageError):
            return None

    async def pause(self) -> None:
        """Pause every request, keeping its keys and values, until :meth:`resume`.

        vLLM's documentation says that ``clear_cache`` is ignored for ``keep``; vLLM 0.32 obeys it nevertheless, even
        for running requests.
        """
        await self.http.post("/pause?mode=keep&clear_cache=false", seconds=LONG)

    async def resume(self) -> None:
        await self.http.post("/resume", seconds=QUICK)

    async def load(self, directory: str) -> None:
        """Load all weights. A server that fails to do so exits."""
        body = {"method": "reload_weights", "kwargs": {"weights_path": directory}}
        await self.http.post("/collective_rpc", body, seconds=LONG)

    async def adapters(self) -> frozenset[str]:
        return read_models(await self.http.get("/v1/models", seconds=QUICK))

    async def load_adapter(self, name: str, directory: str) -> None:
        body = {"lora_name": name, "lora_path": directory}
        await self.http.command("/v1/load_lora_adapter", body, seconds=LONG)

    async def unload_adapter(self, name: str) -> None:
        await self.http.command("/v1/unload_lora_adapter", {"lora_name": name}, seconds=LONG)

    async def label(self, version: int) -> None:
        await self.http.post("/update_weight_version", {"new_version": str(version)}, seconds=QUICK)

    async def forget_prefixes(self, *, running_too: bool) -> None:
        await self.http.post(f"/reset_prefix_cache?reset_running_requests={str(running_too).lower()}", seconds=LONG)

    async def checksums(self) -> list[dict[str, tuple[int, int]]]:
        answer = await self.http.post("/collective_rpc", {"method": "agentrl_checksums"}, seconds=LONG)
        return read_checksums(answer)

    async def zero_weights(self) -> None:
        await self.http.post("/weight_checker", {"action": "reset"}, seconds=LONG)

    async def sleep(self, *, keep_weights: bool) -> None:
        """Release its GPU memory; the weights go to host memory or are lost."""
        await self.http.post(f"/sleep?level={1 if keep_weights else 2}", seconds=LONG)

    async def wake(self, tag: str) -> None:
        """Allocate memory again: for ``weights`` (whose values are back if they were kept) or for the ``kv_cache``."""
        await self.http.post(f"/wake_up?tags={tag}", seconds=LONG)

    # -- what it is -----------------------------------------------------------------------------------------------

    async def identify(self, needs: ServerNeeds) -> Identity:
        """Check the server's endpoints, settings, token limit, tokenizer and vocabulary size against the run's needs.

        Raises SettingsError, which names the difference and how to start the server; ServerCallError if it is gone.
        """
        await self.healthy()
        try:
            version = await self.version()
            config = await self._config()
            workers = await self._value("/get_world_size", "world_size", int)
        except StatusError as error:
            raise self.wrong(_CONTROLS) from error
        self._check_config(config, needs.max_tokens)
        self._check_adapters(config, self._adapter_rank)
        self.has_checksums = config.get("parallel_config", {}).get("worker_extension_cls") == WORKER_EXTENSION
        await self._check_generate()
        await self._check_tokenizer(needs.codec)
        await self._check_vocabulary(needs.vocabulary)
        vllm = await self._value("/version", "version", str)
        if not vllm.startswith(RELEASE):
            logger.warning("the server %s is vLLM %s; agentrl is made for %s", self.address, vllm, RELEASE)
        note = f"logits in {_head_dtype(config['model_config'])}"
        return Identity(release=vllm, version=version, workers=workers, note=note)

    async def _config(self) -> Mapping[str, Any]:
        info = await self.http.get("/server_info?config_format=json", seconds=4 * QUICK)
        config = info.get("vllm_config") if isinstance(info, Mapping) else None
        if not isinstance(config, Mapping) or not isinstance(config.get("model_config"), Mapping):
            raise GarbageError(f"{self.address}/server_info returned no vLLM configuration")
        return config

    async def _value(self, path: str, name: str, kind: type[_Value]) -> _Value:
        """The value of ``name`` in the answer at ``path``. Raises GarbageError unless it is a ``kind``."""
        answer = await self.http.get(path, seconds=QUICK)
        value = answer.get(name) if isinstance(answer, Mapping) else None
        if not isinstance(value, kind):
            raise GarbageError(f"{self.address}{path} returned no {name}: {answer!r:.100}")
        return value

    def _check_config(self, config: Mapping[str, Any], needed: int) -> None:
        model = config["model_config"]
        if model.get("logprobs_mode") != "processed_logprobs":
            raise self.wrong(
                f"its log-probabilities are {model.get('logprobs_mode')}, before the temperature: start it with "
                "--logprobs-mode processed_logprobs"
            )
        if not config.get("cache_config", {}).get("enable_prefix_caching"):
            raise self.wrong("it caches no prefixes: start it with --enable-prefix-caching")
        chunked = config.get("scheduler_config", {}).get("enable_chunked_prefill")
        if self._seeded and chunked and config.get("device_config", {}).get("device") == "cpu":
            raise self.wrong(
                "on a CPU it dies where a request with a seed is prefilled in parts: start it with "
                "--no-enable-chunked-prefill, or set rollout.vllm.seeded=false"
            )
        head = _head_dtype(model)
        if head != "float32" and config.get("device_config", {}).get("device") == "cuda":
            raise self.wrong(
                f"it rounds its logits to {head}, and training computes them in float32: start it with "
                f"{shlex.join(FLOAT32_HEAD)}"
            )
        if int(model["max_model_len"]) < needed:
            raise self.wrong(
                f"its token limit is {model['max_model_len']}, rollout.max_prompt_tokens and max_response_tokens of "
                f"rollout or evaluation together are {needed}: start it with --max-model-len {needed}, or lower them"
            )

    def _check_adapters(self, config: Mapping[str, object], rank: int) -> None:
        lora = config.get("lora_config")
        most = int(lora.get("max_lora_rank", 0)) if isinstance(lora, Mapping) else 0
        if most < rank:
            limit = f"at most rank {most}" if most else "none"
            raise self.wrong(
                f"of adapters it loads {limit}, and model.lora.rank={rank}: start it with the environment variable "
                f"VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 and --enable-lora --max-lora-rank {served_rank(rank)}, or set "
                "rollout.vllm.lora=merged"
            )

    async def _check_generate(self) -> None:
        try:
            await self.score((1, 2), salt="check")
        except StatusError as error:
            if error.status in (403, 404):
                raise self.wrong(f"it does not serve {GENERATE}: start it with --enable-scale-out") from error
            raise

    async def _check_tokenizer(self, codec: TextCodec) -> None:
        try:
            answer = await self.http.post("/tokenize", {"prompt": _TEXT, "add_special_tokens": False}, seconds=QUICK)
        except StatusError as error:
            raise self.wrong(f"it serves no tokenizer (/tokenize: {error}): start it without --tokens-only") from error
        tokens = answer.get("tokens") if isinstance(answer, Mapping) else None
        if not isinstance(tokens, list):
            raise GarbageError(f"{self.address}/tokenize returned no tokens: {answer!r:.100}")
        theirs, ours = tuple(tokens), codec.encode(_TEXT)
        if theirs != ours:
            raise self.wrong(
                f"it has another tokenizer than the policy: of {len(ours)} tokens of a test sentence it gives "
                f"{len(theirs)}, the first that differ are {_first_difference(ours, theirs)}"
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
                raise self.wrong(
                    f"it serves another model: the policy has {vocabulary} tokens, the server's model has {less}"
                )


def _head_dtype(model: Mapping[str, Any]) -> str:
    """The dtype of a server's logits by its ``model_config``: the override, or the model's.

    >>> _head_dtype({"dtype": "torch.bfloat16", "hf_overrides": {}})
    'bfloat16'
    >>> _head_dtype({"dtype": "torch.bfloat16", "hf_overrides": {"head_dtype": "float32"}})
    'float32'
    """
    own = str(model.get("dtype")).removeprefix("torch.")
    overrides = model.get("hf_overrides")  # text if it is a function
    head = overrides.get("head_dtype", "model") if isinstance(overrides, Mapping) else "model"
    return own if head == "model" else str(head).lower().removeprefix("torch.")


def _first_difference(ours: tuple[int, ...], theirs: tuple[int, ...]) -> str:
    index = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), min(len(ours), len(theirs)))
    return f"{list(ours[index : index + 3])} here and {list(theirs[index : index + 3])} there"
