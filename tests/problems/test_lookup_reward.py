"""The reward for looking: once for each new look, never for an error, an empty box or a second look."""

import pytest

from agentrl.problems.demonstrations import format_program
from agentrl.problems.horizon import HORIZON_FAMILIES, HorizonSource, lookup_rewards
from agentrl_envs.rewards import Conversation, Message
from agentrl_envs.types import Ended, Problem, Verdict


def conversation(*turns: tuple[str, str]) -> Conversation:
    messages = [
        message
        for model, observation in turns
        for message in (Message(role="assistant", text=model), Message(role="tool", text=observation))
        if message.text
    ]
    return Conversation(turns=tuple(messages), ended=Ended.ANSWERED, answer=None, environment_reward=0.0)


@pytest.mark.parametrize("family", [name for name in HORIZON_FAMILIES if not name.endswith("_1")])
def test_the_shown_solution_earns_a_share_in_every_turn_but_the_last(family: str) -> None:
    looks = int(family.rpartition("_")[2]) - 1
    for shown in HorizonSource(families=[family]).demonstrations(50):
        played = conversation(*((turn.model, turn.observation) for turn in shown.turns))
        expected = [1 / looks] * (len(shown.turns) - 1) + [0.0]
        assert lookup_rewards(shown.problem, played, Verdict.CORRECT) == expected


def test_only_new_answered_looks_count_and_never_more_than_the_task_has() -> None:
    problem = Problem(id="0", statement="", answer="1", source="horizon", family="chain_4")
    played = conversation(
        (format_program("box(11)"), "\nCode execution result: 12\n"),
        (format_program("box( 11 )"), "\nCode execution result: 12\n"),
        (format_program("box(13)"), "\nCode execution result: empty\n"),
        (format_program("box(x)"), "\nNameError: name 'x' is not defined, line 1\n"),
        (format_program("print(12)"), "\nCode execution result: 12\n"),
        (format_program("box(12)"), "\nCode execution result: 14\n"),
        (format_program("box(14)"), "\nCode execution result: 15\n"),
        (format_program("box(15)"), "\nCode execution result: end 15\n"),
        ("\\boxed{15}", ""),
    )
    third = 1 / 3
    assert lookup_rewards(problem, played, Verdict.CORRECT) == [third, 0.0, 0.0, 0.0, 0.0, third, third, 0.0, 0.0]


@pytest.mark.parametrize(
    ("family", "programs"),
    [
        ("chain_4", ["print('box(1)')", "print(1)#box(2)", '"box(3)"', "def box(n): print(n)\nbox(4)", "box(x)"]),
        ("search_4", ["key(900)", "key(3)", "key(-54)"]),
        ("box_take", ["box(11)"]),
        ("chain_4", ["box(", "box()", "box(1//0)", "box(True)", "box(1.5)", "box('11')"]),
    ],
)
def test_what_only_looks_like_a_look_earns_nothing(family: str, programs: list[str]) -> None:
    problem = Problem(id="0", statement="A key between 50 and 58.", answer="1", source="horizon", family=family)
    played = conversation(*((format_program(text), "\nCode execution result: less 54\n") for text in programs))
    assert lookup_rewards(problem, played, None) == [0.0] * len(programs)


def test_one_number_in_several_spellings_is_one_look() -> None:
    problem = Problem(id="0", statement="A key between 50 and 58.", answer="1", source="horizon", family="search_4")
    texts = ("key(54)", "key(54+0)", "key((50+58)//2)", "key(27*2)", "key(60-5)")
    played = conversation(*((format_program(text), "\nCode execution result: less 54\n") for text in texts))
    assert lookup_rewards(problem, played, None) == [1 / 3, 0.0, 0.0, 0.0, 1 / 3]


def test_a_task_of_one_turn_has_nothing_to_look_at() -> None:
    problem = Problem(id="0", statement="", answer="1", source="horizon", family="debug_1")
    assert lookup_rewards(problem, conversation((format_program("final_answer(1)"), "")), None) == [0.0]
