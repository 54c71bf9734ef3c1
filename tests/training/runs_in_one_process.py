"""Whole runs of small policies, one after the other: ``POLICY FOLDER NAME...``. Run by test_algorithms_train.py.

The libraries take longer to load than a run.
"""

from __future__ import annotations

import sys

from agentrl.config import load_settings
from agentrl.training.run.start import train

_SHORT = [
    "model.dtype=float32",
    "data.train.0.path=builtin:arithmetic",
    "optimizer.learning_rate=1e-3",
    "rollout.problems_per_step=3",
    "rollout.group_size=4",
    "rollout.max_prompt_tokens=300",
    "rollout.max_turn_tokens=12",
    "rollout.max_response_tokens=64",
    "training.deterministic=true",
    "training.threads=1",
    "training.steps=2",
    "telemetry.plots=false",
]
_PPO = [
    "algorithm.estimator=gae",
    "algorithm.loss=ppo",
    "algorithm.updates_per_step=2",
    "algorithm.drop_zero_variance=false",
    "rollout.problems_per_step=12",
    "rollout.group_size=1",
    "kl.coefficient=0.05",
    "kl.placement=reward",
    "kl.controller=adaptive",
    "kl.target=1e-4",
    "kl.horizon=100",
    "rollout.top_p=0.9",
    "training.steps=3",
]
_ADAPTERS = ["model.lora.rank=4", "algorithm.estimator=eob", "kl.coefficient=0.05", "training.steps=3"]
RUNS = {
    "adapters": _ADAPTERS,
    "adapters_in_two": [*_ADAPTERS, "training.steps=2"],
    "learning_adapters": [
        "model.lora.rank=4",
        "environment.kwargs.letters=true",
        "rollout.problems_per_step=6",
        "rollout.group_size=6",
        "rollout.max_turn_tokens=8",
        "training.steps=20",
    ],
    "ppo_adapters": [*_PPO, "model.lora.rank=4", "training.steps=2"],
    "ppo": _PPO,
    "ppo_in_two": [*_PPO, "training.steps=2"],
    "dapo": [
        "algorithm.estimator=grpo",
        "algorithm.loss=ppo",
        "algorithm.clip_high=0.28",
        "environment.kwargs.graded=true",
        "algorithm.accuracy_range=[0.4, 0.6]",
        "rollout.max_extra_rounds=2",
        "rollout.problems_per_step=6",
        "rollout.group_size=2",
        "reward.overlong_buffer=8",
        "reward.overlong_limit=20",
    ],
    "distilled": [
        "algorithm.estimator=none",
        "rollout.group_size=1",
        "teacher.path=FOLDER/ppo/policy",
        "teacher.objective=forward_kl",
        "teacher.decay_steps=2",
        "training.steps=3",
    ],
    "routes_of_engine": ["correction.route_replay=rollout", "kl.coefficient=0.1"],
    "routes_of_trainer": ["correction.route_replay=trainer", "algorithm.updates_per_step=2"],
    "hinted": [
        "algorithm.estimator=none",
        "model.lora.rank=4",
        "teacher.hint=The answer is {answer}.\n",
        "rollout.group_size=1",
    ],
    "remax": ["algorithm.estimator=remax", "rollout.group_size=1"],
    "eob": ["algorithm.estimator=eob", "correction.weights=token"],
    "kl_cov": ["algorithm.estimator=gpg", "algorithm.loss=kl_cov", "kl.coefficient=0.1", "correction.ratio_mask=token"],
}


def main() -> None:
    policy, folder, *names = sys.argv[1:]
    place = [f"model.path={policy}", f"runs_dir={folder}"]
    for name in names:
        own = [item.replace("FOLDER", folder) for item in RUNS[name]]
        settings = load_settings("counting_env:CountingEnv", overrides=[*place, *_SHORT, *own, f"name={name}"])
        assert train(settings, resume=False) == 0
    for name in names:
        if name.endswith("_in_two"):
            more = [f"name={name}", f"runs_dir={folder}", "training.steps=3"]
            assert train(load_settings(overrides=more, resume=True), resume=True) == 0


if __name__ == "__main__":
    main()
