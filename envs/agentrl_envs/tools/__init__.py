"""Tools that a model may call: Python in the sandbox, plain functions, and classes with an instance per episode.

A function with types and a docstring is a tool, named ``module:function`` in ``environment.tools``::

    def lookup(constant: str) -> str:
        '''The value of a constant.

        Args:
            constant: its name
        '''
        return CONSTANTS.get(constant, "no such constant")

So are the public methods of a class, whose instance belongs to one episode::

    class Shop:
        def __init__(self, problem):
            self.database = sqlite3.connect(problem.info["db"])

        def query(self, sql: str) -> str: ...

A function, a method or ``__init__`` that asks for ``problem`` or ``sandbox`` by name gets the episode's.
"""

from agentrl_envs.tools.calling import ToolError
from agentrl_envs.tools.schema import PYTHON, PYTHON_SCHEMA, ToolSchema
from agentrl_envs.tools.toolset import NO_TOOLS, EpisodeTools, Tool, ToolSet, load_tools

__all__ = [
    "NO_TOOLS",
    "PYTHON",
    "PYTHON_SCHEMA",
    "EpisodeTools",
    "Tool",
    "ToolError",
    "ToolSchema",
    "ToolSet",
    "load_tools",
]
