"""Settings of environments and of the grader. Imports pydantic and the registry only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from agentrl_envs.registry import PROTOCOLS, PluginError

Section = TypeVar("Section", bound=BaseModel)


def validate_options(model: type[Section], options: Mapping[str, object]) -> Section:
    """Validate the section ``environment`` with ``model``.

    Raises PluginError with the invalid setting and the valid settings.
    """
    try:
        return model(**options)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in ("environment", *first["loc"]))
        known = ", ".join(model.model_fields) or "none"
        raise PluginError(f"{key}={first['input']!r}: {first['msg']} (valid settings: {known})") from error


def _check_protocol(name: str) -> str:
    PROTOCOLS.check(name)
    return name


_SIMPLETIR_INSTRUCTION = (
    "Work through the problem below step by step. You may write Python to help you: every program is executed, and "
    'what it prints is shown to you after "Code execution result: ". Put a program into a fenced block,\n'
    "```python\nprint(1 + 1)\n```\n"
    "and print what you want to see. Each program starts in a fresh interpreter and knows nothing of earlier ones. "
    "When you know the answer, either call final_answer(...) inside a program or write it as \\boxed{...}."
)


_RETOOL_INSTRUCTION = (
    "Solve the problem below step by step. Where a computation helps you, write a complete Python program; it is "
    "executed, and what it prints comes back between <interpreter> and </interpreter>. Write a program as\n"
    "<code>\n```python\nprint(1 + 1)\n```\n</code>\n"
    "Each program starts in a fresh interpreter: import what it needs, and print what you want to see."
)

_TORL_INSTRUCTION = (
    "A User asks a question and an Assistant solves it, by reasoning in words and by Python programs. The Assistant "
    "writes a program as\n```python\nprint(1 + 1)\n```\n```output\n2\n```\n"
    "where the output block is filled in by executing the program. The Assistant gives the final answer as "
    "\\boxed{...}."
)

_HERMES_INSTRUCTION = (
    "Solve the problem below step by step. Call the tools where they help you. When you know the answer, call none "
    "and write it as \\boxed{...}."
)

_REASONING_INSTRUCTION = "Work through the problem below step by step, and write the final answer as \\boxed{...}."

_FRESH_INTERPRETER_SENTENCES = (
    "Each program starts in a fresh interpreter and knows nothing of earlier ones.",
    "Each program starts in a fresh interpreter: import what it needs, and print what you want to see.",
)
_SESSION_INTERPRETER_SENTENCES = (
    "Your programs run one after the other in one interpreter, which keeps variables and imports.",
    "Your programs run one after the other in one interpreter, which keeps variables and imports. Print what you want "
    "to see.",
)


def _describe_session_interpreter(instruction: str) -> str:
    for fresh, session in zip(_FRESH_INTERPRETER_SENTENCES, _SESSION_INTERPRETER_SENTENCES, strict=True):
        instruction = instruction.replace(fresh, session)
    return instruction


INSTRUCTIONS: Mapping[str, str] = {
    "simpletir": _SIMPLETIR_INSTRUCTION,
    "retool": _RETOOL_INSTRUCTION,
    "torl": _TORL_INSTRUCTION,
    "hermes": _HERMES_INSTRUCTION,
    "reasoning": _REASONING_INSTRUCTION,
}
"""Default instruction of each protocol (``environment.instruction``)."""


class ChatSettings(BaseModel):
    """Settings for the format of a conversation: chat template and system message."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    chat: Literal["auto", "always", "never"] = Field(
        default="auto",
        description="auto: protocol hermes and environments with custom tools use the model's chat template, and the "
        "other protocols are plain text; always: every protocol uses the template; never: every protocol is plain text",
    )
    system_prompt: str = Field(
        default="",
        description="text of the system message, for problems without a system message; in plain text, the prompt "
        "begins with this text",
    )
    template_options: dict[str, object] = Field(
        default_factory=dict, description="variables of the chat template, such as enable_thinking"
    )

    def _with_system_prompt(self, instruction: str) -> str:
        """Prepend the system prompt to the instruction, unless a chat template writes it in a system message."""
        parts = (instruction,) if self.chat == "always" else (self.system_prompt, instruction)
        return "\n\n".join(part for part in parts if part)


class ToolChatSettings(ChatSettings):
    """Chat settings of conversations that may contain tool calls."""

    history: Literal["keep", "template"] = Field(
        default="keep",
        description="form in which the model sees its earlier turns, if the chat template formats the tool calls. "
        "keep: as the sampled tokens; template: rendered again by the chat template, as in deployed servers, for "
        "example without reasoning. If the rendered tokens differ from the sampled tokens, a new trajectory starts",
    )


