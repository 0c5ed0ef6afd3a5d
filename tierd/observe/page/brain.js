// The map of all experts: draws the cells, and answers pointer, keys and search.

import { Cells, IN_RAM, Lens, PLACES } from "./cells.js";

const GRID_FROM = 7; // pixels of a cell from which lines stand between cells

export class Brain {
  constructor(canvas, tip, said) {
    Object.assign(this, { canvas, tip, said });
    this.cells = new Cells();
    this.lens = new Lens();
    this.paused = false;
    this.frames = 0; // drawn since the page was opened
    this.chosen = -1; // by keys or search
    this.row = -1; // a layer that was searched for
    this.changed = [];
    this.redraw = true;
    this.repaint = true;
    this.readTheme();
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.readTheme());
    addEventListener("resize", () => this.resize());
    this.listen();
    const frame = (now) => {
      this.draw(performance.timeOrigin + now);
      requestAnimationFrame(frame);
    };
    requestAnimationFrame(frame);
  }

  load(view) {
    this.cells.load(view);
    this.resize();
    this.repaint = true;
  }

  change(view) {
    this.changed.push(...this.cells.change(view, Date.now()));
  }

  warm(view) {
    this.cells.heat = new Uint8Array(view.buffer.slice(view.byteOffset, view.byteOffset + view.byteLength));
    this.repaint = true;
  }

  readTheme() {
    const style = getComputedStyle(document.documentElement);
    const colour = (name) => rgb(style.getPropertyValue(name));
    this.theme = {
      places: [colour("--nowhere"), colour("--drive"), colour("--drives"), colour("--ram"), colour("--reading")],
      ground: colour("--ground"),
      flash: colour("--flash"),
      accent: style.getPropertyValue("--ink"),
    };
    this.repaint = true;
  }

  /** Makes the canvas as high as the map needs, and no higher than the style sheet says. */
  resize() {
    const { cells, lens } = this;
    if (cells.total) {
      this.canvas.style.height = "";
      const most = this.canvas.getBoundingClientRect();
      lens.fit(most.width, most.height, cells.columns, cells.layers.length);
      this.canvas.style.height = `${Math.ceil(Math.min(most.height, lens.base[1] * cells.layers.length))}px`;
    }
    const box = this.canvas.getBoundingClientRect();
    const scale = Math.min(devicePixelRatio || 1, 2);
    this.canvas.width = Math.max(1, Math.round(box.width * scale));
    this.canvas.height = Math.max(1, Math.round(box.height * scale));
    this.scale = scale;
    if (cells.total) lens.fit(box.width, box.height, cells.columns, cells.layers.length);
    this.redraw = true;
  }

  draw(now) {
    if (!this.cells.total || this.paused || document.hidden) return;
    if (this.repaint) {
      this.cells.paintAll(this.theme, now);
      this.repaint = false;
      this.changed.length = 0;
      this.redraw = true;
    }
    if (this.cells.paintSome(this.changed, this.theme, now)) this.redraw = true;
    this.changed.length = 0;
    if (this.redraw) this.blit();
    this.frames += 1;
  }

  blit() {
    this.redraw = false;
    const context = this.canvas.getContext("2d");
    const { lens, cells } = this;
    const [w, h] = lens.cell;
    context.setTransform(this.scale, 0, 0, this.scale, 0, 0);
    context.clearRect(0, 0, lens.width, lens.height);
    context.imageSmoothingEnabled = false;
    context.drawImage(cells.image, -lens.left, -lens.top, w * cells.columns, h * cells.layers.length);
    if (Math.min(w, h) >= GRID_FROM) this.lines(context, w, h);
    if (this.row >= 0) this.frame(context, this.row, 0, cells.layers[this.row].experts);
    if (this.chosen >= 0) this.frame(context, ...cells.at(this.chosen), 1);
  }

  lines(context, w, h) {
    const { lens } = this;
    context.beginPath();
    for (let x = -lens.left; x <= lens.width; x += w) {
      context.moveTo(x, 0);
      context.lineTo(x, lens.height);
    }
    for (let y = -lens.top; y <= lens.height; y += h) {
      context.moveTo(0, y);
      context.lineTo(lens.width, y);
    }
    context.strokeStyle = `rgb(${this.theme.ground.join(" ")})`;
    context.lineWidth = Math.min(2, Math.min(w, h) / 8);
    context.stroke();
  }

  frame(context, row, column, columns) {
    const [w, h] = this.lens.cell;
    const [x, y] = this.lens.corner(row, column);
    context.strokeStyle = this.theme.accent;
    context.lineWidth = 2;
    context.strokeRect(x - 1, y - 1, w * columns + 2, h + 2);
  }

  // What a person does.

  listen() {
    const { canvas } = this;
    const fingers = new Map();
    canvas.addEventListener("pointerdown", (event) => {
      fingers.set(event.pointerId, event);
      canvas.setPointerCapture(event.pointerId);
    });
    canvas.addEventListener("pointermove", (event) => {
      const before = fingers.get(event.pointerId);
      if (before && fingers.size === 2) this.pinch(fingers, event);
      else if (before && this.lens.zoom > 1) this.lens.moveBy(event.clientX - before.clientX, event.clientY - before.clientY);
      if (before) fingers.set(event.pointerId, event);
      this.redraw = true;
      this.hover(event.offsetX, event.offsetY);
    });
    for (const name of ["pointerup", "pointercancel", "pointerleave"]) {
      canvas.addEventListener(name, (event) => {
        fingers.delete(event.pointerId);
        if (name !== "pointerup") this.tip.hidden = true;
      });
    }
    canvas.addEventListener("wheel", (event) => {
      event.preventDefault();
      this.zoom(event.deltaY < 0 ? 1.25 : 0.8, event.offsetX, event.offsetY);
    }, { passive: false });
    canvas.addEventListener("keydown", (event) => this.key(event));
  }

  pinch(fingers, event) {
    const [other] = [...fingers.values()].filter((finger) => finger.pointerId !== event.pointerId);
    const before = fingers.get(event.pointerId);
    const distance = (a) => Math.hypot(a.clientX - other.clientX, a.clientY - other.clientY) || 1;
    this.lens.zoomBy(distance(event) / distance(before), event.offsetX, event.offsetY);
  }

  zoom(factor, x = this.lens.width / 2, y = this.lens.height / 2) {
    if (!this.cells.total) return;
    this.lens.zoomBy(factor, x, y);
    this.redraw = true;
  }

  hover(x, y) {
    if (!this.cells.total) return;
    const flat = this.cells.flat(...this.lens.under(x, y));
    this.tip.hidden = flat < 0;
    if (flat < 0) return;
    const [name, ...facts] = this.describe(flat);
    this.tip.replaceChildren(Object.assign(document.createElement("b"), { textContent: name }), facts.join(" · "));
    const left = Math.min(x + 14, this.lens.width - this.tip.offsetWidth);
    this.tip.style.transform = `translate(${Math.max(0, left)}px, ${y + 16}px)`;
    this.tip.style.left = this.tip.style.top = "0";
  }

  key(event) {
    if (!this.cells.total) return;
    const steps = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };
    if (steps[event.key]) {
      const [row, column] = this.chosen < 0 ? [0, 0] : this.cells.at(this.chosen);
      const [down, right] = this.chosen < 0 ? [0, 0] : steps[event.key];
      const next = this.cells.flat(row + down, column + right);
      if (next >= 0) this.choose(next);
    } else if (event.key === "+" || event.key === "=") this.zoom(1.5);
    else if (event.key === "-") this.zoom(1 / 1.5);
    else if (event.key === "0") this.fit();
    else if (event.key === " ") document.getElementById("pause").click();
    else if (event.key === "Escape") this.clear();
    else return;
    event.preventDefault();
  }

  fit() {
    this.zoom(1e-9);
  }

  clear() {
    this.chosen = this.row = -1;
    this.said.textContent = " ";
    this.redraw = true;
  }

  choose(flat) {
    this.chosen = flat;
    this.row = -1;
    this.lens.show(...this.cells.at(flat));
    this.said.textContent = this.describe(flat).join(" · ");
    this.redraw = true;
  }

  /** Finds "layer" or "layer expert"; says so when there is none. */
  search(text) {
    this.clear();
    const numbers = text.match(/\d+/g)?.map(Number) ?? [];
    if (!numbers.length || !this.cells.total) return;
    const row = this.cells.layers.findIndex((layer) => layer.number === numbers[0]);
    const flat = this.cells.flat(row, numbers[1] ?? 0);
    if (row < 0) this.said.textContent = `There is no layer ${numbers[0]} with experts.`;
    else if (numbers.length > 1 && flat < 0) this.said.textContent = `Layer ${numbers[0]} has no expert ${numbers[1]}.`;
    else if (numbers.length > 1) {
      const [w] = this.lens.cell;
      if (w < 12) this.lens.zoomBy(12 / w, 0, 0);
      this.choose(flat);
    } else {
      this.row = row;
      this.lens.show(row, 0);
      this.said.textContent = this.describeLayer(row);
    }
    this.redraw = true;
  }

  describe(flat) {
    const { cells } = this;
    const [row, column] = cells.at(flat);
    const ago = (Date.now() - cells.usedAt[flat]) / 1000;
    const last = cells.usedAt[flat] ? `last used ${ago < 10 ? ago.toFixed(1) : Math.round(ago)} s ago` : "not used since the page was opened";
    return [
      `layer ${cells.layers[row].number}, expert ${column}`,
      PLACES[cells.places[flat]],
      `heat ${Math.round((cells.heat[flat] / 255) * 100)} of 100`,
      last,
    ];
  }

  describeLayer(row) {
    const { number, experts, start } = this.cells.layers[row];
    const here = this.cells.places.subarray(start, start + experts).filter((place) => place === IN_RAM).length;
    return `layer ${number} · ${here} of ${experts} experts in RAM`;
  }
}

function rgb(text) {
  const context = new OffscreenCanvas(1, 1).getContext("2d");
  context.fillStyle = text.trim();
  context.fillRect(0, 0, 1, 1);
  return [...context.getImageData(0, 0, 1, 1).data.slice(0, 3)];
}
