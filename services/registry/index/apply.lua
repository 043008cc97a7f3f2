-- Bring changed documents into the index, all or nothing, and tell watchers.
-- KEYS[1] = prefix of all keys; ARGV = the position seen before (epoch, sequence), how many events and
-- how many bytes of them to keep, the epoch to fill while rebuilding ('' = the current one), JSON
-- [{op, scope, items}...], then the documents that items and events name by their number. Keys: see
-- catalog.py.
-- Returns {epoch, sequence after the changes, ''}, or false where there is no index to change or it is
-- behind that position.
local prefix = KEYS[1]
local max_events, max_bytes = tonumber(ARGV[3]), tonumber(ARGV[4])
local changes = cjson.decode(ARGV[6])
local epoch = redis.call('GET', prefix .. 'epoch')

if ARGV[5] ~= '' then
  epoch = ARGV[5]
elseif redis.call('EXISTS', prefix .. 'rebuild') == 1 then
  for _, change in ipairs(changes) do redis.call('SADD', prefix .. 'dirty', change.scope) end
end
if not epoch then return false end
local ns = prefix .. epoch .. ':'
local sequence = tonumber(redis.call('GET', ns .. 'seq') or '0')
if epoch == ARGV[1] and sequence < tonumber(ARGV[2]) then return false end

local function document(number)
  return ARGV[6 + number]
end

local function generation_of(value)
  if not value then return 0 end
  return tonumber(string.match(value, '^%d+'))
end

-- What is live of the tenant, and how many versions of the adapter.
local function count_use(item, sign)
  local use = item.use
  redis.call('HINCRBY', ns .. 'use:' .. use.tenant, 'bytes', sign * use.bytes)
  redis.call('HINCRBY', ns .. 'use:' .. use.tenant, 'versions', sign)
  redis.call('HINCRBY', ns .. item.key, 'live', sign)
  for _, sha in ipairs(use.blobs) do
    if redis.call('HINCRBY', ns .. 'blobs:' .. use.tenant, sha, sign) <= 0 then
      redis.call('HDEL', ns .. 'blobs:' .. use.tenant, sha)
    end
  end
end

-- The numbers of an adapter's versions, tombstones included. See before_new.lua.
local function count_number(key, number)
  redis.call('HINCRBY', key, 'count', 1)
  if number > tonumber(redis.call('HGET', key, 'highest') or '0') then
    redis.call('HSET', key, 'highest', number)
  end
end

