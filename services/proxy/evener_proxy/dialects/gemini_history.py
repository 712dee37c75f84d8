"""Contents become chat messages: one reply is one assistant message, and each result follows the id of its call.

What an agent leaves out (ids, signatures, empty parts) does not change the messages, as far as the rest of the history says it.
Contents are of one reply where what we minted says so (signatures, and the ids and the number of calls that they name; the ids
of calls themselves), also where results stand between. Where nothing minted came back the order decides: contents side by side
that come as we deliver them (thinking, text, calls) are one reply, and a result ends it. A history that goes on after a word of
the user keeps its messages. Called by `evener_proxy.dialects.gemini`.
"""

import base64
import binascii
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from evener.engines.sampler import ToolCall
from evener_proxy import messages
from evener_proxy.canonical import reply_of_call
from evener_proxy.dialects.gemini_marks import Mark, bare_id, read_mark, standard_base64
from evener_proxy.dialects.gemini_wire import Content, FunctionCall, FunctionResponse, Media, Part, invalid, listed, read_parts

_encode = msgspec.json.Encoder().encode


def system_messages(instruction: Content | list[Any] | str | None) -> list[msgspec.Raw]:
    """The system message, if any."""
    if instruction is None:
        return []
    parts = instruction.parts if isinstance(instruction, Content) else instruction
    pieces = _pieces(read_parts(parts, "systemInstruction"), "systemInstruction")
    return [messages.system_message(pieces)] if pieces else []


def chat_messages(contents: Iterable[Content | str]) -> list[msgspec.Raw]:
    """The messages of a conversation. Raises CallError 400."""
    history = _History()
    for index, each in enumerate(contents):
        content = Content(parts=each) if isinstance(each, str) else each
        path = f"contents[{index}]"
        if content.role == "model":
            history.model(read_parts(content.parts, path), path)
        elif content.role in (None, "", "user", "function"):
            history.user(read_parts(content.parts, path), path)
        else:
            raise invalid(f"{path}.role: please use a valid role: user, model; not {content.role!r}", f"{path}.role")
    return history.end()


_THOUGHT, _TEXT, _CALL = 0, 1, 2  # in the order of a reply


@dataclass(slots=True)
class _Turn:
    """What the model said. ``answers``: contents of results alone that came since, which wait for it to end."""

    text: list[str] = field(default_factory=list[str])
    thoughts: list[str] = field(default_factory=list[str])
    calls: list[FunctionCall] = field(default_factory=list[FunctionCall])
    mark: Mark | None = None
    ranks: list[int] = field(default_factory=list[int])
    answers: list[tuple[Sequence[Part], str]] = field(default_factory=list[tuple[Sequence[Part], str]])

    def add(self, part: Part, path: str) -> None:
        """Take a part. Raises CallError 400 where it is not the model's."""
        if part.function_response is not None:
            raise invalid(f"{path}: a functionResponse must not be in a content of the model", path)
        self.mark = self.mark or read_mark(part.thought_signature)
        if text := _text(part):
            (self.thoughts if part.thought else self.text).append(text)
            self.ranks.append(_THOUGHT if part.thought else _TEXT)
        if part.function_call is not None:
            self.calls.append(part.function_call)
            self.ranks.append(_CALL)

    @property
    def empty(self) -> bool:
        """It says nothing, not even whose it is."""
        return not (self.ranks or self.mark)

    def goes_on(self, later: "_Turn") -> bool:
        """Whether what comes ``later`` is of the same reply."""
        if self.mark is not None and later.mark is not None:
            return self.mark.reply == later.mark.reply
        if _names(self.mark, later.calls) or _names(later.mark, self.calls) or self._stems() & later._stems():
            return True
        if _names(self.mark, self.calls) and any(call.id for call in later.calls):
            return False  # the ids of its calls are known, and these are others
        room = self.mark is None or len(self.calls) + len(later.calls) <= len(self.mark.calls)
        if self.answers:
            return self.mark is not None and room and set(later.ranks) == {_CALL} and later.mark is None
        return self.empty or later.empty or (room and self._precedes(later))

    def extend(self, later: "_Turn") -> None:
        """Take what follows."""
        self.text += later.text
        self.thoughts += later.thoughts
        self.calls += later.calls
        self.ranks += later.ranks
        self.mark = self.mark or later.mark

    def _precedes(self, later: "_Turn") -> bool:
        if not self.ranks or not later.ranks:
            return False  # a signature alone
        last, first = self.ranks[-1], later.ranks[0]
        return first > last or first == last == _CALL

    def _stems(self) -> set[str]:
        return {stem for call in self.calls if (stem := reply_of_call(bare_id(call.id))) is not None}


