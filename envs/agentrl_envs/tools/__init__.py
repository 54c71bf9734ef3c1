"""Tools that a model may call: Python in the sandbox, functions, and classes with one instance per episode.

A function with type annotations and a docstring is a tool, named ``module:function`` in ``environment.tools``::

    def lookup(constant: str) -> str:
        '''The value of a constant.

        Args:
            constant: its name
        '''
        return CONSTANTS.get(constant, "no such constant")

The public methods of a class are tools of an instance that belongs to one episode::

    class Shop:
        def __init__(self, problem):
            self.database = sqlite3.connect(problem.info["db"])

        def query(self, sql: str) -> str: ...

Functions, methods and ``__init__`` receive the episode's objects in parameters named ``problem`` and ``sandbox``.
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
