-- One read of the current index. Asking for the epoch first and reading then would take an index that
-- was lost or replaced in between for an empty one.
-- KEYS[1] = prefix; ARGV = command, key without prefix and epoch, further arguments.
-- Returns {epoch, answer}, or false where there is no index.
local epoch = redis.call('GET', KEYS[1] .. 'epoch')
if not epoch then return false end
return {epoch, redis.call(ARGV[1], KEYS[1] .. epoch .. ':' .. ARGV[2], unpack(ARGV, 3))}
