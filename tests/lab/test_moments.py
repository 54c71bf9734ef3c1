"""The laboratory's moments against enumeration, loops and plain autograd."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from agentrl.algorithms import AdvantageInputs, compute_advantages
from agentrl.errors import SettingsError
from agentrl.lab.choices import EXCLUDED, read_choices
from agentrl.lab.gradients import Gradients
from agentrl.lab.groups import Partition, advantages_in, draw_partitions
from agentrl.lab.measure import GradientMoments, References, Spread, measure, spread_of
from agentrl.lab.run import check_lab, lab_settings
from agentrl.lab.sample import ProblemSample, inputs_of, look_at, row_blocks, usable
from agentrl.lab.settings import LabSettings
from agentrl.lab.summary import IntervalEstimate, Line, as_records, summarise, verdicts
from agentrl.models.policy import PolicyModel
from agentrl.trajectory import Batch, Group, Segment, Trajectory
from agentrl_envs.types import Ended, Problem

VOCABULARY = 3
KEEP = 1 << 30


def make_policy(*, vocabulary: int = VOCABULARY, uniform: bool = False) -> PolicyModel:
    """A random Llama; ``uniform``: its head is 0, so that every token has the same probability."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=vocabulary,
            hidden_size=8,
            intermediate_size=12,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=2,
            tie_word_embeddings=False,
            initializer_range=0.5,
            pad_token_id=None,
            bos_token_id=None,
            eos_token_id=None,
        )
    )
    if uniform:
        torch.nn.init.zeros_(model.lm_head.weight)
    return PolicyModel(model.eval())


def make_trajectory(sample: int, turns: tuple[tuple[int, ...], ...], reward: float, group: int = 0) -> Trajectory:
    """Turns of tokens with an observation of one token between."""
    segments: list[Segment] = []
    for place, tokens in enumerate(turns):
        last = place == len(turns) - 1
        spans = ((0, len(tokens)),)
        segments.append(
            Segment(origin="model", token_ids=tokens, text="", log_probs=(-1.0,) * len(tokens), version_spans=spans,
                    reward=reward if last else 0.0)
        )  # fmt: skip
        if not last:
            segments.append(Segment(origin="observation", token_ids=(0,), text=""))
    problem = Problem(id=f"p{group}", statement="?", answer="1", source="test")
    return Trajectory(problem=problem, step=0, group=group, sample=sample, prompt_ids=(1, 2), segments=tuple(segments),
                      ended=Ended.ANSWERED)  # fmt: skip


def make_group(trajectories: list[Trajectory]) -> Group:
    return Group(problem=trajectories[0].problem, index=trajectories[0].group, trajectories=tuple(trajectories))


def make_sample(policy: PolicyModel, *, group: int = 0, size: int = 8) -> ProblemSample:
    """Random trajectories of one or two turns and different lengths, rewards 0 and 1."""
    draw = torch.Generator().manual_seed(group + 1)

    def tokens() -> tuple[int, ...]:
        count = int(torch.randint(1, 5, (), generator=draw))
        return tuple(torch.randint(0, policy.head.out_features, (count,), generator=draw).tolist())

    rows = [
        make_trajectory(sample, tuple(tokens() for _ in range(1 + sample % 2)), float(sample % 3 == 0), group)
        for sample in range(size)
    ]
    return look_at(policy, make_group(rows), pad_id=0, temperature=0.8, budget=64, greedy_return=1.0)


def slow_gradient(policy: PolicyModel, sample: ProblemSample, rows: list[int], advantages: Tensor) -> Tensor:
    """(1/N) sum_i sum_t A_it grad ln p_it with the full logits, a token at a time."""
    total = torch.zeros(())
    for place, row in enumerate(rows):
        start = int(sample.batch.prompt_lengths[row])
        logits = policy.causal_lm.lm_head(
            policy.causal_lm.model(input_ids=sample.batch.input_ids[row : row + 1]).last_hidden_state
        )[0]
        log_p = torch.log_softmax(logits / 0.8, dim=-1)
        for t, counts in enumerate(sample.batch.response_mask[row].tolist()):
            if counts:
                total = total + advantages[place, t] * log_p[start + t - 1, sample.batch.response_ids[row, t]]
    gradients = torch.autograd.grad(total / len(rows), list(policy.parameters()))
    return torch.cat([item.flatten() for item in gradients])


