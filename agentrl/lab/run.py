"""``agentrl variance``: sample rollouts, measure all estimators on each problem, and report the results."""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from pathlib import Path
from typing import TYPE_CHECKING

from agentrl.algorithms import estimator_needs
from agentrl.errors import SettingsError
from agentrl.kernels import Backend
from agentrl.lab.measure import ProblemMoments, measure_problems
from agentrl.lab.play import GroupSampler, UsableGroup, lab_problems
from agentrl.lab.report import report_results
from agentrl.lab.results import MEASURED, MeasurementFiles, ProblemLine, problem_line
from agentrl.lab.sample import ProblemSample, reason_unusable, score_group
from agentrl.lab.settings import EstimatorChoice, LabRequest, LabSettings, check_lab, lab_settings
from agentrl.lab.summary import EstimatorResult
from agentrl.models.exactness import check_packed_forward, choose_attention_backend
from agentrl.models.loading import model_fingerprint, read_model
from agentrl.models.lora import add_adapters
from agentrl.models.policy import PolicyModel
from agentrl.models.quantization import FORMATS, fake_quantize
from agentrl.models.tokenizer import read_tokenizer
from agentrl.rollout.environment import build_environment_and_codec, check_environment
from agentrl.telemetry.console import Console
from agentrl.trajectory import Group
from agentrl_envs.types import Problem

if TYPE_CHECKING:
    from agentrl.lab.settings import LabSections

_SHOWN = 4  # number of problems whose token values are kept for plots
_MAY_DIFFER = {"problems", "bootstrap", "baseline", "micro_batch_tokens", "score_memory"}
"""Settings that may change when a measurement is continued."""


def read_settings_and_problems(settings: LabSections, request: LabRequest) -> tuple[LabSettings, list[Problem]]:
    """Read and check settings and problems before a model is loaded.

    Raises SettingsError, ProblemError or PluginError.
    """
    check_environment(settings)  # first, because the environment's module may register an estimator
    lab = lab_settings(request)
    check_lab(lab)
    return lab_problems(settings, lab, request.problems)


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

    The policy in ``behaviour`` samples the rollouts. If it is None, the measured policy samples them. If it is one of
    :data:`.FORMATS`, the measured policy samples them with weights rounded to this format.

    Moments, results and plots are written to ``output``. An existing measurement is continued.
    """
    choices = check_lab(lab)
    console = Console(settings.telemetry)
    bench = _Bench(settings, lab, choices, model, behaviour, head_backend)
    results = MeasurementFiles(output)
    lines = results.open(bench.conditions)
    done = {line["number"] for line in lines}
    kept = sum(line["outcome"] == MEASURED for line in lines)
    if lines:
        console.note(f"resuming a measurement: {kept} of {len(lines)} sampled problems are already measured")
    numbered = list(enumerate(problems))
    with bench.player() as player, console.progress(lab.problems, min(kept, lab.problems), "problem") as progress:
        for start in range(0, len(numbered), lab.batch):
            batch = numbered[start : start + lab.batch]
            # If one problem of a batch is missing, the whole batch is sampled again, because estimators that span the
            # step need all problems of the batch.
            if kept >= lab.problems or all(number in done for number, _ in batch):
                continue
            for line in bench.lines(player.sample_groups(batch), done, shown=_SHOWN - kept):
                results.add(line)
                kept += line["outcome"] == MEASURED
                progress.update(min(kept, lab.problems), {})
                if kept >= lab.problems:
                    break
    return report_results(results, lab, console, seed=settings.seed)


class _Bench:
    """The measured policy, and the policy that samples: the same policy or an older one."""

    def __init__(
        self,
        settings: LabSections,
        lab: LabSettings,
        choices: Sequence[EstimatorChoice],
        model: str,
        behaviour: str | None,
        head_backend: Backend,
    ) -> None:
        self._settings, self._lab, self._choices = settings, lab, choices
        tokenizer = read_tokenizer(model)
        if behaviour not in (None, *FORMATS) and read_tokenizer(behaviour).get_vocab() != tokenizer.get_vocab():
            raise SettingsError(f"--behaviour {behaviour} must have the same vocabulary as {model}")
        causal_lm = add_adapters(read_model(model, settings.model).eval(), settings.model.lora)
        playing = (
            causal_lm
            if behaviour is None
            else read_model(model if behaviour in FORMATS else behaviour, settings.model).eval()
        )
        if behaviour in FORMATS:
            fake_quantize(playing, behaviour)
        self._weighing = self._correction(behaviour)
        self.conditions = {
            "model": model,
            "weights": model_fingerprint(causal_lm.state_dict().items()),
            "behaviour": behaviour,
            "behaviour_weights": None if behaviour is None else model_fingerprint(playing.state_dict().items()),
            "correction": self._weighing,
            **_conditions(settings, lab, choices),
        }
        attention = choose_attention_backend(settings.model, causal_lm.config)
        self._policy = PolicyModel(causal_lm, backend=head_backend, attention=attention)
        check_packed_forward(model, self._policy)
        self._playing = playing
        self._environment, self._codec = build_environment_and_codec(settings, tokenizer, model)

    def _correction(self, behaviour: str | None) -> dict[str, object] | None:
        """Return the options of `rollout_correction`, with weights per token if the settings specify no weights."""
        if behaviour is None:
            return None
        options = self._settings.correction.options
        return {**options, "weights": options["weights"] or "token"}

    def player(self) -> GroupSampler:
        needs = [estimator_needs(item.name, **item.options).inputs for item in self._choices]
        return GroupSampler(
            self._settings,
            self._playing,
            self._environment,
            self._codec,
            samples=self._lab.samples,
            greedy=any("greedy_returns" in inputs for inputs in needs),
        )

    def lines(self, played: Sequence[UsableGroup], done: Set[int], *, shown: int) -> Iterator[ProblemLine]:
        """Yield the line of each problem that is not in ``done``, the first ``shown`` of them with token values."""
        chosen: list[tuple[Group, ProblemSample]] = []
        for item in played:
            reason = reason_unusable(item.group, size=self._lab.samples)
            greedy = item.greedy_return
            if reason is None and greedy is not None:
                group = item.group.without(item.group.trajectories[self._lab.samples :])
                chosen.append((group, self._look_at(group, greedy)))
            elif item.group.index not in done:
                yield problem_line(item.group, reason or "no greedy rollout", None, None, ())
        for group, sample, moments in self._measured(chosen, done) if chosen else ():
            yield problem_line(group, MEASURED, sample, moments, self._choices if shown > 0 else ())
            shown -= 1

    def _look_at(self, group: Group, greedy_return: float) -> ProblemSample:
        return score_group(
            self._policy,
            group,
            temperature=self._settings.rollout.temperature,
            budget=self._lab.micro_batch_tokens,
            greedy_return=greedy_return,
            correction=self._weighing,
        )

    def _measured(
        self, chosen: Sequence[tuple[Group, ProblemSample]], done: Set[int]
    ) -> Iterator[tuple[Group, ProblemSample, ProblemMoments]]:
        moments = measure_problems(
            self._policy,
            [sample for _, sample in chosen],
            [group.index for group, _ in chosen],
            self._choices,
            self._lab,
            temperature=self._settings.rollout.temperature,
            seed=self._settings.seed,
            skip=done,
        )
        for index, problem_moments in moments:
            yield *chosen[index], problem_moments


def _conditions(settings: LabSections, lab: LabSettings, choices: Sequence[EstimatorChoice]) -> dict[str, object]:
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
        **lab.model_dump(mode="json", exclude=_MAY_DIFFER),
        "estimators": [choice.label for choice in choices],
    }
