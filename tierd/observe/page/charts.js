// Small charts of rates over the last ten minutes, from counters that only rise.

const SECONDS = 600;

export const CHARTS = [
  { name: "steps per second", of: ["steps"], text: (v) => v.toFixed(1) },
  { name: "found in RAM", of: ["hits"], over: "requests", text: (v) => `${(100 * v).toFixed(0)} %`, most: 1 },
  { name: "read from drives", of: ["read_bytes"], text: (v) => `${bytes(v)}/s` },
  { name: "waited for drives", of: ["wait_seconds"], text: (v) => `${v.toFixed(2)} s/s` },
  { name: "prefetched in time", of: ["prefetch_used"], text: (v) => `${v.toFixed(1)}/s` },
  { name: "left RAM", of: ["evictions"], text: (v) => `${v.toFixed(1)}/s` },
];

export function bytes(count) {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let unit = 0;
  for (; count >= 1000 && unit < units.length - 1; unit += 1) count /= 1000;
  return `${count < 10 && unit ? count.toFixed(2) : count < 100 && unit ? count.toFixed(1) : Math.round(count)} ${units[unit]}`;
}

/** Samples of counters; both what came with the page's start and what came since. */
export class Past {
  constructor() {
    this.rows = [];
  }

  load(columns) {
    this.rows = (columns.time ?? []).map((time, i) =>
      Object.fromEntries(Object.entries(columns).map(([name, values]) => [name, name === "time" ? time : values[i]])));
  }

  add(time, counters) {
    const last = this.rows.at(-1);
    // A daemon that began anew counts from zero, and a clock may be set back.
    if (last && (last.requests > counters.requests || last.time > time)) this.rows = [];
    this.rows.push({ time, ...counters });
    while (this.rows.length && this.rows[0].time < time - SECONDS) this.rows.shift();
  }

  /** Points [time, rate] of a chart. */
  rates(chart) {
    const points = [];
    for (let i = 1; i < this.rows.length; i += 1) {
      const [a, b] = [this.rows[i - 1], this.rows[i]];
      const rise = chart.of.reduce((sum, name) => sum + b[name] - a[name], 0);
      const per = chart.over ? b[chart.over] - a[chart.over] : b.time - a.time;
      if (b.time > a.time && (per > 0 || !chart.over)) points.push([b.time, rise / per]);
    }
    return points;
  }

  /** A rate over about the last `seconds`; null while nothing is known. */
  recent(of, seconds = 3, over = null) {
    const last = this.rows.at(-1);
    const first = this.rows.find((row) => last && row.time >= last.time - seconds - 0.5);
    if (!last || first === last) return null;
    const per = over ? last[over] - first[over] : last.time - first.time;
    return per > 0 ? (last[of] - first[of]) / per : null;
  }
}

export class Charts {
  constructor(root, past) {
    this.past = past;
    this.parts = CHARTS.map((chart) => {
      const figure = document.createElement("div");
      figure.className = "chart";
      const title = document.createElement("h3");
      const value = document.createElement("span");
      title.append(chart.name, value);
      const canvas = document.createElement("canvas");
      canvas.setAttribute("role", "img");
      figure.append(title, canvas);
      root.append(figure);
      return { chart, value, canvas };
    });
  }

  draw() {
    const style = getComputedStyle(document.documentElement);
    for (const { chart, value, canvas } of this.parts) {
      const points = this.past.rates(chart);
      const most = chart.most ?? Math.max(1e-9, ...points.map(([, rate]) => rate));
      const last = points.at(-1)?.[1];
      value.textContent = last === undefined ? "no data yet" : chart.text(last);
      canvas.setAttribute("aria-label", `${chart.name}: ${value.textContent}, at most ${chart.text(most)} in ten minutes`);
      plot(canvas, points, most, points.length ? chart.text(most) : "", style);
    }
  }
}

function plot(canvas, points, most, top, style) {
  const box = canvas.getBoundingClientRect();
  const scale = Math.min(devicePixelRatio || 1, 2);
  canvas.width = Math.max(1, box.width * scale);
  canvas.height = Math.max(1, box.height * scale);
  const context = canvas.getContext("2d");
  context.scale(scale, scale);
  const [width, height, foot] = [box.width, box.height - 16, 3];
  context.strokeStyle = style.getPropertyValue("--line");
  context.strokeRect(0.5, 0.5, width - 1, height - 1);
  context.fillStyle = style.getPropertyValue("--quiet");
  context.font = "11px system-ui, sans-serif";
  context.fillText("10 min ago", 0, box.height - 3);
  context.textAlign = "right";
  context.fillText("now", width, box.height - 3);
  context.fillText(top, width - 5, 13);
  if (!points.length) return;
  const end = points.at(-1)[0];
  const x = (time) => width * (1 - (end - time) / SECONDS);
  const y = (rate) => height - foot - (height - foot - 16) * Math.min(1, Math.max(0, rate / most));
  context.beginPath();
  points.forEach(([time, rate], i) => context[i ? "lineTo" : "moveTo"](x(time), y(rate)));
  context.strokeStyle = style.getPropertyValue("--accent");
  context.lineWidth = 1.6;
  context.lineJoin = "round";
  context.stroke();
  context.lineTo(x(end), height - 1);
  context.lineTo(x(points[0][0]), height - 1);
  context.globalAlpha = 0.12;
  context.fillStyle = style.getPropertyValue("--accent");
  context.fill();
}
