"""Chat templates, each with one thing that public templates do; what each is expected to allow is said beside it.

A template is put together from pieces, so that what is unusual about it is what is written here. Texts are Jinja's expressions
in raw strings: a template has no other spaces than those.
"""

from dataclasses import dataclass
from typing import Literal

Expected = Literal["sound", "full", "unsound"]
"""``sound``: every conversation has its exact suffix; ``full``: the same, but histories have to be rendered whole; ``unsound``:
the check finds out that the template cannot be read."""

SPECIAL = """
<s> </s> <bos> <eos> <think> </think> <|im_start|> <|im_end|> <|endoftext|> <start_of_turn> <end_of_turn>
<|begin_of_text|> <|eot_id|> <|eom_id|> <|start_header_id|> <|end_header_id|>
<|user|> <|assistant|> <|observation|> <|system|> <|start|> <|message|> <|channel|> <|end|> <|call|> <|return|>
[INST] [/INST] [AVAILABLE_TOOLS] [/AVAILABLE_TOOLS] [TOOL_CALLS] [TOOL_RESULTS] [/TOOL_RESULTS]
<|User|> <|Assistant|> <|end_of_sentence|> <|tool_outputs_begin|> <|tool_outputs_end|>
<tool_call> </tool_call> <tool_response> </tool_response>
"""


@dataclass(frozen=True)
class Template:
    """``stop``: what the policy samples last; ``called_stop``: the same in a turn with calls, where that differs. ``stops``:
    tokens at which its engine ends a turn. ``written``: what histories have for an end that they write otherwise.
    """

    name: str
    source: str
    expected: Expected = "sound"
    stop: str = "<|im_end|>"
    called_stop: str | None = None
    written: str | None = None
    stops: tuple[str, ...] = ("<|im_end|>", "<|endoftext|>")


HEAD = r"""
{%- if tools -%}{{- '<|im_start|>system\n' ~ said ~ '\n# Tools' -}}
{%- for t in tools -%}{{- '\n' ~ (t | tojson) -}}{%- endfor -%}{{- '<|im_end|>\n' -}}
{%- elif said -%}{{- '<|im_start|>system\n' ~ said ~ '<|im_end|>\n' -}}{%- endif -%}"""
USER = r"""{{- '<|im_start|>user\n' ~ m.content ~ '<|im_end|>\n' -}}"""
TOOL = r"""{{- '<|im_start|>tool\n' ~ m.content ~ '<|im_end|>\n' -}}"""
CALL = (
    r"""{{- '<tool_call>\n{"name": "' ~ c.function.name ~ '", "arguments": ' ~ """
    r"""(c.function.arguments | tojson) ~ '}\n</tool_call>' -}}"""
)
CALLS = "{%- for c in m.tool_calls or [] -%}" + CALL + "{%- endfor -%}"
SAID = r"""{{- m.content or '' -}}"""
OPEN = r"""{{- '<|im_start|>assistant\n' -}}"""
CLOSE = r"""{{- '<|im_end|>\n' -}}"""
ASSISTANT = OPEN + SAID + CALLS + CLOSE


def conversation(
    *, head: str = HEAD, user: str = USER, assistant: str = ASSISTANT, tool: str = TOOL, foot: str = OPEN, before: str = ""
) -> str:
    """A template from the piece of each role; ``said`` is what the system says, ``turns`` are all other messages."""
    return (
        "{%- if messages[0].role == 'system' -%}{%- set said = messages[0].content -%}{%- set turns = messages[1:] -%}"
        "{%- else -%}{%- set said = '' -%}{%- set turns = messages -%}{%- endif -%}"
        + before
        + head
        + "{%- for m in turns -%}{%- if m.role == 'user' -%}"
        + user
        + "{%- elif m.role == 'assistant' -%}"
        + assistant
        + "{%- elif m.role == 'tool' -%}"
        + tool
        + "{%- endif -%}{%- endfor -%}{%- if add_generation_prompt -%}"
        + foot
        + "{%- endif -%}"
    )


