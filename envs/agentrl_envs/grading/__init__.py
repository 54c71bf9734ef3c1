"""Grading of answers: clear cases in this process, and all others by value, in worker processes that can be killed."""

from agentrl_envs.grading.grader import Grader, GraderError
from agentrl_envs.settings import GraderSettings

__all__ = ["Grader", "GraderError", "GraderSettings"]
