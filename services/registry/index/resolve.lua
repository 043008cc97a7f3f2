-- Everything that answers references, many in one round trip.
-- KEYS[1] = prefix; ARGV = the position seen before (epoch, sequence), then for each reference three:
-- scope, kind ('tag' | 'version' | 'digest' | 'live' | 'all'), selector. Live versions have generation 1.
-- Returns {epoch, sequence, {{tags, versions, adapter}...}}, or false where there is no index or it is
-- behind that position. Values are '<generation> <document>'.
local epoch = redis.call('GET', KEYS[1] .. 'epoch')
if not epoch then return false end
local sequence = tonumber(redis.call('GET', KEYS[1] .. epoch .. ':seq') or '0')
if epoch == ARGV[1] and sequence < tonumber(ARGV[2]) then return false end
local ns = KEYS[1] .. epoch .. ':'

local function found(scope, kind, selector)
  local key = ns .. 'a:' .. scope
  local tags_key = ns .. 't:' .. scope
  local versions = {}

  local function add(number)
    local value = redis.call('HGET', key, 'v' .. number)
    if value then versions[#versions + 1] = value end
  end

  if kind == 'tag' then
    local value = redis.call('HGET', tags_key, selector)
    if value then
      local tag = cjson.decode(string.match(value, '^%d+ (.*)$'))
      for _, target in ipairs(tag.targets) do add(string.format('%d', target.version)) end
    end
  elseif kind == 'version' then
    add(selector)
  elseif kind == 'digest' then
    local number = redis.call('HGET', key, 'd:' .. selector)
    if number then add(number) end
  else
    for _, field in ipairs(redis.call('HKEYS', key)) do
      local number = string.match(field, '^v(%d+)$')
      if number then
        local value = redis.call('HGET', key, field)
        if kind == 'all' or string.sub(value, 1, 2) == '1 ' then versions[#versions + 1] = value end
      end
    end
  end
  return {redis.call('HVALS', tags_key), versions, redis.call('HGET', key, 'adapter') or ''}
end

local answers = {}
for first = 3, #ARGV, 3 do
  answers[#answers + 1] = found(ARGV[first], ARGV[first + 1], ARGV[first + 2])
end
return {epoch, sequence, answers}
