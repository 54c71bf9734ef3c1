"""Staleness: the age of tokens when they are trained, in training steps."""

from __future__ import annotations

from collections.abc import Sequence

from agentrl.trajectory import Group


class VersionClock:
    """Which policy version the engine held after how many training steps.

    Versions count optimizer updates, staleness counts steps: a token's is the number of steps that were trained since
    its version was the newest. A trajectory is as stale as its oldest model token.
    """

    def __init__(self) -> None:
        self._steps_at = {0: 0}
        self._version = 0
        self._trained = 0
        self._training = False

    @property
    def version(self) -> int:
        """The version that the engine holds."""
        return self._version

    def installed(self, version: int) -> None:
        """The engine holds ``version`` now."""
        self._version = version
        self._steps_at[version] = self._trained + self._training

    def collected(self) -> None:
        """A batch goes to the trainer."""
        self._training = True

    def trained(self) -> None:
        """The batch has been trained. The version that the engine holds by now is the newest."""
        self._trained += self._training
        self._training = False
        self._steps_at[self._version] = self._trained

    def staleness(self, version: int) -> int:
        """How many training steps ``version`` is behind. RuntimeError for a version that the engine never held."""
        if version not in self._steps_at:
            raise RuntimeError(f"a token was sampled by version {version}, which the engine was never given")
        return self._trained - self._steps_at[version]

    def metrics(self, groups: Sequence[Group]) -> dict[str, float]:
        """Staleness over model tokens and of the stalest trajectory; the share of trajectories of several versions.

        Trajectories excluded from training data do not count.
        """
        played = [item for group in groups for item in group.everyone if not item.no_data]
        spans = [[span for segment in item.segments for span in segment.version_spans] for item in played]
        tokens = sum(count for row in spans for _, count in row)
        if not tokens:
            return {}
        return {
            "staleness/mean": sum(self.staleness(version) * count for row in spans for version, count in row) / tokens,
            "staleness/max": max(self.staleness(version) for row in spans for version, _ in row),
            "staleness/mixed_share": sum(len({version for version, _ in row}) > 1 for row in spans) / len(played),
        }
