"""Policy losses: pure functions that return a loss per token (docs/reference/formulas.md 5).

Add a loss with the decorator; its options are the fields of a frozen dataclass:

    @register_loss("mine", options=ClipOptions, traits=LossTraits(aggregation="token_mean"))
    def mine(inputs: LossInputs, options: ClipOptions) -> tuple[Tensor, dict[str, Tensor]]: ...
"""

from agentrl.algorithms.losses import formulas

__all__ = ["formulas"]
