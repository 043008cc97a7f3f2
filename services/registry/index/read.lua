-- One read of the current index. Asking for the epoch first and reading then would take an index that
-- was lost or replaced in between for an empty one.
-- KEYS[1] = prefix; ARGV = the position seen before (epoch, sequence), command, key without prefix and
-- epoch, further arguments.
-- Returns {epoch, sequence, answer}, or false where there is no index or it is behind that position.
local epoch = redis.call('GET', KEYS[1] .. 'epoch')
if not epoch then return false end
local sequence = tonumber(redis.call('GET', KEYS[1] .. epoch .. ':seq') or '0')
if epoch == ARGV[1] and sequence < tonumber(ARGV[2]) then return false end
return {epoch, sequence, redis.call(ARGV[3], KEYS[1] .. epoch .. ':' .. ARGV[4], unpack(ARGV, 5))}
