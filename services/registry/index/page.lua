-- One page of a list: names after a cursor with their documents.
-- KEYS[1] = prefix; ARGV = the position seen before (epoch, sequence), set ('names' | 'shared'), min,
-- max (ZRANGEBYLEX bounds), limit of names, which versions (see Catalog.page), number of versions after
-- which the page ends, the scope that a part was read of and the last number of this part. The current
-- version is the one that `latest` points at (the heaviest target of a split), the newest where it points at
-- none. A page ends after some bytes and some numbers that were looked at, too.
-- Returns {epoch, sequence, {{{scope, adapter, tags, versions, number after which versions follow or 0}...},
-- 1 if nothing follows, otherwise 0}}, or false where there is no index or it is behind that position.
local epoch = redis.call('GET', KEYS[1] .. 'epoch')
if not epoch then return false end
local sequence = tonumber(redis.call('GET', KEYS[1] .. epoch .. ':seq') or '0')
if epoch == ARGV[1] and sequence < tonumber(ARGV[2]) then return false end
local ns = KEYS[1] .. epoch .. ':'
local page, which = {}, ARGV[7]
budget.documents = tonumber(ARGV[8])

local function current(scope, key)
  local tag = redis.call('HGET', ns .. 't:' .. scope, 'latest')
  local chosen = nil
  for _, target in ipairs(tag and cjson.decode(string.match(tag, '^%d+ (.*)$')).targets or {}) do
    if not chosen or target.weight > chosen.weight then chosen = target end
  end
  local value = chosen and redis.call('HGET', key, 'v' .. string.format('%d', chosen.version))
  if value and string.sub(value, 1, 2) == '1 ' then return value end
  local newest = redis.call('HGET', key, 'newest')
  return newest and redis.call('HGET', key, 'v' .. newest)
end

local scopes = redis.call('ZRANGEBYLEX', ns .. ARGV[3], ARGV[4], ARGV[5], 'LIMIT', 0, ARGV[6])
for _, scope in ipairs(scopes) do
  local key = ns .. 'a:' .. scope
  local versions, tags, following = {}, {}, '0'
  if which == 'current' then
    local value = current(scope, key)
    if value then add(versions, value) end
  else
    local after = scope == ARGV[9] and tonumber(ARGV[10]) or 0
    following = add_above(versions, key, after, false)
  end
  if which ~= 'everything' or following == '0' then
    tags = redis.call('HVALS', ns .. 't:' .. scope)
    for _, tag in ipairs(tags) do budget.bytes = budget.bytes - #tag end
  end
  local adapter = redis.call('HGET', key, 'adapter') or ''
  budget.bytes = budget.bytes - #adapter
  page[#page + 1] = {scope, adapter, tags, versions, following}
  if following ~= '0' or has_ended() then break end
end
local is_last = #page == #scopes and #scopes < tonumber(ARGV[6]) and (#page == 0 or page[#page][5] == '0')
return {epoch, sequence, {page, is_last and 1 or 0}}
