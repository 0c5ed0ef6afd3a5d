// The conversation: it lives in this tab only, and the whole of it is sent with each message.

import { complete, reason } from "./stream.js";

const by = (id) => document.getElementById(id);
const talk = by("talk");
let messages = [];
let running = null;
let model = "";

function show(tag, parent, { kind = "", text = "" } = {}) {
  const element = document.createElement(tag);
  if (kind) element.className = kind;
  element.textContent = text;
  parent.append(element);
  return element;
}

function notice(text) {
  by("notice").hidden = !text;
  by("notice").textContent = text;
}

function atEnd() {
  return talk.scrollHeight - talk.scrollTop - talk.clientHeight < 60;
}

function toEnd(wanted) {
  if (wanted) talk.scrollTop = talk.scrollHeight;
}

function number(id) {
  const value = by(id).value.trim();
  return value === "" || Number.isNaN(Number(value)) ? undefined : Number(value);
}

function grow() {
  const area = by("message");
  area.style.height = "auto";
  area.style.height = `${area.scrollHeight + 2}px`;
}

async function connect() {
  const key = by("key").value;
  try {
    const answer = await fetch("/v1/models", { headers: key ? { Authorization: `Bearer ${key}` } : {} });
    if (answer.status === 401) {
      by("about").textContent = "an API key is needed";
      settings(true);
      by("key").focus();
      return;
    }
    if (!answer.ok) throw new Error(await reason(answer));
    const found = (await answer.json()).data[0];
    model = found.id;
    by("name").textContent = document.title = found.id;
    by("about").textContent = `${found.about.headline} · ${found.max_model_len} tokens of context`;
    notice("");
  } catch (error) {
    by("about").textContent = "not connected";
    notice(`No answer from the server: ${error.message}`);
  }
}

function settings(open) {
  by("settings").hidden = !open;
  by("toggle").setAttribute("aria-expanded", String(open));
}

function statsLine(usage, timings, seconds) {
  const parts = [];
  if (usage) parts.push(`${usage.completion_tokens} tokens`);
  if (timings?.tokens_per_second) parts.push(`${timings.tokens_per_second.toFixed(timings.tokens_per_second < 10 ? 2 : 0)} tok/s`);
  if (timings?.time_to_first_token_seconds != null) parts.push(`first token ${Math.round(1000 * timings.time_to_first_token_seconds)} ms`);
  const { hit = 0, miss = 0, joined = 0 } = timings?.experts ?? {};
  const asked = hit + miss + joined;
  if (asked) parts.push(`experts ${Math.round((100 * hit) / asked)} % in RAM, ${miss} read`);
  if (timings?.seconds) parts.push(`drive wait ${Math.round((100 * timings.wait_seconds) / timings.seconds)} %`);
  if (usage?.prompt_tokens_details?.cached_tokens) parts.push(`${usage.prompt_tokens_details.cached_tokens} of ${usage.prompt_tokens} prompt tokens reused`);
  return parts.length ? parts.join(" · ") : `stopped after ${seconds.toFixed(1)} s`;
}

function turn(role, text) {
  by("empty")?.remove();
  const element = show("article", talk, { kind: `turn ${role}` });
  element.setAttribute("aria-label", role === "user" ? "You" : "Answer");
  return { element, text: show("p", element, { kind: "text", text }) };
}

async function answer() {
  const { element, text } = turn("assistant", "");
  const system = by("system").value.trim();
  const body = {
    model,
    messages: system ? [{ role: "system", content: system }, ...messages] : messages,
    stream: true,
    stream_options: { include_usage: true },
    temperature: number("temperature"),
    max_tokens: number("limit"),
    seed: number("seed"),
  };
  const begun = performance.now();
  let [content, thoughts, usage, timings, ended] = ["", "", null, null, ""];
  let thinking = null;
  running = new AbortController();
  by("stop").hidden = false;
  by("send").hidden = true;
  try {
    for await (const chunk of complete(body, by("key").value, running.signal)) {
      const follow = atEnd();
      usage = chunk.usage ?? usage;
      timings = chunk.timings ?? timings;
      const choice = chunk.choices[0];
      ended = choice?.finish_reason ?? ended;
      const delta = choice?.delta ?? {};
      if (delta.reasoning_content) {
        if (!thinking) {
          const details = document.createElement("details");
          details.open = true;
          show("summary", details, { text: "Thoughts" });
          thinking = show("p", details);
          element.prepend(details);
        }
        thoughts += delta.reasoning_content;
        thinking.textContent = thoughts;
      }
      if (delta.content) {
        content += delta.content;
        text.textContent = content.trimStart();
      }
      toEnd(follow);
    }
    if (thinking) thinking.parentElement.open = false;
    if (!content) text.textContent = "(nothing)";
    const cut = ended === "length" ? " · cut off: the most tokens were reached" : "";
    show("p", element, { kind: "stats", text: statsLine(usage, timings) + cut });
  } catch (error) {
    const stopped = error.name === "AbortError";
    const seconds = (performance.now() - begun) / 1000;
    if (stopped) show("p", element, { kind: "stats", text: statsLine(null, null, seconds) });
    else show("p", element, { kind: "failed", text: `This did not work: ${error.message}` });
    if (error.status === 401) settings(true);
    if (!content) text.remove();
  } finally {
    running = null;
    by("stop").hidden = true;
    by("send").hidden = false;
    toEnd(true);
  }
  return content;
}

async function ask() {
  const text = by("message").value.trim();
  if (!text || running) return;
  by("message").value = "";
  grow();
  turn("user", text);
  toEnd(true);
  const kept = messages;
  messages = [...kept, { role: "user", content: text }];
  const content = await answer();
  if (content) {
    messages = [...messages, { role: "assistant", content }];
  } else {
    messages = kept;
    if (!by("message").value) by("message").value = text;
    grow();
  }
  by("message").focus();
}

by("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  ask();
});
by("message").addEventListener("input", grow);
by("message").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    ask();
  }
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") running?.abort();
});
by("stop").addEventListener("click", () => running?.abort());
by("toggle").addEventListener("click", () => settings(by("settings").hidden));
by("settings").addEventListener("submit", (event) => event.preventDefault());
by("key").addEventListener("change", () => {
  sessionStorage.setItem("key", by("key").value);
  connect();
});
by("fresh").addEventListener("click", () => {
  running?.abort();
  messages = [];
  talk.replaceChildren();
  show("p", talk, { kind: "note", text: "A new conversation. Nothing of the old one is sent." }).id = "empty";
  by("message").focus();
});
by("key").value = sessionStorage.getItem("key") ?? "";
connect();
