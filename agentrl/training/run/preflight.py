"""Checks of all user input that is cheap to read, before a run directory is created.

Not checked: data sets with a Hugging Face id, which may need a download, and model weights.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from agentrl.cluster.backends import has_many_nodes
from agentrl.config import dump_yaml
from agentrl.errors import SettingsError
from agentrl.kernels import layer_energies
from agentrl.models.attention import (
    PADDED_ROWS_NOT_SHAREABLE,
    reason_attention_unavailable,
    reason_sequence_parallel_unsupported,
    reason_too_long_to_pack,
)
from agentrl.models.exactness import check_forward_matches_unpadded, packing_error, uses_padded_rows
from agentrl.models.loading import require_model_config
from agentrl.models.lora import check_peft_installed
from agentrl.models.routes import reason_routes_not_replayable
from agentrl.models.shape import read_model_shape, shape_from_config
from agentrl.models.tokenizer import read_tokenizer
from agentrl.planning.plan import memory_estimate_lines
from agentrl.problems.settings import BUILTIN, FORMULA
from agentrl.problems.sources import load_source, source_name
from agentrl.rollout.engines.base import engine_facts, engine_plugin
from agentrl.rollout.engines.transformers import TOO_LARGE_MESSAGE, should_use_vllm
from agentrl.rollout.environment import (
    build_chat_setup,
    build_rewards,
    check_environment,
    rewards_compare_answers,
    uses_chat_template,
)
from agentrl.rollout.gateway.settings import is_agent_program
from agentrl.rollout.settings import environment_compares_answers, longest_request_tokens
from agentrl.telemetry.console import Console
from agentrl.telemetry.machine import describe_machine
from agentrl.telemetry.trackers import check_trackers
from agentrl.training.coldstart.demonstrations import problems_for_length_check
from agentrl.training.coldstart.train import check_token_limits, read_coldstart_demonstrations
from agentrl.training.engine.groups import reason_ranks_not_groupable
from agentrl.training.run.launch import print_resource_plan
from agentrl.training.step.batching import describe_passes
from agentrl.training.step.objective_settings import ObjectiveSettings, estimator_requirements, loss_options
from agentrl_envs.adapters.environments import resolve_environment
from agentrl_envs.types import Problem

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from agentrl.config import Settings


def check_and_describe_inputs(settings: Settings) -> list[str]:
    """Check the user's input, and return one line for each problem file read.

    Raises SettingsError, ProblemLoadError or PluginError for invalid input, and EnvironmentContractError for missing
    columns.
    """
    check_environment(settings)  # first, because the environment's module may register an estimator or a loss
    build_rewards(settings)
    check_trackers(settings.telemetry.trackers)
    _check_required_chat_template(settings)
    objective = ObjectiveSettings.from_settings(settings)
    loss_options(objective)  # first, because an estimator may depend on how the loss weights tokens
    estimator_requirements(objective)
    _check_models_support_settings(settings)
    first: list[Problem] = []
    if settings.model.path is None or settings.coldstart.demonstrations is not None:
        first += [item.problem for item in read_coldstart_demonstrations(settings).demonstrations[:1]]
    sources = [(entry, rewards_compare_answers(settings)) for entry in settings.data.train]
    sources += [(entry, environment_compares_answers(settings)) for entry in settings.data.eval]
    loaded = [
        load_source(entry, seed=settings.seed, answered=answered) for entry, answered in sources if entry.is_local
    ]
    check_teacher_sources(settings)
    if not is_agent_program(settings.env):
        factory = resolve_environment(settings.env)
        for problem in [*first, *(one.source.problem(0) for one in loaded)]:
            factory.problem_columns(problem)
    return [one.report.describe() for one in loaded if one.report is not None]


def check_teacher_sources(settings: Settings) -> None:
    """Raise SettingsError if a source has no teacher although other sources do, or if a teacher has no source."""
    teachers = settings.teacher.settings_by_source
    sources = {source_name(entry) for entry in settings.data.train}
    unknown, without = settings.teacher.by_source.keys() - sources, sources - teachers.keys()
    if unknown or (without and teachers and None not in teachers):
        raise SettingsError(
            f"teacher.by_source names the sources {', '.join(settings.teacher.by_source)}, but data.train has "
            f"{', '.join(sorted(sources))}: every source needs a teacher; teacher.path is the teacher of sources that "
            "are not named"
        )


def unmet_machine_requirements(settings: Settings) -> list[str]:
    """Return a message for each requirement of the settings that this machine does not meet."""
    attention, ranks = settings.model.attention, settings.training.num_processes
    problems = [
        None if attention == "auto" else reason_attention_unavailable(attention, dtype=settings.model.dtype),
        reason_ranks_not_groupable(settings.training.sequence_parallel, ranks=ranks),
    ]
    longest = longest_request_tokens(settings.rollout, settings.evaluation.max_response_tokens)
    try:
        engine_plugin(settings.rollout).check_machine(settings, longest=longest, training_gpus=ranks)
    except SettingsError as error:
        problems.append(str(error))
    return [problem for problem in problems if problem is not None]


def _check_models_support_settings(settings: Settings) -> None:
    """Raise SettingsError if a model does not support the settings for LoRA, lengths or sequence parallelism.

    Also raises SettingsError if the packed forward pass of a model (policy, reference, teacher or critic) differs from
    the model's own.
    """
    if settings.model.lora.rank:
        check_peft_installed()
    longest = longest_request_tokens(settings.rollout, settings.evaluation.max_response_tokens)
    for model in settings.models_on_training_ranks:
        path = model.path
        try:
            config = require_model_config(model)
        except SettingsError:
            if path is not None and Path(path).exists():
                raise
            continue  # reported when the model is read
        if model.lora.targets and path == settings.model.path:
            shape_from_config(str(path), config, model.lora)
        padded = uses_padded_rows(model, config)  # a dry run may be on a machine without the backend for packed rows
        check_forward_matches_unpadded(path or "the embedded tiny policy", config, padded=padded)
        for reason in (
            _reason_not_paddable(settings, config) if padded else None,
            reason_sequence_parallel_unsupported(config, settings.training.sequence_parallel),
            reason_too_long_to_pack(config, longest),
            _reason_routes_not_replayable(settings, config, padded=padded) if path == settings.model.path else None,
            _reason_no_exact_energies(settings, config) if path == settings.model.path else None,
        ):
            if reason is not None:
                raise SettingsError(reason)


def _reason_routes_not_replayable(settings: Settings, config: PreTrainedConfig, *, padded: bool) -> str | None:
    """Return the reason why the routes of the policy cannot be replayed with these settings, or None if they can."""
    replay = f"correction.route_replay={settings.correction.route_replay}"
    if settings.correction.route_replay == "off":
        return None
    if padded:
        return (
            f"{replay} needs packed trajectories, but the model reads padded ones (model.rows): set "
            "correction.route_replay=off"
        )
    return reason_routes_not_replayable(config)


def _reason_no_exact_energies(settings: Settings, config: PreTrainedConfig) -> str | None:
    """Return the reason why the policy has no exact energies, or None if they are available or not needed."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.model_type, config.model_type)
    needed = estimator_requirements(ObjectiveSettings.from_settings(settings)).inputs
    if "trajectory_energy" not in needed or name in layer_energies.SUPPORTED_MODELS:
        return None
    return (
        f"algorithm.estimator={settings.algorithm.estimator}: exact energies support "
        f"{', '.join(layer_energies.SUPPORTED_MODELS)} of transformers, not {name}; use algorithm.estimator=ogb"
    )


