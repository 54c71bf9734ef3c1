"""Checks across settings: contradictions raise SettingsError; surprising combinations produce a warning."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from agentrl.config.settings import Settings
from agentrl.errors import SettingsError
from agentrl.rollout.engines.table import engine_facts
from agentrl_envs.settings import SimpleTIRSettings

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")


Command = Literal["train", "coldstart", "eval", "variance", "check-data", "regrade"]


def check_settings(settings: Settings, command: Command = "train") -> None:
    """Raise a SettingsError that lists, one per line, every contradiction and every setting that ``command`` lacks."""
    if command in ("check-data", "regrade"):
        return  # no model, no rollouts
    # An evaluation does not train, and it checks its prompts and its model before it samples.
    training = [] if command == "eval" else [*_length_contradictions(settings), *_objective_contradictions(settings)]
    if command == "train":
        training += _schedule_contradictions(settings)
    found = [*_lacking(settings, command), *training, *_model_problems(settings), *_server_problems(settings, command)]
    found += [*_protocol_problems(settings, command), *_session_problems(settings)]
    if found:
        raise SettingsError("\n".join(found))


def settings_warnings(settings: Settings) -> list[str]:
    """One sentence for each setting that is valid but has a surprising effect."""
    return [
        *_group_of_one(settings),
        *_inexact_reward_kl(settings),
        *_unreproducible(settings),
        *_stale_without_correction(settings),
        *_staleness_without_effect(settings),
        *_late_warmup(settings),
    ]


def _length_contradictions(settings: Settings) -> Iterator[str]:
    rollout = settings.rollout
    whole = rollout.max_prompt_tokens + rollout.max_response_tokens
    lengths = (
        f"rollout.max_prompt_tokens={rollout.max_prompt_tokens} and "
        f"rollout.max_response_tokens={rollout.max_response_tokens}"
    )
    if rollout.max_turn_tokens > rollout.max_response_tokens:
        yield (
            f"rollout.max_turn_tokens={rollout.max_turn_tokens} is above "
            f"rollout.max_response_tokens={rollout.max_response_tokens}: a turn cannot be longer than its trajectory"
        )
    if settings.model.path is None and whole > settings.model.tiny.max_positions:
        yield (
            f"{lengths} together pass model.tiny.max_positions={settings.model.tiny.max_positions}: the tiny policy "
            "cannot read a whole trajectory; raise max_positions or shorten the others"
        )
    if whole > (engine_facts(rollout).kv_slots or whole):
        yield (
            f"{lengths} together pass rollout.kv_cache_tokens={rollout.kv_cache_tokens}: not one trajectory fits the "
            f"cache; valid: at least {whole}"
        )
    if whole > settings.training.micro_batch_tokens:
        yield (
            f"{lengths} together pass training.micro_batch_tokens={settings.training.micro_batch_tokens}: a "
            f"micro-batch must hold a whole trajectory; valid: at least {whole}"
        )


def _objective_contradictions(settings: Settings) -> Iterator[str]:
    reward, kl, rollout = settings.reward, settings.kl, settings.rollout
    if reward.overlong_limit is None and reward.overlong_buffer > rollout.max_response_tokens:
        yield (
            f"reward.overlong_buffer={reward.overlong_buffer} is above "
            f"rollout.max_response_tokens={rollout.max_response_tokens}: the penalty cannot begin below 0 tokens"
        )
    trajectories = rollout.problems_per_step * rollout.group_size
    if kl.controller == "adaptive" and 5 * kl.horizon <= trajectories:
        yield (
            f"kl.horizon={kl.horizon} is not above a fifth of a step's {trajectories} trajectories: the coefficient "
            "could become negative"
        )


def _schedule_contradictions(settings: Settings) -> Iterator[str]:
    schedule = settings.rollout.schedule
    if schedule == "synchronous":
        return
    if settings.training.deterministic:
        yield (
            f"training.deterministic=true with rollout.schedule={schedule}: what a batch holds depends on timing when "
            "rollouts and training run side by side; valid: synchronous"
        )
    if engine_facts(settings.rollout).shares_gpus:
        yield (
            f"rollout.schedule={schedule} with rollout.vllm.placement=colocated: colocated servers sleep while the "
            "GPUs train; valid: synchronous, or placement=dedicated or external"
        )


def _lacking(settings: Settings, command: Command) -> Iterator[str]:
    if command == "coldstart" and settings.coldstart.demonstrations is None:
        yield (
            "coldstart.demonstrations is not set: nothing to learn from; valid: a JSONL file, builtin:arithmetic or "
            "formula:FILE (--demonstrations)"
        )
    if command == "eval" and settings.model.path is None and settings.evaluation.endpoint.url is None:
        yield "there is nothing to evaluate: give --model DIRECTORY or OWNER/NAME, or an endpoint with --base-url URL"
    if command == "eval" and settings.evaluation.endpoint.url is not None and settings.evaluation.chat_template:
        yield (
            "evaluation.chat_template=true is for models that are read here; an endpoint applies its own with "
            "evaluation.endpoint.api=chat"
        )
    if command != "train":
        return
    if not settings.data.train:
        yield "data.train is empty: nothing to train on; give a source, for example data.train.0.path=FILE.jsonl"
    updates, problems = settings.algorithm.updates_per_step, settings.rollout.problems_per_step
    if updates > problems:
        yield (
            f"algorithm.updates_per_step={updates} is above rollout.problems_per_step={problems}: every update needs "
            f"a group of its own; valid: 1 to {problems}"
        )


def _model_problems(settings: Settings) -> Iterator[str]:
    model = settings.model
    if settings.training.share_prompts and (model.gradient_checkpointing or model.attention != "sdpa"):
        yield (
            "training.share_prompts=true needs model.attention=sdpa and model.gradient_checkpointing=false (they are "
            f"{model.attention} and {str(model.gradient_checkpointing).lower()}): it reads prompts from a cache"
        )
    path = settings.model.path
    if path is None:
        return
    folder = Path(path)
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            yield f"model.path={path!r} holds no config.json: it is not a model directory of transformers"
        elif not any((folder / name).is_file() for name in _TOKENIZER_FILES):
            yield (
                f"model.path={path!r} holds a model but no tokenizer (none of {', '.join(_TOKENIZER_FILES)}); "
                "save the tokenizer there with tokenizer.save_pretrained(...)"
            )
    elif folder.exists():
        yield f"model.path={path!r} is a file; valid: a model directory or a Hugging Face id such as Qwen/Qwen2.5-7B"
    elif path.startswith(("/", ".", "~")) or path.count("/") != 1:
        yield f"model.path={path!r}: there is no such directory, and a Hugging Face id is written OWNER/NAME"


def _protocol_problems(settings: Settings, command: Command) -> Iterator[str]:
    """Contradictions of protocol hermes, which needs the chat template of a model that this process loads."""
    environment = settings.environment
    if not isinstance(environment, SimpleTIRSettings):
        return
    if environment.protocol != "hermes":
        for name in ("tools", "max_calls", "template_options"):
            default = SimpleTIRSettings.model_fields[name].get_default(call_default_factory=True)
            if getattr(environment, name) != default:
                yield (
                    f"environment.{name}={getattr(environment, name)!r} is for environment.protocol=hermes alone, it "
                    f"is {environment.protocol}"
                )
        return
    if command == "eval" and settings.evaluation.endpoint.url is not None:
        yield (
            "environment.protocol=hermes writes in the model's chat template, and an endpoint applies its own; valid "
            "with --base-url: simpletir, retool, torl, or --env reasoning"
        )
    if command == "eval" and settings.evaluation.chat_template:
        yield "evaluation.chat_template=true: environment.protocol=hermes uses the template by itself; leave it out"
    if command != "eval" and (settings.model.path is None or settings.coldstart.demonstrations is not None):
        yield (
            "environment.protocol=hermes needs a model that knows tool calls: set model.path to one with a chat "
            "template, and coldstart.demonstrations=null (demonstrations are not written as tool calls, and the "
            "embedded tiny policy has no template)"
        )


def _session_problems(settings: Settings) -> Iterator[str]:
    environment, concurrency, most = settings.environment, settings.rollout.concurrency, settings.sandbox.max_sessions
    if isinstance(environment, SimpleTIRSettings) and environment.interpreter == "session" and concurrency > most:
        yield (
            f"environment.interpreter=session with rollout.concurrency={concurrency} and sandbox.max_sessions={most}: "
            "every running trajectory may hold a session; lower the one or raise the other"
        )


def _server_problems(settings: Settings, command: Command) -> Iterator[str]:
    rollout, vllm = settings.rollout, settings.rollout.vllm
    facts = engine_facts(rollout)
    if facts.in_process:
        return
    if command != "eval" and settings.training.deterministic and not facts.reproducible:
        yield (
            "training.deterministic=true needs rollout.engine=transformers: how vLLM batches requests, and so the last "
            "digits of its log-probabilities, depends on when they arrive"
        )
    if command != "eval" and facts.shares_gpus and settings.training.zero_stage not in (1, 2):
        yield (
            f"rollout.vllm.placement=colocated with training.zero_stage={settings.training.zero_stage}: DeepSpeed "
            "moves this optimizer's state off the GPU only at stages 1 and 2; valid: 1, 2, or placement=dedicated"
        )
    for address in vllm.addresses:
        if not address.startswith(("http://", "https://")):
            yield f"rollout.vllm.addresses: {address!r} is not an address; valid: http://HOST:PORT"


def _group_of_one(settings: Settings) -> Iterator[str]:
    name = settings.algorithm.estimator
    if settings.rollout.group_size > 1 or name == "remax":  # its greedy rollout provides the variance
        return
    from agentrl.algorithms import ESTIMATORS  # needs torch: groups of one are rare, and settings are read without it

    if name not in ESTIMATORS.names() or not ESTIMATORS[name].group_based:
        if settings.algorithm.drop_zero_variance:
            yield (
                "rollout.group_size=1: every group is a single trajectory without variance, so "
                "algorithm.drop_zero_variance=true drops them all and nothing is trained"
            )
        return
    happens = "every group is a single trajectory, its baseline is 0 and its advantages are the plain rewards"
    if settings.algorithm.drop_zero_variance:
        happens = (
            "every group is a single trajectory without variance, so algorithm.drop_zero_variance=true drops them all "
            "and nothing is trained"
        )
    yield (f"rollout.group_size=1 with the group estimator algorithm.estimator={name}: {happens}; usual are 8 or 16")


def _inexact_reward_kl(settings: Settings) -> Iterator[str]:
    kl = settings.kl
    if kl.coefficient > 0 and kl.placement == "reward" and kl.resolved_estimator != "k1":
        yield (
            f"kl.placement=reward with kl.estimator={kl.estimator}: in the reward only k1 gives the gradient of the "
            "KL divergence"
        )


def _unreproducible(settings: Settings) -> Iterator[str]:
    if settings.training.deterministic and settings.training.num_processes > 1:
        yield (
            f"training.deterministic=true with training.num_processes={settings.training.num_processes}: bitwise "
            "equality is promised for one process only; sums over ranks may differ in the last digits"
        )


def _stale_without_correction(settings: Settings) -> Iterator[str]:
    if settings.rollout.staleness_bound and not settings.correction.active:
        yield (
            f"rollout.schedule={settings.rollout.schedule} trains on tokens of policies up to "
            f"{settings.rollout.staleness_bound} steps old as if the present one had sampled them; correction.weights="
            "token corrects for that"
        )


def _staleness_without_effect(settings: Settings) -> Iterator[str]:
    rollout = settings.rollout
    default = type(rollout).model_fields["max_staleness"].default
    if rollout.schedule != "asynchronous" and rollout.max_staleness != default:
        yield (
            f"rollout.max_staleness={rollout.max_staleness} has no effect with rollout.schedule={rollout.schedule}: it "
            "belongs to asynchronous"
        )


def _late_warmup(settings: Settings) -> Iterator[str]:
    warmup, steps = settings.optimizer.warmup_steps, settings.training.steps
    if warmup >= steps:
        yield (
            f"optimizer.warmup_steps={warmup} with training.steps={steps}: the learning rate never reaches "
            f"optimizer.learning_rate={settings.optimizer.learning_rate}"
        )
