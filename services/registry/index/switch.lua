-- Put a rebuilt index in the place of the old one, unless names changed since they were read.
-- KEYS[1] = prefix; ARGV[1] = the rebuilt epoch, which must hold the rebuild lease.
-- Returns 'switched', 'lost' (the lease is not ours any more), or the changed names.
local prefix = KEYS[1]
if redis.call('GET', prefix .. 'rebuild') ~= ARGV[1] then return 'lost' end
local dirty = redis.call('SMEMBERS', prefix .. 'dirty')
if #dirty > 0 then
  redis.call('DEL', prefix .. 'dirty')
  return dirty
end
redis.call('SET', prefix .. 'epoch', ARGV[1])
redis.call('DEL', prefix .. 'rebuild')
return 'switched'
