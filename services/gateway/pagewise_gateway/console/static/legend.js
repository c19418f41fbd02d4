// What the colours stand for, and how many blocks have each.

import { num, percent } from "./format.js";
import { ageOf, colours, isNeutral } from "./palette.js";
import { html } from "./htm-preact.js";

const MOST = 12;

const rank = ({ label }) => ageOf(label) ?? Number.MAX_SAFE_INTEGER;

const MEANING = {
  free: "holds nothing",
  cached: "a known prefix that nobody uses now",
  "in use": "held by running sequences",
  lent: "held for another executor that fetches it",
  copying: "source or target of a copy",
};

/** `maps`: those that are shown. `counts`: exact blocks by state, if the colours are states of whole device pools. */
export function Legend({ maps, counts, title }) {
  if (!maps.length) return null;
  const rows = counts ? fromCounts(maps[0], counts) : fromCells(maps);
  const total = rows.reduce((sum, { blocks }) => sum + blocks, 0) || 1;
  const shown = rows.slice(0, MOST);
  return html`<section class="panel legend" aria-label="Legend">
    <h2>${title}</h2>
    <ul>
      ${shown.map(
        ({ label, colour, blocks }) =>
          html`<li key=${label} title=${MEANING[label]}>
            <span class=${`swatch ${label.replaceAll(" ", "-")}`} style=${{ background: colour }} aria-hidden="true"></span>
            <span class="name">${label}</span>
            <span class="blocks">${num(Math.round(blocks))}</span>
            <span class="share">${percent(blocks / total)}</span>
          </li>`,
      )}
    </ul>
    ${rows.length > MOST && html`<p class="empty">and ${num(rows.length - MOST)} more</p>`}
  </section>`;
}

function fromCounts(map, counts) {
  const palette = colours(map.colour, map.legend);
  return map.legend.map(([index, label]) => ({
    label,
    colour: palette.get(index),
    blocks: counts[label.replaceAll(" ", "_")] ?? 0,
  }));
}

function fromCells(maps) {
  const rows = new Map();
  for (const map of maps) {
    const palette = colours(map.colour, map.legend);
    const blocks = new Map();
    for (let at = 0; at < map.cells.length; at += 2) {
      const index = map.cells[at];
      blocks.set(index, (blocks.get(index) ?? 0) + map.blocks_per_cell * (map.cells[at + 1] / 255));
    }
    for (const [index, label] of map.legend) {
      const row = rows.get(label) ?? { label, colour: palette.get(index), blocks: 0 };
      row.blocks += blocks.get(index) ?? 0;
      rows.set(label, row);
    }
  }
  const ordered = [...rows.values()];
  const groups = maps[0].colour === "request" || maps[0].colour === "prefix";
  if (groups) ordered.sort((a, b) => isNeutral(a.label) - isNeutral(b.label) || b.blocks - a.blocks);
  if (maps[0].colour === "age") ordered.sort((a, b) => rank(a) - rank(b));
  return ordered;
}
