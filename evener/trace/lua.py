"""Each write of the trace store is one of these scripts: it checks the session's state and changes it in one step.

A session is one Redis hash. Its fields: ``state`` (open, sealed, deleted), ``spec``, ``opened``, ``key`` (SHA-256 of the key),
the counters ``number``, ``committed``, ``aborted``, ``abandoned`` (of the aborted: its agent left while the engine sampled
it), ``lost``, ``flight``, ``sampled``, ``reserved``, ``failures``, ``prompt_max`` and ``undelivered``, ``heads``, ``spent``,
``fault``, ``error``, ``server`` (where it was opened), ``begun`` (when its last call began, by Redis's clock in us),
``call:ID`` for a call in flight ("number grant replica"), ``body:DIGEST`` for the calls with this request body (lines of
"number call replica"), ``record:N``, ``mark:N`` ("yes" or "no" and since when, "unknown" and the call that is sending it
again, "ended" and since when), ``awaited:N`` (when a retry last waited for the call), and ``text:DIGEST``. A deleted session
leaves a hash with the state alone (a tombstone), so that its late words are refused.

The last argument of every script names the server (`evener.trace.lane`). A session that was opened on another one may lack what
was committed since: it takes no further call, and its fault is ours.
"""

from evener.trace import resend

KEY_PREFIX = "evener:key:"
SESSION_PREFIX = "evener:session:"
REPLICA_PREFIX = "evener:replica:"
SEALED_CHANNEL = "evener:sealed"
AWAITED_S = 1.5
"""A retry that waits for a call asks each second."""

_CLOCK, _CHOOSE, _ENDED = resend.scripts(REPLICA_PREFIX)

_LOST = """
local function lost(state, server)
  if state ~= 'open' or not server or server == ARGV[#ARGV] then return false end
  redis.call('HSET', KEYS[1], 'fault', 'session_lost', 'error', 'Redis was restarted or replaced, and may have lost calls')
  redis.call('HDEL', KEYS[1], 'spent')
  return true
end
"""

# KEYS: session, key index. ARGV: session id, key hash, spec, opened, ttl in seconds.
OPEN = """
local held = redis.call('HMGET', KEYS[1], 'state', 'key')
if held[1] then
  return (held[2] == ARGV[2]) and 'ok' or 'exists'
end
redis.call('HSET', KEYS[1], 'state', 'open', 'key', ARGV[2], 'spec', ARGV[3], 'opened', ARGV[4], 'server', ARGV[#ARGV])
redis.call('EXPIRE', KEYS[1], ARGV[5])
redis.call('SET', KEYS[2], ARGV[1], 'EX', ARGV[5])
return 'ok'
"""

# KEYS: key index. Returns spec and opened, or nothing.
BY_KEY = """
local id = redis.call('GET', KEYS[1])
if not id then return {} end
local found = redis.call('HMGET', '%SESSION%' .. id, 'spec', 'opened')
if not found[1] then return {} end
return found
""".replace("%SESSION%", SESSION_PREFIX)

# KEYS: session. ARGV: call, replica, asked tokens, calls allowed, tokens allowed, wall spent (1) or not, digest of the body,
# sent again (1) or not, the call that was waited for or 0, waited for long enough (1) or not, digests of texts. Returns ok,
# number, grant, heads, which texts are known ("10..."); or stored and the number of the call whose reply the agent has not got;
# or the refusal, busy with the number of the call to wait for, where it is one.
INTENT = (
    _LOST
    + _CLOCK
    + _CHOOSE
    + """
local call, body = 'call:' .. ARGV[1], 'body:' .. ARGV[7]
local v = redis.call('HMGET', KEYS[1], 'state', 'number', 'committed', 'flight', 'sampled', 'reserved', 'heads', call, body,
  'server', 'begun', 'abandoned')
if not v[1] or v[1] == 'deleted' then return {'gone'} end
if v[1] ~= 'open' then return {'sealed'} end
if lost(v[1], v[10]) then return {'lost'} end
local list = ''
if v[9] and not v[8] then
  local taken, wait
  taken, wait, list = earlier(body, v[9], ARGV[1], ARGV[2], ARGV[8] == '1', ARGV[10] == '1', ARGV[9], tonumber(v[11] or 0))
  if taken then return {'stored', taken} end
  if wait and ARGV[6] ~= '1' then
    redis.call('HSET', KEYS[1], 'awaited:' .. wait, string.format('%.0f', now()))
    return {'busy', wait}
  end
end
local number, grant
if v[8] then
  number, grant = string.match(v[8], '^(%d+) (%d+)')
else
  local flight, made = tonumber(v[4] or 0), tonumber(v[3] or 0) + tonumber(v[12] or 0)
  local sampled, reserved = tonumber(v[5] or 0), tonumber(v[6] or 0)
  local calls, tokens = tonumber(ARGV[4]), tonumber(ARGV[5])
  local spent
  if ARGV[6] == '1' then spent = 'wall'
  elseif made >= calls then spent = 'calls'
  elseif sampled >= tokens then spent = 'tokens' end
  if spent then
    redis.call('HSET', KEYS[1], 'spent', spent)
    return {spent}
  end
  local asked, left = tonumber(ARGV[3]), tokens - sampled - reserved
  if made + flight >= calls or left < math.min(asked, tokens - sampled) then return {'busy'} end
  number = string.format('%d', tonumber(v[2] or 0) + 1)
  grant = string.format('%d', math.min(asked, left))
  redis.call('HSET', KEYS[1], 'number', number, 'flight', flight + 1, 'reserved', string.format('%d', reserved + grant),
    call, number .. ' ' .. grant .. ' ' .. ARGV[2], body, list .. number .. ' ' .. ARGV[1] .. ' ' .. ARGV[2] .. '\\n',
    'begun', string.format('%.0f', now()))
end
local known = ''
for i = 11, #ARGV - 1 do known = known .. redis.call('HEXISTS', KEYS[1], 'text:' .. ARGV[i]) end
return {'ok', number, grant, v[7] or '', known}
"""
)