-- Add an event, and drop the oldest ones beyond the limits.
local function tell(event)
  local key = ns .. 'events'
  sequence = redis.call('INCR', ns .. 'seq')
  redis.call('XADD', key, string.format('%d-0', sequence), 'e', event)
  local bytes = tonumber(redis.call('GET', ns .. 'event_bytes') or '0') + #event
  local count = redis.call('XLEN', key)
  while count > max_events or (bytes > max_bytes and count > 1) do
    local oldest = redis.call('XRANGE', key, '-', '+', 'COUNT', 1)[1]
    redis.call('XDEL', key, oldest[1])
    bytes = math.max(0, bytes - #oldest[2][2])
    count = count - 1
  end
  redis.call('SET', ns .. 'event_bytes', string.format('%d', bytes))
end

-- Put a scope into the lists that it belongs to: a scope without a live version is in none.
local function list(scope)
  local key = ns .. 'a:' .. scope
  local is_live = redis.call('HEXISTS', key, 'newest') == 1
  local adapter = is_live and redis.call('HGET', key, 'adapter')
  local is_shared = adapter and cjson.decode(string.match(adapter, '^%d+ (.*)$')).visibility > 1
  for name, is_listed in pairs({names = is_live, shared = is_shared}) do
    if is_listed then
      redis.call('ZADD', ns .. name, 0, scope)
    else
      redis.call('ZREM', ns .. name, scope)
    end
  end
end

-- The newest live version leads the list of an adapter's versions. From there, `p<number>` leads from each
-- version to one below it, so that all live ones can be reached, and some deleted ones. A version without
-- it leads to the number below its own. Without these steps, thousands of deleted versions would be looked
-- through whenever the newest one is deleted.
local function below(key, number)
  return tonumber(redis.call('HGET', key, 'p' .. number) or number - 1)
end

local function note_live(scope, key, number)
  local above = tonumber(redis.call('HGET', key, 'newest') or '0')
  if number >= above then
    redis.call('HSET', key, 'newest', number)
    if above < number - 1 then redis.call('HSET', key, 'p' .. number, above) end
    if above == 0 then list(scope) end
    return
  end
  while below(key, above) > number do above = below(key, above) end
  local following = below(key, above)
  if following < number then
    redis.call('HSET', key, 'p' .. number, following, 'p' .. above, number)
  end
end

local function drop_newest(scope, key, number)
  local newest = below(key, number)
  while newest > 0 and generation_of(redis.call('HGET', key, 'v' .. newest)) ~= 1 do
    newest = below(key, newest)
  end
  if newest > 0 then
    redis.call('HSET', key, 'newest', newest)
  else
    redis.call('HDEL', key, 'newest')
    list(scope)
  end
end

local function apply(change)
  local has_ended = false
  for _, item in ipairs(change.items) do
    local key = ns .. item.key
    local have = generation_of(redis.call('HGET', key, item.field))
    if item.generation > have then
      redis.call('HSET', key, item.field, string.format('%d ', item.generation) .. document(item.doc))
      if item.use then
        if have == 0 then count_number(key, item.number) end
        if item.generation == 1 then
          if not item.expires_s or item.expires_s == 0 then redis.call('HSET', key, 'lasting', 1) end
          count_use(item, 1)
          -- m:<digest> says that several versions have had this content.
          local known = redis.call('HGET', key, 'd:' .. item.digest)
          if known and known ~= string.format('%d', item.number) then
            redis.call('HSET', key, 'm:' .. item.digest, 1)
          end
          redis.call('HSET', key, 'd:' .. item.digest, item.number)
          redis.call('PERSIST', key)
          redis.call('PERSIST', ns .. 't:' .. change.scope)
          note_live(change.scope, key, item.number)
        else
          if have == 1 then count_use(item, -1) end
          if item.number == tonumber(redis.call('HGET', key, 'newest')) then
            drop_newest(change.scope, key, item.number)
          end
        end
      end
      if item.visibility then list(change.scope) end
      if item.staged_until_s then
        local staged = item.field .. ' ' .. change.scope
        if item.staged_until_s > 0 then
          redis.call('ZADD', ns .. 'staged', item.staged_until_s, staged)
        else
          redis.call('ZREM', ns .. 'staged', staged)
        end
      end
      if item.expires_s and item.expires_s > 0 then
        local expiring = string.format('%d ', item.number) .. change.scope
        if item.generation == 1 then
          redis.call('ZADD', ns .. 'expiring', item.expires_s, expiring)
        else
          redis.call('ZREM', ns .. 'expiring', expiring)
          has_ended = true
        end
      end
      for _, event in ipairs(item.events) do
        if event.generation > have and max_events > 0 then tell(document(event.doc)) end
      end
      -- Who may see a new version may have changed since its writer looked.
      if item.sharing and item.generation == 1 and max_events > 0 then
        local adapter = redis.call('HGET', key, 'adapter')
        if generation_of(adapter) > item.sharing then
          tell('{"kind":"adapter","doc":' .. string.match(adapter, '^%d+ (.*)$') .. '}')
        end
      end
    end
  end

  -- An adapter that had ephemeral versions only, and has none any more, leaves the index after two
  -- minutes. Until then its tombstones stop older documents that arrive late. A new version keeps the
  -- keys.
  local adapter_key = ns .. 'a:' .. change.scope
  if has_ended and redis.call('HEXISTS', adapter_key, 'newest') == 0
      and redis.call('HEXISTS', adapter_key, 'lasting') == 0 then
    redis.call('EXPIRE', adapter_key, 120)
    redis.call('EXPIRE', ns .. 't:' .. change.scope, 120)
  end

  if change.op ~= '' then redis.call('HDEL', prefix .. 'pending', change.op) end
end

for _, change in ipairs(changes) do apply(change) end
return {epoch, sequence, ''}