LAST_USER = (
    "{%- set ns = namespace(last=-1) -%}{%- for m in turns -%}{%- if m.role == 'user' -%}{%- set ns.last = loop.index0 -%}"
    "{%- endif -%}{%- endfor -%}"
)
THOUGHT = r"""{%- if m.reasoning -%}{{- '<think>\n' ~ m.reasoning ~ '\n</think>\n\n' -}}{%- endif -%}"""
THOUGHT_SINCE = r"{%- if loop.index0 > ns.last -%}" + THOUGHT + "{%- endif -%}"
MERGED = r"""
{%- if loop.first or loop.previtem.role != 'tool' -%}{{- '<|im_start|>user' -}}{%- endif -%}
{{- '\n<tool_response>\n' ~ m.content ~ '\n</tool_response>' -}}
{%- if loop.last or loop.nextitem.role != 'tool' -%}{{- '<|im_end|>\n' -}}{%- endif -%}"""


def end_with(text: str) -> str:
    """A conversation whose turns end with this text after the end token."""
    return conversation().replace(r"<|im_end|>\n", "<|im_end|>" + text)


CHATML = (
    Template("plain", conversation()),
    Template("nothing behind the end", end_with("")),
    Template("two line ends behind the end", end_with(r"\n\n")),
    Template("space behind the end", end_with(" ")),
    Template("line end before the end", conversation(assistant=OPEN + SAID + CALLS + r"{{- '\n' -}}" + CLOSE)),
    Template("text trimmed", conversation(assistant=OPEN + "{{- (m.content or '') | trim -}}" + CALLS + CLOSE)),
    Template("nothing printed as None", conversation(assistant=OPEN + "{{- m.content -}}" + CALLS + CLOSE)),
    Template("a begin token", conversation(head="{{- '<s>' -}}" + HEAD)),
    Template("user's words in tags", conversation(user=USER.replace("m.content", "'<query>' ~ m.content ~ '</query>'"))),
    Template("user's words trimmed", conversation(user=USER.replace("m.content", "(m.content | trim)"))),
    Template("a reminder behind each user's words", conversation(user=USER.replace("m.content", "m.content ~ '\\n/no_think'"))),
)

THINKING = (
    Template("thinking kept", conversation(assistant=OPEN + THOUGHT + SAID + CALLS + CLOSE)),
    Template(
        "thinking stripped before the last user",
        conversation(before=LAST_USER, assistant=OPEN + THOUGHT_SINCE + SAID + CALLS + CLOSE),
    ),
    Template(
        "thinking in the text stripped",
        conversation(assistant=OPEN + "{{- (m.content or '').split('</think>')[-1].lstrip('\\n') -}}" + CALLS + CLOSE),
    ),
    Template(
        "an empty thought before earlier turns",
        conversation(assistant=OPEN + r"{{- '<think>\n\n</think>\n\n' -}}" + SAID + CALLS + CLOSE),
    ),
    Template("an empty thought opens the reply", conversation(foot=OPEN + r"{{- '<think>\n\n</think>\n\n' -}}")),
    Template("a thought is open in the reply", conversation(foot=OPEN + r"{{- '<think>\n' -}}")),
    Template(
        "an empty thought since the last user",
        conversation(
            before=LAST_USER,
            assistant=OPEN
            + r"{%- if loop.index0 > ns.last -%}{{- '<think>\n' ~ (m.reasoning or '') ~ '\n</think>\n\n' -}}{%- endif -%}"
            + SAID
            + CALLS
            + CLOSE,
        ),
    ),
)

