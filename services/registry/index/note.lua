-- Note that objects of a scope are about to change, with the time of this server.
-- KEYS[1] = prefix of all keys; ARGV = the operation's id, the scope.
local now = redis.call('TIME')
local now_ms = string.format('%.0f', tonumber(now[1]) * 1000 + math.floor(tonumber(now[2]) / 1000))
redis.call('HSET', KEYS[1] .. 'pending', ARGV[1], now_ms .. ' ' .. ARGV[2])
