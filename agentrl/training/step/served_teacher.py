"""A teacher on an OpenAI-compatible server that scores token ids of a prompt (vLLM's ``prompt_logprobs``)."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from typing import Any

import stamina
import torch
from torch import Tensor

from agentrl.batch import Batch, scatter_tokens
from agentrl.errors import WorldError
from agentrl.models.policy import FrozenTopTokens
from agentrl.rollout.engines.replica import (
    InvalidResponseError,
    JSONClient,
    ServerCallError,
    StatusError,
    TooSlowError,
    UnreachableError,
)
from agentrl.training.settings import TeacherSettings
from agentrl.training.step.reference_and_critic import raise_for_refused_ids

_PATH = "/completions"
_REQUEST_SECONDS = 600.0


class ServedTeacher:
    """A frozen policy on a server, at temperature 1. Each rank requests the scores of its micro-batches."""

    def __init__(
        self,
        settings: TeacherSettings,
        *,
        refused_ids: Mapping[int, str],
        vocabulary: int | None = None,
        deadline: float = 300.0,
    ) -> None:
        """Failed requests are retried for ``deadline`` seconds. ``refused_ids`` is described in :class:`.FrozenPolicy`.

        Token ids of at least ``vocabulary`` in the server's responses are ignored, because they only pad the teacher's
        vocabulary.
        """
        self._url, self._model = str(settings.url), settings.path
        self.needs_full_distribution = settings.needs_full_distribution
        self._top = settings.top_tokens if self.needs_full_distribution else 0
        self._beta = settings.resolved_beta
        self._refused_ids = refused_ids
        self._vocabulary = math.inf if vocabulary is None else vocabulary
        self._deadline = deadline

    def score_batch(self, batch: Batch, chosen: Tensor | None = None) -> tuple[Tensor, FrozenTopTokens | None]:
        """Return log-probabilities [B, T] of the sampled tokens, and the most likely tokens for exact objectives.

        If ``chosen`` [B] is given, only the chosen trajectories are scored. Raises WorldError if the server does not
        score the trajectories within the deadline.
        """
        raise_for_refused_ids(batch, self._refused_ids, chosen)
        prompts, ids = batch.prompt_lengths.tolist(), batch.input_ids.tolist()
        lengths = (batch.prompt_lengths + batch.response_lengths).tolist()
        numbers = [*range(len(ids))] if chosen is None else chosen.nonzero()[:, 0].tolist()
        if not numbers:
            return torch.zeros_like(batch.rollout_log_probs), None
        try:
            answers = asyncio.run(self._score_rows([ids[number][: lengths[number]] for number in numbers]))
        except ServerCallError as error:
            raise WorldError(f"the teacher {self._model} at {self._url} cannot score trajectories: {error}") from None
        scores = dict(zip(numbers, answers, strict=True))
        sampled, top_ids, top = [], [], []
        for row, column in zip(batch.rows.tolist(), batch.columns.tolist(), strict=True):
            if row not in scores:
                continue
            position = prompts[row] + column
            entry = scores[row][position]
            sampled.append(entry[ids[row][position]])
            known = (token for token in entry if token < self._vocabulary)
            best = sorted(known, key=lambda token: -entry[token])[: self._top]
            top_ids.append(best)
            top.append([entry[token] for token in best])
        device = batch.row.token_ids.device
        mask = batch.response_mask if chosen is None else batch.response_mask & chosen[:, None]
        log_probs = scatter_tokens(torch.tensor(sampled, device=device), mask)
        if not self._top:
            return log_probs, None
        count = min(map(len, top_ids))
        tokens = torch.tensor([row[:count] for row in top_ids], device=device)
        values = torch.tensor([row[:count] for row in top], device=device)
        return log_probs, FrozenTopTokens(ids=tokens, log_probs=values, beta=self._beta)

    async def _score_rows(self, rows: Sequence[list[int]]) -> list[list[dict[int, float]]]:
        """Return the log-probabilities by token id at every position of each row; the first position is empty."""
        client = JSONClient(self._url)
        try:
            return await asyncio.gather(*(self._score_row(client, row) for row in rows))
        finally:
            await client.close()

    async def _score_row(self, client: JSONClient, row: list[int]) -> list[dict[int, float]]:
        body = {"model": self._model, "prompt": row, "max_tokens": 1, "temperature": 1.0}
        body["prompt_logprobs"] = self._top
        async for attempt in stamina.retry_context(on=_is_transient, attempts=None, timeout=self._deadline):
            with attempt:
                answer = await client.post(_PATH, body, Any, seconds=_REQUEST_SECONDS)
                return parse_score_response(answer, row, self._top)
        raise AssertionError("unreachable: the last attempt raises")


def _is_transient(error: Exception) -> bool:
    return isinstance(error, UnreachableError | TooSlowError) or (
        isinstance(error, StatusError) and (error.status >= 500 or error.status == 429)
    )


def parse_score_response(answer: object, row: Sequence[int], top: int) -> list[dict[int, float]]:
    """Parse and check a response. Raises InvalidResponseError if log-probabilities are missing."""
    try:
        entries = answer["choices"][0]["prompt_logprobs"]  # type: ignore[index]
        scores = [{int(token): float(item["logprob"]) for token, item in (entry or {}).items()} for entry in entries]
    except (KeyError, IndexError, TypeError, ValueError, AttributeError):
        raise InvalidResponseError(f"expected choices.0.prompt_logprobs; got {str(answer)[:300]}") from None
    complete = all(token in entry and len(entry) >= top for token, entry in zip(row[1:], scores[1:], strict=False))
    if len(scores) != len(row) or not complete:
        raise InvalidResponseError(
            f"expected {max(top, 1)} log-probabilities for each of {len(row)} tokens; if the server returns fewer, "
            "raise its --max-logprobs"
        )
    return scores