RESULTS = (
    Template("results merged in one user's turn", conversation(tool=MERGED)),
    Template("each result a user's turn", conversation(tool=TOOL.replace("tool\\n", "user\\n<tool_response>"))),
    Template("results as JSON", conversation(tool=TOOL.replace("m.content", "({'output': m.content} | tojson)"))),
    Template("results with their names", conversation(tool=TOOL.replace("m.content", "(m.name or 'tool') ~ ': ' ~ m.content"))),
    Template("results with their ids", conversation(tool=TOOL.replace("m.content", "m.tool_call_id ~ ' ' ~ m.content"))),
    Template(
        "results named by their calls",
        conversation(
            tool="{%- set ns = namespace(name='?') -%}{%- for o in turns -%}{%- for c in o.tool_calls or [] -%}"
            "{%- if c.id == m.tool_call_id -%}{%- set ns.name = c.function.name -%}{%- endif -%}{%- endfor -%}{%- endfor -%}"
            + TOOL.replace("m.content", "ns.name ~ ' ' ~ m.content")
        ),
    ),
    Template("results cut short", conversation(tool=TOOL.replace("m.content", "m.content[:12]"))),
    Template("turns numbered", conversation(user=USER.replace("user\\n", "user ' ~ loop.index ~ '\\n"))),
    Template(
        "results between tokens, and the reply opens by itself",
        conversation(
            user="{{- '<|User|>' ~ m.content -}}",
            assistant="{{- '<|Assistant|>' ~ (m.content or '') -}}" + CALLS + "{{- '<|end_of_sentence|>' -}}",
            tool="{%- if loop.previtem.role != 'tool' -%}{{- '<|tool_outputs_begin|>' -}}{%- endif -%}{{- m.content -}}"
            "{%- if loop.last or loop.nextitem.role != 'tool' -%}{{- '<|tool_outputs_end|>' -}}{%- endif -%}",
            foot="{%- if turns[-1].role != 'tool' -%}{{- '<|Assistant|>' -}}{%- endif -%}",
        ),
        stop="<|end_of_sentence|>",
        stops=("<|end_of_sentence|>",),
    ),
)

TOOLS_LAST = (
    "{%- if tools and loop.index0 == ns.last -%}"
    "{{- '[AVAILABLE_TOOLS]' ~ (tools | tojson) ~ '[/AVAILABLE_TOOLS]' -}}{%- endif -%}"
)
INST = r"""{{- '[INST]' ~ m.content ~ '[/INST]' -}}"""
MISTRAL_ASSISTANT = (
    "{{- m.content or '' -}}{%- if m.tool_calls -%}{{- '[TOOL_CALLS][' -}}{%- for c in m.tool_calls -%}"
    r"""{{- '{"name": "' ~ c.function.name ~ '", "arguments": ' ~ (c.function.arguments | tojson) -}}"""
    r"""{{- ', "id": "' ~ c.id ~ '"}' -}}"""
    "{%- if not loop.last -%}{{- ', ' -}}{%- endif -%}{%- endfor -%}{{- ']' -}}{%- endif -%}{{- '</s>' -}}"
)
MISTRAL_TOOL = "{{- '[TOOL_RESULTS]' ~ m.content ~ '[/TOOL_RESULTS]' -}}"

HEADS = (
    Template(
        "tools in the last user's turn, calls as a list",
        conversation(
            head="{{- '<s>' -}}",
            before=LAST_USER,
            user=TOOLS_LAST + INST,
            assistant=MISTRAL_ASSISTANT,
            tool=MISTRAL_TOOL,
            foot="",
        ),
        stop="</s>",
        stops=("</s>",),
    ),
    Template(
        "instructions in the last user's turn",
        conversation(
            head="",
            before=LAST_USER,
            user="{%- if loop.index0 == ns.last -%}"
            + USER.replace("m.content", "said ~ '\\n\\n' ~ m.content")
            + "{%- else -%}"
            + USER
            + "{%- endif -%}",
        ),
    ),
    Template(
        "instructions in the first user's turn",
        conversation(head="", user=USER.replace("m.content", "(said ~ '\\n\\n' if loop.first and said else '') ~ m.content")),
    ),
    Template(
        "tools in the first user's turn",
        conversation(
            head="{{- '<|begin_of_text|>' -}}",
            user=r"""{{- '<|start_header_id|>user<|end_header_id|>\n\n' -}}
{%- if loop.first and tools -%}{{- (tools | tojson) ~ '\n\n' -}}{%- endif -%}{{- m.content ~ '<|eot_id|>' -}}""",
            assistant=r"""{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' ~ (m.content or '') -}}"""
            + CALLS
            + "{{- '<|eot_id|>' -}}",
            tool=r"""{{- '<|start_header_id|>ipython<|end_header_id|>\n\n' ~ m.content ~ '<|eot_id|>' -}}""",
            foot=r"""{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' -}}""",
        ),
        stop="<|eot_id|>",
        stops=("<|eot_id|>", "<|eom_id|>"),
    ),
    Template("a date in the head", conversation(head="{{- '<|im_start|>system\\n' ~ today() ~ '<|im_end|>\\n' -}}" + HEAD)),
    Template("a date in each user's turn", conversation(user=USER.replace("m.content", "today() ~ ' ' ~ m.content"))),
    Template(
        "default instructions", conversation(head="{%- if not said -%}{%- set said = 'You are kind.' -%}{%- endif -%}" + HEAD)
    ),
    Template(
        "default instructions with tools alone",
        conversation(head="{%- if tools and not said -%}{%- set said = 'Call tools.' -%}{%- endif -%}" + HEAD),
    ),
)

