"""What agents write into their instructions for their vendor's eyes changes from call to call, and never reaches the policy.

Such a line at the head of a prompt would make every call of a session a conversation of its own. A dialect passes its
system texts through `without_noise`; each kind of noise is one entry of `NOISE`.
"""

import re
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Noise:
    """``mark`` is in every text that has this noise; ``pattern`` matches what is cut out."""

    agent: str
    mark: str
    pattern: re.Pattern[str]


NOISE = (
    # A block of its own before the instructions: "x-anthropic-billing-header: cc_version=2.1.332.a1f; cc_entrypoint=cli; ..."
    Noise("claude-code", "x-anthropic-billing-header:", re.compile(r"^x-anthropic-billing-header:[^\n]*\n*", re.MULTILINE)),
)


def without_noise(text: str) -> str:
    """The text without what is noise; the same text where nothing is."""
    for noise in NOISE:
        if noise.mark in text:
            text = noise.pattern.sub("", text)
    return text