class ExecutionSettings(BaseModel):
    """Settings for running programs and tools."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    execution_timeout: float = Field(
        default=10.0, gt=0, description="time limit of one program or tool call, in seconds"
    )
    interpreter: Literal["fresh", "session"] = Field(
        default="fresh",
        description="fresh: every program starts in a new interpreter; session: the programs of a trajectory share "
        "one interpreter with its variables and files",
    )
    sandbox_attempts: int = Field(
        default=4, ge=1, description="maximum number of attempts per program if the sandbox fails"
    )
    sandbox_deadline: float = Field(default=300.0, gt=0, description="seconds for all attempts, including waits")
    sandbox_retry_wait: float = Field(
        default=0.2, ge=0, description="seconds before the second attempt; later waits grow, with jitter"
    )


class SimpleTIRSettings(ToolChatSettings, ExecutionSettings):
    """Settings of an episode with tools, under SimpleTIR or another protocol."""

    protocol: Annotated[str, AfterValidator(_check_protocol)] = Field(
        "simpletir",
        json_schema_extra={"form": f"one of {', '.join(PROTOCOLS.builtin)} or module:function"},
        description="format of programs, outputs and answers; hermes needs a model with a chat template",
    )
    max_turns: int = Field(default=10, ge=1, description="maximum model turns in one episode")
    instruction: str | None = Field(
        default=None, description='text before the problem; null: the protocol\'s instruction; "": no instruction'
    )
    observation_limit: int = Field(
        default=512, ge=2, description="maximum number of characters of a program's output in the observation"
    )
    tools: tuple[str, ...] = Field(
        default=("python",),
        min_length=1,
        description="tools of protocol hermes: python (runs in the sandbox), registered names, module:attribute of "
        "functions and classes, or mcp:COMMAND and mcp:URL of MCP servers",
    )
    max_calls: int = Field(default=8, ge=1, description="maximum tool calls answered per turn, with protocol hermes")
    mcp_sessions: Literal["trajectory", "shared"] = Field(
        default="trajectory",
        description="connections to MCP servers. trajectory: a separate connection for each trajectory, opened at its"
        " first call, and a separate process if the server is a command; shared: one connection for all "
        "trajectories",
    )

    @property
    def effective_instruction(self) -> str:
        """The configured instruction, or the protocol's default."""
        if self.instruction is not None:
            return self.instruction
        own = INSTRUCTIONS.get(self.protocol, "")
        return own if self.interpreter == "fresh" else _describe_session_interpreter(own)

    @property
    def system_prompt_and_instruction(self) -> str:
        """System prompt and instruction, combined into the text that precedes the problem."""
        return self._with_system_prompt(self.effective_instruction)


class ToolTurnSettings(ToolChatSettings):
    """Settings for the turns of an environment whose tools are the methods of a class."""

    max_turns: int = Field(default=10, ge=1, description="maximum model turns in one episode")
    max_calls: int = Field(default=8, ge=1, description="maximum tool calls answered per turn")
    instruction: str = Field(default="", description="text before the problem")
    list_tools: bool = Field(
        default=True,
        description="begin a plain-text prompt with the list of tools; false: omit the list, for a policy that "
        "learned the tools from demonstrations",
    )
    observation_limit: int = Field(
        default=2048, ge=2, description="maximum number of characters of a result in the observation"
    )


class ClassEnvironmentSettings(ToolTurnSettings, ExecutionSettings):
    """Settings of an environment that is defined by a class. ``kwargs`` are passed to the constructor."""

    kwargs: dict[str, object] = Field(
        default_factory=dict, description="keyword arguments for the environment's constructor"
    )


class ContainerSettings(BaseModel):
    """Settings of the containers for tasks in Harbor's format."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    containers: int = Field(
        default=8, ge=1, description="maximum number of concurrent containers; other rollouts wait for one"
    )
    cpus: float = Field(default=1.0, gt=0, description="CPUs of a container, for tasks that do not set cpus")
    memory_mb: int = Field(
        default=2048, ge=16, description="memory limit of a container in MiB, for tasks that do not set memory_mb"
    )
    pids: int = Field(default=512, ge=16, description="maximum number of processes in a container")
    build_args: dict[str, str] = Field(
        default_factory=dict, description="values of ARG in the tasks' Dockerfiles, for example a local base image"
    )
    agent_files: str | None = Field(
        default=None,
        min_length=1,
        description="directory with the agent's program, mounted read-only at /agent in each container",
    )
    verifier_network: str | None = Field(
        default=None,
        min_length=1,
        description="Docker network that a container joins when its verifier starts, for example bridge; processes "
        "that the agent left running can use it too. null: no network",
    )


class HarborSettings(ToolTurnSettings, ContainerSettings):
    """Settings of the built-in terminal agent on tasks in Harbor's format."""

    max_turns: int = Field(default=30, ge=1, description="maximum model turns in one episode")
    observation_limit: int = Field(
        default=4096, ge=2, description="maximum number of characters of a command's output in the observation"
    )
    execution_timeout: float = Field(default=60.0, gt=0, description="time limit of one command, in seconds")