GLM_ASSISTANT = r"""{{- '<|assistant|>\n' ~ (m.content or '') -}}""" + CALLS
ROLES = {
    "<|im_start|>user": "<start_of_turn>user",
    "<|im_start|>assistant": "<start_of_turn>model",
    "<|im_end|>": "<end_of_turn>",
}


def gemma(source: str) -> str:
    """The same with Gemma's tokens."""
    for one, other in ROLES.items():
        source = source.replace(one, other)
    return source


def llama_end(called: str) -> str:
    """A conversation whose turns end with ``<|eot_id|>``, or ``called`` where they call."""
    end = f"{{%- if m.tool_calls -%}}{{{{- '{called}' -}}}}{{%- else -%}}{{{{- '<|eot_id|>' -}}}}{{%- endif -%}}"
    return conversation(assistant=OPEN + SAID + CALLS + end)


ENDS = (
    Template(
        "the end is the next opener",
        conversation(
            head="{%- if said or tools -%}{{- '<|system|>\\n' ~ said ~ ((tools or []) | tojson) -}}{%- endif -%}",
            user=r"""{{- '<|user|>\n' ~ m.content -}}""",
            assistant=GLM_ASSISTANT,
            tool=r"""{%- if loop.previtem.role != 'tool' -%}{{- '<|observation|>' -}}{%- endif -%}{{- '\n' ~ m.content -}}""",
            foot=r"""{{- '<|assistant|>' -}}""",
        ),
        stop="<|user|>",
        called_stop="<|observation|>",
        stops=("<|user|>", "<|observation|>", "<|endoftext|>"),
    ),
    Template(
        "another end behind calls",
        llama_end("<|eom_id|>"),
        stop="<|eot_id|>",
        called_stop="<|eom_id|>",
        stops=("<|eot_id|>", "<|eom_id|>"),
    ),
    Template(
        "an end of calls that histories write otherwise",
        llama_end("<|eot_id|>"),
        stop="<|eot_id|>",
        called_stop="<|eom_id|>",
        written="<|eot_id|>",
        stops=("<|eot_id|>", "<|eom_id|>"),
    ),
    Template(
        "channels, and an end that histories write otherwise",
        conversation(
            head="{%- if said -%}"
            "{{- '<|start|>system<|message|>' ~ said ~ ((tools or []) | tojson) ~ '<|end|>' -}}{%- endif -%}",
            user="{{- '<|start|>user<|message|>' ~ m.content ~ '<|end|>' -}}",
            assistant="{%- if m.tool_calls -%}{%- if m.content -%}"
            "{{- '<|start|>assistant<|channel|>commentary<|message|>' ~ m.content ~ '<|end|>' -}}{%- endif -%}"
            "{%- for c in m.tool_calls -%}{{- '<|start|>assistant to=' ~ c.function.name ~ '<|channel|>commentary<|message|>' ~"
            " (c.function.arguments | tojson) ~ '<|call|>' -}}{%- endfor -%}"
            "{%- else -%}{{- '<|start|>assistant<|channel|>final<|message|>' ~ m.content ~ '<|end|>' -}}{%- endif -%}",
            tool="{{- '<|start|>functions to=assistant<|message|>' ~ m.content ~ '<|end|>' -}}",
            foot="{{- '<|start|>assistant' -}}",
        ),
        stop="<|return|>",
        called_stop="<|call|>",
        written="<|end|>",
        stops=("<|return|>", "<|call|>"),
    ),
    Template("roles of another name", gemma(conversation()), stop="<end_of_turn>", stops=("<end_of_turn>", "<eos>")),
    Template(
        "only the turns of the policy end",
        conversation(user=r"{{- 'Q: ' ~ m.content ~ '\n' -}}", tool=r"{{- 'R: ' ~ m.content ~ '\n' -}}", foot=r"{{- 'A: ' -}}"),
    ),
    Template(
        "the last message of all has no end",
        conversation(assistant=OPEN + SAID + CALLS + "{%- if not loop.last -%}" + CLOSE + "{%- endif -%}"),
    ),
    Template(
        "no token ends a turn",
        conversation(
            head="", user=r"{{- '\n\nQ: ' ~ m.content -}}", assistant=r"{{- '\n\nA: ' -}}" + SAID + CALLS, tool=MISTRAL_TOOL
        ),
        "unsound",
    ),
    Template("turns of the policy do not end", conversation(assistant=OPEN + SAID + CALLS + r"{{- '\n' -}}"), "unsound"),
)

