"""``agentrl variance``: roll out a large sample, measure every estimator on it, report and plot the results."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentrl.errors import SettingsError, WorldError
from agentrl.kernels import Backend
from agentrl.lab.choices import Choice, read_choices
from agentrl.lab.measure import measure
from agentrl.lab.plots import draw_all
from agentrl.lab.sample import look_at, usable
from agentrl.lab.settings import LabSettings
from agentrl.lab.summary import Line, as_records, energy_correlations, summarise, verdicts
from agentrl.models.attention import choose_attention
from agentrl.models.loading import read_model
from agentrl.models.policy import PolicyModel
from agentrl.models.tokenizer import TextCodec, read_tokenizer
from agentrl.problems.settings import ProblemSourceSettings
from agentrl.problems.sources import evaluation_set, load_source
from agentrl.rollout.driver import Driver
from agentrl.rollout.engines.transformers import TransformersEngine
from agentrl.rollout.environment import build_rewards, check_environment, environment_and_codec, needs_answers
from agentrl.rollout.filters import FilterRules, filter_groups
from agentrl.rollout.work_queue import RolloutRequest
from agentrl.telemetry.console import Console
from agentrl.telemetry.files import atomic_write
from agentrl.trajectory import Group
from agentrl_envs.episode import Environment
from agentrl_envs.types import Problem

if TYPE_CHECKING:
    from agentrl.lab.settings import LabSections

# A temperature at which the most likely token is all but certain.
_GREEDY = 1e-4
# Played for each one asked for: some problems are always or never solved, and some trajectories are no data.
_MORE_PROBLEMS, _MORE_SAMPLES = 2.0, 1.1


def prepare(
    settings: LabSections, *, problems: str | None, group_sizes: str | None, estimators: str | None, samples: int | None
) -> tuple[LabSettings, list[Problem]]:
    """Settings and problems from the command line's arguments, checked before a policy is made or anything is sampled.

    Raises SettingsError, ProblemError or PluginError.
    """
    check_environment(settings)  # first: its module may register an estimator
    lab = lab_settings(group_sizes=group_sizes, estimators=estimators, samples=samples)
    check_lab(lab)
    return lab_problems(settings, lab, problems)


def lab_settings(*, group_sizes: str | None, estimators: str | None, samples: int | None) -> LabSettings:
    """Settings from the command line's arguments; an omitted one has its default. Raises SettingsError."""
    given: dict[str, object] = {}
    if group_sizes is not None:
        given["group_sizes"] = sizes = [part.strip() for part in group_sizes.split(",")]
        wrong = [part for part in sizes if not part.isdigit()]
        if wrong:
            raise SettingsError(f"--group-sizes: {wrong[0]!r} is not a whole number; write them as 4,8,16")
    if estimators is not None:
        given["estimators"] = [part.strip() for part in estimators.split(",") if part.strip()]
    if samples is not None:
        given["samples"] = samples
        if samples < 4:
            raise SettingsError(f"--samples {samples}: at least 4, two groups of two")
    return LabSettings.model_validate(given)