class HarborAgentSettings(ContainerSettings):
    """Settings of a command that plays tasks in Harbor's format inside their containers."""

    helper_image: str = Field(
        default="agentrl-sandbox",
        min_length=1,
        description="image with Python for the helper container that opens the gateway's port inside a task's "
        "container; by default the image of the sandbox service",
    )


class ReasoningSettings(ChatSettings):
    """Settings of an episode without tools."""

    instruction: str | None = Field(
        default=None, description='text before the problem; null: the default instruction; "": no instruction'
    )

    @property
    def effective_instruction(self) -> str:
        """The configured instruction, or the default."""
        return INSTRUCTIONS["reasoning"] if self.instruction is None else self.instruction

    @property
    def system_prompt_and_instruction(self) -> str:
        """System prompt and instruction, combined into the text that precedes the problem."""
        return self._with_system_prompt(self.effective_instruction)


class GymnasiumSettings(BaseModel):
    """Settings of gymnasium text environments. ``kwargs`` are passed to the environment's constructor."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    kwargs: dict[str, object] = Field(
        default_factory=dict, description="keyword arguments for the environment's constructor"
    )
    threads: int = Field(default=32, ge=1, description="maximum concurrent blocking calls (reset, step, close)")
    call_deadline: float = Field(default=300.0, gt=0, description="time limit of one blocking call, in seconds")


class OpenEnvSettings(BaseModel):
    """Mapping between turns and the actions and observations of an OpenEnv server."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    action: dict[str, object] | None = Field(
        default=None,
        description="action of a turn, in which {text} is replaced by the turn's text; null: the text is sent in the "
        "only text field of the server's actions",
    )
    observation: str | None = Field(
        default=None,
        min_length=1,
        description="field of an observation that the model reads, with dots for nested fields; null: the only text "
        "field",
    )
    reset_observation: str | None = Field(
        default=None,
        min_length=1,
        description="field of the first observation that the model reads; null: the same field as observation, or "
        "the only text field",
    )
    instruction: str = Field(default="", description="text before the first observation")
    stop: tuple[str, ...] = Field(
        default=(), description="stop strings that end a turn; empty: the model ends the turn"
    )
    max_turns: int = Field(default=10, ge=1, description="maximum model turns in one episode")
    call_deadline: float = Field(
        default=300.0, gt=0, description="time limit of one response of the server, in seconds"
    )


class VerifiersSettings(BaseModel):
    """Settings of the worker that runs an environment of the ``verifiers`` library."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    python: str | None = Field(
        default=None,
        min_length=1,
        description="path of the Python interpreter in the virtual environment with verifiers",
    )
    config: dict[str, object] = Field(
        default_factory=dict, description="configuration of the environment for verifiers (its section env)"
    )
    concurrency: int = Field(default=64, ge=1, description="maximum number of concurrent rollouts of the worker")


class NoSettings(BaseModel):
    """Empty settings, for an environment that has none."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class EnvironmentOptions(BaseModel):
    """Keyword arguments of an environment from another package, in ``model_extra``."""

    model_config = ConfigDict(extra="allow", frozen=True)


class GraderSettings(BaseModel):
    """Limits of one comparison and the size of the process pool."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    function: str | None = Field(
        default=None,
        pattern=r"^[^:]+:[^:]+$",
        description="module:function, called as (answer, problem), that returns a score from 0 to 1, where 1 is "
        "correct; null: compare with the reference answer",
    )
    workers: int = Field(
        default=2, ge=1, description="maximum number of grading processes; each starts when it is first needed"
    )
    deadline: float = Field(
        default=5.0,
        gt=0,
        description="maximum CPU seconds to parse the reference answer, and separately to compare an answer with it",
    )
    start_deadline: float = Field(
        default=120.0, gt=0, description="CPU seconds that a process may take to import its libraries"
    )
    hang_deadline: float = Field(
        default=600.0, gt=0, description="wall-clock seconds without a verdict after which a process is replaced"
    )
    memory_mb: int = Field(default=2048, ge=256, description="address space limit of a process, in MiB")
    max_length: int = Field(
        default=2000, ge=1, description="maximum characters of an answer; longer answers are unparsable"
    )
    max_depth: int = Field(default=40, ge=1, description="maximum nesting of brackets; deeper answers are unparsable")
    cache_size: int = Field(default=65536, ge=0, description="number of cached verdicts")
