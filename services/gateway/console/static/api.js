// Talks to the gateway this page came from; the key lives in this tab only.

const KEY = "loraplex-key";

export class NeedsKey extends Error {}

export const key = {
  get: () => sessionStorage.getItem(KEY) ?? "",
  set: (value) => sessionStorage.setItem(KEY, value),
};

function headers() {
  return key.get() ? { authorization: `Bearer ${key.get()}` } : {};
}

async function check(response) {
  if (response.status === 401) throw new NeedsKey(key.get() ? "This key is not known here." : "");
  if (response.ok) return response;
  const said = await response.json().catch(() => null);
  throw new Error(said?.error?.message ?? `the gateway answered ${response.status}`);
}

export async function get(path) {
  return (await check(await fetch(path, { headers: headers() }))).json();
}

export async function post(path, body) {
  const sent = { ...headers(), "content-type": "application/json" };
  return (await check(await fetch(path, { method: "POST", headers: sent, body: JSON.stringify(body) }))).json();
}

/** Yields [kind, value]: "served" with the version that runs, then the objects of the stream. */
export async function* stream(path, body, signal) {
  const response = await check(await fetch(path, {
    method: "POST",
    headers: { ...headers(), "content-type": "application/json" },
    body: JSON.stringify({ ...body, stream: true, stream_options: { include_usage: true } }),
    signal,
  }));
  yield ["served", response.headers.get("x-loraplex-adapter") ?? ""];
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let waiting = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) throw new Error("the stream ended too early");
    const events = (waiting + value).split("\n\n");
    waiting = events.pop();
    for (const event of events) {
      if (event === "data: [DONE]") return;
      if (!event.startsWith("data: ")) continue;
      const chunk = JSON.parse(event.slice(6));
      if (chunk.error) throw new Error(chunk.error.message);
      yield ["chunk", chunk];
    }
  }
}
