"""Grading of answers. Clear cases are decided in this process, the rest by value in killable worker processes."""

from agentrl_envs.grading.grader import Grader, GraderError
from agentrl_envs.settings import GraderSettings

__all__ = ["Grader", "GraderError", "GraderSettings"]
