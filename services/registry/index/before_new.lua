-- What the number of a new version depends on, where no version had its digest.
-- KEYS[1] = prefix; ARGV = the position seen before (epoch, sequence), scope, digest.
-- Returns {epoch, sequence, {highest number, how many are not deleted, the first version or ''}}, with
-- nil instead of the last where a version had this digest or a number is missing, or false where there
-- is no index or it is behind that position.
local epoch = redis.call('GET', KEYS[1] .. 'epoch')
if not epoch then return false end
local sequence = tonumber(redis.call('GET', KEYS[1] .. epoch .. ':seq') or '0')
if epoch == ARGV[1] and sequence < tonumber(ARGV[2]) then return false end
local key = KEYS[1] .. epoch .. ':a:' .. ARGV[3]
if redis.call('HEXISTS', key, 'd:' .. ARGV[4]) == 1 then return {epoch, sequence, false} end

local count = tonumber(redis.call('HGET', key, 'count') or '0')
local highest = tonumber(redis.call('HGET', key, 'highest') or '0')
if count ~= highest then return {epoch, sequence, false} end
local live = tonumber(redis.call('HGET', key, 'live') or '0')
return {epoch, sequence, {highest, live, redis.call('HGET', key, 'v1') or ''}}