def test_micro_batches_count_no_padding() -> None:
    """Rows of 3, 3, 31, 3 and 3 tokens, padded to 31."""
    rows = [make_trajectory(place, ((0,) * (count - 1),), 0.0) for place, count in enumerate((2, 2, 30, 2, 2))]
    batch = Batch.from_trajectories(make_group(rows).trajectories, pad_id=0)
    assert (batch.prompt_lengths + batch.response_lengths).tolist() == [3, 3, 31, 3, 3]
    for budget, blocks in ((43, [(0, 5)]), (37, [(0, 3), (3, 5)]), (8, [(0, 2), (2, 3), (3, 5)]), (1, 5)):
        found = [(block.start, block.stop) for block in row_blocks(batch, budget)]
        assert found == (blocks if isinstance(blocks, list) else [(row, row + 1) for row in range(blocks)])


@pytest.mark.parametrize("estimator", ["rloo", "tir_otb"])
def test_a_bandits_variance_is_that_of_enumeration(estimator: str) -> None:
    """One token, three arms of equal probability, reward 1 for the first: all 9 groups of two, each as likely.

    The head is 0, so only its gradient (onehot - p) h is not: everything is known in closed form.
    """
    policy = make_policy(uniform=True)
    arms = [arm for pair in itertools.product(range(3), repeat=2) for arm in pair]
    rows = [make_trajectory(place, ((arm,),), float(arm == 0)) for place, arm in enumerate(arms)]
    sample = look_at(policy, make_group(rows), pad_id=0, temperature=1.0, budget=64, greedy_return=0.0)
    partition = Partition(rows=(torch.arange(18).reshape(9, 2),))
    (choice,) = read_choices([estimator])
    (advantages,) = advantages_in([sample], partition, choice, drop_zero_variance=False)
    gradients = Gradients(policy, sample.batch, temperature=1.0, score_memory=0)
    references = References(gradients, sample, 64)
    _, spreads = spread_of(gradients, references, partition.rows, {estimator: [advantages]})
    spread = spreads[estimator]

    expected = []
    for first, second in itertools.product(range(3), repeat=2):
        rewards = [float(first == 0), float(second == 0)]
        # Two rows: leave-one-out takes the other's reward; equal energies make the optimal baseline the mean.
        own = [rewards[0] - rewards[1], rewards[1] - rewards[0]]
        factor = 1.0 if estimator == "rloo" else 0.5
        score = [[float(arm == v) - 1 / 3 for v in range(3)] for arm in (first, second)]
        expected.append([sum(factor * own[i] * score[i][v] for i in range(2)) / 2 for v in range(3)])
    mean = [sum(item[v] for item in expected) / 9 for v in range(3)]
    state = policy.causal_lm.model(input_ids=torch.tensor([[1, 2]])).last_hidden_state[0, -1].detach()
    scale = float(state.square().sum())
    variance = scale * sum((item[v] - mean[v]) ** 2 for item in expected for v in range(3)) / 9
    assert spread.variance * 8 / 9 == pytest.approx(variance, rel=1e-5)  # 9 groups are all there are
    assert spread.power == pytest.approx(scale * sum(x * x for item in expected for x in item) / 9, rel=1e-5)


def test_gradients_are_those_of_single_tokens_with_and_without_kept_scores() -> None:
    policy = make_policy(vocabulary=7)
    sample = make_sample(policy)
    draw = torch.Generator().manual_seed(3)
    by_token = torch.randn(3, *sample.batch.response_mask.shape[1:], generator=draw)
    by_row = torch.randn(3, 1, generator=draw).expand_as(by_token).clone()
    rows = torch.tensor([5, 0, 3])
    for memory in (0, KEEP):
        gradients = Gradients(policy, sample.batch, temperature=0.8, score_memory=memory)
        for values, found in zip((by_token, by_row), gradients.weighed(rows, [by_token, by_row]), strict=True):
            torch.testing.assert_close(
                found, slow_gradient(policy, sample, rows.tolist(), values), rtol=1e-4, atol=1e-6
            )
        zero, other = gradients.weighed(rows, [torch.zeros_like(by_token), by_token])
        assert not zero.any()
        torch.testing.assert_close(other, gradients.weighed(rows, [by_token])[0])


