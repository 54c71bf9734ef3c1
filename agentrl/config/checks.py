"""Checks across settings. Contradictions raise SettingsError, and surprising combinations produce warnings."""

from __future__ import annotations

import json
from collections.abc import Iterator
from operator import attrgetter
from pathlib import Path
from typing import Literal

from agentrl.cluster.backends import has_many_nodes
from agentrl.config.settings import Settings
from agentrl.errors import SettingsError
from agentrl.models.settings import LoRASettings
from agentrl.problems.settings import HARBOR
from agentrl.rollout.engines.base import engine_facts, engine_plugin
from agentrl.rollout.gateway.settings import is_agent_program, runs_in_separate_process
from agentrl_envs.settings import ChatSettings, ContainerSettings, SimpleTIRSettings, ToolChatSettings

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")


Command = Literal["train", "coldstart", "eval", "variance", "check-data", "regrade", "plan"]


def check_settings(settings: Settings, command: Command = "train") -> None:
    """Raise SettingsError with one line for each contradiction and each missing setting that ``command`` requires."""
    if command in ("check-data", "regrade", "plan"):
        return  # these commands need no model, need no rollouts, or accept incomplete settings
    problems = [*_missing_settings(settings, command)]
    if command != "eval":  # an evaluation does not train, and it checks prompts and model before sampling
        problems += [*_length_errors(settings), *_objective_errors(settings)]
    if command == "train":
        problems += [*_schedule_errors(settings), *_cluster_errors(settings), *_branching_errors(settings)]
        problems += _route_replay_errors(settings)
    problems += [*_model_errors(settings), *_engine_errors(settings, command), *_session_errors(settings)]
    problems += [*_protocol_errors(settings, command), *_agent_errors(settings, command)]
    problems += [*_container_deadlocks(settings), *_partial_vocabulary_errors(settings, command)]
    if problems:
        raise SettingsError("\n".join(problems))


def _quote(settings: Settings, *keys: str) -> str:
    """Format ``key=value`` for each key, joined by "and"."""
    values = [attrgetter(key)(settings) for key in keys]
    texts = [value if isinstance(value, str) else json.dumps(value) for value in values]
    return " and ".join(map("{}={}".format, keys, texts))


def _length_errors(settings: Settings) -> Iterator[str]:
    rollout = settings.rollout
    if rollout.max_turn_tokens > rollout.max_response_tokens:
        yield (
            f"{_quote(settings, 'rollout.max_turn_tokens')} exceeds {_quote(settings, 'rollout.max_response_tokens')}: "
            "a turn cannot be longer than its trajectory"
        )
    limits = {"training.micro_batch_tokens": "a micro-batch must hold a complete trajectory"}
    if settings.model.path is None:
        limits["model.tiny.max_positions"] = "the tiny policy must accept a complete trajectory"
    if engine_facts(rollout).kv_slots:
        limits["rollout.kv_cache_tokens"] = "the KV cache must hold at least one trajectory"
    longest = rollout.max_prompt_tokens + rollout.max_response_tokens
    lengths = _quote(settings, "rollout.max_prompt_tokens", "rollout.max_response_tokens")
    for key, reason in limits.items():
        if longest > attrgetter(key)(settings):
            yield f"{lengths} together exceed {_quote(settings, key)}: {reason}; valid: at least {longest}"


