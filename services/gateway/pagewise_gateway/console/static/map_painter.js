// Draws one map on a canvas. It draws when the map has changed, and for less than a second after that while changes flash.

import { changeKind, layOut } from "./map_layout.js";
import { colours, flashColour, isNeutral, theme } from "./palette.js";

const FLASH = 900; // ms
const FRAME = 60; // ms between pictures of a flash: the eye needs no more, and two cores may be all there are

const calm = matchMedia("(prefers-reduced-motion: reduce)");

export class MapPainter {
  map = null;
  grid = null;
  cursor = -1;
  changes = {};
  #canvas;
  #base = document.createElement("canvas");
  #flashes = new Map(); // cell of the map -> {kind, since}
  #timer = 0;
  #size = [0, 0];
  #shown = "";

  constructor(canvas) {
    this.#canvas = canvas;
  }

  /** Show a map, of it the blocks of `view`, in `width` × `height` pixels, squares of at most `largest`. */
  show(map, view, width, height, largest, cursor) {
    const shown = [view.first, view.count, width, height, largest, theme(), devicePixelRatio].join();
    if (map === this.map && shown === this.#shown) {
      if (cursor !== this.cursor) {
        this.cursor = cursor;
        this.#frame();
      }
      return;
    }
    this.cursor = cursor;
    this.#shown = shown;
    if (map !== this.map) this.#compare(map);
    this.map = map;
    const perCell = Math.max(map.blocks_per_cell, 1);
    this.grid = layOut(width, height, view.first, view.count, perCell, largest);
    this.#resize(width, this.grid.height);
    this.#paintBase();
    this.#frame();
  }

  /** The first block of the cell at a place of the canvas, -1 outside. */
  blockAt(x, y) {
    const { grid } = this;
    if (!grid) return -1;
    const column = Math.floor(x / grid.pitch);
    if (column < 0 || column >= grid.columns || y < 0) return -1;
    const cell = Math.floor(y / grid.pitch) * grid.columns + column;
    return cell < grid.cells ? grid.first + cell * grid.perCell : -1;
  }

  close() {
    clearTimeout(this.#timer);
  }

  #compare(map) {
    const old = this.map;
    this.changes = {};
    const same =
      old &&
      old.executor_id === map.executor_id &&
      old.tier === map.tier &&
      old.colour === map.colour &&
      old.first === map.first &&
      old.blocks_per_cell === map.blocks_per_cell &&
      old.cells.length === map.cells.length;
    if (!same) {
      this.#flashes.clear();
      return;
    }
    const labels = new Map(map.legend);
    const oldLabels = new Map(old.legend);
    const now = performance.now();
    for (let at = 0; at < map.cells.length; at += 2) {
      const before = oldLabels.get(old.cells[at]);
      const after = labels.get(map.cells[at]);
      if (before === after) continue;
      const kind = map.colour === "state" ? changeKind(before, after) : "changed";
      this.changes[kind] = (this.changes[kind] ?? 0) + map.blocks_per_cell;
      this.#flashes.set(at / 2, { kind, since: now });
    }
  }

