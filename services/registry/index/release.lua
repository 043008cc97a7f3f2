-- Give the rebuild lease back, unless it ran out and another process has it by now.
-- KEYS[1] = prefix; ARGV[1] = the epoch that held it.
if redis.call('GET', KEYS[1] .. 'rebuild') == ARGV[1] then
  redis.call('DEL', KEYS[1] .. 'rebuild')
end
return 'released'
