// Where each expert stands: one pixel per expert in a small image, and its place on the screen under zoom and pan.

export const PLACES = ["on no working drive", "on one drive", "on several drives", "in RAM", "being read"];
export const IN_RAM = 3;
const BEING_READ = 4;
const FLASH_MS = 450;
const FULL_FLASH_AFTER_MS = 900; // an expert that is used all the time flashes less, or its colour could not be seen
const LEAST_FLASH = 0.12;
const MOST_FLASH = 0.85;
const LEAST_SHARE = 0.3; // of a place's colour that an expert without any heat keeps
const MOST_CELL = 40;
const MOST_STRETCH = 3;

/** The state of every expert, by flat number, and the image of it. */
export class Cells {
  constructor() {
    this.layers = [];
    this.total = 0;
    this.flashing = new Set();
  }

  /** Takes a snapshot frame. */
  load(view) {
    const count = view.getUint32(0, true);
    this.layers = [];
    let start = 0;
    for (let row = 0; row < count; row += 1) {
      const experts = view.getUint32(8 + 8 * row, true);
      this.layers.push({ number: view.getUint32(4 + 8 * row, true), experts, start });
      start += experts;
    }
    const same = this.total === start;
    this.total = start;
    const at = view.byteOffset + 4 + 8 * count;
    this.places = new Uint8Array(view.buffer.slice(at, at + start));
    this.heat = new Uint8Array(view.buffer.slice(at + start, at + 2 * start));
    if (!same) {
      this.usedAt = new Float64Array(start);
      this.uses = new Uint32Array(start);
      this.flash = new Float32Array(start);
    }
    this.columns = Math.max(...this.layers.map((layer) => layer.experts));
    this.image = new OffscreenCanvas(this.columns, this.layers.length);
    this.pixels = new ImageData(this.columns, this.layers.length);
    this.flashing.clear();
  }

  /** Takes a frame of changes; experts that were used begin to flash. */
  change(view, now) {
    const moved = view.getUint32(0, true);
    const used = view.getUint32(4, true);
    const changed = [];
    for (let i = 0; i < moved; i += 1) {
      const word = view.getUint32(8 + 4 * i, true);
      this.places[word & 0xffffff] = word >>> 24;
      changed.push(word & 0xffffff);
    }
    for (let i = 0; i < used; i += 1) {
      const word = view.getUint32(8 + 4 * (moved + i), true);
      const flat = word & 0xffffff;
      const rested = Math.min(1, (now - this.usedAt[flat]) / FULL_FLASH_AFTER_MS);
      this.flash[flat] = LEAST_FLASH + (MOST_FLASH - LEAST_FLASH) * rested;
      this.usedAt[flat] = now;
      this.uses[flat] += word >>> 24;
      this.flashing.add(flat);
    }
    return changed;
  }

  /** Row and column of an expert. */
  at(flat) {
    let row = this.layers.length - 1;
    while (this.layers[row].start > flat) row -= 1;
    return [row, flat - this.layers[row].start];
  }

  /** Flat number by row and column; -1 if there is none. */
  flat(row, column) {
    const layer = this.layers[row];
    return layer && column >= 0 && column < layer.experts ? layer.start + column : -1;
  }

  /** Counts experts by place. */
  counts() {
    const counts = PLACES.map(() => 0);
    for (const place of this.places) counts[place] += 1;
    return counts;
  }

  /** Paints one expert into the image's pixels. */
  paint(flat, row, column, theme, now) {
    const base = theme.places[this.places[flat]];
    const coming = this.places[flat] === BEING_READ;
    const share = coming ? 1 : LEAST_SHARE + (1 - LEAST_SHARE) * (this.heat[flat] / 255);
    const since = now - this.usedAt[flat];
    const flash = this.usedAt[flat] > 0 && since < FLASH_MS ? this.flash[flat] * (1 - since / FLASH_MS) : 0;
    const out = 4 * (row * this.columns + column);
    for (let c = 0; c < 3; c += 1) {
      const steady = theme.ground[c] + (base[c] - theme.ground[c]) * share;
      this.pixels.data[out + c] = steady + (theme.flash[c] - steady) * flash;
    }
    this.pixels.data[out + 3] = 255;
    return flash > 0;
  }

  /** Paints all experts. */
  paintAll(theme, now) {
    this.layers.forEach((layer, row) => {
      for (let column = 0; column < layer.experts; column += 1) {
        this.paint(layer.start + column, row, column, theme, now);
      }
    });
    this.image.getContext("2d").putImageData(this.pixels, 0, 0);
  }

  /** Paints what flashes and what changed; returns whether anything did. */
  paintSome(changed, theme, now) {
    if (!changed.length && !this.flashing.size) return false;
    for (const flat of changed) this.paint(flat, ...this.at(flat), theme, now);
    for (const flat of this.flashing) {
      if (!this.paint(flat, ...this.at(flat), theme, now)) this.flashing.delete(flat);
    }
    this.image.getContext("2d").putImageData(this.pixels, 0, 0);
    return true;
  }
}

/** The part of the image that is shown: zoom 1 shows all of it. */
export class Lens {
  constructor() {
    this.zoom = 1;
    this.left = 0;
    this.top = 0;
  }

  /** Fits the image of so many cells into a screen of so many pixels. */
  fit(width, height, columns, rows) {
    Object.assign(this, { width, height, columns, rows });
    let cellWidth = Math.min(width / columns, MOST_CELL);
    let cellHeight = Math.min(height / rows, MOST_CELL);
    cellWidth = Math.min(cellWidth, cellHeight * MOST_STRETCH);
    cellHeight = Math.min(cellHeight, cellWidth * MOST_STRETCH);
    this.base = [cellWidth, cellHeight];
    this.clamp();
  }

  get cell() {
    return [this.base[0] * this.zoom, this.base[1] * this.zoom];
  }

  /** Upper left corner of a cell on the screen. */
  corner(row, column) {
    const [w, h] = this.cell;
    return [column * w - this.left, row * h - this.top];
  }

  /** Row and column under a point of the screen. */
  under(x, y) {
    const [w, h] = this.cell;
    return [Math.floor((y + this.top) / h), Math.floor((x + this.left) / w)];
  }

  /** Zooms by a factor, keeping the point (x, y) of the screen in place. */
  zoomBy(factor, x, y) {
    const zoom = Math.min(Math.max(this.zoom * factor, 1), 60);
    const ratio = zoom / this.zoom;
    this.left = (this.left + x) * ratio - x;
    this.top = (this.top + y) * ratio - y;
    this.zoom = zoom;
    this.clamp();
  }

  moveBy(x, y) {
    this.left -= x;
    this.top -= y;
    this.clamp();
  }

  /** Moves so that the cell is on the screen. */
  show(row, column) {
    const [w, h] = this.cell;
    const [x, y] = this.corner(row, column);
    if (x < 0 || x + w > this.width) this.left += x - (this.width - w) / 2;
    if (y < 0 || y + h > this.height) this.top += y - (this.height - h) / 2;
    this.clamp();
  }

  clamp() {
    const [w, h] = this.cell;
    const spareX = this.width - w * this.columns;
    const spareY = this.height - h * this.rows;
    this.left = spareX >= 0 ? -spareX / 2 : Math.min(Math.max(this.left, 0), -spareX);
    this.top = spareY >= 0 ? -spareY / 2 : Math.min(Math.max(this.top, 0), -spareY);
  }
}