def _objective_errors(settings: Settings) -> Iterator[str]:
    reward, kl, rollout = settings.reward, settings.kl, settings.rollout
    if reward.overlong_limit is None and reward.overlong_buffer > rollout.max_response_tokens:
        yield (
            f"{_quote(settings, 'reward.overlong_buffer')} exceeds {_quote(settings, 'rollout.max_response_tokens')}: "
            "the penalty cannot begin below 0 tokens"
        )
    teacher = settings.teacher
    if teacher.url is not None or any(one.url is not None for one in teacher.by_source.values()):
        if (teacher.url is not None and teacher.path is None) or teacher.hint is not None:
            yield "teacher.url requires teacher.path (the teacher's name at the server) and cannot use teacher.hint"
        if (teacher.temperature or rollout.temperature) != 1 or rollout.restricts_sampling:
            yield (
                "teacher.url: servers score at temperature 1 and over the whole vocabulary; set "
                "teacher.temperature=1 and sample without rollout.top_k, top_p and min_p"
            )
    if settings.algorithm.estimator == "none" and not teacher.active:
        yield "algorithm.estimator=none trains only with a teacher: set teacher.path, or choose another estimator"
    trajectories = rollout.problems_per_step * rollout.group_size
    if kl.controller == "adaptive" and 5 * kl.horizon <= trajectories:
        yield (
            f"{_quote(settings, 'kl.horizon')} must exceed one fifth of the {trajectories} trajectories of a step: "
            "otherwise the coefficient can become negative"
        )


def _schedule_errors(settings: Settings) -> Iterator[str]:
    schedule = _quote(settings, "rollout.schedule")
    if settings.rollout.schedule == "synchronous":
        return
    if settings.training.deterministic:
        yield (
            f"training.deterministic=true conflicts with {schedule}, because with concurrent sampling and training the "
            "contents of a batch depend on timing: set rollout.schedule=synchronous"
        )
    sharing = engine_facts(settings.rollout).shares_gpus
    if sharing:
        yield (
            f"{schedule} conflicts with {sharing}, because the engine sleeps while the GPUs train: set "
            "rollout.schedule=synchronous, or run the engine on other GPUs"
        )


def _missing_settings(settings: Settings, command: Command) -> Iterator[str]:
    endpoint = settings.evaluation.endpoint.url is not None
    if command == "coldstart" and settings.coldstart.demonstrations is None:
        yield (
            "coldstart.demonstrations is not set, so there is no data to train on: set --demonstrations "
            "to a JSONL file, builtin:arithmetic or formula:FILE"
        )
    if command == "eval" and settings.model.path is None and not endpoint:
        yield "no model to evaluate: set --model DIRECTORY or OWNER/NAME, or --base-url URL for an endpoint"
    if command != "train":
        return
    if not settings.data.train:
        yield "data.train is empty, so there is no data to train on: set a source, such as data.train.0.path=FILE.jsonl"
    endless = [source.path for source in settings.data.train if source.is_generated and source.limit is None]
    if settings.data.curriculum != "uniform" and endless:
        yield (
            f"data.curriculum={settings.data.curriculum} needs problems that repeat, but {endless[0]} is endless: set "
            "limit on this source, or data.curriculum=uniform"
        )
    updates, problems = "algorithm.updates_per_step", "rollout.problems_per_step"
    if settings.algorithm.updates_per_step > settings.rollout.problems_per_step:
        yield (
            f"{_quote(settings, updates)} exceeds {_quote(settings, problems)}, but every update needs a separate "
            f"group; valid: 1 to {settings.rollout.problems_per_step}"
        )


def _model_errors(settings: Settings) -> Iterator[str]:
    model = settings.model
    for name in ("alpha", "targets", "learning_rate_factor") if model.lora.rank == 0 else ():
        if getattr(model.lora, name) != getattr(LoRASettings(), name):
            yield (
                f"{_quote(settings, f'model.lora.{name}')} has no effect with model.lora.rank=0, which trains all "
                "weights: set model.lora.rank from 1 to 512 to train adapters"
            )
    training, bfloat16 = settings.training, model.dtype == "bfloat16"
    if training.offload == "all" and training.zero_stage < 3:
        yield f"training.offload=all requires training.zero_stage=3, but it is {training.zero_stage}"
    if training.offload == "optimizer" and training.zero_stage == 0 and not bfloat16:
        yield "training.offload=optimizer requires training.zero_stage=1, 2 or 3, but it is 0"
    if model.path is None:
        return
    folder, assignment = Path(model.path), f"model.path={model.path!r}"
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            yield f"{assignment} has no config.json, so it is not a model directory in Hugging Face format"
        elif not any((folder / name).is_file() for name in _TOKENIZER_FILES):
            yield (
                f"{assignment} has a model but no tokenizer (none of {', '.join(_TOKENIZER_FILES)}); "
                "save the tokenizer there with tokenizer.save_pretrained(...)"
            )
    elif folder.exists():
        yield f"{assignment} is a file; valid: a model directory or a Hugging Face id such as Qwen/Qwen2.5-7B"
    elif model.path.startswith(("/", ".", "~")) or model.path.count("/") != 1:
        yield f"{assignment} does not exist, and it is not a Hugging Face id (OWNER/NAME)"


