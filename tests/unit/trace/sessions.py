"""A session as the proxy records it: what an agent sends is rendered by a template, a record keeps what its base lacks."""

from typing import Any

import numpy as np

from evener.trace import CallRecord, Histories, build_graph, build_sequences, call_classes, find_forks
from tests.harnesses.template import Template, text_of
from tests.unit.trace.test_record import make

Message = dict[str, Any]


class Session:
    """Makes calls one after the other. ``strips``: the template leaves out the thinking of all turns but the last."""

    def __init__(self, *, strips: bool = False) -> None:
        self.template = Template()
        self.calls: list[CallRecord] = []
        self._asked: list[list[Message]] = []
        self._strips = strips

    def ask(self, messages: list[Message], answer: Message, *, tools: str | None = "bash", **fields: Any) -> Message:
        """Record a call; returns the turn as an agent would send it back."""
        number = len(self.calls) + 1
        systems = [message for message in messages if message["role"] == "system"]
        base, kept = 0, 0
        for place, earlier in enumerate(self._asked, 1):
            if len(earlier) > kept and messages[: len(earlier)] == earlier:
                base, kept = place, len(earlier)
        turn = {"role": "assistant", "content": None, **answer}
        request = {
            "system_digests": [text_of(each["content"]) for each in systems],
            "tools_digest": tools,
            "messages": messages[max(len(systems), kept) :],
            "messages_base": base,
            "messages_kept": kept,
            "used": {"temperature": 1.0, "top_p": 1.0, "top_k": -1},
        }
        reply = turn | {"tool_calls": [each["function"] | {"id": each["id"]} for each in turn.get("tool_calls", ())]}
        prompt = np.array(self.template.prompt(self._rendered(messages), tools))
        sampled = np.array([*self.template.turn(turn), self.template.vocabulary.mark("<|end|>")])
        made = {"request": request, "reply": reply, "delivered": "yes"} | fields
        self.calls.append(make(number, prompt, sampled, **made))
        self._asked.append(list(messages))
        return turn

    def _rendered(self, messages: list[Message]) -> list[Message]:
        return [{**each, "reasoning": None} if self._strips else each for each in messages]

    @property
    def graph(self):
        return build_graph(self.calls)

    @property
    def classes(self) -> dict[int, str]:
        """By number."""
        graph = self.graph
        found = call_classes(graph, Histories(graph))
        return {graph.calls[key].number: kind for key, kind in found.items()}

    @property
    def forks(self):
        """By number."""
        graph = self.graph
        histories = Histories(graph)
        found = find_forks(graph, histories, call_classes(graph, histories))
        return {graph.calls[key].number: fork for key, fork in found.items()}

    @property
    def causes(self) -> dict[int, str]:
        """By number."""
        return {number: fork.cause for number, fork in self.forks.items()}

    @property
    def rows(self):
        return rows_of(self.calls)


def rows_of(calls):
    """The training rows of calls."""
    graph = build_graph(calls)
    return build_sequences(graph, call_classes(graph, Histories(graph)))


def system(text: str) -> Message:
    return {"role": "system", "content": text}


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def result(call: str, text: str) -> Message:
    return {"role": "tool", "tool_call_id": call, "content": text}


def bash(call: str, command: str, **message: Any) -> Message:
    """A turn that calls a tool, its arguments spelled as a model may."""
    function = {"name": "bash", "arguments": f'{{"command" :  "{command}"}}'}
    return {"tool_calls": [{"id": call, "type": "function", "function": function}], **message}
