-- Everything that answers one reference, in one round trip.
-- KEYS[1] = prefix; ARGV = scope, kind ('tag' | 'version' | 'digest' | 'all'), selector.
-- Returns {epoch, tags, versions, adapter}, or false where there is no index. Values are
-- '<generation> <document>'.
local epoch = redis.call('GET', KEYS[1] .. 'epoch')
if not epoch then return false end
local ns = KEYS[1] .. epoch .. ':'
local key = ns .. 'a:' .. ARGV[1]
local tags = redis.call('HVALS', ns .. 't:' .. ARGV[1])
local versions = {}

local function add(number)
  local value = redis.call('HGET', key, 'v' .. number)
  if value then versions[#versions + 1] = value end
end

if ARGV[2] == 'tag' then
  local value = redis.call('HGET', ns .. 't:' .. ARGV[1], ARGV[3])
  if value then
    local tag = cjson.decode(string.match(value, '^%d+ (.*)$'))
    for _, target in ipairs(tag.targets) do add(string.format('%d', target.version)) end
  end
elseif ARGV[2] == 'version' then
  add(ARGV[3])
elseif ARGV[2] == 'digest' then
  local number = redis.call('HGET', key, 'd:' .. ARGV[3])
  if number then add(number) end
else
  for _, field in ipairs(redis.call('HKEYS', key)) do
    local number = string.match(field, '^v(%d+)$')
    if number then add(number) end
  end
end
return {epoch, tags, versions, redis.call('HGET', key, 'adapter') or ''}
