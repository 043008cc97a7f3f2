-- Comes before page.lua and resolve.lua. Redis answers nobody else while a script runs, and an adapter may
-- have thousands of live versions and any number of deleted ones. So its versions are read in parts.
local budget = {documents = 0, bytes = 1048576, numbers = 2000} -- of all parts in one script

local function has_ended()
  return budget.documents <= 0 or budget.bytes <= 0 or budget.numbers <= 0
end

local function is_live(value)
  return value and string.sub(value, 1, 2) == '1 '
end

local function look_at(key, number)
  budget.numbers = budget.numbers - 1
  return redis.call('HGET', key, string.format('v%d', number))
end

local function add(versions, value)
  versions[#versions + 1] = value
  budget.documents = budget.documents - 1
  budget.bytes = budget.bytes - #value
end

-- Append the versions of an adapter above a number to a list, without deleted ones unless wanted. Returns
-- the number after which the next part begins, at least one further, or '0' after the last part.
local function add_above(versions, key, after, wants_deleted)
  local last = tonumber(redis.call('HGET', key, 'newest') or '0')
  if wants_deleted then
    last = math.max(last, tonumber(redis.call('HGET', key, 'highest') or '0'))
  end
  local number = after
  while number < last do
    number = number + 1
    local value = look_at(key, number)
    if value and (wants_deleted or is_live(value)) then add(versions, value) end
    if has_ended() then break end
  end
  return number < last and string.format('%d', number) or '0'
end

local function below(key, number)
  return tonumber(redis.call('HGET', key, 'p' .. number) or number - 1)
end

-- The same for live versions in descending order, after '<number> <live version above it>', or from the
-- newest one if it is '0'. Each of them is made to lead to the next one (see apply.lua): a trainer deletes
-- all but its newest updates, and after each of them would look through all that it ever published. Returns
-- what the next part begins after, or '0'.
local function add_live(versions, key, after)
  local number, above = string.match(after, '^(%d+) (%d+)$')
  number = tonumber(number or redis.call('HGET', key, 'newest') or '0')
  above = tonumber(above or '0')
  -- A version that was indexed late, since the last part, may be between them. It must stay reachable.
  if above > 0 and below(key, above) ~= number then above = 0 end
  local num_skipped = 0
  local function lead_on()
    if above > 0 and num_skipped > 0 then redis.pcall('HSET', key, 'p' .. above, number) end
  end
  while number > 0 do
    local value = look_at(key, number)
    if is_live(value) then
      lead_on()
      add(versions, value)
      above, num_skipped = number, 0
    else
      num_skipped = num_skipped + 1
    end
    number = below(key, number)
    if has_ended() then break end
  end
  lead_on()
  return number > 0 and string.format('%d %d', number, above) or '0'
end