# KEYS: session. ARGV: call, number, record, head, sampled, prompt tokens, failures, bytes of heads kept, (digest, text)...
COMMIT = (
    _LOST
    + """
local call = 'call:' .. ARGV[1]
local v = redis.call('HMGET', KEYS[1], 'state', call, 'committed', 'flight', 'sampled', 'reserved', 'heads', 'prompt_max',
  'failures', 'server')
if not v[1] or v[1] == 'deleted' then return 'gone' end
if v[1] ~= 'open' then return 'sealed' end
if lost(v[1], v[10]) then return 'lost' end
if not v[2] then
  return redis.call('HEXISTS', KEYS[1], 'record:' .. ARGV[2]) == 1 and 'ok' or 'released'
end
local grant = string.match(v[2], '^%d+ (%d+)')
redis.call('HSET', KEYS[1], 'record:' .. ARGV[2], ARGV[3],
  'committed', string.format('%d', tonumber(v[3] or 0) + 1),
  'flight', string.format('%d', tonumber(v[4]) - 1),
  'sampled', string.format('%d', tonumber(v[5] or 0) + tonumber(ARGV[5])),
  'reserved', string.format('%d', tonumber(v[6]) - grant),
  'heads', string.sub((v[7] or '') .. ARGV[4], -tonumber(ARGV[8])),
  'prompt_max', string.format('%d', math.max(tonumber(v[8] or 0), tonumber(ARGV[6]))),
  'failures', string.format('%d', tonumber(v[9] or 0) + tonumber(ARGV[7])))
redis.call('HDEL', KEYS[1], call, 'fault', 'error')
for i = 9, #ARGV - 1, 2 do redis.call('HSETNX', KEYS[1], 'text:' .. ARGV[i], ARGV[i + 1]) end
return 'ok'
"""
)

# KEYS: session. ARGV: call, failures, fault or '', error or '', budget spent or '', digest of the body, abandoned (1) or not
# (0). Of a call that was committed after all, or had taken a stored reply, the agent has not got the reply. One that is not
# known here failed before its intent was stored, which is no less a failure.
RELEASE = (
    _CLOCK
    + _ENDED
    + """
local call = 'call:' .. ARGV[1]
local v = redis.call('HMGET', KEYS[1], 'state', call, 'flight', 'reserved', 'aborted', 'failures', 'body:' .. ARGV[6],
  'abandoned')
if not v[1] or v[1] == 'deleted' then return 'gone' end
if v[1] ~= 'open' then return 'sealed' end
local failed = ARGV[3] ~= '' or ARGV[4] ~= ''
if not v[2] then
  missed(KEYS[1], v[7], ARGV[1])
  if failed and not string.find(v[7] or '', ' ' .. ARGV[1] .. ' ', 1, true) then
    redis.call('HSET', KEYS[1], 'fault', ARGV[3], 'error', ARGV[4])
  end
  return 'ok'
end
local number, grant = string.match(v[2], '^(%d+) (%d+)')
redis.call('HSET', KEYS[1], 'flight', string.format('%d', tonumber(v[3]) - 1),
  'reserved', string.format('%d', tonumber(v[4]) - grant),
  'aborted', string.format('%d', tonumber(v[5] or 0) + 1),
  'abandoned', string.format('%d', tonumber(v[8] or 0) + tonumber(ARGV[7])),
  'failures', string.format('%d', tonumber(v[6] or 0) + tonumber(ARGV[2])))
if failed then redis.call('HSET', KEYS[1], 'fault', ARGV[3], 'error', ARGV[4]) end
if ARGV[5] ~= '' then redis.call('HSET', KEYS[1], 'spent', ARGV[5]) end
redis.call('HDEL', KEYS[1], call)
ended(KEYS[1], number)
return 'ok'
"""
)

