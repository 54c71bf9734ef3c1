"""Compare the time of exact trajectory energies with the times of a training pass and of a separate pass per row.

    python benchmarks/energies.py [--rows 8] [--length 512] [--hidden 512] [--repeats 5] [--threads 2]

All three use one random Qwen2 with tied embeddings in float32: `energies` is `trajectory_energies`; `training` is the
training forward with the fused head, and the backward of a loss of log-probabilities; `one by one` follows the
definition: a forward and a backward pass per row, and the sum of squares of all gradients. Half of the tokens of every
row are model tokens, in runs between observations. Times are medians of repeats in which the three alternate:
wall-clock time, and CPU time, which depends less on other programs. The target: `energies` at most 1.5 times
`training`. The largest relative difference between the two kinds of energies is printed too.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor
from transformers import Qwen2Config, Qwen2ForCausalLM

from agentrl.kernels.attention import pack_padded
from agentrl.models.policy import PolicyModel


class Case:
    """A model, a batch, and the three computations that are compared."""

    def __init__(self, *, rows: int, length: int, hidden: int, layers: int, vocabulary: int) -> None:
        torch.manual_seed(0)
        config = Qwen2Config(
            vocab_size=vocabulary,
            hidden_size=hidden,
            intermediate_size=hidden * 11 // 4,
            num_hidden_layers=layers,
            num_attention_heads=max(1, hidden // 64),
            num_key_value_heads=max(1, hidden // 128),
            max_position_embeddings=length,
            tie_word_embeddings=True,
        )
        self.policy = PolicyModel(Qwen2ForCausalLM(config))
        self.ids = torch.randint(0, vocabulary, (rows, length))
        self.prompts = torch.full((rows,), length // 8)
        responses = self.ids[:, length // 8 :]
        runs = torch.arange(responses.shape[1]) // 32 % 2 == 0
        self.mask = runs.expand_as(responses).clone()
        self.packed = pack_padded(self.ids, self.prompts, self.mask)

    def training(self) -> None:
        statistics_of, _ = self.policy(*self.packed)
        statistics_of.log_probs.mean().backward()
        self.policy.zero_grad()

    def energies(self) -> Tensor:
        return self.policy.trajectory_energies(self.ids, self.prompts, self.mask)

    def one_by_one(self) -> Tensor:
        found = []
        parameters = list(self.policy.parameters())
        for row in range(self.ids.shape[0]):
            part = slice(row, row + 1)
            tokens, _ = self.policy(*pack_padded(self.ids[part], self.prompts[part], self.mask[part]))
            gradients = torch.autograd.grad(tokens.log_probs.sum(), parameters)
            found.append(sum(item.square().sum() for item in gradients))
        return torch.stack(found)


def timed(run: Callable[[], object]) -> tuple[float, float]:
    """Return wall-clock seconds and CPU seconds of this process."""
    clock, own = time.perf_counter(), time.process_time()
    run()
    return time.perf_counter() - clock, time.process_time() - own


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--length", type=int, default=512, help="number of prompt and response tokens of a row")
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--vocabulary", type=int, default=8192)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    case = Case(
        rows=given.rows,
        length=given.length,
        hidden=given.hidden,
        layers=given.layers,
        vocabulary=given.vocabulary,
    )
    difference = (case.energies() / case.one_by_one() - 1).abs().max()  # also warms up
    case.training()
    sides: dict[str, Callable[[], object]] = {
        "energies": case.energies,
        "training": case.training,
        "one by one": case.one_by_one,
    }
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in sides}
    for _ in range(given.repeats):
        for name, run in sides.items():
            times[name].append(timed(run))
    print(f"{given.rows} rows of {given.length} tokens, D={given.hidden}, {given.layers} layers, V={given.vocabulary}, "
          f"{given.threads} threads; largest relative difference {float(difference):.1e}")  # fmt: skip
    medians = {name: tuple(map(statistics.median, zip(*found, strict=True))) for name, found in times.items()}
    for name, (clock, own) in medians.items():
        ratios = (medians["energies"][0] / clock, medians["energies"][1] / own)
        print(f"{name:<10} {clock:8.3f} s  {own:8.3f} s CPU  energies / this: {ratios[0]:.2f} (CPU: {ratios[1]:.2f})")


if __name__ == "__main__":
    main()