def _reason_not_paddable(settings: Settings, config: PreTrainedConfig) -> str | None:
    """Return the reason why a model cannot read padded trajectories with these settings, or None if it can."""
    problem = packing_error(config)
    if settings.training.sequence_parallel > 1:
        return PADDED_ROWS_NOT_SHAREABLE if problem is None else str(problem)
    if settings.training.zero_stage == 3:  # ranks run different numbers of forward passes, which are collective
        return (
            "training.zero_stage=3 needs packed trajectories, but the model reads padded ones (model.rows): set "
            "training.zero_stage=2"
        )
    if problem is not None and engine_facts(settings.rollout).in_process:
        return (
            f"rollout.engine={settings.rollout.engine} samples only from models that support packed rows: set "
            f"rollout.engine=vllm ({problem})"
        )
    return None


def _check_required_chat_template(settings: Settings) -> None:
    """Raise SettingsError if the protocol needs a chat template and the model has no usable template."""
    path = settings.model.path
    if path is None or not uses_chat_template(settings):
        return
    try:
        tokenizer = read_tokenizer(path)
    except OSError:  # reported when the model is read
        return
    build_chat_setup(settings, tokenizer, path)


def dry_run(settings: Settings) -> None:
    """Print what ``agentrl train`` would run with these settings."""
    problems = check_and_describe_inputs(settings)
    shown = settings.coldstart.demonstrations
    if shown is not None and not shown.startswith((BUILTIN, FORMULA)) and not is_agent_program(settings.env):
        asyncio.run(check_token_limits(settings, problems_for_length_check(settings)))
    console = Console(settings.telemetry)
    console.note(dump_yaml(settings).rstrip())
    console.note("")
    for line in [*describe_machine(), *problems]:
        console.note(line)
    console.note(f"rollouts: {engine_facts(settings.rollout).about}")
    longest = settings.rollout.max_prompt_tokens + settings.rollout.max_response_tokens
    passes = describe_passes(
        ObjectiveSettings.from_settings(settings),
        group_tokens=settings.rollout.largest_group * settings.rollout.branching.max_leaves * longest,
        budget=settings.training.micro_batch_tokens,
    )
    console.note(f"passes: {passes}")
    for problem in unmet_machine_requirements(settings):
        console.warning(f"this machine cannot run these settings: {problem}")
    if has_many_nodes(settings.cluster.kind):
        print_resource_plan(settings, console)
    try:
        require_model_config(settings.model)
    except SettingsError as error:
        console.note(f"memory: cannot be estimated: {error}")
        return
    shape = read_model_shape(settings.model)  # raises SettingsError for errors in the user's settings
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if engine_facts(settings.rollout).in_process and should_use_vllm(shape.parameters, device):
        console.warning(TOO_LARGE_MESSAGE)
    critic = "values" in estimator_requirements(ObjectiveSettings.from_settings(settings)).inputs
    for line in memory_estimate_lines(settings, shape, critic=critic):
        console.note(line)
