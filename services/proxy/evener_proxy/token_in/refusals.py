"""Why a prompt is not given as ids: each reason has one name, which the call's record keeps."""

from enum import StrEnum


class Refusal(StrEnum):
    """The reasons, in the order in which they are looked for."""

    UNSOUND = "unsound"  # this engine's template cannot be read (see `soundness`)
    FIRST = "first"  # no call of the session has tokens yet
    MEDIA = "media"  # engines take no ids for images
    UNMATCHED = "unmatched"  # no call's messages and reply begin this history: another conversation, or an edited one
    TOOLS_CHANGED = "tools_changed"  # the history goes on, under other tools, which the prompt's head shows
    NOTHING_NEW = "nothing_new"  # the history ends with the policy's own turn
    THINKING_DROPPED = "thinking_dropped"  # the template strips what was thought, and the session wants that
    END_UNCLEAR = "end_unclear"  # it cannot be told whether the reply was cut
    TEMPLATE_FAILED = "template_failed"  # the engine does not render this history
    TURN_NOT_RENDERED = "turn_not_rendered"  # other words of the turn make the same prompt
    NEW_NOT_RENDERED = "new_not_rendered"  # other words of the new messages make the same prompt
    OVERLAP = "overlap"  # what is new stands before the turn's end, or changes what is before it
    NO_STOP = "no_stop"  # between the turn and what is new stands no token that ends a turn as this one ended
    TURN_DIFFERS = "turn_differs"  # the turn itself is followed by other tokens than a turn of other words
    CONTEXT_FULL = "context_full"  # the ids alone fill the window; the template's own rendering may be shorter
    NOT_TAKEN = "not_taken"  # the engine refused the ids
    NOT_ECHOED = "not_echoed"  # the engine says that it was given other ids


class Refused(Exception):
    """This prompt is not given as ids."""

    def __init__(self, reason: Refusal) -> None:
        self.reason = reason
        super().__init__(reason)
