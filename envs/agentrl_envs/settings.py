"""The settings of environments (light to import: pydantic alone)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from agentrl_envs.registry import PROTOCOLS, PluginError

Section = TypeVar("Section", bound=BaseModel)


def read_options(model: type[Section], options: Mapping[str, object]) -> Section:
    """The section ``environment`` as ``model``. Raises `PluginError` that names a bad setting and the valid ones."""
    try:
        return model(**options)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in ("environment", *first["loc"]))
        known = ", ".join(model.model_fields) or "none"
        raise PluginError(f"{key}={first['input']!r}: {first['msg']} (settings here: {known})") from error


def _known_protocol(name: str) -> str:
    PROTOCOLS.check(name)
    return name


_SIMPLETIR = (
    "Work through the problem below step by step. You may write Python to help you: every program is executed, and "
    'what it prints is shown to you after "Code execution result: ". Put a program into a fenced block,\n'
    "```python\nprint(1 + 1)\n```\n"
    "and print what you want to see. Each program starts in a fresh interpreter and knows nothing of earlier ones. "
    "When you know the answer, either call final_answer(...) inside a program or write it as \\boxed{...}."
)


_RETOOL = (
    "Solve the problem below step by step. Where a computation helps you, write a complete Python program; it is "
    "executed, and what it prints comes back between <interpreter> and </interpreter>. Write a program as\n"
    "<code>\n```python\nprint(1 + 1)\n```\n</code>\n"
    "Each program starts in a fresh interpreter: import what it needs, and print what you want to see."
)

_TORL = (
    "A User asks a question and an Assistant solves it, by reasoning in words and by Python programs. The Assistant "
    "writes a program as\n```python\nprint(1 + 1)\n```\n```output\n2\n```\n"
    "where the output block is filled in by executing the program. The Assistant gives the final answer as "
    "\\boxed{...}."
)

_HERMES = (
    "Solve the problem below step by step. Call the tools where they help you. When you know the answer, call none "
    "and write it as \\boxed{...}."
)

_REASONING = "Work through the problem below step by step, and write the final answer as \\boxed{...}."

_SAID_OF_FRESH = (
    "Each program starts in a fresh interpreter and knows nothing of earlier ones.",
    "Each program starts in a fresh interpreter: import what it needs, and print what you want to see.",
)
_SAID_OF_SESSION = (
    "Your programs run one after the other in one interpreter, which keeps variables and imports.",
    "Your programs run one after the other in one interpreter, which keeps variables and imports. Print what you want "
    "to see.",
)


def _in_session(instruction: str) -> str:
    for fresh, session in zip(_SAID_OF_FRESH, _SAID_OF_SESSION, strict=True):
        instruction = instruction.replace(fresh, session)
    return instruction


INSTRUCTIONS: Mapping[str, str] = {
    "simpletir": _SIMPLETIR,
    "retool": _RETOOL,
    "torl": _TORL,
    "hermes": _HERMES,
    "reasoning": _REASONING,
}
"""What each protocol tells the model, unless ``environment.instruction`` says something else."""


class ChatSettings(BaseModel):
    """How conversations are written around the model's own words."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    chat: Literal["auto", "always", "never"] = Field(
        default="auto",
        description="auto: protocol hermes and environments with tools of their own use the model's chat template, the "
        "other protocols are plain text; always: all use the template; never: all are plain text",
    )
    system_prompt: str = Field(
        default="",
        description="text of a system message, for problems that bring none; plain text begins with it",
    )
    template_options: dict[str, object] = Field(
        default_factory=dict, description="variables of the chat template, such as enable_thinking"
    )

    def _with_system_prompt(self, instruction: str) -> str:
        """The instruction behind the system prompt, unless a template has a place for that."""
        parts = (instruction,) if self.chat == "always" else (self.system_prompt, instruction)
        return "\n\n".join(part for part in parts if part)


class ToolChatSettings(ChatSettings):
    """The same where a conversation may hold calls of tools."""

    history: Literal["keep", "template"] = Field(
        default="keep",
        description="what the model sees of its own earlier turns, with tool calls in the chat template. keep: the "
        "tokens it sampled; template: what the template makes of them, as a deployed server shows them, such as turns "
        "without thoughts, which starts a new sequence where they differ",
    )


