"""The cold start: short supervised fine-tuning on the model tokens of demonstrations."""

from __future__ import annotations

import hashlib
import json
import os
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

import agentrl
from agentrl.errors import SettingsError
from agentrl.kernels.attention import PackedRow, pack_row
from agentrl.models.exactness import check_packed_forward, choose_attention_backend
from agentrl.models.loading import build_tiny_model, read_model, train_tokenizer, write_model
from agentrl.models.policy import PolicyModel
from agentrl.models.tokenizer import TextCodec, read_tokenizer
from agentrl.problems.demonstrations import Demonstration, DemonstrationTurn
from agentrl.problems.sources import LoadedDemonstrations, load_demonstrations
from agentrl.rollout.environment import build_environment, environment_tools
from agentrl.telemetry.files import os_errors_as_world_errors
from agentrl.training.coldstart.demonstrations import (
    EncodedDemonstration,
    add_observations,
    check_no_template_tool_calls,
    convert_to_protocol_format,
    environment_cache_key,
    warn_of_exceeded_token_limits,
)
from agentrl.training.engine.deepspeed_engine import TrainingEngine, start_distributed
from agentrl.training.settings import OptimizerSettings, TrainingSettings
from agentrl_envs.chat import split_marked_text
from agentrl_envs.episode import Environment
from agentrl_envs.types import Problem

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from agentrl.config import Settings


async def encode_demonstration(
    demonstration: Demonstration, *, environment: Environment, codec: TextCodec
) -> EncodedDemonstration:
    """Encode a demonstration like a rollout, each turn and each observation separately.

    The end-of-sequence token is appended to a turn that does not end with a stop string.
    """
    episode = environment.episode(demonstration.problem)
    prompt = await episode.start()
    ids: list[int] = []
    mask: list[bool] = []
    for turn in demonstration.turns:
        tokens = list(codec.encode(turn.model))
        stopped = any(turn.model.endswith(stop) for stop in episode.stop_strings) and episode.turn_complete(turn.model)
        if not stopped:
            tokens.append(codec.eos_id)
        observed = codec.encode_parts(split_marked_text(turn.observation))
        ids += [*tokens, *observed]
        mask += [True] * len(tokens) + [False] * len(observed)
    await episode.close()
    return EncodedDemonstration(
        prompt_ids=codec.encode_prompt(prompt), response_ids=tuple(ids), response_mask=tuple(mask)
    )


def pack_demonstrations(demonstrations: Sequence[EncodedDemonstration]) -> tuple[PackedRow, Tensor, Tensor]:
    """Return demonstrations as one packed row, and the rows and columns [N] of the model's tokens."""
    documents = [(torch.tensor(one.prompt_ids), torch.tensor(one.response_ids)) for one in demonstrations]
    mask = pad_sequence([torch.tensor(one.response_mask) for one in demonstrations], batch_first=True)
    rows, columns = mask.nonzero(as_tuple=True)
    return pack_row(documents), rows, columns


def shuffled_batches(count: int, size: int, *, seed: int) -> Iterator[list[int]]:
    """Yield batches of indices endlessly, with a new permutation in each epoch. Batches may span epochs."""
    generator = torch.Generator().manual_seed(seed)
    queue: list[int] = []
    while True:
        while len(queue) < size:
            queue += torch.randperm(count, generator=generator).tolist()
        yield queue[:size]
        queue = queue[size:]


def random_repetition_demonstration(vocabulary: Tensor, generator: torch.Generator) -> EncodedDemonstration:
    """Return 4 to 16 random tokens of ``vocabulary`` [V] as the prompt, repeated three times as the response.

    Only a model that copies can predict the repetitions. A small new model that only imitates demonstrations learns the
    form of tool calls long before it learns to copy results, and often makes no further progress.
    """
    length = int(torch.randint(4, 17, (), generator=generator))
    ids = tuple(vocabulary[torch.randint(len(vocabulary), (length,), generator=generator)].tolist())
    mask = (False, *[True] * (3 * length - 1))  # the first token cannot be predicted
    return EncodedDemonstration(prompt_ids=ids, response_ids=ids * 3, response_mask=mask)