def _protocol_errors(settings: Settings, command: Command) -> Iterator[str]:
    """Yield contradictions between the settings of tool protocols and chat templates."""
    environment = settings.environment
    if not isinstance(environment, ChatSettings):
        return
    hermes = isinstance(environment, SimpleTIRSettings) and environment.protocol == "hermes"
    templated = environment.chat == "always" or (hermes and environment.chat == "auto")
    if isinstance(environment, SimpleTIRSettings) and not hermes:
        for name in ("tools", "max_calls", "mcp_sessions"):
            yield from _inapplicable_errors(
                environment, name, f"environment.protocol=hermes, not to {environment.protocol}"
            )
    if isinstance(environment, ToolChatSettings) and not (hermes and templated):
        yield from _inapplicable_errors(environment, "history", "tool calls in the chat template")
    if not templated:
        yield from _inapplicable_errors(environment, "template_options", "conversations in the chat template")
        return
    setting = "environment.protocol=hermes" if hermes else "environment.chat=always"
    if command == "eval" and settings.evaluation.endpoint.url is not None:
        yield (
            f"{setting} uses the model's chat template, but an endpoint applies its own; valid with --base-url: "
            + ("simpletir, retool, torl, or --env reasoning" if hermes else "environment.chat=auto")
        )
    rerendered = isinstance(environment, ToolChatSettings) and environment.history == "template"
    if rerendered and settings.evaluation.falsified:
        yield "evaluation.falsified=true is not supported with environment.history=template: reset one of the settings"
    if command != "eval" and (settings.model.path is None or settings.coldstart.demonstrations is not None):
        yield (
            f"{setting} requires a model {'that supports tool calls' if hermes else 'with a chat template'}: "
            "set model.path to a model with a chat template, and coldstart.demonstrations=null (demonstrations are "
            "plain text, and the embedded tiny policy has no chat template)"
        )


def _inapplicable_errors(environment: ChatSettings, name: str, where: str) -> Iterator[str]:
    default = type(environment).model_fields[name].get_default(call_default_factory=True)
    if getattr(environment, name) != default:
        yield f"environment.{name}={getattr(environment, name)!r} applies only to {where}"


def _agent_errors(settings: Settings, command: Command) -> Iterator[str]:
    if command == "eval" and is_agent_program(settings.env) and settings.evaluation.endpoint.url is not None:
        yield (
            f"env={settings.env!r} runs through the gateway, which requires a local engine: set --model and leave "
            "out --base-url"
        )
    if runs_in_separate_process(settings.env) and not (settings.gateway.agent_rewards or settings.reward.functions):
        yield (
            f"env={settings.env!r} has no reward: set a reward function with --reward module:function, or "
            "set gateway.agent_rewards=true to accept rewards from the program "
            "(docs/how-to/agents.md describes the risks)"
        )


def _container_deadlocks(settings: Settings) -> Iterator[str]:
    """Yield settings that make rollouts wait forever for each other's containers."""
    if not (settings.env.startswith(HARBOR) and settings.training.deterministic):
        return
    default = ContainerSettings.model_fields["containers"].default
    containers = (settings.environment.model_extra or {}).get("containers", default)
    if isinstance(containers, int) and containers < settings.rollout.concurrency:
        yield (
            f"training.deterministic=true samples the turns of all rollouts together, but environment.containers="
            f"{containers} < {_quote(settings, 'rollout.concurrency')}: set rollout.concurrency={containers}"
        )


