"""Study files: compared settings, seeds, and criteria of the report."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError, model_validator

from agentrl.errors import SettingsError

Scalar = str | int | float | bool | None
SettingValues = dict[str, JsonValue]
_RESERVED = ("seed", "name", "runs_dir")  # the study sets them for each run


class StudySettings(BaseModel):
    """A grid of runs: each variant with each seed. Variants are the product of ``variants`` and all lists in ``grid``.

    >>> study = StudySettings(name="n", grid={"algorithm.estimator": ["grpo", "tir_otb"]}, seeds=[0, 1])
    >>> [(variant, dict(values)) for variant, values in study.all_variants().items()]
    [('grpo', {'algorithm.estimator': 'grpo'}), ('tir_otb', {'algorithm.estimator': 'tir_otb'})]
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = Field(pattern=r"^\w[\w.-]*$", description="name of the study and of its folder")
    env: str = Field("simpletir", description="environment, as in agentrl train --env")
    config: str | list[str] | None = Field(None, description="preset or list of presets, as in agentrl train --config")
    settings: SettingValues = Field({}, description="settings of every run, with dotted keys")
    variants: dict[str, SettingValues] = Field({}, description="named sets of settings, with dotted keys")
    grid: dict[str, list[Scalar]] = Field({}, description="lists of values by dotted key")
    seeds: list[int] = Field(min_length=1, description="seeds; runs with the same seed start from the same policy")
    jobs: int = Field(1, ge=1, description="number of concurrent runs")
    baseline: str | None = Field(
        None, description="variant with which all others are compared; null: the first variant"
    )
    target: float | None = Field(
        None, ge=0, le=1, description="report the tokens and trajectories needed to reach this score"
    )
    tokens: int | None = Field(None, ge=1, description="compare the scores after this number of sampled tokens")
    collapse: float = Field(
        0.5, gt=0, lt=1, description="a run has collapsed if its last score is below this share of its best score"
    )

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        keys = [*self.settings, *self.grid, *(key for values in self.variants.values() for key in values)]
        for key in keys:
            if key in _RESERVED:
                raise ValueError(
                    f"{key} must not be in settings, grid or variants, because the study sets it: use seeds and name"
                )
        if len(set(self.seeds)) != len(self.seeds):
            raise ValueError(f"seeds must be distinct; got {self.seeds}")
        empty = [key for key, values in self.grid.items() if not values]
        if empty:
            raise ValueError(f"grid.{empty[0]} must have at least one value")
        for key, values in self.grid.items():
            if len({repr(value) for value in values}) != len(values):
                raise ValueError(f"grid.{key} must have distinct values; got {values}")
        names = list(self.all_variants())
        folders = {variant_folder_prefix(name): name for name in reversed(names)}
        for name in names:
            folder = variant_folder_prefix(name)
            if folders[folder] != name:
                raise ValueError(
                    f"variants {folders[folder]!r} and {name!r} share the directory {folder}: use other letters, "
                    "digits, '.', '_' or '-' in their names"
                )
        if self.baseline is not None and self.baseline not in names:
            raise ValueError(f"baseline {self.baseline!r} is not a variant; valid: {', '.join(names)}")
        return self

    @property
    def config_names(self) -> list[str]:
        """Names in ``config``, in order."""
        return [self.config] if isinstance(self.config, str) else list(self.config or [])

    @property
    def baseline_variant(self) -> str:
        """Variant with which all other variants are compared."""
        return self.baseline or next(iter(self.all_variants()))

    def with_baseline(self, variant: str | None) -> StudySettings:
        """Return a copy with ``variant`` as the baseline, or this study if ``variant`` is None.

        Raises SettingsError for an unknown variant.
        """
        return self if variant is None else parse_study({**self.model_dump(), "baseline": variant}, "--baseline")

    def all_variants(self) -> Mapping[str, SettingValues]:
        """Return the settings of every variant by name. Values of the grid override the named set."""
        named: Mapping[str, SettingValues] = self.variants or {"": {}}
        result: dict[str, SettingValues] = {}
        for (name, values), point in itertools.product(named.items(), itertools.product(*self.grid.values())):
            chosen: SettingValues = dict(zip(self.grid, point, strict=True))
            words = [name, *(_format_grid_value(key, value) for key, value in chosen.items())]
            result[" ".join(word for word in words if word) or "default"] = values | chosen
        return result


def variant_folder_prefix(variant: str) -> str:
    """Return the directory prefix of a variant's runs, restricted to characters that are valid in run names.

    >>> variant_folder_prefix("tir_otb learning_rate=0.0003")
    'tir_otb-learning_rate-0.0003'
    """
    return re.sub(r"[^A-Za-z0-9._-]+", "-", variant)


def _format_grid_value(key: str, value: object) -> str:
    """Format a grid value for a variant's name, with the last part of the key unless it is the estimator.

    >>> _format_grid_value("algorithm.estimator", "grpo"), _format_grid_value("rollout.group_size", 4)
    ('grpo', 'group_size=4')
    """
    last = key.rpartition(".")[2]
    return str(value) if last == "estimator" else f"{last}={value}"


def read_study(path: Path) -> StudySettings:
    """Read a study file (YAML). Raises SettingsError with one line per mistake."""
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise SettingsError(f"cannot read the study {path}: {error}") from error
    return parse_study(content, str(path))


def parse_study(content: object, origin: str) -> StudySettings:
    """Validate the content of a study file. Raises SettingsError, whose messages start with ``origin``."""
    if not isinstance(content, dict):
        raise SettingsError(
            f"{origin}: a study must be a mapping with name, seeds, and grid or variants (docs/research/studies.md)"
        )
    try:
        return StudySettings.model_validate(content)
    except ValidationError as error:
        messages = [_format_mistake(origin, item["loc"], item["msg"]) for item in error.errors()]
        raise SettingsError("\n".join(messages)) from error


def _format_mistake(origin: str, keys: Sequence[str | int], message: str) -> str:
    return ": ".join(part for part in (origin, ".".join(map(str, keys)), message.removeprefix("Value error, ")) if part)
