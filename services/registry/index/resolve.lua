-- Everything that answers references, many in one round trip.
-- KEYS[1] = prefix; ARGV = the position seen before (epoch, sequence), number of versions after which parts
-- of adapters end, then for each reference three: scope, kind ('adapter' | 'tag' | 'version' | 'digest' |
-- 'newest' | 'live' | 'all'), selector. That of the last two is '0', or what a further part begins after.
-- Live versions have generation 1.
-- Returns {epoch, sequence, {{tags, versions, adapter, what the next part begins after or '0'}...}}, or false
-- where there is no index or it is behind that position. Values are '<generation> <document>'. A digest has one
-- version, and in place of the next part '1' where others have had it as well.
local epoch = redis.call('GET', KEYS[1] .. 'epoch')
if not epoch then return false end
local sequence = tonumber(redis.call('GET', KEYS[1] .. epoch .. ':seq') or '0')
if epoch == ARGV[1] and sequence < tonumber(ARGV[2]) then return false end
local ns = KEYS[1] .. epoch .. ':'

budget.documents = tonumber(ARGV[3])

local function found(scope, kind, selector)
  local key = ns .. 'a:' .. scope
  local tags_key = ns .. 't:' .. scope
  local versions, following = {}, '0'
  local adapter = redis.call('HGET', key, 'adapter') or ''
  if kind == 'adapter' then return {{}, {}, adapter, '0'} end

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
    if redis.call('HEXISTS', key, 'm:' .. selector) == 1 then following = '1' end
  elseif kind == 'newest' then
    local newest = tonumber(redis.call('HGET', key, 'newest') or '0')
    for number = newest, math.max(1, newest - 99), -1 do
      local value = redis.call('HGET', key, string.format('v%d', number))
      if value and string.sub(value, 1, 2) == '1 ' then versions[#versions + 1] = value end
      if #versions >= tonumber(selector) then break end
    end
  else
    if kind == 'all' then
      following = add_above(versions, key, tonumber(selector), true)
    else
      following = add_live(versions, key, selector)
    end
    if following ~= '0' then return {{}, versions, adapter, following} end
  end
  local tags = kind ~= 'newest' and redis.call('HVALS', tags_key) or {}
  if kind == 'newest' then
    for i, text in ipairs(redis.call('HSCAN', tags_key, 0, 'COUNT', selector)[2]) do
      if i % 2 == 0 then tags[#tags + 1] = text end
    end
  end
  return {tags, versions, adapter, following}
end

local answers = {}
for first = 4, #ARGV, 3 do
  answers[#answers + 1] = found(ARGV[first], ARGV[first + 1], ARGV[first + 2])
end
return {epoch, sequence, answers}
