"""The template finds what an agent lost, and only that."""

import json

from hypothesis import given
from hypothesis import strategies as st

from tests.harnesses.template import Template, answers, flaws

TOOLS = [{"type": "function", "function": {"name": "bash", "parameters": {}}}]
texts = st.text(st.characters(codec="utf-8"), max_size=30)
arguments = st.dictionaries(texts, texts | st.integers(), max_size=3).map(json.dumps) | texts


def call(name: str, text: str) -> dict:
    return {"id": name, "type": "function", "function": {"name": "bash", "arguments": text}}


def turn(*calls: dict, **fields: object) -> dict:
    return {"role": "assistant", "content": None, **fields, "tool_calls": list(calls)}


def result(name: str, text: str) -> dict:
    return {"role": "tool", "tool_call_id": name, "content": text}


ASKED = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Look."}]
TURN = turn(call("a", '{"command": "ls",  "n": 1}'), call("b", "{}"), content="I look.", reasoning="Hm.")
HISTORY = [*ASKED, TURN, result("a", "one"), result("b", "two")]


@given(texts, texts, st.lists(arguments, max_size=3))
def test_a_turn_that_comes_back_extends_its_prompt(content, thinking, written):
    template = Template()
    message = turn(*(call(f"c{index}", text) for index, text in enumerate(written)), content=content, reasoning=thinking)
    sampled = [*template.prompt(ASKED, TOOLS), *template.turn(message)]
    assert template.prompt([*ASKED, message, *HISTORY[3:]], TOOLS)[: len(sampled)] == sampled


@given(texts)
def test_words_decode_to_their_text(text):
    vocabulary = Template().vocabulary
    assert vocabulary.decode(vocabulary.encode(text)) == text


def test_spelling_and_form_are_not_in_the_tokens():
    template = Template()
    other = turn(call("x", '{"command":"l\\u0073","n":1}'), call("y", "{ }"), reasoning="Hm. ", content=[{"text": "I look."}])
    renamed = [*ASKED, other, result("x", "one"), result("y", [{"type": "text", "text": "two"}])]  # type: ignore[arg-type]
    assert template.prompt(renamed, TOOLS) == template.prompt(HISTORY, TOOLS)


def test_whatever_is_lost_or_moved_is_in_the_tokens():
    template = Template()
    first, second = TURN["tool_calls"]
    changed = [
        [*ASKED, {**TURN, "reasoning": None}, *HISTORY[3:]],
        [*ASKED, {**TURN, "content": "I see."}, *HISTORY[3:]],
        [*ASKED, {**TURN, "tool_calls": [second, first]}, *HISTORY[3:]],
        [*ASKED, {**TURN, "tool_calls": [call("a", '{"n": 1, "command": "ls"}'), second]}, *HISTORY[3:]],
        [*ASKED, TURN, result("b", "one"), result("a", "two")],
        [*ASKED, TURN, result("gone", "one"), result("b", "two")],
        [*ASKED, {**TURN, "tool_calls": [first]}, turn(second), *HISTORY[3:]],
        HISTORY[1:],
    ]
    prompts = [template.prompt(messages, TOOLS) for messages in [HISTORY, *changed]]
    assert len({tuple(prompt) for prompt in prompts}) == len(prompts)
    assert template.prompt(HISTORY, []) != prompts[0]


def test_what_is_no_json_stays_to_the_last_character():
    template = Template()
    written = [template.turn(turn(call("a", text))) for text in ('{"a":  1', '{"a": 1', '{"a": 1 ')]
    assert written[0] != written[1] != written[2]


def test_flaws_are_calls_and_results_without_each_other():
    assert list(flaws(HISTORY)) == []
    assert list(flaws(HISTORY[:-1])) == ["no result answers b"]
    assert list(flaws([*HISTORY, result("c", "")])) == ["no call is c"]
    assert "two calls are a" in list(flaws([*ASKED, turn(call("a", "{}"), call("a", "{}")), result("a", "")]))


def test_answers_are_by_the_arguments_of_their_call():
    assert answers(HISTORY) == {'{"command": "ls",  "n": 1}': "one", "{}": "two"}
