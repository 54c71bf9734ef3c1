"""Answer grading. Clear cases are decided in this process; others are compared by value in worker processes."""

from agentrl_envs.grading.grader import Grader, GraderError
from agentrl_envs.settings import GraderSettings

__all__ = ["Grader", "GraderError", "GraderSettings"]