def check_lab(lab: LabSettings) -> tuple[Choice, ...]:
    """The chosen estimators. Raises SettingsError before anything is sampled."""
    if not lab.group_sizes or len(set(lab.group_sizes)) < len(lab.group_sizes):
        raise SettingsError(
            f"--group-sizes {','.join(map(str, lab.group_sizes))}: give different sizes, such as 4,8,16"
        )
    wrong = [size for size in lab.group_sizes if not 2 <= size <= lab.samples // 2]
    if wrong:
        raise SettingsError(
            f"--group-sizes {','.join(map(str, wrong))}: a group has 2 to {lab.samples // 2} trajectories, half of the "
            f"{lab.samples} samples of a problem, so that a variance can be taken; raise --samples or lower the size"
        )
    return read_choices(lab.estimators)


def variance_command(
    settings: LabSections,
    model: str,
    lab: LabSettings,
    problems: Sequence[Problem],
    output: Path,
    *,
    head_backend: Backend,
) -> list[Line]:
    """Measure with the policy in ``model`` on ``problems`` and write result and pictures to ``output``."""
    choices = check_lab(lab)
    console = Console(settings.telemetry)
    _make(output)
    tokenizer = read_tokenizer(model)
    environment, codec = environment_and_codec(settings, tokenizer, model)
    causal_lm = read_model(model, settings.model).eval()
    played, greedy = asyncio.run(_play(settings, causal_lm, environment, codec, lab, problems))
    groups = _measurable(played, lab, console)
    attention = choose_attention(settings.model.attention, causal_lm.config, dtype=settings.model.dtype)
    policy = PolicyModel(causal_lm, backend=head_backend, attention=attention)
    temperature = settings.rollout.temperature
    samples = [
        look_at(policy, group, pad_id=codec.pad_id, temperature=temperature, budget=lab.micro_batch_tokens,
                greedy_return=greedy.get(group.index, 0.0))
        for group in groups
    ]  # fmt: skip
    with console.progress(len(samples), unit="problem") as progress:
        measured = measure(
            policy, samples, choices, lab, temperature=temperature, seed=settings.seed,
            progress=lambda done: progress.update(done, {}),
        )  # fmt: skip
    lines = summarise(measured, resamples=lab.bootstrap, seed=settings.seed)
    said = verdicts(lines)
    _show(console, lines, said)
    record = {
        "model": model,
        "seed": settings.seed,
        "temperature": temperature,
        "settings": lab.model_dump(mode="json"),
        "problems": measured.problems,
        "parameters": measured.parameters,
        "lines": as_records(lines),
        "energy_correlations": energy_correlations(samples),
        "verdicts": said,
    }
    text = json.dumps(record, indent=1, ensure_ascii=False).encode()
    atomic_write(output / "variance.json", lambda out: out.writelines([text]))
    for path in draw_all(output, lines, samples, choices):
        console.note(f"drawn: {path}")
    return lines


def _measurable(played: Sequence[Group], lab: LabSettings, console: Console) -> list[Group]:
    """The groups to measure on. Raises WorldError for fewer than two."""
    rules = FilterRules(void_turns="remove", accuracy_range=None, drop_zero_variance=False)
    groups, why = usable(filter_groups(played, rules).groups, size=lab.samples)
    groups = groups[: lab.problems]
    reasons = [f"{count} with {name}" for name, count in why.items()]
    left_out = f"; left out: {', '.join(reasons)}" if reasons else ""
    if len(groups) < 2:
        raise WorldError(
            f"only {len(groups)} of {len(played)} problems can be measured{left_out}; two are the least: take "
            "another model, other problems or more samples"
        )
    console.note(
        f"sampled: {len(played)} problems x {lab.samples} trajectories; measured on {len(groups)} of them{left_out}"
    )
    return groups


def lab_problems(settings: LabSections, lab: LabSettings, given: str | None) -> tuple[LabSettings, list[Problem]]:
    """The problems that ``--problems`` selects: a number of them from data.train (default: the setting) or a file."""
    if given is not None and given.isdigit():
        if int(given) < 2:
            raise SettingsError(f"--problems {given}: two problems are the least")
        lab = lab.model_copy(update={"problems": int(given)})
    sources = settings.data.train
    if given is not None and not given.isdigit():
        sources = [ProblemSourceSettings(path=given)]
    if not sources:
        raise SettingsError("data.train is empty: nothing to sample; give --problems FILE or data.train.0.path=FILE")
    count = round(lab.problems * _MORE_PROBLEMS)
    loaded = [load_source(entry, seed=settings.seed, answered=needs_answers(settings)).source for entry in sources]
    share = -(-count // len(loaded))
    return lab, [problem for source in loaded for problem in evaluation_set(source, share)][:count]


async def _play(
    settings: LabSections,
    causal_lm: Any,
    environment: Environment,
    codec: TextCodec,
    lab: LabSettings,
    problems: Sequence[Problem],
) -> tuple[list[Group], dict[int, float]]:
    """(every problem's trajectories, its greedy rollout's reward by group index)."""
    engine = TransformersEngine(causal_lm, codec, settings.rollout)
    rewards = build_rewards(settings)
    await environment.open()
    try:
        if rewards is not None:
            await rewards.open()
        driver = Driver(
            environment=environment,
            engine=engine,
            codec=codec,
            settings=settings.rollout,
            seed=settings.seed,
            rewards=rewards,
        )
        requests = [RolloutRequest(index=index, problem=problem) for index, problem in enumerate(problems)]
        size = round(lab.samples * _MORE_SAMPLES)
        groups = [group async for group in driver.run(requests, step=0, group_size=size)]
        alone = [group async for group in driver.run(requests, step=1, group_size=1, temperature=_GREEDY)]
    finally:
        await engine.close()
        if rewards is not None:
            await rewards.close()
        await environment.close()
    greedy = {group.index: item.reward for group in alone for item in group.trajectories if not item.no_data}
    return sorted(groups, key=lambda group: group.index), greedy


def _show(console: Console, lines: Sequence[Line], said: Sequence[str]) -> None:
    columns: dict[str, Callable[[Line], str]] = {
        "N": lambda line: str(line.group_size),
        "estimator": lambda line: line.estimator,
        "noise": lambda line: str(line.noise),
        "to the best": lambda line: str(line.to_best),
        "scale": lambda line: str(line.scale),
        "cosine": lambda line: f"{line.cosine.value:.3f}",
        "bias": lambda line: f"{line.bias.value:.3f}",
        "variance": lambda line: f"{line.variance.value:.3g}",
        "head": lambda line: f"{line.head_variance:.3g}",
        "diagonal": lambda line: f"{line.diagonal:.3g}",
    }
    rows = [[say(line) for say in columns.values()] for line in lines]
    console.table("Gradient of one group, least noise first; 95 % intervals over problems", list(columns), rows)
    for line in said:
        console.note(line)


def _make(output: Path) -> None:
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SettingsError(f"--output {output}: cannot be made: {error.strerror}") from error
