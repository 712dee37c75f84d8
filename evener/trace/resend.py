"""Which call a sending of a request is: a new one, or an earlier call of the same body whose reply its client has not got.

HTTP gives a request no identity, so that the sendings of one body are told apart by what became of the earlier ones. The
body's calls are looked at when a sending arrives; the first row that holds decides. `FIRST` is a sending that does not say
that it is one again (no retry header, or 0); `AGAIN` is one whose client says so.

| an earlier call of this body                               | FIRST          | AGAIN                                |
|------------------------------------------------------------|----------------|--------------------------------------|
| committed; its client was seen to leave, or was told an    | its reply      | its reply                            |
| error (mark ``no``)                                        |                |                                      |
| committed, no mark, and its replica is dead: so is the     | its reply      | its reply                            |
| connection                                                 |                |                                      |
| ended without a reply less than `AGAIN_S` ago (failed, cut,| -              | a new sample; the ended call is used |
| lost with its replica)                                     |                | up, so that the next retry is not it |
| in flight                                                  | -              | waits for it, and takes that reply   |
| committed, no mark, by another replica that lives          | waits for mark | waits for the mark                   |
| committed, no mark, by this replica: it is being sent      | -              | waits for the mark                   |
| the same after `evener_proxy.calls.MARK_S` of waiting      | -              | its reply: the connection hangs      |
| delivered, and this sending waited for it                  | -              | its reply                            |
| delivered less than `AGAIN_S` ago, and no call of the      | -              | its reply: the last bytes left, and  |
| session has begun since                                    |                | the client says it has not got them  |
| any other that was delivered                               | -              | - (an old reply is nobody's)         |
| none, or nothing above                                     | a new sample   | a new sample                         |

So two bodies that are sent at once by connected clients are two samples; where one of them leaves and asks again, it gets the
call that has no client, and never the other's while it is told from it. A retry whose first sending never arrived is a new
sample, unless it follows within seconds on the same body's delivered reply with nothing in between: those two look alike. A
call in flight whose client leaves while a retry waits for it goes on for the retry. One whose client has left another replica
a moment ago counts as in flight: that replica ends it within milliseconds. Taking a reply is part of the decision (the mark
becomes ``unknown CALL``), so that no two sendings take one.

The Lua below is a part of the store's scripts; `evener.trace.lua` puts it there.
"""

AGAIN_S = 15
"""Clients wait 8 s at most before they ask again; what is twice as old is not what they miss."""

KEPT = 16
"""Calls of one body that are remembered, the newest; agents have one or two."""

_CLOCK = """
local function now()
  local t = redis.call('TIME')
  return tonumber(t[1]) * 1000000 + tonumber(t[2])
end
"""

# The list of a body's calls: lines of "number call replica".
_CHOOSE = """
local function state_of(entry, me, replica, after, begun, time)
  local f = redis.call('HMGET', KEYS[1], 'mark:' .. entry.number, 'call:' .. entry.call)
  if f[2] then return 'pending' end
  local mark, at = string.match(f[1] or 'unknown', '^(%a+) ?(.*)$')
  local since = tonumber(at) or 0
  local recent = time - since <= %AGAIN% * 1000000
  if redis.call('HEXISTS', KEYS[1], 'record:' .. entry.number) == 0 then
    return mark == 'ended' and recent and 'ended' or 'over'
  end
  if mark == 'yes' then
    return (entry.number == after or (recent and begun < since)) and 'fresh' or 'over'
  end
  if mark == 'no' or at == me or redis.call('EXISTS', '%REPLICA%' .. entry.owner) == 0 then return 'missed' end
  return entry.owner == replica and 'sending' or 'sending_elsewhere'
end

-- Returns the number of the call that is taken, or the number of the call to wait for, and the list without what is over.
local function earlier(body, list, me, replica, again, waited, after, begun)
  local time, found, kept, last = now(), {}, {}, {}
  for number, call, owner in string.gmatch(list, '(%d+) (%S+) (%S+)\\n') do
    local entry = {number = number, call = call, owner = owner}
    local state = state_of(entry, me, replica, after, begun, time)
    if state == 'missed' or state == 'ended' then found[state] = found[state] or entry else found[state] = entry end
    if state ~= 'over' and (again or state ~= 'fresh') then kept[#kept + 1] = entry end
  end
  local sending = found.sending_elsewhere or (again and found.sending)
  local taken = found.missed
  local wait, used
  if not taken and again then
    if found.ended then used = found.ended
    elseif found.pending then wait = found.pending
    elseif sending and not waited then wait = sending
    else taken = sending or found.fresh end
  elseif not taken and sending and not waited then wait = sending end
  local lines = {}
  for i = math.max(1, #kept - %KEPT% + 2), #kept do
    local entry = kept[i]
    if entry ~= used then
      lines[#lines + 1] = entry.number .. ' ' .. entry.call .. ' ' .. (entry == taken and replica or entry.owner) .. '\\n'
    end
  end
  list = table.concat(lines)
  if taken then redis.call('HSET', KEYS[1], 'mark:' .. taken.number, 'unknown ' .. me, body, list) end
  return taken and taken.number, wait and wait.number, list
end
"""

# What a call leaves for the next sending of its body when its client gets an error, or is not there.
_ENDED = """
local function ended(session, number)
  redis.call('HSETNX', session, 'mark:' .. number, 'ended ' .. string.format('%.0f', now()))
end

local function missed(session, list, call)
  for number, id in string.gmatch(list or '', '(%d+) (%S+) %S+\\n') do
    local mark = redis.call('HGET', session, 'mark:' .. number)
    local committed = redis.call('HEXISTS', session, 'record:' .. number) == 1
    if mark == 'unknown ' .. call or (id == call and not mark and committed) then
      redis.call('HSET', session, 'mark:' .. number, 'no')
    end
  end
end
"""


def scripts(replica_prefix: str) -> tuple[str, str, str]:
    """The clock that both others use, what chooses, and what a call leaves when it ends without a client."""
    constants = {"%AGAIN%": str(AGAIN_S), "%KEPT%": str(KEPT), "%REPLICA%": replica_prefix}
    choose = _CHOOSE
    for name, value in constants.items():
        choose = choose.replace(name, value)
    return _CLOCK, choose, _ENDED