def fine_tune(
    model: Any,
    rows: Sequence[EncodedDemonstration],
    final_rows: Sequence[EncodedDemonstration],
    settings: Settings,
    *,
    report: Callable[[int, float], None],
) -> None:
    """Minimize the mean negative log-probability of the model's tokens, in place.

    The last ``coldstart.direct_steps`` steps use ``final_rows`` instead, which must have the same length as ``rows``.
    The first ``coldstart.copy_steps`` steps add repeated random tokens. After each step, ``report`` is called with the
    step's number and its loss on demonstrations.
    """
    cold = settings.coldstart
    _, world = start_distributed(deadline=settings.training.collective_deadline)
    if world > 1:
        raise SettingsError("the cold start supports one process only: set training.num_processes=1 or model.path")
    engine = TrainingEngine(
        PolicyModel(
            model,
            backend=settings.training.head_backend,
            attention=choose_attention_backend(settings.model, model.config),
        ),
        optimizer=OptimizerSettings(
            learning_rate=cold.learning_rate,
            schedule="cosine",
            warmup_steps=cold.warmup_steps,
            betas=(0.9, 0.98),
            final_fraction=0.1,
        ),
        training=TrainingSettings(zero_stage=0),
        bfloat16=settings.model.dtype == "bfloat16",
        updates=cold.steps,
    )
    check_packed_forward(settings.model.path or "the embedded tiny policy", engine.module)
    model.train()
    stream = shuffled_batches(len(rows), cold.batch_size, seed=_seed(settings))
    vocabulary = torch.tensor(sorted({token for row in rows for token in (*row.prompt_ids, *row.response_ids)}))
    generator = torch.Generator().manual_seed(_seed(settings))
    early = 0 if cold.direct_steps is None else cold.steps - cold.direct_steps
    for step in range(1, cold.steps + 1):
        demonstrations = rows if step <= early else final_rows
        chosen = [demonstrations[index] for index in next(stream)]
        tokens = sum(sum(row.response_mask) for row in chosen)
        if step <= cold.copy_steps:
            chosen += [random_repetition_demonstration(vocabulary, generator) for _ in chosen]
        statistics, _ = engine(*(part.to(engine.device) for part in pack_demonstrations(chosen)))
        engine.backward(-statistics.log_probs.sum() / len(statistics.log_probs))
        engine.step()
        report(step, -float(statistics.log_probs[:tokens].detach().mean()))
    engine.close()
    model.eval()


async def cold_start(
    settings: Settings, output: Path, report: Callable[[int, float], None], problems: Sequence[Problem] = ()
) -> None:
    """Train a policy on demonstrations and export it to ``output``. Without ``model.path``, use the embedded model.

    ``output`` is written completely or not at all. Raises SettingsError before training if ``output`` cannot be
    written, or if all prompts of ``problems`` exceed the limit of rollouts.
    """
    environment = build_environment(settings)
    await environment.open()
    try:
        read = read_coldstart_demonstrations(settings).demonstrations
        demonstrations = [await add_observations(item, environment) for item in read]
        try:
            output.parent.mkdir(parents=True, exist_ok=True)
            # Check that a directory can be created. It is removed, so that nothing remains if training is killed.
            _temporary_directory(output).cleanup()
        except OSError as error:
            raise SettingsError(f"cannot write the policy to {output}: {error.strerror}") from error
        model, tokenizer = await _train_model(settings, demonstrations, environment, report, problems)
        body = (
            f"Cold start by agentrl {agentrl.__version__}: {settings.coldstart.steps} steps of supervised "
            f"fine-tuning on {len(demonstrations)} demonstrations ({settings.coldstart.demonstrations})."
        )
        with os_errors_as_world_errors(output, "write the policy to"), _temporary_directory(output) as directory:
            folder = Path(directory) / "policy"
            write_model(folder, model=model, tokenizer=tokenizer, title=output.name, body=body)
            _rename_unless_exists(folder, output)
    finally:
        await environment.close()


