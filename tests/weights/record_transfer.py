"""One rank that sends a policy's weights through vLLM's trainer API to a receiver that records: ``STAGE FOLDER``.

Run by test_native_transfer.py, two ranks over gloo. Everything is the real code but the broadcast itself, which needs
GPUs: in its place rank 0 writes down what would have been broadcast, after vLLM's own check against the metadata.
"""

from __future__ import annotations

import hashlib
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import deepspeed
import torch
from torch import Tensor
from vllm.distributed.weight_transfer.base import TrainerInitInfo
from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory
from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerWeightTransferEngine

from agentrl.models.loading import build_tiny_model, train_tokenizer
from agentrl.models.policy import PolicyModel
from agentrl.models.settings import TinyModelSettings
from agentrl.training.engine.deepspeed_engine import TrainingEngine, start_distributed
from agentrl.training.settings import OptimizerSettings, TrainingSettings
from agentrl.training.worker.transfer import score_probe
from agentrl.weights.native import NativeTransfer, ServersClient
from agentrl.weights.sources import ParameterSource

GROUP = 40_000


def digest(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


@dataclass
class RecordingInitInfo(TrainerInitInfo):
    """Init info of a backend whose receiver is a list."""

    backend: ClassVar[str] = "recording"


class RecordingEngine(NCCLTrainerWeightTransferEngine):
    """vLLM's NCCL engine with the broadcast written down instead of sent."""

    init_info_cls = RecordingInitInfo  # type: ignore[assignment]
    sent: ClassVar[list[dict[str, Any]]] = []

    @classmethod
    def trainer_init(cls, init_info: Any, *, client: Any, source: Any = None) -> RecordingEngine:
        engine = cls(client=client, source=source, is_sender=init_info.is_sender, packed=False)
        if engine.is_sender:
            client.init_weight_transfer_engine({"rank_offset": 1})
        return engine

    def _broadcast(self, source: Any, meta: Any) -> None:
        if not self.is_sender:
            super()._broadcast(source, meta)
            return
        held = list(self._checked_iter(source, meta))  # as a packing sender may hold them, over the end of groups
        self.sent.extend(
            {"name": name, "shape": list(tensor.shape), "dtype": str(tensor.dtype), "digest": digest(tensor)}
            for name, tensor in held
        )


class RecordingServer:
    """Writes down what a vLLM server is told."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self.calls.append(["init", init_info])

    def start_weight_update(self) -> None:
        self.calls.append(["start"])

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.calls.append(["update", update_info])

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self.calls.append(["finish", weight_version])


class Gatherings:
    """Counts what is gathered at once and how deep gatherings lie in one another."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.depth = self.deepest = 0

    def watch(self) -> None:
        real, this = deepspeed.zero.GatheredParameters, self

        class Watched(real):  # type: ignore[misc, valid-type]
            def __init__(self, parameters: Any, *args: Any, **kwargs: Any) -> None:
                super().__init__(parameters, *args, **kwargs)
                this.sizes.append(sum(item.ds_numel for item in parameters))

            def __enter__(self) -> Any:
                this.depth += 1
                this.deepest = max(this.deepest, this.depth)
                return super().__enter__()

            def __exit__(self, *error: Any) -> Any:
                this.depth -= 1
                return super().__exit__(*error)

        deepspeed.zero.GatheredParameters = Watched


def main() -> None:
    stage, folder = int(sys.argv[1]), Path(sys.argv[2])
    rank, world = start_distributed(deadline=600.0)
    settings = TinyModelSettings(vocabulary_size=300, hidden_size=64, layers=3, heads=2, intermediate_size=96)
    tokenizer = train_tokenizer(["1 + 1 = 2\n"], vocabulary_size=300)
    model = build_tiny_model(settings, tokenizer, seed=5)
    expected = [
        {"name": name, "shape": list(item.shape), "dtype": str(item.dtype), "digest": digest(item)}
        for name, item in model.named_parameters()
    ]
    engine = TrainingEngine(
        PolicyModel(model),
        optimizer=OptimizerSettings(),
        training=TrainingSettings(zero_stage=stage, persistence_threshold=0),
        bfloat16=False,
        updates=1,
    )
    gatherings = Gatherings()
    gatherings.watch()
    WeightTransferTrainerFactory.register_engine("recording", RecordingEngine)
    servers = [RecordingServer(), RecordingServer()]
    source = ParameterSource(engine.module.causal_lm, group_elements=GROUP)
    transfer = NativeTransfer(RecordingInitInfo(rank=rank), ServersClient(servers, [2, 1]), source)
    transfer.send()
    transfer.send()  # a source gives everything again
    shapes = [{"name": item.name, "shape": list(item.shape), "dtype": str(item.dtype)} for item in source.shapes()]
    probe = score_probe(engine, tuple(range(64)))
    partitioned = sum(item.numel() for item in engine.module.causal_lm.parameters())
    (folder / f"{rank}.json").write_text(
        json.dumps(
            {
                "world": world,
                "expected": expected,
                "shapes": shapes,
                "sent": RecordingEngine.sent,
                "servers": [server.calls for server in servers],
                "gathered": gatherings.sizes,
                "deepest": gatherings.deepest,
                "probe": probe.log_probs,
                "held_after": partitioned,
            }
        )
    )
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