def _branching_errors(settings: Settings) -> Iterator[str]:
    """Yield errors for settings that need whole rollouts and for environments whose rollouts cannot be forked."""
    width = settings.rollout.branching.width
    if width == 1:
        return
    forks = f"rollout.branching.width={width}"
    environment = settings.environment.model_dump()
    if is_agent_program(settings.env):
        yield f"{forks}: rollouts of the agent program env={settings.env} cannot be forked; set the width to 1"
    elif settings.env.startswith(HARBOR):
        yield f"{forks}: the containers of env={settings.env} cannot be copied; set the width to 1"
    if environment.get("history") == "template":
        yield f"{forks} and environment.history=template: re-rendered histories cannot be forked; set history=keep"
    if environment.get("mcp_sessions") == "trajectory":
        for tool in (name for name in environment.get("tools", ()) if name.startswith("mcp:")):
            yield (
                f"{forks}: the state of the MCP server {tool} cannot be copied; if the server is stateless, set "
                "environment.mcp_sessions=shared"
            )
    if settings.reward.functions:
        yield f"{forks} and reward.functions: a function rewards a whole conversation; use the environment's reward"
    if settings.reward.overlong_buffer:
        yield f"{forks} and reward.overlong_buffer: the length penalty needs whole responses; set overlong_buffer=0"
    for key in ("weights", "ratio_mask", "divergence_level"):
        value = getattr(settings.correction, key)
        if value not in (None, "token"):
            yield f"{forks} and correction.{key}={value}: ratios of sequences need whole responses; use token ratios"
    for key in ("void_turns", "truncated"):
        if getattr(settings.algorithm, key) == "mask":
            yield (
                f"{forks} and algorithm.{key}=mask: the tokens before a fork would train on the rewards of masked "
                "branches; use exclude or train"
            )
    from agentrl.algorithms import ESTIMATORS, LOSSES  # imports torch, so imported only if rollouts fork

    name, loss = settings.algorithm.estimator, settings.algorithm.loss
    if name in ESTIMATORS.names() and ESTIMATORS[name].by_column:
        yield f"{forks} and algorithm.estimator={name}: it has no baseline for forked rollouts; use tir_otb"
    if loss in LOSSES.names() and "token_mean" not in LOSSES.traits(loss).aggregations:
        yield f"{forks} and algorithm.loss={loss}: its ratio needs whole responses; use ppo"


def _cluster_errors(settings: Settings) -> Iterator[str]:
    cluster, ranks = settings.cluster, settings.training.num_processes
    many_nodes = has_many_nodes(cluster.kind)
    if cluster.nodes > 1 and not many_nodes:
        yield f"{_quote(settings, 'cluster.nodes')} requires cluster.kind=ray; got {_quote(settings, 'cluster.kind')}"
    elif ranks % cluster.nodes:
        yield (
            f"{_quote(settings, 'training.num_processes')} cannot be divided evenly among "
            f"{_quote(settings, 'cluster.nodes')}; valid: a multiple of {cluster.nodes}"
        )
    if cluster.kind == "environment" and cluster.restarts:
        yield f"{_quote(settings, 'cluster.restarts')} conflicts with cluster.kind=environment: set it in the launcher"
    if settings.sandbox.scheme == "ray" and not many_nodes:
        yield f"sandbox.url=ray:// requires cluster.kind=ray; got {_quote(settings, 'cluster.kind')}"
    sharing = engine_facts(settings.rollout).shares_gpus
    if cluster.nodes > 1 and sharing:
        yield (
            f"{sharing} conflicts with {_quote(settings, 'cluster.nodes')}, because servers start on the node of rank "
            "0: run the engine on other GPUs, or set the addresses of servers on other nodes"
        )


