"""TRL's side of ``train_step.py``: an unchanged GRPOTrainer that waits for the parent between steps.

Runs in a separate environment without agentrl.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
import trl
from datasets import Dataset
from train_step_task import BETAS, CLIP, GRADIENT_CLIP, LEARNING_RATE, ParentLine, Task, reward
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer


def rewards(completions: list[str], **_: Any) -> list[float]:
    """Return the shared reward of each completion, as TRL requires."""
    return [reward(text) for text in completions]


class Waiting(TrainerCallback):
    """Waits for the parent before every step, and checks that every completion has its full length."""

    def __init__(self, line: ParentLine, task: Task) -> None:
        self._line = line
        self._task = task

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        versions = {"trl": trl.__version__, "transformers": transformers.__version__, "torch": torch.__version__}
        self._line.ready(versions=versions, threads=torch.get_num_threads())

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._line.step_done(last=state.global_step >= self._task.steps)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
        shortest = (logs or {}).get("completions/min_length")
        if shortest is not None and float(shortest) != self._task.new_tokens:
            raise SystemExit(f"TRL sampled {shortest} tokens, not {self._task.new_tokens}: the work is not the same")


def config(task: Task) -> GRPOConfig:
    """Return the settings: GRPO with one update per step, no reference model, gradient checkpointing or saving."""
    rows = task.prompts * task.samples // task.micro_batches
    return GRPOConfig(
        output_dir=str(Path(task.folder) / "trl"),
        use_cpu=True,
        bf16=False,
        fp16=False,
        per_device_train_batch_size=rows,
        gradient_accumulation_steps=task.micro_batches,
        num_generations=task.samples,
        num_iterations=1,
        max_completion_length=task.new_tokens,
        temperature=1.0,
        beta=0.0,
        epsilon=CLIP,
        loss_type="dapo",  # a mean over all tokens, like agentrl's token_mean
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        adam_beta1=BETAS[0],
        adam_beta2=BETAS[1],
        weight_decay=0.0,
        max_grad_norm=GRADIENT_CLIP,
        max_steps=task.steps,
        gradient_checkpointing=False,
        logging_steps=1,  # agentrl also writes its metrics in every step
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )


def main() -> None:
    """Run ``train_step_trl.py TASK_JSON``. Communicates with the parent over standard input and output."""
    task = Task.from_json(sys.argv[1])
    line = ParentLine()
    torch.set_num_threads(task.threads)
    rows = [json.loads(text) for text in task.problems.read_text().splitlines()]
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(task.model, dtype=torch.float32),
        reward_funcs=rewards,
        args=config(task),
        train_dataset=Dataset.from_list([{"prompt": row["problem"]} for row in rows]),
        processing_class=AutoTokenizer.from_pretrained(task.model),
        callbacks=[Waiting(line, task)],
    )
    trainer.train()


if __name__ == "__main__":
    main()
