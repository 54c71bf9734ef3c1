"""A chat format that can be read at a glance."""

from __future__ import annotations

from agentrl_envs.chat import ChatFormat

CHAT = ChatFormat(
    before_problem="<u>",
    after_problem="</u><a>",
    turn_end="</a>",
    before_response="\n<t>",
    between_responses="|",
    after_response="</t><a>",
    user=("\n<u>", "</u><a>"),
)