class _History:
    """Messages so far.

    ``_open``: calls since the user's last word that wait for a result. ``_known``: the ids that calls have, by the ids that the
    agent gave. ``_used``: all ids. ``_made``: how many of them are no agent's.
    """

    def __init__(self) -> None:
        self._messages: list[msgspec.Raw] = []
        self._turn: _Turn | None = None
        self._turns = 0
        self._open: list[messages.Waiting] = []
        self._known: dict[str, str] = {}
        self._used: set[str] = set()
        self._made = 0

    def model(self, parts: Sequence[Part], path: str) -> None:
        """A content of the model."""
        turn = _Turn()
        for index, part in enumerate(parts):
            turn.add(part, f"{path}.parts[{index}]")
        if self._turn is not None and self._turn.goes_on(turn):
            self._turn.extend(turn)
            return
        over = self._turn is None or bool(self._turn.answers)
        self._close_turn()
        if over:
            self._open = []
        self._turn = turn

    def user(self, parts: Sequence[Part], path: str) -> None:
        """A content of the user, or of the tools, whose results wait for the turn's end."""
        if self._turn is not None and parts and all(part.function_response is not None for part in parts):
            self._turn.answers.append((parts, path))
            return
        self._close_turn()
        self._hear(parts, path)

    def _hear(self, parts: Sequence[Part], path: str) -> None:
        answered = iter(self._answered([part.function_response for part in parts if part.function_response is not None]))
        said: list[messages.Part] = []
        silent = True
        for index, part in enumerate(parts):
            here = f"{path}.parts[{index}]"
            if part.function_call is not None:
                raise invalid(f"{here}: a functionCall must be in a content of the model", here)
            said += _pieces([part], here)
            if part.function_response is not None:
                self._say(said)
                said = []
                self._messages.append(_result(next(answered), part.function_response, here))
                silent = False
        if said or silent:
            self._messages.append(messages.user_message(said))

    def end(self) -> list[msgspec.Raw]:
        """All messages."""
        self._close_turn()
        return self._messages

    def _say(self, said: Sequence[messages.Part]) -> None:
        if said:
            self._messages.append(messages.user_message(said))

    def _close_turn(self) -> None:
        turn, self._turn = self._turn, None
        if turn is None:
            return
        signed = turn.mark.calls if turn.mark is not None and len(turn.mark.calls) == len(turn.calls) else None
        calls: list[ToolCall] = []
        self._turns += 1
        for index, call in enumerate(turn.calls):
            sent = bare_id(call.id)
            chosen = self._new_id(sent or (signed[index] if signed else None))
            if sent is not None:
                self._known[sent] = chosen
            self._open.append(messages.Waiting(sent or chosen, chosen, call.name, self._turns))
            calls.append(ToolCall(chosen, call.name, _encode(call.args or {}).decode()))
        text, thoughts = "".join(turn.text), "".join(turn.thoughts)
        self._messages.append(messages.assistant_message(text or None, thoughts or None, calls))
        for parts, path in turn.answers:
            self._hear(parts, path)

    def _new_id(self, wanted: str | None) -> str:
        """The id wanted, or one by its place where there is none or another call has it."""
        chosen = wanted
        while chosen is None or chosen in self._used:
            chosen = f"call_{self._made}"
            self._made += 1
        self._used.add(chosen)
        return chosen

    def _answered(self, responses: Sequence[FunctionResponse]) -> list[str]:
        """The id of the call that each of these is the result of: by id, what is left by name, the rest by order."""
        found = [self._by_id(bare_id(response.id)) for response in responses]
        for same_name in (True, False):
            for index, response in enumerate(responses):
                if found[index] is None:
                    fits = (call for call in self._open if not same_name or call.name == response.name)
                    found[index] = self._take(next(fits, None))
        return [each or self._new_id(bare_id(response.id)) for each, response in zip(found, responses, strict=True)]

    def _by_id(self, sent: str | None) -> str | None:
        if sent is None:
            return None
        return self._take(messages.nearest(self._open, sent)) or self._known.get(sent)

    def _take(self, call: messages.Waiting | None) -> str | None:
        """The call's id; the call has its result now."""
        if call is None:
            return None
        self._open.remove(call)
        return call.id


def _result(call_id: str, response: FunctionResponse, path: str) -> msgspec.Raw:
    text = _result_text(response.response)
    pieces = [messages.text_part(text)] if text else []
    pieces += _pieces(listed(response.parts), f"{path}.functionResponse.parts")
    return messages.tool_message(call_id, pieces)


def _names(mark: Mark | None, calls: Sequence[FunctionCall]) -> bool:
    """The mark names every one of the calls."""
    return mark is not None and bool(calls) and all(bare_id(call.id) in mark.calls for call in calls)


def _pieces(parts: Sequence[Media], path: str) -> list[messages.Part]:
    return [piece for part in parts if (piece := _piece(part, path)) is not None]


def _piece(part: Media, path: str) -> messages.Part | None:
    """Text or an image; None for what chat messages cannot hold, and for what says nothing."""
    if isinstance(part, Part) and (text := _text(part)):
        return messages.text_part(text)
    if part.inline_data is not None and part.inline_data.data:
        kind, data = part.inline_data.mime_type or "", standard_base64(part.inline_data.data)
        if kind.startswith("image/"):
            return messages.image_part(f"data:{kind};base64,{data}", f"{path}.inlineData")
        if kind.startswith("text/") or kind == "application/json":
            return messages.text_part(_decoded(data, path))
        return messages.unshown(kind)
    if part.file_data is not None and part.file_data.file_uri:
        kind = part.file_data.mime_type or ""
        image = kind.startswith("image/")
        return messages.image_part(part.file_data.file_uri, f"{path}.fileData") if image else messages.unshown(kind)
    return None


def _text(part: Part) -> str:
    """The text of a part, also of those that are of the vendor's own tools."""
    if part.executable_code is not None:
        return part.executable_code.code or ""
    if part.code_execution_result is not None:
        return part.code_execution_result.output or ""
    return part.text or ""


def _decoded(data: str, path: str) -> str:
    try:
        return base64.b64decode(data, validate=True).decode(errors="replace")
    except (binascii.Error, ValueError) as error:
        raise invalid(f"{path}.inlineData.data: base64 decoding failed: {error}", f"{path}.inlineData.data") from error


def _result_text(response: dict[str, Any] | None) -> str:
    """Google reads ``output`` as the result itself; anything else is a result as a whole."""
    if not response:
        return ""
    output = response.get("output")
    if len(response) == 1 and isinstance(output, str):
        return output
    return _encode(response).decode()