XML_CALL = (
    r"""{{- '<tool_call>\n<function=' ~ c.function.name ~ '>' -}}{%- for name, value in c.function.arguments.items() -%}"""
    r"""{{- '\n<parameter=' ~ name ~ '>\n' ~ value ~ '\n</parameter>' -}}{%- endfor -%}{{- '\n</function>\n</tool_call>' -}}"""
)
PYTHONIC = (
    "{%- if m.tool_calls -%}{{- '[' -}}{%- for c in m.tool_calls -%}{{- c.function.name ~ '(' -}}"
    "{%- for name, value in c.function.arguments.items() -%}{{- name ~ '=' ~ (value | tojson) -}}{%- endfor -%}{{- ')' -}}"
    "{%- if not loop.last -%}{{- ', ' -}}{%- endif -%}{%- endfor -%}{{- ']' -}}{%- endif -%}"
)


def calls(call: str) -> str:
    """A conversation whose calls look like this."""
    return conversation(assistant=OPEN + SAID + CALLS.replace(CALL, call) + CLOSE)


CALLED = (
    Template("arguments as tags", calls(XML_CALL)),
    Template("calls as Python", conversation(assistant=OPEN + SAID + PYTHONIC + CLOSE)),
    Template("arguments indented", calls(CALL.replace("| tojson", "| tojson(indent=2)"))),
    Template(
        "arguments as a text",
        calls(CALL.replace("(c.function.arguments | tojson)", "(c.function.arguments | tojson | tojson)")),
    ),
    Template("calls with ids", calls(CALL.replace("'}\\n</tool_call>'", "', \"id\": \"' ~ c.id ~ '\"}\\n</tool_call>'"))),
    Template("calls before the text", conversation(assistant=OPEN + CALLS + SAID + CLOSE)),
    Template(
        "each call a turn",
        conversation(
            assistant="{%- if m.content or not m.tool_calls -%}"
            + OPEN
            + SAID
            + CLOSE
            + "{%- endif -%}{%- for c in m.tool_calls or [] -%}"
            + OPEN
            + CALL
            + CLOSE
            + "{%- endfor -%}"
        ),
    ),
    Template(
        "text left out beside calls",
        conversation(assistant=OPEN + "{%- if m.tool_calls -%}" + CALLS + "{%- else -%}" + SAID + "{%- endif -%}" + CLOSE),
    ),
    Template(
        "calls left out without a text",
        conversation(assistant=OPEN + "{%- if m.content -%}" + SAID + CALLS + "{%- endif -%}" + CLOSE),
    ),
    Template(
        "arguments left out",
        conversation(
            assistant=OPEN + SAID + "{%- for c in m.tool_calls or [] -%}"
            "{{- '<tool_call>' ~ c.function.name ~ '</tool_call>' -}}{%- endfor -%}" + CLOSE
        ),
    ),
    Template(
        "one call at a time",
        conversation(
            assistant="{%- if (m.tool_calls or []) | length > 1 -%}{{- raise_exception('one call') -}}{%- endif -%}" + ASSISTANT
        ),
    ),
    Template(
        "users and results do not meet",
        conversation(
            user="{%- if not loop.first and loop.previtem.role == 'tool' -%}"
            "{{- raise_exception('roles') -}}{%- endif -%}" + USER
        ),
    ),
    Template("no tools at all", conversation(tool="{{- raise_exception('no tools') -}}"), "unsound"),
)

