-- One page of a list: names after a cursor with their documents.
-- KEYS[1] = prefix; ARGV = set ('names' | 'shared'), min, max (ZRANGEBYLEX bounds), limit,
-- 'newest' | 'all'.
-- Returns {epoch, {{scope, adapter, tags, versions}...}}, or false where there is no index.
local epoch = redis.call('GET', KEYS[1] .. 'epoch')
if not epoch then return false end
local ns = KEYS[1] .. epoch .. ':'
local page = {}
local scopes = redis.call('ZRANGEBYLEX', ns .. ARGV[1], ARGV[2], ARGV[3], 'LIMIT', 0, ARGV[4])
for _, scope in ipairs(scopes) do
  local key = ns .. 'a:' .. scope
  local versions = {}
  if ARGV[5] == 'newest' then
    local newest = redis.call('HGET', key, 'newest')
    if newest then versions[1] = redis.call('HGET', key, 'v' .. newest) end
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
end
return {epoch, page}
