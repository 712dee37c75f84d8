"""Prompt mode ``token_in``: the next prompt is the ids of the call it goes on from, and the tokens of what is new.

`history` finds the call, `suffix` the tokens of what is new, by the engine's own rendering; `soundness` proves once a policy
that its template can be read that way; `prompts` does it for each call. Whatever cannot be proven is refused with a reason, and
the call is plain chat: nothing is ever decoded and encoded again, and nothing is spliced.
"""
