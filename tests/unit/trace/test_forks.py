"""Each call that leaves the line of its trace has one cause, and shows where it left."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evener.trace import Histories, build_graph, build_sequences, call_classes, find_forks
from evener.trace.forks import FORK_CAUSES
from tests.unit.trace.sessions import Session, bash, result, system, user
from tests.unit.trace.test_graph import trees
from tests.unit.trace.test_record import make

HEAD = [system("You code."), user("Mend the parser of dates, please.")]
THOUGHT = "The test fails in June alone, I look at the months first."


def started(**session):
    """A session of two turns, and the history of its third."""
    made = Session(**session)
    history = list(HEAD)
    for call, command in (("a", "ls"), ("b", "cat dates.py")):
        turn = made.ask(history, bash(call, command, reasoning=f"{THOUGHT} {command}"))
        history += [turn, result(call, f"what {command} prints")]
    return made, history


def test_a_line_has_no_fork():
    session, history = started()
    session.ask(history, {"content": "Done."})
    assert session.causes == {}
    assert set(session.classes.values()) == {"agent"}


def test_the_same_prompt_again_is_a_retry():
    session, history = started()
    session.ask(history, {"content": "Half."}, delivered="no")
    session.ask(history, {"content": "Whole."})
    fork = session.forks[4]
    assert (fork.cause, fork.against, fork.was, fork.now) == ("retry", "call-3", "Half.", "Whole.")
    assert fork.position == len(session.calls[2].prompt_ids)
    assert session.classes == {1: "agent", 2: "agent", 3: "undelivered", 4: "agent"}


@pytest.mark.parametrize("delivered", ["yes", "unknown", "no"])
def test_the_sample_that_a_later_history_goes_on_from_is_the_agents_whatever_its_tokens_became(delivered):
    """The template strips thinking, so that no call's tokens go on from another's."""
    session = Session(strips=True)
    first = session.ask(HEAD, bash("a", "ls", reasoning=THOUGHT), delivered=delivered)
    session.ask(HEAD, bash("b", "pwd", reasoning=THOUGHT))
    session.ask([*HEAD, first, result("a", "dates.py")], {"content": "Done."})
    assert session.classes == {1: "agent", 2: "superseded", 3: "agent"}
    assert len(session.graph.roots) == 3


def test_each_sample_that_a_history_goes_on_from_is_the_agents():
    """It goes back, asks the same again, and goes on from that as well; the third sample says what the second says."""
    session = Session(strips=True)
    for call, command in (("a", "ls"), ("b", "pwd"), ("b", "pwd")):
        turn = session.ask(HEAD, bash(call, command, reasoning=THOUGHT))
        session.ask([*HEAD, turn, result(call, f"what {command} prints")], {"content": f"Done with {command}."})
    assert session.classes == {1: "agent", 2: "agent", 3: "superseded", 4: "superseded", 5: "agent", 6: "agent"}


def changed(history, place, **fields):
    return [each if number != place else each | fields for number, each in enumerate(history)]


@pytest.mark.parametrize(
    ("change", "was", "now"),
    [
        (lambda history: changed(history, 4, content="I look.", **bash("b", "cat dates.py")), "cat dates.py", "I look."),
        (lambda history: changed(history, 4, **bash("b", "cat other.py")), "dates.py", "other.py"),
        (lambda history: changed(history, 3, content="elided"), "what ls prints", "elided"),
        (lambda history: [*history[:4], user("That was no good.")], "dates.py", "That was no good."),
        (lambda history: history[:2], "ls", ""),  # its tokens are those of the first prompt: a retry
        (lambda history: [system("You code. It is noon."), *history[1:]], "You code.", "It is noon."),
        (lambda history: [*HEAD, *history[4:]], "ls", "dates.py"),  # the first turn is gone
    ],
)
def test_what_the_agent_changed_is_an_edit(change, was, now):
    session, history = started()
    session.ask(change(history), {"content": "Done."})
    fork = session.forks[3]
    assert fork.cause == ("retry" if len(change(history)) == 2 else "history_edited")
    if fork.cause == "history_edited":
        assert was in fork.was
        assert now in fork.now
        against = next(call for call in session.calls if call.call_id == fork.against)
        assert np.array_equal(against.tokens[: fork.position], session.calls[2].prompt_ids[: fork.position])
        assert against.tokens[fork.position] != session.calls[2].prompt_ids[fork.position]


def test_an_edited_last_message_of_one_turn_is_an_edit():
    session, history = started()
    session.ask([*history, user("Go on.")], {"content": ""})
    session.ask([*history, user("Go on, and say something.")], {"content": "Something."})
    assert session.causes == {4: "history_edited"}
    assert "say something" in session.forks[4].now


def test_thinking_that_the_agent_drops_is_told():
    session, history = started()
    session.ask(changed(history, 4, reasoning=None), {"content": "Done."})
    fork = session.forks[3]
    assert fork.cause == "thinking_dropped"
    assert THOUGHT in fork.was
    assert THOUGHT not in fork.now


def test_thinking_that_the_agent_writes_anew_is_an_edit():
    session, history = started()
    session.ask(changed(history, 4, reasoning="It fails in July."), {"content": "Done."})
    fork = session.forks[3]
    assert fork.cause == "history_edited"
    assert "June" in fork.was
    assert "July" in fork.now


def test_thinking_that_the_template_drops_is_told():
    session, history = started(strips=True)
    session.ask(history, {"content": "Done."})
    assert session.causes == {2: "thinking_dropped", 3: "thinking_dropped"}
    assert session.forks[3].was.startswith("ids ")  # the messages say the same, letter for letter


def test_the_same_turn_in_other_tokens_is_retokenised():
    session, history = started()
    call = session.ask(history, bash("c", "make test"))
    spelled = session.calls[-1]
    split = np.concatenate((spelled.completion_ids[:3], [7777], spelled.completion_ids[3:]))
    session.calls[-1] = dataclasses.replace(
        spelled, completion_ids=split, logprobs=np.zeros(len(split), np.float32), versions=np.ones(len(split), np.int32)
    )
    session.ask([*history, call, result("c", "1 failed")], {"content": "Done."})
    fork = session.forks[4]
    assert (fork.cause, fork.position) == ("retokenised", len(spelled.prompt_ids) + 3)
    assert "7777" in fork.was
    assert "7777" not in fork.now


def test_an_argument_in_another_spelling_shows_both():
    session, history = started()
    session.calls[-1] = dataclasses.replace(session.calls[-1], completion_ids=session.calls[-1].completion_ids + 1000)
    call = {"id": "b", "type": "function", "function": {"name": "bash", "arguments": '{"command":"cat dates.py"}'}}
    session.ask(changed(history, 4, tool_calls=[call]), {"content": "Done."})
    fork = session.forks[3]
    assert fork.cause == "retokenised"
    assert ('"command" :' in fork.was, '"command":"cat' in fork.now) == (True, True)


def test_a_prompt_that_is_rendered_otherwise_before_the_last_turn_is_the_templates():
    session, history = started()
    session.ask(history, {"content": "Done."})
    dated = session.calls[-1].prompt_ids.copy()
    dated[2] = 9999
    session.calls[-1] = dataclasses.replace(session.calls[-1], prompt_ids=dated)
    fork = session.forks[3]
    assert (fork.cause, fork.position) == ("template", 2)
    assert "9999" in fork.now


@pytest.mark.parametrize(
    ("refused", "cause"),
    [("thinking_dropped", "thinking_dropped"), ("no_stop", "template"), ("first", "retokenised"), ("unmatched", "retokenised")],
)
def test_what_the_proxy_recorded_of_a_prompt_counts(refused, cause):
    session, history = started()
    session.calls[-1] = dataclasses.replace(session.calls[-1], completion_ids=session.calls[-1].completion_ids + 1000)
    session.ask(history, {"content": "Done."})
    last = session.calls[-1]
    session.calls[-1] = dataclasses.replace(last, request=last.request | {"prompt": {"refused": refused}})
    assert session.causes == {3: cause}


def test_a_summary_is_beside_the_work_and_starts_it_anew():
    session, history = started()
    summary = "So far: the parser reads months as days; dates.py has the table, line 40."
    session.ask([*history, user("Sum up what was done.")], {"content": summary})
    session.ask([HEAD[0], user(f"This continues earlier work.\n{summary}")], bash("d", "sed -n 40p dates.py"))
    fork = session.forks[4]
    assert (fork.cause, fork.against) == ("compaction", "call-3")
    assert session.classes == {1: "agent", 2: "agent", 3: "side", 4: "agent"}


def test_a_summariser_that_is_shown_the_history_as_a_text_starts_it_anew():
    session, history = started()
    summary = "So far: the parser reads months as days; dates.py has the table, line 40."
    told = "\n".join(str(message.get("content")) for message in history)
    session.ask([system("You sum up conversations."), user(told)], {"content": summary}, tools=None)
    session.ask([HEAD[0], user(f"Earlier work, summed up: {summary}"), history[-1]], bash("d", "sed -n 40p dates.py"))
    fork = session.forks[4]
    assert (fork.cause, fork.against) == ("compaction", "call-3")
    assert session.classes == {1: "agent", 2: "agent", 3: "side", 4: "agent"}


def test_a_summary_that_is_a_turn_of_the_new_history_starts_it_anew():
    session, history = started()
    summary = "So far: the parser reads months as days; dates.py has the table, line 40."
    turn = session.ask([*history, user("Write what one needs to go on.")], {"content": summary})
    anew = [HEAD[0], user("What did we do so far?"), turn, user("Go on.")]
    session.ask(anew, bash("d", "sed -n 40p dates.py"))
    fork = session.forks[4]
    assert (fork.cause, fork.against) == ("compaction", "call-3")
    assert session.classes == {1: "agent", 2: "agent", 3: "side", 4: "agent"}


def test_a_history_whose_beginning_is_dropped_is_no_summary():
    session, history = started()
    asked = [*history, user("What is wrong?")]
    turn = session.ask(asked, {"content": "The table of months in dates.py, line 40."})
    session.ask([HEAD[0], *asked[-1:], turn, user("Mend it.")], bash("d", "sed -n 40p dates.py"))
    assert session.causes == {4: "history_edited"}
    assert set(session.classes.values()) == {"agent"}


@pytest.mark.parametrize(("tools", "kind"), [(None, "side"), ("review", "agent")])
def test_what_quotes_the_last_reply_leaves_it_the_agents_work(tools, kind):
    """A title that is asked for at the end; an agent that reviews what was done."""
    session, history = started()
    last = "All is mended: dates.py had its table of months wrong, in line 40."
    session.ask(history, {"content": last})
    session.ask([system("Name this."), user(f"Mend the parser of dates, please.\n{last}")], {"content": "Dates"}, tools=tools)
    assert session.classes == {1: "agent", 2: "agent", 3: "agent", 4: kind}
    assert session.causes == {4: "subagent"}
    first, *_ = session.rows
    assert first.provenance.trained == sum(len(call.completion_ids) for call in session.calls[:3])


def test_a_title_is_beside_the_work_also_when_it_comes_first():
    session = Session()
    session.ask([system("Name this."), HEAD[1]], {"content": "Mending the parser of dates"}, tools=None)
    session.ask(HEAD, bash("a", "ls"))
    assert session.classes == {1: "side", 2: "agent"}
    assert session.causes == {1: "subagent"}
    assert session.forks[1].against is None


@pytest.mark.parametrize("head", [[system("You look."), user("x")], [HEAD[0]]])
def test_a_sub_agents_one_call_is_the_agents_work(head):
    """Under a system text of its own, or under the same one with a task from a tool call."""
    session, history = started()
    task = "Find every caller of parse_date and list their files."
    delegated = {"name": "task", "arguments": f'{{"prompt": "{task}"}}'}
    turn = session.ask(history, {"tool_calls": [{"id": "t", "type": "function", "function": delegated}]})
    answer = session.ask([*head, user(task)], {"content": "cli.py and web.py call it."})
    session.ask([*history, turn, result("t", answer["content"])], {"content": "Done."})
    fork = session.forks[4]
    assert (fork.cause, fork.against) == ("subagent", "call-3")
    assert set(session.classes.values()) == {"agent"}
    assert sum(row.provenance.trained for row in session.rows) == sum(len(call.completion_ids) for call in session.calls)


def test_a_new_beginning_under_the_same_opening_is_unknown():
    session, _ = started()
    session.ask([HEAD[0], user("Something else altogether, from the start.")], {"content": "Done."})
    assert session.causes == {3: "unknown"}


def test_without_tools_a_lone_call_under_its_own_system_text_is_beside_the_work():
    session = Session()
    first = session.ask(HEAD, {"content": "I look."}, tools=None)
    session.ask([*HEAD, first, user("Output: dates.py")], {"content": "Done."}, tools=None)
    session.ask([system("Write a commit message."), user("diff --git")], {"content": "Mend dates"}, tools=None)
    assert session.classes == {1: "agent", 2: "agent", 3: "side"}


def test_without_tools_a_call_that_goes_on_is_the_work_whatever_its_system_text_says():
    session = Session()
    history = [system("You code. It is noon."), HEAD[1]]
    for number, time in enumerate(("noon", "noon", "one", "two")):
        history[0] = system(f"You code. It is {time}.")
        turn = session.ask(history, {"content": f"I look at file {number}."}, tools=None)
        history += [turn, user(f"Output: file {number}")]
    assert set(session.classes.values()) == {"agent"}


@given(trees())
@settings(max_examples=100)
def test_every_call_is_on_the_line_or_has_a_cause(calls):
    graph = build_graph(calls)
    histories = Histories(graph)
    classes = call_classes(graph, histories)
    found = find_forks(graph, histories, classes)
    assert {fork.cause for fork in found.values()} <= set(FORK_CAUSES)
    for children in graph.children.values():
        assert [key for key in children if key not in found] == children[:1]
    roots = [root.call_id for root in graph.roots]
    line = next((key for key in roots if classes[key] != "side"), roots[0] if roots else None)
    assert [key for key in roots if key not in found] == ([line] if line else [])
    for key, fork in found.items():
        against = graph.calls[fork.against].tokens if fork.against else np.empty(0, np.int32)
        prompt = graph.calls[key].tokens if fork.cause == "retry" else graph.calls[key].prompt_ids
        assert np.array_equal(against[: fork.position], prompt[: fork.position])
        assert not np.array_equal(against[: fork.position + 1], prompt[: fork.position + 1]) or fork.position == len(prompt)


ODD = [None, 1, "x", [], {}, [1], ["x"], {"role": 1, "content": {}}, {"tool_calls": [{}, 1]}, {"content": [{"text": 1}, 2]}]
odd = st.sampled_from([*ODD, [ODD[-1]], {"tool_calls": [{"function": {"arguments": "[1e999, 1.0"}}, {"arguments": "1e999"}]}])
requests = st.fixed_dictionaries(
    {},
    optional=dict.fromkeys(
        ("messages", "messages_base", "messages_kept", "system_digests", "tools_digest", "used", "prompt"), odd
    ),
)


@given(st.lists(st.tuples(requests, st.dictionaries(st.sampled_from(["content", "reasoning", "tool_calls"]), odd)), min_size=2))
@settings(max_examples=40)
def test_no_document_of_an_agent_stops_an_archive(pairs):
    calls = [
        make(number, np.array([number]), np.array([1]), request=request, reply=reply)
        for number, (request, reply) in enumerate(pairs, 1)
    ]
    graph = build_graph(calls)
    histories = Histories(graph)
    classes = call_classes(graph, histories)
    assert len(find_forks(graph, histories, classes)) == len(calls) - 1
    build_sequences(graph, classes)
