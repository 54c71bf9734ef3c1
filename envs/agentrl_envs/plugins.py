"""What users hand in by name: found, and its errors told so that they can be mended."""

from __future__ import annotations

import difflib
import importlib
import traceback
from typing import Any

from agentrl_envs.episode import EnvironmentLookupError


def import_attribute(path: str, key: str) -> Any:
    """What ``module:attribute`` names. Raises `EnvironmentLookupError` that names the setting ``key``."""
    module_name, _, attribute = path.partition(":")
    if not module_name or not attribute:
        raise EnvironmentLookupError(f"{key} {path!r} leads nowhere; valid: module:attribute")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise EnvironmentLookupError(f"{key} {path!r}: there is no module {error.name!r}") from error
    except (Exception, SystemExit) as error:
        raise EnvironmentLookupError(
            f"{key} {path!r}: module {module_name!r} cannot be imported, it raises {describe_error(error)}"
        ) from error
    if not hasattr(module, attribute):
        nearest = difflib.get_close_matches(attribute, dir(module), n=1)
        hint = f"; did you mean {nearest[0]!r}?" if nearest else ""
        raise EnvironmentLookupError(f"{key} {path!r}: module {module_name!r} has no {attribute!r}{hint}")
    return getattr(module, attribute)


def describe_error(error: BaseException) -> str:
    """The error's type, message and place: an error that is reported without a traceback has no other."""
    last = traceback.extract_tb(error.__traceback__)[-1:]
    place = "".join(f" ({frame.filename}:{frame.lineno})" for frame in last)
    return f"{type(error).__name__}: {error}{place}"