def test_cross_energies_and_exact_energies_are_those_of_loops() -> None:
    policy = make_policy(vocabulary=7)
    sample = make_sample(policy, size=4)
    for row in range(4):
        start = int(sample.batch.prompt_lengths[row])
        hidden = policy.causal_lm.model(input_ids=sample.batch.input_ids[row : row + 1]).last_hidden_state
        p = torch.softmax(policy.causal_lm.lm_head(hidden)[0] / 0.8, dim=-1).detach()
        places = sample.batch.response_mask[row].nonzero().squeeze(-1).tolist()
        deltas = [torch.eye(7)[sample.batch.response_ids[row, t]] - p[start + t - 1] for t in places]
        wanted = [sum(max(0.0, float(deltas[j] @ deltas[k])) for j in range(k + 1)) for k in range(len(places))]
        torch.testing.assert_close(sample.cross_energy[row, places], torch.tensor(wanted), rtol=1e-4, atol=1e-6)
        ones = torch.ones(1, sample.batch.response_mask.shape[1])
        exact = slow_gradient(policy, sample, [row], ones).square().sum().detach()
        torch.testing.assert_close(sample.trajectory_energy[row], exact, rtol=1e-4, atol=1e-6)


def test_advantages_are_those_of_single_groups() -> None:
    policy = make_policy(vocabulary=7)
    samples = [make_sample(policy, group=group) for group in range(2)]
    (partition,) = draw_partitions([8, 8], 4, 1, seed=0)
    assert sorted(partition.rows[0].flatten().tolist()) == list(range(8))
    (choice,) = read_choices(["tir_otb:leave_one_out=true"])
    found = advantages_in(samples, partition, choice, drop_zero_variance=False)
    for index, sample in enumerate(samples):
        for group, rows in enumerate(partition.rows[index]):
            inputs = inputs_of([sample], [rows])
            wanted = compute_advantages("tir_otb", inputs, leave_one_out=True).advantages
            torch.testing.assert_close(found[index][group], wanted)
    dropped = advantages_in(samples, partition, choice, drop_zero_variance=True)
    for index, sample in enumerate(samples):
        returns = sample.returns[partition.rows[index]]
        equal = returns.amax(-1) == returns.amin(-1)
        assert not dropped[index][equal].any()
        assert torch.equal(dropped[index][~equal], found[index][~equal])


def test_everything_the_measurement_says_is_that_of_loops() -> None:
    policy = make_policy(vocabulary=7)
    samples = [make_sample(policy, group=group) for group in range(3)]
    choices = read_choices(["rloo", "tir_otb"])
    lab = LabSettings(samples=8, group_sizes=(2, 4), partitions=2)
    measured = measure(policy, samples, choices, lab, temperature=0.8, seed=5)
    assert measured.parameters == sum(item.numel() for item in policy.parameters())
    for size in (2, 4):
        drawn = draw_partitions([8, 8, 8], size, 2, seed=5 + size)
        for choice in choices:
            means = []
            for index, sample in enumerate(samples):
                by_partition, along, true = [], [], []
                for one in drawn:
                    values = advantages_in(samples, one, choice, drop_zero_variance=True)[index]
                    rows = one.rows[index].tolist()
                    by_partition.append(
                        [slow_gradient(policy, sample, r, v) for r, v in zip(rows, values, strict=True)]
                    )
                    for group, vector in zip(rows, by_partition[-1], strict=True):
                        others = [row for row in range(8) if row not in group]
                        reference = leave_one_out(policy, sample, others)
                        along.append(float(vector @ reference))
                        true.append(float(leave_one_out(policy, sample, group) @ reference))
                groups = torch.stack([vector for part in by_partition for vector in part])
                means.append(groups.mean(0))
                found = measured.moments[size][choice.label][index]
                variances = [torch.stack(part).var(0).sum() for part in by_partition]
                assert found.variance == pytest.approx(float(sum(variances) / 2), rel=1e-3)
                assert found.power == pytest.approx(float(groups.square().sum(1).mean()), rel=1e-3)
                assert found.drawn_squared == pytest.approx(float(means[-1].square().sum()), rel=1e-3)
                products = [float(a @ b) for part in by_partition for a, b in itertools.permutations(part, 2)]
                assert found.mean_squared == pytest.approx(sum(products) / len(products), rel=1e-3, abs=1e-5)
                assert found.along == pytest.approx(sum(along) / len(along), rel=1e-3, abs=1e-5)
                assert found.reference_squared == pytest.approx(sum(true) / len(true), rel=1e-3, abs=1e-5)
                if choice.name == "rloo":
                    assert found.along == pytest.approx(found.reference_squared, rel=1e-3, abs=1e-5)
                head = slice(groups.shape[1] - policy.head.weight.numel(), None)  # untied: the last parameter
                heads = [torch.stack(part)[:, head].var(0).sum() for part in by_partition]
                assert found.head_variance == pytest.approx(float(sum(heads) / 2), rel=1e-3)
            signal = float(torch.stack(means).mean(0).square().sum())
            assert measured.signal[size][choice.label] == pytest.approx(signal, rel=1e-3)


