"""Grade answers: cheap certain cases here, everything else by value in processes that can be killed."""

from agentrl_envs.grading.grader import Grader, GraderError
from agentrl_envs.grading.settings import GraderSettings

__all__ = ["Grader", "GraderError", "GraderSettings"]