class ExecutionSettings(BaseModel):
    """How programs and tools are run."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    execution_timeout: float = Field(
        default=10.0, gt=0, description="time limit of one program or tool call, in seconds"
    )
    interpreter: Literal["fresh", "session"] = Field(
        default="fresh",
        description="fresh: every program starts in a new interpreter; session: a trajectory's programs share one, "
        "with its variables and files",
    )
    sandbox_attempts: int = Field(default=4, ge=1, description="attempts per program when the sandbox itself fails")
    sandbox_deadline: float = Field(default=300.0, gt=0, description="seconds for all attempts, including waits")
    sandbox_retry_wait: float = Field(
        default=0.2, ge=0, description="seconds before the second attempt; later waits grow, with jitter"
    )


class SimpleTIRSettings(ToolChatSettings, ExecutionSettings):
    """How an episode with tools runs, under the SimpleTIR protocol or another."""

    protocol: Annotated[str, AfterValidator(_known_protocol)] = Field(
        "simpletir",
        json_schema_extra={"form": f"one of {', '.join(PROTOCOLS.builtin)} or module:function"},
        description="how programs, outputs and answers are written; hermes needs a model with a chat template",
    )
    max_turns: int = Field(default=10, ge=1, description="maximum model turns in one episode")
    instruction: str | None = Field(
        default=None, description='text before the problem; null: the protocol\'s own, "": none'
    )
    observation_limit: int = Field(
        default=512, ge=2, description="maximum characters of a program's output that the model sees"
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
        description="connections to MCP servers. trajectory: each trajectory has its own from its first call on, and a "
        "server given as a command a process of its own; shared: all trajectories use one",
    )

    @property
    def effective_instruction(self) -> str:
        """The instruction that the model is shown."""
        if self.instruction is not None:
            return self.instruction
        own = INSTRUCTIONS.get(self.protocol, "")
        return own if self.interpreter == "fresh" else _in_session(own)

    @property
    def preamble(self) -> str:
        """The instruction as the prompt of a protocol that is text has it."""
        return self._with_system_prompt(self.effective_instruction)


class ClassEnvironmentSettings(ToolChatSettings, ExecutionSettings):
    """How an environment that is a class with ``reset`` and tools runs. ``kwargs`` go to its constructor."""

    kwargs: dict[str, object] = Field(
        default_factory=dict, description="keyword arguments for the environment's constructor"
    )
    max_turns: int = Field(default=10, ge=1, description="maximum model turns in one episode")
    max_calls: int = Field(default=8, ge=1, description="maximum tool calls answered per turn")
    instruction: str = Field(default="", description="text before the problem")
    list_tools: bool = Field(
        default=True,
        description="begin the prompt with the tools, in plain text; false: the model knows them from demonstrations",
    )
    observation_limit: int = Field(default=2048, ge=2, description="maximum characters of a result that the model sees")


class ReasoningSettings(ChatSettings):
    """How an episode of reasoning without tools runs."""

    instruction: str | None = Field(default=None, description='text before the problem; null: the default, "": none')

    @property
    def effective_instruction(self) -> str:
        """The instruction that the model is shown."""
        return INSTRUCTIONS["reasoning"] if self.instruction is None else self.instruction

    @property
    def preamble(self) -> str:
        """The instruction as the prompt has it."""
        return self._with_system_prompt(self.effective_instruction)


class GymnasiumSettings(BaseModel):
    """How plain gymnasium text environments are run. ``kwargs`` go to the environment's constructor."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    kwargs: dict[str, object] = Field(
        default_factory=dict, description="keyword arguments for the environment's constructor"
    )
    threads: int = Field(default=32, ge=1, description="maximum concurrent blocking calls (reset, step, close)")
    call_deadline: float = Field(default=300.0, gt=0, description="time limit of one blocking call, in seconds")


class OpenEnvSettings(BaseModel):
    """How the model's text becomes a server's actions, and its observations text."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    action: dict[str, object] | None = Field(
        default=None,
        description="the action of a turn, in which the text {text} stands for the turn's; null: the only text field "
        "of the server's actions",
    )
    observation: str | None = Field(
        default=None,
        min_length=1,
        description="field of an observation that the model reads, with dots where it lies deeper; null: the only text "
        "field",
    )
    reset_observation: str | None = Field(
        default=None, min_length=1, description="the same for the first observation; null: as observation"
    )
    instruction: str = Field(default="", description="text before the first observation")
    stop: tuple[str, ...] = Field(default=(), description="strings that end a turn; none: the model ends it")
    max_turns: int = Field(default=10, ge=1, description="maximum model turns in one episode")
    call_deadline: float = Field(default=300.0, gt=0, description="time limit of one reply of the server, in seconds")


class VerifiersSettings(BaseModel):
    """How a task set of verifiers is played."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    python: str | None = Field(
        default=None, min_length=1, description="the Python of the virtual environment that has verifiers"
    )
    config: dict[str, object] = Field(
        default_factory=dict, description="verifiers' own configuration of the environment (its section env)"
    )
    concurrency: int = Field(default=64, ge=1, description="most rollouts that the worker plays at once")


class NoSettings(BaseModel):
    """An environment without settings in this section."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class EnvironmentOptions(BaseModel):
    """Keyword arguments of an environment that is not ours; ``model_extra`` holds them as a dictionary."""

    model_config = ConfigDict(extra="allow", frozen=True)


class GraderSettings(BaseModel):
    """Limits of one comparison and the size of the pool."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    function: str | None = Field(
        default=None,
        pattern=r"^[^:]+:[^:]+$",
        description="module:function called as (answer, problem) for a score from 0 to 1, where 1 is correct; null: "
        "compare with the gold answer",
    )
    workers: int = Field(
        default=2, ge=1, description="maximum number of grading processes; each starts when it is first needed"
    )
    deadline: float = Field(
        default=5.0, gt=0, description="CPU seconds to parse the gold answer, and again to compare an answer with it"
    )
    start_deadline: float = Field(default=120.0, gt=0, description="CPU seconds for a process to import its libraries")
    hang_deadline: float = Field(
        default=600.0, gt=0, description="wall-clock seconds without a verdict after which a process is replaced"
    )
    memory_mb: int = Field(default=2048, ge=256, description="address space limit of a process, in MiB")
    max_length: int = Field(
        default=2000, ge=1, description="maximum characters of an answer; longer answers are unparsable"
    )
    max_depth: int = Field(default=40, ge=1, description="maximum nesting of brackets; deeper answers are unparsable")
    cache_size: int = Field(default=65536, ge=0, description="number of cached verdicts")
