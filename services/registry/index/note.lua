-- Note that objects of scopes are about to change, with the time of this server.
-- KEYS[1] = prefix of all keys; ARGV = for each change two: the operation's id, the scope.
local now = redis.call('TIME')
local now_ms = string.format('%.0f', tonumber(now[1]) * 1000 + math.floor(tonumber(now[2]) / 1000))
for first = 1, #ARGV, 2 do
  redis.call('HSET', KEYS[1] .. 'pending', ARGV[first], now_ms .. ' ' .. ARGV[first + 1])
end