MOVED = (
    Template(
        "text behind the results",
        conversation(
            before="{%- set ns = namespace(text='') -%}",
            assistant=OPEN
            + "{%- if m.tool_calls -%}{%- set ns.text = m.content or '' -%}{%- else -%}"
            + SAID
            + "{%- endif -%}"
            + CALLS
            + CLOSE,
            tool=TOOL + "{%- if loop.last or loop.nextitem.role != 'tool' -%}{{- ns.text -}}{%- endif -%}",
        ),
        "unsound",
    ),
    Template(
        "last text printed twice",
        conversation(
            foot="{%- for o in turns -%}{%- if o.role == 'assistant' -%}"
            "{{- o.content or '' -}}{%- endif -%}{%- endfor -%}" + OPEN
        ),
        "unsound",
    ),
    Template(
        "results beside their calls",
        conversation(
            assistant=OPEN
            + SAID
            + "{%- for c in m.tool_calls or [] -%}"
            + CALL
            + "{%- for o in turns -%}{%- if o.tool_call_id == c.id -%}"
            "{{- '<tool_response>' ~ o.content ~ '</tool_response>' -}}{%- endif -%}{%- endfor -%}{%- endfor -%}" + CLOSE,
            tool="",
        ),
        "unsound",
    ),
    Template("the last words in the head", conversation(head="{{- '<s>' ~ turns[-1].content -}}" + HEAD), "unsound"),
    Template("the first words at the end", conversation(foot="{{- turns[0].content -}}" + OPEN), "full"),
    Template(
        "a length at the end",
        conversation(
            foot="{%- set ns = namespace(n=0) -%}{%- for o in turns -%}"
            "{%- set ns.n = ns.n + (o.content or '') | length -%}{%- endfor -%}{{- '[' ~ ns.n ~ ']' -}}" + OPEN
        ),
        "unsound",
    ),
    Template(
        "the last turn's length at the end",
        conversation(
            foot="{%- set ns = namespace(n=0) -%}{%- for o in turns -%}"
            "{%- if o.role == 'assistant' -%}{%- set ns.n = (o.content or '') | length -%}{%- endif -%}{%- endfor -%}"
            "{{- '[' ~ ns.n ~ ']' -}}" + OPEN
        ),
        "unsound",
    ),
    Template(
        "users behind everything",
        conversation(
            user="", foot="{%- for m in turns -%}{%- if m.role == 'user' -%}" + USER + "{%- endif -%}{%- endfor -%}" + OPEN
        ),
        "full",
    ),
    Template(
        "new users left out behind results",
        conversation(user="{%- if loop.first or loop.previtem.role != 'tool' -%}" + USER + "{%- endif -%}"),
        "unsound",
    ),
    Template("a clock at the end", conversation(foot="{{- '[' ~ ticks() ~ ']' -}}" + OPEN), "unsound"),
    Template("a clock in the head", conversation(head="{{- '[' ~ ticks() ~ ']' -}}" + HEAD), "unsound"),
    Template("only the last four messages", conversation().replace("for m in turns", "for m in turns[-4:]")),
)

TEMPLATES = (*CHATML, *THINKING, *RESULTS, *HEADS, *ENDS, *CALLED, *MOVED)