def _session_errors(settings: Settings) -> Iterator[str]:
    environment, rollout, most = settings.environment, settings.rollout, settings.sandbox.max_sessions
    if not isinstance(environment, SimpleTIRSettings) or environment.interpreter != "session":
        return
    branching = rollout.branching
    forked = max(1, rollout.concurrency // branching.max_live_branches) * branching.max_open_episodes
    needed = max(rollout.concurrency, forked)  # evaluations do not fork
    if needed > most:
        forks = "" if branching.width == 1 else f", lower rollout.branching.live={branching.live}"
        yield (
            f"environment.interpreter=session with rollout.concurrency={rollout.concurrency} and "
            f"sandbox.max_sessions={most}: active trajectories may hold {needed} sessions; lower rollout.concurrency"
            f"{forks} or raise sandbox.max_sessions"
        )
    processes = settings.sandbox.max_processes
    if branching.width > 1 and branching.max_open_episodes >= processes:
        yield (
            f"environment.interpreter=session with rollout.branching.leaves={branching.leaves} and "
            f"sandbox.max_processes={processes}: the {branching.max_open_episodes} sessions of a tree share "
            "max_processes; lower rollout.branching.live or raise sandbox.max_processes"
        )


def _engine_errors(settings: Settings, command: Command) -> Iterator[str]:
    plugin = engine_plugin(settings.rollout)
    plugin.options(settings.rollout)  # raises SettingsError
    yield from plugin.problems(settings, cluster=settings.cluster.kind)
    facts = plugin.facts(settings.rollout)
    if command != "eval" and settings.training.deterministic and not facts.reproducible:
        yield (
            "training.deterministic=true requires rollout.engine=transformers, because servers batch requests in the "
            "order of arrival, which affects the last digits of the log-probabilities"
        )
    if command == "train" and facts.approximation and not settings.correction.active:
        yield f"{facts.approximation} samples from a policy other than the trained one: set correction.weights=token"
    if command != "eval" and facts.shares_gpus and settings.training.zero_stage not in (1, 2):
        yield (
            f"{facts.shares_gpus} conflicts with {_quote(settings, 'training.zero_stage')}, because DeepSpeed moves "
            "the optimizer state off the GPU only at stages 1 and 2: set 1 or 2, or run the engine on other GPUs"
        )


def _partial_vocabulary_errors(settings: Settings, command: Command) -> Iterator[str]:
    """Yield settings that cannot be combined with sampling from a part of the vocabulary."""
    rollout = settings.rollout
    if command == "eval" or not rollout.restricts_sampling:
        return
    names = ("top_k", "top_p", "min_p")
    limits = _quote(
        settings, *(f"rollout.{key}" for key in names if getattr(rollout, key) != type(rollout)().model_dump()[key])
    )
    most = engine_facts(rollout).largest_support
    if most == 0:
        yield (
            f"{limits}: rollout.engine={rollout.engine} does not return the tokens that it samples from; "
            "reset these settings"
        )
    elif most is not None and not 1 <= rollout.top_k <= most:
        yield (
            f"{limits}: rollout.engine={rollout.engine} returns at most {most} of the tokens that it samples from, so "
            f"set rollout.top_k from 1 to {most}, or sample from the whole vocabulary"
        )
    if settings.training.head_backend == "triton":
        yield f"{limits}: training.head_backend=triton needs the whole vocabulary; set training.head_backend=auto"
    yield from _exact_energy_errors(settings, limits, "need the whole vocabulary")
    if command == "variance":
        yield f"{limits}: the laboratory samples from the whole vocabulary; reset these settings"


def _route_replay_errors(settings: Settings) -> Iterator[str]:
    """Yield settings that cannot be combined with route replay."""
    replay, engine = settings.correction.route_replay, settings.rollout.engine
    if replay == "off":
        return
    if replay == "rollout" and not engine_facts(settings.rollout).returns_routes:
        yield f"correction.route_replay=rollout: rollout.engine={engine} returns no routes; set route_replay=trainer"
    yield from _exact_energy_errors(settings, f"correction.route_replay={replay}", "would use other experts")


def _exact_energy_errors(settings: Settings, setting: str, reason: str) -> Iterator[str]:
    from agentrl.algorithms import ESTIMATORS  # imports torch, so imported only for non-default settings

    name = settings.algorithm.estimator
    if name in ESTIMATORS.names() and "trajectory_energy" in ESTIMATORS[name].requires:
        yield f"{setting}: the exact energies of algorithm.estimator={name} {reason}; use algorithm.estimator=ogb"


def settings_warnings(settings: Settings) -> list[str]:
    """Return one sentence for each setting that is valid but has a surprising effect."""
    return [
        *_group_warnings(settings),
        *_branch_warnings(settings),
        *_schedule_warnings(settings),
        *_objective_warnings(settings),
    ]


def _group_warnings(settings: Settings) -> Iterator[str]:
    name, drops = settings.algorithm.estimator, settings.algorithm.drop_zero_variance
    if settings.rollout.group_size > 1:
        return
    from agentrl.algorithms import ESTIMATORS  # imports torch, so imported only for groups of one

    entry = ESTIMATORS[name] if name in ESTIMATORS.names() else None
    if entry is not None and "greedy_returns" in entry.requires:  # the baseline is the greedy rollout, not the group
        return
    of_groups = entry is not None and entry.group_based and not entry.equal_groups
    drops = not (entry is not None and entry.equal_groups) if drops is None else drops
    if not of_groups and not drops:
        return
    estimator = f" with the group estimator algorithm.estimator={name}" if of_groups else ""
    effect = "so the baseline is 0 and the advantages are the plain rewards"
    if drops:
        effect = "which has no variance, so algorithm.drop_zero_variance drops all groups and nothing is trained"
    yield f"rollout.group_size=1{estimator}: every group is a single trajectory, {effect}; typical sizes are 8 and 16"


def _branch_warnings(settings: Settings) -> Iterator[str]:
    name = settings.algorithm.estimator
    rerendered = settings.environment.model_dump().get("history") == "template"
    if not rerendered and not is_agent_program(settings.env):
        return
    from agentrl.algorithms import ESTIMATORS  # imports torch, so imported only if rollouts can branch

    if name in ESTIMATORS.names() and ESTIMATORS[name].by_column:
        yield (
            f"algorithm.estimator={name} does not define baselines across the branches of a rollout, so groups with a "
            "branched rollout use one baseline per rollout; algorithm.estimator=tir_otb supports token baselines for "
            "such groups"
        )


def _schedule_warnings(settings: Settings) -> Iterator[str]:
    rollout = settings.rollout
    if settings.training.deterministic and settings.training.num_processes > 1:
        yield (
            f"training.deterministic=true with {_quote(settings, 'training.num_processes')}: bitwise equality is "
            "guaranteed for one process only; sums over ranks can differ in the last digits"
        )
    if rollout.staleness_bound and not settings.correction.active:
        yield (
            f"{_quote(settings, 'rollout.schedule')} trains on tokens of policies up to {rollout.staleness_bound} "
            "steps old without a correction; set correction.weights=token"
        )
    if rollout.schedule != "asynchronous" and rollout.max_staleness != type(rollout)().max_staleness:
        yield (
            f"{_quote(settings, 'rollout.max_staleness')} has no effect with {_quote(settings, 'rollout.schedule')}: "
            "only schedule=asynchronous uses it"
        )


def _objective_warnings(settings: Settings) -> Iterator[str]:
    kl, optimizer = settings.kl, settings.optimizer
    if kl.coefficient > 0 and kl.placement == "reward" and kl.resolved_estimator != "k1":
        yield (
            f"kl.placement=reward with kl.estimator={kl.estimator}: as part of the reward, only k1 has the gradient of "
            "the KL divergence"
        )
    if optimizer.warmup_steps >= settings.training.steps:
        yield (
            f"{_quote(settings, 'optimizer.warmup_steps')} with {_quote(settings, 'training.steps')}: the learning "
            f"rate never reaches {_quote(settings, 'optimizer.learning_rate')}"
        )
