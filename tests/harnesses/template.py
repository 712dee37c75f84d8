"""A turn that was sampled is found again in the next prompt, token for token, only where agent and proxy kept the turn.

A chat template and a tokenizer for scripted engines. Marks are tokens of their own, and text between two marks is split
without a look beyond them, so that a history renders to the prompt and completion that made it, or to something else.

Templates of real models render again what a model wrote, and so does this one: spaces around a text, and the spelling of
arguments that are JSON (spaces between tokens, escapes), are not in the tokens. That these survive an agent is not proven
by an equal prefix. What is: which turns there are and in which order, their text and thinking, the calls with their names,
values and order of keys, arguments that are no JSON to the last character, and which result answers which call. Ids differ
by nature (the proxy mints them after the sample), so that a result is rendered with the place of the call it answers.
"""

import json
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

Message = dict[str, Any]

END = "<|end|>"
UNPAIRED = "<|unpaired|>"
_WORDS = re.compile(r"\w+|[^\S\n]+|\n|[^\w\s]")


class Vocabulary:
    """Words and marks as numbers, in the order in which they came."""

    def __init__(self) -> None:
        self._ids: dict[str, int] = {}
        self._words: list[str] = []

    def mark(self, name: str) -> int:
        """The token of a mark or a word."""
        if name not in self._ids:
            self._ids[name] = len(self._words)
            self._words.append(name)
        return self._ids[name]

    def encode(self, text: str) -> list[int]:
        """The tokens of a text; a mark's name in it is only text."""
        return [self.mark(word) for word in _WORDS.findall(text)]

    def decode(self, ids: list[int]) -> str:
        """The text of tokens, marks by their names."""
        return "".join(self._words[each] for each in ids)


class Template:
    """Renders messages of chat requests to tokens of one vocabulary."""

    def __init__(self) -> None:
        self.vocabulary = Vocabulary()

    def prompt(self, messages: list[Message], tools: Any) -> list[int]:
        """The tokens that a model reads before it answers."""
        mark, encode = self.vocabulary.mark, self.vocabulary.encode
        ids = [mark("<|tools|>"), *encode(json.dumps(tools)), mark(END)] if tools else []
        places: dict[str, int] = {}
        for message in messages:
            ids.append(mark(f"<|{message['role']}|>"))
            if message["role"] == "assistant":
                for call in message.get("tool_calls") or ():
                    places[call["id"]] = len(places)
                ids += self.turn(message)
            else:
                if message["role"] == "tool":
                    place = places.get(message.get("tool_call_id", ""))
                    ids.append(mark(UNPAIRED) if place is None else mark(f"<|call {place}|>"))
                ids += encode(text_of(message.get("content")))
            ids.append(mark(END))
        return [*ids, mark("<|assistant|>")]

    def turn(self, message: Message) -> list[int]:
        """What a model samples for a turn, without the mark that ends it."""
        mark, encode = self.vocabulary.mark, self.vocabulary.encode
        ids: list[int] = []
        if thinking := text_of(message.get("reasoning")):
            ids += [mark("<|think|>"), *encode(thinking), mark("<|/think|>")]
        ids += encode(text_of(message.get("content")))
        for call in message.get("tool_calls") or ():
            function = call["function"]
            ids += [mark("<|call|>"), *encode(function["name"]), mark("<|with|>"), *encode(spelled(function["arguments"]))]
        return ids


def text_of(content: Any) -> str:
    """A content as text, whatever its form: absent, a string, or parts."""
    if isinstance(content, list):
        content = "".join(part.get("text", "") for part in content)
    return (content or "").strip()


def spelled(arguments: str) -> str:
    """Arguments in one spelling; text that is no JSON stays as it is."""
    try:
        return json.dumps(json.loads(arguments), separators=(",", ":"))
    except ValueError:
        return arguments


def flaws(messages: list[Message]) -> Iterator[str]:
    """What is wrong with the ids of a history: a call without a result, a result without a call, an id that two calls have."""
    calls = Counter(call["id"] for message in messages for call in message.get("tool_calls") or ())
    results = Counter(message.get("tool_call_id") for message in messages if message["role"] == "tool")
    yield from (f"two calls are {name}" for name, count in calls.items() if count > 1)
    yield from (f"no call is {name}" for name in results - calls)
    yield from (f"no result answers {name}" for name in calls - results)


def answers(messages: list[Message]) -> dict[str, str]:
    """The result of each call of a history, by the call's arguments."""
    results = {message["tool_call_id"]: text_of(message.get("content")) for message in messages if message["role"] == "tool"}
    calls = [call for message in messages for call in message.get("tool_calls") or ()]
    return {call["function"]["arguments"]: results.get(call["id"], "") for call in calls}