  #resize(width, height) {
    const scale = Math.min(devicePixelRatio || 1, 2);
    if (this.#size[0] === width && this.#size[1] === height && this.#size[2] === scale) return;
    this.#size = [width, height, scale];
    for (const canvas of [this.#canvas, this.#base]) {
      canvas.width = Math.round(width * scale);
      canvas.height = Math.round(height * scale);
    }
    this.#canvas.style.width = `${width}px`;
    this.#canvas.style.height = `${height}px`;
  }

  #context(canvas) {
    const context = canvas.getContext("2d");
    context.setTransform(this.#size[2], 0, 0, this.#size[2], 0, 0);
    return context;
  }

  #paintBase() {
    const { map, grid } = this;
    const context = this.#context(this.#base);
    context.clearRect(0, 0, this.#size[0], this.#size[1]);
    const palette = colours(map.colour, map.legend);
    const labels = new Map(map.legend);
    const [empty] = [...map.legend].filter(([, label]) => isNeutral(label)).map(([index]) => palette.get(index));
    const gap = grid.pitch >= 7 ? 1 : grid.pitch >= 5 ? 0.5 : 0;
    const side = grid.pitch - gap;
    const radius = grid.pitch >= 12 ? 2 : 0;
    for (let cell = 0; cell < grid.cells; cell += 1) {
      const at = cellIndex(map, grid.first + cell * grid.perCell);
      if (at === undefined) continue;
      const index = map.cells[2 * at];
      const share = map.cells[2 * at + 1] / 255;
      const x = (cell % grid.columns) * grid.pitch;
      const y = Math.floor(cell / grid.columns) * grid.pitch;
      // A cell of several blocks is as full as the share of the state that most of them have.
      context.fillStyle = empty ?? "#8884";
      if (share < 0.99) square(context, x, y, side, side, radius);
      context.fillStyle = palette.get(index) ?? "#888";
      context.globalAlpha = share < 0.99 ? 0.35 + 0.65 * share : 1;
      square(context, x, y, side, side, radius);
      context.globalAlpha = 1;
      if (grid.pitch >= 8) pattern(context, labels.get(index), x, y, side);
      if (grid.pitch >= 34 && grid.perCell === 1) number(context, grid.first + cell, x, y, side, isNeutral(labels.get(index) ?? ""));
    }
  }

  #frame() {
    clearTimeout(this.#timer);
    const context = this.#context(this.#canvas);
    const now = performance.now();
    context.clearRect(0, 0, this.#size[0], this.#size[1]);
    context.drawImage(this.#base, 0, 0, this.#size[0], this.#size[1]);
    for (const [at, flash] of this.#flashes) {
      const age = (now - flash.since) / FLASH;
      if (age >= 1) this.#flashes.delete(at);
      else this.#drawFlash(context, at, flash.kind, calm.matches ? 0 : age);
    }
    this.#drawCursor(context);
    if (this.#flashes.size && !document.hidden) this.#timer = setTimeout(() => this.#frame(), calm.matches ? FLASH : FRAME);
  }

  #drawFlash(context, at, kind, age) {
    const place = this.#place(this.map.first + at * this.map.blocks_per_cell);
    if (!place) return;
    const [x, y] = place;
    const side = this.grid.pitch - (this.grid.pitch >= 7 ? 1 : 0);
    context.globalAlpha = 1 - age;
    context.fillStyle = context.strokeStyle = flashColour(kind);
    const width = Math.max(1.5, Math.min(3, side / 5));
    if (side < 7) context.fillRect(x, y, side, side);
    else {
      context.globalAlpha = 0.12 * (1 - age);
      context.fillRect(x, y, side, side);
      context.globalAlpha = 1 - age;
      context.lineWidth = width;
      context.strokeRect(x + width / 2, y + width / 2, side - width, side - width);
    }
    context.globalAlpha = 1;
  }

  #drawCursor(context) {
    const place = this.cursor >= 0 ? this.#place(this.cursor) : undefined;
    if (!place) return;
    const side = this.grid.pitch;
    context.lineWidth = 4;
    context.strokeStyle = flashColour("taken") === "#ffffff" ? "#000000" : "#ffffff";
    context.strokeRect(place[0] - 1, place[1] - 1, side + 1, side + 1);
    context.lineWidth = 2;
    context.strokeStyle = flashColour("taken");
    context.strokeRect(place[0] - 1, place[1] - 1, side + 1, side + 1);
  }

  #place(block) {
    const { grid } = this;
    const cell = Math.floor((block - grid.first) / grid.perCell);
    if (cell < 0 || cell >= grid.cells) return undefined;
    return [(cell % grid.columns) * grid.pitch, Math.floor(cell / grid.columns) * grid.pitch];
  }
}

function cellIndex(map, block) {
  const at = Math.floor((block - map.first) / map.blocks_per_cell);
  return at >= 0 && 2 * at < map.cells.length ? at : undefined;
}

function square(context, x, y, width, height, radius) {
  if (!radius) {
    context.fillRect(x, y, width, height);
    return;
  }
  context.beginPath();
  context.roundRect(x, y, width, height, radius);
  context.fill();
}

/** The block's id, where there is room for it. */
function number(context, block, x, y, side, onEmpty) {
  context.fillStyle = onEmpty && theme() === "dark" ? "#9fadc2" : "#10151f";
  context.font = "11px ui-monospace, monospace";
  context.fillText(String(block), x + 3, y + side - 4, side - 5);
}

/** Rare states are told by more than their colour: lent blocks by a stripe, copies by a dot. */
function pattern(context, label, x, y, side) {
  if (label !== "lent" && label !== "copying") return;
  context.save();
  context.beginPath();
  context.rect(x, y, side, side);
  context.clip();
  context.strokeStyle = context.fillStyle = "rgb(255 255 255 / 85%)";
  context.lineWidth = Math.max(1, side / 8);
  context.beginPath();
  if (label === "lent") {
    context.moveTo(x, y + side);
    context.lineTo(x + side, y);
    context.stroke();
  } else {
    context.arc(x + side / 2, y + side / 2, side / 4, 0, 7);
    context.fill();
  }
  context.restore();
}