def leave_one_out(policy: PolicyModel, sample: ProblemSample, rows: list[int]) -> Tensor:
    """The gradient with the mean of the other rows as baseline."""
    returns = [float(sample.returns[row]) for row in rows]
    rest = [value - (sum(returns) - value) / (len(rows) - 1) for value in returns]
    values = torch.tensor(rest)[:, None].expand(len(rows), sample.batch.response_mask.shape[1])
    return slow_gradient(policy, sample, rows, values)


def test_spread_is_unbiased_over_all_partitions() -> None:
    """Four vectors in every way to make two pairs of group means: the mean variance is the population's for N = 2."""
    vectors = torch.tensor([[1.0, 0.0], [3.0, 1.0], [-2.0, 4.0], [0.0, 0.5]])
    spread = Spread(2)
    for pairs in (((0, 1), (2, 3)), ((0, 2), (1, 3)), ((0, 3), (1, 2))):
        means = [vectors[list(pair)].mean(0) for pair in pairs]
        spread.add_partition(means, means[::-1])
    assert spread.variance == pytest.approx(float(vectors.var(0).sum()) / 2)
    torch.testing.assert_close(spread.mean, vectors.mean(0))
    assert spread.along == pytest.approx(spread.mean_squared)  # both are the mean product of two disjoint groups


def test_summary_by_hand() -> None:
    """Two problems; everything is one number in each."""
    policy = make_policy(vocabulary=7)
    samples = [make_sample(policy, group=group) for group in range(2)]
    measured = measure(policy, samples, read_choices(["rloo"]), LabSettings(samples=8, group_sizes=(2,)),
                       temperature=0.8, seed=0)  # fmt: skip
    base: dict[str, Any] = {
        "head_variance": 1.0,
        "diagonal": 2.0,
        "mean_squared": 4.0,
        "drawn_squared": 4.0,
        "reference_squared": 1.0,
    }
    found = [
        GradientMoments(variance=6.0, power=7.0, along=2.0, **base),
        GradientMoments(variance=2.0, power=5.0, along=2.0, **base),
    ]
    measured.moments = {2: {"a": found, "b": [GradientMoments(**{**vars(m), "variance": 8.0}) for m in found]}}
    measured.signal = {2: {"a": 3.0, "b": 3.0}}
    best, other = summarise(measured, resamples=100, seed=0)
    assert (best.estimator, best.variance.value, best.scale.value, best.cosine.value) == ("a", 4.0, 2.0, 1.0)
    assert best.noise.value == pytest.approx((6 + 2) / (4 * 2))
    assert best.bias.value == pytest.approx((2 * (4 - 4 + 1) / 2) ** 0.5)
    assert (best.head_variance, best.diagonal) == (1.0, 2.0)
    # One group a problem: P = 6, E||mean||^2 = 3 + (3 + 1) / 4 = 4.
    assert best.step_variance == pytest.approx((6 - 4) / 1)
    assert (best.to_best.value, other.to_best.value) == (1.0, pytest.approx(2.0))
    assert other.to_best.low == pytest.approx(8 / 6)  # the first problem twice