async def _train_model(
    settings: Settings,
    demonstrations: Sequence[Demonstration],
    environment: Environment,
    report: Callable[[int, float], None],
    problems: Sequence[Problem],
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    seed = _seed(settings)
    tokenizer, rows = await _encode_demonstrations(settings, demonstrations, environment, problems)
    if settings.model.path is None:
        model = build_tiny_model(settings.model.tiny, tokenizer, seed=seed)
    else:
        model = read_model(settings.model.path, settings.model)
    codec = TextCodec(tokenizer)
    mixed = shorten_to_direct_answers(
        demonstrations,
        share=settings.coldstart.direct_share,
        seed=seed,
        boxed=environment_tools(settings.env) is None,
        turn=settings.coldstart.direct_turn,
    )
    late_rows = [
        row if late is item else await encode_demonstration(late, environment=environment, codec=codec)
        for row, item, late in zip(rows, demonstrations, mixed, strict=True)
    ]
    fine_tune(model, rows, late_rows, settings, report=report)
    return model, tokenizer


async def _encode_demonstrations(
    settings: Settings,
    demonstrations: Sequence[Demonstration],
    environment: Environment,
    problems: Sequence[Problem],
) -> tuple[PreTrainedTokenizerBase, list[EncodedDemonstration]]:
    """Return the tokenizer and the encoded demonstrations.

    Warns if prompts or demonstrations exceed the token limits of rollouts. Raises SettingsError if all prompts do.
    The tokenizer of the embedded model is trained on the demonstrations.
    """
    if settings.model.path is None:
        texts = [await _prompt(item.problem, environment) for item in demonstrations]
        tokenizer = train_tokenizer(
            [*(item.text for item in demonstrations), *texts], vocabulary_size=settings.model.tiny.vocabulary_size
        )
    else:
        tokenizer = read_tokenizer(settings.model.path)
        check_no_template_tool_calls(settings, tokenizer.chat_template)
    codec = TextCodec(tokenizer)
    rows = [await encode_demonstration(item, environment=environment, codec=codec) for item in demonstrations]
    warn_of_exceeded_token_limits(
        settings, [len(codec.encode_prompt(await _prompt(one, environment))) for one in problems], rows
    )
    return tokenizer, rows


async def check_token_limits(settings: Settings, problems: Sequence[Problem]) -> None:
    """Check prompts and demonstrations against the limits of rollouts, as :func:`cold_start` does, without training.

    Raises SettingsError if all prompts exceed the limit.
    """
    environment = build_environment(settings)
    await environment.open()
    try:
        read = read_coldstart_demonstrations(settings).demonstrations
        await _encode_demonstrations(
            settings, [await add_observations(item, environment) for item in read], environment, problems
        )
    finally:
        await environment.close()


def read_coldstart_demonstrations(settings: Settings) -> LoadedDemonstrations:
    """Load the demonstrations of ``coldstart.demonstrations``. Raises SettingsError if there are none."""
    cold = settings.coldstart
    if cold.demonstrations is None:
        raise SettingsError(
            "neither model.path nor coldstart.demonstrations is set: set model.path to a model, or "
            "coldstart.demonstrations to a JSONL file, builtin:arithmetic or formula:FILE"
        )
    loaded = load_demonstrations(
        cold.demonstrations, count=cold.count, variants=cold.variants, seed=_seed(settings), families=cold.families
    )
    return replace(loaded, demonstrations=convert_to_protocol_format(loaded.demonstrations, settings))


def shorten_to_direct_answers(
    demonstrations: Sequence[Demonstration],
    *,
    share: float,
    seed: int,
    boxed: bool = True,
    turn: Literal["first", "any"] = "first",
) -> tuple[Demonstration, ...]:
    """Make a random ``share`` of the demonstrations end early with the answer, ``boxed`` or as in the last turn.

    The answer replaces all turns (``first``), or a random turn before the last and all turns after it (``any``).
    """
    generator = random.Random(seed)
    shortened = []
    for item in demonstrations:
        if generator.random() < share and (item.problem.answer is not None or not boxed):
            kept = generator.randrange(max(1, len(item.turns) - 1)) if turn == "any" else 0
            answer = DemonstrationTurn(model=f"\\boxed{{{item.problem.answer}}}") if boxed else item.turns[-1]
            item = replace(item, turns=(*item.turns[:kept], answer))
        shortened.append(item)
    return tuple(shortened)


def policy_cache_directory(settings: Settings, demonstrations: Sequence[Demonstration]) -> Path:
    """Return the cache directory of the policy for these settings and demonstrations."""
    key = {
        "version": agentrl.__version__,
        # Excludes adapters and settings that a resumed run may change, because a resume needs the same policy.
        "model": settings.model.model_dump(
            mode="json", exclude={"attention", "gradient_checkpointing", "checkpoint_offload", "lora"}
        ),
        "coldstart": settings.coldstart.model_dump(mode="json", exclude={"seed"}),
        "environment": settings.environment.model_dump(mode="json"),
        "seed": _seed(settings),
        "demonstrations": hashlib.sha256("\0".join(map(_content_for_cache_key, demonstrations)).encode()).hexdigest(),
        **environment_cache_key(settings),
    }
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return root / "agentrl" / "coldstart" / digest


def _content_for_cache_key(demonstration: Demonstration) -> str:
    """Return the content of a demonstration that affects the policy: its text, and columns that the prompt may use."""
    info = demonstration.problem.info
    return demonstration.text + (json.dumps(info, sort_keys=True) if info else "")


def _temporary_directory(output: Path) -> TemporaryDirectory[str]:
    return TemporaryDirectory(prefix=f".{output.name}.", dir=output.parent)


def _rename_unless_exists(folder: Path, output: Path) -> None:
    """Rename a complete directory to ``output``, unless another process has just created the same policy."""
    try:
        folder.rename(output)
    except OSError:
        if not output.is_dir():
            raise


async def _prompt(problem: Problem, environment: Environment) -> str:
    episode = environment.episode(problem)
    try:
        return await episode.start()
    finally:
        await episode.close()


def _seed(settings: Settings) -> int:
    return settings.seed if settings.coldstart.seed is None else settings.coldstart.seed
