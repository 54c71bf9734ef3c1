"""Grading of answers. Clear cases are decided in this process, and all others by value in worker processes."""

from agentrl_envs.grading.grader import Grader, GraderError
from agentrl_envs.settings import GraderSettings

__all__ = ["Grader", "GraderError", "GraderSettings"]