def test_a_gradient_lost_in_noise_is_said_to_be(recwarn: pytest.WarningsRecorder) -> None:
    policy = make_policy(vocabulary=7)
    samples = [make_sample(policy, group=group) for group in range(2)]
    measured = measure(policy, samples, read_choices(["rloo", "grpo"]), LabSettings(samples=8, group_sizes=(2,)),
                       temperature=0.8, seed=0)  # fmt: skip
    for name, found in measured.moments[2].items():
        measured.moments[2][name] = [GradientMoments(**{**vars(item), "reference_squared": -1.0}) for item in found]
    lines = summarise(measured, resamples=100, seed=0)
    assert verdicts(lines) == ["N=2: no gradient can be told from noise here; take more problems or samples"]
    assert as_records(lines)[0]["noise"]["value"] is None
    assert not recwarn.list


def make_line(name: str, ratio: float, low: float) -> Line:
    one = IntervalEstimate(value=ratio, low=low, high=ratio)
    return Line(estimator=name, group_size=4, variance=one, scale=one, noise=one, cosine=one, bias=one, to_best=one,
                step_variance=0.0, head_variance=0.0, diagonal=0.0)  # fmt: skip


def test_verdicts_say_where_the_optimal_baseline_does_not_win() -> None:
    (won,) = verdicts([make_line("tir_otb", 1.0, 1.0), make_line("rloo", 1.5, 1.2)])
    assert won.endswith("The optimal token baseline tir_otb wins here")
    (lost,) = verdicts([make_line("rloo", 1.0, 1.0), make_line("tir_otb:tail=carry", 1.5, 1.2)])
    assert lost.endswith("tir_otb:tail=carry, with 1.5 [1.2, 1.5] times that noise: it does not win here")
    (close,) = verdicts([make_line("rloo", 1.0, 1.0), make_line("otb", 1.1, 0.9)])
    assert "the difference lies within the interval for otb" in close
    assert close.endswith("a difference within the interval")


def test_usable_groups() -> None:
    def group(index: int, rewards: list[float]) -> Group:
        return make_group([make_trajectory(i, ((1,),), reward, index) for i, reward in enumerate(rewards)])

    # The last one's rewards differ only in what is cut off.
    rewards = ([1, 0, 0, 1, 1], [1, 0], [1] * 4, [0, 1, 0, 0], [0] * 4 + [1])
    kept, why = usable([group(index, each) for index, each in enumerate(rewards)], size=4)
    assert [(item.index, len(item.trajectories)) for item in kept] == [(0, 4), (3, 4)]
    assert why == {"equal rewards": 2, "too few trajectories that are data": 1}


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        ({"estimators": "tir_obt"}, "--estimators: tir_obt: unknown estimator 'tir_obt'; did you mean 'tir_otb'"),
        ({"estimators": "tir_otb:tial=carry"}, "did you mean 'tail'"),
        ({"estimators": "tir_otb:tail"}, "options are written option=value"),
        ({"estimators": "rloo,grpo,rloo"}, "rloo is given twice"),
        ({"estimators": "gae"}, f"gae cannot be measured here: {EXCLUDED['gae']}"),
        ({"group_sizes": "4,64"}, "--group-sizes 64: a group has 2 to 32 trajectories, half of the 64 samples"),
        ({"group_sizes": "4,x"}, "--group-sizes: 'x' is not a whole number"),
        ({"group_sizes": "4,4"}, "give different sizes"),
        ({"samples": 3}, "--samples 3: at least 4"),
    ],
)
def test_bad_input_is_named(texts: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError) as caught:
        check_lab(lab_settings(**{"group_sizes": None, "estimators": None, "samples": None, **texts}))
    assert message in str(caught.value)


def test_without_names_all_are_measured_that_can_be() -> None:
    from agentrl.algorithms import ESTIMATORS

    assert {choice.name for choice in read_choices([])} == set(ESTIMATORS.names()) - EXCLUDED.keys()


def test_inputs_hold_everything_that_rollouts_have() -> None:
    policy = make_policy(vocabulary=7)
    sample = make_sample(policy)
    inputs: AdvantageInputs = inputs_of([sample], [torch.tensor([1, 4])])
    missing = {name for name, value in vars(inputs).items() if value is None}
    # On-policy, without a critic, and each rollout is one row.
    of_branches = {"samples", "branches", "parents", "forks"}
    assert missing == {"importance_weights", "loss_mask", "values", "bootstrap_values"} | of_branches
