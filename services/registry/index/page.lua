-- One page of a list: names after a cursor with their documents.
-- KEYS[1] = prefix; ARGV = the position seen before (epoch, sequence), set ('names' | 'shared'), min,
-- max (ZRANGEBYLEX bounds), limit, 'current' | 'all', number of versions after which no further name is
-- added. The current version is the one that `latest` points at (the heaviest side of a split), the newest
-- where it points at none.
-- Returns {epoch, sequence, {{scope, adapter, tags, versions}...}}, or false where there is no index or
-- it is behind that position.
local epoch = redis.call('GET', KEYS[1] .. 'epoch')
if not epoch then return false end
local sequence = tonumber(redis.call('GET', KEYS[1] .. epoch .. ':seq') or '0')
if epoch == ARGV[1] and sequence < tonumber(ARGV[2]) then return false end
local ns = KEYS[1] .. epoch .. ':'
local page, num_versions = {}, 0

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
  local versions = {}
  if ARGV[7] == 'current' then
    local value = current(scope, key)
    if value then versions[1] = value end
  else
    for _, field in ipairs(redis.call('HKEYS', key)) do
      if string.match(field, '^v%d+$') then
        versions[#versions + 1] = redis.call('HGET', key, field)
      end
    end
  end
  page[#page + 1] = {
    scope, redis.call('HGET', key, 'adapter') or '', redis.call('HVALS', ns .. 't:' .. scope), versions
  }
  num_versions = num_versions + #versions
  if num_versions >= tonumber(ARGV[8]) then break end
end
return {epoch, sequence, page}
