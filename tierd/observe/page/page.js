// Puts the page together: the stream's frames go to the map, the charts and the tables.

import { Brain } from "./brain.js";
import { bytes, Charts, Past } from "./charts.js";
import { follow, json } from "./stream.js";

const by = (id) => document.getElementById(id);
const whole = new Intl.NumberFormat("en");
const brain = new Brain(by("cells"), by("tip"), by("said"));
const past = new Past();
const charts = new Charts(by("charts"), past);
let boot = "";

function say(id, text) {
  if (by(id).textContent !== text) by(id).textContent = text;
}

function state(name, why = "") {
  const words = { live: "live", gone: "not connected", waiting: "connecting" };
  by("link").dataset.state = name;
  say("link", words[name]);
  const gone = name === "gone";
  document.body.toggleAttribute("data-stale", gone);
  by("notice").hidden = !gone;
  if (gone) say("notice", `No data: ${why}. What you see is old. Trying again …`);
}

function live(now) {
  const { facts, counters } = now;
  if (now.boot_id !== boot) {
    boot = now.boot_id;
    document.title = `tierd · ${facts.store}`;
    say("about", `${facts.store} · ${facts.model} · ${facts.layers} layers, ${whole.format(facts.experts)} experts, `
      + `${facts.format} · ${bytes(facts.experts_bytes)} of experts · version ${facts.version}`);
  }
  past.add(now.time, counters);
  numbers(counters);
  tiers(now);
  drives(now.drives);
  sessions(now.sessions, now.steps);
  const counts = brain.cells.total ? brain.cells.counts() : null;
  ["nowhere", "drive", "drives", "ram", "reading"].forEach((name, place) => counts && say(`c-${name}`, whole.format(counts[place])));
  charts.draw();
}

function numbers(counters) {
  const rate = (value, text) => (value === null ? "–" : text(value));
  say("n-steps", rate(past.recent("steps"), (v) => v.toFixed(1)));
  say("n-hits", rate(past.recent("hits", 3, "requests"), (v) => `${(100 * v).toFixed(0)} %`));
  say("n-hits-note", `of the experts asked for; ${whole.format(counters.requests)} so far`);
  say("n-bytes", rate(past.recent("read_bytes"), (v) => `${bytes(v)}/s`));
  say("n-bytes-note", `${bytes(counters.read_bytes)} so far`);
  say("n-wait", rate(past.recent("wait_seconds"), (v) => `${v.toFixed(2)} s`));
  const hinted = counters.prefetch_used + counters.prefetch_late + counters.prefetch_wasted;
  say("n-prefetch", hinted ? rate(past.recent("prefetch_used"), (v) => `${v.toFixed(1)}/s`) : "–");
  if (hinted) {
    say("n-prefetch-note", `${whole.format(counters.prefetch_used)} used, ${whole.format(counters.prefetch_late)} late, `
      + `${whole.format(counters.prefetch_wasted)} wasted`);
  }
}

function bar(title, note, parts) {
  const tier = document.createElement("div");
  tier.className = "tier";
  const words = document.createElement("p");
  const left = document.createElement("span");
  const right = document.createElement("span");
  left.textContent = title;
  right.textContent = note;
  right.className = "note";
  words.append(left, right);
  const strip = document.createElement("div");
  strip.className = "bar";
  strip.setAttribute("role", "img");
  strip.setAttribute("aria-label", `${title}: ${note}`);
  const total = parts.reduce((sum, [, size]) => sum + size, 0) || 1;
  for (const [kind, size] of parts) {
    const piece = document.createElement("i");
    piece.className = kind;
    piece.style.width = `${(100 * size) / total}%`;
    strip.append(piece);
  }
  tier.append(words, strip);
  return tier;
}

function tiers({ arena, facts, drives: all }) {
  const used = arena.slots_ready * arena.slot_bytes;
  const free = Math.max(0, arena.bytes - used);
  const rows = [bar(
    `RAM · ${bytes(arena.bytes)} for experts`,
    `${whole.format(arena.slots_ready)} of ${whole.format(arena.slots)} slots hold an expert, `
      + `${whole.format(arena.slots_granted)} in use, ${bytes(arena.huge_page_bytes)} on large pages`,
    [["ram", used], ["free", free]],
  )];
  for (const drive of all) {
    const share = drive.shards_total ? drive.shards.length / drive.shards_total : 0;
    const kind = drive.up ? (all.filter((one) => one.up).length > 1 ? "drives" : "drive") : "nowhere";
    rows.push(bar(
      `${drive.name} · ${drive.directory}`,
      `${drive.shards.length} of ${drive.shards_total} shards, about ${bytes(share * facts.experts_bytes)}`,
      [[kind, share], ["free", 1 - share]],
    ));
  }
  by("tiers").replaceChildren(...rows);
}

function fill(id, rows, empty) {
  const body = by(id).tBodies[0];
  const columns = by(id).tHead.rows[0].cells.length;
  const made = rows.map((cells) => {
    const row = document.createElement("tr");
    for (const cell of cells) {
      const [text, kind] = Array.isArray(cell) ? cell : [cell, ""];
      row.append(Object.assign(document.createElement("td"), { textContent: text, className: kind }));
    }
    return row;
  });
  if (!rows.length) {
    const row = document.createElement("tr");
    row.append(Object.assign(document.createElement("td"), { textContent: empty, colSpan: columns, className: "note" }));
    made.push(row);
  }
  body.replaceChildren(...made);
}

function drives(all) {
  fill("drives", all.map((drive) => [
    drive.name,
    [drive.state, drive.state === "up" ? "" : "bad"],
    whole.format(drive.reads),
    bytes(drive.bytes),
    `${bytes(drive.bandwidth)}/s`,
    whole.format(drive.in_flight),
    [whole.format(drive.errors), drive.errors ? "bad" : ""],
    drive.direct ? "direct" : "through the page cache",
  ]), "no drive");
}

function sessions(all, steps) {
  fill("sessions", all.map((node) => [
    String(node.id), node.name, whole.format(steps[node.id] ?? 0), whole.format(node.requests),
    whole.format(node.grants), node.attached ? "attached" : "no",
  ]), "No compute node is connected.");
}

by("pause").addEventListener("click", () => {
  brain.paused = !brain.paused;
  brain.repaint = true;
  by("pause").setAttribute("aria-pressed", String(brain.paused));
  say("pause", brain.paused ? "Go on" : "Pause");
});
by("zoom-in").addEventListener("click", () => brain.zoom(1.5));
by("zoom-out").addEventListener("click", () => brain.zoom(1 / 1.5));
by("zoom-fit").addEventListener("click", () => brain.fit());
by("search").addEventListener("submit", (event) => event.preventDefault());
by("find").addEventListener("input", (event) => brain.search(event.target.value));

// For whoever looks inside: the map, as it is.
globalThis.tierd = { brain, past };

follow("/page/stream", {
  1: (view) => { state("live"); brain.load(view); },
  2: (view) => brain.change(view),
  3: (view) => brain.warm(view),
  4: (view) => live(json(view)),
  5: (view) => past.load(json(view)),
  state,
});
