"""``agentrl variance``: sample rollouts, measure all estimators on each problem, and report the results."""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from pathlib import Path
from typing import TYPE_CHECKING

from agentrl.algorithms import estimator_needs
from agentrl.errors import SettingsError
from agentrl.kernels import Backend
from agentrl.lab.measure import measure_problems
from agentrl.lab.report import print_and_write_results
from agentrl.lab.results import MEASURED, MeasurementFiles, ProblemLine, make_problem_line
from agentrl.lab.rollouts import GroupSampler, UsableGroup
from agentrl.lab.sample import ProblemSample, build_sample, reason_unusable
from agentrl.lab.settings import LabSettings
from agentrl.lab.summary import EstimatorResult
from agentrl.models.exactness import check_packed_forward, choose_attention_backend
from agentrl.models.loading import model_fingerprint, read_model
from agentrl.models.lora import add_adapters
from agentrl.models.policy import PolicyModel
from agentrl.models.quantization import FORMATS, fake_quantize
from agentrl.models.tokenizer import read_tokenizer
from agentrl.rollout.environment import build_environment_and_codec
from agentrl.telemetry.console import Console
from agentrl.trajectory import Group
from agentrl_envs.types import Problem

if TYPE_CHECKING:
    from agentrl.lab.settings import LabSections

_BATCH = 16  # number of problems sampled together; they form one step for estimators that span the step
_MICRO_BATCH_TOKENS = 8192  # maximum number of tokens in a forward pass for token statistics


def variance_command(
    settings: LabSections,
    model: str,
    behaviour: str | None,
    lab: LabSettings,
    problems: Sequence[Problem],
    output: Path,
    *,
    head_backend: Backend,
) -> list[EstimatorResult]:
    """Measure the policy in ``model`` on rollouts of ``problems``.

    The policy in ``behaviour`` samples the rollouts. If ``behaviour`` is None, the measured policy samples them. If it
    is one of :data:`.FORMATS`, the measured policy samples them with weights rounded to this format.

    Moments, results and a plot are written to ``output``. An existing measurement is continued.
    """
    console = Console(settings.telemetry)
    measurement = _PolicyMeasurement(settings, lab, model, behaviour, head_backend)
    results = MeasurementFiles(output)
    lines = results.start_or_continue(measurement.conditions)
    done = {line["number"] for line in lines}
    kept = sum(line["outcome"] == MEASURED for line in lines)
    if lines:
        console.note(f"resuming a measurement: {kept} of {len(lines)} sampled problems are already measured")
    numbered = list(enumerate(problems))
    with (
        measurement.make_sampler().opened() as sample,
        console.progress(lab.problems, min(kept, lab.problems), "problem") as progress,
    ):
        for start in range(0, len(numbered), _BATCH):
            batch = numbered[start : start + _BATCH]
            # If one problem of a batch is missing, the whole batch is sampled again, because estimators that span the
            # step need all problems of the batch.
            if kept >= lab.problems or all(number in done for number, _ in batch):
                continue
            for line in measurement.measure_groups(sample(batch), done):
                results.append(line)
                kept += line["outcome"] == MEASURED
                progress.update(min(kept, lab.problems), {})
                if kept >= lab.problems:
                    break
    return print_and_write_results(results, lab, console, seed=settings.seed)


class _PolicyMeasurement:
    """A measured policy, and the policy that samples its rollouts: the same policy or an older one."""

    def __init__(
        self, settings: LabSections, lab: LabSettings, model: str, behaviour: str | None, head_backend: Backend
    ) -> None:
        self._settings, self._lab = settings, lab
        tokenizer = read_tokenizer(model)
        if behaviour not in (None, *FORMATS) and read_tokenizer(behaviour).get_vocab() != tokenizer.get_vocab():
            raise SettingsError(f"--behaviour {behaviour} must have the same vocabulary as {model}")
        causal_lm = add_adapters(read_model(model, settings.model).eval(), settings.model.lora)
        self._sampling = causal_lm
        self._correction: dict[str, object] | None = None  # options of `rollout_correction`
        if behaviour is not None:
            self._sampling = read_model(model if behaviour in FORMATS else behaviour, settings.model).eval()
            options = settings.correction.options
            self._correction = {**options, "weights": options["weights"] or "token"}
        if behaviour in FORMATS:
            fake_quantize(self._sampling, behaviour)
        self.conditions = {
            "model": model,
            "weights": model_fingerprint(causal_lm.state_dict().items()),
            "behaviour": behaviour,
            "behaviour_weights": behaviour and model_fingerprint(self._sampling.state_dict().items()),
            "correction": self._correction,
            **_settings_fixed_on_resume(settings, lab),
        }
        attention = choose_attention_backend(settings.model, causal_lm.config)
        self._policy = PolicyModel(causal_lm, backend=head_backend, attention=attention)
        check_packed_forward(model, self._policy)
        self._environment, self._codec = build_environment_and_codec(settings, tokenizer, model)

    def make_sampler(self) -> GroupSampler:
        needs = [estimator_needs(item.name, **item.options).inputs for item in self._lab.choices]
        return GroupSampler(
            self._settings,
            self._sampling,
            self._environment,
            self._codec,
            samples=self._lab.samples,
            greedy=any("greedy_returns" in inputs for inputs in needs),
        )

    def measure_groups(self, sampled: Sequence[UsableGroup], done: Set[int]) -> Iterator[ProblemLine]:
        """Measure the problems and yield the line of each problem that is not in ``done``."""
        temperature = self._settings.rollout.temperature
        groups: list[Group] = []
        samples: list[ProblemSample] = []
        for item in sampled:
            reason = reason_unusable(item.group, size=self._lab.samples)
            if reason is None and item.greedy_return is not None:
                groups.append(item.group.without_trajectories(item.group.trajectories[self._lab.samples :]))
                samples.append(
                    build_sample(
                        self._policy,
                        groups[-1],
                        temperature=temperature,
                        budget=_MICRO_BATCH_TOKENS,
                        greedy_return=item.greedy_return,
                        correction=self._correction,
                    )
                )
            elif item.group.index not in done:
                yield make_problem_line(item.group, reason or "no greedy rollout", None)
        if not groups:
            return
        numbers = [group.index for group in groups]
        for index, moments in measure_problems(
            self._policy, samples, numbers, self._lab, temperature=temperature, seed=self._settings.seed, skip=done
        ):
            yield make_problem_line(groups[index], MEASURED, moments)


def _settings_fixed_on_resume(settings: LabSections, lab: LabSettings) -> dict[str, object]:
    """Collect everything except the policies that affects a measurement and must match when it is continued."""
    rollout = settings.rollout
    return {
        "lora": settings.model.lora.model_dump(mode="json") if settings.model.lora.rank else None,
        "env": settings.env,
        "environment": settings.environment.model_dump(mode="json"),
        "data": [entry.model_dump(mode="json") for entry in settings.data.train],
        "reward": settings.reward.model_dump(mode="json"),
        "limits": [rollout.max_prompt_tokens, rollout.max_turn_tokens, rollout.max_response_tokens],
        "temperature": rollout.temperature,
        "seed": settings.seed,
        "problem_file": lab.problem_file,
        "samples": lab.samples,
        "group_sizes": lab.group_sizes,
        "groups": lab.groups,
        "head": lab.head,
        "estimators": [choice.label for choice in lab.choices],
    }
