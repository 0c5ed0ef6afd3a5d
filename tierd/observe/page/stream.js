// The daemon's stream: frames of kind (uint8), three zero bytes, length (uint32), payload. Reconnects by itself.

const SILENCE_MS = 3500;
const RETRY_MS = [500, 1000, 2000, 4000];

/** Reads the stream for ever and calls `on[kind](DataView)` for each frame, and `on.state(state, why)` on changes. */
export async function follow(url, on) {
  for (let failures = 0; ; ) {
    let why = "";
    try {
      await readOnce(url, on, () => { failures = 0; });
      why = "the daemon closed the connection";
    } catch (error) {
      why = error.message;
    }
    on.state("gone", why);
    await new Promise((wake) => setTimeout(wake, RETRY_MS[Math.min(failures, RETRY_MS.length - 1)]));
    failures += 1;
  }
}

async function readOnce(url, on, alive) {
  const stop = new AbortController();
  let silence;
  const heard = () => {
    clearTimeout(silence);
    silence = setTimeout(() => stop.abort(), SILENCE_MS);
  };
  heard();
  try {
    const answer = await fetch(url, { signal: stop.signal, cache: "no-store" });
    if (!answer.ok) throw new Error(await refusal(answer));
    const reader = answer.body.getReader();
    let rest = new Uint8Array(0);
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      heard();
      rest = deliver(join(rest, value), on);
      alive();
    }
  } catch (error) {
    if (stop.signal.aborted) throw new Error("the daemon has been silent for some seconds");
    if (error instanceof TypeError) throw new Error("the daemon does not answer");
    throw error;
  } finally {
    clearTimeout(silence);
    stop.abort();
  }
}

async function refusal(answer) {
  try {
    return (await answer.json()).error;
  } catch {
    return `the daemon answered ${answer.status}`;
  }
}

function join(a, b) {
  if (!a.length) return b;
  const both = new Uint8Array(a.length + b.length);
  both.set(a);
  both.set(b, a.length);
  return both;
}

function deliver(data, on) {
  let at = 0;
  while (data.length - at >= 8) {
    const head = new DataView(data.buffer, data.byteOffset + at, 8);
    const length = head.getUint32(4, true);
    if (data.length - at - 8 < length) break;
    const handler = on[head.getUint8(0)];
    if (handler) handler(new DataView(data.buffer, data.byteOffset + at + 8, length));
    at += 8 + length;
  }
  return data.subarray(at);
}

/** The JSON value of a frame. */
export function json(view) {
  return JSON.parse(new TextDecoder().decode(view));
}