# KEYS: sessions. ARGV: number, mark and how long ago (us), for each session.
MARK = (
    _CLOCK
    + """
for i, session in ipairs(KEYS) do
  if redis.call('HGET', session, 'state') == 'open' then
    local number, mark, age = ARGV[3 * i - 2], ARGV[3 * i - 1], tonumber(ARGV[3 * i])
    redis.call('HSET', session, 'mark:' .. number, mark .. ' ' .. string.format('%.0f', now() - age))
  end
end
return 'ok'
"""
)

# KEYS: replica, sessions. ARGV: ttl in milliseconds. Returns the state of each session.
BEAT = """
redis.call('SET', KEYS[1], '1', 'PX', ARGV[1])
local states = {}
for i = 2, #KEYS do
  local v = redis.call('HMGET', KEYS[i], 'state', 'server')
  states[i - 1] = v[2] and v[2] ~= ARGV[#ARGV] and 'lost' or v[1] or 'gone'
end
return states
"""

# Ends the calls whose replica is dead (lost) and, where asked, those whose replica is alive (aborted).
_END_CALLS = (
    _CLOCK
    + _ENDED
    + """
local function end_calls(session, also_alive)
  local v = redis.call('HMGET', session, 'flight', 'reserved', 'aborted', 'lost')
  local flight, reserved = tonumber(v[1] or 0), tonumber(v[2] or 0)
  local aborted, lost = tonumber(v[3] or 0), tonumber(v[4] or 0)
  for _, field in ipairs(redis.call('HKEYS', session)) do
    if string.sub(field, 1, 5) == 'call:' then
      local number, grant, replica = string.match(redis.call('HGET', session, field), '^(%d+) (%d+) (.*)$')
      local alive = redis.call('EXISTS', '%REPLICA%' .. replica) == 1
      if also_alive or not alive then
        if alive then aborted = aborted + 1 else lost = lost + 1 end
        flight, reserved = flight - 1, reserved - grant
        redis.call('HDEL', session, field)
        ended(session, number)
      end
    end
  end
  redis.call('HSET', session, 'flight', string.format('%d', flight), 'reserved', string.format('%d', reserved),
    'aborted', string.format('%d', aborted), 'lost', string.format('%d', lost))
end
""".replace("%REPLICA%", REPLICA_PREFIX)
)

# KEYS: session. ARGV: call. Whether a retry has asked for the call, which is in flight, within `AWAITED_S`.
AWAITED = (
    _CLOCK
    + """
local number = string.match(redis.call('HGET', KEYS[1], 'call:' .. ARGV[1]) or '', '^(%d+) ')
local at = number and redis.call('HGET', KEYS[1], 'awaited:' .. number)
return at and now() - tonumber(at) <= %S% * 1000000 and 1 or 0
""".replace("%S%", str(AWAITED_S))
)

# KEYS: session. Ends the calls of dead replicas, so that they hold no budget.
REAP = (
    _END_CALLS
    + """
if redis.call('HGET', KEYS[1], 'state') == 'open' then end_calls(KEYS[1], false) end
return 'ok'
"""
)

# KEYS: session. Returns committed, aborted, lost, undelivered; or nothing where there is no such session.
SEAL = (
    _LOST
    + _END_CALLS
    + """
local held = redis.call('HMGET', KEYS[1], 'state', 'server')
local state = held[1]
if not state or state == 'deleted' then return {} end
if state == 'open' then
  lost(state, held[2])
  end_calls(KEYS[1], true)
  local undelivered = 0
  for _, field in ipairs(redis.call('HKEYS', KEYS[1])) do
    if string.sub(field, 1, 5) == 'mark:' and string.sub(redis.call('HGET', KEYS[1], field), 1, 2) == 'no' then
      undelivered = undelivered + 1
    end
  end
  redis.call('HSET', KEYS[1], 'state', 'sealed', 'undelivered', string.format('%d', undelivered))
  redis.call('PUBLISH', '%CHANNEL%', string.sub(KEYS[1], %PREFIX% + 1))
end
local v = redis.call('HMGET', KEYS[1], 'committed', 'aborted', 'lost', 'undelivered')
return {v[1] or '0', v[2], v[3], v[4]}
""".replace("%CHANNEL%", SEALED_CHANNEL).replace("%PREFIX%", str(len(SESSION_PREFIX)))
)

# KEYS: session. ARGV: tombstone's ttl in seconds. A session that was not opened yet gets its tombstone as well: a runner that
# hung meanwhile shall not open what the ledger has given up.
DELETE = """
-- Of a full Redis's scripts those go on that begin with what takes no memory, as this one does.
local key = redis.call('HGET', KEYS[1], 'key')
redis.call('DEL', KEYS[1])
if key then redis.call('DEL', '%KEY%' .. key) end
redis.call('HSET', KEYS[1], 'state', 'deleted')
redis.call('EXPIRE', KEYS[1], ARGV[1])
return 'ok'
""".replace("%KEY%", KEY_PREFIX)
